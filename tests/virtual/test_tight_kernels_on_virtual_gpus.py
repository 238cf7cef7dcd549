"""Kernels with tiles of their own because registers are short, compiled and executed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.gpu import virtual_gpu
from attn_graph.testing.tensors import tensors_for
from tests.support.virtual_cases import machine

M = 150
CASES: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {  # head size, dtype and options
    "blocks": (
        32,
        torch.bfloat16,
        {
            "mask": ag.KeepBlocks(50, 64),
            "keep_blocks": ag.TensorSpec((1, 2, 3, 3), torch.bool),
        },
    ),
    "float32": (192, torch.float32, {"mask": ag.Causal()}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "name"),
    [
        *((sm, "blocks") for sm in (80, 90, 100)),
        *((sm, "float32") for sm in (90, 100)),
    ],
)
def test_a_kernel_short_of_registers_computes_what_the_graph_means(sm: int, name: str) -> None:
    size, dtype, options = CASES[name]
    q, k = (ag.TensorSpec((1, heads, M, size), dtype) for heads in (2, 1))
    graph = ag.attention(q, k, k, stats=True, **options)
    with virtual_gpu(machine(sm)) as device:
        ag.default_workspace().release()
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        tensors = tensors_for(graph, 1)
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, 1)
