"""Graphs run equation by equation: values that pass between them, and outputs.

Every call runs each function here. After a long computation even Python's own code has to come from
memory again: so there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import final

import torch
from attrs import frozen
from torch._C import _is_any_autocast_enabled, _set_grad_enabled

from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import statistics
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.lowering.backend import Rooms, room_name
from attn_graph.machine.ambient import without_autocast
from attn_graph.machine.workspace import Scratch, Views, Workspace

Tensors = Sequence[torch.Tensor]
# Of the device of a call, and of operands on it. Some can write their results into `rooms`.
Work = Callable[..., Tensors]
Fixed = tuple[
    Work, Work
]  # work that knows some operands in advance; for all results, for the first


NONE: Mapping[int, Work] = {}
Fix = Callable[[Sequence[torch.Tensor | None]], Fixed | None]


@final
@frozen
class Step:
    """One equation, ready to run, and its memory in bytes. infer: as `call`, for the first result
    alone. writes: True if both can write into the caller's tensors. fix: reads operands that are
    known before the others, None for each of these, and gives the work of calls that have them;
    None if it reads nothing. block: as `Executable` has it."""

    call: Work
    workspace: int = 0
    temporary: int = 0
    note: str | None = None
    infer: Work | None = None
    in_c_order: bool = False
    writes: bool = False
    fix: Fix | None = None
    block: int = 0


@final
@frozen(eq=False)
class Steps:
    """The equations of a graph, ready to run. calls: for each its operands and its work.

    leaner: by number of the equation, work that gives its first results alone, for calls that save
    nothing. saved, stats: the values that derivatives read, and the statistics of rows. only: the
    work of the only equation, if the graph returns just its first result; else None. place: the
    device of graphs without inputs. rooms: for each equation that can write into the caller's
    tensors, the names of its results there and their places among the outputs.
    """

    graph: Graph
    calls: tuple[tuple[Sequence[int], Work], ...]
    leaner: Mapping[int, Work]
    saved: tuple[int, ...]
    stats: frozenset[int]
    only: Work | None
    place: torch.device
    rooms: Mapping[int, Mapping[str, int]]

    @classmethod
    def of(
        cls,
        graph: Graph,
        calls: Sequence[tuple[Sequence[int], Work]],
        kind: str,
        leaner: Mapping[int, Work] | None = None,
        writing: Collection[int] = (),
    ) -> Steps:
        """calls: in the order of the equations. kind: of device. writing: the equations whose work
        takes rooms."""
        leaner, inputs = leaner or {}, range(len(graph.inputs))
        alone = [args for args, _ in calls] == [(*inputs,)] and graph.outputs == (len(inputs),)
        only = leaner.get(0) if alone else None
        saved, stats = residuals(graph), statistics(graph)
        rooms = {n: name_rooms(graph, n) for n in writing}
        return cls(graph, tuple(calls), leaner, saved, stats, only, torch.device(kind), rooms)

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs, and the saved values."""
        values, device = list(tensors), tensors[0].device if tensors else self.place
        for args, call in self.calls:
            values += call(device, *[values[i] for i in args])
        outputs = hand_out(values, self.graph.outputs, self.stats)
        return outputs, [values[i] for i in self.saved]

    def infer(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs; nothing is saved."""
        if self.only is not None:
            return self.only(tensors[0].device, *tensors)[:1], ()
        return self.write((), *tensors), ()

    def write(
        self, outs: Tensors, *tensors: torch.Tensor, fixed: Mapping[int, Work] = NONE
    ) -> Tensors:
        """The outputs, in the caller's tensors where an equation can write there; () for none.

        fixed: the work of some equations, by their number, as `fix` gives it.
        """
        values, at = dict(enumerate(tensors)), len(tensors)
        device = tensors[0].device if tensors else self.place
        for n, (args, call) in enumerate(self.calls):
            work = fixed.get(n) or self.leaner.get(n, call)
            if outs and n in self.rooms:
                rooms = {name: outs[place] for name, place in self.rooms[n].items()}
                work = partial(work, rooms=rooms)
            values.update(enumerate(work(device, *[values[i] for i in args]), at))
            at += len(self.graph.eqns[n].outs)
        return hand_out(values, self.graph.outputs, self.stats if not outs else frozenset())

    def fix(
        self, fixes: Mapping[int, Fix], given: Mapping[int, torch.Tensor]
    ) -> Callable[..., Tensors]:
        """`write` for calls with inputs that are given in advance, by number. fixes: by number of
        the equation."""
        values, at = dict(given), len(self.graph.inputs)
        known = dict[int, Work]()
        device = next((x.device for x in given.values()), self.place)
        for n, (args, call) in enumerate(self.calls):
            operands = [values.get(i) for i in args]
            if n in fixes:
                if (pair := fixes[n](operands)) is not None:
                    known[n] = pair[n in self.leaner]
            elif all(i in values for i in args):
                made = call(device, *operands)
                known[n] = partial(hand_back, made)
                values.update(enumerate(made, at))
            at += len(self.graph.eqns[n].outs)
        return partial(self.write, fixed=known)

    @property
    def writes_all(self) -> bool:
        """True if `write` can leave all outputs in the caller's tensors."""
        places = [place for named in self.rooms.values() for place in named.values()]
        return sorted(places) == [*range(len(self.graph.outputs))]

    @property
    def bytes_between(self) -> int:
        """Bytes of the values between equations: neither inputs, nor returned, nor saved for a
        derivative."""
        saved = () if self.graph.gradient_problems else self.saved
        kept = {*range(len(self.graph.inputs)), *self.graph.outputs, *saved}
        return sum(t.bytes for i, t in enumerate(self.graph.types) if i not in kept)


def hand_back(made: Tensors, device: torch.device, *operands: torch.Tensor) -> Tensors:
    """The work of an equation whose results are known."""
    return made


def name_rooms(graph: Graph, n: int) -> dict[str, int]:
    """The results of an equation that are outputs, with their places there."""
    eqn, outs = graph.numbered[n]
    named = zip(eqn.op.names, outs, strict=True)
    return {room_name(x): graph.outputs.index(i) for x, i in named if i in graph.outputs}


def hand_out(
    values: Tensors | Mapping[int, torch.Tensor], outputs: Sequence[int], stats: frozenset[int]
) -> list[torch.Tensor]:
    """The outputs: statistics in C order, and a value that is returned twice as two tensors."""
    results: list[torch.Tensor] = []
    for place, i in enumerate(outputs):
        value = values[i].contiguous() if i in stats else values[i]
        results.append(value.clone() if i in outputs[:place] else value)
    return results


def lease_rooms(
    work: Callable[[Tensors, Views], Tensors], scratch: Scratch, workspace: Workspace
) -> Work:
    """Work with the buffers of `scratch` from the workspace; it takes nothing for none."""
    has_buffers = bool(scratch.buffers)

    def call(device: torch.device, *operands: torch.Tensor, rooms: Rooms | None = None) -> Tensors:
        if _is_any_autocast_enabled():
            with without_autocast():
                return call(device, *operands, rooms=rooms)
        room = workspace.take(device) if has_buffers else None
        recorded = torch.is_grad_enabled()
        if recorded:
            _set_grad_enabled(False)  # as `torch.no_grad()`, which is six calls more
        try:
            views = room[0].views(scratch) if room else {}
            return work(operands, views if rooms is None else {**views, **rooms})
        finally:
            if room:
                arena, idle = room
                idle.append(arena)
            if recorded:
                _set_grad_enabled(True)

    return call
