"""How the work of a block is divided among programs, where blocks are too few to fill a GPU.

Programs of o and of dq then share the keys that a block of queries sees, programs of dk and dv the
queries of a block of keys. Another kernel puts together what they give, in a fixed order. All times
are those of programs.py, and here in scores: what all multiprocessors compute of them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import final

from attrs import evolve, field, frozen

from attn_graph.kernels.tilings import Pass, Tiling, table_arch
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.predict import L2, PROCESSORS
from attn_graph.lowering.triton.programs import (
    FULL,
    LONE,
    MANY,
    Places,
    Programs,
    heads_together,
    mean_costs,
    places_of,
    schedule_programs,
    start_of,
)
from attn_graph.machine.target import Target
from attn_graph.spec import NAMES

GAIN = 0.97  # of the time: what a division has to come below
NEARLY = 1.05  # times as long for a score as the tile of many programs: what parts may have
PARTS = (2, 4, 8)  # programs that share the queries of one head
MOST_PARTS = 8  # programs that share the keys of a block, each number of which is considered
INTERPRETED = (2,)  # programs that share keys in Triton's interpreter
MOST_WAVES = 16  # that programs which share keys may fill
LAUNCH = 3e-6  # seconds until a kernel that waits for another one begins
FLOPS_A_BYTE = 200.0  # of a GPU of unknown rates
REACHED = 0.5  # of the peak, by the kernels
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
    """Whether there are so few programs that dividing their work, or another tile, may take less
    time.

    whole: whether one program walks all tiles of a head.
    """
    places, grouped = places_of(problem, target, tile, pass_), problem.H > problem.G
    if places is None or (whole and not (grouped and pass_ == "key_gradient")):
        return False
    return target.interprets or count_programs(problem, tile, pass_) <= MANY * places.count


def divide_work(
    problem: Problem, target: Target, pass_: Pass, costs: Mapping[Tiling, Sequence[float]],
    room: int | None, *, slower: Mapping[Tiling, float], whole: bool = False, barrier: str = "",
) -> Division:  # fmt: skip
    """The division that is done first: less work a program is more programs, and more sums.

    costs: of each block, by tile: that of many programs, then others. slower: how many times as
    long as the first they take for a score. room: bytes that the sums may take; None: as many as
    they need. whole: as above. barrier: what else does not allow sums.
    """
    ways = list_divisions(problem, target, pass_, slower, whole)
    possible = [
        way for way in ways
        if not way.scratch or not (barrier or (room is not None and way.scratch > room))
    ]  # fmt: skip
    if target.interprets:  # it is not fast in any way, so each has its turn
        return possible[(problem.M + problem.N) % len(possible)]

    def schedule(way: Division) -> Schedule:
        return Schedule.of(problem, target, pass_, costs[way.tile], way, slower[way.tile])

    def joining(way: Division) -> float:
        return joining_time(problem, target, pass_, way)

    best = pick_fastest(ways, schedule, joining)
    chosen = best if best in possible else pick_fastest(possible, schedule, joining)
    return evolve(chosen, note=division_note(problem, pass_, chosen, best, barrier))


def choose_spread(
    flat: Problem, padded: Problem, target: Target, pass_: Pass, tiles: Mapping[Tiling, float]
) -> Tiling:
    """The tile that is done first where all blocks have as much to do.

    flat, padded: as `mean_costs` takes them. tiles: as `divide_work` takes `slower`.
    """
    usual, by_keys = next(iter(tiles)), pass_ == "key_gradient"
    if not may_divide(flat, target, usual, pass_):
        return usual
    costs = {x: mean_costs(flat, padded, x, by_keys) for x in tiles}
    return divide_work(flat, target, pass_, costs, None, slower=tiles).tile


def list_divisions(
    problem: Problem, target: Target, pass_: Pass, tiles: Mapping[Tiling, float], whole: bool
) -> list[Division]:
    """All that are considered: those without sums, of each tile, then those with sums, of at most
    one, so that few kernels are compiled: the largest of those NEARLY as fast has the fewest sums.

    tiles: as `divide_work` takes `slower`.
    """
    nearly = [x for x in tiles if tiles[x] <= NEARLY]
    if not nearly:
        return [Division(tile) for tile in tiles]
    divided = max(nearly, key=lambda x: x.block_m * x.block_n)
    if pass_ == "key_gradient":
        counts = share_queries(problem.H // problem.G, whole)[1:]
    else:
        counts = [(1, parts) for parts in share_keys(problem, target, divided, pass_)]
    return [Division(tile) for tile in tiles] + [
        Division(divided, *way, scratch_of(problem, pass_, prod(way))) for way in counts
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
    places = places_of(problem, target, tile, pass_)
    assert places is not None  # else nothing is divided
    programs, tiles = count_programs(problem, tile, pass_), -(-problem.N // tile.block_n)
    enough = max(2, -(-places.processors // programs))
    counts, full = [*range(enough, MOST_PARTS + 1)], 0.0
    for waves in range(1, MOST_WAVES + 1):
        parts = waves * places.count // programs
        if parts * programs > full * waves * places.count:
            counts.append(parts)
            full = parts * programs / (waves * places.count)
    return sorted(n for n in {*counts} if 1 < n <= tiles)


def pick_fastest(
    ways: Sequence[Division], schedule: Callable[[Division], Schedule],
    joining: Callable[[Division], float],
) -> Division:  # fmt: skip
    """The fastest; where that is nearly as fast, the fastest without sums, or the first of all.

    joining: as `joining_time`. Most are ruled out without a schedule: what they compute is at least
    what undivided programs of the same tile do, in as many places, and they join sums besides.
    """
    whole = {way.tile: schedule(way) for way in ways if not way.scratch}
    best, least = ways[0], whole[ways[0].tile].time()
    for sums in (False, True):
        limit = GAIN * least
        for way in (x for x in ways[1:] if bool(x.scratch) == sums):
            if whole[way.tile].mean_time() + joining(way) < limit:
                programs = schedule(way) if sums else whole[way.tile]
                if programs.least_time() < limit and (time := programs.time()) < limit:
                    best, least, limit = way, time, time
    return best


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
    """Bytes of so many sums, in float32: dk and dv, dq, or o with its lse as two numbers."""
    p = problem
    if pass_ == "forward":
        return 4 * p.B * p.H * summands * p.M * (p.E + 2)
    if pass_ == "query_gradient":
        return 4 * p.B * p.H * summands * p.M * p.D
    assert p.grad is not None
    width = p.D * p.grad.wants[1] + p.E * p.grad.wants[2]
    return 4 * p.B * p.G * summands * p.N * width


@final
@frozen
class Schedule:
    """What a division has to do, and where.

    Times are in scores that all multiprocessors compute with all warps: score, that of one score of
    a program; joining, that of the sums.
    """

    programs: Programs
    places: Places
    score: float
    joining: float

    @classmethod
    def of(
        cls, problem: Problem, target: Target, pass_: Pass, costs: Sequence[float], way: Division,
        slower: float,
    ) -> Schedule:  # fmt: skip
        """costs, slower: as `divide_work` takes them, of the division's tile."""
        p, tile = problem, way.tile
        places = places_of(p, target, tile, pass_)
        assert places is not None  # else nothing is divided
        together = heads_together(p, target, tile, pass_, way.splits, way.parts)
        heads, each = p.H, 1
        if pass_ == "key_gradient":
            heads, each = p.G, -(-(p.H // p.G) // way.splits)
        heads *= p.B * way.summands
        order = heads, each, together, way.parts
        programs = schedule_programs(costs, start_of(target, tile), *order)
        scores = tile.block_m * tile.block_n * places.count
        few = LONE if places.each * tile.warps < FULL else 1.0
        return cls(programs, places, slower * few * scores, joining_time(p, target, pass_, way))

    def time(self) -> float:
        """The makespan of the programs, and the time to write and read their sums."""
        return self.programs.quick_makespan(self.places) * self.score + self.joining

    def mean_time(self) -> float:
        """What the programs take if nothing waits."""
        return self.programs.total / self.places.count * self.score

    def least_time(self) -> float:
        """What that is not below, without simulation."""
        return self.programs.least_makespan(self.places) * self.score + self.joining


def joining_time(problem: Problem, target: Target, pass_: Pass, way: Division) -> float:
    """The time to write and to read sums and to begin the kernel that does: in scores that all
    multiprocessors compute."""
    if not way.scratch:
        return 0.0
    p, peak = problem, target.peak(NAMES[problem.dtype])
    widths = {"forward": p.D + p.E, "query_gradient": 2 * p.D + p.E}
    flops = 2 * widths.get(pass_, 2 * (p.D + p.E))  # of a score
    if peak is None or target.bandwidth is None:
        return 2 * way.scratch * FLOPS_A_BYTE * REACHED / flops
    seconds = LAUNCH + 2 * way.scratch / bandwidth_of(target, way.scratch)
    return seconds * peak * REACHED / flops


def bandwidth_of(target: Target, size: int) -> float:
    """Bytes a second at which so many are written, and then read: if half of the L2 cache holds
    them, at least half of what that is taken to send while nothing is written."""
    processor = PROCESSORS.get(target.sm, PROCESSORS[table_arch(target.sm)])
    assert target.bandwidth is not None
    assert target.multiprocessors is not None
    cached = L2 / 2 * target.multiprocessors * processor.clock
    fits = target.l2 is not None and 2 * size <= target.l2
    return max(target.bandwidth, cached if fits else 0.0)
