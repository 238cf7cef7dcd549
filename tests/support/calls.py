"""Calls of plans on tensors that require gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import attn_graph as ag
from attn_graph.testing import rule
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.tensors import cotangents_for, tensors_for

Leaves = Sequence[torch.Tensor]


def leaves_of(graph: ag.Graph, seed: int = 0) -> list[torch.Tensor]:
    return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors_for(graph, seed)]


def output_of(plan: ag.Plan, tensors: Leaves) -> torch.Tensor:
    found = plan(*tensors)
    assert isinstance(found, torch.Tensor)
    return found


def check_gradients(
    graph: ag.Graph, leaves: Leaves, found: Sequence[torch.Tensor], do: torch.Tensor
) -> None:
    dues = rule.expect_gradients(graph, [t.detach() for t in leaves], (do,))
    wanted = [i.name for i, t in zip(graph.inputs, leaves, strict=True) if t.requires_grad]
    for name, gradient in zip(wanted, found, strict=True):
        dues[name].check(gradient)


def check_same_bits(plan: ag.Plan, exact: ag.Plan, tensors: Leaves, seed: int = 1) -> None:
    """Assert that two plans give the same, forward and backward, bit for bit."""
    pairs = zip(run_plan(plan, tensors), run_plan(exact, tensors), strict=True)
    assert all(is_same(a, b) for a, b in pairs)
    cotangents = cotangents_for(exact.graph, seed)
    ours, due = (run_gradients(x, tensors, cotangents) for x in (plan, exact))
    assert ours.keys() == due.keys()
    assert all(is_same(ours[name], due[name]) for name in ours)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie and are the same, NaN too."""
    lies = ag.TensorSpec.like(a) == ag.TensorSpec.like(b)
    return lies and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
