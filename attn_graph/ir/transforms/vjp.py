"""Gradients as graphs: reverse mode over a graph, equation by equation."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch
from attrs import evolve

from attn_graph.errors import GraphError, show
from attn_graph.ir import ops
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph, Op, check_graph
from attn_graph.ir.layouts import (
    Layouts,
    output_specs,
    require_layouts,
    result_spec,
    statistics,
)
from attn_graph.ir.passes import narrow, simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.storage.scaling import Quantise
from attn_graph.ir.transforms.sums import Add, Zeros
from attn_graph.machine.overlap import overlaps_itself
from attn_graph.spec import FLOATS, TensorSpec, ValueType, dense_like
from attn_graph.spec.dims import NamedSize


def vjp(
    graph: Graph,
    wants: Sequence[str] | None = None,
    *,
    cotangents: Sequence[str] | None = None,
    outputs: Layouts | None = None,
) -> tuple[Graph, Graph]:
    """(forward, backward). Both are fused graphs; together they are the gradient of `graph`.

    forward: the inputs -> the outputs, then the residuals of the backward (o and lse of each
    attention, unless they are outputs already).

    backward: the inputs, the residuals, the cotangents in the order of the outputs -> one gradient
    per wanted input (by default every input of a floating dtype). An input without effect on the
    outputs has zeros.

    cotangents: the names of the outputs that have one, by default all with a gradient; others count
    as zero. With stats=True, `cotangents=("o",)` gives the backward of a step that uses o alone.

    Residuals are named as in `forward`, cotangents `d` and the output's name. Both are declared
    like the outputs: as `lay_out` declared them, else o in the memory order of q, all else in C
    order. outputs: the layouts of gradients, by `d` and the input's name, as `lay_out` takes them.

    The backward of a vjp's backward, or of a jvp, is a graph too, in as little memory. o and lse of
    the first, which move with its other inputs, have no gradient of their own.

    Raises GraphError if `wants` names anything but a floating input, or `cotangents` anything but
    an output with a gradient, for wrong layouts, for your own modifier without a gradient, and for
    a graph that is already a second derivative.
    """
    check_graph(graph, "vjp")
    graph = simplify(graph)
    given = graph.differentiable_outputs
    if cotangents is not None:
        own = value_names(graph)
        known = {own[i]: i for i in graph.outputs}
        given = numbers_of("cotangents", "output", cotangents, known)
    specs = cotangent_specs(graph, given)
    wanted = wanted_inputs(graph, wants)
    names = [f"d{graph.inputs[n].name}" for n in wanted]
    back = lay_named(backward(graph, wanted, specs), names, {} if outputs is None else outputs)
    return with_residuals(graph), back


def with_residuals(graph: Graph) -> Graph:
    """A graph that also returns the values that its backward reads."""
    more = tuple(i for i in residuals(graph) if i not in graph.outputs)
    layouts = graph.layouts and (*graph.layouts, *(None for _ in more))
    return evolve(graph, outputs=graph.outputs + more, layouts=layouts)


def wanted_inputs(graph: Graph, wants: Sequence[str] | None) -> tuple[int, ...]:
    """The numbers of the inputs to differentiate by. Raises GraphError for wrong names."""
    carried, constants, known = graph.carried, graph.constants, floating_inputs(graph)
    floating = {name: n for name, n in known.items() if n not in carried}
    if own := [graph.inputs[n].name for n in carried if graph.inputs[n].name in (wants or ())]:
        raise GraphError(
            f"vjp: no gradient by {', '.join(sorted(own))}: as a result of the forward it moves "
            "with the other inputs"
        )
    return (
        tuple([n for n in floating.values() if n not in constants])
        if wants is None
        else numbers_of("wants", "floating input", wants, floating)
    )


def floating_inputs(graph: Graph) -> dict[str, int]:
    """The floating inputs, and the constants among the others, which are refused by name."""
    constants = graph.constants
    pairs = enumerate(graph.inputs)
    return {i.name: n for n, i in pairs if i.spec.dtype in FLOATS or n in constants}


def refuse_constants(graph: Graph, numbers: Iterable[int], who: str) -> None:
    """Raise GraphError if derivatives by constants are wanted."""
    if own := sorted(graph.constants & {*numbers}):
        names = [graph.inputs[n].name for n in own]
        raise GraphError(
            f"{who}: no derivative by {', '.join(names)}: quantised tensors, scales, and tensors "
            "that a modifier reads and does not name in `trains` are constants; pass "
            f"{', '.join(f'{name}.detach()' for name in names)}, and multiply q by trained factors"
        )


def numbers_of(
    option: str, kind: str, names: Sequence[str], known: Mapping[str, int], who: str = "vjp"
) -> tuple[int, ...]:
    """The numbers of values by name. Raises GraphError for unknown names.

    kind: a word for these values. who: the function that has the option.
    """
    if isinstance(names, str):
        raise GraphError(f"{option} {show(names)} is one name; write ({show(names)},)")
    if not isinstance(names, Iterable):
        raise GraphError(
            f"{option} {show(names)} is not a sequence of names; there are {', '.join(known)}"
        )
    several = tuple(names)
    if unknown := [name for name in several if not isinstance(name, str) or name not in known]:
        strangers = ", ".join(n if isinstance(n, str) else show(n) for n in unknown)
        raise GraphError(f"{who}: no {kind} is named {strangers}; there are {', '.join(known)}")
    return tuple(known[name] for name in several)


def check_gradient(graph: Graph) -> None:
    if graph.gradient_problems:
        raise GraphError(*graph.gradient_problems)


def check_cotangents(graph: Graph, cotangents: Sequence[TensorSpec | None]) -> None:
    """Raise GraphError for a cotangent of an output without a gradient."""
    known = graph.differentiable_outputs
    given = [i for i, x in zip(graph.outputs, cotangents, strict=True) if x is not None]
    if refused := [i for i in given if i not in known]:
        names = value_names(graph)
        raise GraphError(*[ops.no_gradient(names[i]) for i in refused])


def main_outputs(graph: Graph) -> tuple[int, ...]:
    """The outputs differentiated by a usual training step: all but lse, or lse alone."""
    usual, stats = graph.differentiable_outputs, statistics(graph)
    return tuple(i for i in usual if i not in stats) or usual


def training_gradient(
    graph: Graph, wants: tuple[str, ...] | None = None, *, through_lse: bool = False
) -> Graph:
    """The backward of a simplified graph in a training step: by `main_outputs`.

    through_lse: True for every possible output instead.
    """
    given = graph.differentiable_outputs if through_lse else main_outputs(graph)
    return backward(graph, wanted_inputs(graph, wants), cotangent_specs(graph, given))


def cotangent_specs(graph: Graph, given: Container[int]) -> list[TensorSpec | None]:
    pairs = zip(graph.outputs, output_specs(graph), strict=True)
    return [spec if i in given else None for i, spec in pairs]


def residuals(graph: Graph) -> tuple[int, ...]:
    """The values of a fused graph that its backward reads instead of recomputing.

    Of an attention o and lse, and other statistics if an equation reads them.
    """
    read = {i for eqn in graph.eqns if not eqn.op.is_view for i in eqn.args}
    kept: list[int] = []
    for eqn, outs in graph.numbered:
        if saved := eqn.op.saved:
            named = zip(eqn.op.names, outs, strict=True)
            kept += [i for name, i in named if name in saved or i in read]
    return tuple(kept)


def value_names(graph: Graph) -> dict[int, str]:
    """A distinct name for each value of an equation; `d` before it is distinct too.

    Views, the outputs of mapped graphs, choose first, and o in 8 bits.
    """
    taken = {i.name for i in graph.inputs}
    names = {}
    for eqn, outs in sorted(graph.numbered, key=lambda numbered: not gives_outputs(numbered[0].op)):
        for base, i in zip(eqn.op.names, outs, strict=True):
            tries = (base if n == 1 else f"{base}{n}" for n in range(1, len(taken) + 2))
            names[i] = next(name for name in tries if not {name, f"d{name}"} & taken)
            taken |= {names[i], f"d{names[i]}"}
    return names


def gives_outputs(op: Op) -> bool:
    """True if an op makes outputs of results that are then values within the graph."""
    return op.is_view or isinstance(op, Quantise)


def output_names(graph: Graph) -> list[str]:
    names = {n: i.name for n, i in enumerate(graph.inputs)} | value_names(graph)
    return [names[i] for i in graph.outputs]


def lay_out(graph: Graph, outputs: Layouts) -> Graph:
    """The graph with declared memory layouts of outputs, by name.

    A layout is a TensorSpec with the output's shape, dtype and any strides that give each element a
    place, or an order of axes such as "bshd". Other outputs keep theirs: by default o lies in the
    memory order of q, gradients in that of their inputs, all else in C order.

    Outputs are named as in `plan(out=)`: o, lse and other statistics, dq, dk, dv and other
    gradients, the t and the name for tangents. The layouts are part of the graph's value and text.
    Backends write there directly, or in one more copy, as `explain` says.

        >>> lay_out(graph, {"o": "bshd", "lse": TensorSpec((2, 8, 64), torch.float32, (512, 1, 8))})

    Raises GraphError with every problem.
    """
    check_graph(graph, "lay_out")
    return lay_named(graph, output_names(simplify(graph)), outputs)


def lay_named(graph: Graph, names: Sequence[str], outputs: Layouts) -> Graph:
    """`lay_out` of outputs with these names."""
    require_layouts(outputs)
    numbers_of("outputs", "output", [*outputs], dict.fromkeys(names, 0), "lay_out")
    pairs = zip(names, graph.output_types, graph.declared_outputs, strict=True)
    specs = [as_layout(n, outputs[n], t) if n in outputs else due for n, t, due in pairs]
    known = {*graph.symbols}
    if problems := [
        text
        for name, spec in zip(names, specs, strict=True)
        if name in outputs and spec is not None
        for text in layout_problems(name, spec, known)
    ]:
        raise GraphError(*problems)
    return evolve(graph, layouts=tuple(x and x.strides for x in specs) if any(specs) else ())


def require_no_layouts(graph: Graph, who: str) -> None:
    """Raise GraphError for a graph with declared layouts. who: the function for the message."""
    if graph.layouts:
        raise GraphError(
            f"{who}: the graph declares layouts of outputs, and the results of {who} lie in their "
            "own; declare none"
        )


def as_layout(name: str, layout: TensorSpec | str, due: ValueType) -> TensorSpec:
    """A layout of an output of type `due` as a spec. Raises GraphError for another type."""
    if isinstance(layout, str):
        return TensorSpec(due.shape, due.dtype, layout=layout)
    if layout.type != due:
        raise GraphError(f"lay_out: {name} is {due}, and its layout is for {layout.type}")
    return layout


def layout_problems(name: str, spec: TensorSpec, known: Container[NamedSize]) -> Iterator[str]:
    """Why results can't lie so. known: the graph's named sizes."""
    symbols = [symbol for dim in spec.dims for symbol in dim.symbols]
    if strange := [symbol.name for symbol in symbols if symbol not in known]:
        yield f"lay_out: {name} {spec} has {strange[0]}, which is not a size of the graph"
        return
    most = spec.bind({symbol.name: symbol.most for symbol in symbols})
    if overlaps_itself(torch.empty_strided(most.shape, most.strides, device="meta")):
        yield f"lay_out: {name} {spec} has elements in one place; give each a place of its own"


def saved_specs(graph: Graph) -> dict[str, TensorSpec]:
    """The specs of a backward's operands, except cotangents, by name."""
    names = value_names(graph)
    return {i.name: i.spec for i in graph.inputs} | {
        names[i]: result_spec(graph, i) for i in residuals(graph)
    }


