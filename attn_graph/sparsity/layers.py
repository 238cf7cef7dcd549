"""The kept places of each batch entry, exactly, as rectangles and triangles ("layers"), and their
counts in closed form.

For masks made of strips, and for documents (`SameSegment`) intersected with one strip. The work
grows with edges and documents, not with queries and keys; data are read once. Places and tiles
between two edges, over the queries of a layer, are a sum of arithmetic series. All sums are Python
integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise, takewhile
from typing import TypeVar, cast, final

import torch
from attrs import evolve, frozen

from attn_graph.machine.cache import remember
from attn_graph.masks.joins import And, Join, Mask, flatten_join, join_masks
from attn_graph.masks.leaves import LENGTHS, SameSegment
from attn_graph.masks.places import Block, Keys, Place, Strip, Term, join_intervals

MOST_POINTS = 2**17  # evaluations of a mask, over all batch entries: a good half second
LEAST_DOCUMENT = 16  # queries or keys, on average; smaller documents are not cut out one by one
Strips = tuple[Strip, ...]  # of one batch entry, bounded by numbers: a mask is joined from them
Document = tuple[range, range]  # queries, and the keys that carry their number
T = TypeVar("T")
MOST_LAYERS = 128  # blocks of queries for which a mask is bounded
MOST_RUNS = 512  # of such a block


@final
@frozen
class Edge:
    """Where a run of keys begins or ends: at `at`, or, if `moves` is 1, at `at` + i."""

    at: int
    moves: int = 0

    def of(self, i: int) -> int:
        """Its key for query i."""
        return self.at + self.moves * i


Run = tuple[Edge, Edge]  # keys from the first edge to before the second, at least one


@final
@frozen
class Layer:
    """Queries `rows` and the runs of keys they keep; runs are sorted and do not touch."""

    rows: range
    runs: tuple[Run, ...]

    def reach(self, rows: range) -> list[tuple[int, int]]:
        """The keys that some of these queries keep, by run: edges never move back, and move by one
        a query, so that none is left out between."""
        return [(start.of(rows[0]), stop.of(rows[-1])) for start, stop in self.runs]

    def bound_keys(self, rows: range) -> tuple[Keys, Keys]:
        """The keys that all of these queries keep, and those that any keeps."""
        first, last = rows[0], rows[-1]
        within = [(a, b) for x, y in self.runs if (a := x.of(last)) < (b := y.of(first))]
        return Keys(tuple(within)), Keys(join_intervals(self.reach(rows), gap=0))


@final
@frozen
class Region:
    """The layers of equal batch entries and heads, from the first query on."""

    batch: range
    heads: range
    layers: tuple[Layer, ...]

    @property
    def count(self) -> int:
        """Its pairs of batch entry and head."""
        return len(self.batch) * len(self.heads)

    @property
    def pairs(self) -> int:
        return self.count * sum(
            count_places(layer.rows, run) for layer in self.layers for run in layer.runs
        )

    @property
    def queries(self) -> int:
        return self.count * sum(len(layer.rows) for layer in self.layers if layer.runs)

    @property
    def keys(self) -> Keys:
        """The keys that some query keeps."""
        intervals = (keys for layer in self.layers for keys in layer.reach(layer.rows))
        return Keys(join_intervals(sorted(intervals), gap=0))

    def tiles(self, block: tuple[int, int]) -> int:
        """How many tiles of `block` queries x keys have a kept place."""
        whole = sum(
            count_layer_tiles(layer, whole_lines(layer, block[0]), block) for layer in self.layers
        )
        broken = {line for layer in self.layers for line in broken_lines(layer, block[0])}
        return self.count * (whole + sum(len(self.line(line, block)) for line in broken))

    def line(self, number: int, block: tuple[int, int]) -> Keys:
        """The numbers of the tiles with a kept place, in one line of tiles."""
        rows, keys = block
        intervals = []
        at = bisect_right(self.layers, number * rows, key=lambda layer: layer.rows.stop)
        for layer in takewhile(
            lambda layer: layer.rows.start < number * rows + rows, self.layers[at:]
        ):
            first = max(layer.rows.start, number * rows)
            last = min(layer.rows.stop, number * rows + rows) - 1
            intervals += [
                (start.of(first) // keys, (stop.of(last) - 1) // keys + 1)
                for start, stop in layer.runs
            ]
        return Keys(join_intervals(sorted(intervals), gap=0))

    def outside(self, N: int) -> Region:
        return evolve(self, layers=tuple(complement_layer(layer, N) for layer in self.layers))


def count_places(rows: range, run: Run) -> int:
    (start, stop), n = run, len(rows)
    first = stop.of(rows.start) - start.of(rows.start)
    return n * first + (stop.moves - start.moves) * (n * (n - 1) // 2)


def complement_layer(layer: Layer, N: int) -> Layer:
    edges = [Edge(0), *(edge for run in layer.runs for edge in run), Edge(N)]
    first = layer.rows.start
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return evolve(layer, runs=tuple((a, b) for a, b in pairs if a.of(first) < b.of(first)))


# Tiles. In line t of tiles a run begins in tile start(t rows) // keys and ends in tile
# (stop(t rows + rows - 1) - 1) // keys: both are (t rows + c) // keys or c // keys for some c.


def whole_lines(layer: Layer, size: int) -> range:
    """The lines of tiles whose queries are all in a layer."""
    return range(-(-layer.rows.start // size), layer.rows.stop // size)


def broken_lines(layer: Layer, size: int) -> set[int]:
    """The lines of tiles that share some of their queries, not all, with a layer."""
    return {at // size for at in (layer.rows.start, layer.rows.stop) if at % size}


def count_layer_tiles(layer: Layer, lines: range, block: tuple[int, int]) -> int:
    """How many tiles of whole lines have a place of a layer's runs."""
    if not lines:
        return 0
    ends = [(start, Edge(stop.of(block[0] - 1) - 1, stop.moves)) for start, stop in layer.runs]
    each = sum(count_between(first, last, lines, block) for first, last in ends)
    shared = (
        count_between(
            after[0], before[1], find_shared_lines(after[0], before[1], lines, block), block
        )
        for before, after in pairwise(ends)
    )
    return each - sum(shared)


