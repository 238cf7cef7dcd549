"""The values in a mod of FlexAttention: integers, real numbers and scores at a place.

An integer affine in the positions compares to a mask of ours in closed form; others keep their
text, for a `Formula`. Booleans are masks from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import takewhile
from typing import Any, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.modifiers import Modifier, SoftCap
from attn_graph.ir.terms.addends import Addend, Factor
from attn_graph.ir.terms.formulas import (
    AXES,
    FUNCTIONS,
    METHODS,
    Elements,
    Formula,
    evaluate_formula,
    simplify_text,
)
from attn_graph.masks import And, Causal, Mask, Not, Or, Prefix, Window
from attn_graph.masks.canonical import (
    POSITIONS,
    Affine,
    Position,
    as_mask,
    closed_form,
    coefficients,
    combine_masks,
    negate,
)
from attn_graph.masks.joins import BLOCKS
from attn_graph.masks.places import Untraceable
from attn_graph.spec import INF, INTEGERS

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
BLOCKS_OF = {position: blocks for blocks, position in BLOCKS.items()}
DTYPES = {
    "bool": torch.bool, "int": torch.int32, "long": torch.int64,
    "half": torch.float16, "bfloat16": torch.bfloat16,
    "float": torch.float32, "double": torch.float64,
}  # fmt: skip
DISTANCES = {"i": 1, "j": -1}, {"i": -1, "j": 1}
EXACT = (torch.float32, torch.float64)  # hold scores and positions
Term = Any  # a value of this module, a mask, or a number
HIDE = (
    "a finite number hides no key from a row without larger ones; write -float('inf'), which is a "
    "mask"
)
CLOSE = 1e-12  # relative: 1 / cap times cap, in float64


class Unread(Exception):
    """Part of a mod has no translation; the text is a clause with the part and the reason.

    distance: True if it reads a tensor at a distance of query and key.
    """

    def __init__(self, text: str, *, distance: bool = False) -> None:
        self.distance = distance
        super().__init__(text)


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

    element: its element of a tensor. ends: "max" or "min", and the two integers it is that of.
    """

    text: str
    elements: Elements = ()
    element: Element | None = None
    ends: tuple[str, Index, Index] | None = None

    @classmethod
    def of(cls, x: Index | int) -> Index:
        """An index, or a number as one."""
        return x if isinstance(x, Index) else cls(f"({x})")

    @property
    def position(self) -> Position | None:
        """As an integer affine in b, h, i and j, or an absolute value of one; None if it is not."""
        names = {**dict(zip(AXES, POSITIONS, strict=True)), **FUNCTIONS}
        try:
            return Position.of(evaluate_formula(self.text, names))
        except (Untraceable, AttributeError, NameError):
            return None

    @property
    def affine(self) -> Affine:
        """The coefficients of its position, or within its absolute value; {} if it has none."""
        return {} if self.position is None else coefficients(self.position.affine)


def combine_indices(name: str, x: Index | int, y: Index | int) -> Index:
    """x + y, x - y, x * y, x // y or x % y. Raises Unread for a divisor below 1."""
    a, b = Index.of(x), Index.of(y)
    if name in ("floordiv", "mod"):
        divisor = None if b.position is None else b.position.number
        if divisor is None or divisor < 1:
            raise Unread(f"it divides by {b.text}, which is not a positive number")
    return Index(f"({a.text} {SIGNS[name]} {b.text})", unite(a.elements, b.elements))


def extreme_index(name: str, x: Index | int, y: Index | int) -> Index:
    """The "max" or "min" of two."""
    a, b = Index.of(x), Index.of(y)
    return Index(f"{name}({a.text}, {b.text})", unite(a.elements, b.elements), ends=(name, a, b))


def unite(a: Elements, b: Elements) -> Elements:
    """The tensors of both, each once."""
    return tuple(dict.fromkeys((*a, *b)))


# Comparisons


def compare_indices(name: str, a: Index, b: Index) -> Mask:
    """The mask of a comparison: in closed form, or else a `Formula`."""
    text = simplify_text(f"{a.text} {SIGNS[name]} {b.text}")
    formula = Formula(text, unite(a.elements, b.elements))
    closed = closed_form(formula)
    return formula if closed is None else closed


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
                is_distance = x.affine in DISTANCES and x.text.startswith("abs")
                return cls(f"real({x.text})", distance=is_distance, integers=x.elements)
            case _ if math.isfinite(x):
                return cls(f"({float(x)})")
        raise Unread(f"it adds {x}; -inf by torch.where hides keys")

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


ZERO, ONE = Real.of(0), Real.of(1)


@final
@frozen(eq=False)
class Penalty:
    """A term that is -inf where a mask is false, and elsewhere another one."""

    mask: Mask
    term: Real | Index | float


