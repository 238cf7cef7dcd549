"""Counts for a mask: pairs of query and key, queries with a key, tiles.

Masks made of strips, and documents, have closed forms, whatever the sizes (`regions`, `layers`).
Others are evaluated at every place if this takes at most a tenth of a second or so. Otherwise the
count is estimated from the `span` and `surely` of blocks of queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError, binds, show
from attn_graph.masks.canonical import EVERYTHING, canonical_mask
from attn_graph.masks.joins import (
    And,
    Mask,
    Not,
    Or,
    flatten_join,
    needs_of,
    reading_problems,
    require_mask,
)
from attn_graph.masks.leaves import Band
from attn_graph.masks.places import Block, Place
from attn_graph.sparsity.layers import Both, Region, bound_both, find_regions
from attn_graph.spec import TensorSpec, require_size

UNKNOWN = "before the data are known"
MOST_PLACES = 2**24  # at which a mask is evaluated for one count: a tenth of a second
AT_ONCE = 2**20  # of these

Tensors = Mapping[str, torch.Tensor]


@final
@frozen
class Tiles:
    """How many tiles of a mask keep none, some and all of their places.

    Over all batch entries and heads. exact: False without the tensors that decide; `empty` and
    `full` then count the tiles that are so for all values of these tensors. estimated: the mask is
    not a join of strips, and an exact count would take over a tenth of a second; `empty` and `full`
    then count the tiles decided by the mask's `span` and `surely` for many queries at once.
    """

    block: tuple[int, int]
    empty: int
    mixed: int
    full: int
    exact: bool = True
    estimated: bool = False

    @property
    def total(self) -> int:
        """The number of tiles."""
        return self.empty + self.mixed + self.full

    def __str__(self) -> str:
        kinds = f"{self.empty:,} empty, {self.mixed:,} mixed, {self.full:,} full"
        unsure = "estimated: some mixed may be empty or full" if self.estimated else UNKNOWN
        rest = "" if self.exact else f", {unsure}"
        count, (rows, columns) = f"tile{'s' * (self.total != 1)}", self.block
        return f"{self.total:,} {count} of {rows} x {columns}: {kinds}{rest}"


@binds()
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
    """Count the tiles of `block` queries x keys by their kind: empty, mixed or full.

        >>> print(tiles(Causal(), 256, 256))
        4 tiles of 128 x 128: 1 empty, 2 mixed, 1 full

    mask: None keeps every place. data: tensors that the mask reads, by name; without them the
    counts are bounds, see `Tiles`. Raises GraphError for tensors that do not fit, an empty block
    size, or a missing alignment.
    """
    block = check_block("tiles: block", block)
    M, N, B, H = (
        require_size(f"tiles: {name}", n) for name, n in (("M", M), ("N", N), ("B", B), ("H", H))
    )
    sizes = B, H, M, N
    whole = Block.whole(sizes, check_tensors(mask, sizes, {} if data is None else data))
    most, least = bounds(mask, whole)
    total = B * H * -(-M // block[0]) * -(-N // block[1])
    found, estimated = decide_tiles(most, least, whole, block), False
    if found is None:
        pair, estimated = bound_both(most, least, whole, block[0]), True
        found = count_tiles_of(pair, whole, block)
    empty, full = found
    exact = least == most and not estimated
    return Tiles(block, empty, total - empty - full, full, exact, estimated)


def find_both(most: Mask, least: Mask, block: Block) -> Both | None:
    """The regions of two masks if both are made of strips, else None."""
    outer = find_regions(most, block)
    inner = outer if least == most or outer is None else find_regions(least, block)
    return None if outer is None or inner is None else (outer, inner)


def decide_tiles(
    most: Mask, least: Mask, block: Block, tile: tuple[int, int]
) -> tuple[int, int] | None:
    """(empty tiles of `most`, full tiles of `least`); None if it takes too long."""
    pair = find_both(most, least, block)
    if pair is not None:
        return count_tiles_of(pair, block, tile)
    flags = flag_both(most, least, block, tile)
    if flags is None:
        return None
    empty, full = (int(x.sum()) * multiplicity(x, block) for x in (~flags[0], flags[1]))
    return empty, full


def count_tiles_of(pair: Both, block: Block, tile: tuple[int, int]) -> tuple[int, int]:
    """(empty tiles of the upper bound, full tiles of the lower)."""
    lines, columns = -(-block.M // tile[0]), -(-block.N // tile[1])
    total, (outer, inner) = len(block.batch) * len(block.heads) * lines * columns, pair
    empty = total - sum(region.tiles(tile) for region in outer)
    return empty, total - sum(region.outside(block.N).tiles(tile) for region in inner)


def classify_tiles(mask: Mask | None, block: Block, tile: tuple[int, int]) -> torch.Tensor:
    """0 for each empty tile, 1 for a mixed one, 2 for a full one [lines, columns], int8.

    block: all queries of one batch entry and head.
    """
    most, least = bounds(mask, block)
    pair = find_both(most, least, block)
    if pair is None:
        flags = flag_both(most, least, block, tile)
        if flags is not None:
            some, every = (x[0, 0].to(torch.int8) for x in flags)
            return some + every
        pair = bound_both(most, least, block, tile[0])
    outer, inner = pair
    lacking = [region.outside(block.N) for region in inner]
    return mark_tiles(outer, block, tile) + 1 - mark_tiles(lacking, block, tile)


def bound_tiles(mask: Mask, block: Block, tile: tuple[int, int]) -> torch.Tensor:
    """0 for each empty tile, 1 for a mixed one, 2 for a full one [lines, columns], int8: by the
    bounds of each line, for all batch entries and heads at once. block: all queries; without data
    the answer holds for any."""
    rows, columns = tile
    kinds = torch.zeros(-(-block.M // rows), -(-block.N // columns), dtype=torch.int8, device="cpu")
    for line, part in zip(kinds, block.split(rows), strict=True):
        surely, span = mask.bound_keys(part)
        for a, b in span.intervals:
            line[a // columns : -(-b // columns)] = 1
        for a, b in surely.intervals:
            line[-(-a // columns) : max(-(-a // columns), b // columns)] = 2
    return kinds


def mark_tiles(regions: Sequence[Region], block: Block, tile: tuple[int, int]) -> torch.Tensor:
    """1 for each tile with a place of a region, else 0 [lines, columns], int8."""
    lines, columns = -(-block.M // tile[0]), -(-block.N // tile[1])
    marks = torch.zeros(lines, columns, dtype=torch.int8, device="cpu")
    for region in regions:
        for line in range(lines):
            for start, stop in region.line(line, tile).intervals:
                marks[line, start:stop] = 1
    return marks


@final
@frozen
class Coverage:
    """The counts of a mask, over all batch entries and heads.

    pairs: of query and key. queries: with a key. keys: seen by a query, over key/value heads.
    exact: False if these are upper bounds, because data are missing or the counts are `estimated`.
    """

    pairs: int
    queries: int
    keys: int
    exact: bool
    estimated: bool = False


Sizes = tuple[int, int, int, int, int]  # B, H, G, M, N


def count_pairs(mask: Mask | None, sizes: Sizes, data: Tensors) -> Coverage:
    """Count the kept places, given all, some or none of the tensors that the mask reads.

    Raises GraphError for tensors that do not fit.
    """
    B, H, G, M, N = sizes
    whole = Block.whole((B, H, M, N), check_tensors(mask, (B, H, M, N), data))
    most, least = bounds(mask, whole)
    regions, estimated = find_regions(most, whole), False
    if regions is None:
        places = keep_places(most, whole)
        if places is not None:
            return cover_places(places, whole, G, most == least)
        regions, estimated = bound_both(most, least, whole, 1)[0], True
    widest = B * H * M * row_width(mask, N)  # wherever data move the bands
    return Coverage(
        min(widest, sum(region.pairs for region in regions)),
        sum(region.queries for region in regions),
        sum(len(region.batch) * G * len(region.keys) for region in regions),
        most == least and not estimated,
        estimated,
    )


def row_width(mask: Mask | None, N: int) -> int:
    """The most keys that a query sees by the bands among the parts that `&` joins."""
    width = N
    for part in [] if mask is None else flatten_join(And, mask):
        match part:
            case Band(int() as low, int() as high):
                width = min(width, max(0, high - low + 1))
    return width


def most_pairs(mask: Mask | None, sizes: Sizes) -> int:
    """An upper bound of the kept pairs, in closed form.

    For strips as `count_pairs` without data, for any other mask all pairs.
    """
    B, H, _, M, N = sizes
    whole = Block.whole((B, H, M, N), {})
    regions = find_regions(bounds(mask, whole)[0], whole)
    return B * H * M * N if regions is None else sum(region.pairs for region in regions)


def keep_places(mask: Mask, block: Block) -> Iterator[torch.Tensor] | None:
    """Booleans [b,h,rows,N] of all queries in order, some at a time; None if it takes too long.

    b is 1 if all batch entries are alike, and h if all heads are. The block has all data.
    """
    batch, heads = differing_ranges(mask, block)
    each = max(1, len(batch) * len(heads) * block.N)
    if each * len(block.rows) > MOST_PLACES:
        return None
    step, part = max(1, AT_ONCE // each), evolve(block, batch=batch, heads=heads)
    return (ask_all(mask, x) for x in part.split(step))


def ask_all(mask: Mask, block: Block) -> torch.Tensor:
    shape = (len(block.batch), len(block.heads), len(block.rows), block.N)
    kept = torch.as_tensor(mask.keep(Place.of(block, range(block.N), torch.device("cpu"))))
    return kept.expand(shape)


def differing_ranges(mask: Mask, block: Block) -> tuple[range, range]:
    """The batch entries and heads to evaluate: only the first if all are alike."""
    if 0 in (len(block.batch), len(block.heads), len(block.rows), block.N):
        return block.batch[:1], block.heads[:1]
    some = evolve(block, batch=block.batch[:2], heads=block.heads[:2], rows=block.rows[:1])
    kept = torch.as_tensor(mask.keep(Place.of(some, range(1), torch.device("cpu"))))
    b, h, _, _ = [1] * (4 - kept.ndim) + [*kept.shape]
    return block.batch if b > 1 else block.batch[:1], block.heads if h > 1 else block.heads[:1]


Flags = tuple[torch.Tensor, torch.Tensor]  # some place, and every place, of each tile


def flag_both(most: Mask, least: Mask, block: Block, tile: tuple[int, int]) -> Flags | None:
    """The tiles with a place of `most`, and those that `least` keeps whole."""
    some = flag_tiles(most, block, tile)
    every = some if least == most else flag_tiles(least, block, tile)
    return None if some is None or every is None else (some[0], every[1])


def flag_tiles(mask: Mask, block: Block, tile: tuple[int, int]) -> Flags | None:
    """What a mask keeps of each tile [b,h,lines,columns]; None if it takes too long."""
    places = keep_places(mask, block)
    if places is None:
        return None
    rows = [
        (by_parts(x, tile[1], False).any(-1), by_parts(x, tile[1], True).all(-1)) for x in places
    ]
    some, every = (torch.cat(x, 2).transpose(2, 3) for x in zip(*rows, strict=True))
    some, every = by_parts(some, tile[0], False).any(-1), by_parts(every, tile[0], True).all(-1)
    return some.transpose(2, 3), every.transpose(2, 3)


def by_parts(x: torch.Tensor, size: int, beyond: bool) -> torch.Tensor:
    """The last axis in parts of `size`, as two axes; the last part ends in `beyond`."""
    size = min(size, x.shape[-1])
    filled = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=beyond)
    return filled.view(*filled.shape[:-1], -1, size)


def cover_places(places: Iterator[torch.Tensor], block: Block, G: int, exact: bool) -> Coverage:
    """`count_pairs` of all places, some queries at a time."""
    pairs, queries, seen = 0, 0, torch.zeros(1, 1, block.N, dtype=torch.bool, device="cpu")
    for kept in places:
        each = multiplicity(kept, block)
        pairs += each * int(kept.sum())
        queries += each * int(kept.any(-1).sum())
        seen = seen | kept.any(2)
    return Coverage(pairs, queries, count_seen_keys(seen, len(block.batch), G), exact)


def count_seen_keys(seen: torch.Tensor, B: int, G: int) -> int:
    """How many keys some query sees, over B batch entries and G key/value heads.

    seen: booleans [b,h,N]; b and h are 1 if all entries or heads are alike.
    """
    b, h, N = seen.shape
    groups = seen.reshape(b, G, h // G, N).any(2) if h > 1 else seen
    return int(groups.sum()) * (B * G // max(1, b * groups.shape[1]))


def multiplicity(counts: torch.Tensor, block: Block) -> int:
    """How many (batch entry, head) pairs one element of counts [b,h,...] represents."""
    return len(block.batch) * len(block.heads) // max(1, counts.shape[0] * counts.shape[1])


def check_tensors(
    mask: Mask | None, sizes: tuple[int, int, int, int], data: Tensors
) -> dict[str, torch.Tensor]:
    """The tensors of a mask on the CPU. Raises GraphError if one does not fit.

    sizes: B, H, M and N.
    """
    if mask is not None:
        require_mask(None, None, mask)
    if not isinstance(data, Mapping):
        raise GraphError(f"data {show(data)} is not a mapping of names to tensors")
    needs, full = needs_of(mask), dict(zip("bhij", sizes, strict=True))
    names = ", ".join(needs) or "nothing"
    problems = [
        f"{mask}: does not read {name}; it reads {names}" for name in data if name not in needs
    ]
    problems += [] if mask is None else reading_problems(mask)
    for name, tensor in data.items():
        if name in needs:
            type_ = TensorSpec.like(tensor).type
            problems += needs[name].problems(str(mask), name, type_, full)
    if problems:
        raise GraphError(*problems)
    return {name: on_cpu(tensor) for name, tensor in data.items()}


def check_block(who: str, block: object, least: int = 1) -> tuple[int, int]:
    """A pair of whole numbers >= `least`. Raises GraphError for anything else."""
    match block:
        case tuple() | list() as pair if len(pair) == 2:
            return require_size(who, pair[0], least), require_size(who, pair[1], least)
    raise GraphError(f"{who} {show(block)} is not a pair of whole numbers, as (128, 128)")


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU; lengths as int64, so that sums with positions do not overflow."""
    wide = torch.int64 if tensor.ndim == 1 else tensor.dtype
    return tensor.detach().to("cpu", wide)


def bounds(mask: Mask | None, block: Block) -> tuple[Mask, Mask]:
    """Two masks of the known data alone: one keeps no less than `mask`, one no more."""
    simple = None if mask is None else canonical_mask(mask, block.M, block.N)
    simple = EVERYTHING if simple is None else simple
    return relax(simple, block, more=True), relax(simple, block, more=False)


def relax(mask: Mask, block: Block, more: bool) -> Mask:
    """A mask of the known data alone: it keeps no less than `mask` if `more`, else no more.

    This holds for all values of the missing data.
    """
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
    """A band without lengths: the places that some lengths may keep, or that all keep."""
    first = (0 if "kv_lengths" in ragged else block.N) - block.M
    last = block.N - (0 if "q_lengths" in ragged else block.M)
    down, up = (first, last) if more else (last, first)
    return Band(None if low is None else low + down, None if high is None else high + up)
