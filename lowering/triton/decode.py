"""Attention of few queries: how its keys are divided among programs, and what they launch.

The heads that share keys are rows of one tile, so that each key is read once. Where there are too
few programs to fill a GPU, several share the keys of one head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.tilings import MERGE, VARIANTS, Tiling, padded_head_size, split_tiling
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.few_rows import is_decoding
from attn_graph.lowering.triton.launches import Launch
from attn_graph.lowering.triton.layout import Layout
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Buffer

if TYPE_CHECKING:
    from attn_graph.lowering.triton.plan import FlashBuilder

WAVES = 2  # programs of four warps that a multiprocessor runs at once
LEAST_KEYS = 256  # of a part: fewer take as long to merge as to read
FIXED_KEYS = 512  # of a part, where its bits may not depend on the batch
WORTH = 16  # times as many keys as rows: reading them once saves more than merging one part takes
OF_ROWS = ("q_starts_ptr", "q_lengths_ptr", "T", "BATCH")  # of packed queries, which have no parts
TURNS = 3  # of so many sizes Triton's interpreter divides the keys of one


@final
@frozen
class KeyDivision:
    """How the keys of a head are divided: into `parts`, each of at least `each` tiles of keys."""

    tile: Tiling
    rows: int
    parts: int
    each: int

    def shapes(self, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the sums of all parts, and of their lse."""
        lse = (self.parts, problem.B, problem.H, problem.M)
        return (*lse, problem.E), lse

    def scratch(self, problem: Problem) -> int:
        """Bytes of both."""
        return sum(Buffer(shape, torch.float32).bytes for shape in self.shapes(problem))


def divide_keys(
    layout: Layout, target: Target, variant: str | None, most: int | None, invariant: bool
) -> KeyDivision | None:
    """How keys are divided; None where each program takes all keys of a block of queries.

    most: bytes that the parts may take. invariant: whether nothing may depend on the batch.
    """
    p = layout.problem
    if layout.T is not None or not is_decoding(p):
        return None
    rows = p.M * (p.H // p.G)
    tile = choose_split_tiling(p, target, rows, variant)
    tiles = -(-p.N // tile.block_n)
    if invariant:
        each = 2 if target.interprets else FIXED_KEYS // tile.block_n
        return KeyDivision(tile, rows, -(-tiles // each), each)
    if target.interprets:  # it is not fast in any way, so each has its turn
        division = KeyDivision(tile, rows, min(tiles, 1 + p.N % 4), 1)
        worth = (p.M + p.N) % TURNS == 0
    else:
        each = -(-LEAST_KEYS // tile.block_n)
        programs = p.B * p.G * -(-rows // tile.block_m)
        wanted = -(-WAVES * (target.multiprocessors or 1) // programs)
        division = KeyDivision(tile, rows, min(wanted, -(-tiles // each)), each)
        worth = division.parts > 1 or WORTH * rows <= p.N
    while most is not None and division.parts > 1 and division.scratch(p) > most:
        division = evolve(division, parts=division.parts // 2)
    fits = most is None or division.scratch(p) <= most
    return division if worth and fits else None


def choose_split_tiling(problem: Problem, target: Target, rows: int, variant: str | None) -> Tiling:
    """What the table has, or a variant of that; a tile holds all queries."""
    p = problem
    width = padded_head_size(max(p.D, p.E))
    tile = split_tiling(target.sm, p.dtype.itemsize, width, rows)
    if variant is not None:
        tile = VARIANTS[variant](tile)
    return evolve(tile, block_m=max(tile.block_m, padded_head_size(p.M)))


def add_split_forward(builder: FlashBuilder, division: KeyDivision) -> None:
    """Add the launches: of the parts, and of what merges them."""
    p, tile = builder.problem, division.tile
    parts, lse = (Buffer(shape, torch.float32) for shape in division.shapes(p))
    builder.buffers |= {"parts": parts, "parts.lse": lse}
    pointers, absent = builder.operands("q", "k", "v")
    given = builder.common()
    unread = ("keep_scale", "threshold", "origin", "DROPOUT")
    there, sizes = builder.placed()
    absent |= {name: x for name, x in sizes.items() if name not in OF_ROWS}
    absent |= builder.layout.paging()
    pointers |= there
    fixed = {name: x for name, x in given.items() if name not in unread} | {
        "B": p.B,
        "H": p.H,
        "G": p.G,
        "SPLITS": division.parts,
        "EACH": division.each,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "FOLD": not p.low_scale and not p.node.modifiers,
    }
    pointers |= {"parts_ptr": "parts", "parts_lse_ptr": "parts.lse"}
    if builder.data():
        pointers["data"] = builder.data()
    else:
        absent["data"] = None
    grid = p.B * p.G * division.parts * -(-division.rows // tile.block_m)
    texts = builder.texts("keep", "strip", "change")
    launch = Launch("split_forward", grid, pointers, fixed | absent, texts, *tile.options)
    builder.launches += [launch, merge_launch(builder, division)]
    builder.division = describe_division(builder, division)


def merge_launch(builder: FlashBuilder, division: KeyDivision) -> Launch:
    """The launch that merges the parts."""
    p, sinks = builder.problem, builder.problem.by_role.sinks
    pointers, absent = builder.operands("o", "lse", "sinks")
    pointers |= {"parts_ptr": "parts", "parts_lse_ptr": "parts.lse"}
    fixed = {
        "o_strides": builder.layout.strides("o", builder.layout.o()),
        "sinks_stride": sinks.strides[0] if sinks else 0,
        "H": p.H,
        "SPLITS": division.parts,
        "M": p.M,
        "E": p.E,
        "WIDTH_E": padded_head_size(p.E),
        "UPCAST": builder.target.interprets,
    }
    return Launch("merge_parts", p.B * p.H * p.M, pointers, fixed | absent, {}, *MERGE.options)


def describe_division(builder: FlashBuilder, division: KeyDivision) -> str:
    """How the keys are divided, for `explain`, and how long moving everything takes at least."""
    p, tile = builder.problem, division.tile
    keys = max(division.each * tile.block_n, -(-p.N // division.parts))
    shared = f"{p.H // p.G} heads that share keys are rows of one tile; " if p.H > p.G else ""
    scratch, itemsize = division.scratch(p), p.dtype.itemsize
    moved = itemsize * (p.B * p.G * p.N * (p.D + p.E) + p.B * p.H * p.M * (p.D + p.E)) + 2 * scratch
    bandwidth = builder.target.bandwidth
    time = "" if bandwidth is None else f", {moved / bandwidth * 1e3:.2g} ms at its bandwidth"
    count = (
        "one part" if division.parts == 1 else f"{division.parts} parts, which merge_parts joins"
    )
    return (
        f"{shared}keys in {count}, of {keys} each; {format_bytes(scratch)} of partial sums; "
        f"{format_bytes(moved)} moved{time}"
    )
