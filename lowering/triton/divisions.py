"""Programs that share the work of a block, if blocks are too few to fill a GPU.

Programs of o and of dq then share the keys of a block of queries. Programs of dk and dv share the
heads of a group, then the queries of a head. Another kernel joins their results, in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from attrs import evolve, frozen

from attn_graph.lowering.parts import ENOUGH, LEAST, choose_parts, efficiency
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import least_seconds, peak_of
from attn_graph.machine.target import Target
from attn_graph.sparsity.tiles import most_pairs

if TYPE_CHECKING:  # imported on use: predictions need no kernels
    from attn_graph.kernels.tilings import Pass, Tiling

JOINERS: dict[Pass, str] = {
    "forward": "merge_parts joins their parts",
    "query_gradient": "sum_parts adds up their sums",
    "key_gradient": "sum_parts adds up their sums",
}


def least_part(target: Target, block: int) -> int:
    """The positions of the least part. Triton's interpreter has a tile in each."""
    return block if target.interprets else LEAST


@final
@frozen
class Division:
    """The division of a block's work among programs.

    splits: how many programs share the query heads of a group, of dk and dv. parts: how many then
    share the other side's tiles. scratch: bytes of the sums to join. note: for `explain`.
    """

    tile: Tiling
    splits: int = 1
    parts: int = 1
    scratch: int = 0
    note: str = ""

    @property
    def summands(self) -> int:
        """How many sums are put together; 1: programs write results themselves."""
        return self.splits * self.parts


def divide_work(
    padded: Problem, flat: Problem, target: Target, pass_: Pass, tile: Tiling, half: Tiling | None,
    processors: int, room: int | None, *, whole: bool = False, barrier: str = "",
) -> Division:  # fmt: skip
    """The division by the rule above, as far as it is allowed, and saves more than joining takes.
    Otherwise blocks are half as long, if `half` is their tile.

    flat: the problem with packed sequences as one; padded: with each as long as the longest may be.
    room: bytes for the sums; None: no limit. whole: True if one program walks all tiles of a head.
    barrier: another reason against sums.
    """
    p, by_keys = flat, pass_ == "key_gradient"
    least = least_part(target, tile.block_m if by_keys else tile.block_n)
    heads, length, block, line = p.H, p.M, tile.block_m, padded.M
    if by_keys:
        heads, length, block, line = p.G, p.N, tile.block_n, padded.N
    group = p.H // heads
    walked = most_pairs(padded.node.mask, (padded.B, padded.H, padded.G, padded.M, padded.N))
    tiles = 1 if whole else max(1, walked // max(1, padded.B * padded.H * line * least))
    programs = p.B * heads * -(-length // block)
    places = processors * tile.resident
    wanted = choose_parts(programs, places, group * tiles) if programs < processors else 1

    def share(count: int) -> Division:
        splits = -(-group // -(-group // min(count, group)))
        parts = 1 if whole else -(-count // group)
        scratch = scratch_of(p, pass_, splits * parts) if splits * parts > 1 else 0
        return Division(tile, splits, parts, scratch)

    def seconds(way: Division) -> float:
        filled = efficiency(programs * way.summands, places)
        return seconds_of(p, target, pass_, walked, filled, way.scratch)

    best = share(wanted)
    if seconds(best) > ENOUGH * seconds(share(1)):
        return Division(half or tile)
    allowed = 1 if barrier else wanted
    chosen = next(
        way
        for way in map(share, range(allowed, 0, -1))
        if not way.scratch or room is None or way.scratch <= room
    )
    return evolve(chosen, note=division_note(p, pass_, chosen, best, barrier))


def seconds_of(
    problem: Problem, target: Target, pass_: Pass, pairs: int, filled: float, scratch: int
) -> float:
    """Seconds of a launch at best, and of the one that joins its sums; without rates, in units of
    the whole GPU's. filled: the share of the GPU at work."""
    p, bandwidth = problem, target.bandwidth
    peak = peak_of(target, "triton", p.dtype, max(p.D, p.E), backward=pass_ != "forward")
    if peak is None or bandwidth is None:
        return 1 / filled
    widths = {"forward": p.D + p.E, "query_gradient": 2 * p.D + p.E}
    flops = 2 * widths.get(pass_, 2 * (p.D + p.E)) * pairs
    seconds = least_seconds(flops, peak * filled, scratch, bandwidth)
    return seconds + least_seconds(0, peak, scratch, bandwidth, launches=int(scratch > 0))


def division_note(
    problem: Problem, pass_: Pass, chosen: Division, best: Division, barrier: str
) -> str:
    """For `explain`: who joins sums, and any divisions not allowed."""
    which, fewer = (describe_share(way, problem, pass_) for way in (chosen, best))
    note = f"{pass_}: {which}, {JOINERS[pass_]}" if chosen.scratch else ""
    if best != chosen:
        less = f"{pass_}: {which}; it would take less time if {fewer}"
        sums = f"that takes sums of {best.scratch:,} bytes, which max_workspace does not allow"
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