@final
@frozen(eq=False)
class Score:
    """The scores after these steps, and then outer * f(inner * s), f the identity or tanh."""

    steps: tuple[Modifier | Mask, ...] = ()
    inner: float = 1.0
    is_tanh: bool = False
    outer: float = field(default=1.0)

    def scaled(self, factor: float) -> Score:
        """Times a number. Raises Unread for infinity, NaN and what may show hidden keys."""
        if not math.isfinite(factor):
            raise Unread(f"it multiplies the scores by {factor}")
        if factor <= 0:
            self.require_all_seen(f"multiplies the scores by {factor:g}")
        if self.is_tanh:
            return evolve(self, outer=self.outer * factor)
        return evolve(self, inner=self.inner * factor)

    def tanh(self) -> Score:
        """Their tanh. Raises Unread if it shows hidden keys."""
        self.require_all_seen("computes tanh() of the scores")
        return evolve(self.finished() if self.is_tanh else self, is_tanh=True)

    def finished(self) -> Score:
        """The same scores with a tanh as a soft cap and a product as a factor. Raises Unread for a
        tanh of 0.
        """
        steps, factor = self.steps, self.inner * self.outer
        is_one = math.isclose(factor, 1, rel_tol=CLOSE)
        if self.is_tanh and not self.inner:
            raise Unread("it multiplies the scores by 0 under a tanh")
        if self.is_tanh:
            steps = (*steps, SoftCap(abs(self.outer) if is_one else 1 / abs(self.inner)))
        return Score(steps if is_one else (*steps, Factor(str(factor))))

    def then(self, step: Modifier | Mask) -> Score:
        """With one more step."""
        return Score((*self.finished().steps, step))

    def times(self, term: Real) -> Score:
        """Times a term. Raises Unread for a trained one."""
        self.require_all_seen(f"multiplies the scores by {simplify_text(term.text)}")
        return self.then(Factor(simplify_text(term.text), term.elements, term.integers))

    def plus(self, term: Real) -> Score:
        """Plus a term. Raises Unread for one that is not linear in a captured tensor."""
        try:
            return self.then(Addend(simplify_text(term.text), term.elements, term.integers))
        except GraphError as error:
            raise Unread(str(error)) from error

    def require_all_seen(self, what: str) -> None:
        """Raise Unread if a step has hidden keys, whose scores of -inf may then be others."""
        if any(isinstance(step, Mask) for step in self.steps):
            raise Unread(f"it {what} after it hides some by -inf; hide them last")


# Operations


def describe_term(term: Term) -> str:
    """A term in words."""
    match term:
        case Index(text) | Real(text):
            return simplify_text(text)
        case Score():
            return "the scores"
        case Penalty():
            return "-inf at some places"
    return str(term)


def read_choice(mask: Mask, x: Term, y: Term) -> Score | Penalty:
    """x where a mask is true, else y: both scores, or one -inf. Raises Unread for others."""
    if is_infinite(x):
        mask, x, y = negate(mask), y, x
    if is_infinite(y) and isinstance(x, Score):
        return x.then(mask)
    if is_infinite(y) and is_number(x):
        return Penalty(mask, x)
    if isinstance(x, Score) and isinstance(y, Score):
        return choose_scores(mask, x, y)
    score, number = (x, y) if isinstance(x, Score) else (y, x)
    if isinstance(score, Score) and is_number(number):
        raise Unread(f"it puts {describe_term(number)} in place of some scores; {HIDE}")
    raise Unread(f"it computes where() of {describe_term(x)}, {describe_term(y)}")


def choose_scores(mask: Mask, x: Score, y: Score) -> Score:
    """x where a mask is true, else y: what both begin with, then one product and one sum.

    Raises Unread for other steps, and for masks of whole tensors.
    """
    c = indicator(mask)
    a, b = x.finished().steps, y.finished().steps
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])
    (a_factor, a_term), (b_factor, b_term) = (linear(steps[shared:]) for steps in (a, b))
    score = Score(a[:shared])
    factor, term = mix(c, a_factor, b_factor), mix(c, a_term, b_term)
    if a_factor.text != b_factor.text:
        score = score.times(factor)
    elif a_factor is not ONE:
        score = score.times(a_factor)
    return score if term is ZERO else score.plus(term)


def linear(steps: Sequence[Modifier | Mask]) -> tuple[Real, Real]:
    """Steps as a factor and a term: scores * factor + term. Raises Unread for others."""
    factor, term = ONE, ZERO
    for step in steps:
        if not isinstance(step, Factor | Addend):
            raise Unread(f"it has {step} at some places only")
        own = Real(f"({step.text})", step.elements, integers=step.integers)
        if isinstance(step, Addend):
            term = total(term, own)
        else:
            factor, term = product(factor, own), product(term, own)
    return factor, term


