"""Symbols: values of generated code, so one Python expression serves tensors and kernels.

Operators and tensor methods applied to symbols by a mask's `keep` or a modifier's `change` are
recorded as lines of Triton, or of another dialect. Methods that end in `_` return the new value; a
symbol itself never changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import index, mul
from typing import Any, Literal, NamedTuple, final

import torch
from attrs import define, evolve, field, frozen

from attn_graph.masks.places import Operators, Untraceable
from attn_graph.spec import MOST_INT32

Kind = Literal["int", "float", "bool"]
Operand = Any  # a symbol, an integer, a float or a boolean
MOST_NUMBER = 2**60  # passed by `Numbers`, in 64 bits
SPECIAL = 16  # Triton makes separate kernels for multiples of it
NAMES = re.compile(r"\bx\d+")  # the names assigned by lines
LIMITS = {"i": "i < M", "j": "j < N"}  # of addresses by i or j


@final
@frozen
class Dialect:
    """The spelling of one language of kernels.

    forms: of operations, by name. functions: of PyTorch's functions, by their names there. half:
    other forms for scores rounded to half precision.
    """

    forms: Mapping[str, str]
    functions: Mapping[str, str]
    half: Mapping[str, str]


TRITON = Dialect(
    forms={
        "invert": "~{0}",
        "never": "{0} & ~{0}",
        "always": "{0} | ~{0}",
        "neg": "-{0}",
        "maximum": "tl.maximum({0}, {1})",
        "minimum": "tl.minimum({0}, {1})",
        "where": "tl.where({0}, {1}, {2})",
        "float": "({0}).to(tl.float32)",
        "long": "({0}).to(tl.int64)",
        "abs": "tl.abs({0})",
    },
    functions={
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
    },
    # For float16 and bfloat16: their own rounding of a score is at least as large as its error:
    # docs/semantics.md, "Accuracy".
    half={"tanh": "fast_tanh({0})"},
)


@final
@define(eq=False)
class Numbers:
    """The integers read by generated code at run time.

    A literal to add or to compare is read from here, so another length needs no other kernel. One
    to multiply or to divide by is part of the code: a compiler turns it into shifts. plain: True if
    they are passed as they are, and no value makes another kernel.
    """

    values: list[int] = field(factory=list)
    plain: bool = False

    def add(self, value: int) -> str:
        """Append an integer; returns the code to read it.

        Unless `plain` it is passed as 4 value + 2, neither 1 nor a multiple of 16: Triton makes
        kernels of their own for these, and in tuples can't be told not to.
        """
        self.values.append(value if self.plain else 4 * value + 2)
        text = f"numbers[{len(self.values) - 1}]"
        return text if self.plain else f"({text} >> 2)"

    def add_strides(self, strides: Sequence[int], *, kernels_apart: bool) -> tuple[str, ...]:
        """Append the strides of a tensor except strides of 1. Returns the code of each.

        kernels_apart: True if multiples of 16 have a kernel of their own, for several elements a
        load.
        """
        read = [s for s in strides if s != 1]
        if kernels_apart and all(s % SPECIAL == 0 for s in read):
            start = len(self.values)
            self.values += read
            texts = (f"numbers[{n}]" for n in range(start, len(self.values)))
            return tuple("1" if s == 1 else next(texts) for s in strides)
        return tuple("1" if s == 1 else self.add(s) for s in strides)


@final
@define(eq=False)
class Code:
    """The body of one function: its lines in order, equal lines once.

    half: True if scores are rounded to half precision. reach: the largest integer among its
    arguments. lines: the name of each expression.
    """

    numbers: Numbers
    half: bool = False
    reach: int = MOST_INT32 // 4
    dialect: Dialect = TRITON
    lines: dict[str, str] = field(factory=dict)

    def form(self, name: str) -> str:
        """How the dialect writes an operation or a function."""
        own = self.dialect
        if self.half and name in own.half:
            return own.half[name]
        return own.forms[name] if name in own.forms else own.functions[name]

    def add_line(
        self, text: str, kind: Kind, reads: Iterable[object], reach: int = MOST_INT32
    ) -> Symbol:
        """Assign an expression to a name. Returns its symbol. reads: its operands."""
        name = self.lines.setdefault(text, f"x{len(self.lines)}")
        axes = frozenset[str]().union(*[x.axes for x in reads if isinstance(x, Symbol)])
        return Symbol(self, name, kind, axes, reach)

    def argument(self, name: str, kind: Kind = "int", axes: str = "") -> Symbol:
        """A parameter of the function as a symbol; without axes its name is its axis."""
        return Symbol(self, name, kind, frozenset(axes or name), self.reach)

    def write_function(self, name: str, arguments: str, *results: object) -> str:
        """The text of a function returning symbols or numbers, with only the lines needed."""
        needed = {x.text for x in results if isinstance(x, Symbol)}
        body = ""
        for text, line in reversed(self.lines.items()):
            if line in needed:
                needed |= set(NAMES.findall(text))
                body = f"    {line} = {text}\n{body}"
        outputs = ", ".join(
            x.text if isinstance(x, Symbol) else code_literal(x)[0] for x in results
        )
        return f"def {name}({arguments}):\n{body}    return {outputs}\n"


def code_literal(value: object) -> tuple[str, Kind]:
    """A Python number as text, and its kind. Raises Untraceable for anything else."""
    if isinstance(value, bool):
        return str(value), "bool"
    if isinstance(value, int):
        return str(value), "int"
    if isinstance(value, float):
        return (repr(value) if abs(value) < float("inf") else f'float("{value}")'), "float"
    raise Untraceable(f"a symbol is combined with {value!r}, which is not a number")


class Rule(NamedTuple):
    """How an operation of a symbol, {0}, and another operand, {1}, is written.

    Without a form the dialect has it. reach: of an integer, the most it may be, or minus this, by
    default as of the symbol. kind: of the result, by default the wider of both. at_run_time: the
    operand is read from `Numbers` if it is an integer.
    """

    form: str
    reach: Callable[[Symbol, Operand], int] | None = None
    kind: Kind | None = None
    at_run_time: bool = False


def reach_sum(a: Symbol, x: Operand) -> int:
    return a.reach + limit_of(x)


def reach_more(a: Symbol, x: Operand) -> int:
    return max(a.reach, limit_of(x))


def reach_bits(a: Symbol, x: Operand) -> int:
    return 1 << reach_more(a, x).bit_length()


RULES = {
    "add": Rule("{0} + {1}", reach_sum, at_run_time=True),
    "sub": Rule("{0} - {1}", reach_sum, at_run_time=True),
    "rsub": Rule("{1} - {0}", reach_sum, at_run_time=True),
    "mul": Rule("{0} * {1}", lambda a, x: a.reach * limit_of(x)),
    "truediv": Rule("{0} / {1}", kind="float"),
    "rtruediv": Rule("{1} / {0}", kind="float"),
    "floordiv": Rule(
        "floor_div({0}, {1})",
        lambda a, x: a.reach // x + 1 if isinstance(x, int) and x > 0 else a.reach,
    ),
    "rfloordiv": Rule("floor_div({1}, {0})", lambda a, x: limit_of(x)),
    "and": Rule("{0} & {1}", reach_bits),
    "or": Rule("{0} | {1}", reach_bits),
    "xor": Rule("{0} ^ {1}", reach_bits),
    "maximum": Rule("", reach_more, at_run_time=True),
    "minimum": Rule("", reach_more, at_run_time=True),
    "lt": Rule("{0} < {1}", kind="bool", at_run_time=True),
    "le": Rule("{0} <= {1}", kind="bool", at_run_time=True),
    "gt": Rule("{0} > {1}", kind="bool", at_run_time=True),
    "ge": Rule("{0} >= {1}", kind="bool", at_run_time=True),
    "eq": Rule("{0} == {1}", kind="bool", at_run_time=True),
    "ne": Rule("{0} != {1}", kind="bool", at_run_time=True),
}
CONSTANTS = {"and": ("never", ""), "or": ("", "always"), "xor": ("", "invert")}  # False, True


@final
@frozen(eq=False, repr=False)
class Symbol(Operators):
    """A value of generated code. axes: of "b", "h", "i", "j". reach: of an integer, the most it may
    be, or minus this."""

    code: Code
    text: str
    kind: Kind
    axes: frozenset[str] = frozenset()
    reach: int = MOST_INT32
    dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """The device for tensors beside it."""
        return torch.device("cpu")

    def operand(self, x: Operand, at_run_time: bool) -> tuple[str, Kind]:
        """The text and kind of another operand. at_run_time: read an integer from `numbers`."""
        if isinstance(x, Symbol):
            return x.text, x.kind
        text, kind = code_literal(x)
        reads = at_run_time and kind == self.kind == "int" and abs(x) <= MOST_NUMBER
        return (self.code.numbers.add(x) if reads else text), kind

    def unary(self, form: str, kind: Kind | None = None) -> Symbol:
        """The value of `form` with this symbol as {0}."""
        return self.code.add_line(form.format(self.text), kind or self.kind, (self,), self.reach)

    def named(self, name: str, kind: Kind | None = None) -> Symbol:
        """The value of a form of the dialect."""
        return self.unary(self.code.form(name), kind)

    def apply(self, name: str, *operands: Operand) -> Symbol:
        """The value of an operation, by its rule. Beyond 32 bits integers are computed in 64."""
        if not operands:
            return (self if name == "invert" else self.wide()).named(name)
        (x,) = operands
        if isinstance(x, bool) and self.kind == "bool" and name in CONSTANTS:
            form = CONSTANTS[name][x]
            return self.named(form) if form else self
        if name in ("add", "sub") and isinstance(x, int) and x == 0:
            return self
        if name == "truediv" and isinstance(x, float) and x:
            return self.apply("mul", 1 / x)
        if name == "mod":
            return self.apply("sub", (self // x) * x)
        if name == "rmod":
            rest: Symbol = x - (x // self) * self
            return rest
        rule = RULES[name]
        text, other = self.operand(x, rule.at_run_time)
        kind: Kind = rule.kind or ("float" if "float" in (self.kind, other) else self.kind)
        reach, own = self.reach if rule.reach is None else rule.reach(self, x), self.text
        if kind == "int" and reach > MOST_INT32:
            wide = self.code.form("long")
            own = wide.format(own)
            text = wide.format(text) if isinstance(x, Symbol) else text
        form = rule.form or self.code.form(name)
        return self.code.add_line(form.format(own, text), kind, (self, x), reach)

    def wide(self) -> Symbol:
        """In 64 bits if 32 hold no negative of its least value."""
        return self.named("long") if self.kind == "int" and self.reach > MOST_INT32 else self

    def __pow__(self, x: Operand) -> Symbol:
        return reduce(mul, [self] * index(x))  # no others

    def truth(self) -> Symbol:
        """As a boolean: true unless it is 0."""
        return self if self.kind == "bool" else self.unary("{0} != 0", "bool")

    def logical_not(self) -> Symbol:
        """True if it is 0."""
        return self.truth().named("invert")

    def where(self, yes: Operand, no: Operand) -> Symbol:
        """`yes` if this is true, else `no`."""
        (a, kind), (b, other) = (self.operand(x, at_run_time=False) for x in (yes, no))
        wider: Kind = "float" if "float" in (kind, other) else kind
        text = self.code.form("where").format(self.text, a, b)
        symbol = self.code.add_line(text, wider, (self, yes, no))
        return evolve(symbol, reach=max(limit_of(yes), limit_of(no)))

    def among(self, values: Sequence[float]) -> Symbol:
        """values[self], for a symbol counting from 0."""
        start = self.unary(
            f"{{0}} * 0.0 + {float(values[-1])!r}" if values else "{0} * 0.0", "float"
        )
        pairs = list(enumerate(values))[:-1]
        return reduce(
            lambda rest, pair: (self == pair[0]).where(float(pair[1]), rest), pairs, start
        )

    def to(self, dtype: torch.dtype) -> Symbol:
        """As float32 for every floating dtype, as int64 for all others."""
        if dtype.is_floating_point:
            return self.named("float", "float")
        return self.named("long", "int")

    def addcmul(self, a: Operand, b: Operand, *, value: float = 1) -> Symbol:
        """self + value * a * b."""
        product = a * b
        return self.apply("sub", product) if value == -1 else self.apply("add", value * product)

    def square(self) -> Symbol:
        return self.apply("mul", self)

    def ignore_axes(self, *_: object) -> Symbol:
        """Sums over axes and new axes change nothing: the kernels sum contributions themselves."""
        return self

    sum = sum_to_size = __getitem__ = ignore_axes

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        """Methods with a final `_`, and the dialect's functions by their names in PyTorch."""
        if name in TRITON.functions:
            return lambda: self.named(name, "float")
        if name in METHODS:
            return partial(self.apply, METHODS[name])
        if name.endswith("_") and not name.startswith("_"):
            return getattr(self, name[:-1])  # type: ignore[no-any-return]  # a method
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(f"generated code has no {name}(); it has {', '.join(sorted(KNOWN))}")

    def refuse(self, *_: object, **__: object) -> Any:  # Any: it always raises
        """Raises Untraceable: a symbol has no value."""
        raise Untraceable(
            "a symbol of generated code has no value yet; use only operators and methods, "
            "no `if`, `and`, `or`, `not`, int() or functions of torch"
        )

    __bool__ = __int__ = __float__ = __index__ = __iter__ = __len__ = refuse

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, *_: object, **__: object
    ) -> Any:  # Any: it always raises
        raise Untraceable(
            f"{getattr(function, '__name__', function)} of torch was called on a symbol of "
            "generated code; use only operators and methods"
        )


