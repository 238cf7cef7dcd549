"""Quantised q, k and v: 8 bits each, and one scale a tensor.

cuDNN multiplies them as they are, and then scores and o by the scales. It rounds weights to the
dtype of q, after it has multiplied them by WEIGHT_SCALE: docs/semantics.md has the error of that.
"""

from __future__ import annotations

from attrs import evolve

from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import value_spec
from attn_graph.ir.packed import Packed
from attn_graph.ir.scaling import O_SCALE, SCALES, Dequantise, Quantise
from attn_graph.lowering.problem import Problem


def quantised_places(graph: Graph) -> dict[str, int]:
    """The input for each operand of one attention on quantised q, k and v, by name, and that for
    the scale of an o in as many bits; empty for other graphs, with packed tensors, pages or k and v
    alone quantised among them."""
    if not 2 <= len(graph.eqns) <= 3 or min(graph.outputs) <= len(graph.inputs):
        return {}
    first, main, *last = graph.eqns
    if not isinstance(first.op, Dequantise) or main.args[0] != len(graph.inputs):
        return {}
    packed: Packed | None = main.op.packed
    if packed is None or packed != Packed(packed.op, scaled=True) or packed.forward is None:
        return {}
    q, q_scale, _ = first.args
    places = dict(zip(packed.roles, main.args, strict=True)) | {"q": q, "q_scale": q_scale}
    if not last:
        return places
    return places | {O_SCALE: last[0].args[1]} if isinstance(last[0].op, Quantise) else {}


def quantised_problem(graph: Graph) -> Problem | None:
    """The problem on 8 bits of q, k and v, and perhaps of o; None without `quantised_places`."""
    specs = {name: graph.inputs[n].spec for name, n in quantised_places(graph).items()}
    if not specs:
        return None
    main, outs = graph.numbered[1]
    node = main.op.attention
    lies = (("o", value_spec(graph, outs.start).strides),)
    problem = Problem.of(node, [specs[name] for name in node.roles], lies)
    scales = (specs[name] for name in (*SCALES, O_SCALE) if name in specs)
    return evolve(problem, scales=tuple(scales))
