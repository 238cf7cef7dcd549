"""What a mask keeps, counted: pairs of query and key, rows that see any, tiles.

Masks of strips have closed forms, whatever the sizes (`regions`). The others are counted run by
run (`runs`), as long as that takes no more than a second or so; where it would, blocks of queries
are asked what they may keep and what they surely keep, and the count is estimated from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError
from attn_graph.masks.canonical import EVERYTHING, canonical_mask
from attn_graph.masks.joins import And, Mask, Not, Or
from attn_graph.masks.leaves import Band
from attn_graph.masks.places import Block
from attn_graph.masks.regions import Region, bound_region, find_regions
from attn_graph.masks.runs import (
    AT_ONCE,
    Budget,
    OverBudget,
    areas,
    count_kept,
    kept_in_tiles,
    parts,
)
from attn_graph.spec import TensorSpec

UNKNOWN = "before the data are known"

Tensors = Mapping[str, torch.Tensor]


@final
@frozen
class Tiles:
    """How many tiles of a mask keep nothing, some and all of their places.

    Over all batch entries and heads. exact: false where tensors that decide were not given; a tile
    is then empty or full only if it is so for whatever they hold. Also false where the mask is no
    join of strips and counting would take longer than a second or so; then it is `estimated`, and
    a tile is empty or full only where the mask's `span` and `surely` say so of many queries.
    """

    block: tuple[int, int]
    empty: int
    mixed: int
    full: int
    exact: bool = True
    estimated: bool = False

    @property
    def total(self) -> int:
        return self.empty + self.mixed + self.full

    def __str__(self) -> str:
        told = f"{self.empty} empty, {self.mixed} mixed, {self.full} full"
        unsure = "estimated: some mixed may be empty or full" if self.estimated else UNKNOWN
        rest = "" if self.exact else f", {unsure}"
        count, (rows, columns) = f"tile{'s' * (self.total != 1)}", self.block
        return f"{self.total} {count} of {rows} x {columns}: {told}{rest}"


def tiles(
    mask: Mask | None,
    M: int,
    N: int,
    *,
    block: tuple[int, int] = (128, 128),
    B: int = 1,
    H: int = 1,
    data: Tensors | None = None,
) -> Tiles:
    """Count the tiles of `block` queries x keys by what they keep.

    data: tensors that the mask reads, by name; without one, and where counting would take long,
    see `Tiles`. Raises GraphError for tensors that do not fit, a block without places, or an
    alignment that was not said.
    """
    if min(block) < 1:
        raise GraphError(f"tiles: block {block} holds no place; both sides must be at least 1")
    whole = Block(
        range(B), range(H), range(M), H, M, N, check_tensors(mask, (B, H, M, N), data or {})
    )
    most, least = bounds(mask, whole)
    total = B * H * -(-M // block[0]) * -(-N // block[1])
    pair, estimated = find_both(most, least, whole), False
    if pair is None:
        try:
            empty, full = count_tiles_by_runs(most, least, whole, block)
            return Tiles(block, empty, total - empty - full, full, least == most)
        except OverBudget:
            pair, estimated = bound_both(most, least, whole, block[0]), True
    outer, inner = pair
    empty = total - sum(region.tiles(block) for region in outer)
    full = total - sum(region.outside(N).tiles(block) for region in inner)
    exact = least == most and not estimated
    return Tiles(block, empty, total - empty - full, full, exact, estimated)


Pair = tuple[list[Region], list[Region]]  # all that may be kept, and what surely is


def find_both(most: Mask, least: Mask, block: Block) -> Pair | None:
    """Where both are masks of strips, what they keep."""
    outer = find_regions(most, block)
    inner = outer if least == most or outer is None else find_regions(least, block)
    return None if outer is None or inner is None else (outer, inner)


def bound_both(most: Mask, least: Mask, block: Block, size: int) -> Pair:
    """What they may keep, and surely keep, by lines of `size` queries."""
    return [bound_region(most, block, size, outer=True)], [
        bound_region(least, block, size, outer=False)
    ]


def count_tiles_by_runs(
    most: Mask, least: Mask, block: Block, tile: tuple[int, int]
) -> tuple[int, int]:
    """How many tiles are empty, and full. Raises OverBudget."""
    empty = full = 0
    budget = Budget.of(block)
    for rows in parts(block.rows, tile[0] * max(1, AT_ONCE // (block.N // tile[1] + 3))):
        part = evolve(block, rows=rows)
        places = kept_in_tiles(most, part, *tile, budget)
        empty += int((places == 0).sum()) * multiplicity(places, part)
        if least != most:
            places = kept_in_tiles(least, part, *tile, budget)
        full += int((places == areas(len(rows), block.N, *tile)).sum()) * multiplicity(places, part)
    return empty, full


def classify_tiles(mask: Mask | None, block: Block, tile: tuple[int, int]) -> torch.Tensor:
    """Of each tile of one batch entry and head 0: empty, 1: mixed, 2: full [lines, columns]."""
    most, least = bounds(mask, block)
    pair = find_both(most, least, block)
    if pair is None:
        try:
            budget = Budget.of(block)
            places, sure = (kept_in_tiles(x, block, *tile, budget)[0, 0] for x in (most, least))
            return (places > 0).to(torch.int8) + (sure == areas(block.M, block.N, *tile))
        except OverBudget:
            pair = bound_both(most, least, block, tile[0])
    outer, inner = pair
    lacking = [region.outside(block.N) for region in inner]
    return mark_tiles(outer, block, tile) + 1 - mark_tiles(lacking, block, tile)


def mark_tiles(regions: Sequence[Region], block: Block, tile: tuple[int, int]) -> torch.Tensor:
    """1 for each tile that holds a place of a region, else 0 [lines, columns]."""
    lines, columns = -(-block.M // tile[0]), -(-block.N // tile[1])
    held = torch.zeros(lines, columns, dtype=torch.int8, device="cpu")
    for region in regions:
        for line in range(lines):
            for start, stop in region.line(line, tile).intervals:
                held[line, start:stop] = 1
    return held


@final
@frozen
class Seen:
    """What a mask keeps, over all batch entries and heads: pairs, queries that see a key, and keys
    of the key/value heads that are seen. exact: not only the most there can be. estimated: the
    most there can be, since counting would take long."""

    pairs: int
    queries: int
    keys: int
    exact: bool
    estimated: bool = False


Sizes = tuple[int, int, int, int, int]  # B, H, G, M, N


def count_seen(mask: Mask | None, sizes: Sizes, data: Tensors) -> Seen:
    """Count what a mask keeps, given all, some or none of the tensors that it reads."""
    B, H, G, M, N = sizes
    whole = Block(range(B), range(H), range(M), H, M, N, check_tensors(mask, (B, H, M, N), data))
    most, least = bounds(mask, whole)
    regions, estimated = find_regions(most, whole), False
    if regions is None:
        try:
            return count_seen_by_runs(most, whole, G, most == least)
        except OverBudget:
            regions, estimated = [bound_region(most, whole, 1, outer=True)], True
    return Seen(
        sum(region.pairs for region in regions),
        sum(region.queries for region in regions),
        sum(region.count // max(1, H) * G * len(region.keys) for region in regions),
        most == least and not estimated,
        estimated,
    )


def count_seen_by_runs(mask: Mask, block: Block, G: int, exact: bool) -> Seen:
    counts = count_kept(mask, block, Budget.of(block))
    each = multiplicity(counts.keys_of, block)
    pairs, queries = int(counts.keys_of.sum()) * each, int((counts.keys_of > 0).sum()) * each
    return Seen(pairs, queries, seen_keys(counts.seen, len(block.batch), G), exact)


def seen_keys(seen: torch.Tensor, B: int, G: int) -> int:
    """How many keys of all batch entries and key/value heads some query sees, of seen [b,h,N]."""
    b, h, N = seen.shape
    groups = seen.reshape(b, G, h // G, N).any(2) if h > 1 else seen
    return int(groups.sum()) * (B * G // max(1, b * groups.shape[1]))


def multiplicity(found: torch.Tensor, block: Block) -> int:
    """How many batch entries and heads each element of what was found [b,h,...] stands for."""
    return len(block.batch) * len(block.heads) // max(1, found.shape[0] * found.shape[1])


def check_tensors(
    mask: Mask | None, sizes: tuple[int, int, int, int], data: Tensors
) -> dict[str, torch.Tensor]:
    """The tensors a mask reads, on the CPU. Raises GraphError for one that does not fit."""
    needs, full = mask.needs if mask else {}, dict(zip("bhij", sizes, strict=True))
    told = ", ".join(needs) or "nothing"
    problems = [f"{mask}: reads no {name}; it reads {told}" for name in data if name not in needs]
    for name, tensor in data.items():
        if name in needs:
            type_ = TensorSpec.like(tensor).type
            problems += needs[name].problems(str(mask), name, type_, full)
    if problems:
        raise GraphError(*problems)
    return {name: on_cpu(tensor) for name, tensor in data.items()}


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; lengths so wide that sums with positions do not overflow."""
    wide = torch.int64 if tensor.ndim == 1 else tensor.dtype
    return tensor.detach().to("cpu", wide)


