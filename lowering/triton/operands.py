"""Operands of Triton's kernels: their layout, and the kernels it permits."""

from __future__ import annotations

import torch

from attn_graph.kernels.tilings import (
    COPYING,
    HELD,
    padded_head_size,
    shared_memory,
    table_arch,
)
from attn_graph.lowering.problem import Problem, is_broadcast, is_misaligned
from attn_graph.machine.target import Target
from attn_graph.spec import TensorSpec

WIDE_TF32 = 163840  # bytes of shared memory of tiles 256 wide with TF32, by machine code


def table_width(problem: Problem) -> int:
    """The width by which tables have tiles: of the larger head size, or of its widest piece."""
    return min(HELD, padded_head_size(max(problem.D, problem.E)))


def reads_v_in_k(problem: Problem) -> bool:
    """True if v begins each key and is as wide as the first piece of keys: it is not read again."""
    widths = (min(HELD, padded_head_size(size)) for size in (problem.D, problem.E))
    return problem.node.v_in_k and len({*widths}) == 1


def takes_tf32(problem: Problem, sm: int) -> bool:
    """True if kernels with TF32 exist: products of other dtypes have one precision, and wide tiles
    need much shared memory then."""
    width = table_width(problem)
    fits = width <= 128 or (width < HELD and shared_memory(sm) >= WIDE_TF32)
    return problem.dtype == torch.float32 and fits


def is_copied_in_tiles(spec: TensorSpec) -> bool:
    """True if the copy engine of Hopper GPUs (TMA) can read an operand."""
    apart = spec.unit_last and not is_misaligned(spec) and not is_broadcast(spec)
    return spec.dtype.itemsize == 2 and apart


def copies_tiles(problem: Problem, target: Target) -> bool:
    """True if the copy engine brings tiles: tilings reckon with it, or the interpreter runs."""
    width = table_width(problem)
    copying = COPYING.get(table_arch(target.sm), ())
    return problem.D <= HELD and (target.interprets or width in copying)
