"""The values in a mod of FlexAttention: integers, real numbers and scores at a place.

An integer affine in the positions compares to a mask of ours in closed form; others keep their
text, for a `Formula`. Booleans are masks from the start.
"""

from __future__ import annotations

import math
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.integrations.affine import (
    MIRRORED,
    Affine,
    Bounds,
    add_affine,
    bound_difference,
    bound_distance,
    coefficients,
    diagonal_mask,
)
from attn_graph.ir.addends import Addend
from attn_graph.ir.modifiers import Modifier, SoftCap
from attn_graph.masks import And, Causal, Mask, Or, Prefix, Window
from attn_graph.masks.formulas import AXES, Elements, Formula, simplify_text
from attn_graph.masks.joins import BLOCKS

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
BLOCKS_OF = {position: blocks for blocks, position in BLOCKS.items()}
EVERYTHING: Mask = Window(None, None, "top_left")
NOTHING: Mask = ~EVERYTHING
CLOSE = 1e-12  # relative: 1 / cap times cap, in float64


class Unread(Exception):
    """Part of a mod has no translation; the text is a clause with the part and the reason."""


@final
@frozen(eq=False)
class Element:
    """The element of a captured tensor at some of b, h, i, j, one letter for each axis so far.

    "x" and "y" are blocks of i and j. block: their sizes.
    """

    tensor: torch.Tensor
    axes: str = ""
    block: tuple[int, int] = (1, 1)

    def at(self, text: str) -> Element | None:
        """This element at one more index; None unless it is a free axis or its blocks."""
        letter, _, size = text.partition(" // ")
        if letter not in AXES or {letter, BLOCKS_OF.get(letter)} & {*self.axes}:
            return None
        if not size:
            return evolve(self, axes=self.axes + letter)
        if letter not in BLOCKS_OF or not size.isdigit():
            return None
        rows, keys = self.block
        block = (int(size), keys) if letter == "i" else (rows, int(size))
        return evolve(self, axes=self.axes + BLOCKS_OF[letter], block=block)

    @property
    def places(self) -> tuple[str, tuple[int, int]]:
        """Its axes and the sizes of their blocks."""
        return self.axes, self.block

    @property
    def by_blocks(self) -> Element:
        """The same element, with each position as a block of one."""
        return evolve(self, axes="".join(BLOCKS_OF.get(axis, axis) for axis in self.axes))


@final
@frozen(eq=False)
class Index:
    """An integer at a place.

    affine: None if it is not affine in b, h, i and j. inside: the integer under its absolute value.
    element: its element of a tensor.
    """

    text: str
    elements: Elements = ()
    affine: Affine | None = None
    inside: Index | None = None
    element: Element | None = None

    @classmethod
    def of(cls, x: Index | int) -> Index:
        """An index, or a number as one."""
        return x if isinstance(x, Index) else cls(f"({x})", affine={"": x})

    @classmethod
    def axis(cls, letter: str) -> Index:
        """b, h, i or j itself."""
        return cls(letter, affine={letter: 1})

    def is_axis(self, letter: str) -> bool:
        return self.affine is not None and coefficients(self.affine) == {letter: 1}

    @property
    def number(self) -> int | None:
        """Its constant value, if it has one."""
        if self.affine is None or any(c for x, c in self.affine.items() if x):
            return None
        return self.affine.get("", 0)

    @property
    def is_distance(self) -> bool:
        inner = self.inside and self.inside.affine
        return bool(inner) and coefficients(inner or {}) in ({"i": 1, "j": -1}, {"i": -1, "j": 1})


def combine_indices(name: str, x: Index | int, y: Index | int) -> Index:
    """x + y, x - y, x * y, x // y or x % y. Raises Unread for a divisor below 1."""
    a, b = Index.of(x), Index.of(y)
    affine: Affine | None = None
    match name:
        case "add" | "sub":
            affine = combine_affine(a, b, 1 if name == "add" else -1)
        case "mul":
            n, other = (a.number, b) if a.number is not None else (b.number, a)
            affine = None if n is None else combine_affine(Index.of(0), other, n)
        case _ if b.number is None or b.number < 1:
            raise Unread(f"it divides by {b.text}, which is not a positive number")
    return Index(f"({a.text} {SIGNS[name]} {b.text})", unite(a.elements, b.elements), affine)


def combine_affine(a: Index, b: Index, times: int) -> Affine | None:
    """a + times * b; None if one of them is not affine."""
    if a.affine is None or b.affine is None:
        return None
    return add_affine(a.affine, b.affine, times)


def negate_index(a: Index) -> Index:
    """-a."""
    return Index(f"(-{a.text})", a.elements, combine_affine(Index.of(0), a, -1))


def absolute_index(a: Index) -> Index:
    """|a|."""
    return Index(f"abs({a.text})", a.elements, inside=a)


def unite(a: Elements, b: Elements) -> Elements:
    """The tensors of both, each once."""
    return tuple(dict.fromkeys((*a, *b)))


# Comparisons


def compare_indices(name: str, a: Index, b: Index) -> Mask:
    """The mask of a comparison: in closed form, or else a `Formula`."""
    closed = closed_form(name, a, b)
    if closed is not None:
        return closed
    text = simplify_text(f"{a.text} {SIGNS[name]} {b.text}")
    return Formula(text, unite(a.elements, b.elements))


