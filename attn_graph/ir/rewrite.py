"""Rebuild a graph equation by equation: what passes are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph

Rule = Callable[[Builder, Eqn, tuple[Value, ...]], "Sequence[Value] | None"]


def replay(graph: Graph, rule: Rule) -> Graph:
    """Rebuild `graph`: `rule` may replace an equation; where it returns None, it is copied."""
    b = Builder(trusts=True)
    values = [b.input(i.name, i.spec) for i in graph.inputs]
    for eqn in graph.eqns:
        operands = tuple(values[i] for i in eqn.args)
        values += rule(b, eqn, operands) or b.emit(eqn.op, *operands)
    return prune(b.graph(*(values[i] for i in graph.outputs)))


def prune(graph: Graph) -> Graph:
    """Rebuild `graph` without the equations that no output needs."""
    live, needed = set(graph.outputs), True
    for eqn, outs in reversed([*graph.numbered()]):
        if live.isdisjoint(outs):
            needed = False
        else:
            live.update(eqn.args)
    if needed:
        return graph
    b = Builder(trusts=True)
    values = {n: b.input(i.name, i.spec) for n, i in enumerate(graph.inputs)}
    for eqn, outs in graph.numbered():
        if not live.isdisjoint(outs):
            values.update(zip(outs, b.emit(eqn.op, *(values[i] for i in eqn.args)), strict=True))
    return b.graph(*(values[i] for i in graph.outputs))
