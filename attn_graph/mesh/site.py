"""One rank's computations: boxes of places by ordinary plans, in the rank's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import TYPE_CHECKING, final

import torch
from attrs import define, evolve, field, frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.packed import LENGTHS, STARTS, Packed, and_parts
from attn_graph.ir.storage.packing import Lengths, heads_first
from attn_graph.ir.transforms.boxes import Feed, Piece
from attn_graph.ir.transforms.moving import Box
from attn_graph.lowering.request import Request
from attn_graph.machine.cache import CAPACITY
from attn_graph.machine.likeness import look_at
from attn_graph.masks import And, KeyLengths, QueryLengths, join_masks, needs_of
from attn_graph.masks.canonical import canonical_mask
from attn_graph.mesh.exchange import Line
from attn_graph.mesh.layout import Holding, Ranges
from attn_graph.mesh.schedule import Job
from attn_graph.mesh.sharded import Sharded
from attn_graph.plan import Plan
from attn_graph.plan.building import plan_graph
from attn_graph.spec import TensorSpec, dense_strides, memory_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = Sequence[torch.Tensor]
Jobs = tuple[Job, ...]
ENDS = And(KeyLengths(), QueryLengths())  # in the mask of packed queries and keys


@final
@define(eq=False)
class Remembered:
    """A rank's memory: its boxes, their plans, constants by device, and the agreement of all ranks.

    batches: by their jobs. plans: by what is attended and the looks of its tensors. starts: by
    lengths and device.
    """

    pieces: dict[Box, Piece] = field(factory=dict)
    batches: dict[Jobs, tuple[Jobs, ...]] = field(factory=dict)
    starts: dict[tuple[object, ...], torch.Tensor] = field(factory=dict)
    plans: dict[tuple[object, ...], Plan] = field(factory=dict)
    constants: dict[torch.device, dict[int, torch.Tensor]] = field(factory=dict)
    agrees: bool = False


@final
@frozen(eq=False)
class Site:
    """One rank of a process group, and its part of a sharded graph.

    request: for the whole graph; those for boxes are made from it. side: the pass of its messages.
    """

    sharded: Sharded
    rank: int
    group: ProcessGroup
    request: Request
    memory: Remembered = field(factory=Remembered)
    side: str = "forward"

    @cached_property
    def line(self) -> Line:
        """The way to the other ranks: messages of other graphs, and of the other pass, are kept
        apart."""
        digest = sha256(f"{self.side} {self.sharded}".encode()).digest()
        return Line(self.group, int.from_bytes(digest[:4], "big") >> 1)  # below 2^31

    @cached_property
    def behind(self) -> Site:
        """This site in the backward."""
        return evolve(self, side="backward")

    @property
    def holding(self) -> Holding:
        return self.sharded.holdings[self.rank]

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The inputs of a call: dense parts of the whole, in its memory order, by name."""
        inputs = self.sharded.graph.inputs
        return {
            inputs[n].name: self.local_spec(inputs[n].spec, self.sharded.axes[n])
            for n in self.sharded.open_inputs
        }

    def local_spec(self, whole: TensorSpec, axes: str) -> TensorSpec:
        """The part of a tensor."""
        parts = self.sharded.parts(self.rank, whole.shape, axes)
        shape = [sum(map(len, chunks)) for chunks in parts]
        return TensorSpec(shape, whole.dtype, dense_strides(shape, memory_order(whole)))

    def all_inputs(self, given: Tensors) -> list[torch.Tensor]:
        """The rank's inputs by number: those of a call, and its part of the known ones."""
        device = given[0].device
        if device not in self.memory.constants:
            self.memory.constants[device] = {
                n: self.local_constant(n, x).to(device) for n, x in self.sharded.constants.items()
            }
        numbered = dict(zip(self.sharded.open_inputs, given, strict=True))
        numbered |= self.memory.constants[device]
        return [numbered[n] for n in range(len(numbered))]

    def empty_inputs(self) -> list[torch.Tensor]:
        """The rank's inputs by number, without numbers, for planning."""
        meta, known = torch.device("meta"), self.sharded.constants
        inputs = enumerate(zip(self.sharded.graph.inputs, self.sharded.axes, strict=True))
        specs = {n: self.local_spec(i.spec, axes) for n, (i, axes) in inputs}
        empty = {
            n: torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=meta)
            for n, x in specs.items()
        }
        parts = {n: self.local_constant(n, x).to(meta) for n, x in known.items()}
        return [*(empty | parts).values()]

    def local_constant(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The rank's part of a known tensor: all of it if heads are exchanged for the sequence."""
        if self.sharded.method == "heads":
            return x
        return self.sharded.part(self.rank, x, self.sharded.axes[number])

    def here(self, box: Box, rows: range) -> Box:
        """A box's places in the rank's tensors. rows: its queries in the rank's own."""
        if self.sharded.method == "heads" or self.sharded.cuts_sequences:
            return box  # what it reads beside q, k and v is whole
        own = self.holding
        heads = range(box.heads.start - own.heads.start, box.heads.stop - own.heads.start)
        sizes = len(own.batch), len(own.heads), sum(map(len, own.rows)), box.sizes[3]
        return Box(range(sizes[0]), heads, rows, box.keys, sizes)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """A view [1,H,T,D] of packed queries or keys [T,H,D] of divided sequences, and [1,H,T] of
        a statistic; other tensors as they are."""
        return heads_first(x)[None] if self.sharded.cuts_sequences else x

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that `unpack` shows."""
        return heads_first(x[0]) if self.sharded.cuts_sequences else x

    def unpack_all(self, inputs: Tensors) -> list[torch.Tensor]:
        """The rank's inputs, with q, k and v unpacked."""
        qkv = self.sharded.eqn.args[:3]
        return [self.unpack(x) if n in qkv else x for n, x in enumerate(inputs)]

    def sinks(self, inputs: Tensors) -> torch.Tensor | None:
        """The sinks among the rank's inputs."""
        number = self.sharded.sinks
        return None if number is None else inputs[number]

    def batches(self, jobs: Jobs) -> tuple[Jobs, ...]:
        """Jobs by call: those of one op in parts of sequences are one packed batch."""
        if jobs not in self.memory.batches:
            batches = dict[object, list[Job]]()
            for job in jobs:
                kind = self.kind(self.piece(job.box)) if self.sharded.cuts_sequences else None
                batches.setdefault(kind or job, []).append(job)
            self.memory.batches[jobs] = tuple(map(tuple, batches.values()))
        return self.memory.batches[jobs]

    def kind(self, piece: Piece) -> Attention | None:
        """The op of a box, if it reads nothing of its own places besides q, k and v."""
        reads = any(x in feed.axes for feed in piece.feeds for x in "bij")
        return None if reads or needs_of(piece.node.mask) else piece.node

    def attend(self, jobs: Jobs, qkv: Tensors, inputs: Tensors) -> BoxRun:
        """Attention of a box, or of a packed batch of some, by its own plan, for both passes.

        qkv: the rank's own queries, and the keys and values of the visit.
        """
        piece, here = self.piece(jobs[0].box), self.here(jobs[0].box, jobs[0].here)
        rows, at = tuple(job.here for job in jobs), tuple(job.at for job in jobs)
        each, feeds = [*zip(qkv, (rows, at, at), strict=True)], piece.tensors(inputs, here)
        if len(jobs) == 1:
            tensors = [*(take_chunks(x, chunks) for x, chunks in each), *feeds]
            return BoxRun(piece, here, rows, at, self.plan(piece, tensors), tensors)
        starts = [self.starts(chunks, qkv[0].device) for chunks in (rows, at)]
        tensors = [*(pack_chunks(x, chunks) for x, chunks in each), *feeds, *starts]
        most = max(map(len, rows)), max(map(len, at))
        return BoxRun(piece, here, rows, at, self.plan(piece, tensors, most), tensors)

    def starts(self, chunks: Ranges, device: torch.device) -> torch.Tensor:
        """The starts of chunks one after the other."""
        lengths = (*map(len, chunks),)
        if (lengths, device) not in self.memory.starts:
            ends = [*accumulate(lengths, initial=0)]
            starts = torch.tensor(ends, dtype=torch.int32, device=device)  # as all kernels take
            self.memory.starts[lengths, device] = starts
        return self.memory.starts[lengths, device]

    def plan(self, piece: Piece, tensors: Tensors, most: tuple[int, int] | None = None) -> Plan:
        """The plan of a box, for tensors laid out like these; or of a packed batch of boxes.

        most: the most rows and keys of one in a batch.
        """
        key = (piece.node if most else piece.box, most, *map(look_at, tensors))
        if key not in self.memory.plans:
            if len(self.memory.plans) >= CAPACITY:  # strides that change with each call
                self.memory.plans.clear()
            graph = box_graph(piece, tensors, most)
            self.memory.plans[key] = plan_graph(self.request.with_graph(graph))
        return self.memory.plans[key]

    def piece(self, box: Box) -> Piece:
        """The attention of a box."""
        if box not in self.memory.pieces:
            self.memory.pieces[box] = self.sharded.piece(box)
        return self.memory.pieces[box]


@final
@frozen(eq=False)
class BoxRun:
    """The attention of a box, or of a packed batch of boxes, with its plan and tensors.

    here: its places in the rank's own tensors beside q, k and v. rows: the queries of each box in
    the rank's own. at: its keys in the tensors of the visit.
    """

    piece: Piece
    here: Box
    rows: Ranges
    at: Ranges
    plan: Plan
    tensors: Tensors

    @property
    def packs(self) -> bool:
        """True for a batch."""
        return len(self.rows) > 1

    def forward(self) -> Tensors:
        """o, lse, and further statistics."""
        results = self.plan.run(*self.tensors)[0]
        return [heads_first(x)[None] for x in results] if self.packs else results

    def backward(self, saved: Tensors, grads: Sequence[torch.Tensor | None]) -> Gradients:
        """Gradients of q, k and v, and of further inputs. saved: o and lse of all keys; grads: of
        these, None for zero."""
        wants = [True, True, True, *self.trained()]
        wants += [False] * (len(self.tensors) - len(wants))
        if self.packs:
            saved = [heads_first(x[0]) for x in saved]
            grads = [None if x is None else heads_first(x[0]) for x in grads]
        cotangents = [*grads, *[None] * (len(self.plan.graph.outputs) - len(grads))]
        each = self.plan.pull(tuple(wants), (*self.tensors, *saved), cotangents)
        pairs = zip(self.piece.feeds, self.trained(), strict=True)
        more = zip([feed for feed, wanted in pairs if wanted], each[3:], strict=True)
        dq, dk, dv = (heads_first(x)[None] if self.packs else x for x in each[:3])
        return Gradients(dq, dk, dv, [*more])

    def trained(self) -> list[bool]:
        """The trained feeds; the paper's slopes have no gradient."""
        trains = self.piece.node.trains[3:]
        return [w and f.source is not None for f, w in zip(self.piece.feeds, trains, strict=True)]


@final
@frozen(eq=False)
class Gradients:
    """Gradients of a box; more: of its inputs besides q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    more: Sequence[tuple[Feed, torch.Tensor]]


def box_graph(piece: Piece, tensors: Tensors, most: tuple[int, int] | None) -> Graph:
    """The graph of a box, of tensors laid out like these; or of boxes of one op as packed
    sequences: their starts come last. most: the most rows and keys of one of these.
    """
    b = Builder(trusts=True)
    names = ["q", "k", "v", *(f"{feed.name}_{n}" for n, feed in enumerate(piece.feeds))]
    names += STARTS.values() if most else ()
    values = [b.input(n, TensorSpec.like(x)) for n, x in zip(names, tensors, strict=True)]
    if not most:
        return b.graph(*b.emit(piece.node, *values))
    rows, keys = most
    mask = canonical_mask(join_masks(And, [*and_parts(piece.node.mask), ENDS]), rows, keys)
    lengths = {
        LENGTHS[side]: b.emit(Lengths(all_rows=True), x)[0]
        for side, x in zip(LENGTHS, values[-2:], strict=True)
    }
    op = Packed(evolve(piece.node, mask=mask), rows, keys)
    ends = [lengths[name] for name in needs_of(mask)]
    return b.graph(*b.emit(op, *values[:-2], *ends, *values[-2:]))


def pack_chunks(x: torch.Tensor, chunks: Ranges) -> torch.Tensor:
    """The positions of chunks of [1,heads,any,D] as packed rows, dense, heads side by side."""
    rows = heads_first(x[0])
    return torch.cat([rows[own.start : own.stop] for own in chunks])


def take_chunks(x: torch.Tensor, chunks: Ranges) -> torch.Tensor:
    """The positions of chunks of [B,heads,any,...], one chunk after the other; a view of one."""
    pieces = [x[:, :, own.start : own.stop] for own in chunks]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
