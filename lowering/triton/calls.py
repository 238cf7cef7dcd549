"""Calls of Triton's kernels: launches on the tensors of a call, in scratch from the workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import field, frozen

from attn_graph.ir.attention import SAVED, AttentionGrad, GradientOperands
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.packed import LENGTHS
from attn_graph.ir.transforms.gradient_ops import (
    clear_blind_rows,
    sink_gradient,
    sink_gradient_tangent,
)
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.lowering.backend import NO_ROOMS, ResultLayout, Rooms
from attn_graph.lowering.problem import read_operands, select_outputs
from attn_graph.lowering.request import Options
from attn_graph.lowering.triton.places import (
    kernel_strides,
    kernel_tensors,
    order_pages,
    sums_pages,
)
from attn_graph.machine.device_memo import DeviceMemo, copy_to
from attn_graph.masks.places import add_columns
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:  # imported on use: not needed on machines without a GPU
    from attn_graph.lowering.codegen.device_code import Contribution
    from attn_graph.lowering.codegen.launches import Launch
    from attn_graph.lowering.triton.plan import Flash

Named = dict[str, Any]  # tensors by their names in launches
Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # outputs, and saved tensors
Scratch = Mapping[str, torch.Tensor]


@final
@frozen(eq=False)
class TritonRun:
    """Runs a graph: its launches on tensors by name, in scratch from the workspace."""

    flash: Flash
    graph: Graph
    options: Options
    tables: DeviceMemo[torch.Tensor] = field(factory=DeviceMemo, init=False)

    @property
    def run(self) -> Callable[..., Results]:
        """One of the four functions below."""
        gradient = self.flash.problem.grad is not None
        if self.flash.push is not None:
            return self.push_backward if gradient else self.push
        return self.backward if gradient else self.forward

    def forward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """o and statistics, then the saved values."""
        results = self.attend(self.flash.launches, tensors, self.flash.problem.node.stats, rooms)
        return [results[name] for name in self.graph.result_names], [
            results[name] for name in SAVED
        ]

    def inference(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The forward without lse, for a graph without lse among its results."""
        stats = [name for name in self.flash.problem.node.stats if name != "lse"]
        results = self.attend(self.flash.without_lse, tensors, stats, rooms)
        return [results[name] for name in self.graph.result_names], ()

    def attend(
        self, launches: Sequence[Launch], tensors: Sequence[torch.Tensor], stats: Sequence[str],
        rooms: Rooms,
    ) -> Named:  # fmt: skip
        """o and these statistics, by name."""
        every, count = self.operands(tensors), len(self.flash.problem.node.ranks)
        operands, tables = every[:count], every[count:]
        results = self.new_results(("o", *stats), operands[0].device, rooms)
        with self.launched(launches, {**results}, operands, tables=tables):
            pass
        return results

    def push(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The results of an AttentionJvp, and the tensors for its derivatives."""
        op: AttentionJvp = self.graph.eqns[0].op.jvp
        own, moved = op.split(self.operands(tensors))
        results = self.new_results(self.flash.results, own[0].device, rooms)
        with self.launched(self.flash.launches, {**results}, own, moved):
            pass
        every = [results[name] for name in op.names]
        return select_outputs(self.graph, every), [results[name] for name in op.saved]

    def backward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The wanted gradients of the operands, o, lse and the cotangents."""
        grad = self.flash.problem.grad
        assert grad is not None
        every, count = self.operands(tensors), len(grad.ranks)
        read = grad.split(every[:count])
        named = self.name_gradient(read, by_number(grad, rooms))
        if sums_pages(self.flash.lying):
            named |= self.order_pages(read.own, every[count:])

        def of_sinks(sinks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
            surplus = shrink_by_rest(scratch["delta"].neg(), scratch)
            return sink_gradient(sinks, named["lse"].view(surplus.shape), surplus)

        return self.pull(named, read.own, (), of_sinks, every[count:]), ()

    def order_pages(
        self, own: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The order of sums of page gradients. own: the attention's operands."""
        where = kernel_tensors(self.flash.lying, self.flash.problem.node.split(own).mask, tables)
        pool, page = own[1].shape[:2]
        return order_pages(where["pages"], where.get(LENGTHS["keys"]), page, pool)

    def push_backward(self, *tensors: torch.Tensor) -> Results:
        """The tangents of the wanted gradients, of an AttentionJvp."""
        op: AttentionJvp = self.graph.eqns[0].op.jvp
        x = op.directions(self.operands(tensors))
        named = self.name_gradient(x.read, NO_ROOMS)
        named |= {"to": x.to, "to.strides": x.to.stride(), "tlse": x.tlse.contiguous()}
        named |= {"tdo": x.tdo, "tdlse": x.tdlse}
        moved = op.attention.split(x.own).sinks

        def of_sinks(sinks: torch.Tensor, scratch: Scratch) -> torch.Tensor:
            tsinks = torch.zeros_like(sinks) if moved is None else moved
            stats = named["lse"], clear_blind_rows(named["tlse"], named["lse"])
            given = scratch["delta"].neg(), scratch["tdelta"].neg()
            surplus = shrink_by_rest(given[0], scratch), shrink_by_rest(given[1], scratch)
            return sink_gradient_tangent((sinks, tsinks), stats, surplus)

        return self.pull(named, x.read.own, x.own, of_sinks), ()

    def operands(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The equation's operands, among the inputs of the graph."""
        return read_operands(self.graph, tensors)

    def new_results(self, names: Iterable[str], device: torch.device, rooms: Rooms) -> Named:
        """Uninitialised results, by name, in their rooms."""
        return {name: self.flash.new_result(name, device, rooms) for name in names}

    def name_gradient(self, read: GradientOperands[torch.Tensor], rooms: Rooms) -> Named:
        """Other tensors for kernels of a gradient, and the gradients themselves."""
        contributions = self.flash.code.contributions.items()
        summed = {f"grad{n}" for n, x in contributions if not x.is_whole}
        stored = (name for name in self.flash.results if name not in summed)
        return self.new_results(stored, read.o.device, rooms) | {
            "o": read.o,
            "o.strides": kernel_strides(self.flash.lying, "o", TensorSpec.like(read.o)),
            "lse": read.lse.contiguous(),  # ours is; another backend may have saved it otherwise
            "do": read.do,
            "dlse": read.dlse,
        }

    def pull(
        self,
        named: Named,
        own: Sequence[torch.Tensor],
        moved: Sequence[torch.Tensor | None],
        of_sinks: Callable[[torch.Tensor, Scratch], torch.Tensor],
        tables: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """The returned gradients. Sinks have a function of their own."""
        flash, grad = self.flash, self.flash.problem.grad
        assert grad is not None
        roles = flash.problem.node.roles
        with self.launched(flash.launches, named, own, moved, tables) as scratch:
            for n, collected in flash.code.contributions.items():
                if f"grad{n}" not in named:
                    layout = flash.results[f"grad{n}"]
                    places = None if collected.places is None else own[collected.places]
                    named[f"grad{n}"] = sum_collected(
                        scratch[f"sums{n}"], collected, layout, places
                    )
            if flash.problem.node.sinks and grad.wants[at := roles.index("sinks")]:
                named[f"grad{at}"] = of_sinks(own[at], scratch)
        made = [named[f"grad{n}"] for n, wanted in enumerate(grad.wants) if wanted]
        return select_outputs(self.graph, made)

    @contextmanager
    def launched(
        self,
        launches: Sequence[Launch],
        named: Named,
        operands: Sequence[torch.Tensor],
        moved: Sequence[torch.Tensor | None] = (),
        tables: Sequence[torch.Tensor] = (),
    ) -> Iterator[Scratch]:
        """Run launches on the operands of the attention, their tangents, and these tensors; the
        scratch. tables: of packed operands and of keys in pages."""
        flash, device = self.flash, operands[0].device
        flash.check()
        named |= name_operands(flash, operands, moved, tables)
        named |= {name: self.table(name, device) for name in flash.tables}
        with self.options.workspace.lease(flash.scratch, device) as scratch:
            named |= scratch
            with torch.cuda.device_of(operands[0]):
                for launch in launches:
                    launch(named)
            yield scratch

    def table(self, name: str, device: torch.device) -> torch.Tensor:
        """A list of tiles on a device, brought there once."""
        host = self.flash.tables[name]
        return self.tables.get((name, device), lambda: copy_to(device, host, "lists of tiles"))


def by_number(grad: AttentionGrad, rooms: Rooms) -> Rooms:
    """The rooms of gradients, by their names in launches."""
    wanted = (f"grad{n}" for n, wants in enumerate(grad.wants) if wants)
    return {own: rooms[name] for own, name in zip(wanted, grad.names, strict=True) if name in rooms}


def name_operands(
    flash: Flash,
    operands: Sequence[torch.Tensor],
    moved: Sequence[torch.Tensor | None],
    tables: Sequence[torch.Tensor],
) -> Named:
    """The operands of an attention, their tangents and its tables, by their names in launches. Of
    the tensors of modifiers the tangents come last."""
    given = flash.problem.node.split(operands)
    data = [x for each in (*given.modifiers, given.mask) for x in each.values()]
    named: Named = {"q": given.q, "k": given.k, "v": given.v, "sinks": given.sinks}
    named |= {name: named[name].view(torch.uint8) for name in flash.as_bytes}
    named |= {"seed": given.seed, "offset": given.offset}
    named |= kernel_tensors(flash.lying, given.mask, tables)
    if moved:
        t = flash.problem.node.split(moved)
        named |= {"tq": t.q, "tk": t.k, "tv": t.v, "tsinks": t.sinks}
        data += [x for each in t.modifiers for x in each.values() if x is not None]
    return named | {f"data.{k}": x for k, x in enumerate(data)}


def shrink_by_rest(surplus: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """surplus / 2^rest in place: exp(. - lse) is too large by this factor; see
    kernels/weight_sums.py."""
    rest = scratch.get("rest")
    return surplus if rest is None else surplus.mul_(torch.exp2(rest.neg()))


def sum_collected(
    sums: torch.Tensor, collected: Contribution, layout: ResultLayout, places: torch.Tensor | None
) -> torch.Tensor:
    """A tensor's gradient from sums over its reads: [B,H,M] or [B,H,N]; of a table [B,H,.,.,n], or
    by `places` [1,H|1,M,N]."""
    (shape, _, dtype), axes = layout, collected.axes
    if places is not None:
        table = sums.new_zeros(shape)
        add_columns(table, sums, places.clamp(0, shape[1] - 1)[None, None])
        return table.to(dtype)
    line = "j" if "j" in axes else "i"
    over = [n for n, axis in enumerate(("b", "h", line)) if axis not in axes]
    over += [3] if collected.column else []
    return (sums.sum(over) if over else sums).reshape(shape).to(dtype, copy=not over)
