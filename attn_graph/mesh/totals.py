"""A rank's sums: results over sets of keys by their lse, gradients over boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from attrs import field, frozen

from attn_graph.ir.ops import STATISTICS, join_statistics
from attn_graph.ir.transforms.gradient_ops import sink_gradient
from attn_graph.ir.transforms.moving import Box
from attn_graph.kernels.merging import merge_, sink_
from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.schedule import shared_inputs
from attn_graph.mesh.site import Gradients, Site, take_chunks
from attn_graph.spec import INF, TensorSpec, accumulator, dense_strides, memory_order

Tensors = Sequence[torch.Tensor]


@final
@frozen(eq=False)
class RowResults:
    """o [B,H,M,E], lse and further statistics [B,H,M] of a rank's queries, in float32 or wider.

    seen: the ranges of queries with results.
    """

    o: torch.Tensor
    rows: Mapping[str, torch.Tensor]
    seen: set[range] = field(factory=set)

    @classmethod
    def empty(cls, site: Site, q: torch.Tensor, width: int) -> RowResults:
        """Results of queries before any keys. width: E."""
        wide = accumulator(q.dtype)
        o = q.new_zeros((*q.shape[:3], width), dtype=wide)
        rows = {"lse": q.new_full(q.shape[:3], -INF, dtype=wide)}
        s = q.new_empty((*q.shape[:3], 0), dtype=wide)  # scores with no keys
        more = site.sharded.node.without_gradient
        return cls(o, rows | {name: STATISTICS[name]().run(s)[0] for name in more})

    def add(self, chunks: Ranges, *results: torch.Tensor) -> None:
        """Join o and the statistics of chunks of queries over further keys."""
        pieces = [x.split([*map(len, chunks)], 2) for x in results]
        for rows, o, *stats in zip(chunks, *pieces, strict=True):
            at = slice(rows.start, rows.stop)
            own = {name: x[:, :, at] for name, x in self.rows.items()}
            given = dict(zip(own, stats, strict=True))
            if rows in self.seen:
                merge_(self.o[:, :, at], own["lse"], o.to(self.o.dtype), given["lse"])
            else:
                self.o[:, :, at] = o
                own["lse"].copy_(given["lse"])
                self.seen.add(rows)
            join_statistics(own, given)

    def join_sinks(self, sinks: torch.Tensor | None, heads: range, absent: Ranges) -> None:
        """Join sinks [H] of its heads, once all keys are in, except in the rows of no sequence."""
        if sinks is not None:
            sink_(self.o, self.rows["lse"], sinks[heads.start : heads.stop])
            for own in absent:
                self.rows["lse"][:, :, own.start : own.stop] = -INF

    def finish(self, site: Site, dtype: torch.dtype, like: TensorSpec) -> list[torch.Tensor]:
        """o in a dtype and in the memory order of a spec, then the statistics."""
        return [lay_out_as(site.pack(self.o), dtype, like), *map(site.pack, self.rows.values())]


def lay_out_as(x: torch.Tensor, dtype: torch.dtype, spec: TensorSpec) -> torch.Tensor:
    """A dense tensor in a dtype and in a spec's memory order: itself if it is so already."""
    own = TensorSpec(x.shape, dtype, dense_strides(x.shape, memory_order(spec)))
    if TensorSpec.like(x) == own:
        return x
    return torch.empty_strided(x.shape, own.strides, dtype=dtype, device=x.device).copy_(x)


@final
@frozen(eq=False)
class Cotangents:
    """The backward's inputs for a rank's queries: o, lse, and their cotangents, None for zero."""

    o: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor | None
    dlse: torch.Tensor | None

    def of(self, rows: Ranges) -> tuple[Tensors, Sequence[torch.Tensor | None]]:
        """Of some queries: (o, lse), (do, dlse)."""
        own = self.o, self.lse, self.do, self.dlse
        cut = [None if x is None else take_chunks(x, rows) for x in own]
        return cut[:2], cut[2:]  # type: ignore[return-value]  # o and lse are there

    def sink_gradient(self, sinks: torch.Tensor) -> torch.Tensor:
        """The gradient of sinks [H] by the rank's queries."""
        surplus = torch.zeros_like(self.lse)
        if self.dlse is not None:
            surplus = surplus + self.dlse
        if self.do is not None:
            wide = self.lse.dtype
            surplus = surplus - (self.do.to(wide) * self.o.to(wide)).sum(-1)
        return sink_gradient(sinks.to(self.lse.dtype), self.lse, surplus)


@final
@frozen(eq=False)
class Totals:
    """Gradients of a rank's inputs, by number; None without one.

    In float32 or wider, until they are complete.
    """

    of: Sequence[torch.Tensor | None]

    @classmethod
    def zeros(cls, site: Site, inputs: Tensors) -> Totals:
        """Before anything is added."""
        trained = site.sharded.trained
        wide = accumulator(inputs[site.sharded.eqn.args[0]].dtype)
        return cls(
            [
                torch.zeros(x.shape, dtype=wide, device=x.device) if n in trained else None
                for n, x in enumerate(inputs)
            ]
        )

    @classmethod
    def given(cls, site: Site, gradients: Mapping[int, torch.Tensor]) -> Totals:
        """Complete gradients of this rank, by number; wide if ranks add them up."""
        sharded, ranks = site.sharded, range(site.sharded.mesh.ranks)
        shared = {n for r in ranks if r != site.rank for n in shared_inputs(sharded, site.rank, r)}
        wide = accumulator(gradients[sharded.eqn.args[0]].dtype)
        of = {n: x.to(wide) if n in shared else x for n, x in gradients.items()}
        return cls([of.get(n) for n in range(len(sharded.graph.inputs))])

    def own(self, number: int) -> torch.Tensor:
        """The total of a trained input."""
        total = self.of[number]
        assert total is not None
        return total

    def get(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """The total of an input; zeros for an unused one."""
        total = self.of[number]
        return torch.zeros_like(like) if total is None else total

    def packed(self, site: Site) -> Totals:
        """These totals, with those of q, k and v laid out as the inputs."""
        qkv = site.sharded.eqn.args[:3]
        each = enumerate(self.of)
        return Totals([site.pack(x) if n in qkv and x is not None else x for n, x in each])

    def add_more(self, here: Box, gradients: Gradients) -> None:
        """Add a box's gradients of inputs besides q, k and v."""
        for feed, gradient in gradients.more:
            assert feed.source is not None
            here.cut(self.own(feed.source), feed.axes).add_(gradient)
