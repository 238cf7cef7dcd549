"""TensorSpec: the shape, dtype and strides of a tensor that need not exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from math import prod
from numbers import Real
from typing import Any, Never, TypeGuard, final

import torch
from attrs import field, frozen
from torch.autograd import forward_ad
from torch.masked import MaskedTensor

from attn_graph.errors import ArgumentError, GraphError, binds, show
from attn_graph.spec.dims import Dim, Sizes, bind, dims_in, is_flag, to_index

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "bool": torch.bool,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "u8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CASTS = {  # the methods of tensors
    torch.bool: "bool",
    torch.int32: "int",
    torch.int64: "long",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
INF = float("inf")
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)  # of keys and values, with scales
IN_PAIRS = torch.uint8  # of keys and values alone: two integers of 4 bits a byte
LAYOUTS = tuple("".join(letters) for letters in permutations("bhsd"))
MOST_INT32, MOST_INT64 = 2**31 - 1, 2**63 - 1  # the latter of sizes and strides: PyTorch's most


def to_integer(value: object) -> int | None:
    """A whole number (2.0 too) as an int; a Dim unchanged; None for others."""
    if isinstance(value, Dim):
        return value  # it stands for an integer
    number = to_index(value)
    if number is None and is_real(value) and float(value).is_integer():
        return int(value)  # type: ignore[call-overload, no-any-return]  # a number
    return number


def is_real(value: object) -> TypeGuard[Real]:
    """True for a real number: not for a boolean."""
    return isinstance(value, Real) and not is_flag(value)


def as_integer(value: object) -> int:
    """A converter: a whole number as an int. Raises GraphError for anything else."""
    number = to_integer(value)
    if number is None:
        raise GraphError(f"{show(value)} is not a whole number")
    return number


def maybe_whole(value: object) -> int | None:
    """A converter: as `as_integer`; None stays."""
    return None if value is None else as_integer(value)


def maybe_real(value: object) -> float | None:
    """A converter: a number as a float; None stays. Raises GraphError for anything else."""
    number = to_number(value)
    if not (number is None or isinstance(number, float)):
        raise GraphError(f"{show(value)} is not a number")
    return number


def require_size(who: str, value: object, least: int = 0) -> int:
    """`value` as an int. Raises GraphError, naming `who`, unless it is at least `least`."""
    number = to_index(value)
    if number is None or not least <= number <= MOST_INT64:
        raise GraphError(f"{who} {show(value)} is not a whole number of at least {least}")
    return number


def to_number(value: Any) -> Any:  # Any: a float, unless the value is not a number
    """A number as a float; anything else unchanged, booleans too, for a validator to name.

    A tensor under differentiation stays a tensor: as a float it would lose its gradient.
    """
    if type(value) is float:  # as nearly all are
        return value
    if isinstance(value, str) or is_flag(value) or is_differentiated(value):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: of several elements
        return value


def is_differentiated(value: object) -> bool:
    """True for a tensor that requires grad or has a tangent in forward mode."""
    if not isinstance(value, torch.Tensor):
        return False
    pushes = forward_ad._current_level >= 0
    return value.requires_grad or (pushes and forward_ad.unpack_dual(value).tangent is not None)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
@frozen
class ValueType:
    """Shape and dtype of a value inside a graph. A lowering chooses its strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of a dense tensor of this type."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{NAMES[self.dtype]}[{', '.join(map(str, self.shape)) or '()'}]"


