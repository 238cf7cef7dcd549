"""Numbers that follow the sizes of a call: planning one size plans others at once.

A function runs with SizeFormulas in place of sizes. Its arithmetic is recorded as lines of Python,
and so is the outcome of each comparison (a "decision"). The compiled lines give its result for
other sizes, or None if a decision comes out differently there.

A comparison settled by the bounds and divisors of the sizes is not recorded. An operation that
needs a plain integer (`range`, an index) records the decision that the number has this value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import gcd, inf
from operator import index
from typing import Any, TypeVar, final

from attrs import define, field, frozen

from attn_graph.spec.nested import nested_values, replace_nested

NAME = re.compile(r"\b[sxf]\d+\b")  # of sizes, of results of lines, and of functions
R = TypeVar("R")
T = TypeVar("T")
Number = Any  # an integer, or a formula in place of one
Values = Sequence[Any]  # of the formulas in a value, in their order


@final
@frozen
class SizeBounds:
    """The range of a number and a divisor of it."""

    least: float = -inf
    most: float = inf
    divisor: int = 1


@final
@define(eq=False)
class Recording:
    """The computations and decisions of a function of sizes.

    lines: (name, expression), with "" as the name of a decision. names: from the expression.
    bounds: by name. constants: values that lines refer to, by name.
    """

    lines: list[tuple[str, str]] = field(factory=list)
    names: dict[str, str] = field(factory=dict)
    bounds: dict[str, SizeBounds] = field(factory=dict)
    constants: dict[str, object] = field(factory=dict)
    sizes: list[str] = field(factory=list)

    def add_size(self, value: int, bounds: SizeBounds) -> SizeFormula:
        """A formula for the next argument of the compiled function."""
        name = f"s{len(self.sizes)}"
        self.sizes.append(name)
        self.bounds[name] = bounds
        return SizeFormula(self, name, value)

    def add_line(self, text: str, value: Number, bounds: SizeBounds) -> SizeFormula:
        """The value of an expression; equal expressions are computed once."""
        if text not in self.names:
            self.names[text] = f"x{len(self.names)}"
            self.lines.append((self.names[text], text))
            self.bounds[self.names[text]] = bounds
        return SizeFormula(self, self.names[text], value)

    def decide(self, text: str, outcome: bool) -> bool:
        """Record the outcome of a condition, and return it."""
        if text not in self.names:
            self.names[text] = ""
            self.lines.append(("", text if outcome else f"not {text}"))
        return outcome

    def add_constant(self, value: object) -> str:
        """Store a value and return the name for it."""
        name = f"f{len(self.constants)}"
        self.constants[name] = value
        return name

    def compile(self, result: object) -> Callable[..., Any]:  # Any: of the kind of `result`
        """A function of the sizes that gives `result`, or None if a decision differs.

        The repr of `result` is its source, in which formulas are variables.
        """
        needed, body = {*NAME.findall(repr(result))}, ""
        for name, text in reversed(self.lines):
            if name and name not in needed:
                continue
            needed |= {*NAME.findall(text)}
            line = f"{name} = {text}" if name else f"if not ({text}): return None"
            body = f"    {line}\n{body}"
        made: dict[str, Any] = {**self.constants}
        exec(f"def plan({', '.join(self.sizes)}):\n{body}    return {result!r}\n", made)
        return made["plan"]  # type: ignore[no-any-return]  # defined by exec


@final
class SizeFormula:
    """A recorded number. value: its value for the recorded sizes."""

    __slots__ = ("name", "recording", "value")

    def __init__(self, recording: Recording, name: str, value: Any) -> None:  # Any: a number
        self.recording, self.name, self.value = recording, name, value

    @property
    def bounds(self) -> SizeBounds:
        return self.recording.bounds[self.name]

    def apply(
        self, form: str, other: object, compute: Callable[[Number, Number], Number], known: Number
    ) -> Number:
        """Record `form`, with this number as {0} and the other as {1}.

        compute: its value from both values. known: its bounds from both bounds.
        """
        if isinstance(other, float):
            return compute(index(self), other)
        if not isinstance(other, (int, SizeFormula)):
            return NotImplemented
        bounds: SizeBounds = known(self.bounds, known_bounds(other))
        if bounds.least == bounds.most:
            return int(bounds.least)
        value = compute(self.value, other.value if isinstance(other, SizeFormula) else other)
        return self.recording.add_line(form.format(self, other), value, bounds)

    def __add__(self, other: object) -> Number:
        if isinstance(other, int) and other == 0:
            return self
        return self.apply("{0} + {1}", other, lambda a, b: a + b, add_bounds)

    __radd__ = __add__

    def __sub__(self, other: object) -> Number:
        if isinstance(other, SizeFormula) and other.name == self.name:
            return 0
        return self.apply(
            "{0} - {1}", other, lambda a, b: a - b, lambda a, b: add_bounds(a, negate_bounds(b))
        )

    def __rsub__(self, other: object) -> Number:
        return self.__neg__() + other

    def __mul__(self, other: object) -> Number:
        if isinstance(other, int) and other == 1:
            return self
        return self.apply("{0} * {1}", other, lambda a, b: a * b, multiply_bounds)

    __rmul__ = __mul__

    def __neg__(self) -> Number:
        return self.__mul__(-1)

    def __floordiv__(self, other: object) -> Number:
        if isinstance(other, int) and other == 1:
            return self
        return self.apply("{0} // {1}", other, lambda a, b: a // b, divide_bounds)

    def __rfloordiv__(self, other: int) -> Number:
        return self.recording.add_line(f"{other} // {self}", other // self.value, SizeBounds())

    def __mod__(self, other: object) -> Number:
        return self.apply("{0} % {1}", other, lambda a, b: a % b, modulo_bounds)

    def __truediv__(self, other: Number) -> Number:
        return index(self) / other

    def __rtruediv__(self, other: Number) -> Number:
        return other / index(self)

    def __rlshift__(self, other: int) -> int:
        return other << index(self)

    def bit_length(self) -> SizeFormula:
        return self.recording.add_line(
            f"{self}.bit_length()", self.value.bit_length(), SizeBounds(0)
        )

    def maximum(self, other: Number) -> Number:
        if not isinstance(other, (int, SizeFormula)):
            return other.maximum(self)
        if (order := sure_order(self, other)) is not None:
            return self if order >= 0 else other
        return self.apply("max({0}, {1})", other, max, highest_bounds)

    def minimum(self, other: Number) -> Number:
        if not isinstance(other, (int, SizeFormula)):
            return other.minimum(self)
        if (order := sure_order(self, other)) is not None:
            return self if order <= 0 else other
        return self.apply("min({0}, {1})", other, min, lowest_bounds)

    def compare(
        self, sign: str, other: object, outcome: Callable[[Number, Number], bool]
    ) -> Number:
        """Decide a comparison, unless the bounds settle it."""
        if not isinstance(other, (int, SizeFormula)):
            return NotImplemented
        if isinstance(other, SizeFormula) and other.name == self.name:
            return outcome(0, 0)
        a, b = self.bounds, known_bounds(other)
        if sign in ("==", "!=") and (a.most < b.least or b.most < a.least):
            return sign == "!="
        if sign not in ("==", "!="):
            sure = {outcome(x, y) for x in (a.least, a.most) for y in (b.least, b.most)}
            if len(sure) == 1:
                return sure.pop()
        elif a.least == a.most == b.least == b.most:
            return sign == "=="
        value = other.value if isinstance(other, SizeFormula) else other
        came = self.recording.decide(f"({self} {sign} {other})", outcome(self.value, value))
        if isinstance(other, int):
            self.recording.bounds[self.name] = narrow_bounds(a, sign, other, came)
        return came

    def __lt__(self, other: object) -> Number:
        return self.compare("<", other, lambda a, b: a < b)

    def __le__(self, other: object) -> Number:
        return self.compare("<=", other, lambda a, b: a <= b)

    def __gt__(self, other: object) -> Number:
        return self.compare(">", other, lambda a, b: a > b)

    def __ge__(self, other: object) -> Number:
        return self.compare(">=", other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> Number:
        return self.compare("==", other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Number:
        return self.compare("!=", other, lambda a, b: a != b)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(self.name)

    def __index__(self) -> int:
        """Its value, recorded as a decision."""
        if self.bounds.least == self.bounds.most:
            return int(self.bounds.least)
        self.recording.decide(f"({self} == {self.value})", True)
        self.recording.bounds[self.name] = SizeBounds(self.value, self.value, abs(self.value))
        return int(self.value)

    __int__ = __index__

    def __float__(self) -> float:
        return float(index(self))

    def __repr__(self) -> str:
        return self.name


# Bounds of results


def known_bounds(x: object) -> SizeBounds:
    if isinstance(x, SizeFormula):
        return x.bounds
    assert isinstance(x, int)
    return SizeBounds(x, x, abs(x))


def add_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    return SizeBounds(a.least + b.least, a.most + b.most, gcd(a.divisor, b.divisor))


def negate_bounds(a: SizeBounds) -> SizeBounds:
    return SizeBounds(-a.most, -a.least, a.divisor)


def multiply_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    ends = [x * y if x and y else 0 for x in (a.least, a.most) for y in (b.least, b.most)]
    return SizeBounds(min(ends), max(ends), a.divisor * b.divisor)


def divide_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    """Bounds of a // b; unlimited unless b >= 1 and all ends are finite."""
    if b.least < 1 or inf in (-a.least, a.most, b.most):
        return SizeBounds()
    ends = [x // y for x in (a.least, a.most) for y in (b.least, b.most)]
    exact = b.least == b.most and a.divisor % b.divisor == 0
    return SizeBounds(min(ends), max(ends), a.divisor // b.divisor if exact else 1)


def modulo_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    """Bounds of a % b; unlimited unless b is a known number >= 1."""
    if b.least < 1 or b.least != b.most:
        return SizeBounds()
    if a.divisor % b.divisor == 0:
        return SizeBounds(0, 0, 0)
    return SizeBounds(0, b.most - 1)


def highest_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    divisor = gcd(a.divisor, b.divisor)
    return SizeBounds(max(a.least, b.least), max(a.most, b.most), divisor)


def lowest_bounds(a: SizeBounds, b: SizeBounds) -> SizeBounds:
    divisor = gcd(a.divisor, b.divisor)
    return SizeBounds(min(a.least, b.least), min(a.most, b.most), divisor)


def sure_order(a: SizeFormula, b: object) -> int | None:
    """1 if a >= b for all sizes, -1 if a <= b for all sizes, None if neither is known."""
    x, y = a.bounds, known_bounds(b)
    return 1 if x.least >= y.most else -1 if y.least >= x.most else None


def narrow_bounds(a: SizeBounds, sign: str, other: int, came: bool) -> SizeBounds:
    """The bounds of a number after the outcome of a comparison with `other`."""
    sign = (
        sign if came else {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}[sign]
    )
    least, most = a.least, a.most
    match sign:
        case "==":
            least = most = other
        case "!=":
            least, most = least + (least == other), most - (most == other)
        case "<" | "<=":
            most = min(most, other - (sign == "<"))
        case _:
            least = max(least, other + (sign == ">"))
    return SizeBounds(least, most, a.divisor)


# Functions of numbers, formulas or not


def lowest(*numbers: int) -> int:
    """The minimum, without a decision."""
    least: int = reduce_pairs(numbers, min, SizeFormula.minimum)
    return least


def highest(*numbers: int) -> int:
    """The maximum, without a decision."""
    most: int = reduce_pairs(numbers, max, SizeFormula.maximum)
    return most


def reduce_pairs(
    numbers: Sequence[Number],
    plain: Callable[[Number, Number], Number],
    recorded: Callable[[Number, Number], Number],
) -> Number:
    """Fold numbers by `recorded` where a formula is involved, else by `plain`."""
    result, *rest = numbers
    for x in rest:
        if isinstance(result, SizeFormula):
            result = recorded(result, x)
        else:
            result = recorded(x, result) if isinstance(x, SizeFormula) else plain(result, x)
    return result


def capacity(number: int) -> int:
    """The upper bound of a formula; a number itself."""
    most = number.bounds.most if isinstance(number, SizeFormula) else number
    return int(most)


def is_one(number: int) -> bool:
    """True if a number is 1 for all sizes; records no decision."""
    if isinstance(number, SizeFormula):
        return number.bounds.least == number.bounds.most == 1
    return number == 1


def follows_sizes(value: object) -> bool:
    """True if a value contains a formula."""
    return next(nested_values(value, SizeFormula), None) is not None


def defer(function: Callable[[T], Any], value: T) -> Any:  # Any: its result
    """function(value), as a formula if `value` contains formulas; it is called with numbers."""
    inside = [*{x.name: x for x in nested_values(value, SizeFormula)}.values()]
    if not inside:
        return function(value)
    recording = inside[0].recording
    places = {x.name: n for n, x in enumerate(inside)}

    def compute(*given: int) -> object:
        return function(replace_nested(value, SizeFormula, lambda x: given[places[x.name]]))

    text = f"{recording.add_constant(compute)}({', '.join(map(repr, inside))})"
    return recording.add_line(text, compute(*[x.value for x in inside]), SizeBounds())


def decide(function: Callable[[T], R], value: T) -> R:
    """function(value), recorded as a decision if `value` contains formulas."""
    result: Any = defer(function, value)  # Any: a formula, or its result
    if isinstance(result, SizeFormula):
        due = result.recording.add_constant(result.value)
        result.recording.decide(f"({result} == {due})", True)
    given: R = result.value if isinstance(result, SizeFormula) else result
    return given