METHODS = {x: x for x in ("abs", "add", "maximum", "minimum", "mul", "neg", "sub")}
METHODS |= {"div": "truediv"}  # operations by the names of tensors' methods
KNOWN = {*TRITON.functions, *METHODS, "addcmul", "logical_not", "square", "to", "where"}


def limit_of(x: Operand) -> int:
    """The most an operand may be, or minus this."""
    if isinstance(x, Symbol):
        return x.reach if x.kind == "int" else 1
    return abs(x) if isinstance(x, int) else 1


def is_zero(x: object) -> bool:
    """True for the integer 0."""
    return isinstance(x, int) and x == 0


@final
@frozen(eq=False)
class Size:
    """A tensor [B] of the size `name` of each batch entry, known to kernels."""

    code: Code
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[Operand, ...]) -> Symbol:
        """The size."""
        return self.code.argument(self.name, axes="-")


@final
@frozen(eq=False)
class Array:
    """A tensor read by generated code: the pointer data[slot].

    strides: the code of each. limits: for each axis, the condition for reading a place on it.
    """

    code: Code
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[str, ...]
    is_long: bool  # whether offsets need 64 bits
    limits: Mapping[str, str] = field(factory=lambda: LIMITS)
    reach: int = MOST_INT32  # of an element

    def __getitem__(self, index: tuple[Operand, ...]) -> Symbol:
        """The element at `index`; 0 past the last query or key."""
        offset = [f"data[{self.slot}]"]
        for stride, x in zip(self.strides, index, strict=True):
            if not is_zero(x):
                text = x.text if isinstance(x, Symbol) else code_literal(x)[0]
                wide = f"({text}).to(tl.int64)" if self.is_long and isinstance(x, Symbol) else text
                offset.append(wide if stride == "1" else f"{wide} * {stride}")
        axes = {axis for x in index if isinstance(x, Symbol) for axis in x.axes}
        inside = " & ".join(f"({limit})" for axis, limit in self.limits.items() if axis in axes)
        guard = f", mask={inside}, other=0" if inside else ""
        load = f"tl.load({' + '.join(offset)}{guard})"
        if self.dtype == torch.bool:
            return self.code.add_line(f"{load} != 0", "bool", index)
        if self.dtype.is_floating_point:
            return self.code.add_line(f"{load}.to(tl.float32)", "float", index)
        return self.code.add_line(load, "int", index, self.reach)
