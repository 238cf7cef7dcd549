"""One form for equal masks where equality is easy to see, so that they share a plan.

A leaf that compares integers affine in the positions, a formula's or a user's, has a closed form:
bounds of j - i or of j. The readers of other libraries' masks share the bounds; that of
transformers runs under torch.compile, which can trace them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeGuard, final

from attrs import define, frozen

from attn_graph.errors import GraphError
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.cache import remember
from attn_graph.masks.joins import Align, And, Join, Mask, Not, Or, join_masks
from attn_graph.masks.leaves import (
    LEAVES,
    LENGTHS,
    Band,
    Causal,
    KeyLengths,
    Prefix,
    QueryLengths,
    Window,
    ragged_in,
)
from attn_graph.masks.places import (
    Block,
    Operators,
    Place,
    Untraceable,
    tighter,
    trace_definition,
)
from attn_graph.spec.dims import are_numbers, dims_in, surely_least

EVERYTHING = Band()
CAUSAL = Band(None, 0)  # from the top left corner, as fused kernels know it


@remember  # a graph is checked by it, and simplified
def canonical_mask(mask: Mask, M: int, N: int) -> Mask | None:
    """The mask in one form; None if every query keeps every key.

    Alignments become offsets, bands joined by `&` one band, and parts are sorted. Without queries
    or keys the mask is simplified as for one, so that it keeps the lengths of packed sides. Raises
    GraphError for a missing alignment.
    """
    resolved = mask.resolved(M, N, ragged_in(mask.needs))
    simple = simplify_mask(resolved, *(1 if n == 0 else n for n in (M, N)))
    return None if simple == EVERYTHING else simple


def simplify_mask(mask: Mask, M: int, N: int) -> Mask:
    """An equal mask: EVERYTHING if it keeps every place, else with flat joins."""
    simple = simplify_parts(mask, M, N)
    return EVERYTHING if keeps_everything(simple, M, N) else simple


def keeps_everything(mask: Mask, M: int, N: int) -> bool:
    """True if a mask surely keeps every place, in all batch entries and heads.

    One entry and one head stand for all: bounds hold for each. A user's leaf counts as unknown,
    since evaluating it takes time. Dims count as their largest size, which covers smaller ones too
    unless the bounds of the mask move with them.
    """
    if is_fixed_band(mask) and are_numbers(M, N):  # trimmed: each bound left hides a place
        return mask == EVERYTHING
    if next(dims_in(mask), None) is not None or not is_ours(mask):
        return False
    everywhere = Block(range(1), range(1), range(M), 1, M, N)
    with neutral_state():  # bounds are numbers, even where tensors are fake
        return mask.bound_keys(everywhere)[0].covers(0, N)


def is_ours(mask: Mask) -> bool:
    """True if all leaves of a mask are the library's."""
    return all(map(is_ours, mask.parts)) if isinstance(mask, Join) else type(mask) in LEAVES


def simplify_parts(mask: Mask, M: int, N: int) -> Mask:
    """Simplify the parts of a mask. The result may keep every place, not yet EVERYTHING."""
    match mask:
        case Band(ragged=()):
            return trim_band(mask, M, N)
        case Band(None, 0, ("kv_lengths",)) if M == 1:  # the one query is the last of its keys
            return KeyLengths()
        case Not(a):
            inner = simplify_mask(a, M, N)
            return inner.a if isinstance(inner, Not) else Not(inner)
        case And() | Or():
            parts = sorted(dict.fromkeys(simplified_parts(mask, type(mask), M, N)), key=str)
            if isinstance(mask, And):
                parts = intersect_bands(end_at_keys(parts) if M == 1 else parts)
            return join_masks(type(mask), parts)
        case _ if not is_ours(mask):
            known = (M, N) if are_numbers(M, N) else ()
            closed = closed_form(mask, *known)
            return mask if closed is None else simplify_parts(closed.resolved(M, N, ()), M, N)
        case _:
            return mask


def end_at_keys(parts: list[Mask]) -> list[Mask]:
    """The parts of an And for one query, which is the last of its keys or of no sequence."""
    last = Band(None, 0, LENGTHS)
    known = QueryLengths() in parts
    replaced = (KeyLengths() if known and part == last else part for part in parts)
    return [*dict.fromkeys(replaced)]


def trim_band(band: Band, M: int, N: int) -> Band:
    """A band without the bounds outside -M < j - i < N.

    A bound that excludes every place becomes the nearest such bound, so that it fits into int64.
    With Dims a bound goes only if it has no effect for any size.
    """
    low, high = band.low, band.high
    if not are_numbers(M, N, low or 0, high or 0):
        return Band(
            None if low is None or surely_least(1 - M - low) >= 0 else low,
            None if high is None or surely_least(high - N + 1) >= 0 else high,
        )
    low = None if low is None or low <= 1 - M else min(low, N)
    high = None if high is None or high >= N - 1 else max(high, -M)
    return band if (low, high) == (band.low, band.high) else Band(low, high)


