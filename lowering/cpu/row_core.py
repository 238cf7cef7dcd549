"""The computation of a tile of whole rows of scores, and of one cut out with copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import change_
from attn_graph.kernels.hiding import hide_
from attn_graph.kernels.products import LOG2_E, drop_, multiply_, softmax_backward
from attn_graph.kernels.row_sums import has_whole_rows, sum_rows_
from attn_graph.lowering.cpu.tile_grid import TileGrid
from attn_graph.lowering.problem import Problem
from attn_graph.masks.places import Place
from attn_graph.sparsity.parts import Tile
from attn_graph.spec import INF

# Numbers of k cast at a time, within a cache, at least one key's; and the least keys of a head
# among them, if it has as many.
MOST_CAST, LEAST_KEYS = 2**20, 512
# For at most MOST_SUMMED rows of a key/value head, p v is made as sums of rows of v, if v has
# LEAST_SUMMED numbers, in float32 only from E = LONG_NUMBERS on. Sums take half the time of a
# product, in float16 a twentieth.
LONG_NUMBERS = 128
MOST_SUMMED, LEAST_SUMMED = {torch.float32: 2, torch.bfloat16: 1, torch.float16: 4}, 2**20
Tensors = Mapping[str, torch.Tensor]
Change = Callable[[torch.Tensor], None]  # scores [n,L,S] in place, by a bias and a mask


@final
@frozen
class RowVariant:
    """The variant of computing whole rows.

    scale: of the scores. turns: True if scores are made as k q^T. rounds: True if products give
    another dtype than the softmax. kept: True if weights are saved, not lse. sums: True if p v is
    made as sums of rows of v. casts: True if scores are of q and k in float32, of a piece of k at a
    time. rate: of dropout; kept weights are negative if dropped. caps: of the scores, in a forward.
    """

    scale: float
    turns: bool = False
    rounds: bool = False
    kept: bool = False
    sums: bool = False
    casts: bool = False
    rate: float = 0.0
    caps: tuple[float, ...] = ()


def sums_rows(problem: Problem, parts: int = 1) -> bool:
    """True if p v of a problem, or of each of its parts, is made as sums of rows of v."""
    p, v = problem, problem.specs[2]
    few = p.grad is None and MOST_SUMMED.get(p.dtype, 0) >= p.lines
    suits = p.E >= LONG_NUMBERS or p.dtype != torch.float32
    return few and suits and prod(v.shape) >= parts * LEAST_SUMMED and has_whole_rows(v)


@final
@frozen(eq=False)
class Core:
    """The computation of a tile: q and o [n,L,.], k and v [n,S,.], L rows of scores each.

    blind: True if a query may see no key. divides: True if weights recomputed from lse are divided
    by their own sum.
    """

    steps: RowVariant
    scratch: Tensors
    blind: bool
    divides: bool = False

    def room(self, name: str, like: torch.Tensor, last: int) -> torch.Tensor:
        """A buffer as [n,L,last], or [n,S,last], as `like` is."""
        n, rows, _ = like.shape
        room, shape = self.scratch[name], (n, rows, last)
        if room.shape == shape:
            return room
        return room.view(-1)[: n * rows * last].view(shape)

    def attend(
        self, change: Change | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, saved: torch.Tensor | None = None, *, sign: Change | None = None,
    ) -> None:  # fmt: skip
        """Fill o [n,L,E], and `saved` if given: weights [n,L,S], if they are kept, or lse [n,L,1],
        without a change to the bits of o. sign: makes dropped weights negative."""
        weights, lse = (saved, None) if self.steps.kept else (None, saved)
        s = self.room("p", q, k.shape[1]) if weights is None else weights
        self.score(s, q, k, change, self.steps.scale)
        self.take_softmax(s, lse)
        if sign is not None:
            sign(s)
            s = self.undropped(s)
        self.sum_up(o, s, v)

    def undropped(self, p: torch.Tensor) -> torch.Tensor:
        """The weights [n,L,S] left by dropout, not divided by their share."""
        return torch.clamp(p, min=0.0, out=self.room("p", p, p.shape[2]))

    def sum_up(self, o: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> None:
        """o [n,L,E] = p v, divided by the share of weights left by dropout."""
        if self.steps.casts:
            p = self.scratch["cast"].view(o.dtype)[: p.numel()].view(p.shape).copy_(p)
        if self.steps.sums:
            sum_rows_(o, p, v)
        else:
            multiply_(o, p, v, self.upscale)

    @property
    def upscale(self) -> float:
        return 1 / (1 - self.steps.rate)

    def take_softmax(self, s: torch.Tensor, lse: torch.Tensor | None) -> None:
        """s [n,L,S] -> weights; fill lse [n,L,1] if given. PyTorch computes a softmax in float32,
        whatever it reads."""
        blind = self.blind
        top = torch.amax(s, -1, keepdim=True) if blind or lse is not None else None
        wide = s if lse is None else self.widen(s)
        torch.softmax(wide, -1, out=wide)
        if lse is not None and top is not None:  # the largest weight is 1 / sum exp(s - max)
            self.narrow(wide, s)
            largest = torch.amax(wide, -1, keepdim=True, out=self.room("total", s, 1))
            torch.sub(top, largest.log_(), out=lse)
        if blind and top is not None:
            unseeing = top == -INF
            s.masked_fill_(unseeing, 0.0)
            if lse is not None:
                lse.masked_fill_(unseeing, -INF)

    def pull(
        self, change: Change | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        do: torch.Tensor, saved: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill dq, dk and dv with this tile's share, by the formulas of AttentionGrad.

        The row sums of do o equal those of p dp, already at hand: so o is not read.
        """
        scale, ds = self.steps.scale, self.room("ds", q, k.shape[1])
        p = saved if self.steps.kept else self.weigh(q, k, change, saved)
        if self.blind:
            do = do.masked_fill(self.unseeing(saved), 0.0)
        rate, upscale = self.steps.rate, self.upscale
        multiply_(dv, (self.undropped(p) if rate else p).mT, do, upscale)
        multiply_(ds, do, v.mT, upscale)
        if rate:
            drop_(ds, p)
            p = torch.abs(p, out=self.room("p", p, p.shape[2]))
        softmax_backward(ds, p, -1, ds.dtype, grad_input=ds)
        multiply_(dq, ds, k, scale)
        multiply_(dk, ds.mT, q, scale)

    def unseeing(self, saved: torch.Tensor) -> torch.Tensor:
        """True for rows [n,L,1] without keys, by the saved tensor."""
        return saved.amax(-1, keepdim=True) == 0.0 if self.steps.kept else saved == -INF

    def score(
        self, s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, change: Change | None, scale: float
    ) -> None:
        """Fill s [n,L,S] with the scores; with caps, a bias and a mask."""
        if self.steps.casts:
            wide = self.room("cast q", q, q.shape[2]).copy_(q)
            self.score_pieces(s, wide.mul_(scale), k)
        elif self.steps.turns:
            s.copy_(multiply_(self.room("turned", k, q.shape[1]), k, q.mT, scale).mT)
        else:
            multiply_(s, q, k.mT, scale)
        for cap in self.steps.caps:
            s.div_(cap).tanh_().mul_(cap)
        if change is not None:
            change(s)

    def score_pieces(self, s: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
        """Fill s [n,L,S] with q k^T, of some keys of some heads at a time: a cache holds these in
        the dtype of q."""
        room, (n, S, D) = self.scratch["cast"], k.shape
        most = max(1, MOST_CAST // D)
        heads = min(n, max(1, most // min(S, LEAST_KEYS)))
        keys = most // heads
        for columns, rows, some in zip(*(x.split(heads) for x in (s, q, k)), strict=True):
            for each, piece in zip(columns.split(keys, 2), some.split(keys, 1), strict=True):
                wide = room[: piece.numel()].view(piece.shape).copy_(piece)
                multiply_(each, rows, wide.mT)

    def weigh(
        self, q: torch.Tensor, k: torch.Tensor, change: Change | None, lse: torch.Tensor
    ) -> torch.Tensor:
        """The weights [n,L,S] again. If products round, lse may be of unrounded scores: so the
        weights are divided by their own sum."""
        s = self.room("p", q, k.shape[1])
        if self.divides:
            self.score(s, q, k, change, self.steps.scale)
            wide = self.widen(s)
            torch.softmax(wide, -1, out=wide)
            return self.narrow(wide.masked_fill_(lse == -INF, 0.0), s)
        self.score(s, q, k, change, self.steps.scale * LOG2_E)
        top, wide = torch.mul(lse, LOG2_E, out=self.room("top", s, 1)), self.widen(s)
        if self.blind:
            top.clamp_(min=torch.finfo(top.dtype).min)
        wide.sub_(top).exp2_()
        if self.steps.rounds:
            total = torch.sum(wide, -1, keepdim=True, out=self.room("total", s, 1))
            wide.div_(total.masked_fill_(total == 0.0, 1.0) if self.blind else total)
        return self.narrow(wide, s)

    def widen(self, s: torch.Tensor) -> torch.Tensor:
        return self.room("wide", s, s.shape[2]).copy_(s) if self.steps.rounds else s

    def narrow(self, wide: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return s.copy_(wide) if self.steps.rounds else s


@final
@frozen(eq=False)
class Spot:
    """A tile cut out of a problem, with its copies.

    whole: True if no sum is over tiles. places: all, not its own alone. given: the modifiers'
    tensors.
    """

    tiles: TileGrid
    whole: bool
    tile: Tile
    core: Core
    places: Place
    given: Sequence[Tensors]

    def room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,L,last]."""
        n, L = self.tile.lines
        return self.core.scratch[name][: n * L * last].view(n, L, last)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n,L,S] as [batch,heads,rows,S]."""
        return x.view(self.tile.grid)

    def rows(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's queries of x [B,H,M,D] as [n,L,D]: in place, or room for them, since oneDNN
        copies gaps."""
        rows, room = self.tile.cut_queries(x), self.room(name, x.shape[3])
        return rows.view(room.shape) if rows.is_contiguous() else room

    def load(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`rows`, filled."""
        room, rows = self.rows(name, x), self.tile.cut_queries(x)
        if not rows.is_contiguous():
            self.heads(room).copy_(rows)
        return room

    def store(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """This tile's queries of x [B,H,M,D] = the result in their room."""
        rows = self.tile.cut_queries(x)
        if not rows.is_contiguous():
            rows.copy_(self.heads(made))

    def load_keys(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """This tile's keys of x [B,G,N,D] as [n,S,D], without gaps too."""
        here, n = self.tile.cut_groups(x), self.tile.lines[0]
        pieces = [here[:, :, a:b] for a, b in self.tile.runs]
        if len(pieces) == 1 and pieces[0].is_contiguous():
            return pieces[0].view(n, -1, x.shape[3])
        room = self.key_room(name, x.shape[3])
        torch.cat(pieces, 2, out=room.view(*here.shape[:2], -1, x.shape[3]))
        return room

    def key_room(self, name: str, last: int) -> torch.Tensor:
        """A buffer as [n,S,last]."""
        n, S = self.tile.lines[0], self.tile.keys
        return self.core.scratch[name][: n * S * last].view(n, S, last)

    def keys_made(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Room for this tile's gradient [n,S,D] by k or v: in x [B,G,N,D] if it is all."""
        if not self.whole:
            return self.key_room(name, x.shape[3])
        return self.tile.cut_groups(x).view(-1, self.tile.keys, x.shape[3])

    def add_keys(self, x: torch.Tensor, made: torch.Tensor) -> None:
        """This tile's keys of x [B,G,N,D] += made [n,S,D]."""
        at = 0
        for piece in self.tile.cut_keys(x):
            piece.add_(made[:, at : at + piece.shape[1]])
            at += piece.shape[1]

    @property
    def place(self) -> Place:
        tile, keys = self.tile, range(self.tiles.problem.N)
        return self.places.within(tile.batch, tile.heads, tile.rows, keys)

    def change(self, s: torch.Tensor) -> None:
        """Add biases to the scores of this tile, and hide its masked places. Caps are a step of the
        core."""
        if not self.core.steps.caps:
            steps = zip(self.tiles.problem.node.modifiers, self.given, strict=True)
            for modifier, data in steps:
                change_(modifier, self.heads(s), self.place.reading(data))
        for at, part in self.tile.mixed:
            piece = self.heads(s)[..., at : at + len(part)]
            hide_(piece, self.tiles.bits(self.tile, part, self.places, piece))

    def attend(
        self, operands: Sequence[torch.Tensor], o: torch.Tensor, saved: torch.Tensor | None,
        sign: Change | None,
    ) -> None:  # fmt: skip
        """Fill this tile's rows of o [B,H,M,E], and of lse [B,H,M] or weights if wanted."""
        if not self.tile.parts:  # never with kept weights
            self.tile.cut_queries(o).zero_()
            if saved is not None:
                self.tile.cut_queries(saved).fill_(-INF)
            return
        q, k, v = operands
        made, room = self.rows("o", o), None if saved is None else self.saved_room(saved)
        keys = self.load_keys("k", k), self.load_keys("v", v)
        self.core.attend(self.change, self.load("q", q), *keys, made, room, sign=sign)
        self.store(o, made)
        if saved is not None and room is not None and not self.core.steps.kept:
            self.tile.cut_queries(saved).copy_(self.heads(room)[..., 0])

    def saved_room(self, saved: torch.Tensor) -> torch.Tensor:
        """This tile's rows of weights [B,H,M,N] as [n,L,N] in place, or room for rows of lse
        [B,H,M] as [n,L,1]."""
        if self.core.steps.kept:
            return self.tile.cut_queries(saved).view(*self.tile.lines, -1)
        return self.room("lse", 1)

    def pull(
        self, operands: Sequence[torch.Tensor], do: torch.Tensor, saved: torch.Tensor,
        grads: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Fill this tile's rows of dq, and add to dk and dv."""
        (q, k, v), (dq, dk, dv) = operands, grads
        if not self.tile.parts:
            self.tile.cut_queries(dq).zero_()
            return
        keys = self.load_keys("k", k), self.load_keys("v", v)
        made = self.keys_made("dk", dk), self.keys_made("dv", dv)
        rows, room = self.rows("dq", dq), self.saved_room(saved)
        if not self.core.steps.kept:
            self.heads(room).copy_(self.tile.cut_queries(saved)[..., None])
        self.core.pull(self.change, self.load("q", q), *keys, self.load("o", do), room, rows, *made)
        self.store(dq, rows)
        if not self.whole:
            self.add_keys(dk, made[0])
            self.add_keys(dv, made[1])

    def collect(self, totals: Sequence[Tensors]) -> None:
        """Add this tile's share to the gradients of the modifiers' tensors."""
        steps = zip(self.tiles.problem.node.modifiers, self.given, totals, strict=True)
        for modifier, data, sums in steps:
            if sums:
                ds = self.heads(self.room("ds", self.tile.keys))
                modifier.collect(sums, ds, self.place.reading(data))
