"""What a mask leaves of the scores, as tiles: queries against parts of the keys.

The layers of a mask give exact parts. Any mask, and a block of a layer's queries, gives parts by
its bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Literal, final

import torch
from attrs import frozen

from attn_graph.masks.places import Keys, join_intervals
from attn_graph.sparsity.layers import Layer

Cut = Callable[[torch.Tensor], torch.Tensor]  # a view of some rows of x [B,H,L,...]


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
    """Queries `rows` of the batch entries `batch` and the query heads `heads` against the keys of
    `parts`, of the key/value heads `groups`.

    repeat > 1: this many copies in all, each with queries and keys moved on by those of `rows`.
    """

    batch: range
    heads: range
    groups: range
    rows: range
    parts: tuple[Part, ...]
    repeat: int = 1

    @cached_property
    def keys(self) -> int:
        return sum(map(len, self.parts))

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Its keys, in runs without a hole."""
        return join_intervals([(part.start, part.stop) for part in self.parts], gap=0)

    @cached_property
    def mixed(self) -> list[tuple[int, Part]]:
        """The mixed parts, each with its first column among the tile's scores."""
        columns = accumulate(map(len, self.parts), initial=0)
        pairs = zip(columns, self.parts, strict=False)
        return [(at, part) for at, part in pairs if part.kind == "mixed"]

    # Cut out of tensors, for products of n = batch * groups matrices

    @cached_property
    def lines(self) -> tuple[int, int]:
        """(n, L): how many products it has, and rows of scores in each."""
        n, lines = len(self.batch) * len(self.groups), len(self.batch) * len(self.heads)
        return n, lines // n * len(self.rows)

    @cached_property
    def grid(self) -> tuple[int, int, int, int]:
        """The shape of [n,L,S] as [batch,heads,rows,S]; -1 stands for the last."""
        return len(self.batch), len(self.heads), len(self.rows), -1

    @cached_property
    def cut_queries(self) -> Cut:
        """Cuts its queries out of x [B,H,M,...]."""
        return cut_ranges(self.batch, self.heads, self.rows)

    @cached_property
    def cut_groups(self) -> Cut:
        """Cuts all keys of its key/value heads out of x [B,G,N,D]."""
        return cut_ranges(self.batch, self.groups)

    def cut_keys(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Its keys of x [B,G,N,D], as [n,S,D] for each run without a hole."""
        here = self.cut_groups(x)
        flat = here[0] if len(self.batch) == 1 else here.flatten(0, 1)
        return [flat[:, a:b] for a, b in self.runs]

    # Sums

    @property
    def area(self) -> int:
        """Computed scores, for one head; of a causal part the kept ones."""
        return self.entries * sum(part.area(len(self.rows)) for part in self.parts)

    @property
    def entries(self) -> int:
        """The batch entries of its calls."""
        return len(self.batch) * self.repeat

    @property
    def is_mixed(self) -> bool:
        return any(part.kind == "mixed" for part in self.parts)


def cut_ranges(*axes: range) -> Cut:
    """Cuts these ranges of its first axes out of a tensor."""
    return itemgetter(tuple([slice(x.start, x.stop) for x in axes]))


def cut_parts(bounds: tuple[Keys, Keys], least_full: int, bridge: int) -> tuple[Part, ...]:
    """The possible keys of a block of queries, across holes of at most `bridge` keys.

    bounds: the keys that all of its queries keep, and those that any may keep. Full runs of
    `least_full` keys stand alone.
    """
    surely, span = bounds
    pieces = span.bridged(bridge).intervals
    return tuple([part for a, b in pieces for part in split_interval(a, b, surely, least_full)])


def split_interval(start: int, stop: int, sure: Keys, least_full: int) -> list[Part]:
    if sure.covers(start, stop):  # without a walk over all that is sure
        return [Part(start, stop, "full")]
    parts, at = list[Part](), start
    for a, b in (sure & Keys.between(start, stop)).intervals:
        if b - a >= least_full:
            parts += [Part(at, a, "mixed")] if at < a else []
            parts.append(Part(a, b, "full"))
            at = b
    return parts + ([Part(at, stop, "mixed")] if at < stop else [])


def exact_parts(layer: Layer) -> tuple[Part, ...]:
    """Of each run, all with one first key: the keys kept by all queries, and a triangle if its end
    moves.

    The triangle's first key is the last one of the first query, so each of its queries keeps a key.
    """
    rows, parts = layer.rows, list[Part]()
    for start, stop in layer.runs:
        first, last = stop.of(rows.start), stop.of(rows[-1])
        begin, full = start.of(rows.start), first - 1 if first < last else first
        parts += [Part(begin, full, "full")] if begin < full else []
        parts += [Part(full, last, "causal")] if first < last else []
    return tuple(parts)
