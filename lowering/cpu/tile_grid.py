"""The tiles of matrix products: their sizes, and everything known of each ahead of calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import torch
from attrs import frozen

from attn_graph.ir.attention import Operands
from attn_graph.kernels.hiding import Bits, hiding_bits
from attn_graph.lowering.cpu.schedule import (
    block_tile,
    row_tiles,
)
from attn_graph.lowering.problem import Problem
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.machine.philox import ALWAYS, ROOMS, WORDS, Compare, counters, draw_
from attn_graph.machine.workspace import Buffer
from attn_graph.masks import Mask, needs_of
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.places import Block, Place
from attn_graph.sparsity.parts import Part, Tile
from attn_graph.spec import TensorSpec

# Scores held at a time, 4 MiB of float32: they fit in a shared cache. Timed on one thread with
# 1 MiB of cache of its own, shapes from 64 to 4096 keys: 2^21 is not faster, with twice the memory;
# 2^19 takes up to 1.1 times as long, 2^17 1.5 times. Products and tanh take most of the time, and a
# nearer cache does not shorten it. Each tile costs 30 calls of PyTorch.
SCORES = 2**20
# With a mask: 64 of 1024 causal queries compute 1.06 times the kept scores, 256 of them 1.25.
MOST_ROWS = 64
# Without one no score is wasted, and long products are up to a tenth faster.
UNMASKED_ROWS = 256
PLACES = 2**18  # evaluated at a time by modifiers, of up to POSITIONS bytes each
DROPOUT_SCORES = SCORES // 2  # its random words take three times the memory of the scores
# With nothing but a mask between products, copies and sums by the row matter. These are the most
# queries of a tile, without and with a mask; a tile has as many bytes as SCORES of float32. With
# two threads half as many bytes take up to 1.2 times as long, and twice as many no less.
WHOLE_ROWS, WHOLE_MASKED_ROWS = 1024, 128
FEW_SCORES = 2**16  # they take less time than a list of tiles
LEAST_ROWS = 16
MOST_READY = 256  # tiles made ready ahead of calls; beyond, Python's share of a call is small
MOST_HELD = 2**14  # places of a part with held bits, in up to 256 KiB
HELD = 64  # parts
MOST_POSITIONS = 2**12  # held, in 32 KiB
LEAST_FULL = 64  # keys: on a longer run the mask is not evaluated


@frozen
class TileGrid:
    """The tiles' sizes: each has n = batch * groups key/value heads, and `rows` queries of their
    query heads. whole_rows: True if each tile reads all keys even if data may hide some. reach: the
    most keys of a tile."""

    problem: Problem
    rows: int
    batch: int
    groups: int
    whole_rows: bool

    @cached_property
    def r(self) -> int:
        return self.problem.H // self.problem.G

    @cached_property
    def listed(self) -> tuple[Tile, ...] | None:
        """The tiles, if no data decides them and they are few; else each call lists them."""
        p, by_data = self.problem, bool(needs_of(self.problem.node.mask))
        count = count_grid(p, self.rows, self.batch, self.groups)
        if count > MOST_READY or (by_data and not self.whole_rows):
            return None
        return tuple(self.list_tiles(None if by_data else {}))

    @cached_property
    def reach(self) -> int:
        if self.listed is None:
            return find_reach(self.problem, self.rows)
        return max(tile.keys for tile in self.listed)

    def list_tiles(self, data: Mapping[str, torch.Tensor] | None) -> Iterator[Tile]:
        """All tiles, given the mask's tensors; None: they have all keys."""
        p, every = self.problem, (Part(0, self.problem.N, "mixed"),)
        for b, g, i in product(
            split_length(p.B, self.batch),
            split_length(p.G, self.groups),
            split_length(p.M, self.rows),
        ):
            heads = range(g.start * self.r, g.stop * self.r)
            if data is None:
                yield Tile(b, heads, g, i, every)
            else:
                block = Block(b, heads, i, p.H, p.M, p.N, data)
                yield block_tile(p.node.mask, block, g, LEAST_FULL)

    def tiles(self, data: Mapping[str, torch.Tensor]) -> Iterable[Tile]:
        return self.list_tiles(data) if self.listed is None else self.listed

    @cached_property
    def holds(self) -> bool:
        """True if planning knows the mask, alike in all batch entries and heads."""
        mask = self.problem.node.mask
        return mask is not None and not mask.needs and is_ours(mask)

    def bits(self, tile: Tile, part: Part, at: Place, scores: torch.Tensor) -> Bits:
        """Bits that hide a part's masked places. at: all places of the call."""
        mask, keys = self.problem.node.mask, range(part.start, part.stop)
        assert mask is not None
        few = len(tile.rows) * (part.stop - part.start) <= MOST_HELD
        if few and self.holds and type(scores) is torch.Tensor and scores.is_cpu:
            return held_bits(mask, tile.rows, keys, (at.H, at.M, at.N), scores.dtype)
        here = at.within(tile.batch, tile.heads, tile.rows, keys)
        keep = torch.as_tensor(mask.keep(here), device=scores.device)
        return hiding_bits(keep, scores.dtype)

    def places(self, data: Mapping[str, torch.Tensor], like: torch.Tensor) -> Place:
        """All places of a call. like: a tensor on its device."""
        plain = type(like) is torch.Tensor and like.is_cpu and not is_traced()
        if plain and self.positions is not None:
            return self.positions.reading(data)
        return self.make_places(data, like.device)

    def make_places(self, data: Mapping[str, torch.Tensor], device: torch.device) -> Place:
        p = self.problem
        block = Block.whole(p.sizes, data)
        return Place.of(block, range(p.N), device)

    @cached_property
    @neutral_state()
    def positions(self) -> Place | None:
        """All places on a CPU, without data; None if they are many."""
        few = sum(self.problem.sizes) <= MOST_POSITIONS
        return self.make_places({}, torch.device("cpu")) if few else None

    @cached_property
    def collects(self) -> tuple[dict[str, int], ...]:
        """The operands with a wanted gradient of each modifier: their numbers, by name."""
        return collected_operands(self.problem)

    def totals(self, given: Operands[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Zeros for the wanted gradients of the modifiers' tensors, one dict a modifier."""
        p, device = self.problem, given.q.device
        return [
            {x: torch.zeros(p.specs[n].shape, dtype=p.wide, device=device) for x, n in own.items()}
            for own in self.collects
        ]

    @property
    def packing(self) -> int:
        """Bytes allocated by oneDNN for products in half precision, at most: keys and values of a
        tile, rows of sums, and weights."""
        p, heads = self.problem, self.batch * self.groups
        lines, item = heads * self.r * self.rows, p.dtype.itemsize
        weights = lines * self.reach * item
        return max(p.D, p.E) * (lines * p.wide.itemsize + heads * self.reach * item) + weights

    def wants(self, operand: int) -> bool:
        return self.problem.grad is not None and self.problem.grad.wants[operand]

    def collected(self, totals: Sequence[Mapping[str, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """The gradients of the modifiers' operands, by number of the operand."""
        pairs = zip(self.collects, totals, strict=True)
        numbered = [(n, sums[name]) for own, sums in pairs for name, n in own.items()]
        return {n: x.to(self.problem.specs[n].dtype) for n, x in numbered}

    @property
    def size(self) -> str:
        """A tile's size, for `explain`."""
        return f"{self.batch} x {self.groups * self.r} heads x {self.rows} queries"


def collected_operands(problem: Problem) -> tuple[dict[str, int], ...]:
    """`TileGrid.collects`."""
    wants, slots = problem.grad and problem.grad.wants, problem.node.slots.modifiers
    return tuple([{name: n for name, n in own.items() if wants and wants[n]} for own in slots])


def total_bytes(problem: Problem) -> int:
    """Bytes allocated by `totals` beside gradients: sums for gradients of a narrower dtype."""
    numbers = [n for own in collected_operands(problem) for n in own.values()]
    narrow = (x for x in map(problem.specs.__getitem__, numbers) if x.dtype != problem.wide)
    return sum(prod(x.shape) * problem.wide.itemsize for x in narrow)


@lru_cache(HELD)
@neutral_state()
def held_bits(
    mask: Mask, rows: range, keys: range, sizes: tuple[int, int, int], dtype: torch.dtype
) -> Bits:
    """Bits that hide the masked places of a mask of ours without data, for CPUs."""
    keep = mask.keep(Place.of(Block(range(1), range(1), rows, *sizes), keys))
    return hiding_bits(torch.as_tensor(keep), dtype)


def choose_sizes(problem: Problem, factors: torch.dtype) -> tuple[int, int, int]:
    """Queries, batch entries and key/value heads of a tile with about SCORES scores: rows first,
    then heads, then batch. factors: the dtype of the products."""
    p, r = problem, problem.H // problem.G
    scores = DROPOUT_SCORES if p.node.dropout else SCORES
    if p.node.mask is not None:
        most = MOST_ROWS
    elif p.node.modifiers:
        most = min(UNMASKED_ROWS, max(MOST_ROWS, PLACES // p.N))
    else:
        most = UNMASKED_ROWS
    rows = min(p.M, most, max(LEAST_ROWS, scores // (p.N * r)))
    return rows, *choose_heads(p, factors, rows, scores, by_data=bool(needs_of(p.node.mask)))


def choose_entries(problem: Problem) -> tuple[int, int, int]:
    p = problem
    return p.M, share_evenly(p.B, count_row_scores(p) // (p.H * p.M * p.N)), p.G


def choose_row_sizes(problem: Problem) -> tuple[int, int, int]:
    """Tiles with nothing but a mask between products, in the operands' dtype."""
    p, r = problem, problem.H // problem.G
    if has_few_scores(p):
        return p.M, p.B, p.G
    scores = count_row_scores(p)
    most = WHOLE_ROWS if p.node.mask is None else WHOLE_MASKED_ROWS
    rows = min(p.M, most, max(-(-LEAST_ROWS // r), scores // (p.N * r)))
    return rows, *choose_heads(p, None, rows, scores, by_data=bool(needs_of(p.node.mask)))


def choose_kept_sizes(problem: Problem, drops: bool) -> tuple[int, int, int]:
    """Tiles of all queries of some heads, for kept weights. A backward in float32, beside all
    weights, takes no longer with half the scores. drops: True if words are drawn for a tile."""
    if has_few_scores(problem):
        return problem.M, problem.B, problem.G
    p, scores = problem, DROPOUT_SCORES if drops else count_row_scores(problem)
    if p.grad is not None and p.dtype == p.wide:
        half = p.M, *choose_heads(p, None, p.M, scores // 2, by_data=reads_picked(p))
        if count_grid(p, *half) <= MOST_READY:
            return half
    return p.M, *choose_heads(p, None, p.M, scores, by_data=reads_picked(p))


def reads_picked(problem: Problem) -> bool:
    """True if tiles with kept weights read just the keys that data leave: without a bias. With one
    a tile reads all keys."""
    return bool(needs_of(problem.node.mask)) and not problem.node.is_biased


def count_grid(problem: Problem, rows: int, batch: int, groups: int) -> int:
    p = problem
    return -(-p.B // batch) * -(-p.G // groups) * -(-p.M // rows)


def count_row_scores(problem: Problem) -> int:
    """How many scores a tile of whole rows has, about: as many bytes as SCORES of float32."""
    return SCORES * torch.float32.itemsize // problem.dtype.itemsize


def has_few_scores(problem: Problem) -> bool:
    """True if leaving out hidden scores takes longer than computing them."""
    return problem.B * problem.H * problem.M * problem.N <= FEW_SCORES


def choose_heads(
    problem: Problem, factors: torch.dtype | None, rows: int, scores: int, *, by_data: bool
) -> tuple[int, int]:
    """Batch entries and key/value heads of a tile. factors: the dtype of the products; None if
    tiles are copied unless products take them in place: batch entries need not be one axis with
    heads then. by_data: True if data pick the keys of each batch entry."""
    p = problem
    one = find_reach(p, rows) * rows * p.H // p.G  # scores of a key/value head
    groups = share_evenly(p.G, max(1, scores // one))
    merges = groups == p.G and (
        factors is None or all(merges_batch(s) or packs(s, factors) for s in p.specs[1:3])
    )
    batch = share_evenly(p.B, max(1, scores // (one * groups))) if merges and not by_data else 1
    return batch, groups


def share_evenly(count: int, most: int) -> int:
    """The size of the largest of the fewest shares of at most `most` each."""
    return -(-count // -(-count // most))


def split_length(length: int, size: int) -> list[range]:
    """The positions in pieces of `size`; the last may be shorter."""
    whole = range(length)
    return [whole[at : at + size] for at in whole[::size]]


def find_reach(problem: Problem, rows: int) -> int:
    """The most keys of a block of `rows` queries; all keys if data decide, or if there are many
    blocks."""
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs or rows * MOST_READY < p.M:
        return p.N
    tiles = row_tiles(mask, Block.whole(p.sizes), range(p.G), rows)
    return max(1, *(tile.keys for tile in tiles))


def packs(spec: TensorSpec, factors: torch.dtype) -> bool:
    """True if products would copy an operand in secret: other dtype, or no unit stride."""
    return spec.dtype != factors or not spec.unit_last


def merges_batch(spec: TensorSpec) -> bool:
    return (
        spec.shape[0] <= 1
        or spec.shape[1] <= 1
        or spec.strides[0] == spec.shape[1] * spec.strides[1]
    )


def lies_flat(spec: TensorSpec) -> bool:
    """True if a tensor is [n,rows,last] in place, with batch entries and heads as one axis."""
    return merges_batch(spec) and spec.unit_last


# Dropped weights of a tile, drawn in its scratch memory


def needed_to_draw(rows: int, keys: int, dtype: torch.dtype) -> dict[str, Buffer]:
    """The scratch buffers of the draws, for `rows` rows of at most `keys` scores."""
    words = rows * (keys // WORDS + 2)
    rooms = {f"word{i}": Buffer((words,), torch.int64) for i in range(ROOMS)}
    return {"drawn": Buffer((WORDS * words,), dtype), **rooms}


def draw(
    rate: float, seed: tuple[int, int], ranges: Sequence[range], H: int,
    scratch: Mapping[str, torch.Tensor], compare: Compare, period: int = ALWAYS,
) -> torch.Tensor:  # fmt: skip
    """The draws for the places `ranges`, as `draw_` gives them. seed: the seed and the offset."""
    shape = (*map(len, ranges[:3]), len(counters(ranges[3])))
    count = prod(shape)
    rooms = [scratch[f"word{i}"][:count].view(shape) for i in range(ROOMS)]
    out = scratch["drawn"][: WORDS * count].view(*shape[:3], -1)
    return draw_(out, rate, *seed, ranges, H, rooms, period, compare)
