"""Mask functions `f(b, h, i, j) -> bool` of transformers, read as masks by calling them on symbols.

The symbols support comparisons of positions, distances, chunks, and tensors indexed by positions;
other functions are unreadable. torch.compile can trace all of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_graph.integrations.conditions import (
    Condition,
    MaskSymbol,
    Nowhere,
    UnreadableMaskError,
    as_condition,
)
from attn_graph.masks import Band, KeyLengths, Prefix
from attn_graph.masks.canonical import (
    MIRRORED,
    Bounds,
    Position,
    coefficients,
    compare_positions,
    diagonal_mask,
)
from attn_graph.spec import INTEGERS

ORDER = "puts the numbers of a tensor in order"
INDEX = "indexes a tensor otherwise than by [b], [b, i] or [b, j]"
# What symbols raise in operators, methods and functions that don't know them:
FOREIGN = TypeError, AttributeError, IndexError, ValueError, RuntimeError


@define(eq=False)
class Frame:
    """The tokens of a call's positions: query i of M is token i + q_offset, key j of N j +
    kv_offset.

    q_offset: an integer, or a tensor on the device, never read. trusts: True if ordered numbers of
    one tensor count positions within a segment; else they are unreadable.
    """

    B: int
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
        """The number of queries, "i", or keys, "j", and the token of the first."""
        return (self.M, self.q_offset) if axis == "i" else (self.N, self.kv_offset)

    def tokens(self, axis: str) -> Tensor:
        """The token [M] of each query, "i", or [N] of each key, "j"."""
        count, first = self.extent(axis)
        return torch.arange(count, device=self.device) + first

    def lengths(self) -> Tensor:
        """The number of keys [B] up to and including the last query's token."""
        count = self.shift + self.M
        if isinstance(count, Tensor):
            return count.expand(self.B)
        return torch.full((self.B,), count, dtype=torch.int64, device=self.device)

    @property
    def keys_so_far(self) -> Frame:
        """This frame with only the keys up to the last query's token.

        Unchanged if the token is unknown, or if plans would be made for each such number: for
        several queries after other keys.
        """
        shift = self.shift
        if not isinstance(shift, int) or (self.M > 1 and shift != 0):
            return self
        return evolve(self, N=shift + self.M) if 0 < shift + self.M < self.N else self

    def condition(self, bounds: Bounds) -> Condition:
        """The places with tokens within bounds."""
        condition = Condition()
        if bounds.kind == "band":
            condition = self.band(bounds.low, bounds.high)
            if bounds.high is not None and bounds.high <= 0:
                condition = condition.ending()
        elif bounds.kind == "keys":
            condition = self.keys(bounds.low, bounds.high)
        return ~condition if bounds.outside else condition

    def band(self, low: int | None, high: int | None) -> Condition:
        """The keys with tokens from `low` to `high` after the query's; None means no bound."""
        shift = self.shift
        if isinstance(shift, Tensor):
            return self.band_by_lengths(low, high)
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
        if 0 < shift + self.M <= self.N:  # as data: no other mask, and no other plan, each step
            return self.band_by_lengths(low, high)
        low, high = (None if end is None else end + shift for end in (low, high))
        return Condition(Band(low, high))

    def band_by_lengths(self, low: int | None, high: int | None) -> Condition:
        """A band, its diagonal through the last query and the last key by kv_lengths."""
        band = Band(low, high, ("kv_lengths",))
        none_later = high is not None and high <= 0
        return Condition(band & KeyLengths() if none_later else band, lengths=True)

    def keys(self, low: int | None, high: int | None) -> Condition:
        """The keys with tokens from `low` to `high`; None means no bound."""
        condition = Condition()
        if high is not None:
            condition = Condition(Prefix(max(0, high + 1 - self.kv_offset)))
        if low is not None:
            condition &= Condition(~Prefix(max(0, low - self.kv_offset)))
        return condition


