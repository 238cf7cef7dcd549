"""Rebuild a graph equation by equation, for passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from attrs import define, evolve, field

from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph, Op

Rule = Callable[[Builder, Eqn, tuple[Value, ...]], "Sequence[Value] | None"]


@final
@define(eq=False)
class Copy:
    """A graph under construction from values of another graph, with their types.

    numbers: from numbers of values there to numbers here.
    """

    graph: Graph
    eqns: list[Eqn] = field(factory=list)
    numbers: dict[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.numbers = {n: n for n in range(len(self.graph.inputs))}

    def add(self, op: Op, args: Iterable[int], outs: Sequence[int]) -> None:
        """Add an equation. args, outs: numbers of its operands and results in the other graph."""
        types, numbers = self.graph.types, self.numbers
        self.eqns.append(
            Eqn(op, tuple([numbers[i] for i in args]), tuple([types[i] for i in outs]))
        )
        for i in outs:
            numbers[i] = len(numbers)

    def finish(self) -> Graph:
        outputs = tuple(self.numbers[i] for i in self.graph.outputs)
        return evolve(self.graph, eqns=tuple(self.eqns), outputs=outputs)


def replay(graph: Graph, rule: Rule) -> Graph:
    """Rebuild `graph`: `rule` may replace an equation; if it returns None, it is copied."""
    b = Builder(True, [*graph.inputs], types=[*graph.types[: len(graph.inputs)]])
    values = [Value(b, n) for n in range(len(graph.inputs))]
    for eqn in graph.eqns:
        operands = tuple([values[i] for i in eqn.args])
        values += rule(b, eqn, operands) or b.add(eqn.op, operands, eqn.outs)
    return prune(b.graph(*(values[i] for i in graph.outputs), layouts=graph.layouts))


def prune(graph: Graph) -> Graph:
    live, needed = set(graph.outputs), True
    for eqn, outs in reversed(graph.numbered):
        if live.isdisjoint(outs):
            needed = False
        else:
            live.update(eqn.args)
    if needed:
        return graph
    copy = Copy(graph)
    for eqn, outs in graph.numbered:
        if not live.isdisjoint(outs):
            copy.add(eqn.op, eqn.args, outs)
    return copy.finish()
