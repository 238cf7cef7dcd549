"""The results of the operators, from a text."""

from __future__ import annotations

from typing import final

from attrs import frozen

from attn_graph.errors import GraphError
from attn_graph.ir.arguments import statistic_names
from attn_graph.ir.attention import SAVED
from attn_graph.ir.graph import Graph
from attn_graph.ir.scaling import O_SCALE
from attn_graph.ir.vjp import residuals
from attn_graph.machine.cache import remember
from attn_graph.planner.content import CallContent, PlanContent, read_content


@final
@frozen
class Results:
    """The results of `attention`: those of a call, then further residuals of the backward.

    count: the results of a call. saved: the places of the residuals. constants: the places of
    results without a gradient. names: of all results of a call without a plan. graph: of a plan.
    """

    count: int
    saved: tuple[int, ...]
    constants: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    graph: Graph | None = None

    @classmethod
    def of_graph(cls, graph: Graph) -> Results:
        known, outputs = graph.differentiable_outputs, graph.outputs
        kept = residuals(graph)
        every = outputs + tuple(i for i in kept if i not in outputs)
        constants = tuple(place for place, i in enumerate(outputs) if i not in known)
        return cls(len(outputs), tuple(map(every.index, kept)), constants, graph=graph)

    @classmethod
    def of_call(cls, content: CallContent) -> Results:
        narrow = O_SCALE in content.names
        names = ("o", *statistic_names(content.stats), *(("amax",) if narrow else ()))
        saved = ("wide", "lse") if narrow else SAVED
        every = (*names, *(name for name in saved if name not in names))
        constants = tuple(place for place, name in enumerate(names) if name == "max")
        return cls(len(names), tuple(map(every.index, saved)), constants, every)


@remember
def results_of(text: str) -> Results:
    content = read_content(text)
    if isinstance(content, CallContent):
        return Results.of_call(content)
    return Results.of_graph(content.restore()[0])


def restore_graph(text: str) -> Graph:
    """The graph of a plan."""
    graph = results_of(text).graph
    assert graph is not None
    return graph


def names_of_inputs(text: str) -> tuple[str, ...]:
    content = read_content(text)
    if isinstance(content, CallContent):
        return content.inputs
    return tuple(i.name for i in restore_graph(text).inputs)


def require_count(text: str, count: int) -> None:
    """Raise GraphError for a number of tensors that differs from the text's."""
    names = names_of_inputs(text)
    if count != len(names):
        raise GraphError(f"the text reads {len(names)} tensors, {', '.join(names)}; got {count}")


def is_plan(text: str) -> bool:
    """True for the text of a plan, False for that of a call without one."""
    return isinstance(read_content(text), PlanContent)
