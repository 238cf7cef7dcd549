"""Attention on a tile by matrix products with its scores in memory, for what no fused kernel takes.

Scores, weights and their gradients lie in buffers that the caller passes. Batch entries and
key/value heads are one axis n here, and the r query heads that share a key/value head lie beside
the queries in L = r * rows: so each product is one batched matrix product without repeating keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_graph.spec import INF


def scores_(s: torch.Tensor, q: torch.Tensor, ks: Sequence[torch.Tensor], scale: float) -> None:
    """s [n,L,S] = scale * q k^T; q [n,L,D], the keys in pieces [n,Si,D] that make up S."""
    at = 0
    for k in ks:
        part = s[..., at : at + k.shape[1]]
        torch.baddbmm(part, q, k.mT, beta=0, alpha=scale, out=part)
        at += k.shape[1]


def softmax_(s: torch.Tensor, lse: torch.Tensor, total: torch.Tensor) -> None:
    """s -> exp(s - max); total [n,L,1] = their sum; lse [n,L,1] = max + log(total).

    A row of -inf becomes zeros with lse = -inf and total = 1, so that dividing by it is safe.
    """
    torch.amax(s, -1, keepdim=True, out=lse)
    s.sub_(lse.masked_fill(lse == -INF, 0.0)).exp_()
    torch.sum(s, -1, keepdim=True, out=total)
    lse.add_(total.log())
    total.masked_fill_(total == 0.0, 1.0)


def weights_(s: torch.Tensor, lse: torch.Tensor) -> None:
    """s -> p = exp(s - lse), with lse [n,L,1] of the whole row."""
    s.sub_(lse.masked_fill(lse == -INF, 0.0)).exp_()


def weigh_(
    o: torch.Tensor, p: torch.Tensor, vs: Sequence[torch.Tensor], scale: float = 1.0
) -> None:
    """o [n,L,E] = scale * p v; p [n,L,S], the values in pieces [n,Si,E]."""
    at = 0
    for v in vs:
        part = p[..., at : at + v.shape[1]]
        torch.baddbmm(o, part, v, beta=int(at > 0), alpha=scale, out=o)
        at += v.shape[1]


def add_transposed_(
    totals: Sequence[torch.Tensor], p: torch.Tensor, x: torch.Tensor, scale: float = 1.0
) -> None:
    """Each total [n,Si,E] += scale * p_i^T x; p [n,L,S] in the totals' pieces, x [n,L,E]."""
    at = 0
    for total in totals:
        part = p[..., at : at + total.shape[1]]
        torch.baddbmm(total, part.mT, x, alpha=scale, out=total)
        at += total.shape[1]
