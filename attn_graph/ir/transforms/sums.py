"""Sums of derivatives: two ops, and None for zero."""

from __future__ import annotations

from typing import Any, final

import torch
from attrs import frozen

from attn_graph.ir.graph import Alike, Emit, Gradients, Op, Values, gives, takes
from attn_graph.spec import DTYPES, NAMES, ValueType


@final
@takes(a=None, b=None)
@frozen
class Add(Alike):
    """a + b."""

    is_gradient = True

    def run(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (a + b,)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return grads[0], grads[0]

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (add_up(emit, *tangents),)


@final
@takes()
@gives("zeros")
@frozen
class Zeros(Op):
    """Zeros of a shape: the gradient of an unused value."""

    shape: tuple[int, ...]
    dtype: str
    is_gradient = True

    @classmethod
    def like(cls, type_: ValueType) -> Zeros:
        return cls(type_.shape, NAMES[type_.dtype])

    def infer(self) -> tuple[ValueType]:
        return (ValueType(self.shape, DTYPES[self.dtype]),)

    def run(self) -> tuple[torch.Tensor]:
        return (torch.zeros(self.shape, dtype=DTYPES[self.dtype]),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return ()

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None,)


@frozen(init=False)
class Linear(Op):
    """An op linear in its first operand; the others have no derivative."""

    def transposed(self, x: ValueType, /) -> Op:
        """The op of the gradient, for a first operand x: on that of the result, and the others."""
        raise NotImplementedError

    @property
    def moved(self) -> Op:
        """The op of the tangent: on that of the first operand, and the others."""
        return self

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        x, *others = operands
        back = self.transposed(x.type)
        return apply(emit, back, grads[0], *others), *(None for _ in others)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (apply(emit, self.moved, tangents[0], *operands[1:]),)


def fill_zeros(emit: Emit, values: Values, tangents: Values) -> list[Any]:  # Any: values
    """The tangents of values, with zeros for None."""
    pairs = zip(values, tangents, strict=True)
    return [emit(Zeros.like(x.type))[0] if t is None else t for x, t in pairs]


def apply(emit: Emit, op: Op, *operands: Any) -> Any | None:  # Any: values
    """The one result of an op linear in each operand; None, for 0, if an operand is None."""
    return None if any(x is None for x in operands) else emit(op, *operands)[0]


def add_up(emit: Emit, *terms: Any) -> Any | None:  # Any: values
    """The sum of terms, None counting as 0; None if all are."""
    total, *more = [x for x in terms if x is not None] or [None]
    for x in more:
        (total,) = emit(Add(), total, x)
    return total
