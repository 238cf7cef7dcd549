"""The leaves of masks, which `&`, `|` and `~` join."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from attrs import Attribute, evolve, field, frozen
from attrs.converters import optional

from attn_graph.errors import GraphError, show
from attn_graph.masks.joins import Align, Data, Mask
from attn_graph.masks.places import Block, Keys, Place, Strip, Term
from attn_graph.spec import MOST_INT64, as_integer, to_integer
from attn_graph.spec.dims import are_numbers

LENGTHS = ("kv_lengths", "q_lengths")  # the names of the lengths of sequences


def as_names(values: Iterable[str]) -> tuple[str, ...]:
    """Names as a tuple, so that fields of masks compare by value."""
    return tuple(values)


def to_whole(value: float | None) -> int | None:
    """A bound as an int or None. Raises GraphError for 2.5: it does not round."""
    if value is None or type(value) is int:  # as nearly all are
        return value
    bound = to_integer(value)
    if bound is None:
        way_out = ""
        if isinstance(value, tuple | list) and len(value) == 2:
            both = ", ".join("None" if n == -1 else show(n) for n in value)
            way_out = f"; write Window({both})"
        raise GraphError(
            f"mask: the bound {show(value)} is not a whole number of positions{way_out}"
        )
    return bound


def to_reachable(value: float | None) -> int | None:
    """A bound that fits into int64, so that tensors of positions can be compared with it."""
    bound = to_whole(value)
    if bound is not None and abs(bound) > MOST_INT64:
        raise GraphError(f"mask: the bound {bound} is farther than {MOST_INT64}; None is unbounded")
    return bound


def to_nearest(value: float | None) -> int | None:
    """A bound clipped, without effect, so that its sum with any position fits into int64."""
    bound = to_whole(value)
    return None if bound is None else max(-MOST_INT64 // 2, min(MOST_INT64 // 2, bound))


def as_pair(values: Iterable[int]) -> tuple[int, int]:
    """Two positions as a tuple: fields of masks compare by value."""
    i, j = map(as_integer, values)
    return i, j


def to_length(value: float) -> int:
    """A number of positions. Raises GraphError for a negative one."""
    length = to_reachable(value)
    if length is None or length < 0:
        raise GraphError(f"mask: Prefix({value}) is not a length; a length is at least 0")
    return length


def require_lengths(_: object, __: Attribute[tuple[str, ...]], names: tuple[str, ...]) -> None:
    """A validator. Raises GraphError for names outside LENGTHS."""
    if strangers := [name for name in names if name not in LENGTHS]:
        raise GraphError(f"lengths: {show(strangers[0])} is none of {', '.join(LENGTHS)}")


def require_alignment(_: object, __: Attribute[Align | None], value: object) -> None:
    if value not in (None, "top_left", "bottom_right"):
        raise GraphError(f'mask: align {show(value)} is neither "top_left" nor "bottom_right"')


def diagonal_offset(align: Align | None, M: int, N: int, who: object) -> int:
    """How far right of the top left corner the diagonal lies, for M queries and N keys.

    Raises GraphError if M and N differ and no alignment is given.
    """
    if align is None and M != N:
        rows = f"{M} {'query' if M == 1 else 'queries'}"
        raise GraphError(
            f"{who}: {rows} and {N} keys need an alignment of the diagonal; "
            'pass align="top_left" (i sees j <= i) or align="bottom_right" (the last sees the last)'
        )
    return N - M if align == "bottom_right" else 0


@final
@frozen
class Band(Mask):
    """low <= j - i' <= high, both ends included; None means no bound. Alignments resolve to it.

    i' is i, or, if `ragged` names lengths, i + kv_lengths[b] - q_lengths[b].
    """

    low: int | None = field(default=None, converter=to_nearest)
    high: int | None = field(default=None, converter=to_nearest)
    ragged: tuple[str, ...] = field(default=(), converter=as_names)

    @property
    def relative(self) -> bool:
        return not self.ragged

    @property
    def needs(self) -> dict[str, Data]:
        return dict.fromkeys(self.ragged, Data("b")) if self.ragged else {}

    def written(self) -> Mask:
        low, high = self.low, self.high
        if self.ragged or not are_numbers(low or 0, high or 0):
            return self
        if low is not None and high is not None and low > high:  # it holds no key
            return self
        if low is None and high == 0:
            return Causal()
        return Window(None if low is None else -low, high)

    def keep(self, at: Place) -> Term:
        return self.holds(at.j - at.i - at.shift(self.ragged))

    def holds(self, gap: Term) -> Term:
        """low <= gap <= high."""
        if self.low is None:
            return gap == gap if self.high is None else gap <= self.high
        return gap >= self.low if self.high is None else (gap >= self.low) & (gap <= self.high)

    def strip(self, at: Place) -> Strip:
        shift = at.shift(self.ragged)
        return Strip(
            None if self.low is None else shift + self.low,
            None if self.high is None else shift + self.high,
        )


class Diagonal(Mask):
    """Abstract: a leaf that compares positions. It equals the band from `band`."""

    __slots__ = ()
    align: Align | None

    def band(self, offset: int, ragged: tuple[str, ...]) -> Band:
        """The equal band, with the diagonal `offset` to the right.

        ragged: the lengths that move the diagonal of each batch entry.
        """
        raise NotImplementedError

    def aligned(self, align: Align | None) -> Mask:
        return evolve(self, align=self.align or align)  # type: ignore[call-arg]  # a leaf's field

    def resolved(self, M: int, N: int, ragged: tuple[str, ...]) -> Mask:
        moved = diagonal_offset(self.align, M, N, self)
        by_lengths = self.align == "bottom_right" and ragged
        return self.band(0, ragged) if by_lengths else self.band(moved, ())

    def keep(self, at: Place) -> Term:
        """As `resolved`, but of sizes that may be symbols, which no band can hold."""
        ragged = ragged_in(at.data) if self.align == "bottom_right" else ()
        moved = at.shift(ragged) if ragged else diagonal_offset(self.align, at.M, at.N, self)
        return self.band(0, ()).holds(at.j - at.i - moved)

    def strip(self, at: Place) -> Strip | None:
        return self.resolved(at.M, at.N, ragged_in(at.data)).strip(at)

    def bound_keys(self, block: Block) -> tuple[Keys, Keys]:
        return (block.none, block.all) if self.may_move(block) else super().bound_keys(block)

    def may_move(self, block: Block) -> bool:
        """True if unknown lengths may move the diagonal."""
        return block.data is None and self.align == "bottom_right"


def ragged_in(names: Iterable[str]) -> tuple[str, ...]:
    """The names of lengths among `names`, in the order of LENGTHS."""
    names = tuple(names)
    return tuple(name for name in LENGTHS if name in names)


@final
@frozen
class Causal(Diagonal):
    """Key j is at or before query i': j <= i'.

    align: "top_left" (i' = i) or "bottom_right" (i' = i + N - M, or by lengths if there are any);
    needed if M and N differ.
    """

    align: Align | None = field(default=None, validator=require_alignment)

    def band(self, offset: int, ragged: tuple[str, ...]) -> Band:
        return Band(None, offset, ragged)


@final
@frozen
class Window(Diagonal):
    """Key j is at most `left` before and `right` after query i', both ends included.

    None means no bound: `Window(64)` keeps 65 keys, `Window(None, 2)` all up to two ahead. A bound
    may be negative as long as left + right >= 0. align: as of `Causal`. Raises GraphError for a
    window without keys.
    """

    left: int | None = field(converter=to_reachable)
    right: int | None = field(default=0, converter=to_reachable)
    align: Align | None = field(default=None, validator=require_alignment)

    def __attrs_post_init__(self) -> None:
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            unbounded = "; no bound is None here, not -1" * (-1 in (self.left, self.right))
            raise GraphError(
                f"mask: Window(left={self.left}, right={self.right}) holds no key, since it keeps "
                f"i - {self.left} <= j <= i + {self.right}; left + right must be at least 0"
                f"{unbounded}"
            )

    def band(self, offset: int, ragged: tuple[str, ...]) -> Band:
        low = None if self.left is None else offset - self.left
        return Band(low, None if self.right is None else offset + self.right, ragged)


@final
@frozen
class Prefix(Mask):
    """Key j is among the first `length`, for every query. Raises GraphError if it is negative."""

    length: int = field(converter=to_length)

    def keep(self, at: Place) -> Term:
        return at.j < self.length

    def strip(self, at: Place) -> Strip:
        return Strip(keys=self.length)


@final
@frozen
class KeyLengths(Mask):
    """Key j is among the first kv_lengths[b]. Integers [B]."""

    @property
    def needs(self) -> dict[str, Data]:
        return {"kv_lengths": Data("b")}

    def keep(self, at: Place) -> Term:
        return at.j < at.load("kv_lengths", at.b)

    def strip(self, at: Place) -> Strip:
        return Strip(keys=at.load("kv_lengths", at.b))


@final
@frozen
class QueryLengths(Mask):
    """Query i is among the first q_lengths[b]; later ones see nothing. Integers [B]."""

    @property
    def needs(self) -> dict[str, Data]:
        return {"q_lengths": Data("b")}

    def keep(self, at: Place) -> Term:
        return at.i < at.load("q_lengths", at.b)

    def strip(self, at: Place) -> Strip:
        return Strip(rows=at.load("q_lengths", at.b))


@final
@frozen
class SameSegment(Mask):
    """Query and key carry the same number: q_segments [B,M], kv_segments [B,N], integers."""

    @property
    def needs(self) -> dict[str, Data]:
        return {"q_segments": Data("bi"), "kv_segments": Data("bj")}

    def keep(self, at: Place) -> Term:
        return at.load("q_segments", at.b, at.i) == at.load("kv_segments", at.b, at.j)


@final
@frozen
class Keep(Mask):
    """A boolean tensor decides: True may attend. [B,H,M,N], each axis full or 1.

    Two tensors in one mask need two names: `Keep("local") | Keep("global_")`.
    """

    name: str = "keep"

    @property
    def needs(self) -> dict[str, Data]:
        return {self.name: Data("bhij", (torch.bool,), broadcasts=True)}

    def keep(self, at: Place) -> Term:
        return at.load(self.name, at.b, at.h, at.i, at.j)


@final
@frozen
class KeepBlocks(Mask):
    """A boolean table decides for blocks of `rows` queries and `keys` keys: True may attend.

    Query i sees key j where keep_blocks[b, h, i // rows, j // keys] is true: a table
    [B|1, H|1, ceil(M / rows), ceil(N / keys)]. `math` and `triton` skip tiles without a kept block.
    `select_blocks` makes a table of the blocks that a router selects. Two tables in one mask need
    two names. start, whole: for a part of all queries and keys, as in `Data`. Raises GraphError for
    sizes below 1.
    """

    rows: int = field(converter=to_length)
    keys: int = field(converter=to_length)
    name: str = "keep_blocks"
    start: tuple[int, int] = field(default=(0, 0), converter=as_pair, kw_only=True)
    whole: tuple[int, int] | None = field(default=None, converter=optional(as_pair), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if min(self.rows, self.keys) < 1:
            raise GraphError(
                f"mask: {self} has blocks of {self.rows} queries and {self.keys} keys; both must "
                "be at least 1"
            )

    @property
    def needs(self) -> dict[str, Data]:
        size = (self.rows, self.keys)
        return {self.name: Data("bhxy", (torch.bool,), True, size, self.start, self.whole)}

    def keep(self, at: Place) -> Term:
        i, j = at.i + self.start[0], at.j + self.start[1]
        return at.load(self.name, at.b, at.h, i // self.rows, j // self.keys)


LEAVES = (Causal, Window, Prefix, Keep, KeepBlocks, KeyLengths, QueryLengths, SameSegment, Band)
