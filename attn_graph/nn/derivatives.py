"""The derivatives of a call as texts of plans, for the operators to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from attn_graph.ir.transforms.jvp import push_graph
from attn_graph.ir.transforms.vjp import backward, residuals, with_residuals
from attn_graph.plan import Plan
from attn_graph.planner.forms.content import write_plan
from attn_graph.spec import TensorSpec

Tensors = Sequence[Tensor]


def write_gradient(
    plan: Plan, tensors: Tensors, needs: Sequence[bool], given: Sequence[bool]
) -> str:
    """The text of a plan's gradient. tensors: those of `attention_backward`."""
    count = len(needs)
    cotangents = iter(tensors[count + len(residuals(plan.graph)) :])
    specs = [TensorSpec.like(next(cotangents)) if each else None for each in given]
    wants = [n for n, need in enumerate(needs) if need]
    saved = [*map(TensorSpec.like, tensors[: count + len(residuals(plan.graph))])]
    return write_plan(plan.request.with_graph(backward(plan.graph, wants, specs, saved)))


def write_tangents(plan: Plan, tangents: Mapping[int, Tensor], saves: bool) -> str:
    """The text of a plan's forward mode. saves: also return the backward's residuals."""
    graph = with_residuals(plan.graph) if saves else plan.graph
    specs = [TensorSpec.like(t) for t in tangents.values()]
    return write_plan(plan.request.with_graph(push_graph(graph, [*tangents], specs)))
