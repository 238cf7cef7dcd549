"""Quantised queries, keys and values: numbers of eight bits, and scales in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.graph import Emit, Gradients, Graph, Op, Values
from attn_graph.spec import QUANTISED, ValueType, accumulator
from attn_graph.spec.formulas import is_one

SCALES = ("q_scale", "k_scale", "v_scale")
KEY_SCALES = SCALES[1:]
PAIRS = tuple(zip("qkv", SCALES, strict=True))
FLOATS_OF_8 = QUANTISED[:2]
# Of weights before they are rounded to 8 bits. Kernels may hold weights up to 2^4 times the largest
# so far (RESCALE_THRESHOLD of NVIDIA's for sm_100), and 2^4 * 2^4 is below 448, the end of e4m3.
WEIGHT_SCALE = 16.0


@final
@frozen
class Dequantise(Op):
    """x, scale, like -> x * scale, in the dtype of `like`, or in bfloat16 if that has 8 bits too.

    x is in 8 bits; scale has its axes, each full or 1, and 1 for the last. The result is in C
    order. It has no derivative by either.
    """

    @property
    def reads(self) -> int:
        return 3

    @property
    def roles(self) -> tuple[str, ...]:
        return "x", "scale", "like"

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return None, None, None

    @property
    def constants(self) -> tuple[int, ...]:
        return 0, 1

    def problems(self, x: ValueType, scale: ValueType, like: ValueType) -> Iterator[str]:
        if x.dtype not in QUANTISED:
            yield (
                f"dequantise: {x} is in {x.dtype}, and scales are for tensors in "
                f"{', '.join(map(str, QUANTISED))}; multiply it by the scale, or leave scales out"
            )
        if scale.dtype != torch.float32:
            yield f"dequantise: scale {scale} must be of torch.float32"
        if not scales_fit(scale.shape, x.shape):
            due = (*x.shape[:-1], 1)
            yield (
                f"dequantise: scale {scale} must have the axes of {x}, each full or 1, and 1 for "
                f"the last: {list(due)} for rows, {[1] * len(due)} for the tensor"
            )

    def infer(self, x: ValueType, scale: ValueType, like: ValueType) -> tuple[ValueType]:
        return (ValueType(x.shape, stands_in(like.dtype)),)

    def run(self, x: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor]:
        dtype = stands_in(like.dtype)
        wide = accumulator(dtype)
        return ((x.to(wide) * scale.to(wide)).to(dtype).contiguous(),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return None, None, None

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None,)


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
    """True if a scale of this shape fits a tensor: each axis full or 1, the last 1."""
    return len(scale) == len(x) and all(
        is_one(n) or n == m for n, m in zip(scale, (*x[:-1], 1), strict=True)
    )
