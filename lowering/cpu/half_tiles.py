"""Attention without modifiers, by the CPU's own products of half precision on tiles of scores.

What products multiply and give is in the dtype of the operands, scores and weights among it; what
lies between two products is in float32: exponents, sums of rows, sums over tiles. Each tile has all
keys of its queries, so softmax and its derivative are those of whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.attention import Attention
from attn_graph.kernels.hiding import hide_
from attn_graph.kernels.products import LOG2_E, multiply_
from attn_graph.lowering.cpu.product_slots import ProductSlot, TileGrid, choose_half_sizes
from attn_graph.lowering.cpu.schedule import POSITIONS
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Place
from attn_graph.spec import INF, NAMES

Tensors = Mapping[str, torch.Tensor]
# Multiplications of q k^T from which products of half precision are the faster, by pass; fewer are
# faster in PyTorch's fused kernel, which takes four times as long for a key/value head of one row.
# Measured on an AVX512 with native bf16, 1 and 2 threads.
LEAST_FORWARD, LEAST_OF_ONE_ROW, LEAST_BACKWARD = 2**23, 2**19, 2**21
FEW_ROWS = 64  # of a key/value head

softmax_backward = torch.ops.aten._softmax_backward_data.out


def pays(problem: Problem) -> bool:
    """Whether products of half precision, which are the CPU's own, are the faster for a problem."""
    p = problem
    if p.dtype != torch.bfloat16 or p.is_empty:
        return False
    work = p.B * p.H * p.M * p.N * p.D
    if p.grad is not None:
        return work >= LEAST_BACKWARD
    least = LEAST_OF_ONE_ROW if p.H // p.G * p.M == 1 else LEAST_FORWARD
    return work >= least and not suits_fused(p)


def suits_fused(problem: Problem) -> bool:
    """Whether the fused kernel has an advantage forward: it cuts documents exactly, and reads keys
    where they lie, which counts where few queries read each."""
    p, mask = problem, problem.node.mask
    if p.H // p.G * p.M < FEW_ROWS:
        return mask is not None or not all(x.is_dense for x in p.specs[1:3])
    return mask is not None and "q_segments" in mask.needs


def takes(problem: Problem) -> bool:
    """Whether these tiles compute a problem: softmax(scale q k^T) v under a mask, and no more."""
    node, grad = problem.node, problem.grad
    bare = node == Attention(node.scale, mask=node.mask)
    return bare and (grad is None or (grad.with_do and not grad.with_dlse))


@final
@frozen
class HalfTiles(TileGrid):
    """Forward and backward of one problem. blind: whether a query may see no key."""

    blind: bool

    @classmethod
    def plan(cls, problem: Problem) -> HalfTiles:
        """The tiles of a problem, of sizes chosen for it alone."""
        return cls(problem, *choose_half_sizes(problem), problem.has_blind_rows)

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers, by name."""
        p, half, wide = self.problem, self.problem.dtype, self.problem.wide
        n, keys = self.batch * self.groups, self.reach
        rows = n * self.r * self.rows
        buffers = {"q": Buffer((rows * p.D,), half), "o": Buffer((rows * p.E,), half)}
        buffers |= {"k": Buffer((n * keys * p.D,), half), "v": Buffer((n * keys * p.E,), half)}
        buffers |= {"s": Buffer((rows * keys,), wide), "p": Buffer((rows * keys,), half)}
        buffers |= {name: Buffer((rows,), wide) for name in ("lse", "total")}
        if p.grad is None:
            return buffers
        buffers |= {"ds": Buffer((rows * keys,), half), "dq": Buffer((rows * p.D,), half)}
        if not self.whole:
            buffers["product"] = Buffer((n * keys * max(p.D, p.E),), half)
            sums = zip(("dk", "dv"), p.specs[1:3], strict=True)
            buffers |= {name: Buffer(s.shape, wide) for name, s in sums}
        return buffers

    @property
    def whole(self) -> bool:
        """Whether a tile has all queries and keys of its heads, so that no sum is over tiles."""
        return self.rows >= self.problem.M and self.problem.node.mask is None

    @cached_property
    def scratch(self) -> Scratch:
        """The same side by side."""
        return Scratch(tuple(self.buffers.values()))

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most: the places that a mask is
        asked at, with their bits, rows of o and two of their sums, and what oneDNN packs of weights
        that it transposes."""
        p, rows = self.problem, self.batch * self.rows
        places = rows * self.reach * (POSITIONS + 8) if p.node.mask else 0
        places += torch.int64.itemsize * (p.B + p.H + p.M + p.N)
        lines = rows * self.groups * self.r
        packed = lines * self.reach * p.dtype.itemsize
        return places + packed + 2 * lines * (p.E + 1) * p.wide.itemsize

    def summary(self) -> str:
        """How it runs, for `explain`."""
        return f"{NAMES[self.problem.dtype]} products on tiles of {self.size}"

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """o and lse."""
        p, data = self.problem, self.problem.node.split(operands).mask
        q, k, v = operands[:3]
        o = p.new_o(q.device)
        lse = torch.empty((p.B, p.H, p.M), dtype=p.wide, device=q.device)
        at = self.places(data, q.device)
        for slot in self.tiles(data):
            if slot.tile.parts:
                Spot(self, slot, scratch, at).attend(q, k, v, o, lse)
            else:
                slot.rows(o).zero_()
                slot.rows(lse).fill_(-INF)
        return o, lse

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        p = self.problem
        assert p.grad is not None
        read = p.grad.split(operands)
        data = p.node.split(read.own).mask
        q, k, v = read.own[:3]
        sums = [
            q.new_empty(x.shape) if self.whole else scratch[f"d{name}"].zero_()
            for name, x in zip("kv", (k, v), strict=True)
        ]
        dq = q.new_empty(q.shape)
        assert read.do is not None
        at = self.places(data, q.device)
        for slot in self.tiles(data):
            if slot.tile.parts:
                spot = Spot(self, slot, scratch, at)
                spot.pull((q, k, v), read.lse, read.do, (dq, *sums))
            else:
                slot.rows(dq).zero_()
        return {0: dq, 1: sums[0].to(p.dtype), 2: sums[1].to(p.dtype)}


