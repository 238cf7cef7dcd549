"""Attention on a CPU as a few calls of PyTorch's fused kernel, on the tiles the mask leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import Operands
from attn_graph.ir.modifiers import change_
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.merging import merge_, sink_
from attn_graph.lowering.cpu.schedule import (
    MOST_TILES,
    POSITIONS,
    Part,
    Tile,
    choose_cheapest,
    fold_tiles,
    join_neighbours,
    plain_tiles,
    row_tiles,
)
from attn_graph.lowering.problem import Problem, flash_order, is_readable
from attn_graph.lowering.triton.device_code import Tracer
from attn_graph.lowering.triton.symbols import Untraceable
from attn_graph.machine.workspace import Buffer
from attn_graph.masks.places import Block, Place
from attn_graph.spec import TensorSpec, memory_order

INF = float("inf")
LEAST_FULL = 2048  # keys: a longer run without mask is worth a call of its own and a merge
DATA_ROWS = 128  # queries a tile, where data decides which keys they keep
CPU = torch.device("cpu")
Scratches = Mapping[str, torch.Tensor]


@final
@frozen
class FusedTiles:
    """Forward and backward of one problem: all that can be known before the call.

    static: the tiles; None where data decides them, or there are more than planning lists. axes:
    which of "b" and "h" the addend depends on beside i and j. width: the head size that is
    computed in, the larger of D and E; the smaller is padded with zeros. blind: whether a query
    may see no key.
    """

    problem: Problem
    static: tuple[Tile, ...] | None
    axes: str
    width: int
    blind: bool

    @classmethod
    def plan(cls, problem: Problem) -> FusedTiles:
        """The tiles of a problem, static where its mask does not depend on data."""
        axes = depends(problem)
        width, blind = max(problem.D, problem.E), problem.has_blind_rows
        return cls(problem, static_tiles(problem, axes), axes, width, blind)

    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers: packed operands, one addend, and sums in wider precision."""
        p = self.problem
        packed = {name: spec for name, spec in self.operands().items() if self.packs(name, spec)}
        if p.grad is not None:
            sums = {f"d{name}": spec for name, spec in zip("qkv", p.specs, strict=False)}
            packed |= {
                n: s for n, s in sums.items() if (s.dtype, s.shape[3]) != (p.wide, self.width)
            }
        found = {n: Buffer((*s.shape[:3], self.width), p.wide) for n, s in packed.items()}
        return found | ({"addend": Buffer((self.addends,), p.wide)} if self.addends else {})

    def operands(self) -> dict[str, TensorSpec]:
        """The large operands by name."""
        p = self.problem
        found = dict(zip("qkv", p.specs, strict=False))
        if p.grad is not None:
            _, o, _, do, _ = p.grad.split(p.specs)
            found |= {"o": o} | ({"do": do} if do is not None else {})
        return found

    def packs(self, name: str, x: TensorSpec) -> bool:
        """Whether the kernel can't read an operand where it lies: dtype, head size or strides; or
        rows of do that have to be cleared."""
        if name == "do" and self.blind:
            return True
        fits = (x.dtype, x.shape[3]) == (self.problem.wide, self.width)
        return not fits or not is_readable(x, like=name == "q")

    @property
    def unpadded(self) -> bool:
        """Whether o has the head size that is computed in."""
        return self.problem.D <= self.problem.E

    @property
    def addends(self) -> int:
        """Elements of the largest addend; 0 where none is ever needed."""
        b = self.problem.B if "b" in self.axes and self.static is not None else 1
        return self.most_scores() * b * (self.problem.H if "h" in self.axes else 1)

    def most_scores(self) -> int:
        """The most scores of one head that have something added."""
        p = self.problem
        if self.static is None:
            return min(DATA_ROWS, p.M) * p.N
        parts = [(len(t.rows) * len(x), x.kind) for t in self.static for x in t.parts]
        return max((n for n, kind in parts if kind == "mixed" or p.node.modifiers), default=0)

    @property
    def temporary(self) -> int:
        """Bytes beside the workspace, at most: a tile's results, and the places that are asked."""
        p = self.problem
        rows, keys = p.B * p.H * p.M * (self.width + 2), p.B * p.G * p.N * self.width
        results = rows + (2 * keys if p.grad is not None else 0)
        b = p.B if "b" in self.axes and self.static is not None else 1
        asked = POSITIONS * b * self.most_scores() + 2 * (1 + p.wide.itemsize) * self.addends
        return asked + 2 * p.wide.itemsize * results

    def summary(self) -> str:
        """How it runs, for `explain`."""
        if self.static is None:
            mask = self.problem.node.mask
            why = "data picks the keys" if mask and mask.needs else "each call lists them"
            return f"PyTorch's fused CPU kernel on tiles of {DATA_ROWS} queries; {why}"
        whole = self.problem.B * self.problem.M * self.problem.N
        area, calls = sum(t.area for t in self.static), sum(len(t.parts) for t in self.static)
        share = f"{100 * area / whole:.3g} % of the {self.problem.H * whole} scores"
        return f"{calls} call{'s' * (calls != 1)} of PyTorch's fused CPU kernel, {share}"

    def tiles(self, data: Scratches) -> Sequence[Tile]:
        """The tiles of a call, given what the mask reads."""
        if self.static is not None:
            return self.static
        p = self.problem
        rows, bounded = min(DATA_ROWS, p.M), bool(p.node.modifiers)
        found: list[Tile] = []
        for b in range(p.B):
            tiles = row_tiles(p, p.node.mask, range(b, b + 1), rows, LEAST_FULL, data)
            found += join_neighbours(tiles, rows * p.N, bounded)
        return found

    def packed(self, name: str, x: torch.Tensor, scratch: Scratches) -> torch.Tensor:
        """An operand as the kernel reads it, in scratch if it must be."""
        if name not in scratch:
            return x
        room = scratch[name]
        if x.stride(2) == 1 and x.shape[3] == self.width > 1:
            transpose(room, x)
        else:
            room[..., : x.shape[3]].copy_(x)
            room[..., x.shape[3] :].zero_()
        return room

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Scratches
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, lse."""
        p, given = self.problem, self.problem.node.split(operands)
        q, k, v = (self.packed(n, x, scratch) for n, x in zip("qkv", operands, strict=False))
        call, tiles = TileCall(self, given, scratch, q, k, v), self.tiles(given.mask)
        if is_whole(tiles, p) and self.unpadded and self.keeps_order():
            return call.attend(tiles[0])
        o, lse = p.new_o(CPU), torch.empty(q.shape[:3], dtype=p.wide, device=CPU)
        for tile in tiles:
            part, part_lse = call.attend(tile)
            cut_tile(o, tile).copy_(part[..., : p.E])
            cut_rows(lse, tile).copy_(part_lse)
        return o, lse

    def keeps_order(self) -> bool:
        """Whether the kernel lays o out in the memory order of q, given q where it lies."""
        q = self.problem.specs[0]
        return not self.packs("q", q) and flash_order(q) == memory_order(q)

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Scratches
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        p = self.problem
        assert p.grad is not None
        own, o, lse, do, _ = p.grad.split(operands)
        assert do is not None  # without it only dlse is left, and that is not for this kernel
        given = p.node.split(own)
        q, k, v = (self.packed(n, x, scratch) for n, x in zip("qkv", own, strict=False))
        o, do = self.packed("o", o, scratch), self.packed("do", do, scratch)
        unseen = lse == -INF
        finite = lse.masked_fill(unseen, 0.0)
        if self.blind:
            do.masked_fill_(unseen[..., None], 0.0)
        call, tiles = TileCall(self, given, scratch, q, k, v), self.tiles(given.mask)
        if is_whole(tiles, p):
            sums = call.pull(tiles[0], tiles[0].parts[0], o, finite, do)
        else:
            sums = self.summed(call, tiles, o, finite, do)
        return {
            i: x[..., : spec.shape[3]].to(spec.dtype, copy=f"d{name}" in scratch)
            for i, (name, spec, x) in enumerate(zip("qkv", p.specs, sums, strict=False))
        }

    def summed(
        self,
        call: TileCall,
        tiles: Sequence[Tile],
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of all tiles, in wider precision and padded."""
        dq, dk, dv = (
            call.scratch[name].zero_()
            if name in call.scratch
            else torch.zeros(s.shape, dtype=s.dtype, device=CPU)
            for name, s in zip(("dq", "dk", "dv"), self.problem.specs, strict=False)
        )
        for tile in tiles:
            for part in tile.parts:
                found = call.pull(tile, part, o, lse, do)
                cut_tile(dq, tile).add_(found[0])
                add_windows(dk, found[1], tile, part)
                add_windows(dv, found[2], tile, part)
        return dq, dk, dv


