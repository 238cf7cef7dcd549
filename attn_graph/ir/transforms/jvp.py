"""Tangents as graphs: forward mode over a graph, equation by equation."""

from __future__ import annotations

from collections.abc import Sequence

from attn_graph.errors import GraphError
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph, check_graph, unused_names
from attn_graph.ir.passes import narrow, simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.transforms.sums import Zeros
from attn_graph.ir.transforms.vjp import floating_inputs, numbers_of, refuse_constants
from attn_graph.spec import TensorSpec, dense_like


def jvp(graph: Graph, tangents: Sequence[str] | None = None) -> Graph:
    """Forward mode: inputs and their tangents -> outputs and their tangents, as a fused graph.

    The tangents follow the inputs, named `t` and the input's name, each dense in the memory order
    of its input. Those of the outputs follow the outputs, except for outputs without a gradient.
    tangents: the names of the inputs that have one, by default all of a floating dtype; others
    count as zero and cost nothing.

    Of a backward from `vjp` this is a second derivative in a direction, a Hessian-vector product.
    Its o and lse move with q, k and v: their tangents are computed, unless `tangents` names both,
    as jvp of the forward returns them.

    Raises GraphError if `tangents` names anything but a floating input, for your own modifier
    without a derivative, and for a graph that is already a jvp or a second derivative.
    """
    check_graph(graph, "jvp")
    graph = simplify(graph)
    moved = moving_inputs(graph, tangents)
    return push_graph(graph, moved, [dense_like(graph.inputs[i].spec) for i in moved])


def moving_inputs(graph: Graph, names: Sequence[str] | None) -> tuple[int, ...]:
    floating, fixed = floating_inputs(graph), graph.carried | graph.constants
    if names is None:
        return tuple(n for n in floating.values() if n not in fixed)
    moved = {*numbers_of("tangents", "floating input", names, floating, "jvp")}
    if moved & graph.carried and not graph.carried <= moved:
        missing = (graph.inputs[n].name for n in sorted(graph.carried - moved))
        raise GraphError(
            f"jvp: tangents names some results of the forward, but not {', '.join(missing)}; "
            "name all of them, or none to have their tangents computed"
        )
    return tuple(sorted(moved))


def push_graph(graph: Graph, moved: Sequence[int], specs: Sequence[TensorSpec]) -> Graph:
    """The jvp of a simplified graph by some inputs. specs: of their tangents.

    Raises GraphError for a graph without a forward mode.
    """
    if problems := [text for eqn in graph.eqns for text in eqn.op.push_problems()]:
        raise GraphError(*dict.fromkeys(problems))
    refuse_constants(graph, moved, "jvp")
    b = Builder()
    values = [b.input(i.name, i.spec) for i in graph.inputs]
    known = [i.name for i in graph.inputs]
    names = [*unused_names([f"t{known[i]}" for i in moved], known)]
    pairs = zip(moved, names, specs, strict=True)
    tangents = {i: b.input(name, spec) for i, name, spec in pairs}
    for eqn, outs in graph.numbered:
        results, given = push_equation(b, eqn, values, tangents)
        values += results
        tangents |= {i: t for i, t in zip(outs, given, strict=True) if t is not None}
    types = graph.types
    due = [
        tangents[i] if i in tangents else b.emit(Zeros.like(types[i]))[0]
        for i in graph.differentiable_outputs
    ]
    b.check()
    outputs, layouts = (values[i] for i in graph.outputs), graph.layouts
    more = (None,) * len(due) if layouts else ()
    return narrow(prune(b.graph(*outputs, *due, layouts=(*layouts, *more))))


def push_equation(
    b: Builder, eqn: Eqn, values: Sequence[Value], tangents: dict[int, Value]
) -> tuple[Sequence[Value], Sequence[Value | None]]:
    """The results of an equation, and the tangent of each, or None.

    An attention with tangents also gives its results, so that they are computed once.
    """
    operands = [values[i] for i in eqn.args]
    results = b.emit(eqn.op, *operands)
    moved = [tangents.get(i) for i in eqn.args]
    if all(t is None for t in moved):
        return results, [None] * len(results)
    pushed = eqn.op.push(b.emit, operands, results, moved)
    last = b.eqns[-1]
    if last.op.jvp and last.op.jvp.of == eqn.op.forward:
        first = len(b.types) - len(last.outs)
        results = tuple(Value(b, first + n) for n in range(len(results)))
    return results, pushed
