"""Sharding without messages: each rank has whole sequences or heads, and one ordinary plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.transforms.boxes import Piece, cut_feed
from attn_graph.mesh.site import Site
from attn_graph.plan import Plan
from attn_graph.plan.building import plan_graph
from attn_graph.spec import TensorSpec

Tensors = Sequence[torch.Tensor]
SLOPES = "own_slopes"  # the paper's slopes of ALiBi of a rank's heads


@final
@frozen(eq=False)
class OwnPart:
    """A rank's part of a graph, with whole sequences or heads on each rank."""

    site: Site

    @cached_property
    def piece(self) -> Piece:
        """The attention of the rank's batch entries and heads."""
        return self.site.sharded.piece(self.site.sharded.own_box(self.site.rank))

    @cached_property
    def plan(self) -> Plan:
        """The plan of the rank's part. Raises NoBackendError."""
        return plan_graph(self.site.request.with_graph(self.graph()))

    def graph(self) -> Graph:
        """The whole graph, with the rank's parts of the inputs; behind them slopes, if needed."""
        sharded, b = self.site.sharded, Builder(trusts=True)
        inputs = zip(sharded.graph.inputs, sharded.axes, strict=True)
        values = [b.input(i.name, self.site.local_spec(i.spec, axes)) for i, axes in inputs]
        slopes = [b.input(SLOPES, TensorSpec.like(x)) for x in self.slopes(torch.device("cpu"))]
        for eqn in sharded.graph.eqns[:-1]:
            values += b.emit(eqn.op, *(values[i] for i in eqn.args))
        node: Attention = evolve(self.piece.node, sinks=sharded.node.sinks, part=sharded.node.part)
        op: Op = evolve(sharded.packed, op=node) if sharded.packed else node
        values += b.emit(op, *self.operands(values, slopes))
        return b.graph(*(values[i] for i in sharded.graph.outputs))

    def operands(self, values: Sequence[Value], slopes: Sequence[Value]) -> list[Value]:
        """The operands of the rank's op, in its order."""
        sharded = self.site.sharded
        feeds = [
            slopes[0] if feed.source is None else values[feed.source] for feed in self.piece.feeds
        ]
        if sharded.sinks is not None:
            feeds.insert(len(feeds) - 2 * bool(sharded.node.dropout), values[sharded.sinks])
        starts = sharded.whole[0].args[len(sharded.eqn.args) :]
        return [*(values[i] for i in sharded.eqn.args[:3]), *feeds, *(values[i] for i in starts)]

    def slopes(self, device: torch.device) -> list[torch.Tensor]:
        """The paper's slopes of ALiBi of the rank's heads, if needed."""
        feeds = [feed for feed in self.piece.feeds if feed.source is None][:1]
        beside = [torch.empty(0, device=device)]
        return [cut_feed(feed, self.piece.box, beside, self.piece.box) for feed in feeds]

    def forward(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs, and the tensors saved for the backward."""
        return self.plan.run(*inputs, *self.slopes(inputs[0].device))

    def backward(
        self, inputs: Tensors, saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """The gradients of all trained inputs, by number."""
        trained, slopes = self.site.sharded.trained, self.slopes(inputs[0].device)
        needs = *(n in trained for n in range(len(inputs))), *(False for _ in slopes)
        gradients = self.plan.pull(needs, (*inputs, *slopes, *saved), grads)
        return dict(zip(sorted(trained), gradients, strict=True))