def bounds(mask: Mask | None, block: Block) -> tuple[Mask, Mask]:
    """Masks that read only what is given: one keeps no less than this, one no more."""
    simple = (mask and canonical_mask(mask, block.M, block.N)) or EVERYTHING
    return relax(simple, block, more=True), relax(simple, block, more=False)


def relax(mask: Mask, block: Block, more: bool) -> Mask:
    """A mask that reads only what is given, and keeps no less, or no more, for any other data."""
    if mask.needs.keys() <= (block.data or {}).keys():
        return mask
    match mask:
        case Not(a):
            return Not(relax(a, block, not more))
        case And(a, b) | Or(a, b):
            return type(mask)(relax(a, block, more), relax(b, block, more))
        case Band(low, high, ragged):
            return relax_band(low, high, ragged, block, more)
        case _:
            return EVERYTHING if more else Not(EVERYTHING)


def relax_band(
    low: int | None, high: int | None, ragged: tuple[str, ...], block: Block, more: bool
) -> Band:
    """A band that lengths move, for any lengths from 0 to full: all of it that may be, or must."""
    first = (0 if "kv_lengths" in ragged else block.N) - block.M
    last = block.N - (0 if "q_lengths" in ragged else block.M)
    down, up = (first, last) if more else (last, first)
    return Band(None if low is None else low + down, None if high is None else high + up)
