"""The division of a block's work among programs, if blocks are too few to fill a GPU.

Programs of o and of dq then share the keys of a block of queries. Programs of dk and dv share the
heads of a group, then the queries of a head. Another kernel joins their results, in a fixed order.
The number is by the rule of flash-decoding, `num_splits_heuristic` of csrc/flash_attn/flash_api.cpp
in github.com/Dao-AILab/flash-attention, applied to all launches: the fewest sums with little more
time than with any number, at best by the rates of rates.toml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import final

from attrs import evolve, field, frozen

from attn_graph.kernels.tilings import Pass, Tiling
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import least_seconds, peak_of
from attn_graph.lowering.triton.few_rows import ENOUGH, FILLED, useful_parts
from attn_graph.lowering.triton.programs import (
    WAVES,
    Programs,
    count_programs,
    processors_of,
)
from attn_graph.lowering.triton.tiles import short_tiling
from attn_graph.machine.target import Target

INTERPRETED: dict[Pass, tuple[int, ...]] = {  # parts taken in turn by Triton's interpreter
    "forward": (2,),
    "query_gradient": (2,),
    "key_gradient": (2, 4, 8),
}
Costs = Mapping[Tiling, Sequence[float]]
JOINERS: dict[Pass, str] = {
    "forward": "merge_parts joins their parts",
    "query_gradient": "sum_parts adds up their sums",
    "key_gradient": "sum_parts adds up their sums",
}


@final
@frozen
class Division:
    """The division of a block's work among programs: equal by tile, splits and parts.

    splits: how many programs share the query heads of a group, of dk and dv. parts: how many then
    share the other side's tiles. scratch: bytes of the sums to join. note: for `explain`.
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
        """A division of at most two parts, with the launches of any number of them."""
        return evolve(self, parts=min(self.parts, 2))

    def programs(self, problem: Problem, pass_: Pass, costs: Sequence[float]) -> Programs:
        """The programs of one head, for tiles of each block."""
        p, heads, each = problem, problem.H, 1
        if pass_ == "key_gradient":
            heads, each = p.G, -(-(p.H // p.G) // self.splits)
        walked = [each * (cost if self.parts == 1 else ceil(cost / self.parts)) for cost in costs]
        return Programs(tuple(walked), p.B * heads * self.summands)


def may_divide(
    problem: Problem, target: Target, tile: Tiling, pass_: Pass, *, whole: bool = False
) -> bool:
    """True if programs are few enough for dividing their work to take less time. Programs of a
    narrow mask's short tile have little to do.

    whole: True if one program walks all tiles of a head.
    """
    processors, grouped = processors_of(target), problem.H > problem.G
    if processors is None or (whole and not (grouped and pass_ == "key_gradient")):
        return False
    if tile == short_tiling(problem, target, pass_):
        return False
    count = count_programs(problem, tile, pass_ == "key_gradient")
    return target.interprets or count <= WAVES * processors


def divide_work(
    problem: Problem, target: Target, pass_: Pass, costs: Costs, room: int | None, *,
    whole: bool = False, barrier: str = "",
) -> Division:  # fmt: skip
    """The division by the rule above, among the allowed ones.

    costs: the tiles of each block, by tile: of the first, as parts have it, and of others. room:
    bytes for the sums; None: no limit. whole: as above. barrier: another reason against sums.
    """
    ways = list_divisions(problem, target, pass_, costs, whole)
    possible = [
        way for way in ways
        if not way.scratch or not (barrier or (room is not None and way.scratch > room))
    ]  # fmt: skip
    if target.interprets:  # it is not fast in any way, so each has its turn
        return possible[(problem.M + problem.N) % len(possible)]
    best = pick_division(ways, problem, target, pass_, costs)
    chosen = best
    if best not in possible:
        chosen = pick_division(possible, problem, target, pass_, costs)
    return evolve(chosen, note=division_note(problem, pass_, chosen, best, barrier))


def list_divisions(
    problem: Problem, target: Target, pass_: Pass, costs: Costs, whole: bool
) -> list[Division]:
    """All candidates, fewer sums first: of dk and dv with ever fewer query heads a program, then,
    unless `whole`, with ever fewer queries of one."""
    tile = next(iter(costs))
    group, useful = problem.H // problem.G, useful_parts(ceil(max(costs[tile])))
    parts: Sequence[int] = INTERPRETED[pass_] if target.interprets else useful
    if pass_ != "key_gradient":
        counts = [(1, n) for n in parts]
    else:
        eachs = dict.fromkeys(-(-group // 2**n) for n in range(1, 1 + (group - 1).bit_length()))
        counts = [(-(-group // each), 1) for each in eachs]
        counts += [] if whole else [(group, n) for n in parts]
    return [Division(tile) for tile in costs] + [
        Division(tile, *count, scratch_of(problem, pass_, prod(count))) for count in counts
    ]


def pick_division(
    ways: Sequence[Division], problem: Problem, target: Target, pass_: Pass, costs: Costs
) -> Division:
    """The first if its programs leave little of the GPU idle, or else the first with launches
    almost as fast as any. Without known rates it is by the efficiency of waves alone, and the first
    if as many as its longest program nearly fill the GPU."""
    processors = processors_of(target)
    assert processors is not None  # else nothing is divided
    programs = [way.programs(problem, pass_, costs[way.tile]) for way in ways]
    if programs[0].total >= ENOUGH * processors * programs[0].makespan(processors):
        return ways[0]
    scores = [
        x.makespan(processors) * way.tile.block_m * way.tile.block_n
        for x, way in zip(programs, ways, strict=True)
    ]
    times = [seconds_of(*x, problem, target, pass_) for x in zip(ways, scores, strict=True)]
    known = [time for time in times if time is not None]
    if not known and programs[0].total >= FILLED * processors * max(programs[0].costs):
        return ways[0]
    goal = min(known or scores) / ENOUGH
    return next(w for w, x in zip(ways, known or scores, strict=True) if x <= goal)


def seconds_of(
    way: Division, scores: float, problem: Problem, target: Target, pass_: Pass
) -> float | None:
    """Seconds of all launches, at best; None without a rate. scores: of each multiprocessor."""
    p, processors, bandwidth = problem, target.multiprocessors, target.bandwidth
    peak = peak_of(target, "triton", p.dtype, max(p.D, p.E), backward=pass_ != "forward")
    if peak is None or bandwidth is None or processors is None:
        return None
    widths = {"forward": p.D + p.E, "query_gradient": 2 * p.D + p.E}
    flops = 2 * widths.get(pass_, 2 * (p.D + p.E)) * scores * processors
    seconds = least_seconds(flops, peak, way.scratch, bandwidth)
    if not way.scratch:
        return seconds
    return seconds + least_seconds(0, peak, way.scratch, bandwidth, launches=1)


def division_note(
    problem: Problem, pass_: Pass, chosen: Division, best: Division, barrier: str
) -> str:
    """For `explain`: who joins sums, and any divisions not allowed."""
    which, fewer = (describe_share(way, problem, pass_) for way in (chosen, best))
    note = f"{pass_}: {which}, {JOINERS[pass_]}" if chosen.scratch else ""
    if best != chosen:
        less = f"{pass_}: {which}; it would take less time if {fewer}"
        sums = f"that takes sums of {best.scratch} bytes, which max_workspace does not allow"
        note = f"{less}, but {barrier or sums}"
    return note


def describe_share(way: Division, problem: Problem, pass_: Pass) -> str:
    """The share of one program in the work of a block."""
    if pass_ != "key_gradient":
        shared = f"{way.parts} programs share" if way.parts > 1 else "one program takes"
        return f"{shared} the keys of a block of queries"
    group = problem.H // problem.G
    each = -(-group // way.splits)
    heads = f"each program takes {each} of the {group} query heads of a key/value head"
    return heads if way.parts == 1 else f"{way.parts} programs share the queries of a head"


def scratch_of(problem: Problem, pass_: Pass, summands: int) -> int:
    """Bytes of `summands` sums, in float32: dk and dv, dq, or o with its lse as two numbers."""
    p = problem
    if pass_ == "forward":
        return 4 * p.B * p.H * summands * p.M * (p.E + 2)
    if pass_ == "query_gradient":
        return 4 * p.B * p.H * summands * p.M * p.D
    assert p.grad is not None
    width = p.D * p.grad.wants[1] + p.E * p.grad.wants[2]
    return 4 * p.B * p.G * summands * p.N * width
