"""Graphs with a step of one's own, for tests of masks and modifiers that users write."""

from __future__ import annotations

import attn_graph as ag
from attn_graph.ir.modifiers import Modifier


def graph_of(modifier: Modifier, x: ag.TensorSpec, mask: ag.Mask) -> ag.Graph:
    """Attention of q, k and v that look like x, whose scores the modifier changes; o and lse."""

    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
        p, lse = ag.scores(q, k).then(modifier).mask(mask).softmax()
        return p.weigh(v), lse

    return ag.graph(attend, q=x, k=x, v=x)
