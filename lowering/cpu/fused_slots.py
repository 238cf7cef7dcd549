"""Tiles of the fused kernel, made ready for calls: their slices and their addends.

Everything independent of a call's tensors is computed once, when the executable is built, so a call
does little more in Python than to call the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.modifiers import change_
from attn_graph.kernels.fused_cpu import find_unseen
from attn_graph.kernels.hiding import fill_hidden, hide_, hiding_bits
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem
from attn_graph.masks.places import Block, Place
from attn_graph.sparsity.parts import Cut, Part, Tile, cut_ranges
from attn_graph.spec import INF

Addends = dict[tuple[int, ...], torch.Tensor]  # by where their parts are, and how large


@final
@frozen(eq=False)
class PartSlot:
    """A part of a tile. keys: cuts its keys out of x [B,G,N,D]. pieces: of a gradient, if it can't
    be added to the keys at once, pieces [start, stop) of them, each with its cut: the runs of
    gathered keys, or keys of a repeating tile, without an overlap with the next repeat's.

    causal: True if query i keeps the keys up to i. addend: of the scores, if the plan holds it;
    makes: True if each call has to make it, of this shape and count of elements. empties: True if a
    row may see none of the part's keys; unseen: these rows, of a held addend.
    """

    part: Part
    keys: Cut
    pieces: tuple[tuple[int, int, Cut], ...]
    causal: bool
    makes: bool
    shape: tuple[int, ...]
    count: int
    empties: bool
    addend: torch.Tensor | None = None
    unseen: torch.Tensor | None = None


@final
@frozen(eq=False)
class TileSlot:
    """A tile. rows: cuts its queries out of x [B,H,M,...]."""

    tile: Tile
    rows: Cut
    parts: tuple[PartSlot, ...]


def held_addend(
    tiles: FusedTiles, tile: Tile, part: Part, shape: Sequence[int], held: Addends
) -> torch.Tensor:
    """The addend of a part, made once for all parts with equal ones."""
    p, node, (b, h, *_) = tiles.problem, tiles.problem.node, shape
    outline = tile.batch.start * ("b" in tiles.axes), *tiles.corner(tile, part), *shape
    if outline not in held:
        room = torch.empty(shape, dtype=p.wide, device="cpu")
        here = Block(tile.batch[:b], tile.heads[:h], tile.rows, p.H, p.M, p.N, {})
        at = Place.of(here, range(part.start, part.stop), torch.device("cpu"))
        mixed, nothing = part.kind == "mixed", [dict[str, torch.Tensor]()] * len(node.modifiers)
        held[outline] = fill_addend(room, node, nothing, at, mixed)
    return held[outline]


def tile_slot(tiles: FusedTiles, tile: Tile, held: Addends | None) -> TileSlot:
    """held: the addends held by the plan; None if each call makes its own."""
    p, parts = tiles.problem, tuple([part_slot(tiles, tile, x, held) for x in tile.parts])
    return TileSlot(tile, find_cut(tile, tile.rows, tile.heads, (p.B, p.H, p.M)), parts)


def part_slot(tiles: FusedTiles, tile: Tile, part: Part, held: Addends | None) -> PartSlot:
    p = tiles.problem
    adds = part.kind == "mixed" or bool(p.node.modifiers)
    keys = cut_keys(p, tile, range(part.start, part.stop))
    if part.gathered:
        keys = gathering_cut(part, keys)
    shape: tuple[int, ...] = ()
    addend = None
    if adds:  # alike in all entries and heads unless it depends on them
        b = len(tile.batch) if "b" in tiles.axes else 1
        h = len(tile.heads) if "h" in tiles.axes else 1
        shape = b, h, len(tile.rows), len(part)
        addend = None if held is None else held_addend(tiles, tile, part, shape, held)
    makes = adds and held is None
    causal, empties = part.kind == "causal", adds and may_empty(tiles, tile, part)
    unseen = find_unseen(addend) if empties and addend is not None else None
    pieces = () if p.grad is None else tuple(pieces_of(p, tile, part))
    return PartSlot(part, keys, pieces, causal, makes, shape, prod(shape), empties, addend, unseen)


def may_empty(tiles: FusedTiles, tile: Tile, part: Part) -> bool:
    """True if a query may see none of a part's keys. Queries mostly see some key of a tile's only
    part."""
    if part.kind == "mixed":
        return tiles.blind or len(tile.parts) > 1
    return any(modifier.hides for modifier in tiles.problem.node.modifiers)


def find_cut(tile: Tile, rows: range, heads: range, shape: tuple[int, int, int]) -> Cut:
    """Cuts these rows and heads of a tile's batch entries out of x [B,H,L,...]; repeats become the
    batch entries."""
    if tile.repeat > 1:
        index = tile.batch.start, slice(None), slice(rows.start, rows.stop)
        return partial(cut_windows, index, tile.repeat, len(tile.rows))
    if (tile.batch, heads, rows) == tuple(map(range, shape)):
        return keep_all
    return cut_ranges(tile.batch, heads, rows)


def gathering_cut(part: Part, hull: Cut) -> Cut:
    """Copies a part's runs of keys out of x [B,G,N,D], to lie side by side. hull: cuts out all keys
    from the first to the last."""
    edges = [edge for run in part.gathered for edge in (run.start, run.stop)]
    sizes = [b - a for a, b in pairwise(edges)]  # of the first run, the gap behind it, the next run
    return lambda x: torch.cat(hull(x).split(sizes, 2)[::2], 2)


def keep_all(x: torch.Tensor) -> torch.Tensor:
    """The whole of x: to cut it out would take 4 microseconds."""
    return x


def cut_keys(p: Problem, tile: Tile, keys: range) -> Cut:
    """Cuts a run of keys of a tile out of x [B,G,N,D]."""
    return find_cut(tile, keys, tile.groups, (p.B, p.G, p.N))


def cut_windows(
    index: tuple[int, slice, slice], repeat: int, step: int, x: torch.Tensor
) -> torch.Tensor:
    """index: of the first of `repeat` windows, each `step` rows after the other."""
    first = x[index]
    h, m, *rest = first.stride()
    strides = step * m, h, m, *rest
    return first.as_strided((repeat, *first.shape), strides, first.storage_offset())


def pieces_of(p: Problem, tile: Tile, part: Part) -> Iterator[tuple[int, int, Cut]]:
    """`PartSlot.pieces`."""
    runs: Sequence[range] = part.gathered
    if tile.repeat > 1:
        keys, step = range(part.start, part.stop), len(tile.rows)
        runs = [keys[at : at + step] for at in range(0, len(keys), step)]
    at = 0
    for run in runs:
        yield at, at + len(run), cut_keys(p, tile, run)
        at += len(run)


def add_share(total: torch.Tensor, share: torch.Tensor, slot: PartSlot) -> None:
    """total [B,G,N,D] += a part's gradient."""
    if not slot.pieces:
        slot.keys(total).add_(share)
    for start, stop, cut in slot.pieces:
        cut(total).add_(share[:, :, start:stop])


# Addends of the scores


def all_places(problem: Problem, data: Mapping[str, torch.Tensor]) -> Place:
    """All places of a problem. data: the mask's tensors."""
    return Place.of(Block.whole(problem.sizes, data), range(problem.N), torch.device("cpu"))


def fill_addend(
    sums: torch.Tensor,
    node: Attention,
    data: Sequence[Mapping[str, torch.Tensor]],
    at: Place,
    mixed: bool,
) -> torch.Tensor:
    """sums = additive modifiers, and -inf at dropped keys; it is put back where a modifier may
    overwrite it. data: of modifiers."""
    keep = None
    if mixed:
        assert node.mask is not None
        keep = torch.as_tensor(node.mask.keep(at), device="cpu")
        if not node.modifiers:
            fill_hidden(sums, keep)
            return sums
    sums.zero_()
    for modifier, given, restores in zip(node.modifiers, data, node.restores, strict=True):
        hidden = sums == -INF if restores else None
        change_(modifier, sums, at.reading(given))
        if hidden is not None:
            sums.masked_fill_(hidden, -INF)
    if keep is not None:
        hide_(sums, hiding_bits(keep, sums.dtype))
    return sums