@final
@frozen(eq=False)
class TileCall:
    """One call's operands, packed."""

    tiles: FusedTiles
    given: Operands[torch.Tensor]
    scratch: Scratches
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def attend(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of one tile, its parts merged."""
        rows, scale = cut_tile(self.q, tile), self.tiles.problem.node.scale
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        for part in tile.parts:
            k, v = cut_tile(self.k, tile, part), cut_tile(self.v, tile, part)
            causal, addend = part.kind == "causal", self.addend(tile, part)
            o, lse = fused_cpu.attend(rows, k, v, scale, causal, addend)
            if found is None:
                found = o, lse
            else:
                merge_(*found, o, lse)
        if found is None:
            found = torch.zeros_like(rows), rows.new_full(rows.shape[:3], -INF)
        if self.given.sinks is not None:
            sink_(*found, self.given.sinks)
        return found

    def pull(
        self, tile: Tile, part: Part, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv of one part of a tile."""
        q, k, v = cut_tile(self.q, tile), cut_tile(self.k, tile, part), cut_tile(self.v, tile, part)
        scale, addend = self.tiles.problem.node.scale, self.addend(tile, part)
        rows = cut_tile(do, tile), cut_tile(o, tile), cut_rows(lse, tile)
        return fused_cpu.attend_backward(q, k, v, *rows, scale, part.kind == "causal", addend)

    def addend(self, tile: Tile, part: Part) -> torch.Tensor | None:
        """What is added to the scores: additive modifiers, and -inf where the mask drops a key."""
        p = self.tiles.problem
        if part.kind != "mixed" and not p.node.modifiers:
            return None
        block = Block(tile.batch, range(p.H), tile.rows, p.H, p.M, p.N, self.given.mask)
        at = Place.of(block, range(part.start, part.stop), CPU)
        b = len(tile.batch) if "b" in self.tiles.axes else 1
        h = p.H if "h" in self.tiles.axes else 1
        size = b * h * len(tile.rows) * len(part)
        sums = self.scratch["addend"][:size].view(b, h, len(tile.rows), len(part)).zero_()
        steps = zip(p.node.modifiers, self.given.modifiers, p.node.restores, strict=True)
        for modifier, data, restores in steps:
            hidden = sums == -INF if restores else None
            change_(modifier, sums, at.reading(data))
            if hidden is not None:
                sums.masked_fill_(hidden, -INF)
        if part.kind == "mixed":
            assert p.node.mask is not None
            sums.masked_fill_(torch.as_tensor(p.node.mask.keep(at), device=CPU).logical_not(), -INF)
        return sums


def transpose(room: torch.Tensor, x: torch.Tensor) -> None:
    """room = x, for x [B,H,L,D] that has its axes L and D in turned order in memory.

    PyTorch copies one matrix that way in blocks, faster than all of them at once.
    """
    for to, each in zip(room.flatten(0, 1).unbind(), x.flatten(0, 1).unbind(), strict=True):
        to.copy_(each)


def depends(problem: Problem) -> str:
    """Which of "b" and "h" the mask and the modifiers depend on."""
    given = problem.node.split(problem.specs)
    found = axes_of_modifiers(problem) + axes_of_mask(problem, given)
    return "".join(axis for axis in "bh" if axis in found)


@lru_cache(64)
def axes_of_modifiers(problem: Problem) -> str:
    """Found by tracing what they add; all, where that can't be traced."""
    if not problem.node.modifiers:
        return ""
    try:
        return "".join(Tracer.of(problem).axes())
    except Untraceable:
        return "bh"


def axes_of_mask(problem: Problem, given: Operands[TensorSpec]) -> str:
    """Found by asking the mask at a few places: what it returns is as large as what it reads."""
    if problem.node.mask is None:
        return ""
    data = {
        n: torch.zeros((), dtype=s.dtype, device=CPU).expand(s.shape) for n, s in given.mask.items()
    }
    b, h, i, j = (range(min(2, n)) for n in (problem.B, problem.H, problem.M, problem.N))
    block = Block(b, h, i, problem.H, problem.M, problem.N, data)
    kept = torch.as_tensor(problem.node.mask.keep(Place.of(block, j, CPU)), device=CPU)
    shape = (1,) * (4 - kept.ndim) + tuple(kept.shape)
    return "".join(axis for axis, n in zip("bh", shape, strict=False) if n > 1)


@lru_cache(64)  # a backend is asked whether it takes a graph, and then lowers it
def static_tiles(problem: Problem, axes: str) -> tuple[Tile, ...] | None:
    """The tiles; None where data decides them, or there are so many that each call lists them."""
    node, most = problem.node, DATA_ROWS * problem.N
    mask, bounded = node.mask, bool(node.modifiers)
    plain = plain_tiles(problem, mask)
    if plain is not None and (not bounded or (mask is None and problem.M <= DATA_ROWS)):
        return tuple(plain)
    if mask is not None and mask.needs:
        return None
    relative = mask is not None and mask.relative and all(m.relative for m in node.modifiers)

    def tiles(rows: int) -> list[Tile] | None:
        if mask is not None and relative and "b" not in axes:
            return fold_tiles(problem, mask, rows, LEAST_FULL)
        if rows * MOST_TILES < problem.M:
            return None
        found = row_tiles(problem, mask, range(problem.B), rows, LEAST_FULL)
        return join_neighbours(found, most, bounded)

    found = choose_cheapest(problem, tiles)
    return None if found is None else tuple(found)


def is_whole(tiles: Sequence[Tile], problem: Problem) -> bool:
    """Whether one tile of one part is the entire problem."""
    if len(tiles) != 1 or len(tiles[0].parts) != 1 or tiles[0].repeat > 1:
        return False
    tile = tiles[0]
    rows, keys = len(tile.rows) == problem.M, len(tile.parts[0]) == problem.N
    return rows and keys and len(tile.batch) == problem.B


def cut_tile(x: torch.Tensor, tile: Tile, part: Part | None = None) -> torch.Tensor:
    """A tile's rows of x [B,H,L,D], or a part's keys; repeats become the first axis. A view."""
    span = range(part.start, part.stop) if part else tile.rows
    if tile.repeat == 1:
        return x[tile.batch.start : tile.batch.stop, :, span.start : span.stop]
    first = x[tile.batch.start, :, span.start : span.stop]
    h, m, d = first.stride()
    shape = (tile.repeat, *first.shape)
    return first.as_strided(shape, (tile.step * m, h, m, d), first.storage_offset())


def cut_rows(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile's rows of x [B,H,M]."""
    return cut_tile(x[..., None], tile)[..., 0]


def add_windows(total: torch.Tensor, share: torch.Tensor, tile: Tile, part: Part) -> None:
    """total [B,G,N,D] += a part's gradient; windows that overlap are added in disjoint slices."""
    if tile.repeat == 1:
        cut_tile(total, tile, part).add_(share)
        return
    for at in range(0, len(part), tile.step):
        stop = min(at + tile.step, len(part))
        piece = Part(part.start + at, part.start + stop, part.kind)
        cut_tile(total, tile, piece).add_(share[:, :, at:stop])
