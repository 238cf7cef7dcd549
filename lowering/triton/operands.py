"""The tensors that Triton's kernels work on: how they lie, and what they permit."""

from __future__ import annotations

import torch

from attn_graph.kernels.tilings import padded_head_size, shared_memory
from attn_graph.lowering.problem import Problem

WIDE_TF32 = 163840  # bytes of shared memory that tiles 256 wide take with TF32, by machine code


def takes_tf32(problem: Problem, sm: int) -> bool:
    """Whether there are kernels with TF32: products of other dtypes have one precision, and wide
    tiles need much shared memory then."""
    wide = padded_head_size(max(problem.D, problem.E)) > 128
    return problem.dtype == torch.float32 and (not wide or shared_memory(sm) >= WIDE_TF32)
