"""Numbers of Gluon kernels in numpy: tensors, scalars and pointers, by Triton's rules.

Floats are rounded to their dtype after every operation, bfloat16 is float32 that has been rounded;
integer division rounds towards 0, and what a masked load leaves out is NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from triton.experimental.gluon import language as gl

DType = Any  # Triton's, which has no types
ARRAYS: dict[str, Any] = {  # by the dtype's name: comparing Triton's dtypes is slow
    "int1": np.bool_,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "fp16": np.float16,
    "bf16": np.float32,
    "fp32": np.float32,
    "fp64": np.float64,
}
RANKS = {name: rank for rank, name in enumerate(ARRAYS)}  # two operands give the higher one


def round_array(x: Any, dtype: DType) -> np.ndarray:
    """An array in the numpy dtype that stands for `dtype`, its values rounded."""
    array = np.asarray(x, ARRAYS[dtype.name])
    if dtype.name == "bf16":
        return torch.from_numpy(np.ascontiguousarray(array)).bfloat16().float().numpy()
    return array


def truncate_div(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b of integers, rounded towards 0 as in C."""
    quotient = np.abs(a) // np.abs(b)
    signed: np.ndarray = np.where((a < 0) != (b < 0), -quotient, quotient)
    return signed


def truncate_mod(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a % b as in C: it has the sign of a."""
    rest: np.ndarray = a - truncate_div(a, b) * b
    return rest


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "floordiv": truncate_div,
    "mod": truncate_mod,
    "truediv": operator.truediv,
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@frozen
class Kind:
    """The type of a value. Layouts are not emulated: the compiler checks them."""

    element_ty: DType
    shape: tuple[int, ...]
    layout: Any = None


@frozen(eq=False)
class Value:
    """A tensor or a scalar of a kernel."""

    data: np.ndarray
    dtype: DType

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.data.shape

    @property
    def type(self) -> Kind:
        """Its type."""
        return Kind(self.dtype, self.shape)

    def to(self, dtype: DType, bitcast: bool = False) -> Value:
        """In another dtype: rounded, or the same bits."""
        if bitcast:
            return Value(self.data.view(ARRAYS[dtype.name]), dtype)
        return Value(round_array(self.data, dtype), dtype)

    def reshape(self, *shape: Any) -> Value:
        """The same elements in another shape."""
        return Value(self.data.reshape(*shape), self.dtype)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Value:
        return Value(round_array(-self.data, self.dtype), self.dtype)

    def __invert__(self) -> Value:
        return Value(~self.data, self.dtype)


def result_dtype(a: Any, b: Any) -> DType:
    """The dtype of two operands together; Python's numbers take the other's where they can."""
    if isinstance(a, Value) and isinstance(b, Value):
        if a.dtype is b.dtype:
            return a.dtype
        if {a.dtype.name, b.dtype.name} == {"fp16", "bf16"}:
            return gl.float32
        return max(a.dtype, b.dtype, key=lambda dtype: RANKS[dtype.name])
    own, number = (a, b) if isinstance(a, Value) else (b, a)
    dtype = own.dtype if isinstance(own, Value) else default_dtype(own)
    if isinstance(number, float) and "fp" not in dtype.name and dtype.name != "bf16":
        return gl.float32
    return gl.int32 if dtype.name == "int1" and type(number) is int else dtype


def default_dtype(x: Any) -> DType:
    """What a Python number is as a tensor."""
    if isinstance(x, bool):
        return gl.int1
    if isinstance(x, int):
        return gl.int32 if abs(x) < 2**31 else gl.int64
    return gl.float32


def value(x: Any, dtype: DType = None) -> Value:
    """A number as a value; values stay as they are."""
    if isinstance(x, Value):
        return x
    kind = dtype or default_dtype(x)
    return Value(round_array(x, kind), kind)


def combine(f: Callable[[Any, Any], Any], a: Any, b: Any, dtype: DType = None) -> Value:
    """f of two operands in their common dtype, the result in `dtype` or in the same."""
    common = result_dtype(a, b)
    if f is operator.truediv and not common.is_floating():
        common = gl.float32
    arrays = (round_array(x.data if isinstance(x, Value) else x, common) for x in (a, b))
    return Value(round_array(f(*arrays), dtype or common), dtype or common)


def give_operators() -> None:
    """Python's operators for Value, both ways round."""

    def both(name: str, f: Callable[[Any, Any], Any]) -> None:
        setattr(Value, f"__{name}__", lambda a, b: forward(f, a, b))
        setattr(Value, f"__r{name}__", lambda a, b: combine(f, b, a))

    def forward(f: Callable[[Any, Any], Any], a: Value, b: Any) -> Any:
        return NotImplemented if isinstance(b, Pointer) else combine(f, a, b)

    def compare(name: str) -> None:
        f = getattr(operator, name)
        setattr(Value, f"__{name}__", lambda a, b: combine(f, a, b, gl.int1))

    for name, f in ARITHMETIC.items():
        both(name, f)
    for name in COMPARISONS:
        compare(name)


@define(eq=False)
class Memory:
    """A tensor in global memory, all its elements in one row.

    writes: how often each element was stored.
    """

    name: str
    data: np.ndarray
    dtype: DType
    writes: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.writes = np.zeros(self.data.shape, dtype=np.int64)


class OutOfBounds(AssertionError):
    """A load or a store beyond its tensor."""


@frozen(eq=False)
class Pointer:
    """Pointers into one tensor: its elements at `offsets`."""

    memory: Memory
    offsets: np.ndarray

    @property
    def dtype(self) -> DType:
        """The type of a pointer."""
        return gl.pointer_type(self.memory.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of a tensor of pointers."""
        return self.offsets.shape

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + value(steps).data.astype(np.int64))

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[index])

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Which elements are meant, and where they lie, 0 for the others. Raises OutOfBounds."""
        allowed = value(True if mask is None else mask).data
        shape = np.broadcast_shapes(allowed.shape, self.offsets.shape)
        allowed, at = np.broadcast_to(allowed, shape), np.broadcast_to(self.offsets, shape)
        outside = allowed & ((at < 0) | (at >= self.memory.data.size))
        if outside.any():
            raise OutOfBounds(
                f"{self.memory.name}: element {at[outside][0]} of {self.memory.data.size}"
            )
        return allowed, np.where(allowed, at, 0)


def pointer(memory: Memory) -> Pointer:
    """A pointer to the first element."""
    return Pointer(memory, np.zeros((), dtype=np.int64))


def load(at: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Value:
    """What lies there; `other` where the mask is false, and garbage where there is none."""
    allowed, places = at.places(mask)
    dtype = at.memory.dtype
    garbage = np.nan if dtype.is_floating() else np.iinfo(ARRAYS[dtype.name]).max
    rest = round_array(garbage if other is None else value(other).data, dtype)
    if not at.memory.data.size:
        return Value(np.broadcast_to(rest, allowed.shape), dtype)
    return Value(np.where(allowed, at.memory.data[places], rest), dtype)


def store(at: Pointer, x: Any, mask: Any = None, **hints: Any) -> None:
    """Write x there, rounded to the memory's dtype."""
    allowed, places = at.places(mask)
    data = np.broadcast_to(round_array(value(x).data, at.memory.dtype), allowed.shape)
    at.memory.data[places[allowed]] = data[allowed]
    np.add.at(at.memory.writes, places[allowed], 1)


def elementwise(f: Callable[[Any], Any]) -> Callable[..., Value]:
    """A function of each element, in its dtype."""

    def apply(x: Any, **hints: Any) -> Value:
        x = value(x)
        return Value(round_array(f(x.data), x.dtype), x.dtype)

    return apply


def folding(f: Any) -> Callable[..., Value]:
    """A reduction along one axis, or along all, by a function of numpy's."""

    def apply(x: Value, axis: int | None = None, keep_dims: bool = False, **hints: Any) -> Value:
        data = f.reduce(x.data, axis=axis, keepdims=keep_dims)
        return Value(round_array(data, x.dtype), x.dtype)

    return apply


def reduce(x: Value, axis: int, combiner: Callable[[Value, Value], Value]) -> Value:
    """A reduction along one axis by a function of the kernel's."""
    rows = [Value(row, x.dtype) for row in np.moveaxis(x.data, axis, 0)]
    total = rows[0]
    for row in rows[1:]:
        total = combiner(total, row)
    return total


def where(condition: Any, a: Any, b: Any) -> Value:
    """a where the condition is true, else b."""
    dtype, keep = result_dtype(a, b), value(condition).data
    a, b = (round_array(x.data if isinstance(x, Value) else x, dtype) for x in (a, b))
    return Value(np.where(keep, a, b), dtype)


def full(shape: Sequence[Any], x: Any, dtype: DType, layout: Any = None) -> Value:
    """One number everywhere."""
    return Value(np.full([int(n) for n in shape], round_array(value(x).data, dtype)), dtype)


def arange(start: Any, stop: Any, layout: Any = None) -> Value:
    """int32 numbers from start to stop - 1."""
    return Value(np.arange(int(start), int(stop), dtype=np.int32), gl.int32)


def values_in_range(*bounds: Any) -> Iterator[Value]:
    """What a loop over `range` counts in a kernel: int32 scalars."""
    for i in range(*map(operator.index, bounds)):
        yield value(i)


def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up."""
    return (a + b - 1) // b


def cast(x: Any, dtype: DType, bitcast: bool = False) -> Value:
    """x in another dtype."""
    return value(x).to(dtype, bitcast)


def join(a: Value, b: Value) -> Value:
    """Two tensors along a new last axis."""
    return Value(np.stack(np.broadcast_arrays(a.data, b.data), -1), a.dtype)


def permute(x: Value, order: Sequence[int]) -> Value:
    """Axes in another order."""
    return Value(x.data.transpose(order), x.dtype)


def same(x: Any, *layout: Any, **hints: Any) -> Any:
    """x: what layouts and hints to the compiler make of it."""
    return x


def check(condition: Any, *message: Any) -> None:
    """Raise AssertionError unless the condition is true."""
    assert condition, message


ASSEMBLY: dict[str, Callable[[Any], Any]] = {
    "mov.b32": np.array,
    "tanh.approx.f32": np.tanh,
    "ex2.approx": np.exp2,
    "rcp.approx": np.reciprocal,
}


def assembly(asm: str, constraints: str, args: Sequence[Any], *rest: Any, **named: Any) -> Value:
    """One instruction of PTX's, by its name."""
    f = next(f for name, f in ASSEMBLY.items() if name in asm)
    return elementwise(f)(args[0])


give_operators()

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "where": where,
    "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "zeros_like": lambda x: full(x.shape, 0, x.dtype),
    "arange": arange,
    "cdiv": cdiv,
    "cast": cast,
    "join": join,
    "permute": permute,
    "reshape": lambda x, *shape, **hints: x.reshape(*shape),
    "expand_dims": lambda x, axis: Value(np.expand_dims(x.data, axis), x.dtype),
    "maximum": lambda a, b, **hints: combine(np.fmax, a, b),
    "minimum": lambda a, b, **hints: combine(np.fmin, a, b),
    "fma": lambda a, b, c: a * b + c,
    "max": folding(np.fmax),
    "min": folding(np.fmin),
    "sum": folding(np.add),
    "reduce": reduce,
    "exp": elementwise(np.exp),
    "exp2": elementwise(np.exp2),
    "log": elementwise(np.log),
    "log2": elementwise(np.log2),
    "sqrt": elementwise(np.sqrt),
    "rsqrt": elementwise(lambda x: 1 / np.sqrt(x)),
    "sin": elementwise(np.sin),
    "cos": elementwise(np.cos),
    "abs": elementwise(np.abs),
    "sigmoid": elementwise(lambda x: 1 / (1 + np.exp(-x))),
    "inline_asm_elementwise": assembly,
    "convert_layout": same,
    "set_auto_layout": same,
    "multiple_of": same,
    "max_contiguous": same,
    "max_constancy": same,
    "to_tensor": value,
    "constexpr": same,
    "assume": check,
    "static_assert": check,
    "static_range": lambda *bounds: range(*map(operator.index, bounds)),
    "range": lambda *bounds, **hints: values_in_range(*bounds),
}
