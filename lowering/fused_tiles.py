"""Attention on a CPU as a few calls of PyTorch's fused kernel, on the tiles that the mask leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.fused import Operands
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.merging import merge_, sink_
from attn_graph.keys import Block, Place
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.tiles import (
    Part,
    Tile,
    cheapest,
    diagonal,
    folded,
    grown,
    row_tiles,
)
from attn_graph.masks import Mask
from attn_graph.modifiers import Alibi
from attn_graph.spec import TensorSpec
from attn_graph.workspace import Buffer

INF = float("inf")
LEAST_FULL = 2048  # keys: a longer run without mask is worth a call of its own and a merge
DATA_ROWS = 128  # queries a tile, where data decides which keys they keep
CPU = torch.device("cpu")


def depends(problem: Problem) -> str:
    """Which of "b" and "h" the mask and the modifiers depend on, found by asking them."""
    given = problem.node.split(problem.specs)
    found = axes_of_modifiers(problem, given) + axes_of_mask(problem, given)
    return "".join(axis for axis in "bh" if axis in found)


def axes_of_modifiers(problem: Problem, given: Operands[TensorSpec]) -> str:
    axes = ""
    for modifier, specs in zip(problem.node.modifiers, given.modifiers, strict=True):
        axes += "h" if isinstance(modifier, Alibi) else ""
        for (name, data) in modifier.needs.items():
            axes += "".join(x for x, n in zip(data.axes, specs[name].shape, strict=True) if n > 1)
    return axes


def axes_of_mask(problem: Problem, given: Operands[TensorSpec]) -> str:
    if problem.node.mask is None:
        return ""
    data = {n: torch.zeros((), dtype=s.dtype).expand(s.shape) for n, s in given.mask.items()}
    some = [range(min(2, n)) for n in (problem.B, problem.H, problem.M, problem.N)]
    block = Block(*some[:3], problem.H, problem.M, problem.N, data)
    kept = torch.as_tensor(problem.node.mask.keep(Place.of(block, some[3])))
    shape = (1,) * (4 - kept.ndim) + tuple(kept.shape)
    return "".join(axis for axis, n in zip("bh", shape, strict=False) if n > 1)


@final
@frozen
class FusedTiles:
    """Forward and backward of one problem. Everything that can be known before the call is here.

    static: the tiles, where no data decides them. axes: what the addend depends on beside i, j.
    width: the head size computed in, the larger of D and E; the smaller is padded with zeros.
    """

    problem: Problem
    static: tuple[Tile, ...] | None
    axes: str
    width: int

    @classmethod
    def plan(cls, problem: Problem) -> FusedTiles:
        axes = depends(problem)
        static = static_tiles(problem, axes)
        return cls(problem, static, axes, max(problem.D, problem.E))

    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers: packed operands, one addend, and sums in wider precision."""
        p, wide = self.problem, self.problem.wide
        found = {
            name: Buffer((*spec.shape[:3], self.width), wide)
            for name, spec in self.operands().items()
            if self.packs(spec)
        }
        if scores := self.most_scores():
            share = (p.B if "b" in self.axes and self.static else 1) * (p.H if "h" in self.axes else 1)
            found["addend"] = Buffer((scores * share,), wide)
        if p.grad is not None:
            sums = {"dq": p.specs[0], "dk": p.specs[1], "dv": p.specs[2]}
            found |= {
                name: Buffer((*spec.shape[:3], self.width), wide)
                for name, spec in sums.items()
                if p.dtype != wide or spec.shape[3] != self.width
            }
        return found

    def operands(self) -> dict[str, TensorSpec]:
        """The large operands by name."""
        p = self.problem
        found = dict(zip("qkv", p.specs, strict=False))
        if p.grad is not None:
            _, o, _, do, _ = p.grad.split(p.specs)
            found |= {"o": o} | ({"do": do} if do is not None else {})
        return found

    def packs(self, spec: TensorSpec) -> bool:
        """Whether the kernel can't read an operand where it lies: dtype, head size or stride."""
        return spec.dtype != self.problem.wide or spec.shape[3] != self.width or not spec.unit_last

    def most_scores(self) -> int:
        """The largest addend of one head, in scores; 0 where none is ever needed."""
        node, p = self.problem.node, self.problem
        if self.static is None:
            return min(DATA_ROWS, p.M) * p.N
        parts = [(len(t.rows) * len(x), x.kind) for t in self.static for x in t.parts]
        return max((n for n, kind in parts if kind == "mixed" or node.modifiers), default=0)

    @property
    def temporary(self) -> int:
        """Bytes that the kernel allocates beside the workspace, at most: a tile's results."""
        p = self.problem
        rows, keys = p.B * p.H * p.M * (self.width + 2), p.B * p.G * p.N * self.width
        masks = 2 * self.most_scores() * (p.B if "b" in self.axes else 1) * (p.H if "h" in self.axes else 1)
        return masks + p.wide.itemsize * (rows + (2 * keys if p.grad is not None else 0))

    def told(self) -> str:
        """How it runs, for `explain`."""
        p, whole = self.problem, self.problem.B * self.problem.M * self.problem.N
        if self.static is None:
            return f"tiles of {DATA_ROWS} queries, chosen at each call from the data of the mask; each a call of PyTorch's fused kernel"
        area, calls = sum(t.area for t in self.static), sum(len(t.parts) for t in self.static)
        share = f"{area / whole:.3g} of {p.H} x {whole} scores"
        return f"{calls} calls of PyTorch's fused CPU kernel compute {share}"

    def tiles(self, data: Mapping[str, torch.Tensor]) -> Sequence[Tile]:
        if self.static is not None:
            return self.static
        p, mask = self.problem, self.problem.node.mask
        rows, most = min(DATA_ROWS, p.M), min(DATA_ROWS, p.M) * p.N
        return [
            tile
            for b in range(p.B)
            for tile in grown(row_tiles(p, mask, range(b, b + 1), rows, LEAST_FULL, data), most, bool(p.node.modifiers))
        ]  # fmt: skip

    def packed(self, name: str, x: torch.Tensor, scratch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """An operand as the kernel reads it, in scratch if it must be."""
        if name not in scratch:
            return x
        room = scratch[name]
        room[..., : x.shape[3]].copy_(x)
        room[..., x.shape[3] :].zero_()
        return room

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, lse."""
        given, p = self.problem.node.split(operands), self.problem
        q, k, v = (self.packed(n, x, scratch) for n, x in zip("qkv", operands, strict=False))
        tiles = self.tiles(given.mask)
        if is_whole(tiles, p) and p.E == self.width and keeps_order(p.specs[0], p.wide):
            return self.attend(tiles[0], given, scratch, q, k, v)
        o = p.new_o(CPU)
        lse = torch.empty(q.shape[:3], dtype=p.wide)
        for tile in tiles:
            part, part_lse = self.attend(tile, given, scratch, q, k, v)
            cut(o, tile).copy_(part[..., : p.E])
            cut(lse[..., None], tile)[..., 0].copy_(part_lse)
        return o, lse

    def attend(
        self, tile: Tile, given: Operands[torch.Tensor], scratch: Mapping[str, torch.Tensor],
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """o and lse of one tile, its parts merged."""
        rows, scale = cut(q, tile), self.problem.node.scale
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in tile.parts:
            addend = self.addend(tile, part, given, scratch)
            keys, values = (cut(x, tile, part) for x in (k, v))
            o, lse = fused_cpu.forward(rows, keys, values, scale, part.kind == "causal", addend)
            if found is None:
                found = o, lse
            else:
                merge_(*found, o, lse)
        if found is None:
            found = self.nothing(rows)
        if given.sinks is not None:
            sink_(*found, given.sinks)
        return found

    def nothing(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of queries that keep no key."""
        return torch.zeros_like(rows), torch.full(rows.shape[:3], -INF, dtype=rows.dtype)

    def addend(
        self, tile: Tile, part: Part, given: Operands[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """What is added to the scores: additive modifiers, and -inf where the mask does not keep."""
        node, p = self.problem.node, self.problem
        if part.kind != "mixed" and not node.modifiers:
            return None
        block = Block(tile.batch, range(p.H), tile.rows, p.H, p.M, p.N, given.mask)
        at = Place.of(block, range(part.start, part.stop))
        b, h = (len(tile.batch) if "b" in self.axes else 1), (p.H if "h" in self.axes else 1)
        shape = (b, h, len(tile.rows), len(part))
        sums = scratch["addend"][: b * h * shape[2] * shape[3]].view(shape).zero_()
        for modifier, data in zip(node.modifiers, given.modifiers, strict=True):
            modifier.change(sums, at.reading(data))
        if part.kind == "mixed":
            sums.masked_fill_(dropped(node.mask, at), -INF)
        return sums

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        p = self.problem
        assert p.grad is not None
        own, o, lse, do, _ = p.grad.split(operands)
        given = p.node.split(own)
        assert do is not None  # without it only dlse is left, and that is not for this kernel
        q, k, v, o, do = (
            self.packed(n, x, scratch)
            for n, x in zip(("q", "k", "v", "o", "do"), (*own[:3], o, do), strict=True)
        )
        finite = lse.masked_fill(lse == -INF, 0.0)
        tiles = self.tiles(given.mask)
        if is_whole(tiles, p) and not {"dq", "dk", "dv"} & scratch.keys():
            part = tiles[0].parts[0]
            return dict(enumerate(self.pull(tiles[0], part, given, scratch, q, k, v, o, finite, do)))
        sums = [
            scratch[name].zero_() if name in scratch else torch.zeros(s.shape, dtype=s.dtype)
            for name, s in zip(("dq", "dk", "dv"), p.specs, strict=False)
        ]
        for tile in tiles:
            for part in tile.parts:
                found = self.pull(tile, part, given, scratch, q, k, v, o, finite, do)
                cut(sums[0], tile).add_(found[0])
                add_windows(sums[1], found[1], tile, part)
                add_windows(sums[2], found[2], tile, part)
        return {
            i: sums[i][..., : spec.shape[3]].to(spec.dtype, copy=True) if name in scratch else sums[i]
            for i, (name, spec) in enumerate(zip(("dq", "dk", "dv"), p.specs, strict=False))
        }

    def pull(
        self, tile: Tile, part: Part, given: Operands[torch.Tensor], scratch: Mapping[str, torch.Tensor],
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
        do: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """dq, dk, dv of one part of a tile."""
        addend = self.addend(tile, part, given, scratch)
        rows = [cut(x, tile) for x in (do, q)]
        keys = [cut(x, tile, part) for x in (k, v)]
        rest = [cut(o, tile), cut(lse[..., None], tile)[..., 0]]
        causal = part.kind == "causal"
        return fused_cpu.backward(*rows, *keys, *rest, self.problem.node.scale, causal, addend)


def static_tiles(problem: Problem, axes: str) -> tuple[Tile, ...] | None:
    """The tiles where no data decides them; None where it does."""
    node = problem.node
    mask, batch = node.mask, range(problem.B)
    plain = diagonal(problem, mask)
    if plain is not None and (not node.modifiers or mask is None and problem.M * problem.N <= 2**16):
        return tuple(plain)
    if mask is not None and mask.needs:
        return None
    may_fold = "b" not in axes and (mask is None or mask.relative) and all(m.relative for m in node.modifiers)
    most = 128 * problem.N

    def tiles(rows: int) -> list[Tile]:
        found = row_tiles(problem, mask, batch, rows, LEAST_FULL)
        return folded(found) if may_fold and mask is not None else grown(found, most, bool(node.modifiers))

    return tuple(cheapest(problem, tiles))


def dropped(mask: Mask | None, at: Place) -> torch.Tensor:
    """Where the mask does not keep."""
    assert mask is not None  # only a mask makes a part mixed
    return torch.as_tensor(mask.keep(at)).logical_not()


def keeps_order(q: TensorSpec, wide: torch.dtype) -> bool:
    """Whether the kernel, given q as it is, lays o out in the memory order of q."""
    return q.dtype == wide and q.unit_last and all(s or n == 1 for n, s in zip(q.shape, q.strides, strict=True))


def is_whole(tiles: Sequence[Tile], problem: Problem) -> bool:
    """Whether one tile of one part is the entire problem."""
    if len(tiles) != 1 or len(tiles[0].parts) != 1 or tiles[0].repeat > 1:
        return False
    tile = tiles[0]
    rows, keys = len(tile.rows) == problem.M, len(tile.parts[0]) == problem.N
    return rows and keys and len(tile.batch) == problem.B


def cut(x: torch.Tensor, tile: Tile, part: Part | None = None) -> torch.Tensor:
    """A tile's rows of x [B,H,L,D], or a part's keys; repeats become the first axis. A view."""
    span = range(part.start, part.stop) if part else tile.rows
    if tile.repeat == 1:
        return x[tile.batch.start : tile.batch.stop, :, span.start : span.stop]
    first = x[tile.batch.start, :, span.start : span.stop]
    h, m, d = first.stride()
    shape = (tile.repeat, *first.shape)
    return first.as_strided(shape, (tile.step * m, h, m, d), first.storage_offset())


def add_windows(total: torch.Tensor, share: torch.Tensor, tile: Tile, part: Part) -> None:
    """total [B,G,N,D] += a part's gradient; windows that overlap are added in disjoint slices."""
    if tile.repeat == 1:
        cut(total, tile, part).add_(share)
        return
    for at in range(0, len(part), tile.step):
        stop = min(at + tile.step, len(part))
        piece = Part(part.start + at, part.start + stop, part.kind)
        cut(total, tile, piece).add_(share[:, :, at:stop])
