"""Functions that FlashAttention 4's kernels call, in its DSL: imported where the package is."""

from __future__ import annotations

import importlib
from typing import Any

cutlass: Any = importlib.import_module("cutlass")  # Any: its names are those of a compiler
cute: Any = cutlass.cute

CAP = 2.0


@cute.jit
def keep_causal(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Causal, from the top left corner."""
    return j <= i


@cute.jit
def keep_behind_first(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Causal, from the top left corner, without the first 160 keys: many rows see nothing."""
    return (j <= i) & (j >= 160)


@cute.jit
def keep_all(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """All keys."""
    return j >= 0


@cute.jit
def cap_scores(
    s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """Scores never leave (-CAP, CAP)."""
    return cutlass.Float32(CAP) * cute.math.tanh(s * cutlass.Float32(1 / CAP), fastmath=True)


@cute.jit
def cap_gradient(
    ds: Any, s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    """The derivative of cap_scores, times ds."""
    t = cute.math.tanh(s * cutlass.Float32(1 / CAP), fastmath=True)
    return ds * (cutlass.Float32(1) - t * t)
