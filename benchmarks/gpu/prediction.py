"""What a pass is predicted to take: the one place where the page's predictions come from."""

from __future__ import annotations

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.backend import UNPRICED
from attn_graph.lowering.request import Options, Request
from attn_graph.planner.choose import price_all
from attn_graph.planner.cost import Work, cost
from benchmarks.gpu.cases import Pass

# The backend whose kernel a way runs, where its name does not end with it.
KERNELS = {"SDPA flash_attention": "torch_flash", "SDPA cudnn_attention": "torch_cudnn"}


def count_work(graph: ag.Graph, target: ag.Target, pass_: Pass) -> Work:
    """Flops and bytes of a pass."""
    costs = cost(simplify(graph), target)
    work = costs.forward if pass_ == "forward" else costs.backward
    assert work is not None  # the graphs of cases have gradients
    return work


def predict_milliseconds(graph: ag.Graph, target: ag.Target, pass_: Pass, by: str) -> float | None:
    """By the rate of a way's kernels, or else by the target's peaks; None: neither is known."""
    simple = simplify(graph)
    of_pass = simple if pass_ == "forward" else training_gradient(simple)
    prices = price_all(Request(of_pass, target, Options()))
    made = prices.get(KERNELS.get(by, by.rpartition(" ")[2]), UNPRICED)
    seconds = made.seconds if made.is_known else count_work(graph, target, pass_).seconds
    return None if seconds is None else 1e3 * seconds
