"""Views of tensors: one axis folded into another, for mapped graphs, and values within keys.

`Fold` and `Repeat` make a mapped axis a part of the batch or of the heads; `Unfold` and
`SumRepeats` take it out again. `Leading` has the first elements of each row, `Widen` adds zeros
behind them. Each is linear, and the derivative of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.graph import Eqn, Graph, Op, gives, takes
from attn_graph.ir.transforms.sums import Linear
from attn_graph.spec import TensorSpec, ValueType, as_integer

T = TypeVar("T")


@takes(x=None)
@frozen(init=False)
class View(Linear):
    """A linear op of one operand."""


@final
@frozen
class Fold(View):
    """x -> x without `axis`, of `size` S, which becomes a part of axis `into` of the others.

    If that axis has n places, entry s of place i is at s * n + i if `before`, else at i * S + s.
    """

    axis: int = field(converter=as_integer)
    into: int = field(converter=as_integer)
    size: int = field(converter=as_integer)
    before: bool = field(converter=bool)
    is_view = True

    def infer(self, x: ValueType) -> tuple[ValueType]:
        check_axes("fold", x, self.axis, self.into + 1)
        if x.shape[self.axis] != self.size:
            raise GraphError(f"fold: axis {self.axis} of {x} is not of size {self.size}")
        rest = remove_at(x.shape, self.axis)
        return (ValueType(replace_at(rest, self.into, self.size * rest[self.into]), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        place = self.into if self.before else self.into + 1
        return (x.movedim(self.axis, place).flatten(self.into, self.into + 1),)

    def transposed(self, x: ValueType) -> Op:
        return Unfold(self.axis, self.into, self.size, self.before)

    def view(self, x: TensorSpec) -> TensorSpec | None:
        """The spec of the result; None if it is a copy."""
        shape, strides = remove_at(x.shape, self.axis), remove_at(x.strides, self.axis)
        n, own = shape[self.into], strides[self.into]
        pair = (self.size, x.strides[self.axis]), (n, own)
        outer, inner = pair if self.before else pair[::-1]
        if 1 not in (outer[0], inner[0]) and outer[1] != inner[0] * inner[1]:
            return None
        stride = outer[1] if inner[0] == 1 else inner[1]
        shape = replace_at(shape, self.into, self.size * n)
        return TensorSpec(shape, x.dtype, replace_at(strides, self.into, stride))


@final
@frozen
class Unfold(View):
    """x -> x with `axis` taken out of axis `into`: the inverse of `Fold` with equal fields.

    name: of the result, in text and in backward graphs.
    """

    axis: int = field(converter=as_integer)
    into: int = field(converter=as_integer)
    size: int = field(converter=as_integer)
    before: bool = field(converter=bool)
    name: str = "x"
    is_view = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def moved(self) -> Op:
        return evolve(self, name=f"t{self.name}")

    def infer(self, x: ValueType) -> tuple[ValueType]:
        check_axes("unfold", x, max(0, self.axis - 1), self.into)
        if self.size < 1 or x.shape[self.into] % self.size:
            raise GraphError(f"unfold: axis {self.into} of {x} is not a multiple of {self.size}")
        rest = replace_at(x.shape, self.into, x.shape[self.into] // self.size)
        return (ValueType(insert_at(rest, self.axis, self.size), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        n = x.shape[self.into] // self.size
        parts, place = ((self.size, n), 0) if self.before else ((n, self.size), 1)
        return (x.unflatten(self.into, parts).movedim(self.into + place, self.axis),)

    def transposed(self, x: ValueType) -> Op:
        return Fold(self.axis, self.into, self.size, self.before)

    def view(self, x: TensorSpec) -> TensorSpec:
        n, stride = x.shape[self.into] // self.size, x.strides[self.into]
        each, own = (n * stride, stride) if self.before else (stride, self.size * stride)
        shape = insert_at(replace_at(x.shape, self.into, n), self.axis, self.size)
        return TensorSpec(
            shape, x.dtype, insert_at(replace_at(x.strides, self.into, own), self.axis, each)
        )


@final
@frozen
class Repeat(View):
    """x -> x with axis `into`, of one place, seen `size` times, shared by all entries."""

    into: int = field(converter=as_integer)
    size: int = field(converter=as_integer)

    def infer(self, x: ValueType) -> tuple[ValueType]:
        check_axes("repeat", x, 0, self.into)
        if x.shape[self.into] != 1:
            raise GraphError(f"repeat: axis {self.into} of {x} has more than one place")
        return (ValueType(replace_at(x.shape, self.into, self.size), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.expand(replace_at(x.shape, self.into, self.size)),)

    def transposed(self, x: ValueType) -> Op:
        return SumRepeats(self.into, self.size)

    def view(self, x: TensorSpec) -> TensorSpec:
        shape = replace_at(x.shape, self.into, self.size)
        return TensorSpec(shape, x.dtype, replace_at(x.strides, self.into, 0))


@final
@frozen
class SumRepeats(View):
    """x -> the sum along axis `into`, of `size`; the axis stays with one place."""

    into: int = field(converter=as_integer)
    size: int = field(converter=as_integer)
    is_gradient = True

    def infer(self, x: ValueType) -> tuple[ValueType]:
        check_axes("sum_repeats", x, 0, self.into)
        return (ValueType(replace_at(x.shape, self.into, 1), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sum(self.into, keepdim=True),)

    def transposed(self, x: ValueType) -> Op:
        return Repeat(self.into, self.size)


@final
@gives("v")
@frozen
class Leading(View):
    """x -> the first `size` elements along the last axis: v of keys that begin with their values.

    So lie the keys of absorbed latent attention (MLA): v = k[..., :512].
    """

    size: int = field(converter=as_integer)
    is_view = True

    def problems(self, x: ValueType) -> Iterator[str]:
        if not x.shape or not 1 <= self.size <= x.shape[-1]:
            yield (
                f"attention: v is {self.size}, the first elements of each key, and keys have "
                f"{x.shape[-1] if x.shape else 0}; pass 1 to that many, or a tensor for v"
            )

    def infer(self, x: ValueType) -> tuple[ValueType]:
        return (ValueType((*x.shape[:-1], self.size), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x[..., : self.size],)

    def transposed(self, x: ValueType) -> Op:
        return Widen(x.shape[-1])

    def view(self, x: TensorSpec) -> TensorSpec:
        """The spec of the result."""
        return TensorSpec((*x.shape[:-1], self.size), x.dtype, x.strides)


@final
@frozen
class Widen(View):
    """x -> x with zeros behind it along the last axis, `size` elements in all."""

    size: int = field(converter=as_integer)
    is_gradient = True

    def infer(self, x: ValueType) -> tuple[ValueType]:
        return (ValueType((*x.shape[:-1], self.size), x.dtype),)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.pad(x, (0, self.size - x.shape[-1])),)

    def transposed(self, x: ValueType) -> Op:
        return Leading(x.shape[-1])


VIEWS = (Fold, Unfold, Repeat, Leading)
VIEW_OPS: tuple[type[Op], ...] = (*VIEWS, SumRepeats, Widen)


def check_axes(who: str, x: ValueType, *axes: int) -> None:
    if not all(0 <= axis < max(1, len(x.shape)) for axis in axes) or not x.shape:
        raise GraphError(f"{who}: {x} has no axes {', '.join(map(str, axes))}")


def remove_at(values: Sequence[T], place: int) -> tuple[T, ...]:
    return (*values[:place], *values[place + 1 :])


def replace_at(values: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def insert_at(values: Sequence[T], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place:])


def equation_of(graph: Graph, i: int) -> Eqn | None:
    return next((eqn for eqn, outs in graph.numbered if i in outs), None)
