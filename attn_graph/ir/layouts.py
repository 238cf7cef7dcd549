"""How values lie in memory. Plans, fake kernels, `out=` and backward graphs read it here."""

from __future__ import annotations

from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.ops import Weigh
from attn_graph.ir.packing import Pack
from attn_graph.ir.scaling import Dequantise, Quantise
from attn_graph.ir.sums import Add
from attn_graph.ir.views import VIEWS
from attn_graph.machine.cache import remember
from attn_graph.spec import TensorSpec, dense_like, dense_strides, memory_order


@remember
def output_specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """How each output lies: as declared, or dense: o like q, a gradient or tangent like its
    operand, all else in C order."""
    if not graph.layouts:
        return tuple([dense_like(value_spec(graph, i)) for i in graph.outputs])
    pairs = zip(graph.outputs, graph.declared_outputs, strict=True)
    return tuple([due or dense_like(value_spec(graph, i)) for i, due in pairs])


def result_spec(graph: Graph, i: int) -> TensorSpec:
    """Value i as an output: see `output_specs`."""
    if i in graph.outputs:
        return output_specs(graph)[graph.outputs.index(i)]
    return dense_like(value_spec(graph, i))


def value_spec(graph: Graph, i: int) -> TensorSpec:
    """How value i lies between equations."""
    if i < len(graph.inputs):
        return graph.inputs[i].spec
    type_ = graph.types[i]
    eqn, outs = next(numbered for numbered in graph.numbered if i in numbered[1])
    if isinstance(eqn.op, VIEWS) and i not in statistics(graph):
        view = eqn.op.view(value_spec(graph, eqn.args[0]))
        return view or TensorSpec(type_.shape, type_.dtype)
    like = leader_of(graph, eqn, i - outs.start)
    order = memory_order(like) if like and len(like.shape) == len(type_.shape) else None
    return TensorSpec(type_.shape, type_.dtype, dense_strides(type_.shape, order))


def leader_of(graph: Graph, eqn: Eqn, place: int) -> TensorSpec | None:
    """The value in whose memory order the result at `place` lies; None for C order."""
    match eqn.op:
        case Fused(gives=roles):
            n = roles[place].leader
            return None if n is None else value_spec(graph, eqn.args[n])
        case Weigh() | Pack(blind=False):
            root = root_of(graph, eqn.args[0])
            return None if root is None else value_spec(graph, root)
        case Add() | Dequantise() | Quantise():
            return value_spec(graph, eqn.args[0])
    return None


def root_of(graph: Graph, i: int) -> int | None:
    """The input at the end of first operands, q for scores, weights and o; None without one."""
    while i >= len(graph.inputs):
        eqn = next(eqn for eqn, outs in graph.numbered if i in outs)
        if not eqn.args:
            return None
        i = eqn.args[0]
    return i


def statistics(graph: Graph) -> frozenset[int]:
    """The values that are statistics of rows."""
    return graph.named_results(lambda op: op.statistics)
