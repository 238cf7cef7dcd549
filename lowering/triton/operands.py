"""Operands of Triton's kernels: their layout, and the kernels it permits."""

from __future__ import annotations

import torch

from attn_graph.kernels.tilings import COPYING, padded_head_size, shared_memory, table_arch
from attn_graph.lowering.problem import Problem, is_broadcast, is_misaligned
from attn_graph.machine.target import Target
from attn_graph.spec import TensorSpec

WIDE_TF32 = 163840  # bytes of shared memory of tiles 256 wide with TF32, by machine code


def takes_tf32(problem: Problem, sm: int) -> bool:
    """True if kernels with TF32 exist: products of other dtypes have one precision, and wide tiles
    need much shared memory then."""
    wide = padded_head_size(max(problem.D, problem.E)) > 128
    return problem.dtype == torch.float32 and (not wide or shared_memory(sm) >= WIDE_TF32)


def is_copied_in_tiles(spec: TensorSpec) -> bool:
    """True if the copy engine of Hopper GPUs (TMA) can read an operand."""
    apart = spec.unit_last and not is_misaligned(spec) and not is_broadcast(spec)
    return spec.dtype.itemsize == 2 and apart


def copies_tiles(problem: Problem, target: Target) -> bool:
    """True if the copy engine brings tiles: tilings reckon with it, or the interpreter runs."""
    width = padded_head_size(max(problem.D, problem.E))
    return target.interprets or width in COPYING.get(table_arch(target.sm), ())