@final
@frozen(eq=False)
class Spot:
    """One tile of a call, with the buffers it computes in. places: all, not its own alone."""

    tiles: HalfTiles
    slot: ProductSlot
    scratch: Tensors
    places: Place

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,L,last]."""
        n, L = self.slot.lines
        return self.scratch[name][: n * L * last].view(n, L, last)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        return x.view(self.slot.grid)

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D] as [n,L,D], without gaps: oneDNN copies others."""
        rows, room = self.slot.rows(x), self.room(name, x.shape[3])
        if rows.is_contiguous():
            return rows.view(room.shape)
        self.heads(room).copy_(rows)
        return room

    def store(
        self, name: str, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> None:
        """This tile's queries of x [B,H,M,D] = scale * a b."""
        rows, room = self.slot.rows(x), self.room(name, x.shape[3])
        if rows.is_contiguous():
            multiply_(rows.view(room.shape), a, b, scale)
        else:
            rows.copy_(self.heads(multiply_(room, a, b, scale)))

    def load_keys(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's keys of x [B,G,N,D] as [n,S,D], without gaps too."""
        pieces = self.slot.keys_of(x)
        if len(pieces) == 1 and pieces[0].is_contiguous():
            return pieces[0]
        n, _, D = pieces[0].shape
        room = self.scratch[name][: n * self.slot.keys * D].view(n, -1, D)
        return torch.cat(pieces, 1, out=room)

    def add_keys(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """This tile's keys of x [B,G,N,D] += scale * a^T b; a is [n,L,S], b [n,L,D]. What no other
        tile adds to is written."""
        n, _, S = a.shape
        if self.tiles.whole:
            multiply_(self.slot.groups(x).view(n, S, -1), a.mT, b, scale)
            return
        room = self.scratch["product"][: n * S * b.shape[2]].view(n, S, -1)
        product, at = multiply_(room, a.mT, b, scale), 0
        for piece in self.slot.keys_of(x):
            piece.add_(product[:, at : at + piece.shape[1]])
            at += piece.shape[1]

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The masked scores [n,L,S] in float32, as powers of two."""
        half = self.room("p", self.slot.keys)
        multiply_(half, q, k.mT, self.tiles.problem.node.scale * LOG2_E)
        for at, part in self.slot.mixed:
            piece = self.heads(half)[..., at : at + len(part)]
            hide_(piece, self.tiles.bits(self.slot, part, self.places, piece))
        return self.room("s", self.slot.keys).copy_(half)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Fill this tile's rows of o [B,H,M,E] and lse [B,H,M]."""
        s = self.scores(self.load("q", q), self.load_keys("k", k))
        top = self.room("lse", 1)
        torch.amax(s, -1, keepdim=True, out=top)
        total = self.sums(power_(s, top))
        top.add_(total.log2()).div_(LOG2_E)
        self.slot.rows(lse).copy_(self.heads(top)[..., 0])
        self.store("o", o, self.factor(s.div_(total)), self.load_keys("v", v), 1.0)

    def sums(self, s: torch.Tensor) -> torch.Tensor:
        """The sums of rows [n,L,1], 1 for a row that saw nothing; its lse stays -inf."""
        total = torch.sum(s, -1, keepdim=True, out=self.room("total", 1))
        return total.masked_fill_(total == 0.0, 1.0) if self.tiles.blind else total

    def factor(self, s: torch.Tensor) -> torch.Tensor:
        """s [n,L,S] as products take it."""
        return self.room("p", s.shape[2]).copy_(s)

    def pull(
        self,
        operands: Sequence[torch.Tensor],
        lse: torch.Tensor,
        do: torch.Tensor,
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Fill this tile's rows of dq, and add to dk and dv, by the formulas of AttentionGrad.

        The row sums of do o are those of p dp, which are at hand. lse may be of scores that were
        not rounded, so weights are divided by their own sum.
        """
        q, k = self.load("q", operands[0]), self.load_keys("k", operands[1])
        dq, dk, dv = grads
        scale, top = self.tiles.problem.node.scale, self.room("lse", 1)
        self.heads(top).copy_(self.slot.rows(lse)[..., None])
        s = power_(self.scores(q, k), top.mul_(LOG2_E))
        p = self.factor(s.div_(self.sums(s)))
        cotangents, ds = self.load("o", do), self.room("ds", self.slot.keys)
        if self.tiles.blind:
            cotangents = cotangents.masked_fill(top == -INF, 0.0)
        self.add_keys(dv, p, cotangents, 1.0)
        multiply_(ds, cotangents, self.load_keys("v", operands[2]).mT)
        softmax_backward(ds, p, -1, ds.dtype, grad_input=ds)
        self.store("dq", dq, ds, k, scale)
        self.add_keys(dk, ds, q, scale)


def power_(s: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """s -> 2^(s - top), and zeros in a row with top [n,L,1] = -inf."""
    return s.sub_(top.clamp(min=torch.finfo(top.dtype).min)).exp2_()
