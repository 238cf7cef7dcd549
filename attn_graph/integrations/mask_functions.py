"""Mask functions `f(b, h, i, j) -> bool` of transformers, read as masks by calling them on symbols.

The symbols know comparisons of positions, distances, chunks, and tensors indexed by positions;
a function that does anything else is unreadable. All of it can be traced by torch.compile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import define
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_graph.integrations.affine import (
    Affine,
    Bounds,
    add_affine,
    bound_difference,
    bound_distance,
    diagonal_mask,
)
from attn_graph.masks import Band, KeyLengths, Mask, Prefix, SameSegment

SELECTION = "selects queries or keys by their numbers"
Pair = tuple[Tensor, Tensor]
APART = 2**32  # more than there are segments of one kind, so that two numbers can be one


class UnreadableMaskError(Exception):
    """A mask function does what no mask of the library says. The text is what it does."""


@define(eq=False)
class Frame:
    """Where a call's positions lie: query i of M is token i + q_offset, key j of N j + kv_offset.

    q_offset: an integer, or a tensor on the device that no one reads. trusts: whether numbers of
    one tensor that are put in order count positions within a segment; else they are unreadable.
    """

    M: int
    N: int
    q_offset: int | Tensor
    kv_offset: int
    device: torch.device | str
    trusts: bool

    @property
    def shift(self) -> int | Tensor:
        """How many tokens the first query lies after the first key."""
        return self.q_offset - self.kv_offset

    def extent(self, axis: str) -> tuple[int, int | Tensor]:
        """How many queries, "i", or keys, "j", there are, and which token the first of them is."""
        return (self.M, self.q_offset) if axis == "i" else (self.N, self.kv_offset)

    def tokens(self, axis: str) -> Tensor:
        """The token [M] of each query, "i", or [N] of each key, "j"."""
        count, first = self.extent(axis)
        return torch.arange(count, device=self.device) + first

    def compare(self, name: str, affine: Affine) -> Condition:
        """Where an integer that is affine in the tokens i and j compares so to 0.

        Raises UnreadableMaskError where that selects some of the queries.
        """
        bounds = bound_difference(name, affine)
        if bounds is None:
            raise UnreadableMaskError(SELECTION)
        return self.condition(bounds)

    def condition(self, bounds: Bounds) -> Condition:
        """The places whose tokens are within bounds."""
        condition = Condition()
        if bounds.kind == "band":
            condition = self.band(bounds.low, bounds.high)
        elif bounds.kind == "keys":
            condition = self.keys(bounds.low, bounds.high)
        return ~condition if bounds.outside else condition

    def band(self, low: int | None, high: int | None) -> Condition:
        """The keys whose token is from `low` to `high` after the query's; None is no bound."""
        shift = self.shift
        if isinstance(shift, Tensor):  # the last query's token is that of the last key
            band = Band(low, high, ("kv_lengths",))
            none_later = high is not None and high <= 0
            return Condition(band & KeyLengths() if none_later else band, lengths=True)
        if low is not None and low + shift <= 1 - self.M:  # before the first key of every query
            low = None
        if high is not None and high + shift >= self.N - 1:
            high = None
        if low is None and high is None:
            return Condition()
        if shift == 0:
            return Condition(diagonal_mask(low, high, "top_left"))
        if shift == self.N - self.M:
            return Condition(diagonal_mask(low, high, "bottom_right"))
        low, high = (None if end is None else end + shift for end in (low, high))
        return Condition(Band(low, high))

    def keys(self, low: int | None, high: int | None) -> Condition:
        """The keys whose token is from `low` to `high`; None is no bound."""
        condition = Condition()
        if high is not None:
            condition = Condition(Prefix(max(0, high + 1 - self.kv_offset)))
        if low is not None:
            condition &= Condition(~Prefix(max(0, low - self.kv_offset)))
        return condition


class MaskSymbol:
    """Abstract: what a mask function is called on, or computes. It has no value to branch on."""

    __slots__ = ()
    device = torch.device("cpu")  # nothing need be moved to where it lies

    def __bool__(self) -> NoReturn:
        raise UnreadableMaskError("branches on a position")

    def compare(self, name: str, other: object) -> Condition:
        """Where it compares so, by the name of a function of `operator`.

        Raises UnreadableMaskError where no mask says that.
        """
        raise UnreadableMaskError("compares what is no position")

    def __lt__(self, other: object) -> Condition:
        return self.compare("lt", other)

    def __le__(self, other: object) -> Condition:
        return self.compare("le", other)

    def __gt__(self, other: object) -> Condition:
        return self.compare("gt", other)

    def __ge__(self, other: object) -> Condition:
        return self.compare("ge", other)

    def __eq__(self, other: object) -> Any:  # Any: a symbol, where others give a bool
        return self.compare("eq", other)

    def __ne__(self, other: object) -> Any:  # Any: a symbol, where others give a bool
        return self.compare("ne", other)

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> NoReturn:  # Any: of PyTorch
        raise UnreadableMaskError(f"calls {getattr(func, '__name__', func)} on a position")

    __hash__ = None  # type: ignore[assignment]  # as of everything that compares by other than value


