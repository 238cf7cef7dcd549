"""Masks as one comparison of each place: the first and last key of each query, or the reverse.

A mixed tile takes more instructions than a full one, for each of its places. With `first` and
`last` computed once for each row of a tile, `j <= last` or `j >= first` is one instruction. So is a
window: as unsigned numbers, j - first < count compares both ends at once, as any j below `first`
wraps around to more than every count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from attrs import frozen

from attn_graph.lowering.codegen.symbols import Code, Symbol
from attn_graph.masks import Mask
from attn_graph.masks.joins import And, Or, flatten_join
from attn_graph.masks.places import Place, Strip, Term, maximum, minimum, tighter, trace_definition

FAR = 2**30  # beyond every position, as in kernels/common.py


@final
@frozen(eq=False)
class RowBounds:
    """The positions from `first` to `last`, both included, of each row of a tile; None: no bound.

    The rows are queries and the positions keys, or the reverse.
    """

    first: Symbol | None = None
    last: Symbol | None = None

    def __and__(self, other: RowBounds) -> RowBounds:
        first = tighter(maximum, self.first, other.first)
        return RowBounds(first, tighter(minimum, self.last, other.last))

    def __or__(self, other: RowBounds) -> RowBounds | None:
        """The positions of both; None if these may lie apart."""
        if self.first is None and other.first is None:
            return RowBounds(last=looser(maximum, self.last, other.last))
        if self.last is None and other.last is None:
            return RowBounds(first=looser(minimum, self.first, other.first))
        return None

    def in_queries(self, row: Symbol) -> RowBounds:
        """These keys for queries with `row` true, no keys for others."""
        return RowBounds(self.first, row.where(FAR if self.last is None else self.last, -1))

    def in_keys(self, row: Symbol) -> RowBounds:
        """These queries for keys with `row` true, no queries for others."""
        return RowBounds(row.where(0 if self.first is None else self.first, FAR), self.last)

    def holds(self, x: Symbol) -> Symbol:
        """True for positions x within these bounds."""
        if self.first is None:
            return x.apply("le", self.last)
        if self.last is None:
            return x.apply("ge", self.first)
        count = (self.last - self.first).unary("tl.maximum({0} + 1, 0).to(tl.uint32)")
        gap: Symbol = (x - self.first).unary("({0}).to(tl.uint32)")
        return gap.apply("lt", count)


def looser(
    choose: Callable[[Symbol, Symbol], Symbol], a: Symbol | None, b: Symbol | None
) -> Symbol | None:
    """The looser of two bounds; None means no bound."""
    return None if a is None or b is None else choose(a, b)


def keep_by_bounds(mask: Mask, at: Place, code: Code, by_keys: bool) -> Symbol:
    """True if key at.j exists and query at.i sees it, by few comparisons of a place.

    by_keys: True if the rows of tiles are keys. `keep` compares parts of the mask without bounds.
    """
    bounds, kept = RowBounds(), []
    for part in flatten_join(And, mask):
        closed = row_bounds(part, at, code, by_keys)
        if closed is None:
            kept.append(trace_definition(part.keep, at))
        else:
            bounds &= closed
    N = code.argument("N", axes="-")
    if bounds.first is None and bounds.last is None:
        keep: Symbol = at.j < N  # as loads by keys compare too
    elif by_keys:
        keep = bounds.in_keys(at.j < N).holds(at.i)
    else:
        keep = (bounds & RowBounds(last=N.unary("{0} - 1"))).holds(at.j)
    for each in kept:
        keep &= each if isinstance(each, bool) else each.truth()
    return keep


def row_bounds(mask: Mask, at: Place, code: Code, by_keys: bool) -> RowBounds | None:
    """The bounds of a mask; None without a closed form."""
    strip = mask.strip(at)
    if strip is not None:
        return (strip_by_keys if by_keys else strip_by_queries)(strip, at, code)
    if not isinstance(mask, And | Or):
        return None
    a, b = (row_bounds(part, at, code, by_keys) for part in mask.parts)
    if a is None or b is None:
        return None
    return a & b if isinstance(mask, And) else a | b


def strip_by_queries(strip: Strip, at: Place, code: Code) -> RowBounds:
    """The first and last key of each query."""
    low, high = (near(x, at, code) for x in (strip.low, strip.high))
    bounds = RowBounds(None if low is None else at.i + low, None if high is None else at.i + high)
    if strip.keys is not None and not is_size(strip.keys, "N"):
        bounds &= RowBounds(last=end(strip.keys, at.N, "N", code).unary("{0} - 1"))
    if strip.rows is not None and not is_size(strip.rows, "M"):
        bounds = bounds.in_queries(at.i < end(strip.rows, at.M, "M", code))
    return bounds


def strip_by_keys(strip: Strip, at: Place, code: Code) -> RowBounds:
    """The first and last query of each key."""
    low, high = (near(x, at, code) for x in (strip.low, strip.high))
    bounds = RowBounds(None if high is None else at.j - high, None if low is None else at.j - low)
    if strip.rows is not None and not is_size(strip.rows, "M"):
        bounds &= RowBounds(last=end(strip.rows, at.M, "M", code).unary("{0} - 1"))
    if strip.keys is not None and not is_size(strip.keys, "N"):
        bounds = bounds.in_keys(at.j < end(strip.keys, at.N, "N", code))
    return bounds


def is_size(x: Term, name: str) -> bool:
    """True if a bound is the size M or N of a batch entry in kernels: later keys are masked anyway,
    and later queries not stored."""
    return isinstance(x, Symbol) and x.text == name


def near(x: Term | None, at: Place, code: Code) -> Symbol | None:
    """A bound of j - i in 32 bits. They hold every distance between -M and N.

    Kernels read it at run time, 0 included, so square scores need no kernel of their own.
    """
    if x is None:
        return None
    if not isinstance(x, Symbol):
        return code.argument(code.numbers.add(max(-at.M, min(x, at.N))), axes="-")
    least, most = code.argument("-M", axes="-"), code.argument("N", axes="-")
    return in_32_bits(x.maximum(least).minimum(most))


def end(x: Term, size: int, name: str, code: Code) -> Symbol:
    """The end of a sequence in 32 bits, at most its `size`, the argument `name`."""
    if not isinstance(x, Symbol):
        return code.argument(code.numbers.add(max(0, min(x, size))), axes="-")
    return in_32_bits(x.minimum(code.argument(name, axes="-")).unary("tl.maximum({0}, 0)"))


def in_32_bits(x: Symbol) -> Symbol:
    """An integer known to be small."""
    return x.unary("({0}).to(tl.int32)")
