"""Runs graphs with named sizes, for tensors of any sizes.

The backend is chosen once, for the largest sizes. If one of its executables runs all sizes, that
one is built, once. Else each size runs as a graph of numbers, in the same backend if it supports
it, and some are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import NoBackendError
from attn_graph.ir.graph import Graph
from attn_graph.ir.transforms.binding import bind_graph, largest, many_sizes, require_readable
from attn_graph.lowering.backend import Backend, Executable, Tensors, Write, places_to_lay
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.cache import latest
from attn_graph.machine.fitting import Fit, Shape
from attn_graph.planner.choose import BACKENDS, Choice, choose, choose_and_lower, permitted_backends
from attn_graph.planner.forms.views import core_of, lower_graph, peel
from attn_graph.spec.dims import Sizes

MOST_SIZES = 64  # a plan keeps an executable for each


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

    request: Request
    fit: Fit
    most: Bound
    whole: Executable | None
    at: Callable[[Shape], Bound] = field(init=False, default=latest("plan_size", MOST_SIZES))

    @classmethod
    def of(cls, request: Request) -> Sized:
        """Choose the backend of a graph. Raises GraphError for sizes absent from every tensor's
        shape, NoBackendError if all backends refuse the largest sizes."""
        require_readable(request.graph)
        graph = request.graph
        resized = request.with_options(resized=many_sizes(graph))
        specs = {i.name: i.spec for i in graph.inputs}
        fit = Fit.of(specs, graph.symbols, request.target)
        most = lower_bound(resized, largest(graph))
        whole = None
        backend = most.choice.backend
        if peel(graph) is None and not places_to_lay(graph, backend.seen(graph)):
            with neutral_state(), request.target.current():
                whole = backend.lower_any(resized.with_graph(backend.seen(graph)))
        return cls(resized, fit, most, whole)

    @property
    def executable(self) -> Executable:
        """An executable for tensors of any sizes. Its needs are those of the largest."""
        most = self.most.executable
        notes = (*most.notes, self.note)
        write = most.write and self.write
        fix = self.fix if write and self.whole and self.whole.fix else None
        return evolve(most, run=self.run, infer=self.infer, write=write, fix=fix, notes=notes)

    @property
    def note(self) -> str:
        """For `explain`: the treatment of sizes."""
        names = ", ".join(symbol.name for symbol in self.request.graph.symbols)
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

    def fix(self, given: Mapping[int, torch.Tensor]) -> Write:
        """`write` for calls with inputs given in advance, by number."""
        assert self.whole is not None
        assert self.whole.fix is not None
        known, read = self.whole.fix(given), self.fit.read

        def write(rooms: Tensors, *tensors: torch.Tensor) -> Tensors:
            return (self.write if 0 in read(tensors) else known)(rooms, *tensors)

        return write

    def plan_size(self, sizes: Shape) -> Bound:
        """Plan some sizes: in the backend of the largest, or in another if it refuses."""
        named, first = self.fit.named(sizes), self.most.choice.backend
        try:
            return lower_bound(evolve(self.quiet, among=(first,)), named)
        except NoBackendError:
            return lower_bound(evolve(self.request, among=self.ordered(first)), named)

    @property
    def quiet(self) -> Request:
        """The request without a report of a fallback: that was reported for the largest sizes."""
        return self.request.with_options(on_fallback="ignore")

    def ordered(self, first: Backend) -> tuple[Backend, ...]:
        """All permitted backends, this one first."""
        return (first, *(b for b in permitted_backends(self.request) or BACKENDS if b is not first))

    def choice_of(self, bound: Bound) -> Choice:
        """The choice for some sizes, with the other backends' support and refusals."""
        ordered = evolve(self.quiet, among=self.ordered(bound.choice.backend))
        with neutral_state():
            return choose(ordered.with_graph(core_of(bound.graph)))


def lower_bound(request: Request, sizes: Sizes) -> Bound:
    exact = bind_graph(request.graph, sizes)
    return Bound(exact, *lower_graph(request.with_graph(exact), choose_and_lower))
