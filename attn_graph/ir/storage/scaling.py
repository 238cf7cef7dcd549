"""Quantised queries, keys and values: numbers of eight bits, and scales in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.graph import Emit, Gradients, Graph, Op, Values, gives, takes, with_values
from attn_graph.machine.tensors import lay_in_order
from attn_graph.spec import (
    FLOATS,
    IN_PAIRS,
    QUANTISED,
    TensorSpec,
    ValueType,
    accumulator,
    order_axes,
)

SCALES = ("q_scale", "k_scale", "v_scale")
KEY_SCALES = SCALES[1:]
O_SCALE = "o_scale"
PAIRS = tuple(zip("qkv", SCALES, strict=True))
FLOATS_OF_8 = QUANTISED[:2]
NARROW = (*QUANTISED, IN_PAIRS)  # of k and v
CONVERTED = FLOATS[:3]  # of k and v beside a q in another one
# Of weights before they are rounded to 8 bits. Kernels may hold weights up to 2^4 times the largest
# so far (RESCALE_THRESHOLD of NVIDIA's for sm_100), and 2^4 * 2^4 is below 448, the end of e4m3.
WEIGHT_SCALE = 16.0


@final
@takes(x=None, scale=None, like=None)
@with_values(constants=(0, 1))
@frozen
class Dequantise(Op):
    """x, scale, like -> x * scale, in the dtype of `like`, or in bfloat16 if that has 8 bits too.

    x is in 8 bits, in pairs of 4 a byte, or in another float, of 32 bits or fewer; scale has its
    axes, each a divisor of it: a number is for a block of neighbours. The result is dense, in the
    memory order of x. It has no derivative by either.
    """

    def problems(self, x: ValueType, scale: ValueType, like: ValueType) -> Iterator[str]:
        main = stands_in(like.dtype)
        if not takes_scale(x.dtype, main) or main not in FLOATS:
            kinds = ", ".join(map(str, (*NARROW, *CONVERTED)))
            yield (
                f"dequantise: {x} is in {x.dtype}, and scales are for tensors in {kinds}, other "
                f"than {main} of q; multiply it by the scale, or leave scales out"
            )
        if scale.dtype != torch.float32:
            yield f"dequantise: scale {scale} must be of torch.float32"
        if not scales_fit(scale.shape, whole_shape(x)):
            due = (*x.shape[:-1], 1)
            yield (
                f"dequantise: scale {scale} must have the axes of {x}, each a divisor of its own: "
                f"{list(due)} for rows, {[1] * len(due)} for the tensor, others for blocks"
            )

    def infer(self, x: ValueType, scale: ValueType, like: ValueType) -> tuple[ValueType]:
        return (ValueType(whole_shape(x), stands_in(like.dtype)),)

    def run(self, x: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor]:
        dtype = stands_in(like.dtype)
        wide = accumulator(dtype)
        numbers = unpair(x) if x.dtype == IN_PAIRS else x
        whole = (numbers.to(wide) * spread(scale.to(wide), numbers.shape)).to(dtype)
        return (lay_in_order(whole, order_axes(x.shape, x.stride())),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return None, None, None

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None,)


@final
@takes(o=None, scale=None, like=None)
@gives("o", "amax")
@frozen
class Quantise(Op):
    """o, scale, like -> o / scale in the dtype of `like`, of 8 bits, and amax [] = max |o|.

    Rounded to the nearest, and no larger than the dtype's largest; of o in float64, as the
    reference has it, neither. scale has the axes of o, each a divisor of it. It has no derivative.
    """

    def problems(self, o: ValueType, scale: ValueType, like: ValueType) -> Iterator[str]:
        if like.dtype not in QUANTISED:
            kinds = ", ".join(map(str, QUANTISED))
            yield f"quantise: o is given in the dtype of q, {like.dtype}, which is none of {kinds}"
        if scale.dtype != torch.float32 or not scales_fit(scale.shape, o.shape):
            due = [1] * len(o.shape)
            yield (
                f"quantise: scale {scale} must be of torch.float32, with the axes of {o}, each a "
                f"divisor of its own: {due} for the tensor"
            )

    def infer(self, o: ValueType, scale: ValueType, like: ValueType) -> tuple[ValueType, ValueType]:
        return ValueType(o.shape, like.dtype), ValueType((), torch.float32)

    def run(
        self, o: torch.Tensor, scale: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = o.to(accumulator(o.dtype))
        amax = wide.abs().amax() if o.numel() else wide.new_zeros(())
        narrow = wide / spread(scale, o.shape)
        return narrow if o.dtype == torch.float64 else to_eight(narrow, like.dtype), amax

    def gradient_problems(self) -> Iterator[str]:
        yield "o in 8 bits has no gradient; leave o_scale out"

    def push_problems(self) -> Iterator[str]:
        yield "o in 8 bits has no tangent; leave o_scale out"


def takes_scale(dtype: torch.dtype, like: torch.dtype) -> bool:
    """True for keys and values in 8 or 4 bits, or in another float than q: kernels convert them."""
    return dtype in NARROW or (dtype in CONVERTED and dtype != like)


def whole_shape(x: ValueType | TensorSpec) -> tuple[int, ...]:
    """The shape of the numbers in a tensor: twice as many as bytes if they lie in pairs."""
    return (*x.shape[:-1], 2 * x.shape[-1]) if x.dtype == IN_PAIRS else x.shape


def unpair(x: torch.Tensor) -> torch.Tensor:
    """The integers of 4 bits in bytes, less 8: the first in the lower half."""
    return torch.stack([x & 15, x >> 4], -1).flatten(-2).to(torch.int8) - 8


def to_eight(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to a dtype of 8 bits, and no larger than its largest; unchanged for others."""
    if dtype not in QUANTISED:
        return x
    ended = saturate(x, dtype)
    return (ended if dtype in FLOATS_OF_8 else ended.round()).to(dtype)


def saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, no larger than the largest of a dtype of 8 bits; unchanged for other dtypes."""
    if dtype not in QUANTISED:
        return x
    end = torch.finfo(dtype).max if dtype in FLOATS_OF_8 else 127
    return x.clamp(-end, end)


def stands_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an attention whose q has this one: bfloat16 if q is quantised."""
    return torch.bfloat16 if dtype in QUANTISED else dtype


def round_weights(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights [..,N] rounded to 8 bits, as shares of the largest in their row."""
    if not p.shape[-1]:
        return p
    most = p.amax(-1, keepdim=True)
    shares = torch.where(most > 0, p / most, 0.0)
    return (WEIGHT_SCALE * shares).to(dtype).to(p.dtype) * (most / WEIGHT_SCALE)


def weights_dtype(graph: Graph, precision: str) -> torch.dtype | None:
    """The dtype of 8 bits to which weights may be rounded: that of q, if precision is "fp8"."""
    quantised = (
        graph.types[eqn.args[0]].dtype
        for eqn in graph.eqns
        if isinstance(eqn.op, Dequantise) and eqn.args[0] == eqn.args[2]
    )
    dtype = next(quantised, None) if precision == "fp8" else None
    return dtype if dtype in FLOATS_OF_8 else None


def scales_fit(scale: tuple[int, ...], x: tuple[int, ...]) -> bool:
    """True if a scale of this shape fits a tensor: it has as many axes, each a divisor."""
    return len(scale) == len(x) and all(map(neighbours, x, scale))


def neighbours(n: int, scales: int) -> int:
    """How many along an axis of n share one of so many scales; 0 if these do not divide it."""
    if scales in (1, n):
        return 1 if scales == n else n or 1
    each = int(n) // int(scales) if scales else 0
    return each if scales * each == n else 0


def spread(scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A scale with its numbers repeated over their blocks; axes of 1 stay."""
    for axis, (n, scales) in enumerate(zip(shape, scale.shape, strict=True)):
        if 1 < scales < n:
            scale = scale.repeat_interleave(n // scales, axis)
    return scale
