"""Runs cuDNN's plans on packed tensors: each call prepares their offsets and lengths on the device.

cuDNN reads the start of each sequence, in elements, and its length, in int32. Both are made from
starts and lengths on the device, without waiting for it.

Three undocumented cases are avoided:

- A tile may read rows outside all sequences and multiply them by 0, so NaN there would reach
  others (NVIDIA/cudnn-frontend#624). A copy of these operands has 0 in these rows.
- Below 9.25 queries of a sequence without keys become NaN (NVIDIA/cudnn-frontend#943). cuDNN is
  given no queries for this sequence, and no keys for one without queries.
- cuDNN leaves rows outside all sequences unwritten. They are written before it runs.

In pages this is not possible: keys past a length, in its last page, have to be finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from attrs import field, frozen

from attn_graph.errors import PlanMismatchError
from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import LENGTHS, STARTS
from attn_graph.lowering.cudnn.graph import CudnnCall, Slot
from attn_graph.lowering.cudnn.run import (
    Execute,
    Results,
    blank,
    cast_sinks,
    full_lengths,
    operand_names,
    readable_vector,
)
from attn_graph.lowering.cudnn.sequences import SIDES, CudnnSequences, cleaned_names, round_total
from attn_graph.lowering.lengths import sequence_rows
from attn_graph.lowering.problem import (
    ALIGNED,
    Problem,
    find_misplaced,
    on_boundary,
    read_operands,
)
from attn_graph.lowering.rooms import NO_ROOMS, Rooms, require_aligned, room_or_new
from attn_graph.machine.device_memo import DeviceMemo
from attn_graph.machine.sizes import format_bytes
from attn_graph.machine.workspace import Buffer, Scratch, Views, Workspace
from attn_graph.spec import INF, dense_strides

Named = dict[str, torch.Tensor]
MARKS = 16  # bytes a row, of its number and of whether it belongs to a sequence
SEQ_LENGTHS = {"seq_len_q": ("rows", "keys"), "seq_len_kv": ("keys", "rows")}
VECTORS = (*SEQ_LENGTHS, "sink_token")  # packed for cuDNN


@final
@frozen(eq=False)
class CudnnPackedRun:
    """Runs a graph on packed tensors: passes the call's tensors to cuDNN.

    scratch: cuDNN's workspace, and the tables made for it.
    """

    call: CudnnCall
    problem: Problem
    sequences: CudnnSequences
    graph: Graph
    workspace: Workspace
    scratch: Scratch
    execute: Execute
    sizes: DeviceMemo[torch.Tensor] = field(factory=DeviceMemo, init=False)

    @classmethod
    def of(
        cls,
        call: CudnnCall,
        problem: Problem,
        sequences: CudnnSequences,
        graph: Graph,
        workspace: Workspace,
        need: int,
        execute: Execute,
    ) -> CudnnPackedRun:
        """need: bytes of cuDNN's workspace."""
        scratch = Scratch(buffers(call, problem, sequences, need))
        return cls(call, problem, sequences, graph, workspace, scratch, execute)

    @property
    def roles(self) -> tuple[str, ...]:
        """The operands of the equation, by name."""
        starts = (STARTS[side] for side in self.sequences.totals)
        pages = ("pages",) if self.sequences.table else ()
        return (*operand_names(self.problem), *starts, *pages)

    def forward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """o, and lse if it is stored."""
        made = self.run(self.named(tensors), rooms)
        return [made[name] for name in self.graph.result_names], [*made.values()]

    def backward(self, *tensors: torch.Tensor, rooms: Rooms = NO_ROOMS) -> Results:
        """The wanted gradients of the operands, o, lse and the cotangents."""
        made = self.run(self.named(tensors), rooms)
        return [made[name] for name in self.graph.result_names], ()

    def named(self, tensors: Sequence[torch.Tensor]) -> Named:
        """The operands by name, with lengths from differences of starts."""
        return dict(zip(self.roles, read_operands(self.graph, tensors), strict=True))

    def run(self, x: Named, rooms: Rooms) -> Named:
        device, ends = x["q"].device, self.ends(x)
        require_aligned(rooms)
        with self.workspace.lease(self.scratch, device) as room:
            self.write_tables(x, ends, room)
            known = {**self.clean(x, room), **room, **self.lengths(ends)}
            given = [argument(slot, known) for slot in self.call.inputs]
            made = {slot.source: self.blank(slot, x, room, rooms) for slot in self.call.outputs}
            pack = dict(enumerate((*given, *made.values()), start=1))
            self.execute(pack, room.get("workspace"), device)
            return self.finish(made, x, ends, rooms)

    # Tables

    def ends(self, x: Named) -> Named:
        """The length of each sequence on both sides; M or N without given lengths."""
        sizes = {"rows": self.problem.M, "keys": self.problem.N}
        return {
            side: x[name] if name in x else self.full(sizes[side], x["q"].device)
            for side, name in LENGTHS.items()
        }

    def full(self, count: int, device: torch.device) -> torch.Tensor:
        """One length for all entries."""
        return self.sizes.get((count, device), lambda: full_lengths(self.problem.B, count, device))

    def lengths(self, ends: Named) -> Named:
        """The lengths for cuDNN, by argument: 0 on packed sides if the other side's is."""
        made = {}
        for argument, (side, other) in SEQ_LENGTHS.items():
            apart = side in self.sequences.totals and not self.sequences.alike
            made[argument] = ends[side] * (ends[other] > 0) if apart else ends[side]
        return made

    def write_tables(self, x: Named, ends: Named, room: Views) -> None:
        """Write offsets in elements, and the table of pages."""
        wide = {name: x[name].long() for name in STARTS.values() if name in x}
        for slot in self.call.inputs:
            if slot.step:
                torch.mul(wide[slot.source], slot.step, out=room[slot.argument])
        if self.sequences.table:
            room["pages"].copy_(self.used_pages(x["pages"], ends["keys"][:, None]))

    def used_pages(self, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The table, with an entry's first page (0 without one) in place of pages past its length:
        cuDNN may read them."""
        begin = self.sequences.page * torch.arange(table.shape[1], device=table.device)
        return torch.where(begin < lengths, table, table[:, :1] * (lengths > 0))

    # Arguments

    def clean(self, x: Named, room: Views) -> Named:
        """The operands, with 0 in rows outside sequences if cuDNN multiplies by them."""
        given = dict(x)
        for name in cleaned_names(self.call, self.sequences):
            inside = self.inside(SIDES[name], x)[:, None, None]
            given[name] = torch.where(inside, x[name], 0.0).contiguous()
        if self.problem.grad is not None:
            self.clear_blind(given, room)
            given = {name: on_boundary(t) for name, t in given.items()}
        return given

    def inside(self, side: str, x: Named) -> torch.Tensor:
        """True for rows inside a sequence: [T] of bool."""
        lengths = None if side in self.sequences.gapless else x[LENGTHS[side]]
        return sequence_rows(x[STARTS[side]], lengths, self.sequences.totals[side])

    def clear_blind(self, given: Named, room: Views) -> None:
        """Set do to 0 and lse to +inf in rows without keys: exp(s - lse) is 0 for every score."""
        do, lse = given["do"], given["lse"]
        packed = "rows" in self.sequences.totals
        lse = lse.T if packed else lse
        blind = lse == -INF
        slot = next(slot for slot in self.call.inputs if slot.source == "do")
        copy = torch.empty_strided(*self.layout(slot), dtype=do.dtype, device=do.device)
        given["do"] = copy.copy_(do).masked_fill_(blind[..., None], 0.0)
        room["stats"].copy_(lse).masked_fill_(blind, INF)

    # Results

    def layout(self, slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a result as we give it back, or of do as it is copied."""
        T = self.sequences.totals.get(SIDES.get(slot.source, ""))
        return blank(slot)[:2] if T is None else packed_layout(slot, T)

    def blank(self, slot: Slot, x: Named, room: Views, rooms: Rooms) -> torch.Tensor:
        """An empty result. It is 0 if cuDNN adds to it or leaves rows unwritten; lse has its value
        for rows without keys."""
        if slot.source == "lse" and slot.offsets:
            return self.blank_lse(x, room["stats"])
        lying = (*self.layout(slot), slot.dtype)
        made = room_or_new(rooms, slot.source, lying, x["q"].device)
        return made.zero_() if slot.offsets or slot.source not in SIDES else made

    def blank_lse(self, x: Named, room: torch.Tensor) -> torch.Tensor:
        """lse [T,H] of rows without keys: -inf, or in a sequence without keys the sinks."""
        if "sinks" not in x or self.sequences.alike:
            return room.fill_(-INF)
        outside = ~self.inside("rows", x)
        return room.copy_(x["sinks"]).masked_fill_(outside[:, None], -INF)

    def finish(self, made: Named, x: Named, ends: Named, rooms: Rooms) -> Named:
        """The results as we give them back."""
        totals, other = self.sequences.totals, {"rows": "keys", "keys": "rows"}
        cast_sinks(made, self.problem)
        for name, t in made.items():
            side = SIDES.get(name, "")
            if name == "lse" and side in totals:
                made[name] = rooms[name].copy_(t.T) if name in rooms else t.T.contiguous()
            elif side and side not in totals:
                empty = (ends[other[side]] == 0).view(-1, *(1 for _ in t.shape[1:]))
                made[name] = self.without_partner(name, t, empty, x)
        return made

    def without_partner(
        self, name: str, t: torch.Tensor, empty: torch.Tensor, x: Named
    ) -> torch.Tensor:
        """A padded result, with 0 in `empty` entries: their other side has no rows."""
        if name != "lse":
            return t.masked_fill_(empty, 0.0)
        blind = x["sinks"][:, None] if "sinks" in x else t.new_full((), -INF)
        return torch.where(empty, blind, t, out=t)


def argument(slot: Slot, known: Named) -> torch.Tensor:
    """The tensor for a slot, known by argument or by source. Raises PlanMismatchError for an
    address off 16 bytes."""
    given = known[slot.argument if slot.argument in known else slot.source]
    if slot.argument in VECTORS:
        return readable_vector(given, slot.dtype)
    if given.data_ptr() % ALIGNED:
        raise PlanMismatchError(*find_misplaced([(slot.source, given)]))
    return given


def packed_layout(slot: Slot, T: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a packed tensor [T,H,D] without gaps, for a slot [B,H,M,D]."""
    shape = (T, slot.shape[1], slot.shape[3])
    return shape, dense_strides(shape)


def buffers(
    call: CudnnCall, problem: Problem, sequences: CudnnSequences, need: int
) -> dict[str, Buffer]:
    """The memory of a call, by purpose. need: bytes of cuDNN's workspace."""
    p, T = problem, sequences.rows
    room = {"workspace": Buffer((need,), torch.uint8)} if need else {}
    room |= {x.argument: Buffer(x.shape[:1], x.dtype) for x in call.inputs if x.step}
    if sequences.table:
        room["pages"] = Buffer(sequences.table.shape, torch.int32)
    has_lse = any(x.source == "lse" for x in call.slots)
    if has_lse and T is not None:
        room["stats"] = Buffer((T, p.H), torch.float32)
    elif p.grad is not None:
        room["stats"] = Buffer((p.B, p.H, p.M), torch.float32)
    return room


def leased_bytes(call: CudnnCall, problem: Problem, sequences: CudnnSequences, need: int) -> int:
    """Bytes of `buffers`."""
    return Scratch(buffers(call, problem, sequences, need)).bytes


def copied_operands(call: CudnnCall, problem: Problem, sequences: CudnnSequences) -> dict[str, int]:
    """Operands copied at each call, and their bytes. The copies have 0 in rows outside sequences,
    and do in rows without keys."""
    names = (*cleaned_names(call, sequences), *(["do"] if problem.grad is not None else []))
    return {x.source: packed_bytes(x, sequences) for x in call.inputs if x.source in names}


def packed_bytes(x: Slot, sequences: CudnnSequences) -> int:
    """Bytes of a slot's tensor: packed, or else padded."""
    T = sequences.totals.get(SIDES.get(x.source, ""))
    return x.bytes if T is None else x.bytes // (x.shape[0] * x.shape[2]) * T


def packed_temporary_bytes(call: CudnnCall, problem: Problem, sequences: CudnnSequences) -> int:
    """Bytes of unwanted gradients, of copies, and of marks of rows."""
    wanted = ("o", "lse") if problem.grad is None else problem.grad.names
    unasked = (packed_bytes(x, sequences) for x in call.outputs if x.source not in wanted)
    copies = copied_operands(call, problem, sequences).values()
    return sum(unasked) + sum(copies) + MARKS * sum(sequences.totals.values())


def packed_notes(call: CudnnCall, problem: Problem, sequences: CudnnSequences) -> Iterator[str]:
    for name, count in copied_operands(call, problem, sequences).items():
        where = "that see nothing" if name == "do" else "of no sequence"
        yield f"{name} is copied, {format_bytes(count)}, with 0 in rows {where}"
    if sequences.table is not None:
        yield "pages is copied, with the first page of an entry in place of those past its length"
        yield "keys past a length, in its last page, have to be finite: cuDNN multiplies them by 0"
    totals = {side: round_total(T) for side, T in sequences.totals.items()}
    if problem.grad is not None and totals:
        most = " and ".join(f"{n} {side}" for side, n in totals.items())
        yield f"planned for up to {most}: batches of as many run by the same plan"
