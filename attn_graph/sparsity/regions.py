"""Counts layers of kept places in closed form: the work grows with edges, not with M and N.

Places and tiles between two edges, over the queries of a layer, are a sum of arithmetic series. All
sums are Python integers.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise, takewhile
from typing import final

from attrs import evolve, frozen

from attn_graph.masks.joins import Mask
from attn_graph.masks.places import Block, Keys, join_intervals

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
