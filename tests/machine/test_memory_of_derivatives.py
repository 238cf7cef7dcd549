"""The workspace of jvp and of double backward is what the plans of their graphs tell."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import attn_graph as ag

SHAPE = (2, 4, 160, 32)


def push(plan: ag.Plan, tensors: Sequence[torch.Tensor]) -> None:
    torch.func.jvp(plan, tuple(tensors), tuple(tensors))


def pull_twice(plan: ag.Plan, tensors: Sequence[torch.Tensor]) -> None:
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = plan(*leaves)
    assert isinstance(o, torch.Tensor)
    first = torch.autograd.grad(o, leaves, torch.ones_like(o), create_graph=True)
    torch.autograd.grad(sum((x.float().pow(2).sum() for x in first), torch.zeros(())), leaves)


def bytes_of(*graphs: ag.Graph) -> int:
    needs = [ag.compile(graph).memory() for graph in graphs]
    return max(max(x.workspace_forward, x.workspace_backward) for x in needs)


@pytest.mark.parametrize("mask", [None, ag.Causal(), ag.Window(20, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_workspace_of_the_memory_of_their_graphs_serves_derivatives(
    mask: ag.Mask | None, dtype: torch.dtype, cap: float | None
) -> None:
    x = ag.TensorSpec(SHAPE, dtype)
    graph = ag.attention(x, x, x, mask=mask, soft_cap=cap)
    _, first = ag.vjp(graph)
    _, second = ag.vjp(first)
    for run, needs in (
        (push, bytes_of(graph, ag.jvp(graph))),
        (pull_twice, bytes_of(graph, second)),
    ):
        memory = torch.empty(needs, dtype=torch.uint8)
        plan = ag.compile(graph, workspace=ag.Workspace(memory=memory))
        run(plan, [torch.randn(SHAPE, dtype=dtype) for _ in range(3)])
        less = ag.compile(graph, workspace=ag.Workspace(memory=memory[: needs // 2]))
        with pytest.raises(ag.GraphError, match=r"and the call needs [\d,]+; pass torch.empty"):
            run(less, [torch.randn(SHAPE, dtype=dtype) for _ in range(3)])
