"""Symbols: values of generated code, so that one Python expression serves tensors and kernels.

What a mask's `keep` or a modifier's `change` does to its arguments, with operators and with the
methods that tensors have too, is written down as lines of Triton. Methods that end in `_` return
the new value, as everywhere; a symbol itself never changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, final

import torch
from attrs import define, field, frozen

Kind = Literal["int", "float", "bool"]
Operand = Any  # a symbol, an integer, a float or a boolean
NAMES = re.compile(r"\bx\d+")  # of lines
LIMITS = {"i": "i < M", "j": "j < N"}  # where what depends on i or j may be read


class Untraceable(TypeError):
    """A mask or a modifier asks of its arguments what no generated code can do."""


@final
@define(eq=False)
class Numbers:
    """The integers that generated code reads at run time.

    A literal that is added or compared is read from here, so that another length needs no other
    kernel; one that multiplies or divides is part of the code, which a compiler turns into shifts.
    """

    found: list[int] = field(factory=list)

    def add(self, value: int) -> str:
        self.found.append(value)
        return f"numbers[{len(self.found) - 1}]"


@final
@define(eq=False)
class Code:
    """One function as it is written: lines, of which equal ones are written once."""

    numbers: Numbers
    lines: dict[str, str] = field(factory=dict)

    def line(self, text: str, kind: Kind, reads: Iterable[object]) -> Symbol:
        """The symbol of an expression."""
        name = self.lines.setdefault(text, f"x{len(self.lines)}")
        axes = frozenset(axis for x in reads if isinstance(x, Symbol) for axis in x.axes)
        return Symbol(self, name, kind, axes)

    def argument(self, name: str, kind: Kind = "int", axes: str = "") -> Symbol:
        return Symbol(self, name, kind, frozenset(axes or name))

    def function(self, name: str, arguments: str, *results: object) -> str:
        """The text of a function that returns these symbols or numbers, and of no line more."""
        needed = {x.text for x in results if isinstance(x, Symbol)}
        body = ""
        for text, line in reversed(self.lines.items()):
            if line in needed:
                needed |= set(NAMES.findall(text))
                body = f"    {line} = {text}\n{body}"
        returned = ", ".join(
            x.text if isinstance(x, Symbol) else code_literal(x)[0] for x in results
        )
        return f"def {name}({arguments}):\n{body}    return {returned}\n"


def code_literal(value: object) -> tuple[str, Kind]:
    """A Python number in code."""
    if isinstance(value, bool):
        return str(value), "bool"
    if isinstance(value, int):
        return str(value), "int"
    if isinstance(value, float):
        return (repr(value) if abs(value) < float("inf") else f'float("{value}")'), "float"
    raise Untraceable(f"a symbol meets {value!r}, which is no number")


@final
@frozen(eq=False, repr=False)
class Symbol:
    """A value of generated code. axes: which of "b", "h", "i", "j" it depends on."""

    code: Code
    text: str
    kind: Kind
    axes: frozenset[str] = frozenset()
    dtype = torch.float32
    device = torch.device("cpu")

    def operand(self, x: Operand, lift: bool) -> tuple[str, Kind]:
        """Another operand's text and kind."""
        if isinstance(x, Symbol):
            return x.text, x.kind
        text, kind = code_literal(x)
        lifted = lift and kind == "int" and self.kind == "int"
        return (self.code.numbers.add(x) if lifted else text), kind

    def binary(self, form: str, x: Operand, kind: Kind | None = None, lift: bool = False) -> Symbol:
        """`form` with {0} this symbol and {1} the other operand."""
        text, other = self.operand(x, lift)
        wider: Kind = "float" if "float" in (self.kind, other) else self.kind
        return self.code.line(form.format(self.text, text), kind or wider, (self, x))

    def unary(self, form: str, kind: Kind | None = None) -> Symbol:
        return self.code.line(form.format(self.text), kind or self.kind, (self,))

    def __add__(self, x: Operand) -> Symbol:
        return self if is_zero(x) else self.binary("{0} + {1}", x, lift=True)

    __radd__ = __add__

    def __sub__(self, x: Operand) -> Symbol:
        return self if is_zero(x) else self.binary("{0} - {1}", x, lift=True)

    def __rsub__(self, x: Operand) -> Symbol:
        return self.binary("{1} - {0}", x, lift=True)

    def __mul__(self, x: Operand) -> Symbol:
        return self.binary("{0} * {1}", x)

    __rmul__ = __mul__

    def __truediv__(self, x: Operand) -> Symbol:
        if isinstance(x, float) and x:
            return self * (1 / x)
        return self.binary("{0} / {1}", x, "float")

    def __rtruediv__(self, x: Operand) -> Symbol:
        return self.binary("{1} / {0}", x, "float")

    def __floordiv__(self, x: Operand) -> Symbol:
        return self.binary("floor_div({0}, {1})", x)

    def __rfloordiv__(self, x: Operand) -> Symbol:
        return self.binary("floor_div({1}, {0})", x)

    def __mod__(self, x: Operand) -> Symbol:
        return self.__sub__((self // x) * x)

    def __rmod__(self, x: Operand) -> Symbol:
        found: Symbol = x - (x // self) * self
        return found

    def __neg__(self) -> Symbol:
        return self.unary("-{0}")

    def __lt__(self, x: Operand) -> Symbol:
        return self.binary("{0} < {1}", x, "bool", lift=True)

    def __le__(self, x: Operand) -> Symbol:
        return self.binary("{0} <= {1}", x, "bool", lift=True)

    def __gt__(self, x: Operand) -> Symbol:
        return self.binary("{0} > {1}", x, "bool", lift=True)

    def __ge__(self, x: Operand) -> Symbol:
        return self.binary("{0} >= {1}", x, "bool", lift=True)

    def __eq__(self, x: object) -> Symbol:  # type: ignore[override]  # as tensors do
        return self.binary("{0} == {1}", x, "bool", lift=True)

    def __ne__(self, x: object) -> Symbol:  # type: ignore[override]  # as tensors do
        return self.binary("{0} != {1}", x, "bool", lift=True)

    __hash__ = None  # type: ignore[assignment]  # == makes a symbol

    def __and__(self, x: Operand) -> Symbol:
        if isinstance(x, bool) and self.kind == "bool":
            return self if x else self.unary("{0} & ~{0}")
        return self.binary("{0} & {1}", x)

    __rand__ = __and__

    def __or__(self, x: Operand) -> Symbol:
        if isinstance(x, bool) and self.kind == "bool":
            return self.unary("{0} | ~{0}") if x else self
        return self.binary("{0} | {1}", x)

    __ror__ = __or__

    def __xor__(self, x: Operand) -> Symbol:
        if isinstance(x, bool) and self.kind == "bool":
            return self.unary("~{0}") if x else self
        return self.binary("{0} ^ {1}", x)

    __rxor__ = __xor__

    def __invert__(self) -> Symbol:
        return self.unary("~{0}")

    def truth(self) -> Symbol:
        """As a boolean: whether it is not 0."""
        return self if self.kind == "bool" else self.unary("{0} != 0", "bool")

    def logical_not(self) -> Symbol:
        return ~self.truth()

    def maximum(self, x: Operand) -> Symbol:
        return self.binary("tl.maximum({0}, {1})", x, lift=True)

    def minimum(self, x: Operand) -> Symbol:
        return self.binary("tl.minimum({0}, {1})", x, lift=True)

    def where(self, yes: Operand, no: Operand) -> Symbol:
        """`yes` where this is true, else `no`."""
        (a, kind), (b, other) = (self.operand(x, lift=False) for x in (yes, no))
        wider: Kind = "float" if "float" in (kind, other) else kind
        return self.code.line(f"tl.where({self.text}, {a}, {b})", wider, (self, yes, no))

    def among(self, values: Sequence[float]) -> Symbol:
        """values[self]."""
        start = self.unary(
            f"{{0}} * 0.0 + {float(values[-1])!r}" if values else "{0} * 0.0", "float"
        )
        pairs = list(enumerate(values))[:-1]
        return reduce(
            lambda rest, pair: (self == pair[0]).where(float(pair[1]), rest), pairs, start
        )

    def to(self, dtype: torch.dtype) -> Symbol:
        if dtype.is_floating_point:
            return self.unary("({0}).to(tl.float32)", "float")
        return self.unary("({0}).to(tl.int64)", "int")

    def addcmul(self, a: Operand, b: Operand, *, value: float = 1) -> Symbol:
        """self + value * a * b."""
        product = a * b
        return self.__sub__(product) if value == -1 else self.__add__(value * product)

    def square(self) -> Symbol:
        return self * self

    def collected(self, *_: object) -> Symbol:
        """A sum over axes, or new axes: whoever adds contributions up does both."""
        return self

    sum = sum_to_size = __getitem__ = collected

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        """Methods in place, and the functions of Triton by their names in PyTorch."""
        if name in FUNCTIONS:
            return lambda: self.unary(FUNCTIONS[name], "float")
        if name in METHODS:
            return getattr(self, METHODS[name])  # type: ignore[no-any-return]  # a method
        if name.endswith("_") and not name.startswith("_"):
            return getattr(self, name[:-1])  # type: ignore[no-any-return]  # a method
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(f"generated code has no {name}(); it has {', '.join(sorted(KNOWN))}")

    def abs(self) -> Symbol:
        return self.unary("tl.abs({0})")

    def __abs__(self) -> Symbol:
        return self.abs()

    def refuse(self, *_: object, **__: object) -> Any:  # Any: whatever was to come
        raise Untraceable(
            "a symbol of generated code has no value yet; write with operators and methods alone, "
            "no `if`, `and`, `or`, `not`, int() or functions of torch"
        )

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = refuse

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, *_: object, **__: object
    ) -> Any:  # Any: whatever was to come
        raise Untraceable(
            f"{getattr(function, '__name__', function)} of torch was called on a symbol of "
            "generated code; write with operators and methods alone"
        )


FUNCTIONS = {
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "sigmoid": "tl.sigmoid({0})",
    "tanh": "tanh({0})",
}
METHODS = {
    "add": "__add__",
    "sub": "__sub__",
    "mul": "__mul__",
    "div": "__truediv__",
    "neg": "__neg__",
}
KNOWN = {
    *FUNCTIONS,
    *METHODS,
    "abs",
    "addcmul",
    "logical_not",
    "maximum",
    "minimum",
    "square",
    "to",
    "where",
}


def is_zero(x: object) -> bool:
    return isinstance(x, int) and x == 0


@final
@frozen(eq=False)
class Array:
    """A tensor that generated code reads: data[slot], its strides in `numbers` from `at` on."""

    code: Code
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int
    is_long: bool  # whether offsets need 64 bits
    limits: Mapping[str, str] = field(factory=lambda: LIMITS)

    def __getitem__(self, index: tuple[Operand, ...]) -> Symbol:
        """The element at `index`; 0 at places past the last query or key."""
        offset = [f"data[{self.slot}]"]
        for axis, x in enumerate(index):
            if not is_zero(x):
                text = x.text if isinstance(x, Symbol) else code_literal(x)[0]
                wide = f"({text}).to(tl.int64)" if self.is_long and isinstance(x, Symbol) else text
                offset.append(f"{wide} * numbers[{self.at + axis}]")
        axes = {axis for x in index if isinstance(x, Symbol) for axis in x.axes}
        inside = " & ".join(f"({limit})" for axis, limit in self.limits.items() if axis in axes)
        masked = f", mask={inside}, other=0" if inside else ""
        load = f"tl.load({' + '.join(offset)}{masked})"
        if self.dtype == torch.bool:
            return self.code.line(f"{load} != 0", "bool", index)
        if self.dtype.is_floating_point:
            return self.code.line(f"{load}.to(tl.float32)", "float", index)
        return self.code.line(load, "int", index)
