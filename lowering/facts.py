"""What backends ask about a graph, each answer worked out once."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

from attrs import field, frozen

from attn_graph.ir.graph import Graph, check_graph
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.problem import Problem, find_problem
from attn_graph.machine.cache import Remembers, remember


@final
@frozen
class Facts(Remembers):
    """A graph after all passes, as backends see it. Equal graphs share one record."""

    graph: Graph
    answers: dict[tuple[object, ...], Any] = field(factory=dict, init=False, eq=False, repr=False)

    @cached_property
    def problem(self) -> Problem | None:
        """The one attention of the graph, or the one gradient; None of other graphs."""
        return find_problem(self.graph)

    def gradient(self, wants: tuple[str, ...] | None, *, through_lse: bool = False) -> Graph:
        """The graph of a training step's gradient."""
        return self.once(derive_gradient, wants, through_lse)


def derive_gradient(facts: Facts, wants: tuple[str, ...] | None, through_lse: bool) -> Graph:
    return training_gradient(facts.graph, wants, through_lse=through_lse)


@remember
def facts_of(graph: Graph) -> Facts:
    return Facts(graph)


def sole(graph: Graph) -> Problem | None:
    """The problem of a graph that is one attention, or one attention's gradient; None of others."""
    check_graph(graph, "sole")
    return facts_of(graph).problem
