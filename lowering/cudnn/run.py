"""cuDNN's plans at work: a handle for each thread and device, tensors by number, the workspace.

For packed tensors cuDNN reads the start of each sequence, in elements, and its length, in int32.
Both are made from starts and lengths on the device, without waiting for it.

Three undocumented cases are avoided:

- A tile may read rows outside sequences, or past lengths, and multiply them by 0, so NaN there
  would reach others (NVIDIA/cudnn-frontend#624). A copy of these operands has 0 in these rows.
- Below 9.25 packed queries of a sequence without keys become NaN (NVIDIA/cudnn-frontend#943). cuDNN
  is given no queries for this sequence, and no keys for one without queries.
- cuDNN leaves rows outside all sequences unwritten. They are written before it runs.

In pages the first is not possible, so it takes them where no key is absent, or declared finite.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import nan
from typing import Any, final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.packed import STARTS
from attn_graph.ir.storage.paging import readable_table, seen_by_entry
from attn_graph.ir.storage.scaling import O_SCALE, SCALES
from attn_graph.lowering.backend import (
    NO_ROOMS,
    ResultLayout,
    Rooms,
    room_or_new,
    zero_each,
)
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.graph import CudnnCall, Slot, round_total
from attn_graph.lowering.cudnn.memory import key_splits
from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.lying import DECLARED, SIDES, copy_cleared, quantised_places
from attn_graph.lowering.problem import (
    ALIGNED,
    find_misplaced,
    on_boundary,
    operand_specs,
    read_operands,
    require_aligned,
    returns_lse,
)
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.device_memo import DeviceMemo, copy_to, full_vector
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.workspace import Buffer, Scratch, Views, Workspace
from attn_graph.masks.joins import needs_of
from attn_graph.spec import INF, NAMES, dense_strides

Pack = Mapping[int, torch.Tensor]
Execute = Callable[[Pack, torch.Tensor | None, torch.device], None]
Named = dict[str, torch.Tensor]
Results = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # outputs, and saved tensors
MARKS = 16  # bytes a packed row, of its number and of whether it belongs to a sequence
SEQ_LENGTHS = {"seq_len_q": "rows", "seq_len_kv": "keys"}  # the side of a length
clamp_each = torch._foreach_clamp_max  # pyright: ignore[reportPrivateImportUsage]  # documented
multiply_each = torch._foreach_mul  # pyright: ignore[reportPrivateImportUsage]
OTHER = {"rows": "keys", "keys": "rows"}
# Read dense by cuDNN, regardless of given strides: vectors of few numbers, and lse, perhaps saved
# in another layout by another backend.
VECTORS = {
    "q_lengths": torch.int32,
    "kv_lengths": torch.int32,
    "sinks": torch.float32,
    "lse": torch.float32,
    **dict.fromkeys((*SCALES, O_SCALE), torch.float32),
}
OURS = {  # our axes of cuDNN's results
    "lse": slice(0, 3),
    "max": slice(0, 3),
    "dsinks": slice(1, 2),
    "amax": slice(0, 0),
}
SUMS = "dsinks", "amax"  # cuDNN may add to them, or keep what is larger there


class Handles(threading.local):
    """Each thread's handles, by device: cuDNN's are not for sharing."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}


HANDLES = Handles()


def handle(device: torch.device) -> Any:  # Any: cuDNN's
    """The calling thread's handle on a device, set to the current stream."""
    import cudnn

    own = HANDLES.held.get(device.index)
    if own is None:
        with torch.cuda.device(device):
            own = HANDLES.held[device.index] = cudnn.create_handle()
        same = cudnn.Handle(own.backend_handle)
        weakref.finalize(own, cudnn.destroy_handle, same).atexit = False  # when its thread ends
    cudnn.set_stream(handle=own, stream=torch.cuda.current_stream(device).cuda_stream)
    return own


