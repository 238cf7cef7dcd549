"""Counts masks run by run: those whose edges are not lines, or depend on data.

Along the keys of one query a mask changes at few positions, its edges. It is constant between two
edges, so `keep` is evaluated once for each run of keys. The edges of a leaf follow from its
`strip`; segments and flags have edges where their data change. Of any other leaf, blocks of queries
are bounded by `span` and `surely`, and each undecided key is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import define, evolve, frozen

from attn_graph.masks.joins import Join, Mask
from attn_graph.masks.leaves import Keep, SameSegment
from attn_graph.masks.places import Block, Place

AT_ONCE = 2**15 - 1  # numbers at a time; for more PyTorch starts threads, which takes longer
MOST_OPEN = 2**22  # runs of one block, if splitting it would leave as many keys open
MOST_EDGES = 512  # of data along the keys; with more, blocks of queries are bounded
MOST_EVALUATED = 20_000_000  # runs of one count, plus twice the elements of data: about a second
FEW_LEAVES = 4  # evaluating this many takes about as long as sorting the edges
PER_BLOCK = 2**10  # the cost of `span` and `surely` of a block, in runs
PER_KEY = 2**-2  # the cost of one key of a block, one tile, or one count, in runs


class OverBudget(Exception):
    """An exact count would take longer than the budget allows."""


@final
@define
class Budget:
    """How many runs may still be evaluated."""

    left: float

    @classmethod
    def of(cls, block: Block) -> Budget:
        """The budget of a count: about a second, and more with many data."""
        return cls(MOST_EVALUATED + 2 * sum(x.numel() for x in (block.data or {}).values()))

    def spend(self, runs: float) -> None:
        """Take this many off. Raises OverBudget if fewer are left."""
        self.left -= runs
        if self.left < 0:
            raise OverBudget


def areas(M: int, N: int, rows: int, keys: int) -> torch.Tensor:
    """How many places each tile has [lines, columns]; the last of each axis may be smaller."""
    return torch.outer(sides(M, rows), sides(N, keys))


def sides(count: int, size: int) -> torch.Tensor:
    """The lengths of `count` places cut into parts of `size`."""
    lengths = torch.full((-(-count // size),), size, dtype=torch.int64, device="cpu")
    if count % size:
        lengths[-1] = count % size
    return lengths


@final
@frozen(eq=False)
class Counts:
    """keys_of: how many keys each query keeps [b,h,M]. seen: does any query keep a key [b,h,N]?

    b is 1 if all batch entries are alike, and h if all heads are.
    """

    keys_of: torch.Tensor
    seen: torch.Tensor


def count_keys(mask: Mask, block: Block, budget: Budget) -> Counts:
    """Count the keys of all queries. The block has all data. Raises OverBudget."""
    entries, heads = differing_ranges(mask, block)
    budget.spend(PER_KEY * len(entries) * len(heads) * (block.M + block.N))
    keys_of = zeros(len(entries), len(heads), block.M)
    steps = zeros(len(entries), len(heads), block.N + 1)
    for run in runs(mask, block, budget):
        lengths = torch.where(run.keeps, run.stops - run.starts, 0).sum(-1)
        keys_of[run.entries, :, run.rows.start : run.rows.stop] = lengths
        _, starts, stops, weights = run.by_block(block.M)
        for at, weight in ((starts, weights), (stops, -weights)):
            steps[run.entries].scatter_add_(-1, at.flatten(2), weight.flatten(2))
    return Counts(keys_of, steps.cumsum(-1)[..., : block.N] > 0)


def count_in_tiles(mask: Mask, block: Block, rows: int, keys: int, budget: Budget) -> torch.Tensor:
    """How many places each tile of rows x keys keeps [b, h, lines, columns].

    The block's first query is the first of a tile. Raises OverBudget.

    A run that ends in tile t adds to tile t its places up to there, and to every later tile of the
    line the full width: two sums, the second accumulated.
    """
    entries, heads = differing_ranges(mask, block)
    lines, columns = -(-len(block.rows) // rows), -(-block.N // keys)
    width = columns + 2  # a run may end at N, and the tile after that is the next
    budget.spend(PER_KEY * len(entries) * len(heads) * lines * width)
    inside = zeros(len(entries), len(heads), lines * width)
    after = torch.zeros_like(inside)
    for run in runs(mask, block, budget):
        numbers, starts, stops, weights = run.by_block(rows)
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
    """Keys from starts to stops [b, h, rows or 1, runs], and the rows that keep them.

    keeps: booleans [b, h, rows, runs]. entries: the batch entries, among those that differ.
    """

    entries: slice
    rows: range
    starts: torch.Tensor
    stops: torch.Tensor
    keeps: torch.Tensor

    def by_block(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The runs of blocks of `size` queries; a block may come more than once.

        Gives the number of each block [n]; starts and stops [b,h,n,runs]; and how many queries of
        the block keep each run [b,h,n,runs].
        """
        numbers = torch.arange(self.rows.start, self.rows.stop, device="cpu") // size
        weights = self.keeps.to(torch.int64)
        if self.starts.shape[2] == 1:  # all rows have the same runs: count rows first
            first, last = int(numbers[0]), int(numbers[-1])
            b, h, _, count = weights.shape
            sums = zeros(b, h, last - first + 1, count)
            weights = sums.index_add_(2, numbers - first, weights)
            numbers = torch.arange(first, last + 1, device="cpu")
        starts, stops = (x.expand_as(weights) for x in (self.starts, self.stops))
        return numbers, starts, stops, weights