def simplified_parts(mask: Mask, join: type[Join], M: int, N: int) -> list[Mask]:
    if isinstance(mask, join):
        return [leaf for part in mask.parts for leaf in simplified_parts(part, join, M, N)]
    simple = simplify_mask(mask, M, N)
    return simplified_parts(simple, join, M, N) if isinstance(simple, join) else [simple]


def intersect_bands(parts: list[Mask]) -> list[Mask]:
    """The parts of an And, with one band for each `ragged`.

    Bands that move with Dims stay apart: the sizes decide which is tighter.
    """
    bands: dict[tuple[str, ...], Band] = {}
    for part in parts:
        if is_fixed_band(part):
            other = bands.get(part.ragged, part)
            low = tighter(max, part.low, other.low)
            bands[part.ragged] = Band(low, tighter(min, part.high, other.high), part.ragged)
    rest = [part for part in parts if not is_fixed_band(part)]
    bounded = [part for part in (*bands.values(), *rest) if part != EVERYTHING]
    return sorted(bounded, key=str) or [EVERYTHING]


def is_fixed_band(mask: Mask) -> TypeGuard[Band]:
    return isinstance(mask, Band) and are_numbers(mask.low or 0, mask.high or 0)


# Closed forms

ALL: Mask = Window(None, None, "top_left")
NOTHING: Mask = ~ALL
Affine = Mapping[str, int]  # the coefficient of each axis; of "" the constant
Kind = Literal["band", "keys", "all"]
Shape = Literal["band", "keys", "queries", "constant"]
SHAPES: dict[Shape, Affine] = {  # where the coefficient of j, or else of i, is 1
    "band": {"i": -1, "j": 1},
    "keys": {"j": 1},
    "queries": {"i": 1},
    "constant": {},
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class Bounds(NamedTuple):
    """Places with j - i, of a band, or j, of keys, from `low` to `high`, both included.

    None means no bound. outside: the other places. Kind "all" is all places, or none if `outside`.
    """

    kind: Kind
    low: int | None = None
    high: int | None = None
    outside: bool = False

    @property
    def mask(self) -> Mask:
        """The mask of these places."""
        low, high, mask = self.low, self.high, ALL
        if self.kind == "band":
            mask = diagonal_mask(low, high, "top_left")
        elif self.kind == "keys":
            last = ALL if high is None else NOTHING if high < 0 else Prefix(high + 1)
            mask = join_simply(And, last, ALL if low is None or low <= 0 else ~Prefix(low))
        return negate(mask) if self.outside else mask


def coefficients(affine: Affine) -> dict[str, int]:
    """Those that are not 0."""
    return {x: c for x, c in affine.items() if c}


def add_affine(a: Affine, b: Affine, times: int = 1) -> Affine:
    """a + times * b."""
    return {x: a.get(x, 0) + times * b.get(x, 0) for x in {**a, **b}}


def interval(name: str, t: int) -> tuple[int | None, int | None]:
    """The least and the greatest integer comparing to t as `name` says; for `ne`, the
    complement's.
    """
    match name:
        case "le" | "lt":
            return None, t - (name == "lt")
        case "ge" | "gt":
            return t + (name == "gt"), None
        case _:
            return t, t


def diagonal_mask(low: int | None, high: int | None, align: Align) -> Mask:
    """The mask low <= j - i' <= high, i' being the query on the diagonal of the alignment."""
    if low is None and high == 0:
        return Causal(align)
    return Window(None if low is None else -low, high, align)


def negate(mask: Mask) -> Mask:
    """The complement of a mask: for a mask with one bound, again a mask with one bound."""
    match mask:
        case Causal():
            return diagonal_mask(1, None, "top_left")
        case Window(int() as left, None):
            return diagonal_mask(None, -left - 1, "top_left")
        case Window(None, int() as right):
            return diagonal_mask(right + 1, None, "top_left")
    return ~mask


def join_simply(kind: type[And] | type[Or], a: Mask, b: Mask) -> Mask:
    """a & b or a | b, without parts deciding nothing or everything."""
    neutral, absorbing = (ALL, NOTHING) if kind is And else (NOTHING, ALL)
    if absorbing in (a, b):
        return absorbing
    if neutral in (a, b):
        return b if a == neutral else a
    return a & b if kind is And else a | b


def combine_masks(name: str, x: Mask | bool, y: Mask | bool) -> Mask:
    """x & y, x | y, or x ^ y, by the names "and", "or" and "xor"."""
    a, b = as_mask(x), as_mask(y)
    if name == "xor":
        return join_simply(Or, join_simply(And, a, negate(b)), join_simply(And, negate(a), b))
    return join_simply(And if name == "and" else Or, a, b)


def as_mask(x: Mask | bool) -> Mask:
    """A mask, or a constant as one."""
    return x if isinstance(x, Mask) else ALL if x else NOTHING


@final
@define(eq=False)  # torch.compile traces no frozen class
class Position(Operators):
    """An integer affine in the positions, as an operand of `keep`; with `absolute` its absolute
    value."""

    affine: Affine
    absolute: bool = False

    @classmethod
    def of(cls, x: object) -> Position:
        """A position, or an integer as one. Raises Untraceable for anything else."""
        if type(x) is int:
            return cls({"": x})
        if isinstance(x, Position):
            return x
        raise Untraceable(f"a position is combined with {x!r}")

    @property
    def number(self) -> int | None:
        """Its value, if it is constant."""
        return None if self.absolute or coefficients({**self.affine, "": 0}) else self.constant

    @property
    def constant(self) -> int:
        """The number added to the axes."""
        return self.affine.get("", 0)

    def apply(self, name: str, *operands: Any) -> Any:  # Any: a Position or Kept
        others = [*map(Position.of, operands)]
        if name in MIRRORED:
            bounds = compare_positions(name, self, *others)
            if bounds is None:
                raise Untraceable(f"{name} of positions bounds neither j - i nor j")
            return Kept(bounds.mask)
        if not any(x.absolute for x in (self, *others)):
            match name, others:
                case "abs", []:
                    return Position(self.affine, absolute=True)
                case "neg", []:
                    return Position(add_affine({}, self.affine, -1))
                case (("add" | "sub"), [x]):
                    return Position(add_affine(self.affine, x.affine, 1 if name == "add" else -1))
                case "rsub", [x]:
                    return x - self
                case "mul", [Position(number=int() as n)]:
                    return Position(add_affine({}, self.affine, n))
                case "mul", [x] if self.number is not None:
                    return x * self.number
        raise Untraceable(f"{name} of positions is not affine")


def compare_positions(name: str, a: Position, b: Position) -> Bounds | None:
    """The places where one compares to the other; None if that bounds neither j - i nor j.

    None also for == and != of an absolute value.
    """
    if b.absolute and a.number is not None:
        return compare_positions(MIRRORED[name], b, a)
    reach = b.number if a.absolute else 0
    affine = a.affine if a.absolute else add_affine(a.affine, b.affine, -1)
    axes = coefficients({**affine, "": 0})
    sign = axes.get("j") or axes.get("i") or 1
    signed = {x: sign * c for x, c in axes.items()}
    shape: Shape | None = next((x for x, known in SHAPES.items() if known == signed), None)
    if b.absolute or reach is None or shape is None:
        return None
    middle = -sign * affine.get("", 0)
    if a.absolute:
        if name in ("eq", "ne") or shape == "queries" or shape == "constant":
            return None
        most, outside = reach - (name in ("lt", "ge")), name in ("ge", "gt")
        if most < 0:
            return Bounds("all", outside=not outside)
        return Bounds(shape, middle - most, middle + most, outside)
    low, high = interval(name if sign > 0 else MIRRORED[name], middle)
    if shape == "band" or shape == "keys":
        return Bounds(shape, low, high, name == "ne")
    last = math.inf if shape == "queries" else 0  # of the numbers from 0 that it may be
    if (low or 0) <= 0 and (high is None or high >= last):
        return Bounds("all", outside=name == "ne")
    empty = (high is not None and high < 0) or (low or 0) > last
    return Bounds("all", outside=name != "ne") if empty else None


@final
@frozen(eq=False)
class Kept(Operators):
    """A boolean of `keep` in closed form."""

    mask: Mask

    def apply(self, name: str, *operands: Any) -> Kept:  # Any: as of operators
        if name == "invert":
            return Kept(negate(self.mask))
        (x,) = operands
        if name not in ("and", "or", "xor") or not isinstance(x, Kept | bool):
            raise Untraceable(f"{name} of booleans is not a mask")
        return Kept(combine_masks(name, self.mask, x.mask if isinstance(x, Kept) else x))


POSITIONS = tuple(Position({axis: 1}) for axis in "bhij")


def closed_form(leaf: Mask, M: Any = None, N: Any = None) -> Mask | None:  # Any: None if unknown
    """A leaf that compares positions, by bounds of j - i and of j; None for any other leaf."""
    H: Any = None  # as above
    if leaf.needs:
        return None
    b, h, i, j = POSITIONS
    try:
        kept = trace_definition(leaf.keep, Place(b, h, i, j, H, M, N))
    except (Untraceable, GraphError):
        return None
    return kept.mask if isinstance(kept, Kept) else None
