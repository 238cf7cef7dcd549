"""Which graph autograd records: the one that was compiled, or the same that keeps its weights."""

from __future__ import annotations

from collections.abc import Sequence

from attn_graph.ir.graph import Graph
from attn_graph.ir.vjp import residuals
from attn_graph.lowering.backend import Backend, Options
from attn_graph.lowering.cpu import math as torch_math
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.target import Target

RUNS_KEPT = (torch_math.BACKEND.name,)  # the backends of graphs that keep weights


def no_other() -> None:
    """What a plan says whose own calls autograd records."""


def recorded_graph(
    graph: Graph, target: Target, options: Options, among: Sequence[Backend] | None, chosen: str
) -> Graph | None:
    """The graph that autograd records in place of a simplified one; None: that one itself.

    chosen: who runs it forward. Weights are kept where the library chooses who runs both passes,
    and nothing was said about bytes or bits: a limit, or that each run must give the same bits.
    """
    said = options.max_workspace is not None or options.deterministic or options.tune
    named = among is not None and chosen != torch_math.BACKEND.name
    if said or named or graph.symbols or target.kind != "cpu":  # tiles are of sizes as numbers
        return None
    with neutral_state():
        kept = torch_math.record_weights(graph, target)
        return None if kept and torch_math.BACKEND.reasons(kept, target, options) else kept


def recording_note(kept: Graph) -> str:
    """For `explain`: what calls do that autograd records. kept: the graph that it records."""
    size = format_bytes(sum(kept.types[i].bytes for i in residuals(kept)))
    return f"where autograd records it, math runs it and keeps the weights for the backward, {size}"