@define(eq=False)
class Axis(MaskSymbol):
    """The batch entry, "b", an index of tensors, or the head, "h". B: batch entries."""

    letter: str
    B: int


@define(eq=False)
class BatchValue(MaskSymbol):
    """The element of values [B] of the batch entry."""

    values: Tensor


@define(eq=False)
class TokenNumber(MaskSymbol):
    """The token of a query or a key, its entry of a table, or the distance of two of these.

    at: affine in i and j. table: the tensor read at the tokens, if any. own: of a single token, the
    numbers [B or 1, M or N], if they are not the tokens.
    """

    frame: Frame
    at: Position
    table: Tensor | None = None
    own: Tensor | None = None

    def new_ones(self, *_: object, **__: object) -> Condition:
        """True, the start of transformers' `and`."""
        return Condition()

    def new_zeros(self, *_: object, **__: object) -> Nowhere:
        """False, the start of transformers' `or`."""
        return Nowhere()

    @property
    def axis(self) -> str:
        """i of a query, j of a key; "" of a distance."""
        axes = coefficients({**self.at.affine, "": 0})
        return "".join(axes) if [*axes.values()] == [1] and not self.at.absolute else ""

    def values(self) -> Tensor:
        """The numbers [B or 1, M or N] at this call's positions."""
        if self.own is not None:
            return self.own
        return self.frame.tokens(self.axis)[None] + self.at.constant

    def with_numbers(self, own: Tensor) -> TokenNumber:
        """Other numbers at these positions, not comparable by order to other positions."""
        return TokenNumber(self.frame, Position({self.axis: 1}), own, own)

    def read(self, table: Tensor) -> TokenNumber | Condition:
        """The entry of table [B, tokens] at the token; for a table of booleans, the places with
        True.

        Raises UnreadableMaskError for other tables, and for tokens outside.
        """
        if self.own is not None or not self.axis:
            raise UnreadableMaskError("indexes by something that is not a position")
        own = self.entries(rows_of_batch(table, self.frame.B))
        if own.dtype == torch.bool:
            return self.selection(own)
        require_integers(own)
        at = Position({self.axis: 1})
        return TokenNumber(self.frame, at, own if self.at.constant else table, own)

    def entries(self, rows: Tensor) -> Tensor:
        """Columns of [B, tokens]: those of the tokens [B, M or N]."""
        count, first = self.frame.extent(self.axis)
        if isinstance(first, Tensor):
            return rows[:, self.values()[0]]
        start = first + self.at.constant
        if start < 0 or start + count > rows.shape[1]:
            raise UnreadableMaskError("indexes a tensor where it has no element")
        return rows[:, start : start + count]

    def selection(self, flags: Tensor) -> Condition:
        """The places with a flagged query or key: the others get one number."""
        own = (~flags).long()
        count, _ = self.frame.extent("j" if self.axis == "i" else "i")
        others = own.new_zeros(1, count)
        return self.equal(own, others) if self.axis == "i" else self.equal(others, own)

    def equal(self, q: Tensor, kv: Tensor, *tables: Tensor) -> Condition:
        """The places with equal numbers, [B or 1, M] of the query and [B or 1, N] of the key.

        tables: the common source of both.
        """
        B = self.frame.B
        return Condition(kinds=((q.expand(B, -1), kv.expand(B, -1)),), separates=tables)

    def apply(self, name: str, *operands: Any) -> Any:  # Any: symbols, or numbers
        """A comparison, a sum with a number, a quotient, or a distance."""
        x, known = operands[0] if operands else None, self.own is not None
        if name in MIRRORED:
            return self.compare(name, x)
        if name == "abs" and not self.axis:
            return TokenNumber(self.frame, abs(self.at), self.table)
        if name in ("add", "sub") and isinstance(x, int):
            own = getattr(operator, name)(self.own, x) if known else None
            return TokenNumber(self.frame, self.at.apply(name, x), self.table, own)
        if name in ("add", "sub") and isinstance(x, BatchValue) and self.axis:
            return self.with_numbers(getattr(operator, name)(self.values(), x.values[:, None]))
        if name == "floordiv" and isinstance(x, int) and self.axis:
            return self.with_numbers(self.values() // x)
        if name == "sub" and isinstance(x, TokenNumber) and self.axis and x.axis:
            if self.table is not x.table or not (self.table is None or self.frame.trusts):
                raise UnreadableMaskError(ORDER)
            return TokenNumber(self.frame, self.at - x.at, self.table)
        return super().apply(name, *operands)

    def compare(self, name: str, other: object) -> Condition:
        """In closed form; by equal numbers of queries and keys; or by numbers of either."""
        if isinstance(other, TokenNumber) and self.axis and other.axis:
            counts = self.own is None and other.own is None  # tokens, in closed form below
            if name not in ("eq", "ne") or self.axis == other.axis or counts:
                distance: TokenNumber = self - other
                return distance.compare(name, 0)
            q, kv = (self, other) if self.axis == "i" else (other, self)
            common = self.table is other.table and not (self.at.constant or other.at.constant)
            tables = (self.table,) if common and self.table is not None else ()
            same = self.equal(q.values(), kv.values(), *tables)
            return same if name == "eq" else ~same
        if not isinstance(other, int):
            raise UnreadableMaskError("compares something that is not a position")
        bounds = compare_positions(name, self.at, Position.of(other))
        if self.axis and (bounds is None or self.own is not None):
            return self.selection(getattr(operator, name)(self.values(), other))
        if bounds is None:
            raise UnreadableMaskError("compares a distance with something that is not a bound")
        made = self.frame.condition(bounds)
        within = () if self.table is None else (self.table,)
        return Condition(made.mask, (), None, made.lengths, within, ends=made.ends)


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
            if any(isinstance(x, MaskSymbol) for x in where):
                return read_table(args[0], where)
        return func(*args, **(kwargs or {}))


def read_table(table: Tensor, where: Sequence[object]) -> BatchValue | TokenNumber | Condition:
    """The element of a tensor at [b], [b, i] or [b, j]. Raises UnreadableMaskError for others."""
    first, *rest = where
    if not isinstance(first, Axis) or first.letter != "b" or table.ndim != len(where):
        raise UnreadableMaskError(INDEX)
    if not rest:
        values = rows_of_batch(table, first.B)
        require_integers(values)
        return BatchValue(values)
    if len(rest) > 1 or not isinstance(rest[0], TokenNumber):
        raise UnreadableMaskError(INDEX)
    return rest[0].read(table)


def rows_of_batch(table: Tensor, B: int) -> Tensor:
    """The rows of a tensor for B batch entries. Raises UnreadableMaskError for fewer rows."""
    if table.shape[0] < B:
        raise UnreadableMaskError("indexes a tensor where it has no element")
    return table[:B]


def require_integers(table: Tensor) -> None:
    """Raise UnreadableMaskError for numbers impossible as segments, or wrapping early."""
    if table.dtype not in INTEGERS:
        raise UnreadableMaskError(f"reads a tensor of {table.dtype}")


MaskFunction = Callable[..., Any]  # of b, h, i and j, which are tensors of indices or symbols


def read_mask_function(function: MaskFunction, frame: Frame) -> Condition:
    """The mask of a function of (b, h, i, j), as a condition without kinds.

    Raises UnreadableMaskError, naming the part without an equivalent here.
    """
    b, h = Axis("b", frame.B), Axis("h", frame.B)
    i, j = (TokenNumber(frame, Position({axis: 1})) for axis in "ij")
    try:
        with ReadsOfTensors():
            condition = as_condition(function(b, h, i, j)).closed()
    except FOREIGN as error:
        raise UnreadableMaskError(f"does more than compare positions: {error}") from error
    if condition.within:
        raise UnreadableMaskError(ORDER)
    return condition
