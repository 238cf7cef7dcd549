"""A hint, logged once, for plans built again and again: it names the varying inputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import final

from attrs import define, field

from attn_graph.ir import ops
from attn_graph.ir.graph import Graph, Input, op_name
from attn_graph.masks.joins import leaf_classes

MANY = 64  # plans of one kind before the hint is logged
COSTLY = 1.0  # and the seconds they took: some plans for CPUs take a millisecond
MOST_KINDS = 64  # kinds of graphs counted at one time
WAY_OUT = (
    "Declare what varies as a Dim, and one plan does; or pad to few sizes and pass what is real as "
    "kv_lengths and q_lengths, and few do"
)

logger = logging.getLogger("attn_graph")

Kind = tuple[object, ...]  # of graphs: steps and inputs without sizes


@final
@define(eq=False)
class Builds:
    """Builds of one kind. last: the graphs of the last MANY."""

    count: int = 0
    seconds: float = 0.0
    last: deque[Graph] = field(factory=lambda: deque(maxlen=MANY))

    def add(self, graph: Graph, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.last.append(graph)

    def hint(self) -> str:
        """The inputs varying among these graphs, and the way to plan once."""
        columns = zip(*(graph.inputs for graph in self.last), strict=True)
        varying = [text for inputs in columns for text in describe_variation(inputs)]
        if not varying:
            steps = zip(*(graph.eqns for graph in self.last), strict=True)
            own = (eqns[0].op for eqns in steps if len({eqn.op for eqn in eqns}) > 1)
            varying = [f"the numbers of {op_name(type(op))}" for op in own]
        what = ", ".join(varying) or "an option"
        took = f"{self.count} plans were built in {self.seconds:.1f} s"
        return f"{took} that differ only in {what}. {WAY_OUT}"


@final
@define(eq=False)
class BuildLog:
    """Builds by kind of graph, until one kind has many that took long and the hint is logged.

    Threads may count a build twice or not at all.
    """

    kinds: dict[Kind, Builds] = field(factory=dict)
    silent: bool = False

    def add(self, graph: Graph, seconds: float) -> None:
        """Count a build, and log the hint if it is one too many of its kind."""
        if self.silent:
            return
        if len(self.kinds) >= MOST_KINDS:
            self.kinds.clear()
        builds = self.kinds.setdefault(kind_of(graph), Builds())
        builds.add(graph, seconds)
        if builds.count >= MANY and builds.seconds >= COSTLY:
            self.silent = True
            self.kinds.clear()
            logger.warning("%s", builds.hint())

    def clear(self) -> None:
        """Forget all counts; the hint may be logged again."""
        self.kinds.clear()
        self.silent = False


def kind_of(graph: Graph) -> Kind:
    """A key shared by graphs that differ only in sizes, strides and numbers."""
    names = tuple((i.name, i.spec.dtype, len(i.spec.shape)) for i in graph.inputs)
    return names, tuple([eqn.op.__class__ for eqn in graph.eqns])


def skeleton_of(graph: Graph) -> Kind:
    """A key shared by graphs that differ only in lengths and batches and in the consequences of
    these. A growing cache of plans has one skeleton."""
    heads = graph.inputs[0].spec.shape[1::2] if graph.inputs else ()
    nodes = [eqn.op if isinstance(eqn.op, ops.Mask) else eqn.op.attention for eqn in graph.eqns]
    masks = [node.mask for node in nodes if node is not None and node.mask is not None]
    return *kind_of(graph), heads, tuple([kind for mask in masks for kind in leaf_classes(mask)])


def describe_variation(inputs: Sequence[Input]) -> Iterator[str]:
    """The input's shape with a * for each size that varies, or its strides if they vary."""
    sizes = [set(each) for each in zip(*(i.spec.shape for i in inputs), strict=True)]
    if any(len(each) > 1 for each in sizes):
        text = ", ".join("*" if len(each) > 1 else str(*each) for each in sizes)
        yield f"{inputs[0].name} [{text}]"
    elif len({i.spec.strides for i in inputs}) > 1:
        yield f"the strides of {inputs[0].name}"
