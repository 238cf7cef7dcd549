"""Gradients as graphs: reverse mode over a graph, equation by equation."""

from __future__ import annotations

from collections.abc import Sequence

from attn_graph import ops
from attn_graph.builder import Builder, Value
from attn_graph.errors import GraphError
from attn_graph.fused import Attention
from attn_graph.ir import Graph
from attn_graph.passes import narrow, simplify
from attn_graph.replay import prune
from attn_graph.spec import FLOATS, TensorSpec, dense_strides, memory_order


def vjp(graph: Graph, wants: Sequence[str] | None = None) -> tuple[Graph, Graph]:
    """(forward, backward). Both are fused graphs; together they are the gradient of `graph`.

    forward: the inputs -> the outputs, then the residuals that the backward reads (o and lse of
    each attention, where they are not outputs already).
    backward: the inputs, the residuals, one cotangent per output -> one gradient per wanted input
    (by default every input of a floating dtype). An input that no output depends on has zeros.
    Residuals are named as `forward` names them; cotangents `d` and the output's name. Both are
    declared as the outputs are: o in the memory order of q, all else in C order.

    Raises GraphError if `wants` names what is not a floating input, and for a graph that is a
    gradient itself.
    """
    graph = simplify(graph)
    more = tuple(i for i in residuals(graph) if i not in graph.outputs)
    forward = Graph(graph.inputs, graph.eqns, graph.outputs + more)
    cotangents = [result_spec(graph, i) for i in graph.outputs]
    return forward, backward(graph, wanted_inputs(graph, wants), cotangents)


def refuse_gradient(graph: Graph) -> None:
    if graph.is_gradient:
        raise GraphError("a gradient has no gradient: double backward is not built")


def wanted_inputs(graph: Graph, wants: Sequence[str] | None) -> tuple[int, ...]:
    """The numbers of the inputs to differentiate by."""
    if isinstance(wants, str):
        raise GraphError(f"wants {wants!r} is one name: say ({wants!r},)")
    floating = {i.name: n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS}
    if wants is None:
        return tuple(floating.values())
    if unknown := [name for name in wants if name not in floating]:
        raise GraphError(
            f"vjp: no floating input is named {', '.join(unknown)}; there are {', '.join(floating)}"
        )
    return tuple(floating[name] for name in wants)


def residuals(graph: Graph) -> tuple[int, ...]:
    """The values of a fused graph that its backward reads instead of computing them again."""
    return tuple(i for eqn, outs in graph.numbered() if isinstance(eqn.op, Attention) for i in outs)


def result_spec(graph: Graph, i: int) -> TensorSpec:
    """How value i is laid out when it is an output: o in the memory order of q, else C order."""
    type_ = graph.types[i]
    for eqn, outs in graph.numbered():
        if (
            isinstance(eqn.op, (Attention, ops.Weigh))
            and i == outs[0]
            and eqn.args[0] < len(graph.inputs)
        ):
            q = graph.inputs[eqn.args[0]].spec
            return TensorSpec(type_.shape, type_.dtype, dense_strides(type_.shape, memory_order(q)))
    return TensorSpec(type_.shape, type_.dtype)


def value_names(graph: Graph) -> dict[int, str]:
    """A distinct name for each value that an equation gives; `d` before it is distinct too."""
    taken = {i.name for i in graph.inputs}
    names = {}
    for eqn, outs in graph.numbered():
        for base, i in zip(eqn.op.names, outs, strict=True):
            tries = (base if n == 1 else f"{base}{n}" for n in range(1, len(taken) + 2))
            names[i] = next(name for name in tries if not {name, f"d{name}"} & taken)
            taken |= {names[i], f"d{names[i]}"}
    return names


def backward(graph: Graph, wants: Sequence[int], cotangents: Sequence[TensorSpec | None]) -> Graph:
    """The backward of a simplified graph for some inputs; an output without cotangent has zero.

    Raises GraphError for a graph that is a gradient itself.
    """
    refuse_gradient(graph)
    b, types, names = Builder(), graph.types, value_names(graph)
    values = {n: b.input(i.name, i.spec) for n, i in enumerate(graph.inputs)}
    for i in residuals(graph):
        values[i] = b.input(names[i], result_spec(graph, i))
    grads: dict[int, Value] = {}
    for i, spec in zip(graph.outputs, cotangents, strict=True):
        if spec is not None:
            grads[i] = b.input(f"d{names[i]}", spec)
    for eqn, outs in graph.numbered():
        if outs[0] not in values:
            values.update(zip(outs, b.emit(eqn.op, *(values[i] for i in eqn.args)), strict=True))
    for eqn, outs in reversed([*graph.numbered()]):
        if any(i in grads for i in outs):
            operands, results = ([values[i] for i in x] for x in (eqn.args, outs))
            found = eqn.op.pull(b.emit, operands, results, [grads.get(i) for i in outs])
            for i, grad in zip(eqn.args, found, strict=True):
                if grad is not None:
                    grads[i] = grads[i].then(ops.Add(), grad) if i in grads else grad
    outputs = [grads[i] if i in grads else b.emit(ops.Zeros.like(types[i]))[0] for i in wants]
    return narrow(prune(b.graph(*outputs)))