@final
@frozen(init=False, repr=False)
class TensorSpec:
    """The type of an input: logical shape, dtype and strides in elements.

    `layout` spells the memory order of a tensor with the logical axes [B,H,S,D]: "bhsd" (the
    default), "bshd", "sbhd" or any other order of the four letters. Strides have no meaning for
    axes of size 1 and for empty tensors; they are stored as 0.

    A size may be a `Dim`; strides are then multiples of it, by default without gaps.

        >>> TensorSpec((2, 8, 512, 64), torch.bfloat16, layout="bshd").strides
        (262144, 64, 512, 1)

    Raises GraphError for a negative size or stride, an unknown dtype or layout, or a wrong number
    of strides.
    """

    shape: tuple[int, ...] = field()
    dtype: torch.dtype = field()
    strides: tuple[int, ...] = field()

    @binds(lambda _, *given, **named: spec_code(given, named))
    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        *more: Never,
        layout: str | None = None,
    ) -> None:
        if more:
            raise ArgumentError(
                f"spec: {3 + len(more)} arguments in a row; write the sizes in brackets and then "
                "the dtype, TensorSpec((2, 8, 512, 64), torch.float16)"
            )
        sizes = as_integers("shape", shape)
        given = None if strides is None else as_integers("strides", strides)
        problems = spec_problems(sizes, dtype, given, layout)
        if problems:
            raise GraphError(*problems)
        if given is None:
            given = dense_strides(sizes, order_letters(layout) if layout else None)
        self.__attrs_init__(sizes, dtype, normalise_strides(sizes, given))  # pyright: ignore[reportAttributeAccessIssue]  # attrs makes it

    @classmethod
    def like(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a tensor. Raises GraphError for anything else."""
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(
                f"spec: {show(tensor)} is not a tensor; write TensorSpec((2, 8, 512, 64), "
                "torch.float16) without one"
            )
        if problem := layout_problem(tensor):
            raise GraphError(f"spec: the tensor {problem}")
        return cls(tensor.shape, tensor.dtype, tensor.stride())

    @cached_property
    def type(self) -> ValueType:
        """Shape and dtype, without strides."""
        return ValueType(self.shape, self.dtype)

    @property
    def bytes(self) -> int:
        """Memory from the first element to the end of the last, gaps included."""
        pairs = zip(self.shape, self.strides, strict=True)
        count = 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in pairs)
        return count * self.dtype.itemsize

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """The Dims in its shape and strides."""
        return tuple(dims_in((self.shape, self.strides)))

    def bind(self, sizes: Sizes) -> TensorSpec:
        """This spec with numbers in place of its Dims."""
        if not self.dims:
            return self
        return TensorSpec(bind(self.shape, sizes), self.dtype, bind(self.strides, sizes))

    @cached_property
    def is_dense(self) -> bool:
        """True if the strides are those of C order without gaps."""
        return self.strides == normalise_strides(self.shape, dense_strides(self.shape))

    @cached_property
    def unit_last(self) -> bool:
        """True if the last axis is contiguous in memory."""
        return not self.shape or self.shape[-1] <= 1 or self.strides[-1] == 1 or 0 in self.shape

    def __str__(self) -> str:
        if self.is_dense:
            return str(self.type)
        return f"{self.type}(strides={self.strides})"

    def __repr__(self) -> str:
        tail = "" if self.is_dense else f", strides={self.strides}"
        return f"TensorSpec({self.shape}, {self.dtype}{tail})"


def spec_code(given: Sequence[object], named: Mapping[str, object]) -> str:
    """What to write in place of a call of TensorSpec with other arguments."""
    if given and isinstance(given[0], torch.Tensor):
        return "write TensorSpec.like(tensor)"
    if "device" in named:
        return 'a spec has no device: write compile(graph, target="h200")'
    if "stride" in named:
        return "write strides="
    shape = tuple(given[0]) if given and isinstance(given[0], Sequence) else (2, 8, 512, 64)
    return f"write TensorSpec({show(shape)}, torch.float16)"


def layout_problem(tensor: torch.Tensor) -> str:
    """Why a tensor has no strides and how to convert it; "" if it has strides."""
    if isinstance(tensor, MaskedTensor):
        return "is a masked tensor; pass x.get_data(), and the pairs that may attend as keep="
    if tensor.is_nested:
        return (
            "is nested; pass x.values() [T,H,D] of a jagged one, and x.offsets() as q_starts and "
            "kv_starts, or a padded tensor and lengths"
        )
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; pass x.to_dense()"
    return ""


def as_integers(name: str, values: object) -> tuple[int, ...]:
    """Sizes or strides as ints. Raises GraphError unless they are whole numbers."""
    if isinstance(values, str) or not isinstance(values, tuple | Iterable):
        raise GraphError(
            f"spec: {name} {show(values)} is not a sequence of sizes such as (2, 8, 512, 64)"
        )
    given = tuple(values)
    if {*map(type, given)} == {int}:  # as of tensors
        return given
    sizes = tuple([n for n in map(to_integer, given) if n is not None])
    if len(sizes) < len(given):
        raise GraphError(f"spec: {name} must be whole numbers, got {show(given)}")
    return sizes


def spec_problems(
    shape: tuple[int, ...], dtype: object, strides: tuple[int, ...] | None, layout: str | None
) -> list[str]:
    """Why these arguments describe no tensor. Formulas are not checked."""
    problems = []
    sizes, steps = ([n for n in x if isinstance(n, int)] for x in (shape, strides or ()))
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        problems.append(f"spec: dtype {show(dtype)} {dtype_problem(dtype)}")
    if min(sizes, default=0) < 0:
        problems.append(f"spec: shape {shape} has a negative size; sizes are at least 0")
    if max((*sizes, *steps, prod(sizes)), default=0) > MOST_INT64:
        problems.append(
            f"spec: shape {shape}, strides {strides}: no tensor goes beyond {MOST_INT64}"
        )
    if strides is not None and len(strides) != len(shape):
        problems.append(f"spec: {len(strides)} strides {strides} for {len(shape)} axes {shape}")
    if min(steps, default=0) < 0:
        problems.append(f"spec: strides {strides} have a negative value; strides are at least 0")
    if strides is not None and layout is not None:
        problems.append(f"spec: strides {strides} and layout {show(layout)} both given; give one")
    if layout is not None and (layout not in LAYOUTS or len(shape) != 4):
        problems.append(
            f"spec: layout {show(layout)} for {len(shape)} axes {shape}; "
            "a layout is an order of the letters of 'bhsd', for four axes"
        )
    return problems


def dtype_problem(dtype: object) -> str:
    """Why a spec has no such dtype: a text, another library's dtype, or one without a use."""
    own = getattr(dtype, "name", getattr(dtype, "__name__", ""))  # numpy's: of a dtype, of a class
    name = str(dtype if isinstance(dtype, str) else own).removeprefix("torch.")
    meant = DTYPES.get(name, getattr(torch, name, None))
    if isinstance(dtype, torch.dtype) or meant not in NAMES:
        edit = "; write tensor.bool() for a mask, tensor.int() for lengths, tables and segments"
        real = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
        known = f"is not one of {', '.join(map(str, NAMES))}"
        return known if real or not isinstance(dtype, torch.dtype) else known + edit
    return f"is {'a text' if isinstance(dtype, str) else 'not of PyTorch'}; write {meant}"


def cast_code(name: str, dtype: torch.dtype) -> str:
    """The code of a tensor by this name in another dtype."""
    short = CASTS.get(dtype)
    return f"{name}.{short}()" if short else f"{name}.to({dtype})"


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps; `order` lists the axes from the outermost in memory."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order if order is not None else range(len(shape))):
        strides[axis] = step
        step *= shape[axis] or 1
    return tuple(strides)


def order_letters(layout: str) -> list[int]:
    """The axes of an order such as "bshd", from the outermost in memory."""
    return [*map("bhsd".index, layout)]


def normalise_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides, with 0 for axes of size 1 and for empty tensors."""
    empty = 0 in shape
    pairs = zip(shape, strides, strict=True)
    return tuple([0 if empty or n == 1 else s for n, s in pairs])


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """Axes from the outermost in memory to the innermost."""
    return order_axes(spec.shape, spec.strides)


def dense_like(spec: TensorSpec) -> TensorSpec:
    """A spec without gaps in the same memory order; in C order for one that broadcasts."""
    strides = dense_strides(spec.shape, memory_order(spec))
    if normalise_strides(spec.shape, strides) == spec.strides:
        return spec
    return TensorSpec(spec.shape, spec.dtype, strides)


def new_strides(spec: TensorSpec) -> tuple[int, ...]:
    """Strides for a new tensor: without gaps if the spec has none, along axes of size 1 too."""
    if 0 not in spec.shape and 1 not in spec.shape:
        return spec.strides
    dense = dense_strides(spec.shape, memory_order(spec))
    return dense if normalise_strides(spec.shape, dense) == spec.strides else spec.strides


def order_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Axes from the outermost in memory to the innermost; sizes may be symbolic.

    Axes of size 1 stay in place. A tensor that broadcasts or is empty is in logical order.
    """
    axes, inward = range(len(shape)), [-s for s in strides]
    long = axes if 1 not in shape else [a for a in axes if shape[a] != 1]
    if 0 in shape or (0 in strides and 0 in [strides[a] for a in long]):
        return tuple(axes)
    ranked = sorted(long, key=inward.__getitem__)
    places = iter(ranked)
    return tuple(ranked if long is axes else [next(places) if a in long else a for a in axes])
