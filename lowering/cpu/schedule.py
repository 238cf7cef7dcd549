"""The visited tiles of the score matrix, from the algebra of masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, final

import torch
from attrs import evolve, frozen

from attn_graph.lowering.problem import Problem
from attn_graph.masks import Band, Mask
from attn_graph.masks.joins import leaves
from attn_graph.masks.places import Block, Keys, Place
from attn_graph.masks.regions import find_breaks

CALL_SECONDS = 60e-6  # of a small tile on a CPU: slicing, the kernel's start, copying the result
FLOP_SECONDS = 7e-12  # of a multiplication or addition on 2 cores: only ratios count
PULL_FLOPS = 3  # times the forward pass's, by their time
READ_ROWS = 18  # queries: a key is read in the time of so many
ADDED_SECONDS = 3e-10  # of reading and adding one number to a score, beside its product
MADE_SECONDS = 1e-9  # of an addend's number, made by each call
MERGE_SECONDS = 4e-10  # of an element of o, to merge two parts of a tile
ROW_BLOCKS = (32, 64, 128, 256, 512)
MOST_TILES = 2**13  # listed while planning, in some tenths of a second; or each call lists them
MOST_JOINED = 2**14  # scores of a head with held numbers to hide a corner: 64 KiB
MOST_READY = 256  # made ready ahead of calls; beyond, Python's share of a call is small
Tensors = Mapping[str, torch.Tensor]  # by name
Cut = Callable[[torch.Tensor], torch.Tensor]  # a view of some rows of x [B,H,L,...]
BRIDGE = 32  # keys: a hole this small costs less to compute than a tile to begin


@final
@frozen
class Part:
    """Neighbouring keys [start, stop) of a tile. full: every query keeps all of them; causal:
    the first query keeps the first one, the next one more, and so on; mixed: the mask must say.

    gathered: several runs of keys in their place, copied to lie side by side.
    """

    start: int
    stop: int
    kind: Literal["full", "mixed", "causal"]
    gathered: tuple[range, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.gathered)) if self.gathered else self.stop - self.start

    @property
    def runs(self) -> tuple[range, ...]:
        """Its keys, in runs without a hole."""
        return self.gathered or (range(self.start, self.stop),)

    def area(self, rows: int) -> int:
        """Computed scores of `rows` queries; of a causal part the kept ones."""
        keys = len(self)
        if self.kind != "causal":
            return rows * keys
        side = min(rows, keys)
        return side * (side + 1) // 2 + (rows - side) * keys


@final
@frozen
class Tile:
    """Queries `rows` of the batch entries `batch` against the keys of `parts`.

    `repeat` > 1: this many copies in all, with rows and keys moved by `step` each time. groups: its
    key/value heads; None: all.
    """

    batch: range
    rows: range
    parts: tuple[Part, ...]
    repeat: int = 1
    step: int = 0
    groups: range | None = None

    def heads(self, x: int, G: int) -> range:
        """Its heads among the x heads of a tensor. G: all key/value heads."""
        if self.groups is None:
            return range(x)
        return range(self.groups.start * x // G, self.groups.stop * x // G)

    @property
    def keys(self) -> int:
        return sum(map(len, self.parts))

    @property
    def area(self) -> int:
        """Computed scores, for one head; of a causal part the kept ones."""
        rows = len(self.rows)
        return len(self.batch) * self.repeat * sum(part.area(rows) for part in self.parts)


def place_within(at: Place, b: range, h: range, i: range, j: range) -> Place:
    """The places of these batch entries, heads, queries and keys, out of all; as views."""
    if at.ranges == (b, h, i, j):
        return at
    return Place(
        at.b[b.start : b.stop],
        at.h[h.start : h.stop],
        at.i[i.start : i.stop],
        at.j[j.start : j.stop],
        *(at.H, at.M, at.N, at.data),
        (b, h, i, j),
    )


def parts_of(mask: Mask | None, block: Block, least_full: int) -> tuple[Part, ...]:
    """The possible keys of a block of queries; full runs of `least_full` keys stand alone."""
    if mask is None:
        return (Part(0, block.N, "full"),) if block.N else ()
    span, sure = mask.span(block).bridged(BRIDGE), mask.surely(block)
    return tuple(part for a, b in span.intervals for part in split_interval(a, b, sure, least_full))


Way = Callable[[int], list[Tile] | None]  # tiles of at most this many queries; None: too many


def split_interval(start: int, stop: int, sure: Keys, least_full: int) -> Iterator[Part]:
    if sure.covers(start, stop):
        yield Part(start, stop, "full")
        return
    at = start
    for a, b in (sure & Keys.between(start, stop)).intervals:
        if b - a >= least_full:
            yield from [Part(at, a, "mixed")] if at < a else []
            yield Part(a, b, "full")
            at = b
    yield from [Part(at, stop, "mixed")] if at < stop else []


def row_tiles(
    problem: Problem,
    mask: Mask | None,
    batch: range,
    rows: int,
    least_full: int,
    data: Mapping[str, torch.Tensor] | None = None,
    groups: range | None = None,
) -> list[Tile]:
    """A tile for each block of `rows` queries. groups: of some key/value heads."""
    starts = range(0, problem.M, rows)
    given = least_full, data, groups
    return [make_tile(problem, mask, batch, start, rows, *given) for start in starts]


def make_tile(
    problem: Problem,
    mask: Mask | None,
    batch: range,
    start: int,
    rows: int,
    least_full: int,
    data: Mapping[str, torch.Tensor] | None = None,
    groups: range | None = None,
) -> Tile:
    """The tile of the block of queries from `start` on."""
    H, M, N = problem.H, problem.M, problem.N
    tile = Tile(batch, range(start, min(start + rows, M)), (), groups=groups)
    block = Block(batch, tile.heads(H, problem.G), tile.rows, H, M, N, data)
    return evolve(tile, parts=parts_of(mask, block, least_full))


def gather_parts(tile: Tile, least: int, most: int) -> Tile:
    """A tile with parts of fewer than `least` keys made one for each `most` keys: copying them
    takes less time than a call for each, and a merge."""
    parts = [part for part in tile.parts if len(part) >= least]
    for kind in ("full", "mixed"):
        short = [part for part in tile.parts if part.kind == kind and len(part) < least]
        ends = [*accumulate(map(len, short))]
        groups = groupby(zip(short, ends, strict=True), key=lambda pair: pair[1] // most)
        parts += [side_by_side([part for part, _ in group]) for _, group in groups]
    return evolve(tile, parts=tuple(parts))


def side_by_side(parts: Sequence[Part]) -> Part:
    """Parts of one kind as one."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    gathered = tuple(range(x.start, x.stop) for x in parts)
    return Part(first.start, last.stop, first.kind, gathered)


