"""What a pass is predicted to take: the one place where the page's predictions come from."""

from __future__ import annotations

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.planner.cost import Work, cost
from benchmarks.gpu.cases import Pass


def count_work(graph: ag.Graph, target: ag.Target, pass_: Pass) -> Work:
    """Flops and bytes of a pass."""
    costs = cost(simplify(graph), target)
    work = costs.forward if pass_ == "forward" else costs.backward
    assert work is not None  # the graphs of cases have gradients
    return work


def predict_milliseconds(graph: ag.Graph, target: ag.Target, pass_: Pass) -> float | None:
    """The least time by the target's peaks; None where they are not known."""
    seconds = count_work(graph, target, pass_).seconds
    return None if seconds is None else 1e3 * seconds
