"""o in 8 bits for backends whose kernels do not store it so: a pass of its own after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import evolve

from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.scaling import Quantise
from attn_graph.lowering.backend import Executable
from attn_graph.machine.sizes import format_bytes

Tensors = Sequence[torch.Tensor]


def cut_last(graph: Graph) -> Graph | None:
    """The graph that gives o before it is quantised, first of its outputs; None for one without
    that step at its end."""
    if not graph.eqns or not isinstance(graph.eqns[-1].op, Quantise):
        return None
    last, outs = graph.numbered[-1]
    others = tuple(i for i in graph.outputs if i not in outs)
    return Graph(graph.inputs, graph.eqns[:-1], (last.args[0], *others))


def finish(lowered: Executable, graph: Graph, inner: Graph) -> Executable:
    """An executable of a graph, from one of the graph before its last step."""
    o = graph.types[inner.outputs[0]]
    note = f"o is quantised by a pass of its own, which reads {format_bytes(o.bytes)}"
    return evolve(
        lowered,
        run=partial(run_last, lowered.run, graph, inner),
        infer=partial(run_last, lowered.infer, graph, inner),
        write=None,
        fix=None,
        writes_anywhere=False,
        copies_out=True,
        temporary=lowered.temporary + 3 * o.bytes * 4 // o.dtype.itemsize,
        notes=(*lowered.notes, note),
    )


def run_last(
    run: Callable[..., tuple[Tensors, Tensors]], graph: Graph, inner: Graph, *tensors: torch.Tensor
) -> tuple[Tensors, Tensors]:
    outputs, saved = run(*tensors)
    eqn, outs = graph.numbered[-1]
    values = dict(zip(inner.outputs, outputs, strict=True))
    given = (values[i] if i in values else tensors[i] for i in eqn.args)
    values |= zip(outs, eqn.op.run(*given), strict=True)
    return [values[i] for i in graph.outputs], saved