def runs(mask: Mask, block: Block, budget: Budget) -> Iterator[Runs]:
    """The keys of every query, cut at the edges of the mask, for some rows at a time."""
    if is_empty(block):
        return
    entries, heads = differing_ranges(mask, block)
    first = place_of(block, entries, heads, block.rows[:1])
    edges_of = {leaf: edges(leaf, first) for leaf in leaves(mask)}
    edgeless = [leaf for leaf, positions in edges_of.items() if positions is None]
    if edgeless:
        yield from runs_of_blocks(mask, edgeless, block, entries, heads, budget)
        return
    count = sum(x.shape[-1] for positions in edges_of.values() for x in positions or ())
    each = len(entries) * len(heads) * (1 + count)
    budget.spend(each * len(block.rows) * max(1, len(edges_of) // FEW_LEAVES))
    for rows in parts(block.rows, AT_ONCE // each):
        at = place_of(block, entries, heads, rows)
        yield evaluate_runs(
            mask, at, rows, slice(None), [x for leaf in edges_of for x in edges(leaf, at) or ()]
        )


def runs_of_blocks(
    mask: Mask,
    edgeless: Sequence[Mask],
    block: Block,
    entries: range,
    heads: range,
    budget: Budget,
) -> Iterator[Runs]:
    """`runs` for a mask with leaves of unknown edges.

    If these leave more keys open than there are rows, all rows share the runs of the mask.
    """
    others = [leaf for leaf in leaves(mask) if leaf not in edgeless]
    for number, entry in enumerate(entries):
        batch = range(entry, entry + 1)
        for part, positions in split_until_small(
            edgeless, evolve(block, batch=batch, heads=heads), budget
        ):
            at = place_of(block, batch, heads, part.rows)
            if sum(x.numel() for x in positions) > len(part.rows):
                positions = [open_keys(mask, part, budget)]
            else:
                positions += [x for leaf in others for x in edges(leaf, at) or ()]
            yield evaluate_runs(mask, at, part.rows, slice(number, number + 1), positions)


OpenBlock = tuple[Block, list[torch.Tensor]]  # queries, and their undecided keys by leaf


def split_until_small(
    edgeless: Sequence[Mask], block: Block, budget: Budget, before: int | None = None
) -> Iterator[OpenBlock]:
    """Halve a block until few keys are open or halving hardly reduces them.

    before: how many were open in the block twice as large.
    """
    rows, positions = block.rows, [open_keys(leaf, block, budget) for leaf in edgeless]
    count = sum(x.numel() for x in positions)
    size = len(block.heads) * len(rows) * count
    stays = before is not None and 4 * count > 3 * before
    if len(rows) == 1 or size <= AT_ONCE or (stays and size <= MOST_OPEN):
        budget.spend(size)
        yield block, positions
        return
    middle = (rows.start + rows.stop) // 2
    for half in (range(rows.start, middle), range(middle, rows.stop)):
        yield from split_until_small(edgeless, evolve(block, rows=half), budget, count)


def leaves(mask: Mask) -> tuple[Mask, ...]:
    """The leaves of a mask, each once."""
    if not isinstance(mask, Join):
        return (mask,)
    return tuple(dict.fromkeys(leaf for part in mask.parts for leaf in leaves(part)))


def reading_problems(mask: Mask) -> Iterator[str]:
    """Tensors read by two parts of a mask in two ways. `needs` has one of the ways alone."""
    needs = mask.needs
    for name, data in ((n, x) for leaf in leaves(mask) for n, x in leaf.needs.items()):
        if data != needs[name]:
            yield (
                f"mask: two of its parts read {name} in two ways, {data} and {needs[name]}; "
                "give each tensor a name of its own"
            )


def evaluate_runs(
    mask: Mask, at: Place, rows: range, entries: slice, positions: Sequence[torch.Tensor]
) -> Runs:
    """The runs between these edges [b or 1, h or 1, rows or 1, any], and who keeps them."""
    every = (zeros(1, 1, 1, 1), *positions)
    lead = [max(sizes) for sizes in zip(*(x.shape[:3] for x in every), strict=True)]
    starts = torch.cat([x.expand(*lead, -1) for x in every], -1).clamp(0, at.N).sort(-1).values
    stops = torch.cat((starts[..., 1:], starts.new_full((*lead, 1), at.N)), -1)
    keeps = torch.as_tensor(mask.keep(evolve(at, j=starts.clamp(max=at.N - 1))))
    shape = (at.b.numel(), at.h.numel(), len(rows), starts.shape[-1])
    return Runs(entries, rows, starts, stops, keeps.expand(shape))


def is_empty(block: Block) -> bool:
    return 0 in (len(block.batch), len(block.heads), len(block.rows), block.N)


def differing_ranges(mask: Mask, block: Block) -> tuple[range, range]:
    """The batch entries and heads to evaluate: only the first if all are alike."""
    if is_empty(block):
        return block.batch[:1], block.heads[:1]
    some = evolve(block, batch=block.batch[:2], heads=block.heads[:2], rows=block.rows[:1])
    first = Place.of(some, range(1), torch.device("cpu"))
    b, h, _, _ = four_axes(torch.as_tensor(mask.keep(first))).shape
    return block.batch if b > 1 else block.batch[:1], block.heads if h > 1 else block.heads[:1]


def four_axes(x: torch.Tensor) -> torch.Tensor:
    """A tensor of at most four axes as [b,h,i,j], with leading axes of size 1."""
    return x.reshape([1] * (4 - x.ndim) + [*x.shape])


def place_of(block: Block, entries: range, heads: range, rows: range) -> Place:
    part = evolve(block, batch=entries, heads=heads, rows=rows)
    return evolve(Place.of(part, range(1), torch.device("cpu")), ranges=None)


def parts(rows: range, size: int) -> Iterator[range]:
    """The rows in order, `size` at a time and at least one."""
    size = max(1, size)
    return (rows[at : at + size] for at in range(0, len(rows), size))


def edges(leaf: Mask, at: Place) -> list[torch.Tensor] | None:
    """Positions [b or 1, h or 1, rows or 1, any], including each j at which a leaf changes.

    None if they are unknown.
    """
    strip = leaf.strip(at)
    if strip is None:
        return data_edges(leaf, at) if isinstance(leaf, Keep | SameSegment) else None
    low = None if strip.low is None else at.i + strip.low
    high = None if strip.high is None else at.i + strip.high + 1
    bounds = (torch.as_tensor(x) for x in (low, high, strip.keys) if x is not None)
    return [four_axes(x.to(torch.int64)) for x in bounds]


def data_edges(mask: Mask, at: Place) -> list[torch.Tensor] | None:
    """The edges of a leaf that depends on j only through its data."""
    positions = []
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
        positions.append(torch.where(differs, after, at.N).sort(-1).values[..., :most])
    return [x for x in positions if x.shape[-1]]


def open_keys(mask: Mask, block: Block, budget: Budget) -> torch.Tensor:
    """The keys left undecided by `span` and `surely`, and the ends of decided intervals.

    Positions [1,1,1,any]. Raises OverBudget.
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
    """Booleans [keys], true inside the intervals."""
    inside = torch.zeros(keys, dtype=torch.bool, device="cpu")
    for start, stop in intervals:
        inside[start:stop] = True
    return inside