def closed_form(name: str, a: Index, b: Index) -> Mask | None:
    """The comparison as bounds of j - i or of j; None if it is neither."""
    if b.inside is not None and a.number is not None:
        return closed_form(MIRRORED[name], b, a)
    bounds = None
    if a.inside is not None and a.inside.affine is not None and b.number is not None:
        bounds = bound_distance(name, a.inside.affine, b.number)
    elif (difference := combine_affine(a, b, -1)) is not None:
        bounds = bound_difference(name, difference)
    return None if bounds is None else mask_of_bounds(bounds)


def mask_of_bounds(bounds: Bounds) -> Mask:
    """The mask of the places within bounds."""
    low, high, mask = bounds.low, bounds.high, EVERYTHING
    if bounds.kind == "band":
        mask = diagonal_mask(low, high, "top_left")
    elif bounds.kind == "keys":
        last = EVERYTHING if high is None else NOTHING if high < 0 else Prefix(high + 1)
        mask = join(And, last, EVERYTHING if low is None or low <= 0 else ~Prefix(low))
    return negate(mask) if bounds.outside else mask


# Booleans


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


def join(kind: type[And] | type[Or], a: Mask, b: Mask) -> Mask:
    """a & b or a | b, without parts deciding nothing or everything."""
    neutral, absorbing = (EVERYTHING, NOTHING) if kind is And else (NOTHING, EVERYTHING)
    if absorbing in (a, b):
        return absorbing
    if neutral in (a, b):
        return b if a == neutral else a
    return a & b if kind is And else a | b


def combine_masks(name: str, x: Mask | bool, y: Mask | bool) -> Mask:
    """x & y, x | y, or x ^ y."""
    a, b = as_mask(x), as_mask(y)
    if name == "xor":
        return join(Or, join(And, a, negate(b)), join(And, negate(a), b))
    return join(And if name == "and" else Or, a, b)


def as_mask(x: Mask | bool) -> Mask:
    """A mask, or a constant as one."""
    return x if isinstance(x, Mask) else EVERYTHING if x else NOTHING


# Real numbers and scores


@final
@frozen(eq=False)
class Real:
    """A real number at a place.

    It is `sign` times the `element` of a tensor, if any, times |i - j| with `distance`. integers:
    its tensors of integers.
    """

    text: str
    elements: Elements = ()
    element: Element | None = None
    distance: bool = False
    sign: int = 1
    integers: Elements = ()

    @classmethod
    def of(cls, x: Real | Index | float) -> Real:
        """A number of any kind as a real one. Raises Unread for infinity and NaN."""
        match x:
            case Real():
                return x
            case Index():
                return cls(f"real({x.text})", distance=x.is_distance, integers=x.elements)
            case _ if math.isfinite(x):
                return cls(f"({float(x)})")
        raise Unread(f"it adds {x}; what hides keys belongs into a mask_mod")

    def negative(self) -> Real:
        """-self."""
        return evolve(self, text=f"(-{self.text})", sign=-self.sign)


def combine_reals(name: str, x: Real | Index | float, y: Real | Index | float) -> Real:
    """x + y, x - y, x * y or x / y."""
    a, b = Real.of(x), Real.of(y)
    text, integers = f"({a.text} {SIGNS[name]} {b.text})", unite(a.integers, b.integers)
    plain = Real(text, unite(a.elements, b.elements), integers=integers)
    far = [each for each in (a, b) if each.distance and each.element is None]
    slopes = [each for each in (a, b) if each.element is not None and not each.distance]
    if name == "mul" and far and slopes:
        return evolve(
            plain, element=slopes[0].element, distance=True, sign=far[0].sign * slopes[0].sign
        )
    return plain


def apply_method(name: str, x: Real | Index) -> Real:
    """exp, sqrt, tanh and the like of a real number."""
    a = Real.of(x)
    return Real(f"{name}({a.text})", a.elements, integers=a.integers)


@final
@frozen(eq=False)
class Score:
    """The scores after these modifiers, and then outer * f(inner * s), f the identity or tanh."""

    modifiers: tuple[Modifier, ...] = ()
    inner: float = 1.0
    is_tanh: bool = False
    outer: float = field(default=1.0)

    def scaled(self, factor: float) -> Score:
        """Times a number."""
        if self.is_tanh:
            return evolve(self, outer=self.outer * factor)
        return evolve(self, inner=self.inner * factor)

    def tanh(self) -> Score:
        """Their tanh. Raises Unread for a tanh of a tanh."""
        if self.is_tanh:
            return evolve(self.finished(), is_tanh=True)
        return evolve(self, is_tanh=True)

    def finished(self) -> Score:
        """The same scores with a tanh as a soft cap. Raises Unread for scores that are scaled."""
        if not math.isclose(self.inner * self.outer, 1, rel_tol=CLOSE):
            factor = self.inner * self.outer
            raise Unread(f"it multiplies the scores by {factor:g}; say scale= instead")
        if not self.is_tanh:
            return self
        return Score((*self.modifiers, SoftCap(self.outer)))

    def then(self, modifier: Modifier) -> Score:
        """With one more modifier."""
        return Score((*self.finished().modifiers, modifier))

    def plus(self, term: Real) -> Score:
        """Plus a term. Raises Unread for one that is not linear in a captured tensor."""
        try:
            return self.then(Addend(simplify_text(term.text), term.elements, term.integers))
        except GraphError as error:
            raise Unread(str(error)) from error