def shorten_parts(tile: Tile, most: int) -> Tile:
    """A tile with parts of at most `most` keys, at least its number of queries."""
    parts: list[Part] = []
    for part in tile.parts:
        if part.kind == "causal":  # the last query keeps as many keys as there are queries
            parts.append(evolve(part, stop=min(part.stop, part.start + len(tile.rows))))
        else:
            cuts = range(part.start, part.stop, most)
            parts += [evolve(part, start=at, stop=min(at + most, part.stop)) for at in cuts]
    return evolve(tile, parts=tuple(parts))


def join_neighbours(tiles: list[Tile], most: int, bounded: bool) -> list[Tile]:
    """Neighbours with equal keys made one, up to `most` scores under a mask. bounded: full tiles
    too, since something else is added to their scores."""
    out: list[Tile] = []
    for tile in tiles:
        last = out[-1] if out else None
        if last is not None and last.parts == tile.parts and last.batch == tile.batch:
            joined = evolve(last, rows=range(last.rows.start, tile.rows.stop))
            free = not bounded and all(p.kind == "full" for p in tile.parts)
            if free or len(joined.rows) * joined.keys <= most:
                out[-1] = joined
                continue
        out.append(tile)
    return out


def join_entries(entries: Iterable[Sequence[Tile]], most: int | None, bounded: bool) -> list[Tile]:
    """Neighbouring batch entries with equal tiles made one, up to `most` scores of a tile with an
    addend. None: all entries have one addend."""
    out: list[Tile] = []
    for _, group in groupby(entries, key=lambda tiles: [(x.rows, x.parts) for x in tiles]):
        same = [*group]
        added = [x for x in same[0] if bounded or any(part.kind == "mixed" for part in x.parts)]
        largest = max((len(x.rows) * x.keys for x in added), default=0)
        count = max(1, most // largest) if most is not None and largest else len(same)
        for at in range(0, len(same), count):
            first, last = same[at], same[at : at + count][-1]
            pairs = zip(first, last, strict=True)
            out += [evolve(x, batch=range(x.batch.start, y.batch.stop)) for x, y in pairs]
    return out


def join_corner(problem: Problem, tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """A small causal corner and the keys before it as one part, if they are all: one call with an
    addend takes less time than two calls and a merge."""
    if problem.M * problem.N > MOST_JOINED:
        return tiles
    match tiles:
        case (Tile(parts=(Part(kind="full") as first, Part(kind="causal") as corner)) as tile,):
            return (evolve(tile, parts=(Part(first.start, corner.stop, "mixed"),)),)
    return tiles


Same = tuple[Tile, int]  # a tile, and how many there are, each moved along the diagonal


def fold_tiles(problem: Problem, mask: Mask, rows: int, least_full: int) -> list[Tile] | None:
    """Tiles by `rows` queries; runs of one tile moved along the diagonal become one with `repeat`.
    For masks and modifiers of j - i alone. Each batch entry has its own. None if more than
    MOST_TILES are left."""
    batch, changes = (
        range(problem.B),
        find_changes(mask, problem.B, problem.H, problem.M, problem.N),
    )
    if changes is None and rows * MOST_TILES < problem.M:
        return None
    runs: list[Same] = []
    for starts in group_blocks(problem.M, rows, changes):
        ends = [*starts[:2], starts[-1]]
        tiles = [make_tile(problem, mask, batch, at, rows, least_full) for at in ends]
        if len({outline(tile) for tile in tiles}) == 1:
            runs.append((tiles[0], len(starts)))
        elif len(runs) + len(starts) <= MOST_TILES:
            runs += [(make_tile(problem, mask, batch, at, rows, least_full), 1) for at in starts]
        else:
            return None
    return fold_diagonals(runs)


@lru_cache(8)  # asked for each row block
def find_changes(mask: Mask, B: int, H: int, M: int, N: int) -> list[int] | None:
    """The boundaries between queries with alike or moved tiles of bands; None: unknown."""
    if not all(isinstance(leaf, Band) for leaf in leaves(mask)):
        return None
    return find_breaks(mask, Block(range(B), range(H), range(M), H, M, N))


def group_blocks(M: int, rows: int, changes: Sequence[int] | None) -> list[range]:
    """The starts of blocks of `rows` queries: blocks between two changes together, others alone.
    Between two changes all edges of a mask stand still or move along with the queries."""
    if changes is None:
        return [range(at, at + 1) for at in range(0, M, rows)]
    whole = [range(-(-a // rows) * rows, b // rows * rows, rows) for a, b in pairwise(changes)]
    cut = {at // rows * rows for at in changes if at % rows}
    return sorted(
        (*filter(len, whole), *(range(at, at + 1) for at in cut)), key=lambda starts: starts.start
    )


def fold_diagonals(tiles: Iterable[Same]) -> list[Tile] | None:
    """Neighbours equal to one tile moved along the diagonal, made one; None if many are left."""
    out: list[Tile] = []
    for _, run in groupby(tiles, key=lambda same: outline(same[0])):
        same = list(run)
        first, count = same[0][0], sum(count for _, count in same)
        step = len(first.rows) if count > 1 else 0
        if len(out) + min(count, len(first.batch)) > MOST_TILES:
            return None
        if not first.parts:
            last, more = same[-1]
            stop = last.rows.stop + (more - 1) * step
            out.append(evolve(first, rows=range(first.rows.start, stop)))
        elif count > len(first.batch):
            out += [
                evolve(first, batch=range(b, b + 1), repeat=count, step=step) for b in first.batch
            ]
        else:
            out += [move_tile(first, n * step) for n in range(count)]
    return out


def move_tile(tile: Tile, by: int) -> Tile:
    rows = range(tile.rows.start + by, tile.rows.stop + by)
    parts = tuple(evolve(x, start=x.start + by, stop=x.stop + by) for x in tile.parts)
    return evolve(tile, rows=rows, parts=parts)


def outline(tile: Tile) -> tuple[object, ...]:
    """Equal for tiles moved along the diagonal."""
    at = tile.rows.start
    return len(tile.rows), tuple((p.start - at, p.stop - at, p.kind) for p in tile.parts)


def plain_tiles(problem: Problem, mask: Mask | None) -> list[Tile] | None:
    """Tiles for no mask or a causal one, both built into the fused kernel.

    A diagonal `high` places right of the corner: every query keeps the first `high` keys, and the
    rest is a square triangle. Left of the corner: the first -high queries keep nothing. The kernel
    masks before it scales, so a scale of 0 or less turns its -inf into NaN or inf: None then, and
    for a scale too small to be sure.
    """
    B, M, N = range(problem.B), problem.M, problem.N
    if mask is None:
        return [Tile(B, range(M), (Part(0, N, "full"),))]
    if not isinstance(mask, Band) or mask.low is not None or mask.high is None:
        return None
    if mask.ragged or problem.low_scale:
        return None
    dead = min(M, max(0, -mask.high))
    seen = max(0, mask.high)
    parts = [Part(0, seen, "full")] if seen else []
    tiles = [Tile(B, range(dead), ())] if dead else []
    live = [Tile(B, range(dead, M), (*parts, Part(seen, N, "causal")))] if dead < M else []
    return tiles + live


def estimate_seconds(problem: Problem, tiles: Iterable[Tile]) -> float:
    """A rough time for these tiles: their computing, adding and merging, and their number of
    starts."""
    return sum(estimate_tile(problem, tile) for tile in tiles)


def estimate_tile(problem: Problem, tile: Tile) -> float:
    H, D, E = problem.H, problem.D, problem.E
    copies, rows = len(tile.batch) * tile.repeat, len(tile.rows)
    each = 2 * (D + E) * FLOP_SECONDS * (1 if problem.grad is None else PULL_FLOPS)
    adding = [x for x in tile.parts if x.kind == "mixed" or problem.node.modifiers]
    added = sum(rows * len(x) for x in adding)
    merged = max(0, len(tile.parts) - 1) * rows * E
    return (
        CALL_SECONDS * len(tile.parts)
        + copies * H * each * sum(part.area(rows) + READ_ROWS * len(part) for part in tile.parts)
        + copies * H * (ADDED_SECONDS * added + MERGE_SECONDS * merged)
        + MADE_SECONDS * added
    )


def choose_cheapest(problem: Problem, ways: Sequence[Way]) -> tuple[int, int] | None:
    """The cheapest way and its row block; None if each gives too many tiles."""
    blocks = [rows for rows in ROW_BLOCKS if rows < 2 * problem.M] or [ROW_BLOCKS[0]]
    costs = {
        (n, rows): estimate_seconds(problem, tiles)
        for rows in blocks
        for n, way in enumerate(ways)
        if (tiles := way(rows)) is not None
    }
    return min(costs, key=costs.__getitem__, default=None)
