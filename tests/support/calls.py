"""Calls of plans on tensors that require gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import attn_graph as ag
from attn_graph.testing import rule
from attn_graph.testing.tensors import tensors_for

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
