"""Numbers of eight bits, and arithmetic by which they are widened. PTX ISA 9.7.4, 9.7.9.21."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from attn_graph.testing.gpu.arithmetic import (
    F32,
    U16,
    half_of,
    round_bfloat,
    stack,
    widen_bfloat,
)
from attn_graph.testing.gpu.rules import Array, value

HALVES = {  # each number in float16, by its bits
    kind: torch.arange(256, dtype=torch.uint8).view(kind).half().numpy().view(np.uint16)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2)
}


@value("cvt.rn.f16x2.e4m3x2", "b32 <- b16")
def widen_e4m3(a: Array) -> Array:
    """d = both numbers in float16, which holds them exactly."""
    return widen_pair(a, HALVES[torch.float8_e4m3fn])


@value("cvt.rn.f16x2.e5m2x2", "b32 <- b16")
def widen_e5m2(a: Array) -> Array:
    """d = both numbers in float16, which holds them exactly."""
    return widen_pair(a, HALVES[torch.float8_e5m2])


@value("cvt.bf16.f16", "bf16 <- f16")
def half_to_bfloat(a: Array) -> Array:
    """d = a in bfloat16, rounded to nearest even."""
    return round_bfloat(a.astype(F32))


def widen_pair(a: Array, halves: Array) -> Array:
    return stack(halves[a >> U16(8)], halves[a & U16(255)])


@value("sub.bf16x2", "b32 <- b32 b32")
def subtract_pairs(a: Array, b: Array) -> Array:
    """d = a - b, for two numbers in each."""
    return combine_pairs(np.subtract, a, b)


@value("mul.rn.bf16x2", "b32 <- b32 b32")
def multiply_pairs(a: Array, b: Array) -> Array:
    """d = a b, for two numbers in each."""
    return combine_pairs(np.multiply, a, b)


def combine_pairs(combine: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """float32 has more than twice bfloat16's bits, so that rounding twice rounds once."""
    high, low = (combine(*(widen_bfloat(half_of(x, at)) for x in (a, b))) for at in (16, 0))
    return stack(round_bfloat(high), round_bfloat(low))
