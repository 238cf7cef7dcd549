"""How the work of a block is divided among programs, where blocks are too few to fill a GPU.

Programs of o and of dq then share the keys that a block of queries sees, programs of dk and dv the
queries of a block of keys. Another kernel puts together what they give, in a fixed order. All times
are those of programs.py, and here in scores: what one multiprocessor computes of them meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from attrs import evolve, field, frozen

from attn_graph.kernels.tilings import Pass, Tiling, table_arch
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.programs import (
    MANY,
    heads_together,
    places_of,
    schedule_programs,
)
from attn_graph.machine.target import Target
from attn_graph.spec import NAMES

GAIN = 0.97  # of the time: what a division has to come below
PARTS = (2, 4, 8)  # programs that share the queries of one head, or the keys of a block
INTERPRETED = (2,)  # programs that share keys in Triton's interpreter
MOST_WAVES = 16  # that programs which share keys may fill
LAUNCH = 3e-6  # seconds until a kernel that waits for another one begins
FLOPS_A_BYTE = 200.0  # of a GPU of unknown rates
REACHED = 0.5  # of the peak, by the kernels
ALONE = {90: 0.6, 120: 0.7}  # of the time of two programs that share a multiprocessor, at least:
# what one takes that is alone on it, by lowering/triton/predict.py; elsewhere it gains nothing
JOINERS: dict[Pass, str] = {
    "forward": "merge_parts joins their parts",
    "query_gradient": "sum_parts adds up their sums",
    "key_gradient": "sum_parts adds up their sums",
}


@final
@frozen
class Division:
    """How the work of a block is divided among programs: equal by tile, splits and parts.

    splits: how many programs share the query heads of a group, of dk and dv. parts: how many then
    share the other side's tiles. scratch: bytes of the sums that are to be put together. note: for
    `explain`.
    """

    tile: Tiling
    splits: int = 1
    parts: int = 1
    scratch: int = field(default=0, eq=False)
    note: str = field(default="", eq=False)

    @property
    def summands(self) -> int:
        """How many sums are put together; 1: programs write results themselves."""
        return self.splits * self.parts

    def of_few_parts(self) -> Division:
        """The same of at most two parts: what launches it takes, however many there are."""
        return evolve(self, parts=min(self.parts, 2))


def count_programs(problem: Problem, tile: Tiling, pass_: Pass) -> int:
    """How many there are where nothing is divided."""
    p = problem
    if pass_ == "key_gradient":
        return p.B * p.G * -(-p.N // tile.block_n)
    return p.B * p.H * -(-p.M // tile.block_m)


def may_divide(
    problem: Problem, target: Target, tile: Tiling, pass_: Pass, *, whole: bool = False
) -> bool:
    """Whether there are so few programs that dividing their work may take less time.

    whole: whether one program walks all tiles of a head.
    """
    places, grouped = places_of(problem, target, tile), problem.H > problem.G
    if places is None or (whole and not (grouped and pass_ == "key_gradient")):
        return False
    return target.interprets or count_programs(problem, tile, pass_) <= MANY * places


def divide_work(
    problem: Problem, target: Target, pass_: Pass, costs: Mapping[Tiling, Sequence[float]],
    room: int | None, *, whole: bool = False, barrier: str = "",
) -> Division:  # fmt: skip
    """The division that is done first: less work a program is more programs, and more sums.

    costs: of each block, by tile: that of undivided work, then that of divided work if it is
    another. room: bytes that the sums may take; None: as many as they need. whole: as above.
    barrier: what else does not allow a division.
    """
    ways = list_divisions(problem, target, pass_, [*costs], whole)
    possible = [way for way in ways if room is None or way.scratch <= max(room, 0)]
    possible = possible[:1] if barrier else possible
    if target.interprets:  # it is not fast in any way, so each has its turn
        return possible[(problem.M + problem.N) % len(possible)]
    times = {way: division_time(problem, target, pass_, costs[way.tile], way) for way in ways}
    best, chosen = pick_fastest(ways, times), pick_fastest(possible, times)
    return evolve(chosen, note=division_note(problem, pass_, chosen, best, barrier))


def list_divisions(
    problem: Problem, target: Target, pass_: Pass, tiles: Sequence[Tiling], whole: bool
) -> list[Division]:
    """All that are considered, the first without sums."""
    if pass_ == "key_gradient":
        counts = [(tiles[0], *way) for way in share_queries(problem.H // problem.G, whole)]
    else:
        shared = share_keys(problem, target, tiles[-1], pass_)
        counts = [(tiles[0], 1, 1), *((tiles[-1], 1, parts) for parts in shared)]
    return [
        Division(*way, scratch_of(problem, pass_, way[1] * way[2]) if way[1] * way[2] > 1 else 0)
        for way in counts
    ]


def share_queries(group: int, whole: bool) -> list[tuple[int, int]]:
    """Splits and parts of dk and dv: ever fewer query heads a program, then, unless `whole`, ever
    fewer queries of one."""
    eachs = dict.fromkeys(-(-group // 2**n) for n in range(1 + (group - 1).bit_length()))
    counts = [(-(-group // each), 1) for each in eachs]
    return counts + ([] if whole else [(group, parts) for parts in PARTS])


def share_keys(problem: Problem, target: Target, tile: Tiling, pass_: Pass) -> list[int]:
    """How many programs may share the keys of a block: some that fill the GPU, and all that leave
    fewer places free than fewer do."""
    if target.interprets:
        return [*INTERPRETED]
    places = places_of(problem, target, tile)
    assert places is not None  # else nothing is divided
    programs, tiles = count_programs(problem, tile, pass_), -(-problem.N // tile.block_n)
    counts, full = [parts for parts in PARTS if parts * programs >= places], 0.0
    for waves in range(1, MOST_WAVES + 1):
        parts = waves * places // programs
        if parts * programs > full * waves * places:
            counts.append(parts)
            full = parts * programs / (waves * places)
    return sorted(n for n in {*counts} if 1 < n <= tiles)


def pick_fastest(ways: Sequence[Division], times: dict[Division, float]) -> Division:
    """The fastest, or the first, which is without sums, where that is nearly as fast."""
    best = min(ways, key=times.__getitem__)
    return best if times[best] < GAIN * times[ways[0]] else ways[0]


def division_note(
    problem: Problem, pass_: Pass, chosen: Division, best: Division, barrier: str
) -> str:
    """What `explain` says of a division: who puts sums together, and what was not allowed."""
    which, fewer = (describe_share(way, problem, pass_) for way in (chosen, best))
    note = f"{pass_}: {which}, {JOINERS[pass_]}" if chosen.scratch else ""
    if best != chosen:
        less = f"{pass_}: {which}; it would take less time if {fewer}"
        sums = f"that takes sums of {best.scratch} bytes, which max_workspace does not allow"
        note = f"{less}, but {barrier or sums}"
    return note


def describe_share(way: Division, problem: Problem, pass_: Pass) -> str:
    """What of the work of a block one program takes."""
    if pass_ != "key_gradient":
        shared = f"{way.parts} programs share" if way.parts > 1 else "one program takes"
        return f"{shared} the keys of a block of queries"
    group = problem.H // problem.G
    each = -(-group // way.splits)
    heads = f"each program takes {each} of the {group} query heads of a key/value head"
    return heads if way.parts == 1 else f"{way.parts} programs share the queries of a head"


def scratch_of(problem: Problem, pass_: Pass, summands: int) -> int:
    """Bytes of so many sums, in float32: dk and dv, dq, or o with its lse."""
    p = problem
    if pass_ == "forward":
        return 4 * p.B * p.H * summands * p.M * (p.E + 1)
    if pass_ == "query_gradient":
        return 4 * p.B * p.H * summands * p.M * p.D
    assert p.grad is not None
    width = p.D * p.grad.wants[1] + p.E * p.grad.wants[2]
    return 4 * p.B * p.G * summands * p.N * width


def division_time(
    problem: Problem, target: Target, pass_: Pass, costs: Sequence[float], way: Division
) -> float:
    """The makespan of the programs, and the time to write and read their sums."""
    p, tile, by_keys = problem, way.tile, pass_ == "key_gradient"
    places, count = places_of(p, target, tile), target.multiprocessors
    assert places is not None  # else nothing is divided
    assert count is not None
    together = heads_together(p, target, tile, by_keys, way.splits, way.parts)
    heads, each = (p.G, -(-(p.H // p.G) // way.splits)) if by_keys else (p.H, 1)
    heads *= p.B * way.summands
    programs = schedule_programs(costs, tile, heads, each, together, way.parts)
    held = places // count
    alone = held > 1 and programs.count <= count
    share = held * (ALONE.get(table_arch(target.sm), 1.0) if alone else 1.0)
    computing = programs.quick_makespan(places) * tile.block_m * tile.block_n * share
    return computing + joining_time(p, target, pass_, way) / count


def joining_time(problem: Problem, target: Target, pass_: Pass, way: Division) -> float:
    """The time to write and to read sums and to begin the kernel that does: in scores that all
    multiprocessors compute."""
    p, peak = problem, target.peak(NAMES[problem.dtype])
    known = peak is not None and target.bandwidth is not None
    rate = peak / target.bandwidth if known else FLOPS_A_BYTE  # type: ignore[operator]
    launch = LAUNCH * peak if way.scratch and peak is not None else 0.0
    widths = {"forward": p.D + p.E, "query_gradient": 2 * p.D + p.E}
    flops = 2 * widths.get(pass_, 2 * (p.D + p.E))  # of a score
    return (2 * way.scratch * rate + launch) * REACHED / flops
