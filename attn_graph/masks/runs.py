"""Masks counted run by run: for those whose edges are no lines, or depend on data.

Along the keys of one query a mask changes at few positions, its edges. Between two edges it is
constant, so it is asked once for each run of keys, by its own `keep`, and never at every key. A
leaf tells its edges by `strip`; segments and flags have them where their data change. Where a leaf
tells nothing, blocks of queries are asked by its `span` and `surely`, and each key that these
leave open is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import define, evolve, frozen

from attn_graph.masks.joins import Join, Mask
from attn_graph.masks.leaves import Keep, SameSegment
from attn_graph.masks.places import Block, Place

AT_ONCE = 2**15 - 1  # numbers at a time; for more PyTorch wakes its threads, which takes longer
MOST_OPEN = 2**22  # runs of a block in which a leaf leaves all keys open, however few its rows
MOST_EDGES = 512  # of data along the keys; with more, blocks of queries are asked
MOST_ASKED = 20_000_000  # runs of one count, beside those that data hold: about a second
FEW_LEAVES = 4  # so many are asked in about the time in which a run's edges are sorted
PER_BLOCK = 2**10  # runs for which a block of queries may be asked by `span` and `surely`
PER_KEY = 2**-2  # for a key of a block, a tile, or a number that is held for each query and key


class OverBudget(Exception):
    """Counting would take longer than anyone waits for."""


@final
@define
class Budget:
    """How many runs may still be asked for."""

    left: float

    @classmethod
    def of(cls, block: Block) -> Budget:
        """As many as make a second, and more where there are many data."""
        return cls(MOST_ASKED + 2 * sum(x.numel() for x in (block.data or {}).values()))

    def spend(self, runs: float) -> None:
        self.left -= runs
        if self.left < 0:
            raise OverBudget


def areas(M: int, N: int, rows: int, keys: int) -> torch.Tensor:
    """Places of each tile [blocks of queries, blocks of keys]; the last ones may be smaller."""
    return torch.outer(sides(M, rows), sides(N, keys))


def sides(count: int, size: int) -> torch.Tensor:
    """How long each tile of a side of `count` places is."""
    found = torch.full((-(-count // size),), size, dtype=torch.int64, device="cpu")
    if count % size:
        found[-1] = count % size
    return found


@final
@frozen(eq=False)
class Kept:
    """keys_of: how many keys each query keeps [b,h,M]. seen: which keys any query keeps [b,h,N].

    b, or h, is 1 where all batch entries, or heads, are alike.
    """

    keys_of: torch.Tensor
    seen: torch.Tensor


def count_kept(mask: Mask, block: Block, budget: Budget) -> Kept:
    """What a mask keeps, of all queries; `block` has all that it reads. Raises OverBudget."""
    entries, heads = varying(mask, block)
    budget.spend(PER_KEY * len(entries) * len(heads) * (block.M + block.N))
    keys_of = zeros(len(entries), len(heads), block.M)
    steps = zeros(len(entries), len(heads), block.N + 1)
    for run in runs(mask, block, budget):
        lengths = torch.where(run.kept, run.stops - run.starts, 0).sum(-1)
        keys_of[run.entries, :, run.rows.start : run.rows.stop] = lengths
        _, starts, stops, weights = run.grouped(block.M)
        for at, weight in ((starts, weights), (stops, -weights)):
            steps[run.entries].scatter_add_(-1, at.flatten(2), weight.flatten(2))
    return Kept(keys_of, steps.cumsum(-1)[..., : block.N] > 0)


def kept_in_tiles(mask: Mask, block: Block, rows: int, keys: int, budget: Budget) -> torch.Tensor:
    """How many places each tile of rows x keys keeps [b, h, blocks of queries, blocks of keys].

    The block's first query begins a tile. Raises OverBudget.
    The end of a run in tile t changes tile t by what lies from there to the tile's end, and every
    later tile of that line by its whole width: two sums, of which the second is accumulated.
    """
    entries, heads = varying(mask, block)
    lines, columns = -(-len(block.rows) // rows), -(-block.N // keys)
    width = columns + 2  # a run may end at N, and the tile after that is the next
    budget.spend(PER_KEY * len(entries) * len(heads) * lines * width)
    inside = zeros(len(entries), len(heads), lines * width)
    after = torch.zeros_like(inside)
    for run in runs(mask, block, budget):
        numbers, starts, stops, weights = run.grouped(rows)
        for at, weight in ((starts, weights), (stops, -weights)):
            tile = at // keys
            index = ((numbers[:, None] - block.rows.start // rows) * width + tile).flatten(2)
            left = (weight * ((tile + 1) * keys - at)).flatten(2)
            inside[run.entries].scatter_add_(-1, index, left)
            after[run.entries].scatter_add_(-1, index + 1, (weight * keys).flatten(2))
    shape = (len(entries), len(heads), lines, width)
    return (inside.view(shape) + after.view(shape).cumsum(-1))[..., :columns]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cpu")


@final
@frozen(eq=False)
class Runs:
    """Keys from starts to stops [b, h, rows or 1, runs], and which rows keep them.

    kept: boolean [b, h, rows, runs]. entries: which of the batch entries that differ these are.
    """

    entries: slice
    rows: range
    starts: torch.Tensor
    stops: torch.Tensor
    kept: torch.Tensor

    def grouped(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The runs of blocks of `size` queries: the blocks' numbers, starts, stops [b,h,n,runs],
        and how many queries of a block keep each run. A block may come more than once."""
        numbers = torch.arange(self.rows.start, self.rows.stop, device="cpu") // size
        weights = self.kept.to(torch.int64)
        if self.starts.shape[2] == 1:  # all rows have the same runs: count rows first
            first, last = int(numbers[0]), int(numbers[-1])
            b, h, _, count = weights.shape
            sums = zeros(b, h, last - first + 1, count)
            weights = sums.index_add_(2, numbers - first, weights)
            numbers = torch.arange(first, last + 1, device="cpu")
        starts, stops = (x.expand_as(weights) for x in (self.starts, self.stops))
        return numbers, starts, stops, weights