@define(eq=False)
class Axis(MaskSymbol):
    """The batch entry or the head, by which tensors are indexed."""

    letter: str


@define(eq=False)
class BatchValue(MaskSymbol):
    """The element of values [B] of the batch entry."""

    values: Tensor


@define(eq=False)
class Position(MaskSymbol):
    """The token of a query or a key, or what a table has for it.

    axis: "i" of a query, "j" of a key. shift: what is added to the token. table: a tensor that was
    read at the token. own: the numbers [B or 1, M or N] where they are not the tokens.
    """

    frame: Frame
    axis: str
    shift: int = 0
    table: Tensor | None = None
    own: Tensor | None = None

    def new_ones(self, *_: object, **__: object) -> Condition:
        """True, with which transformers begins `and`."""
        return Condition()

    def new_zeros(self, *_: object, **__: object) -> Nowhere:
        """False, with which transformers begins `or`."""
        return Nowhere()

    def values(self) -> Tensor:
        """The numbers [B or 1, M or N] at this call's positions."""
        return self.frame.tokens(self.axis)[None] + self.shift if self.own is None else self.own

    def with_numbers(self, own: Tensor) -> Position:
        """Other numbers at the same positions, which no other position compares to by order."""
        return Position(self.frame, self.axis, 0, own, own)

    def read(self, table: Tensor) -> Position:
        """The entry of table [B, tokens] at the token."""
        if self.own is not None or table.ndim != 2:
            raise UnreadableMaskError("indexes by what is no position")
        count, first = self.frame.extent(self.axis)
        if isinstance(first, Tensor):
            own = table[:, self.values()[0]]
        else:
            own = table[:, first + self.shift : first + self.shift + count]
        return Position(self.frame, self.axis, 0, table, own)

    def __add__(self, other: object) -> Position:
        if isinstance(other, BatchValue):
            return self.with_numbers(self.values() + other.values[:, None])
        if not isinstance(other, int):
            return NotImplemented
        own = None if self.own is None else self.own + other
        return Position(self.frame, self.axis, self.shift + other, self.table, own)

    def __sub__(self, other: object) -> Any:  # Any: of two positions their difference
        if isinstance(other, Position):
            return self.minus(other)
        if isinstance(other, BatchValue):
            return self + BatchValue(-other.values)
        return self + -other if isinstance(other, int) else NotImplemented

    def minus(self, other: Position) -> Difference:
        """How far it is after another one. Raises UnreadableMaskError where numbers differ."""
        if self.table is not other.table or not (self.table is None or self.frame.trusts):
            raise UnreadableMaskError("puts the numbers of a tensor in order")
        ends = add_affine({self.axis: 1}, {other.axis: 1}, -1)
        return Difference(self.frame, {**ends, "": self.shift - other.shift})

    def __floordiv__(self, size: object) -> Position:
        if not isinstance(size, int):
            return NotImplemented
        return self.with_numbers(self.values() // size)

    def compare(self, name: str, other: object) -> Condition:
        """In closed form; by equal numbers of queries and keys; or by numbers of queries."""
        if isinstance(other, Position):
            if name in ("eq", "ne") and self.axis != other.axis and self.has_numbers(other):
                q, kv = (self, other) if self.axis == "i" else (other, self)
                same = Condition(segments=(q.values(), kv.values()))
                return same if name == "eq" else ~same
            return self.minus(other).compare(name, 0)
        if not isinstance(other, int):
            return super().compare(name, other)
        if self.own is None:
            return self.frame.compare(name, {self.axis: 1, "": self.shift - other})
        if self.axis == "j":
            raise UnreadableMaskError(SELECTION)
        return Condition(rows=getattr(operator, name)(self.own, other))

    def has_numbers(self, other: Position) -> bool:
        """Whether this one or another one has other numbers than the tokens."""
        return self.own is not None or other.own is not None


@define(eq=False)
class Difference(MaskSymbol):
    """How far a token is after another one: affine in the tokens i and j."""

    frame: Frame
    affine: Affine

    def __add__(self, other: object) -> Difference:
        if not isinstance(other, int):
            return NotImplemented
        return Difference(self.frame, add_affine(self.affine, {"": other}))

    def __sub__(self, other: object) -> Difference:
        return self + -other if isinstance(other, int) else NotImplemented

    def __abs__(self) -> Distance:
        return Distance(self)

    def compare(self, name: str, other: object) -> Condition:
        """In closed form, with an integer."""
        if not isinstance(other, int):
            return super().compare(name, other)
        return self.frame.compare(name, add_affine(self.affine, {"": -other}))


@define(eq=False)
class Distance(MaskSymbol):
    """The absolute value of a difference."""

    difference: Difference

    def compare(self, name: str, other: object) -> Condition:
        """In closed form, with an integer."""
        if not isinstance(other, int):
            return super().compare(name, other)
        bounds = bound_distance(name, self.difference.affine, other)
        if bounds is None:
            raise UnreadableMaskError("compares a distance with what is no bound of it")
        return self.difference.frame.condition(bounds)


@define(eq=False)
class Nowhere(MaskSymbol):
    """False everywhere, to which transformers joins conditions by |."""

    def __or__(self, other: object) -> Condition:
        return as_condition(other)


@define(eq=False)
class Condition(MaskSymbol):
    """A mask, None keeping everything, and beside it segments and rows, to be joined to it by &.

    segments: the numbers of queries [B or 1, M] and keys [B or 1, N]. joined: whether the mask has
    them already. rows: which queries [B or 1, M] see anything, for segments alone can say that.
    lengths: whether the mask reads kv_lengths, which are those of the frame.
    """

    mask: Mask | None = None
    segments: Pair | None = None
    joined: bool = False
    rows: Tensor | None = None
    lengths: bool = False

    def to(self, *_: object) -> Condition:
        """Itself: there is nothing to move."""
        return self

    def whole(self) -> Mask | None:
        """The mask with segments in it."""
        if self.rows is not None:
            raise UnreadableMaskError("selects queries by a tensor")
        if self.segments is None or self.joined:
            return self.mask
        return SameSegment() if self.mask is None else self.mask & SameSegment()

    def __and__(self, other: object) -> Condition:
        other = as_condition(other)
        if self.segments and other.segments and (self.joined or other.joined):
            raise UnreadableMaskError("joins several kinds of segments")
        mask = self.mask or other.mask
        if self.mask is not None and other.mask is not None:
            mask = self.mask & other.mask
        segments = pair_numbers(self.segments, other.segments)
        rows, joined = all_rows(self.rows, other.rows), self.joined or other.joined
        if rows is not None and segments is not None and not joined:
            segments, rows = drop_rows(segments, rows), None
        return Condition(mask, segments, joined, rows, self.lengths or other.lengths)

    def __or__(self, other: object) -> Condition:
        other = as_condition(other)
        if self.segments and other.segments:
            raise UnreadableMaskError("joins several kinds of segments")
        a, b = self.whole(), other.whole()
        if a is None or b is None:
            return Condition()
        segments, lengths = self.segments or other.segments, self.lengths or other.lengths
        return Condition(a | b, segments, True, lengths=lengths)

    def __invert__(self) -> Condition:
        mask = self.whole()
        inverse = Prefix(0) if mask is None else ~mask
        return Condition(inverse, self.segments, True, lengths=self.lengths)


def as_condition(value: object) -> Condition:
    """A condition, also of a boolean number of PyTorch. Raises UnreadableMaskError for others."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return Condition(None if value else Prefix(0))
    if not isinstance(value, Condition):
        raise UnreadableMaskError(f"joins a condition with a {type(value).__name__}")
    return value


def pair_numbers(a: Pair | None, b: Pair | None) -> Pair | None:
    """Numbers that are equal where both are: of two kinds of segments at once."""
    if a is None or b is None:
        return a or b
    return a[0] * APART + b[0], a[1] * APART + b[1]


def all_rows(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The queries that both select."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def drop_rows(segments: Pair, rows: Tensor) -> Pair:
    """Segments in which only these queries see anything: even numbers, and one that no key has."""
    return torch.where(rows, 2 * segments[0], 1), 2 * segments[1]


class ReadsOfTensors(TorchFunctionMode):
    """While it is on, tensors can be indexed by symbols."""

    def __torch_function__(
        self,
        func: Callable[..., Any],  # Any: whatever PyTorch's functions take and give
        types: Sequence[type],
        args: Sequence[Any] = (),  # Any: the same
        kwargs: Mapping[str, Any] | None = None,  # Any: the same
    ) -> Any:  # Any: the same
        if func is Tensor.__getitem__:
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            if len(where) == 1 and isinstance(where[0], Axis) and args[0].ndim == 1:
                return BatchValue(args[0])
            if len(where) == 2 and isinstance(where[1], Position):
                return where[1].read(args[0])
        return func(*args, **(kwargs or {}))


MaskFunction = Callable[..., Any]  # of b, h, i and j, which are tensors of indices or symbols


def read_mask_function(function: MaskFunction, frame: Frame) -> Condition:
    """The mask that a function of (b, h, i, j) computes, as a condition whose rows are None.

    Raises UnreadableMaskError, whose text says what the function does that no mask says.
    """
    b, h = Axis("b"), Axis("h")
    i, j = Position(frame, "i"), Position(frame, "j")
    try:
        with ReadsOfTensors():
            condition = as_condition(function(b, h, i, j))
        condition.whole()
    except (TypeError, AttributeError) as error:  # operators and methods that symbols don't have
        raise UnreadableMaskError(f"does more than compare positions: {error}") from error
    return condition
