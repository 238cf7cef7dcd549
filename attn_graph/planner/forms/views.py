"""Graphs split into views and a core: backends see the core of a mapped graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TypeVar, final

import torch
from attrs import evolve, frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Eqn, Graph, Input, Op
from attn_graph.ir.layouts import statistics, value_spec
from attn_graph.ir.storage.packed import with_operands
from attn_graph.ir.storage.views import VIEW_OPS, VIEWS, Leading, equation_of
from attn_graph.ir.transforms.sums import Zeros
from attn_graph.lowering.backend import (
    Executable,
    Foreseen,
    Tensors,
    Write,
    add_copies,
    lay_out_results,
)
from attn_graph.lowering.problem import Facts, facts_of
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import neutral_state, plain_ops_on
from attn_graph.machine.sizes import format_bytes

T = TypeVar("T")
Run = Callable[..., tuple[Tensors, Tensors]]
Numbered = tuple[Eqn, range]


@final
@frozen(eq=False)
class Peeled:
    """A graph in three parts: views of its inputs, a core of whole attentions, views of results.

    ahead, behind: the equations around the core. sources: the values of the core's inputs; results:
    those of its outputs.
    """

    graph: Graph
    core: Graph
    ahead: tuple[Numbered, ...]
    behind: tuple[Numbered, ...]
    sources: tuple[int, ...]
    results: tuple[int, ...]

    def run(self, run: Run, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The graph's outputs, by a function to run the core."""
        device = tensors[0].device if tensors else torch.device("cpu")
        with torch.no_grad(), plain_ops_on(device):
            values = self.enter(dict(enumerate(tensors)))
        outputs, saved = run(*(values[i] for i in self.sources))
        values |= zip(self.results, outputs, strict=True)
        with torch.no_grad(), plain_ops_on(device):
            for eqn, outs in self.behind:
                values |= zip(outs, eqn.op.run(*(values[i] for i in eqn.args)), strict=True)
            outputs = [values[i].clone() if again else values[i] for i, again, _ in self.exits]
        return [
            x.contiguous() if flat else x for x, (*_, flat) in zip(outputs, self.exits, strict=True)
        ], saved

    @property
    def writes(self) -> bool:
        """True if the core writes the graph's outputs."""
        return self.results == self.graph.outputs

    def write(self, write: Write, rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
        """The outputs in the caller's tensors, by a function that writes those of the core."""
        with torch.no_grad(), plain_ops_on(rooms[0].device):
            values = self.enter(dict(enumerate(tensors)))
        return write(rooms, *(values[i] for i in self.sources))

    def view(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some inputs by name, viewed for the core; inputs outside the core stay as they are."""
        numbers = {i.name: n for n, i in enumerate(self.graph.inputs)}
        known = self.enter({numbers[name]: x for name, x in tensors.items() if name in numbers})
        named = {i.name: n for n, i in zip(self.sources, self.core.inputs, strict=True)}
        return {name: known.get(named.get(name, -1), x) for name, x in tensors.items()}

    def enter(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The values, and the core's views of them; absent values have none."""
        known = dict(values)
        for eqn, outs in self.ahead:
            if eqn.args[0] in known:
                known[outs[0]] = eqn.op.run(known[eqn.args[0]])[0]
        return known

    @cached_property
    def cloned(self) -> dict[int, int]:
        """Bytes of the outputs that view other outputs, by value: each gets its own memory."""
        graph = self.graph
        return {
            outs[0]: eqn.outs[0].bytes
            for eqn, outs in self.behind
            if eqn.op.is_view and outs[0] in graph.outputs and eqn.args[0] in graph.outputs
        }

    @cached_property
    def exits(self) -> tuple[tuple[int, bool, bool], ...]:
        """Each output; True if it is cloned; True if it is put in C order, as statistics are."""
        stats = statistics(self.graph)
        return tuple((i, i in self.cloned, i in stats) for i in self.graph.outputs)

    def wrap(self, executable: Executable) -> Executable:
        """An executable of the graph, from one of the core."""
        write = executable.write
        made = evolve(
            executable,
            run=partial(self.run, executable.run),
            infer=partial(self.run, executable.infer),
            write=partial(self.write, write) if write and self.writes else None,
            fix=None,
            writes_anywhere=self.writes and executable.writes_anywhere,
            copies_out=executable.copies_out or not self.writes,
            temporary=executable.temporary + self.temporary,
            notes=(*executable.notes, *self.notes()),
        )
        return lay_out_results(made, self.graph, self.seen)

    def foresee(self, foreseen: Foreseen) -> Foreseen:
        """The needs of the graph, from the core's."""
        notes = (*foreseen.notes, *self.notes())
        temporary = foreseen.temporary + self.temporary
        copies = foreseen.copies_out or not self.writes
        needs = evolve(foreseen, temporary=temporary, notes=notes, copies_out=copies)
        return add_copies(needs, self.graph, self.seen)

    @property
    def seen(self) -> Graph:
        """The graph with no more layouts than its core has."""
        return evolve(self.graph, layouts=seen_layouts(self.graph, self.results))

    @cached_property
    def copies(self) -> dict[str, int]:
        """Bytes of the inputs that must be copied because no view fits the core, by name."""
        graph = self.graph
        return {
            graph.inputs[eqn.args[0]].name: eqn.outs[0].bytes
            for eqn, _ in self.ahead
            if eqn.args[0] < len(graph.inputs)
            and isinstance(eqn.op, VIEWS)
            and eqn.op.view(graph.inputs[eqn.args[0]].spec) is None
        }

    @property
    def temporary(self) -> int:
        """Bytes of copies, and of results from which others are made."""
        made = [eqn.outs[0].bytes for eqn, _ in self.behind if not eqn.op.is_view]
        return sum((*self.copies.values(), *made, *self.cloned.values()))

    def notes(self) -> Iterator[str]:
        """For `explain`: the inputs seen in another shape, and the copies for it."""
        types = self.graph.types
        for source, own in zip(self.sources, self.core.inputs, strict=True):
            if source >= len(self.graph.inputs) and own.name == "q":
                given = next(i.spec for i in self.graph.inputs if i.name == own.name)
                yield f"{own.name} {given.type} is seen as {types[source]}, and others likewise"
        for name, count in self.copies.items():
            yield f"{name} is copied, {format_bytes(count)}, where its mapped axis lies apart"


def core_of(graph: Graph) -> Graph:
    """The graph as backends see it."""
    peeled = peel(graph)
    return graph if peeled is None else peeled.core


def lower_graph(
    request: Request,
    chooses: Callable[[Request], tuple[T, Executable]],
) -> tuple[T, Executable]:
    """The choice and executable of a simplified graph. chooses: picks a backend and lowers it."""
    peeled = peel(request.graph)
    core = request if peeled is None else request.with_graph(peeled.core)
    with neutral_state(), request.target.current():
        choice, executable = chooses(core)
    return choice, executable if peeled is None else peeled.wrap(executable)


def peel(graph: Graph) -> Peeled | None:
    """A graph in parts; None without views, or if attentions read views of results."""
    if not any(isinstance(eqn.op, VIEW_OPS) for eqn in graph.eqns):
        return None
    return facts_of(graph).once(peel_views)


def peel_views(facts: Facts) -> Peeled | None:
    """The equations that view inputs, the core, and the equations that read its results."""
    graph = facts.graph
    ahead: list[Numbered] = []
    core: list[Numbered] = []
    behind: list[Numbered] = []
    early, late = {*range(len(graph.inputs))}, set[int]()
    for eqn, outs in graph.numbered:
        if isinstance(eqn.op, VIEWS) and eqn.args[0] in early:
            ahead.append((eqn, outs))
            early |= {*outs}
        elif isinstance(eqn.op, (*VIEW_OPS, Zeros)) or not late.isdisjoint(eqn.args):
            behind.append((eqn, outs))
            late |= {*outs}
        else:
            core.append((eqn, outs))
    if any(eqn.op.attention for eqn, _ in behind) or not core:
        return None
    return assemble(graph, tuple(ahead), tuple(core), tuple(behind))


def assemble(
    graph: Graph,
    ahead: tuple[Numbered, ...],
    core: tuple[Numbered, ...],
    behind: tuple[Numbered, ...],
) -> Peeled | None:
    """The parts as one; None if an input is seen in two ways."""
    own = {i for _, outs in core for i in outs}
    sources = [*dict.fromkeys(i for eqn, _ in core for i in eqn.args if i not in own)]
    needed = {*graph.outputs, *(i for eqn, _ in behind for i in eqn.args)}
    results = sorted(own & needed)
    numbers = {i: n for n, i in enumerate(sources)}
    inputs = []
    for i in sources:
        inputs.append(Input(name_of(graph, i), value_spec(graph, i)))
    if len({i.name for i in inputs}) < len(inputs):
        return None
    eqns = []
    for eqn, outs in core:
        op = with_values_in_keys(graph, eqn)
        eqns.append(evolve(eqn, op=op, args=tuple(numbers[i] for i in eqn.args)))
        numbers |= {i: len(numbers) + n for n, i in enumerate(outs)}
    lies = dict(zip(graph.outputs, seen_layouts(graph, results), strict=False))
    layouts = tuple(lies.get(i) for i in results) if any(lies.values()) else ()
    inner = Graph(tuple(inputs), tuple(eqns), tuple(numbers[i] for i in results), layouts)
    return Peeled(graph, inner, ahead, behind, tuple(sources), tuple(results))


def name_of(graph: Graph, i: int) -> str:
    """The name of an input, of the one that a value is a view of, or of values within it."""
    eqn = equation_of(graph, i)
    if eqn is None:
        return graph.inputs[i].name
    return eqn.op.names[0] if isinstance(eqn.op, Leading) else name_of(graph, eqn.args[0])


def with_values_in_keys(graph: Graph, eqn: Eqn) -> Op:
    """The op of an equation; an attention knows then whether its values begin its keys."""
    node: Attention | None = eqn.op.forward
    view = equation_of(graph, eqn.args[2]) if node else None
    if not node or not view or not isinstance(view.op, Leading) or view.args[0] != eqn.args[1]:
        return eqn.op
    op: Op = with_operands(eqn.op, evolve(node, v_in_k=True), ())
    return op


def seen_layouts(graph: Graph, results: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
    """The layouts declared for results of the core, which it gives as they are: no statistics."""
    own = {*results} - statistics(graph)
    pairs = zip(graph.outputs, graph.layouts, strict=False)  # mostly there are no layouts
    layouts = tuple(strides if i in own else None for i, strides in pairs)
    return layouts if any(layouts) else ()