def runs(mask: Mask, block: Block, budget: Budget) -> Iterator[Runs]:
    """The keys of every query, cut where the mask may change, for some rows at a time."""
    if is_empty(block):
        return
    entries, heads = varying(mask, block)
    first = place(block, entries, heads, block.rows[:1])
    told = {leaf: edges(leaf, first) for leaf in leaves(mask)}
    silent = [leaf for leaf, found in told.items() if found is None]
    if silent:
        yield from asked_in_blocks(mask, silent, block, entries, heads, budget)
        return
    count = sum(x.shape[-1] for found in told.values() for x in found or ())
    each = len(entries) * len(heads) * (1 + count)
    budget.spend(each * len(block.rows) * max(1, len(told) // FEW_LEAVES))
    for rows in parts(block.rows, AT_ONCE // each):
        at = place(block, entries, heads, rows)
        yield evaluate_runs(
            mask, at, rows, slice(None), [x for leaf in told for x in edges(leaf, at) or ()]
        )


def asked_in_blocks(
    mask: Mask,
    silent: Sequence[Mask],
    block: Block,
    entries: range,
    heads: range,
    budget: Budget,
) -> Iterator[Runs]:
    """The same for a mask some of whose leaves do not tell their edges.

    Where these leave more keys open than there are rows, runs that all rows share are fewer.
    """
    telling = [leaf for leaf in leaves(mask) if leaf not in silent]
    for number, entry in enumerate(entries):
        batch = range(entry, entry + 1)
        for part, found in split_until_small(
            silent, evolve(block, batch=batch, heads=heads), budget
        ):
            at = place(block, batch, heads, part.rows)
            if sum(x.numel() for x in found) > len(part.rows):
                found = [open_keys(mask, part, budget)]
            else:
                found += [x for leaf in telling for x in edges(leaf, at) or ()]
            yield evaluate_runs(mask, at, part.rows, slice(number, number + 1), found)


Opened = tuple[Block, list[torch.Tensor]]  # queries, and the keys that leaves leave open there


def split_until_small(
    silent: Sequence[Mask], block: Block, budget: Budget, before: int | None = None
) -> Iterator[Opened]:
    """Parts so short that few keys are open, or about as many as were in twice as many rows."""
    rows, found = block.rows, [open_keys(leaf, block, budget) for leaf in silent]
    count = sum(x.numel() for x in found)
    size = len(block.heads) * len(rows) * count
    stays = before is not None and 4 * count > 3 * before
    if len(rows) == 1 or size <= AT_ONCE or (stays and size <= MOST_OPEN):
        budget.spend(size)
        yield block, found
        return
    middle = (rows.start + rows.stop) // 2
    for half in (range(rows.start, middle), range(middle, rows.stop)):
        yield from split_until_small(silent, evolve(block, rows=half), budget, count)


def leaves(mask: Mask) -> tuple[Mask, ...]:
    """What a mask is joined from, each leaf once."""
    if not isinstance(mask, Join):
        return (mask,)
    return tuple(dict.fromkeys(leaf for part in mask.parts for leaf in leaves(part)))


def evaluate_runs(
    mask: Mask, at: Place, rows: range, entries: slice, found: Sequence[torch.Tensor]
) -> Runs:
    """The runs between these edges [b or 1, h or 1, rows or 1, any], and which are kept."""
    all_found = (zeros(1, 1, 1, 1), *found)
    lead = [max(sizes) for sizes in zip(*(x.shape[:3] for x in all_found), strict=True)]
    starts = torch.cat([x.expand(*lead, -1) for x in all_found], -1).clamp(0, at.N).sort(-1).values
    stops = torch.cat((starts[..., 1:], starts.new_full((*lead, 1), at.N)), -1)
    kept = torch.as_tensor(mask.keep(evolve(at, j=starts.clamp(max=at.N - 1))))
    shape = (at.b.numel(), at.h.numel(), len(rows), starts.shape[-1])
    return Runs(entries, rows, starts, stops, kept.expand(shape))


def is_empty(block: Block) -> bool:
    return 0 in (len(block.batch), len(block.heads), len(block.rows), block.N)


def varying(mask: Mask, block: Block) -> tuple[range, range]:
    """The batch entries and heads to ask: one of those that are all alike."""
    if is_empty(block):
        return block.batch[:1], block.heads[:1]
    some = evolve(block, batch=block.batch[:2], heads=block.heads[:2], rows=block.rows[:1])
    first = Place.of(some, range(1), torch.device("cpu"))
    b, h, _, _ = four_axes(torch.as_tensor(mask.keep(first))).shape
    return block.batch if b > 1 else block.batch[:1], block.heads if h > 1 else block.heads[:1]


def four_axes(x: torch.Tensor) -> torch.Tensor:
    """[...] -> [b,h,i,j], axes of size 1 before its own."""
    return x.reshape([1] * (4 - x.ndim) + [*x.shape])


def place(block: Block, entries: range, heads: range, rows: range) -> Place:
    """Where rows are asked, at any keys: what is read there is gathered."""
    part = evolve(block, batch=entries, heads=heads, rows=rows)
    return evolve(Place.of(part, range(1), torch.device("cpu")), ranges=None)


def parts(rows: range, size: int) -> Iterator[range]:
    """These rows in their order, at most `size` at a time, and at least one."""
    size = max(1, size)
    return (rows[at : at + size] for at in range(0, len(rows), size))


def edges(leaf: Mask, at: Place) -> list[torch.Tensor] | None:
    """Positions [b or 1, h or 1, rows or 1, any] that hold all at which a leaf changes along j.

    None if it does not tell.
    """
    strip = leaf.strip(at)
    if strip is None:
        return data_edges(leaf, at) if isinstance(leaf, Keep | SameSegment) else None
    low = None if strip.low is None else at.i + strip.low
    high = None if strip.high is None else at.i + strip.high + 1
    told = (torch.as_tensor(x) for x in (low, high, strip.keys) if x is not None)
    return [four_axes(x.to(torch.int64)) for x in told]


def data_edges(mask: Mask, at: Place) -> list[torch.Tensor] | None:
    """The same for a leaf that depends on the key only by what it reads there."""
    found = []
    for name, data in mask.needs.items():
        axes = tuple(slice(None) if axis in data.axes else None for axis in "bhij")
        values = at.data[name][axes]
        values = values[at.b.flatten()] if values.shape[0] > 1 else values
        values = values[:, at.h.flatten()] if values.shape[1] > 1 else values
        differs = values[..., 1:] != values[..., :-1]
        most = int(differs.sum(-1).amax()) if differs.numel() else 0
        if most and (values.shape[2] > 1 or most > MOST_EDGES):
            return None
        after = torch.arange(1, values.shape[3], device="cpu")
        found.append(torch.where(differs, after, at.N).sort(-1).values[..., :most])
    return [x for x in found if x.shape[-1]]


def open_keys(mask: Mask, block: Block, budget: Budget) -> torch.Tensor:
    """Each key of which a block of queries does not say whether all or none keep it [1,1,1,any].

    And the ends of the intervals of which it does.
    """
    budget.spend(PER_BLOCK + PER_KEY * block.N)
    spanned, sure = (
        flags(keys.intervals, block.N) for keys in (mask.span(block), mask.surely(block))
    )
    unsure = spanned & ~sure
    begins = unsure.clone()
    begins[1:] |= unsure[:-1] | (sure[1:] != sure[:-1])
    budget.spend(int(begins.sum()))
    return begins.nonzero().reshape(1, 1, 1, -1)


def flags(intervals: Sequence[tuple[int, int]], keys: int) -> torch.Tensor:
    """[keys], true inside the intervals."""
    found = torch.zeros(keys, dtype=torch.bool, device="cpu")
    for start, stop in intervals:
        found[start:stop] = True
    return found
