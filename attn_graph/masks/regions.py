"""Counts masks made of strips in closed form: the work grows with edges, not with M and N.

A strip is bounded by lines: keys before v, queries before u, diagonals j = i + d. Between two
queries at which lines cross, the edges of all strips keep their order along the keys. There a mask
is evaluated once for each run of keys between two edges; its places or tiles over these queries are
a sum of arithmetic series. All sums are Python integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.masks.joins import Join, Mask
from attn_graph.masks.places import Block, Keys, Place, Strip, Term, join_intervals

MOST_POINTS = 2**17  # evaluations of a mask, over all batch entries: a good half second
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
    """The layers of each of `count` equal (batch entry, head) pairs, from the first query on."""

    count: int
    layers: tuple[Layer, ...]

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


# Regions.


def entry_at(block: Block, *entries: int) -> Place:
    """The place of some batch entries, for any query and key."""
    b = torch.tensor(entries, device="cpu").reshape(-1, 1, 1, 1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    return Place(b, zero, zero, zero, block.H, block.M, block.N, block.data or {})


Bounds = tuple[tuple[int | None, ...], ...]  # low, high, keys and rows of each strip


def count_elements(term: Term | None) -> int:
    """The elements of a bound: one, or one for each batch entry."""
    return 1 if term is None else torch.as_tensor(term).numel()


def bounds_of(strip: Strip) -> tuple[Term | None, ...]:
    return strip.low, strip.high, strip.keys, strip.rows


def bound_entries(strips: Sequence[Strip], entries: int) -> list[Bounds]:
    columns = [[list_bounds(term, entries) for term in bounds_of(strip)] for strip in strips]
    return [tuple(tuple(term[b] for term in strip) for strip in columns) for b in range(entries)]


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
    def of(cls, strips: Bounds, M: int, N: int) -> Lines:
        lows, highs, keys, rows = zip(*strips, strict=True)
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


def count_points(strips: Bounds, block: Block) -> int:
    """An upper bound of the evaluations of a mask of these strips."""
    lines = Lines.of(strips, block.M, block.N)
    d, v, u = len(lines.diagonals), len(lines.keys), len(lines.rows)
    return (2 * d * (v + 2) + u + 1) * (d + v + 1)


def find_layers(mask: Mask, strips: Bounds, at: Place) -> tuple[Layer, ...]:
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


Both = tuple[list[Region], list[Region]]  # upper and lower bound of the kept places


def bound_both(most: Mask, least: Mask, block: Block, size: int) -> Both:
    """A bound from above on the places that `most` keeps, and one from below on those of `least`.

    The masks are bounded over blocks of one or more lines of `size` queries and all batch entries.
    """
    lines = -(-len(block.rows) // size)
    count, same = len(block.batch) * len(block.heads), least == most
    outer, inner = list[Layer](), list[Layer]()
    for part in block.split(size * max(1, -(-lines // MOST_LAYERS))) if count else ():
        surely, span = most.bound_keys(part)
        surely = surely if same else least.bound_keys(part)[0]
        outer.append(layer_of(part.rows, span if is_short(span) else span.hull))
        inner.append(layer_of(part.rows, surely if is_short(surely) else part.none))
    return [Region(count, tuple(outer))], [Region(count, tuple(inner))]


def is_short(keys: Keys) -> bool:
    return len(keys.intervals) <= MOST_RUNS


def layer_of(rows: range, keys: Keys) -> Layer:
    """Queries that keep the same keys."""
    return Layer(rows, tuple([(Edge(a), Edge(b)) for a, b in keys.intervals]))