@final
@frozen(eq=False)
class Engine:
    """A plan of cuDNN's, and its graphs on the devices loaded so far."""

    plan: bytes
    graphs: DeviceMemo[Any] = field(factory=DeviceMemo, init=False)  # Any: cuDNN's

    def __call__(self, pack: Pack, workspace: torch.Tensor | None, device: torch.device) -> None:
        elsewhere = torch.cuda.current_device() != device.index
        with torch.cuda.device(device) if elsewhere else nullcontext():
            self.load(device.index).execute(pack, workspace, handle=handle(device))

    def load(self, index: int) -> Any:  # Any: cuDNN's graph
        """Load the plan for a device of this machine. Nothing runs, on no stream."""
        return self.graphs.get(index, lambda: cudnn_builder.load_plan(self.plan, index))


@final
@frozen(eq=False)
class Run:
    """Runs a graph: passes the call's tensors, and new ones, to cuDNN.

    scratch: cuDNN's workspace, and the tables made for it.
    """

    case: Case
    call: CudnnCall
    graph: Graph
    workspace: Workspace
    scratch: Scratch
    execute: Execute
    sizes: DeviceMemo[torch.Tensor] = field(factory=DeviceMemo, init=False)

    @classmethod
    def of(
        cls,
        case: Case,
        call: CudnnCall,
        graph: Graph,
        workspace: Workspace,
        need: int,
        execute: Execute,
    ) -> Run:
        """need: bytes of cuDNN's workspace."""
        scratch = Scratch(buffers(case, call, need))
        return cls(case, call, graph, workspace, scratch, execute)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return self.graph.eqns[-1].op.roles

    @cached_property
    def places(self) -> dict[str, int]:
        """The graph's input for each operand, if they are quantised."""
        return quantised_places(self.graph) if self.case.problem.scales else {}

    @cached_property
    def totals(self) -> dict[str, int]:
        """The rows of each packed side."""
        return self.case.lying.totals

    def __call__(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """o, and lse if it is stored; or the wanted gradients."""
        x = {name: tensors[n] for name, n in self.places.items()}
        x = x or dict(zip(self.roles, read_operands(self.graph, tensors), strict=True))
        device = x["q"].device
        if rooms:
            require_aligned(rooms)
        with self.workspace.lease(self.scratch, device) as room:
            known = x if self.reads_all else self.prepare(x, room)
            given = [self.argument(slot, known) for slot in self.call.inputs]
            if any(t.data_ptr() % ALIGNED for t in given):
                sources = [slot.source for slot in self.call.inputs]
                raise PlanMismatchError(
                    *find_misplaced(zip(sources, given, strict=True)), way_out=""
                )
            made = {slot.source: self.blank(slot, x, rooms) for slot in self.call.outputs}
            if self.zeroed:
                zero_each([made[name] for name in self.zeroed])
            pack = dict(enumerate((*given, *made.values()), start=1))
            self.execute(pack, room.get("workspace"), device)
            if self.pairs_sides or "dsinks" in made:
                self.finish(made, x, rooms)
        saved = [made["o"], made["lse"]] if self.case.problem.grad is None else ()
        return [made[name] for name in self.graph.result_names], saved

    @cached_property
    def reads_all(self) -> bool:
        """True if cuDNN reads the operands as they are, without lengths."""
        padded = any(slot.argument in SEQ_LENGTHS for slot in self.call.inputs)
        return not (padded or self.case.cleaned or self.case.clears)

    def prepare(self, x: Named, room: Views) -> Named:
        """The tensors for cuDNN, by argument or by source."""
        ends = self.ends(x)
        return {**self.clean(x), **room, **self.write_tables(x, room), **self.lengths(ends)}

    # Tables

    def ends(self, x: Named) -> Named:
        """The length of each sequence, by side, for a padding mask; M or N without given ones."""
        device = x["q"].device
        return {
            SEQ_LENGTHS[slot.argument]: x[slot.source]
            if slot.source in x
            else self.full(slot.source, device)
            for slot in self.call.inputs
            if slot.argument in SEQ_LENGTHS
        }

    def full(self, source: str, device: torch.device) -> torch.Tensor:
        """One length for all entries: M or N."""
        p = self.case.problem
        count = p.M if source == "M" else p.N
        return self.sizes.get((source, device), lambda: full_vector(p.B, count, device))

    def lengths(self, ends: Named) -> Named:
        """The lengths for cuDNN, by argument: 0 on packed sides if the other side's is."""
        if self.totals and not self.case.lying.alike:
            has_rows = clamp_each([ends[OTHER[side]] for side in self.totals], 1)
            counts = multiply_each([ends[side] for side in self.totals], has_rows)
            ends = ends | dict(zip(self.totals, counts, strict=True))
        return {argument: ends[side] for argument, side in SEQ_LENGTHS.items() if side in ends}

    def write_tables(self, x: Named, room: Views) -> Named:
        """Write the table of pages, and offsets in elements: those by one tensor of starts at once.
        The offsets, by argument."""
        made: Named = {}
        p, lying = self.case.problem, self.case.lying
        for name, slots in self.offsets.items():
            table = room[name][:, : slots[0].shape[0]]
            torch.mul(self.steps(name, table), x[name], out=table)
            made |= {slot.argument: row for slot, row in zip(slots, table, strict=True)}
        if self.case.is_paged:
            # The first page of an entry that some query sees (0 without one) stands in place of
            # pages that none sees: cuDNN may read them.
            data = {name: x[name] for name in needs_of(p.node.mask)}
            seen = seen_by_entry(p.node.mask, x["pages"], p.M, p.N, data)
            room["pages"].copy_(readable_table(lying.page, x["pages"], seen))
        return made

    @cached_property
    def offsets(self) -> dict[str, list[Slot]]:
        return offset_slots(self.call, self.case.lying.same_starts)

    def steps(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """The elements from row to row of all offsets by the same starts, [count,1]."""
        each = [slot.step for slot in self.offsets[name]]
        device, dtype = table.device, table.dtype
        return self.sizes.get((name, device), lambda: column_of(each, device, dtype))

    # Arguments

    def clean(self, x: Named) -> Named:
        """The operands, lse of packed rows as [T,H], with copies of those that cuDNN multiplies by
        0: in rows outside sequences, and do, with lse = +inf, in rows without keys, as exp(s - lse)
        is 0 then."""
        given, absent = dict(x), self.absent(self.case.cleaned.values(), x)
        for name, side in self.case.cleaned.items():
            given[name] = copy_cleared(x[name], absent[side], self.room_for(name, x[name]))
        if "lse" in x and "rows" in self.totals:
            given["lse"] = x["lse"].T
        if self.case.clears:
            lse = given["lse"]
            blind = (lse == -INF)[..., None]
            given["do"] = copy_cleared(x["do"], blind, self.room_for("do", x["do"]))
            given["lse"] = torch.nan_to_num(lse, nan, INF, INF, out=lse.new_empty(lse.shape))
        return given

    def room_for(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """An empty copy of an operand, laid out as cuDNN reads it."""
        slot = next(slot for slot in self.call.inputs if slot.source == name)
        return torch.empty_strided(*self.layout(slot), dtype=x.dtype, device=x.device)

    def absent(self, sides: Iterable[str], x: Named) -> dict[str, torch.Tensor]:
        return self.case.lying.absent(sides, x)

    def argument(self, slot: Slot, known: Named) -> torch.Tensor:
        """The tensor for a slot, known by argument or by source."""
        name = slot.argument if slot.argument in known else slot.source
        given = known[name] if name in known else self.number(name, known["q"].device)
        if slot.source in VECTORS:
            dense = given.dtype == slot.dtype and given.is_contiguous()
            if not dense or given.data_ptr() % ALIGNED:
                given = torch.empty(given.shape, dtype=slot.dtype, device=given.device).copy_(given)
            return given.reciprocal() if slot.source == O_SCALE else given
        return given if self.case.problem.grad is None else on_boundary(given)  # of autograd's

    def number(self, text: str, device: torch.device) -> torch.Tensor:
        """A float32 on a device."""
        return self.sizes.get(
            (text, device), lambda: full_vector(1, float(text), device, torch.float32)
        )

    # Results

    def layout(self, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a result as we give it back, or of an operand as it is copied."""
        T = self.totals.get(SIDES.get(slot.source, ""))
        if T is None:
            axes = OURS.get(slot.source, slice(None))
            return slot.shape[axes], slot.strides[axes]
        shape = (T, slot.shape[1], slot.shape[3])
        return shape, dense_strides(shape)

    def blank(self, slot: Slot, x: Named, rooms: Rooms) -> torch.Tensor:
        """An empty result; lse [T,H] of packed rows is as of rows without keys: -inf, or in a
        sequence without keys the sinks."""
        device = x["q"].device
        if slot.source != "lse" or not slot.offsets:
            return room_or_new(rooms, slot.source, self.blanks[slot.source], device)
        shape = self.totals["rows"], self.case.problem.H
        made = torch.empty(shape, dtype=torch.float32, device=device)
        if self.case.lying.leaves_none:
            return made
        if "sinks" not in x or self.case.lying.alike:
            return made.fill_(-INF)
        return made.copy_(x["sinks"]).masked_fill_(self.absent(("rows",), x)["rows"][..., 0], -INF)

    @cached_property
    def blanks(self) -> dict[str, ResultLayout]:
        """How each result lies."""
        return {slot.source: (*self.layout(slot), slot.dtype) for slot in self.call.outputs}

    @cached_property
    def zeroed(self) -> list[str]:
        """The results to set to 0 first: cuDNN adds to them, or leaves rows unwritten."""
        own = [slot for slot in self.call.outputs if not (slot.source == "lse" and slot.offsets)]
        return [x.source for x in own if x.source in SUMS or self.leaves_unwritten(x)]

    def leaves_unwritten(self, slot: Slot) -> bool:
        """True if cuDNN may leave rows of a result unwritten, or does not say that it writes all
        of one without rows."""
        if slot.source not in SIDES:
            return bool(self.totals)
        return bool(slot.offsets) and not self.case.lying.leaves_none

    @cached_property
    def pairs_sides(self) -> bool:
        """True if the keys of an entry, or its queries, are packed, or end in pages by a length: it
        may have none."""
        ended = self.case.is_paged and "kv_lengths" in self.case.mask.lengths
        return ended or bool(self.totals)

    def finish(self, made: Named, x: Named, rooms: Rooms) -> None:
        """Turn the results into those that we give back."""
        sinks = self.case.problem.by_role.sinks
        if sinks is not None and "dsinks" in made:
            made["dsinks"] = made["dsinks"].to(sinks.dtype)
        ends = self.ends(x)
        for name, t in made.items():
            side = SIDES.get(name, "")
            if name == "lse" and side in self.totals:
                made[name] = self.by_heads(t, rooms)
            elif self.pairs_sides and side and side not in self.totals:
                # Entries whose other side has no rows.
                empty = (ends[OTHER[side]] == 0).view(-1, *(1 for _ in t.shape[1:]))
                if name == "lse":
                    blind = x["sinks"][:, None] if "sinks" in x else t.new_full((), -INF)
                    torch.where(empty, blind, t, out=t)
                else:
                    t.masked_fill_(empty, 0.0)

    def by_heads(self, lse: torch.Tensor, rooms: Rooms) -> torch.Tensor:
        """lse [T,H] as [H,T]: as it lies if only a gradient reads it."""
        if not returns_lse(self.graph):
            return lse.T
        return rooms["lse"].copy_(lse.T) if "lse" in rooms else lse.T.contiguous()


def offset_slots(call: CudnnCall, same_starts: bool) -> dict[str, list[Slot]]:
    """The offsets of packed tensors by the tensor of starts, each a row of one table. same_starts:
    True if q and k have one tensor."""
    slots: dict[str, list[Slot]] = {}
    for slot in call.inputs:
        if slot.step:
            slots.setdefault(STARTS["rows"] if same_starts else slot.source, []).append(slot)
    return slots


def column_of(numbers: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with neutral_state():
        host = torch.tensor(numbers, dtype=dtype)[:, None]
    return copy_to(device, host, "strides of rows")


def buffers(case: Case, call: CudnnCall, need: int) -> dict[str, Buffer]:
    """The memory of a call, by purpose. need: bytes of cuDNN's workspace."""
    table = case.lying.pages
    room = {"workspace": Buffer((need,), torch.uint8)} if need else {}
    for name, slots in offset_slots(call, case.lying.same_starts).items():
        dtype = slots[0].dtype
        each = ALIGNED // dtype.itemsize  # rows of the table begin at multiples of ALIGNED bytes
        room[name] = Buffer((len(slots), -(-slots[0].shape[0] // each) * each), dtype)
    if table:
        room["pages"] = Buffer(table.shape, torch.int32)
    return room


def temporary_bytes(case: Case, call: CudnnCall, graph: Graph) -> int:
    """Bytes of unwanted gradients computed by cuDNN, of casts and copies, of marks of rows, and of
    lse of packed rows, as [T,H] if [H,T] is given back."""
    grad, vectors = case.problem.grad, copied_vectors(graph)
    wanted = {"o", "lse", "max", "amax"} if grad is None else {*grad.names}
    wanted -= {"dsinks"} if "sinks" in vectors else set()
    unasked = (slot_bytes(x, case) for x in call.outputs if x.source not in wanted)
    turned = "rows" in case.packed
    copied = {*vectors, *case.cleaned, *["do"] * (grad is not None)}
    copied |= {"lse"} if case.clears or turned else set()
    copies = (slot_bytes(x, case) for x in call.inputs if x.source in copied)
    lse = (slot_bytes(x, case) for x in call.outputs if x.source == "lse" and turned)
    marked = sum(T for side, T in case.lying.totals.items() if side not in case.lying.full)
    return sum(unasked) + sum(copies) + sum(lse) + MARKS * marked


def slot_bytes(x: Slot, case: Case) -> int:
    """Bytes of a slot's tensor: packed, or else padded."""
    T = case.lying.totals.get(SIDES.get(x.source, ""))
    return x.bytes if T is None else x.bytes // (x.shape[0] * x.shape[2]) * T


def run_notes(case: Case, call: CudnnCall, graph: Graph) -> Iterator[str]:
    if case.pass_ == "forward" and (splits := key_splits(case)) > 1:
        B = case.problem.B
        yield f"keys in {splits} parts, as many as cuDNN takes for a batch of {B}, and a merge"
    for name in copied_vectors(graph):
        yield f"{name} is copied to a dense {NAMES[VECTORS[name]]} at each call"
    sizes = {x.source: format_bytes(slot_bytes(x, case)) for x in call.inputs}
    for name, side in case.cleaned.items():
        where = "of no sequence" if side in case.packed else "past the lengths"
        yield f"{name} is copied, {sizes[name]}, with 0 in rows {where}"
    if {*case.lying.gapless} - {*case.lying.full}:
        yield DECLARED
    if case.problem.grad is not None:
        usual = "where it is broadcast, or begins off 16 bytes"
        where = "with 0 in rows that see nothing" if case.clears else usual
        yield f"do is copied, {sizes['do']}, {where}"
    if case.is_paged:
        yield "pages is copied, with a page that some query sees in place of those that none sees"
    if case.problem.scales:
        yield f"weights are rounded to {NAMES[case.problem.dtype]}"
    totals = {side: round_total(T) for side, T in case.lying.totals.items()}
    if case.problem.grad is not None and totals:
        most = " and ".join(f"{n} {side}" for side, n in totals.items())
        yield f"planned for up to {most}: batches of as many run by the same plan"


def copied_vectors(graph: Graph) -> list[str]:
    """Short vectors in a dtype or layout unfit for cuDNN."""
    eqn = graph.eqns[-1]
    named = {name: graph.inputs[n].spec for name, n in quantised_places(graph).items()}
    named = named or dict(zip(eqn.op.roles, operand_specs(graph, eqn), strict=True))
    short = ((n, x) for n, x in named.items() if n in VECTORS)
    return [n for n, x in short if not (x.dtype == VECTORS[n] and x.is_dense)]
