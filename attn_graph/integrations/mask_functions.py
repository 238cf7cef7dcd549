"""Mask functions `f(b, h, i, j) -> bool` of transformers, read as masks by calling them on symbols.

The symbols know comparisons of positions, distances, chunks, and tensors indexed by positions;
a function that does anything else is unreadable. All of it can be traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import define
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_graph.masks import Band, KeyLengths, Mask, Prefix, SameSegment, Window

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

    def tokens(self, *, of_queries: bool) -> Tensor:
        """The token [M] of each query, or [N] of each key."""
        count, first = (self.M, self.q_offset) if of_queries else (self.N, self.kv_offset)
        return torch.arange(count, device=self.device) + first

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
            return Condition(Window(None if low is None else -low, high, "top_left"))
        if shift == self.N - self.M:
            return Condition(Window(None if low is None else -low, high, "bottom_right"))
        low, high = (None if end is None else end + shift for end in (low, high))
        return Condition(Band(low, high))

    def prefix(self, end: int) -> Condition:
        """The keys whose token is before `end`."""
        return Condition(Prefix(max(0, end - self.kv_offset)))


class MaskSymbol:
    """Abstract: what a mask function is called on, or computes. It has no value to branch on."""

    __slots__ = ()
    device = torch.device("cpu")  # nothing need be moved to where it lies

    def __bool__(self) -> NoReturn:
        raise UnreadableMaskError("branches on a position")

    def __eq__(self, other: object) -> Any:  # Any: a symbol, where others give a bool
        raise UnreadableMaskError("compares what are no numbers of segments with ==")

    def __ne__(self, other: object) -> Any:  # Any: a symbol, where others give a bool
        raise UnreadableMaskError("compares with !=")

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
    """The token of a query or a key, or what a table has for it; or a difference of two of them.

    It is queries * (that of the query) + keys * (that of the key) + shift. table: a tensor that
    was read at the token. own: the numbers [B or 1, M or N] where they are not the tokens.
    """

    frame: Frame
    queries: int
    keys: int
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
        if abs(self.queries) + abs(self.keys) != 1:
            raise UnreadableMaskError("computes with differences of positions")
        if self.own is not None:
            return self.own
        return self.frame.tokens(of_queries=self.keys == 0)[None] + self.shift

    def read(self, table: Tensor) -> Position:
        """The entry of table [B, tokens] at the token."""
        if self.own is not None or table.ndim != 2:
            raise UnreadableMaskError("indexes by what is no position")
        frame = self.frame
        count, first = (frame.M, frame.q_offset) if self.queries else (frame.N, frame.kv_offset)
        if isinstance(first, Tensor):
            own = table[:, self.values()[0]]
        else:
            own = table[:, first + self.shift : first + self.shift + count]
        return Position(frame, self.queries, self.keys, 0, table, own)

    def __add__(self, other: object) -> Position:
        if isinstance(other, BatchValue):
            own = self.values() + other.values[:, None]
            return Position(self.frame, self.queries, self.keys, 0, own, own)
        if not isinstance(other, int):
            return NotImplemented
        moved = None if self.own is None else self.own + other
        return Position(self.frame, self.queries, self.keys, self.shift + other, self.table, moved)

    def __neg__(self) -> Position:
        own = None if self.own is None else -self.own
        return Position(self.frame, -self.queries, -self.keys, -self.shift, self.table, own)

    def __sub__(self, other: object) -> Position:
        if isinstance(other, BatchValue):
            return self + BatchValue(-other.values)
        if isinstance(other, int):
            return self + -other
        if not isinstance(other, Position):
            return NotImplemented
        if self.table is not other.table or not (self.table is None or self.frame.trusts):
            raise UnreadableMaskError("puts the numbers of a tensor in order")
        queries, keys = self.queries - other.queries, self.keys - other.keys
        return Position(self.frame, queries, keys, self.shift - other.shift)

    def __abs__(self) -> Distance:
        return Distance(self)

    def __floordiv__(self, size: object) -> Position:
        if not isinstance(size, int):
            return NotImplemented
        own = self.values() // size
        return Position(self.frame, self.queries, self.keys, 0, own, own)

    def at_least(self, least: int) -> Condition:
        """Where it is `least` or more."""
        start, kind = least - self.shift, (self.queries, self.keys, self.own is None)
        if kind == (-1, 1, True):
            return self.frame.band(start, None)
        if kind == (1, -1, True):
            return self.frame.band(None, -start)
        if kind == (0, 1, True):
            return ~self.frame.prefix(start)
        if kind == (0, -1, True):
            return self.frame.prefix(1 - start)
        if kind == (1, 0, True) and start <= 0:  # tokens count from 0
            return Condition()
        if self.own is not None and not self.keys:
            return Condition(rows=self.own >= least)
        raise UnreadableMaskError("selects queries or keys by their numbers")

    def __ge__(self, other: object) -> Condition:
        if isinstance(other, Position):
            return (self - other).at_least(0)
        return self.at_least(other) if isinstance(other, int) else NotImplemented

    def __le__(self, other: object) -> Condition:
        if isinstance(other, Position):
            return other >= self
        return (-self).at_least(-other) if isinstance(other, int) else NotImplemented

    def __gt__(self, other: object) -> Condition:
        return self >= other + 1 if isinstance(other, int | Position) else NotImplemented

    def __lt__(self, other: object) -> Condition:
        return self <= other + -1 if isinstance(other, int | Position) else NotImplemented

    def __eq__(self, other: object) -> Any:  # Any: a symbol, where others give a bool
        if not isinstance(other, Position) or self.queries == other.queries:
            raise UnreadableMaskError("compares what are no numbers of segments with ==")
        q, kv = (self, other) if self.queries else (other, self)
        return Condition(segments=(q.values(), kv.values()))


@define(eq=False)
class Distance(MaskSymbol):
    """The absolute value of a difference of positions."""

    position: Position

    def __le__(self, most: object) -> Condition:
        if not isinstance(most, int):
            return NotImplemented
        return (self.position <= most) & (self.position >= -most)

    def __lt__(self, end: object) -> Condition:
        return self <= end - 1 if isinstance(end, int) else NotImplemented


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
    i, j = Position(frame, 1, 0), Position(frame, 0, 1)
    try:
        with ReadsOfTensors():
            condition = as_condition(function(b, h, i, j))
        condition.whole()
    except (TypeError, AttributeError) as error:  # operators and methods that symbols don't have
        raise UnreadableMaskError(f"does more than compare positions: {error}") from error
    return condition
