"""Numbers of eight bits. PTX ISA 9.7.9.21."""

from __future__ import annotations

import numpy as np
import torch

from attn_graph.testing.gpu.arithmetic import F32, U16, round_bfloat, stack
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
