"""The graph recorded by autograd: the compiled one, or its variant that keeps the weights."""

from __future__ import annotations

from attn_graph.ir.graph import Graph
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.sizes import format_bytes
from attn_graph.planner.choose import MATH, resolve_backends
from attn_graph.rings import find

RUNS_KEPT = (MATH,)  # the backends of graphs that keep weights


def recorded_graph(request: Request, chosen: str) -> Graph | None:
    """The graph recorded by autograd in place of a simplified one; None: the simplified one.

    chosen: its forward backend. Weights are kept if the library chooses both backends and no option
    limits bytes or asks for the same bits in each run.
    """
    graph, target, options = request.graph, request.target, request.options
    limited = options.max_workspace is not None or options.deterministic or options.tune
    named = request.among is not None and chosen != MATH
    if limited or named or graph.symbols or target.kind != "cpu":  # tiles are of sizes as numbers
        return None
    with neutral_state():
        kept: Graph | None = find("record_weights")(graph, target)
        (math,) = resolve_backends(RUNS_KEPT)
        return None if kept and math.reasons(request.with_graph(kept)) else kept


def recording_note(kept: Graph) -> str:
    """For `explain`: the effect of recording. kept: the recorded graph."""
    size = format_bytes(sum(kept.types[i].bytes for i in residuals(kept)))
    return f"where autograd records it, math runs it and keeps the weights for the backward, {size}"
