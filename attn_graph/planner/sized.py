"""Runs graphs with named sizes, for tensors of any sizes.

The backend is chosen once, for the largest sizes. If one of its executables runs all sizes, that
one is built, once. Else each size runs as a graph of numbers, in the same backend if it supports
it, and some are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.errors import NoBackendError
from attn_graph.ir.binding import bind_graph, largest, require_readable
from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import Backend, Executable, Options, Tensors, places_to_lay
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.fitting import Fit, Shape
from attn_graph.machine.target import Target
from attn_graph.planner.choose import BACKENDS, Choice, choose, choose_and_lower
from attn_graph.planner.views import core_of, peel
from attn_graph.spec.dims import Sizes

MOST_SIZES = 64  # a plan keeps an executable for each
Among = Sequence[Backend] | None


@final
@frozen(eq=False)
class Bound:
    """A graph in numbers, its backend, and its executable."""

    graph: Graph
    choice: Choice
    executable: Executable


@final
@frozen(eq=False)
class Sized:
    """Runs a graph whose sizes have names.

    most: the largest sizes' graph. whole: an executable for all sizes of at least 1, if there is
    one. at: the graph of some sizes, in the order of the graph's symbols.
    """

    graph: Graph
    target: Target
    options: Options
    among: Among
    fit: Fit
    most: Bound
    whole: Executable | None
    at: Callable[[Shape], Bound] = field(
        init=False,
        default=Factory(lambda sized: lru_cache(MOST_SIZES)(sized.plan_size), takes_self=True),
    )

    @classmethod
    def of(cls, graph: Graph, target: Target, options: Options, among: Among) -> Sized:
        """Choose the backend of a graph. Raises GraphError for sizes absent from every tensor's
        shape, NoBackendError if all backends refuse the largest sizes."""
        require_readable(graph)
        options = evolve(options, resized=many_sizes(graph))
        specs = {i.name: i.spec for i in graph.inputs}
        fit = Fit.of(specs, graph.symbols, target)
        most = lower_bound(graph, largest(graph), target, options, among)
        whole = None
        backend = most.choice.backend
        if peel(graph) is None and not places_to_lay(graph, backend.seen(graph)):
            with neutral_state(), target.current():
                whole = backend.lower_any(backend.seen(graph), target, options)
        return cls(graph, target, options, among, fit, most, whole)

    @property
    def executable(self) -> Executable:
        """An executable for tensors of any sizes. Its needs are those of the largest."""
        most = self.most.executable
        notes = (*most.notes, self.note)
        write = most.write and self.write
        return evolve(most, run=self.run, infer=self.infer, write=write, notes=notes)

    @property
    def note(self) -> str:
        """For `explain`: the treatment of sizes."""
        names = ", ".join(symbol.name for symbol in self.graph.symbols)
        how = "all in one executable" if self.whole else "each as a graph of its own"
        return f"{names} are sizes of the call, {how}"

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        sizes, whole = self.fit.read(tensors), self.whole
        return (whole if whole and 0 not in sizes else self.at(sizes).executable).run(*tensors)

    def infer(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        sizes, whole = self.fit.read(tensors), self.whole
        return (whole if whole and 0 not in sizes else self.at(sizes).executable).infer(*tensors)

    def write(self, rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
        sizes, whole = self.fit.read(tensors), self.whole
        executable = whole if whole and 0 not in sizes else self.at(sizes).executable
        return executable.place(rooms, tensors)

    def plan_size(self, sizes: Shape) -> Bound:
        """Plan some sizes: in the backend of the largest, or in another if it refuses."""
        named, first = self.fit.named(sizes), self.most.choice.backend
        try:
            return lower_bound(self.graph, named, self.target, self.quiet, (first,))
        except NoBackendError:
            return lower_bound(self.graph, named, self.target, self.options, self.ordered(first))

    @property
    def quiet(self) -> Options:
        """Options that do not report a fallback: it was reported for the largest sizes."""
        return evolve(self.options, on_fallback="ignore")

    def ordered(self, first: Backend) -> tuple[Backend, ...]:
        """All permitted backends, this one first."""
        others = BACKENDS if self.among is None else self.among
        return (first, *(b for b in others if b is not first))

    def choice_of(self, bound: Bound) -> Choice:
        """The choice for some sizes, with the other backends' support and refusals."""
        among = self.ordered(bound.choice.backend)
        with neutral_state():
            return choose(core_of(bound.graph), self.target, self.quiet, among)


def many_sizes(graph: Graph) -> bool:
    """True if a plan of the graph meets too many sizes to build each."""
    return any(not symbol.classes for symbol in graph.symbols)


def lower_bound(
    graph: Graph, sizes: Sizes, target: Target, options: Options, among: Among
) -> Bound:
    exact = bind_graph(graph, sizes)
    return Bound(exact, *lower_graph(exact, target, options, among, choose_and_lower))


def lower_graph(
    graph: Graph,
    target: Target,
    options: Options,
    among: Among,
    chooses: Callable[..., tuple[Choice, Executable]],
) -> tuple[Choice, Executable]:
    """The choice and executable of a simplified graph. chooses: picks a backend and lowers it."""
    peeled = peel(graph)
    with neutral_state(), target.current():
        choice, executable = chooses(
            graph if peeled is None else peeled.core, target, options, among
        )
    return choice, executable if peeled is None else peeled.wrap(executable)
