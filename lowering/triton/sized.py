"""Calls in any sizes: launches are planned once, and only their size-dependent parts are
recomputed.

`Flash.plan` runs with formulas in place of sizes: grids, lengths, strides of outer axes, shapes of
scratch and of results come out as formulas. A decision by a size holds for all sizes with this
outcome; other sizes have a plan apart, made on their first call. These decisions are few: one batch
entry, query or key or more, queries few enough for all heads of a group to be rows of one tile,
programs few enough for halved tiles, and the number of programs on a block's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, final

import torch
from attrs import Factory, evolve, field, frozen

from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import Options
from attn_graph.lowering.rooms import NO_ROOMS, Rooms
from attn_graph.lowering.triton.calls import Results, TritonCall
from attn_graph.lowering.triton.launches import Launch
from attn_graph.lowering.triton.layout import Layout
from attn_graph.lowering.triton.plan import Flash
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.fitting import find_reads
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Buffer
from attn_graph.spec.dims import NamedSize, bind
from attn_graph.spec.formulas import Recording, SizeBounds, follows_sizes

MOST_SIZES = 256  # kept by a plan, with their launches
MOST_RECORDINGS = 64  # kept of one plan: masks with decisions by each size make more
Shape = tuple[int, ...]
Numbers = Mapping[str, Any]  # integers, or formulas, by name
Parts = Any  # size-dependent parts of launches, buffers, tables and results


@final
@frozen(eq=False)
class Recorded:
    """A plan for all sizes with the recorded outcomes of its decisions.

    flash: with formulas of sizes. parts: sizes -> its parts in these sizes; None for other sizes.
    """

    flash: Flash
    parts: Callable[..., Parts | None]

    @classmethod
    def of(
        cls, symbols: Sequence[NamedSize], sizes: Shape, plan: Callable[[Numbers], Flash]
    ) -> Recorded:
        """Record a plan in some sizes. plan: numbers, or formulas, by name -> the plan for them."""
        recording = Recording()
        pairs = zip(symbols, sizes, strict=True)
        flash = plan({s.name: recording.add_size(n, symbol_bounds(s)) for s, n in pairs})
        return cls(flash, recording.compile(split_parts(flash)))

    def at(self, sizes: Shape) -> Flash | None:
        """The plan for some sizes, with launches, buffers and results in numbers; None if planning
        would decide differently."""
        parts = self.parts(*sizes)
        if parts is None:
            return None
        launches, buffers, tables, results = parts
        x = self.flash
        return evolve(
            x,
            launches=tuple(map(place_launch, x.launches, launches)),
            buffers={n: Buffer(buffers[n], b.dtype) for n, b in x.buffers.items()},
            tables=tables,
            results={n: (*results[n], x.results[n][2]) for n in results},
        )


def symbol_bounds(symbol: NamedSize) -> SizeBounds:
    """Known bounds of a size."""
    return SizeBounds(min(symbol.classes, default=1), symbol.most, gcd(*symbol.classes) or 1)


def split_parts(flash: Flash) -> Parts:
    """The parts of a plan with formulas, as tuples and dicts of formulas and numbers."""
    launches = tuple(
        (x.grid, select_sized(x.fixed), {n: (d.shape, d.strides) for n, d in x.descriptors.items()})
        for x in flash.launches
    )
    buffers = {name: buffer.shape for name, buffer in flash.buffers.items()}
    results = {name: (shape, strides) for name, (shape, strides, _) in flash.results.items()}
    return launches, buffers, {**flash.tables}, results


def select_sized(fixed: Numbers) -> Parts:
    """The arguments of a kernel with formulas."""
    return {name: x for name, x in fixed.items() if follows_sizes(x)}


def place_launch(launch: Launch, part: Parts) -> Launch:
    """A launch in the sizes of a call."""
    grid, fixed, tiled = part
    descriptors = {
        name: evolve(d, shape=tiled[name][0], strides=tiled[name][1])
        for name, d in launch.descriptors.items()
    }
    given = launch.kernel, grid, launch.tensors, {**launch.fixed, **fixed}, launch.texts
    return Launch(*given, launch.warps, launch.stages, descriptors)


@final
@frozen(eq=False)
class SizedCalls:
    """Calls of one attention, or of its gradient, in any sizes of at least 1.

    reads: for each symbol a tensor and an axis to read it from, with a factor and a summand. plan:
    numbers, or formulas, by name -> the launches. at: the run of some sizes.
    """

    graph: Graph
    options: Options
    plan: Callable[[Numbers], Flash]
    reads: tuple[tuple[int, int, int, int], ...]
    recorded: list[Recorded] = field(factory=list, init=False)
    at: Callable[[Shape], TritonCall] = field(
        init=False,
        default=Factory(lambda calls: lru_cache(MOST_SIZES)(calls.call_at), takes_self=True),
    )

    @classmethod
    def of(cls, graph: Graph, work: Layout, target: Target, options: Options) -> SizedCalls:
        """work: of the graph, its sizes by name."""
        given = options.precision, options.variant, options.max_workspace, options.batch_invariant

        def plan(sizes: Numbers) -> Flash:
            return Flash.plan(bind(work, sizes), target, *given)

        reads = dict(reversed([*find_reads([i.spec for i in graph.inputs])]))
        calls = cls(graph, options, plan, tuple(reads[s.name] for s in graph.symbols))
        calls.plan_at(tuple(s.most for s in graph.symbols))
        return calls

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> Shape:
        """The sizes of tensors, in the order of the graph's symbols."""
        return tuple([(tensors[n].shape[axis] - more) // by for n, axis, by, more in self.reads])

    def run(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """As `Executable.run`."""
        return self.at(self.sizes_of(tensors)).run(*tensors, rooms=rooms)

    def infer(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """As `Executable.infer`."""
        return self.at(self.sizes_of(tensors)).inference(*tensors, rooms=rooms)

    def call_at(self, sizes: Shape) -> TritonCall:
        return TritonCall(self.plan_at(sizes), self.graph, self.options)

    def plan_at(self, sizes: Shape) -> Flash:
        """The launches for some sizes: by the record, or recorded now."""
        with neutral_state():
            for recorded in (*self.recorded,):
                if (flash := recorded.at(sizes)) is not None:
                    others = [x for x in self.recorded if x is not recorded]
                    self.recorded[:] = recorded, *others  # the next sizes are mostly near these
                    return flash
            recorded = Recorded.of(self.graph.symbols, sizes, self.plan)
            self.recorded[MOST_RECORDINGS - 1 :] = []
            self.recorded.insert(0, recorded)
            flash = recorded.at(sizes)
        assert flash is not None  # its decisions were made for these
        return flash
