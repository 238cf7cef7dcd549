"""What a graph means, run: every equation's own `run`, in float64 if asked. Exact, slow, whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_graph.ir import Graph


def evaluate(
    graph: Graph, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = torch.float64
) -> tuple[torch.Tensor, ...]:
    """The outputs of a graph for these inputs, floating inputs cast to `dtype` unless it is None."""
    values = [t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors]
    for eqn in graph.eqns:
        values += eqn.op.run(*(values[i] for i in eqn.args))
    return tuple(values[i] for i in graph.outputs)