def product(x: Real, y: Real) -> Real:
    if ZERO in (x, y):
        return ZERO
    return y if x is ONE else x if y is ONE else combine_reals("mul", x, y)


def total(x: Real, y: Real) -> Real:
    return y if x is ZERO else x if y is ZERO else combine_reals("add", x, y)


def mix(c: Real, x: Real, y: Real) -> Real:
    """x where c is 1, y where it is 0."""
    return total(product(x, c), product(y, combine_reals("sub", ONE, c)))


def indicator(mask: Mask) -> Real:
    """1 where a mask is true, and 0 elsewhere. Raises Unread for a mask of whole tensors."""
    match mask:
        case Formula(text, elements):
            return Real(f"real({text})", integers=elements)
        case Causal(align="top_left"):
            return Real("real(j <= i)")
        case Prefix(int() as keys):
            return Real(f"real(j < {keys})")
        case Window(left, right, "top_left"):
            ends = (left, "j - i >= {}", -1), (right, "j - i <= {}", 1)
            texts = [text.format(sign * n) for n, text, sign in ends if n is not None]
            return reduce(product, [Real(f"real({text})") for text in texts], ONE)
        case Not(inner):
            return combine_reals("sub", ONE, indicator(inner))
        case And(a, b):
            return product(indicator(a), indicator(b))
        case Or(a, b):
            return mix(indicator(a), ONE, indicator(b))
    raise Unread(f"it takes other scores where {mask} is true")


def is_infinite(x: Term) -> bool:
    return isinstance(x, float) and x == -INF


def convert(x: Term, dtype: torch.dtype) -> Term:
    """A term in another dtype. Raises Unread if that changes it."""
    whole, kept = is_integer(x), dtype_of(x)
    if dtype == torch.bool and whole:
        return compare_indices("ne", Index.of(x), Index.of(0))
    if (
        dtype == kept
        or (dtype in EXACT and kept in EXACT)
        or (whole and dtype in (*INTEGERS, *EXACT))
    ):
        return x
    raise Unread(f"it turns {describe_term(x)} into {dtype}")


def dtype_of(x: Term) -> torch.dtype:
    """The dtype in which a term is computed here."""
    return torch.bool if isinstance(x, Mask | bool) else torch.int64 if is_integer(x) else EXACT[0]


def apply_to_numbers(name: str, operands: list[Term]) -> Index | Real:
    """The result of an operation on numbers. Raises Unread for an unknown one."""
    match name, operands:
        case "neg", [Index() as a]:
            return Index(f"(-{a.text})", a.elements)
        case "neg", [Real() as a]:
            return a.negative()
        case "abs", [Index() as a]:
            return Index(f"abs({a.text})", a.elements)
        case "clamp", [Index() as a, *ends] if all(x is None or is_integer(x) for x in ends):
            for each, x in zip(("max", "min"), ends, strict=False):
                a = a if x is None else extreme_index(each, a, x)
            return a
        case (("add" | "sub" | "mul" | "truediv"), [a, b]) if is_number(a) and is_number(b):
            return combine_reals(name, a, b)
        case _, [x] if name in METHODS and is_number(x):
            a = Real.of(x)
            return Real(f"{name}({a.text})", a.elements, integers=a.integers)
    raise Unread(f"it computes {name}() of {', '.join(map(describe_term, operands))}")


def apply_to_masks(name: str, operands: list[Term]) -> Term:
    """The result of an operation on booleans, or of a choice. Raises Unread for others."""
    match name, operands:
        case (("and" | "or" | "xor"), [Mask() | bool() as a, Mask() | bool() as b]):
            return combine_masks(name, a, b)
        case "invert", [a]:
            return negate(as_mask(a))
        case "where", [Mask() | bool() as c, Mask() | bool() as a, Mask() | bool() as b]:
            kept, others = combine_masks("and", c, a), combine_masks("and", negate(as_mask(c)), b)
            return combine_masks("or", kept, others)
        case ("where", [Mask() | bool() as c, a, b]) | (
            "masked_fill",
            [b, Mask() | bool() as c, a],
        ):
            return read_choice(as_mask(c), a, b)
    raise Unread(f"it computes {name}() of {', '.join(map(describe_term, operands))}")


def is_integer(x: Term) -> bool:
    """True for an integer term, at a place or constant."""
    return isinstance(x, Index | int) and not isinstance(x, bool)


def is_number(x: Term) -> bool:
    """True for a number term, at a place or constant."""
    return isinstance(x, Index | Real | int | float) and not isinstance(x, bool)
