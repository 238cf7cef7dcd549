"""The work of a block, or the keys of few queries, shared by several programs: fewer would leave a
GPU idle.

Programs of o and of dq share the keys of a block of queries. Programs of dk and dv share the heads
of a group, then the queries of a head. Another kernel joins their results, in a fixed order. Of few
queries, the heads on one key are rows of one tile, so each key is read once; if programs are too
few to fill a GPU, several share the keys of one head.
"""

from __future__ import annotations

from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.tilings import (
    HELD,
    VARIANTS,
    Pass,
    Tiling,
    padded_head_size,
    split_tiling,
)
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.parts import (
    ENOUGH,
    LEAST,
    WORTH,
    choose_parts,
    efficiency,
    is_decoding,
    short_rows,
)
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import least_seconds, peak_of
from attn_graph.lowering.triton.places import row_lines
from attn_graph.lowering.triton.programs import places_of, reads_v_in_k, table_width
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Buffer
from attn_graph.sparsity.tiles import most_pairs

JOINERS: dict[Pass, str] = {
    "forward": "merge_parts joins their parts",
    "query_gradient": "sum_parts adds up their sums",
    "key_gradient": "sum_parts adds up their sums",
}
FIXED_KEYS = 512  # of a part, if its bits may not depend on the batch
PARTS, PARTS_LSE = "parts", "parts.lse"  # buffers: sums of all parts, and their lse


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


@final
@frozen
class KeyDivision:
    """How the keys of a head are divided: into `parts`, each of at least `each` tiles of keys.

    queries: the most of a sequence. short: `queries` where other launches have longer sequences, or
    0.
    """

    tile: Tiling
    queries: int
    parts: int
    each: int
    short: int = 0

    def scratch(self, lying: Lying) -> int:
        """Bytes of the sums of all parts, and of their lse."""
        parts = parts_buffers(lying, self.parts, self.short)
        return sum(buffer.bytes for buffer in parts.values())


def divide_keys(
    lying: Lying, target: Target, variant: str | None, most: int | None, invariant: bool
) -> KeyDivision | None:
    """The division of keys; None if each program takes all keys of a block of queries.

    most: bytes for the parts. invariant: True if nothing may depend on the batch.
    """
    p, short = lying.problem, short_rows(lying)
    if not is_decoding(p) and not short:
        return None
    M = short or p.M
    rows = (1 if short else M) * (p.H // p.G)  # tiles are for one query where others are longer
    tile = choose_split_tiling(p, target, rows, M, variant)
    if tile.block_m < M:
        return None
    tiles = -(-p.N // tile.block_n)
    if invariant:
        each = 2 if target.interprets else FIXED_KEYS // tile.block_n
        return KeyDivision(tile, M, 1 if short else -(-tiles // each), each, short)
    each = -(-least_part(target, tile.block_n) // tile.block_n)
    blocks = p.B * -(-rows // tile.block_m)
    if lying.T is not None and not short:  # sequences may be shorter than the longest
        blocks = min(blocks, p.B + lying.T * rows // (p.M * tile.block_m))
    programs = blocks * p.G
    parts = choose_parts(programs, places_of(target, tile) or 1, -(-tiles // each))
    division = KeyDivision(tile, M, parts, each, short)
    worth = division.parts > 1 or WORTH * rows <= p.N
    while most is not None and division.parts > 1 and division.scratch(lying) > most:
        division = evolve(division, parts=division.parts // 2)
    fits = most is None or division.scratch(lying) <= most
    return division if worth and fits else None


def choose_split_tiling(
    problem: Problem, target: Target, rows: int, queries: int, variant: str | None
) -> Tiling:
    """The table's tiling, or a variant. A tile holds all queries, unless heads are wide."""
    p = problem
    tile = split_tiling(target.sm, p.dtype.itemsize, table_width(p), rows)
    if variant is not None:
        tile = VARIANTS[variant](tile)
    if table_width(p) == HELD:
        return tile
    return evolve(tile, block_m=max(tile.block_m, padded_head_size(queries)))


def parts_buffers(lying: Lying, parts: int, short: int = 0) -> dict[str, Buffer]:
    """Sums of o of each part and head, and their lse as two numbers. short: so many rows of each
    sequence have parts; 0: all rows."""
    B, H, M = row_lines(lying)
    M = lying.problem.B * short or M
    lse = B, H * parts, M
    shapes = {PARTS: (*lse, lying.problem.E), PARTS_LSE: (*lse, 2)}
    return {name: Buffer(shape, torch.float32) for name, shape in shapes.items()}


def describe_division(lying: Lying, target: Target, division: KeyDivision) -> str:
    """How the keys are divided, for `explain`, and how long moving everything takes at least."""
    p, tile, flat = lying.problem, division.tile, lying.flat
    keys = max(division.each * tile.block_n, -(-p.N // division.parts))
    shared = f"{p.H // p.G} heads that share keys are rows of one tile; " if p.H > p.G else ""
    if division.short:
        shared = f"sequences of up to {division.short} queries have programs of their own: {shared}"
    scratch, itemsize = division.scratch(lying), p.dtype.itemsize
    _, k, v, *_ = (x.dtype.itemsize for x in p.specs)
    key = k * p.D + (0 if reads_v_in_k(p) else v * p.E)
    keys_read = p.G * (p.B * p.N if lying.T_keys is None else lying.T_keys) * key
    moved = keys_read + itemsize * flat.B * p.H * flat.M * (p.D + p.E) + 2 * scratch
    bandwidth = target.bandwidth
    time = "" if bandwidth is None else f", {moved / bandwidth * 1e6:.3g} µs at its bandwidth"
    parts = f"{division.parts} parts of {keys} keys, joined by merge_parts"
    return (
        f"{shared}{parts if division.parts > 1 else 'all keys in one part'}; "
        f"{format_bytes(scratch)} of partial sums; "
        f"{format_bytes(moved)} moved{time}"
    )
