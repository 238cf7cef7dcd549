"""The computation of a tile of whole rows of scores: products with a softmax between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.products import LN_2, LOG2_E, drop_, multiply_
from attn_graph.kernels.row_sums import sum_rows_
from attn_graph.spec import INF

# Numbers of k cast at a time, within a cache, at least one key's; and the least keys of a head
# among them, if it has as many.
MOST_CAST, LEAST_KEYS = 2**20, 512
Change = Callable[[torch.Tensor], None]  # scores [n,L,S] in place, by a bias and a mask
softmax_backward = torch.ops.aten._softmax_backward_data.out


@final
@frozen
class RowSteps:
    """The variant of computing whole rows.

    scale: of the scores. single: True if PyTorch's softmax, a single call, is the faster. turns:
    True if scores are made as k q^T. rounds: True if products give another dtype than the softmax.
    kept: True if weights are saved, not lse. sums: True if p v is made as sums of rows of v. casts:
    True if scores are of q and k in float32, of a piece of k at a time. rate: of dropout; kept
    weights are negative if dropped.
    """

    scale: float
    single: bool
    turns: bool = False
    rounds: bool = False
    kept: bool = False
    sums: bool = False
    casts: bool = False
    rate: float = 0.0


@final
@frozen(eq=False)
class Core:
    """The computation of a tile: q and o [n,L,.], k and v [n,S,.], L rows of scores each.

    blind: True if a query may see no key. divides: True if weights recomputed from lse are divided
    by their own sum.
    """

    steps: RowSteps
    scratch: Mapping[str, torch.Tensor]
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
        single, scale = self.steps.single, self.steps.scale
        weights, lse = (saved, None) if self.steps.kept else (None, saved)
        s = self.room("p", q, k.shape[1]) if weights is None else weights
        self.score(s, q, k, change, scale if single else scale * LOG2_E)
        weigh = self.take_softmax if single else self.take_powers
        weigh(s, lse)
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

    def take_powers(self, s: torch.Tensor, lse: torch.Tensor | None) -> None:
        """s [n,L,S], in base 2 -> weights; fill lse [n,L,1] if given."""
        wide = self.widen(s)
        top = torch.amax(wide, -1, keepdim=True, out=self.room("top", s, 1))
        total = self.normalise(wide, top)
        self.narrow(wide, s)
        if lse is not None:
            torch.add(top, total.log2_(), out=lse).mul_(LN_2)
            if self.blind:
                lse.masked_fill_(top == torch.finfo(top.dtype).min, -INF)

    def take_softmax(self, s: torch.Tensor, lse: torch.Tensor | None) -> None:
        """`take_powers` in base e, in few passes. PyTorch computes a softmax in float32, whatever
        it reads."""
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
            p = drop_(ds, p, self.room("p", p, p.shape[2]))
        softmax_backward(ds, p, -1, ds.dtype, grad_input=ds)
        multiply_(dq, ds, k, scale)
        multiply_(dk, ds.mT, q, scale)

    def unseeing(self, saved: torch.Tensor) -> torch.Tensor:
        """True for rows [n,L,1] without keys, by the saved tensor."""
        return saved.amax(-1, keepdim=True) == 0.0 if self.steps.kept else saved == -INF

    def score(
        self, s: torch.Tensor, q: torch.Tensor, k: torch.Tensor, change: Change | None, scale: float
    ) -> None:
        """Fill s [n,L,S] with the scores, a bias and a mask among them."""
        if self.steps.casts:
            wide = self.room("cast q", q, q.shape[2]).copy_(q)
            self.score_pieces(s, wide.mul_(scale), k)
        elif self.steps.turns:
            s.copy_(multiply_(self.room("turned", k, q.shape[1]), k, q.mT, scale).mT)
        else:
            multiply_(s, q, k.mT, scale)
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
        if self.steps.rounds:
            self.normalise(wide, top)
        else:
            self.raise_(wide, top)
        return self.narrow(wide, s)

    def normalise(self, s: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        """s [n,L,S] -> 2^(s - top), each row divided by its sum [n,L,1]; returns the sum. A row
        without keys is zeros, and its sum 1."""
        self.raise_(s, top)
        total = torch.sum(s, -1, keepdim=True, out=self.room("total", s, 1))
        s.div_(total.masked_fill_(total == 0.0, 1.0) if self.blind else total)
        return total

    def raise_(self, s: torch.Tensor, top: torch.Tensor) -> None:
        """s [n,L,S] -> 2^(s - top), zeros if top [n,L,1], an upper bound of s, is -inf."""
        s.sub_(top.clamp_(min=torch.finfo(top.dtype).min) if self.blind else top).exp2_()

    def widen(self, s: torch.Tensor) -> torch.Tensor:
        return self.room("wide", s, s.shape[2]).copy_(s) if self.steps.rounds else s

    def narrow(self, wide: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return s.copy_(wide) if self.steps.rounds else s
