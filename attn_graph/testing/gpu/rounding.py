"""Sums rounded towards minus infinity. PTX ISA 9.7.3.3."""

from __future__ import annotations

import numpy as np

from attn_graph.testing.gpu.arithmetic import F32, F64, join, parts
from attn_graph.testing.gpu.rules import Array, value


@value("add.rm.f32", "f32 <- f32 f32")
def add_down(a: Array, b: Array) -> Array:
    """d = a + b, rounded towards minus infinity."""
    return sum_down(a.astype(F64), b.astype(F64))


@value("add.rm.f32x2", "f32x2 <- f32x2 f32x2")
def add_pairs_down(a: Array, b: Array) -> Array:
    """d = a + b, for two numbers in each, rounded towards minus infinity."""
    return join(sum_down(parts(a).astype(F64), parts(b).astype(F64)))


def sum_down(a: Array, b: Array) -> Array:
    """The largest float32 not above a + b, a sum that float64 may not hold exactly."""
    total = a + b
    more = total - a
    rest = (a - (total - more)) + (b - more)  # the rounding error of float64 (Knuth)
    near = total.astype(F32)
    above = np.isfinite(total) & ((near > total) | ((near == total) & (rest < 0)))
    return np.where(above, np.nextafter(near, F32(-np.inf)), near)
