"""One rank's computations: boxes of places by ordinary plans, in the rank's own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, final

import torch
from attrs import define, evolve, field, frozen

from attn_graph.ir.boxes import Feed, Piece
from attn_graph.ir.builder import Builder
from attn_graph.ir.graph import Graph
from attn_graph.lowering.request import Request
from attn_graph.machine.cache import CAPACITY
from attn_graph.machine.likeness import look_at
from attn_graph.masks.moving import Box
from attn_graph.mesh.exchange import Line, tag_of
from attn_graph.mesh.layout import Holding
from attn_graph.mesh.schedule import Job
from attn_graph.mesh.sharded import Sharded
from attn_graph.plan import Plan
from attn_graph.plan.building import plan_graph
from attn_graph.spec import TensorSpec, dense_strides, memory_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensors = Sequence[torch.Tensor]


@final
@define(eq=False)
class Remembered:
    """A rank's memory: its boxes, their plans, constants by device, and the agreement of all ranks.

    plans: by the box and the looks of its tensors.
    """

    pieces: dict[Box, Piece] = field(factory=dict)
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
        return Line(self.group, tag_of(f"{self.side} {self.sharded}"))

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
        if self.sharded.method == "heads":
            return box  # what it reads beside q, k and v is whole
        own = self.holding
        sizes = len(own.batch), len(own.heads), sum(map(len, own.rows)), box.sizes[3]
        heads = range(box.heads.start - own.heads.start, box.heads.stop - own.heads.start)
        return Box(range(sizes[0]), heads, rows, box.keys, sizes)

    def sinks(self, inputs: Tensors) -> torch.Tensor | None:
        """The sinks among the rank's inputs."""
        number = self.sharded.sinks
        return None if number is None else inputs[number]

    def attend(self, job: Job, qkv: Tensors, inputs: Tensors) -> BoxCall:
        """Attention of a job's box by its own plan, for both passes."""
        piece, here = self.piece(job.box), self.here(job.box, job.here)
        tensors = (*qkv, *piece.tensors(inputs, here))
        return BoxCall(piece, here, job.at, self.plan(piece, tensors), tensors)

    def plan(self, piece: Piece, tensors: Tensors) -> Plan:
        """The plan of a box, for tensors laid out like these."""
        key = (piece.box, *map(look_at, tensors))
        if key not in self.memory.plans:
            if len(self.memory.plans) >= CAPACITY:  # strides that change with each call
                self.memory.plans.clear()
            self.memory.plans[key] = plan_graph(self.request.with_graph(box_graph(piece, tensors)))
        return self.memory.plans[key]

    def piece(self, box: Box) -> Piece:
        """The attention of a box."""
        if box not in self.memory.pieces:
            self.memory.pieces[box] = self.sharded.piece(box)
        return self.memory.pieces[box]


@final
@frozen(eq=False)
class BoxCall:
    """The attention of a box, with its plan and tensors.

    here: its places in the rank's own tensors. at: its keys in the tensors of the visit.
    """

    piece: Piece
    here: Box
    at: range
    plan: Plan
    tensors: Tensors

    def forward(self) -> Tensors:
        """o, lse, and further statistics."""
        return self.plan.run(*self.tensors)[0]

    def backward(self, saved: Tensors, grads: Sequence[torch.Tensor | None]) -> Gradients:
        """Gradients of q, k and v, and of further inputs. saved: o and lse of all keys; grads: of
        these, None for zero."""
        wants = [True, True, True, *self.trained()]
        cotangents = [*grads, *[None] * (len(self.plan.graph.outputs) - len(grads))]
        each = self.plan.pull(tuple(wants), (*self.tensors, *saved), cotangents)
        pairs = zip(self.piece.feeds, self.trained(), strict=True)
        more = zip([feed for feed, wanted in pairs if wanted], each[3:], strict=True)
        dq, dk, dv = each[:3]
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


def box_graph(piece: Piece, tensors: Tensors) -> Graph:
    """The graph of a box, of tensors laid out like these."""
    b = Builder(trusts=True)
    names = ["q", "k", "v", *(f"{feed.name}_{n}" for n, feed in enumerate(piece.feeds))]
    values = [b.input(n, TensorSpec.like(x)) for n, x in zip(names, tensors, strict=True)]
    return b.graph(*b.emit(piece.node, *values))