def saved_statistics(graph: Graph) -> list[str]:
    names, known = value_names(graph), statistics(graph)
    return [names[i] for i in residuals(graph) if i in known]


def backward(
    graph: Graph,
    wants: Sequence[int],
    cotangents: Sequence[TensorSpec | None],
    saved: Sequence[TensorSpec] | None = None,
) -> Graph:
    """The backward of a simplified graph for some inputs; a missing cotangent is zero.

    saved: the specs of the inputs and residuals, if they differ from the declared ones. Raises
    GraphError for a graph without a gradient, and for a cotangent of an output without one.
    """
    check_gradient(graph)
    refuse_constants(graph, wants, "vjp")
    check_cotangents(graph, cotangents)
    b, types, names = Builder(), graph.types, value_names(graph)
    declared = saved_specs(graph)
    specs = [*declared.values()] if saved is None else saved
    numbers = (*range(len(graph.inputs)), *residuals(graph))
    values = {
        n: b.input(name, spec) for n, name, spec in zip(numbers, declared, specs, strict=True)
    }
    grads: dict[int, Value] = {}
    for i, spec in zip(graph.outputs, cotangents, strict=True):
        if spec is not None:
            grads[i] = b.input(f"d{names[i]}", spec)
    for eqn, outs in graph.numbered:
        lost = eqn.op.is_view and eqn.args[0] not in values  # a statistic that is not saved
        if values.keys().isdisjoint(outs) and not lost:
            values.update(zip(outs, b.emit(eqn.op, *(values[i] for i in eqn.args)), strict=True))
    for eqn, outs in reversed(graph.numbered):
        if any(i in grads for i in outs):
            operands, results = ([values.get(i) for i in x] for x in (eqn.args, outs))
            pulled = eqn.op.pull(b.emit, operands, results, [grads.get(i) for i in outs])
            for i, grad in zip(eqn.args, pulled, strict=True):
                if grad is not None:
                    grads[i] = grads[i].then(Add(), grad) if i in grads else grad
    outputs = [grads[i] if i in grads else b.emit(Zeros.like(types[i]))[0] for i in wants]
    due = [dense_like(specs[i]) for i in wants]
    return lay_as_inputs(narrow(prune(b.graph(*outputs))), due)


def lay_as_inputs(graph: Graph, due: Sequence[TensorSpec]) -> Graph:
    """A backward graph that declares the layouts of gradients which would lie otherwise than is
    due: where a sum or a single step gives them."""
    pairs = zip(output_specs(graph), due, strict=True)
    lies = tuple(None if own == spec else spec.strides for own, spec in pairs)
    return evolve(graph, layouts=lies) if any(lies) else graph