def count_between(first: Edge, last: Edge, lines: range, block: tuple[int, int]) -> int:
    return sum_tiles(last, lines, block) - sum_tiles(first, lines, block) + len(lines)


def find_shared_lines(first: Edge, last: Edge, lines: range, block: tuple[int, int]) -> range:
    """The lines in which a run from tile `first` shares tiles with the run before it.

    The run before ends in tile `last`. In other lines `first` is beyond `last`.
    """
    rows, keys = block
    if first.moves == last.moves:  # the numbers of their tiles differ by one of two neighbours
        return lines if (last.at - first.at) // keys >= -1 else lines[:0]
    if last.moves:
        begin = -((last.at - first.at // keys * keys) // rows)
        return range(max(lines.start, begin), max(lines.stop, begin))
    end = ((last.at // keys + 1) * keys - 1 - first.at) // rows + 1
    return range(min(lines.start, end), min(lines.stop, end))


def sum_tiles(edge: Edge, lines: range, block: tuple[int, int]) -> int:
    rows, keys = block
    if not edge.moves:
        return len(lines) * (edge.at // keys)
    return floor_sum(len(lines), keys, rows, edge.at + lines.start * rows)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of (a t + b) // m for 0 <= t < n, in as many steps as Euclid needs for a, m.

    Without the whole parts of slope and offset, the points below a line of slope under 1 remain;
    they are counted along the other axis.
    """
    total = 0
    while n > 0:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        n, b = divmod(a % m * n + b % m, m)
        m, a = a % m, m
    return total


Both = tuple[list[Region], list[Region]]  # upper and lower bound of the kept places


def bound_both(most: Mask, least: Mask, block: Block, size: int) -> Both:
    """A bound from above on the places that `most` keeps, and one from below on those of `least`.

    The masks are bounded over blocks of one or more lines of `size` queries and all batch entries.
    """
    lines = -(-len(block.rows) // size)
    both, same = (block.batch, block.heads), least == most
    outer, inner = list[Layer](), list[Layer]()
    for part in block.split(size * max(1, -(-lines // MOST_LAYERS))) if all(both) else ():
        surely, span = most.bound_keys(part)
        surely = surely if same else least.bound_keys(part)[0]
        outer.append(layer_of(part.rows, span if is_short(span) else span.hull))
        inner.append(layer_of(part.rows, surely if is_short(surely) else part.none))
    return [Region(*both, tuple(outer))], [Region(*both, tuple(inner))]


def is_short(keys: Keys) -> bool:
    return len(keys.intervals) <= MOST_RUNS


def layer_of(rows: range, keys: Keys) -> Layer:
    """Queries that keep the same keys."""
    return Layer(rows, tuple([(Edge(a), Edge(b)) for a, b in keys.intervals]))


def is_layered(mask: Mask, block: Block) -> bool:
    """True if a mask is made of strips, or of documents and one strip.

    The block has all data; their values do not matter.
    """
    at = entry_at(block, *block.batch[:1])
    segmented, rest = split_documents(mask)
    if segmented:
        return rest is None or rest.strip(at) is not None
    return list_strips(mask, at) is not None


def list_layers(mask: Mask, block: Block, most_points: int) -> list[Region] | None:
    """`find_regions` with as few layers as there can be: neighbours on the same lines are one."""
    regions = find_regions(mask, block, most_points)
    if regions is None:
        return None
    return [evolve(region, layers=join_layers(region.layers)) for region in regions]


def find_regions(mask: Mask, block: Block, most_points: int = MOST_POINTS) -> list[Region] | None:
    """A mask's kept places, a region for each run of equal batch entries. At all queries of a layer
    the same runs have keys between them, and before and behind them.

    None if these are not known exactly, if finding them takes evaluating the mask at more than
    `most_points` places, and for small documents, or some in pieces. The block has all data;
    without data a mask's counts and tiles share the regions.
    """
    if block.data:
        return derive_regions(mask, block, most_points)
    sizes = block.H, block.M, block.N
    return known_regions(mask, block.batch, block.heads, block.rows, sizes, most_points)


@remember
def known_regions(
    mask: Mask,
    batch: range,
    heads: range,
    rows: range,
    sizes: tuple[int, int, int],
    most_points: int,
) -> list[Region] | None:
    return derive_regions(mask, Block(batch, heads, rows, *sizes, {}), most_points)


def derive_regions(mask: Mask, block: Block, most_points: int) -> list[Region] | None:
    """`find_regions`, each time anew."""
    if 0 in (len(block.batch), len(block.heads), len(block.rows), block.N):
        return []
    block = evolve(block, data={n: widen(n, x) for n, x in (block.data or {}).items()})
    segmented, rest = split_documents(mask)
    if segmented:
        return cut_documents(rest, block)
    batch = block.batch if len(block.batch) <= MOST_POINTS else block.batch[:2]
    at = entry_at(block, *batch)
    whole = mask.strip(at)
    strips = list_strips(mask, at) if whole is None else [whole]
    if strips is None:
        return None
    alike = all(count_elements(term) == 1 for strip in strips for term in bounds_of(strip))
    if not alike and len(batch) < len(block.batch):
        return None
    entries = 1 if alike else len(batch)
    kinds = [*zip(*[entry_strips(strip, entries) for strip in strips], strict=True)]
    first = dict(zip(reversed(kinds), reversed(batch), strict=False))
    if whole is None and sum(count_points(kind, block) for kind in first) > most_points:
        return None
    layers: dict[Strips, tuple[Layer, ...]] = {}
    for kind, entry in first.items():
        if whole is None:
            layers[kind] = find_layers(mask, kind, entry_at(block, entry))
        else:
            layers[kind] = (*layers_of_strip(kind[0], range(block.M), range(block.N)),)
    runs = [(block.batch, kinds[0])] if alike else group_equal(kinds, block.batch)
    return [Region(each, block.heads, layers[kind]) for each, kind in runs]


def widen(name: str, x: torch.Tensor) -> torch.Tensor:
    """Lengths as int64, so that sums with any bound fit."""
    return x.to(torch.int64) if name in LENGTHS else x


def group_equal(kinds: Iterable[T], batch: range) -> Iterator[tuple[range, T]]:
    """Runs of neighbouring batch entries of one kind."""
    at = batch.start
    for kind, same in groupby(kinds):
        count = sum(1 for _ in same)
        yield range(at, at + count), kind
        at += count


def layers_of_strip(strip: Strip, rows: range, keys: range) -> Iterator[Layer]:
    """The layers of a strip among some queries and keys.

    Query i keeps the keys from max(keys.start, i + low) to min(keys.stop, i + high + 1), exclusive.
    Layers are cut at the queries where one of these terms takes over, where the first key comes and
    where the last one goes. A query whose first key is the same by both terms belongs to the layer
    above: a window of a multiple of 32 keys then leaves a multiple of 32 queries.
    """
    low, high = strip.low, strip.high
    k0, k1 = keys.start, keys.stop if strip.keys is None else min(keys.stop, strip.keys)
    seen = rows.stop if strip.rows is None else max(rows.start, min(rows.stop, strip.rows))
    cuts = {rows.start, rows.stop, seen}
    cuts |= set() if low is None else {k0 - low + 1, k1 - low}
    cuts |= set() if high is None else {k0 - high, k1 - high - 1}
    for a, b in pairwise(sorted(i for i in cuts if rows.start <= i <= rows.stop)):
        first = k0 if low is None else max(k0, a + low)
        last = k1 if high is None else min(k1, a + high + 1)
        start = Edge(k0) if low is None or first == k0 else Edge(low, 1)
        stop = Edge(k1) if high is None or last == k1 else Edge(high + 1, 1)
        alive = a < seen and first < last
        yield Layer(range(a, b), ((start, stop),) if alive else ())


def join_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Merge neighbouring layers whose edges lie on the same lines."""
    out: list[Layer] = []
    for layer in layers:
        runs = join_runs(out[-1], layer) if out else None
        if runs is None:
            out.append(layer)
        else:
            out[-1] = Layer(range(out[-1].rows.start, layer.rows.stop), runs)
    return tuple(out)


def join_runs(above: Layer, below: Layer) -> tuple[Run, ...] | None:
    """The runs of two neighbouring layers merged; None if they lie on different lines."""
    if len(above.runs) != len(below.runs):
        return None
    pairs = zip(sum(above.runs, ()), sum(below.runs, ()), strict=True)
    edges = [join_edges(a, b, above.rows, below.rows) for a, b in pairs]
    if None in edges:
        return None
    sure = cast("list[Edge]", edges)
    return tuple(zip(sure[::2], sure[1::2], strict=True))


def join_edges(a: Edge, b: Edge, above: range, below: range) -> Edge | None:
    """One edge for both layers. An edge of a single query may count as moving or not."""
    if a == b or (len(below) == 1 and a.of(below.start) == b.of(below.start)):
        return a
    return b if len(above) == 1 and a.of(above.start) == b.of(above.start) else None


# Strips. Lines bound each: keys before v, queries before u, diagonals j = i + d. Between queries at
# which lines cross, the edges of all strips keep their order along the keys. There a mask is
# evaluated once for each run of keys between two edges.


def entry_at(block: Block, *entries: int) -> Place:
    """The place of some batch entries, for any query and key."""
    b = torch.tensor(entries, device="cpu").reshape(-1, 1, 1, 1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    return Place(b, zero, zero, zero, block.H, block.M, block.N, block.data or {})


def count_elements(term: Term | None) -> int:
    """The elements of a bound: one, or one for each batch entry."""
    return 1 if term is None else torch.as_tensor(term).numel()


def bounds_of(strip: Strip) -> tuple[Term | None, ...]:
    return strip.low, strip.high, strip.keys, strip.rows


def entry_strips(strip: Strip, entries: int) -> list[Strip]:
    """A strip in each batch entry, bounded by numbers."""
    bounds = [list_bounds(term, entries) for term in bounds_of(strip)]
    return [Strip(*each) for each in zip(*bounds, strict=True)]


def list_bounds(term: Term | None, entries: int) -> list[int | None]:
    if term is None:
        return [None] * entries
    bounds: list[int | None] = torch.as_tensor(term).flatten().expand(entries).tolist()
    return bounds


def list_strips(mask: Mask, at: Place) -> list[Strip] | None:
    """The strips that a mask is joined from; None if a leaf is not a strip."""
    if not isinstance(mask, Join):
        strip = mask.strip(at)
        return None if strip is None else [strip]
    all_strips: list[Strip] = []
    for part in mask.parts:
        strips = list_strips(part, at)
        if strips is None:
            return None
        all_strips += strips
    return all_strips


@final
@frozen
class Lines:
    """The lines that bound strips, each once: diagonals j = i + d, keys v and queries u."""

    diagonals: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, strips: Strips, M: int, N: int) -> Lines:
        lows, highs, keys, rows = zip(*map(bounds_of, strips), strict=True)
        after = [high + 1 for high in highs if high is not None]
        return cls(
            tuple({d for d in (*lows, *after) if d is not None and -M < d < N}),
            tuple({v for v in keys if v is not None and 0 < v < N}),
            tuple({u for u in rows if u is not None and 0 < u < M}),
        )

    def breaks(self, M: int, N: int) -> list[int]:
        """The queries at which edges may come, go or cross, and the next ones; also 0 and M."""
        crossings = {v - d for d in self.diagonals for v in (0, *self.keys, N)}
        changes = {*self.rows, *crossings, *(i + 1 for i in crossings)}
        return [0, *sorted(i for i in changes if 0 < i < M), M]

    def edges(self, i: int, N: int) -> list[Edge]:
        """The edges at query i, in order from 0 to N, one at each key."""
        moving = {i + d: Edge(d, 1) for d in self.diagonals if 0 < i + d < N}
        edges = {0: Edge(0)} | moving | {v: Edge(v) for v in self.keys} | {N: Edge(N)}
        return [edges[at] for at in sorted(edges)]


def count_points(strips: Strips, block: Block) -> int:
    """An upper bound of the evaluations of a mask of these strips."""
    lines = Lines.of(strips, block.M, block.N)
    d, v, u = len(lines.diagonals), len(lines.keys), len(lines.rows)
    return (2 * d * (v + 2) + u + 1) * (d + v + 1)


def find_layers(mask: Mask, strips: Strips, at: Place) -> tuple[Layer, ...]:
    """The layers of a mask of these strips in the batch entry of `at`."""
    lines = Lines.of(strips, at.M, at.N)
    rows = [range(a, b) for a, b in pairwise(lines.breaks(at.M, at.N))]
    edges = [lines.edges(part.start, at.N) for part in rows]
    where = [
        (part.start, edge.of(part.start))
        for part, x in zip(rows, edges, strict=True)
        for edge in x[:-1]
    ]
    i, j = torch.tensor(where, device="cpu").unbind(1)
    keep = torch.as_tensor(mask.keep(evolve(at, i=i, j=j))).expand(at.b.shape[:-1] + i.shape)
    flags = iter(keep.flatten().tolist())
    return tuple(
        Layer(part, merge_runs((run for run in pairwise(x) if next(flags)), part.start))
        for part, x in zip(rows, edges, strict=True)
    )


def merge_runs(runs: Iterable[Run], i: int) -> tuple[Run, ...]:
    """The runs of a layer from query i on; runs that touch become one."""
    whole: list[Run] = []
    for start, stop in runs:
        if whole and whole[-1][1].of(i) == start.of(i):
            whole[-1] = (whole[-1][0], stop)
        else:
            whole.append((start, stop))
    return tuple(whole)


# Documents.


def split_documents(mask: Mask) -> tuple[bool, Mask | None]:
    """(True if the mask has documents, the parts besides them or None)."""
    parts = flatten_join(And, mask)
    rest = [part for part in parts if not isinstance(part, SameSegment)]
    return len(rest) < len(parts), join_masks(And, rest) if rest else None


def cut_documents(rest: Mask | None, block: Block) -> list[Region] | None:
    """The regions of documents intersected with `rest`; None unless `rest` is one strip."""
    strip = Strip() if rest is None else rest.strip(entry_at(block, *block.batch))
    documents = None if strip is None else list_documents(block)
    if strip is None or documents is None:
        return None
    kinds = zip(entry_strips(strip, len(block.batch)), documents, strict=True)
    regions: list[Region] = []
    for batch, (own, pieces) in group_equal(kinds, block.batch):
        layers = [x for rows, keys in pieces for x in layers_of_strip(own, rows, keys)]
        regions.append(Region(batch, block.heads, tuple(layers)))
    return regions


def list_documents(block: Block) -> list[tuple[Document, ...]] | None:
    """The documents of each batch entry; None if they are small or a number recurs."""
    q, kv = (block.load(name, axes) for name, axes in (("q_segments", "bi"), ("kv_segments", "bj")))
    assert q is not None
    assert kv is not None
    queries = list_pieces(q)
    keys = queries if torch.equal(q, kv) else list_pieces(kv)
    if queries is None or keys is None:
        return None
    none, documents = range(0), []
    for own, others in zip(queries, keys, strict=True):
        by_number = dict(others)
        if len(by_number) < len(others):
            return None
        documents.append(tuple((rows, by_number.get(number, none)) for number, rows in own))
    return documents


def list_pieces(numbers: torch.Tensor) -> list[list[tuple[int, range]]] | None:
    """The runs of equal numbers in each row of [B,L]; None if there are many."""
    B, L = numbers.shape
    first = torch.ones(B, 1, dtype=torch.bool, device=numbers.device)
    begins = torch.cat((first, numbers[:, 1:] != numbers[:, :-1]), 1)
    entries, starts = begins.nonzero().unbind(1)
    if len(starts) > B + B * L // LEAST_DOCUMENT:
        return None
    each = zip(entries.tolist(), starts.tolist(), numbers[entries, starts].tolist(), strict=True)
    pieces = []
    for _, group in groupby(each, key=lambda piece: piece[0]):
        own = [*group]
        ends = [*(start for _, start, _ in own[1:]), L]
        pieces.append([(n, range(at, end)) for (_, at, n), end in zip(own, ends, strict=True)])
    return pieces
