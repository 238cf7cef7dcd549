"""Some heads after others, where PyTorch's fused kernel reads copies of its operands.

So copies in another dtype or layout are never of more than a chunk of heads, in memory that each
chunk uses again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve, frozen

from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem, new_gradient
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.canonical import is_ours
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.lowering.cpu.fused_calls import FusedRun

MOST_COPIED = 2**24  # bytes of scratch, where one key/value head does not need more
KEYS = (1, 2)  # the operands that have key/value heads: k and v
Tensors = Sequence[torch.Tensor]
Rooms = Mapping[str, torch.Tensor]
Index = tuple[slice, slice]


@final
@frozen
class ChunkedTiles:
    """Forward and backward of one problem. part: the tiles of a chunk, each of the same size."""

    problem: Problem
    part: FusedTiles

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers of a chunk."""
        return self.part.buffers

    @property
    def scratch(self) -> Scratch:
        """The same side by side."""
        return self.part.scratch

    @property
    def temporary(self) -> int:
        """Bytes beside the workspace, at most."""
        return self.part.temporary

    @property
    def corners(self) -> tuple[range, range]:
        """The batch entries and the key/value heads at which chunks begin."""
        p, chunk = self.problem, self.part.problem
        return range(0, p.B, chunk.B), range(0, p.G, chunk.G)

    @cached_property
    def places(self) -> list[tuple[Index, Index]]:
        """Where each chunk lies: in x [B,H,...], and in k and v."""
        r, corners = self.problem.H // self.problem.G, product(*self.corners)
        return [(self.index_at(b, g, r), self.index_at(b, g, 1)) for b, g in corners]

    def index_at(self, b: int, g: int, r: int) -> Index:
        """Of the chunk that begins at a batch entry and a key/value head, of r heads each."""
        chunk = self.part.problem
        return slice(b, b + chunk.B), slice(g * r, (g + chunk.G) * r)

    def summary(self) -> str:
        """How it runs, for `explain`."""
        p, count = self.part.problem, prod(map(len, self.corners))
        heads = f"{p.B * p.H} head{'s' * (p.B * p.H != 1)}"
        return f"{count} chunks of {heads}; each is {self.part.summary()}"


@final
@frozen(eq=False)
class ChunkedRun:
    """Runs tiles, chunk by chunk. part: runs a chunk."""

    tiles: ChunkedTiles
    part: FusedRun

    def forward(self, operands: Tensors, scratch: Rooms) -> Tensors:
        """o, lse."""
        p, (q, *_) = self.tiles.problem, operands
        o, lse = p.new_o(q.device), q.new_empty((p.B, p.H, p.M), dtype=p.wide)
        for (rows, _), views in self.chunks(operands):
            self.part.fill(views, scratch, o[rows], lse[rows])
        return o, lse

    def infer(self, operands: Tensors, scratch: Rooms) -> Tensors:
        """o alone."""
        o = self.tiles.problem.new_o(operands[0].device)
        for (rows, _), views in self.chunks(operands):
            self.part.fill(views, scratch, o[rows], None)
        return (o,)

    def backward(self, operands: Tensors, scratch: Rooms) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        grads = [*map(new_gradient, self.tiles.problem.specs[:3])]
        for place, views in self.chunks(operands):
            for i, sums in enumerate(self.part.pull(views, scratch)):
                grads[i][place[i in KEYS]].copy_(sums[..., : grads[i].shape[3]])
        return dict(enumerate(grads))

    def chunks(self, operands: Tensors) -> Iterator[tuple[tuple[Index, Index], Tensors]]:
        """Where each chunk lies, and its operands."""
        for place in self.tiles.places:
            yield place, [x[place[i in KEYS]] for i, x in enumerate(operands)]


def chunk_heads(tiles: FusedTiles) -> FusedTiles | ChunkedTiles:
    """Tiles whose copies are large, in chunks of heads, where all heads are alike; others as they
    are."""
    p, mask = tiles.problem, tiles.problem.node.mask
    alike = mask is None or (is_ours(mask) and not tiles.axes)
    if tiles.scratch.bytes <= MOST_COPIED or len(p.node.roles) > 3 or p.node.modifiers or not alike:
        return tiles
    heads = max(1, MOST_COPIED * p.B * p.G // tiles.scratch.bytes)
    groups = most_of(p.G, heads)
    batch = most_of(p.B, heads // p.G) if groups == p.G else 1
    specs = [cut_spec(x, batch, groups, p, i in KEYS) for i, x in enumerate(p.specs)]
    return ChunkedTiles(p, FusedTiles.plan(evolve(p, specs=tuple(specs))))


def most_of(count: int, most: int) -> int:
    """The largest number up to `most` by which a count can be divided."""
    return next(n for n in range(min(count, most), 0, -1) if count % n == 0)


def cut_spec(x: TensorSpec, batch: int, groups: int, problem: Problem, keys: bool) -> TensorSpec:
    """The spec of an operand of a chunk."""
    heads = groups if keys else groups * (problem.H // problem.G)
    return TensorSpec((batch, heads, *x.shape[2:]), x.dtype, x.strides)
