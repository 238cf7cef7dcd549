"""Attention of few queries: the division of its keys among programs, and their launches.

The heads on one key are rows of one tile, so each key is read once. If programs are too few to fill
a GPU, several share the keys of one head.
"""

from __future__ import annotations

from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.tilings import (
    HELD,
    VARIANTS,
    Tiling,
    padded_head_size,
    split_tiling,
)
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.parts import WORTH, choose_parts, is_decoding, short_rows
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.divisions import least_part
from attn_graph.lowering.triton.places import row_lines
from attn_graph.lowering.triton.programs import places_of, reads_v_in_k, table_width
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Buffer

FIXED_KEYS = 512  # of a part, if its bits may not depend on the batch
PARTS, PARTS_LSE = "parts", "parts.lse"  # buffers: sums of all parts, and their lse


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
