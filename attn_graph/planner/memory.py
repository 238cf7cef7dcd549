"""The memory of a graph's passes, from what their backends need."""

from __future__ import annotations

import torch

from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.lowering.backend import Foreseen
from attn_graph.machine.sizes import Memory


def sum_memory(
    graph: Graph, ahead: Foreseen, gradient: Graph | None = None, behind: Foreseen | None = None
) -> Memory:
    """The memory of a graph, by its passes' needs; a backward without a backend needs none."""
    both = {"forward": ahead} | ({"backward": behind} if behind else {})
    fused = {i for eqn, outs in graph.numbered if eqn.op.forward for i in outs}
    kept = {*residuals(graph), *(fused & {*graph.outputs})}  # from forward to backward
    return Memory(
        outputs=sum(value_bytes(graph, i) for i in graph.outputs),
        saved=sum(value_bytes(graph, i) for i in kept),
        workspace_forward=ahead.workspace or 0,
        workspace_backward=(behind.workspace or 0) if behind else 0,
        temporary_forward=ahead.temporary,
        temporary_backward=behind.temporary if behind else 0,
        block_forward=ahead.block,
        block_backward=behind.block if behind else 0,
        threads=torch.get_num_threads(),
        gradients=sum(value_bytes(gradient, i) for i in gradient.outputs)
        if gradient and behind
        else 0,
        untold=tuple(name for name, x in both.items() if x.workspace is None),
    )


def value_bytes(graph: Graph, i: int) -> int:
    """The memory of a value, with the gaps of a declared layout."""
    return result_spec(graph, i).bytes if graph.layouts else graph.types[i].bytes
