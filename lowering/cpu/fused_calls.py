"""Attention on a CPU as a few calls of PyTorch's fused kernel, on the tiles the mask leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import Attention, AttentionGrad, Operands
from attn_graph.ir.transforms.gradient_ops import sink_gradient
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.merging import merge_, sink_
from attn_graph.lowering.cpu.far_rows import refuse_far_rows
from attn_graph.lowering.cpu.fused_slots import (
    Addends,
    PartSlot,
    TileSlot,
    add_share,
    all_places,
    fill_addend,
    keep_all,
    tile_slot,
)
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem, new_gradient
from attn_graph.machine.ambient import constant_beside, is_traced
from attn_graph.masks.places import Place
from attn_graph.spec import INF, TensorSpec

MOST_POSITIONS = 2**14  # held by a plan: 128 KiB of int64
Tensors = Mapping[str, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@final
@frozen(eq=False)
class FusedRun:
    """Runs an attention, or its gradient, on its tiles.

    slots: the tiles; None if each call has to list them, or make them ready. alone: the keys of a
    single call, if it is of operands in place. at: every place, without data; None if
    each call makes them.
    """

    tiles: FusedTiles
    slots: tuple[TileSlot, ...] | None
    alone: PartSlot | None
    at: Place | None

    @classmethod
    def of(cls, tiles: FusedTiles) -> FusedRun:
        """Tiles with everything that can be made ready before a call."""
        p, slots = tiles.problem, None
        if tiles.static is not None:
            held: Addends | None = {} if tiles.holds else None
            slots = tuple([tile_slot(tiles, tile, held) for tile in tiles.static])
        alone = None if slots is None or tiles.alone is None else slots[0].parts[0]
        few = p.B + p.H + p.M + p.N <= MOST_POSITIONS
        at = all_places(p, {}) if few and tiles.addends else None
        return cls(tiles, slots, alone, at)

    def listed(self, data: Tensors) -> tuple[Iterable[TileSlot], bool]:
        """The tiles of a call, given the mask's tensors; True if they are one call of the
        kernel."""
        if self.slots is not None:
            return self.slots, self.tiles.whole
        tiles = self.tiles.tiles(data)
        slots = (tile_slot(self.tiles, tile, None) for tile in tiles)  # made ready in passing
        return slots, self.tiles.is_whole(tiles)

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attend(operands, scratch, with_lse=True)

    def infer(self, operands: Sequence[torch.Tensor], scratch: Tensors) -> tuple[torch.Tensor, ...]:
        return self.attend(operands, scratch, with_lse=False)[:1]

    def attend(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, lse; the latter is meaningless unless wanted."""
        if self.alone is not None:
            return self.attend_alone(self.alone, operands, with_lse)
        call = self.call(operands, scratch)
        slots, whole = self.listed(call.given.mask)
        if whole and self.tiles.is_direct:
            (slot,) = slots
            return call.attend(slot, with_lse=with_lse)
        p, device = self.tiles.problem, operands[0].device
        o, lse = p.new_o(device, scratch), p.new_statistic("lse", device, scratch)
        for slot in slots:
            part, part_lse = call.attend(slot, with_lse=with_lse)
            slot.rows(o).copy_(part[..., : o.shape[3]])
            if with_lse:
                slot.rows(lse).copy_(part_lse)
            del part, part_lse  # else two of them would need room
        return o, lse

    def attend_alone(
        self, part: PartSlot, operands: Sequence[torch.Tensor], with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = operands[0], part.keys(operands[1]), part.keys(operands[2])
        node, addend = self.tiles.problem.node, None
        if part.part.kind == "mixed":
            addend = torch.where(operands[3], 0.0, -INF).to(q.dtype)
        elif node.modifiers:
            addend = operands[3]
        unseen = fused_cpu.find_unseen(addend) if with_lse and addend is not None else None
        return fused_cpu.attend(q, k, v, node.scale, part.causal, addend, unseen)

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k, v and wanted sinks, by number of the operand."""
        specs, sums = self.tiles.problem.specs, self.pull(operands, scratch)
        gradients = {
            i: new_gradient(spec).copy_(x[..., : spec.shape[3]]) if f"d{name}" in scratch else x
            for i, (name, spec, x) in enumerate(zip("qkv", specs, sums, strict=False))
        }
        del sums  # else they would stay beside the sinks' memory
        grad = self.tiles.problem.grad
        if (place := wanted_sinks(grad)) is not None:
            assert grad is not None
            gradients[place] = sink_gradient_of(grad, operands)
        return gradients

    def pull(self, operands: Sequence[torch.Tensor], scratch: Tensors) -> Triple:
        """The gradients in the dtype and head size of the computation, perhaps in scratch."""
        p = self.tiles.problem
        assert p.grad is not None
        read = p.grad.split(operands)
        assert read.do is not None  # else only dlse is left, and this kernel can't use it
        lse = read.lse
        refuse_far_rows(p.node, lse)
        call = self.call(read.own, scratch)
        unseen = lse == -INF
        finite = lse.masked_fill(unseen, 0.0)
        o = fill(scratch["o"], read.o) if "o" in scratch else read.o
        do = self.seen(read.do, unseen, scratch)
        slots, whole = self.listed(call.given.mask)
        if whole:
            (slot,) = slots
            return call.pull(slot, slot.parts[0], o, finite, do)
        return self.summed(call, slots, o, finite, do)

    def seen(self, do: torch.Tensor, unseen: torch.Tensor, scratch: Tensors) -> torch.Tensor:
        """do as the kernel reads it, 0 in rows without keys."""
        clears = self.tiles.blind and (is_traced() or bool(unseen.any()))
        if not clears and "do" in self.tiles.in_place:
            return do
        room = fill(scratch["do"], do)
        return room.masked_fill_(unseen[..., None], 0.0) if clears else room

    def summed(
        self,
        call: TileCall,
        slots: Iterable[TileSlot],
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> Triple:
        """dq, dk, dv of all tiles, in wider precision and padded."""
        specs = self.tiles.problem.specs
        rooms = [SumRoom(x, call.scratch.get(f"d{n}")) for n, x in zip("qkv", specs, strict=False)]
        dq, sums = rooms[0].tensor, list[torch.Tensor]()
        for slot in slots:
            rows = slot.rows(dq)  # no other tile has them
            if not slot.parts:
                rows.zero_()
            for number, part in enumerate(slot.parts):
                share, *others = call.pull(slot, part, o, lse, do)
                rows.add_(share) if number else rows.copy_(share)
                if sums:
                    add_share(sums[0], others[0], part)
                    add_share(sums[1], others[1], part)
                else:
                    sums = [  # of an unnamed zip: a named one would hold the last pair
                        room.begin_sum(x, part) for room, x in zip(rooms[1:], others, strict=True)
                    ]
                del share, others  # else two of them would need room
        dk, dv = sums or [room.tensor.zero_() for room in rooms[1:]]
        return dq, dk, dv

    def call(self, own: Sequence[torch.Tensor], scratch: Tensors) -> TileCall:
        """own: the attention's operands."""
        p = self.tiles.problem
        by_part = self.tiles.keys_a_part is not None
        q, k, v = [
            x if name not in scratch or (by_part and name != "q") else fill(scratch[name], x)
            for name, x in zip("qkv", own, strict=False)
        ]
        given = p.node.split(own)
        traced = is_traced()
        at = None
        if "addend" in scratch:
            ready = None if traced else self.at
            at = all_places(p, given.mask) if ready is None else ready.reading(given.mask)
        return TileCall(p.node, given, scratch, at, q, k, v, by_part, traced)


@final
@frozen(eq=False)
class SumRoom:
    """Memory for summing gradients of an operand. own: scratch for it; None: the gradient
    itself."""

    spec: TensorSpec
    own: torch.Tensor | None

    @property
    def tensor(self) -> torch.Tensor:
        return new_gradient(self.spec) if self.own is None else self.own

    def begin_sum(self, share: torch.Tensor, part: PartSlot) -> torch.Tensor:
        """The sum, begun with the share of the first part. A share of all keys is the sum
        itself."""
        if part.keys is keep_all:
            return share if self.own is None else self.own.copy_(share)
        total = self.tensor.zero_()
        add_share(total, share, part)
        return total


@final
@frozen(eq=False)
class TileCall:
    """One call's operands, packed. at: every place, if something is added to scores. by_part:
    whether k and v are packed a part at a time. traced: True if tensors of planning may have to be
    fake."""

    node: Attention
    given: Operands[torch.Tensor]
    scratch: Tensors
    at: Place | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    by_part: bool
    traced: bool

    def attend(self, slot: TileSlot, *, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of one tile, its parts merged. with_lse: otherwise lse of rows without keys
        stays wrong, unless o needs it. Raises FarRowsError if lse is too coarse for the weights of
        parts."""
        rows = slot.rows(self.q)
        alone = len(slot.parts) == 1 and self.given.sinks is None  # else results change
        needed = with_lse or not alone
        results: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in slot.parts:
            k, v = part.keys(self.k), part.keys(self.v)
            if self.by_part:
                k, v = self.filled("k", k), self.filled("v", v)
            makes = part.makes or self.traced
            addend = self.addend(slot, part) if makes else part.addend
            unseen = self.unseen(part, addend) if part.empties and needed else None
            o, lse = fused_cpu.attend(rows, k, v, self.node.scale, part.causal, addend, unseen)
            if results is None:
                results = o if alone else o.to(lse.dtype), lse
            else:
                merge_(*results, o, lse)
            del o, lse  # else three of them would need room
        if results is None:
            results = torch.zeros_like(rows), rows.new_full(rows.shape[:3], -INF)
        if self.given.sinks is not None:
            sink_(*results, self.given.sinks[slot.tile.heads.start : slot.tile.heads.stop])
        if not alone:
            refuse_far_rows(self.node, results[1])
        return results

    def filled(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Keys or values of a part as the kernel reads them."""
        if name not in self.scratch:
            return x
        room = self.scratch[name]
        shape = (*x.shape[:3], room.shape[3])
        return fill(room.flatten()[: prod(shape)].view(shape), x)

    def pull(
        self, slot: TileSlot, part: PartSlot, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
    ) -> Triple:
        """dq, dk, dv of one part of a tile."""
        q, k, v = slot.rows(self.q), part.keys(self.k), part.keys(self.v)
        given = slot.rows(do), slot.rows(o), slot.rows(lse)
        addend = self.addend(slot, part) if part.makes or self.traced else part.addend
        how = self.node.scale, part.causal, addend
        return fused_cpu.attend_backward(q, k, v, *given, *how)

    def unseen(self, part: PartSlot, addend: torch.Tensor | None) -> torch.Tensor | None:
        """The rows without keys in a part: held since planning, or read off its addend."""
        if part.makes:
            assert addend is not None
            return fused_cpu.find_unseen(addend)
        return None if part.unseen is None else constant_beside(part.unseen, self.q)

    def addend(self, slot: TileSlot, part: PartSlot) -> torch.Tensor | None:
        """The addend of a part's scores: held since planning, or made in scratch."""
        if not part.makes:
            return None if part.addend is None else constant_beside(part.addend, self.q)
        assert self.at is not None
        room = self.scratch["addend"][: part.count].view(part.shape)
        runs, node, mixed = part.part.runs, self.node, part.part.kind == "mixed"
        pieces = (room,) if len(runs) == 1 else room.split([*map(len, runs)], -1)
        for piece, run in zip(pieces, runs, strict=True):
            at = self.at.within(slot.tile.batch, slot.tile.heads, slot.tile.rows, run)
            fill_addend(piece, node, self.given.modifiers, at, mixed)
        return room


# Sinks, whose gradient is a sum over rows


def wanted_sinks(grad: AttentionGrad | None) -> int | None:
    """The number of the sinks among the operands, if their gradient is wanted."""
    roles = grad.attention.roles if grad is not None else ()
    place = roles.index("sinks") if "sinks" in roles else None
    return place if place is not None and grad is not None and grad.wants[place] else None


def sink_bytes(problem: Problem) -> int:
    """Bytes of `sink_gradient_of`, in the dtype of scores: the product of do and o, each of them if
    it is narrower, and five numbers a row."""
    if wanted_sinks(problem.grad) is None:
        return 0
    each = problem.E * (3 if problem.dtype != problem.wide else 1) + 5
    return problem.B * problem.H * problem.M * each * problem.wide.itemsize


def sink_gradient_of(grad: AttentionGrad, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """dsinks [H] = sum_bi exp(sink - lse) (dlse - delta), of equal bits for all strides of lse."""
    given = grad.split(operands)
    sinks, lse = grad.attention.split(given.own).sinks, given.lse.contiguous()
    assert sinks is not None
    surplus = torch.zeros_like(lse) if given.dlse is None else given.dlse.clone()
    if given.do is not None:
        surplus -= (given.do.to(lse.dtype) * given.o).sum(-1)
    return sink_gradient(sinks, lse, surplus)


def fill(room: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """room = x [B,H,L,...] in the room's dtype, with zeros up to the room's longer last axis."""
    if x.stride(2) == 1 and x.shape[3] == room.shape[3] > 1:
        transpose(room, x)
    else:
        room[..., : x.shape[3]].copy_(x)
        room[..., x.shape[3] :].zero_()
    return room


def transpose(room: torch.Tensor, x: torch.Tensor) -> None:
    """room = x, for x [B,H,L,D] with its axes L and D swapped in memory.

    PyTorch copies one transposed matrix in blocks, faster than all of them at once.
    """
    for to, each in zip(room.flatten(0, 1).unbind(), x.flatten(0, 1).unbind(), strict=True):
        to.copy_(each)
