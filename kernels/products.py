"""Attention on a tile by matrix products with its scores in memory, for what no fused kernel takes.

Scores, weights and their gradients lie in buffers that the caller passes. Batch entries and
key/value heads are one axis n here, and the r query heads that share a key/value head lie beside
the queries in L = r * rows: so each product is one batched matrix product without repeating keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LOG2_E = 1.4426950408889634


def scores_(
    s: torch.Tensor, q: torch.Tensor, ks: Sequence[torch.Tensor], scale: float, beta: int = 0
) -> None:
    """s [n,L,S] = beta * s + scale * q k^T; q [n,L,D], the keys in pieces [n,Si,D], making up S."""
    at = 0
    for k in ks:
        part = s[..., at : at + k.shape[1]]
        torch.baddbmm(part, q, k.mT, beta=beta, alpha=scale, out=part)
        at += k.shape[1]


def capped_scores_(
    s: torch.Tensor, t: torch.Tensor, q: torch.Tensor, ks: Sequence[torch.Tensor],
    scale: float, cap: float,
) -> None:  # fmt: skip
    """t [n,L,S] = tanh(scale * q k^T / cap), and s = cap * t, which may be the same memory.

    The products divide by the cap themselves, and s is written from t: two passes fewer.
    """
    scores_(t, q, ks, scale / cap)
    torch.mul(t.tanh_(), cap, out=s)


def cap_back_(ds: torch.Tensor, t: torch.Tensor) -> None:
    """ds -> ds * (1 - t^2): the gradient by the scores before a soft cap, t = tanh(s / cap)."""
    torch.ops.aten.tanh_backward.grad_input(ds, t, grad_input=ds)


def bend_cap_(t: torch.Tensor, ds: torch.Tensor, tanh: torch.Tensor, cap: float) -> None:
    """t -> -2 ds tanh t / cap: what ds gains as scores after a soft cap, cap * tanh, move by t."""
    t.mul_(ds).mul_(tanh).mul_(-2 / cap)


def exp_(s: torch.Tensor, top: torch.Tensor) -> None:
    """s -> exp(s - top), and zeros in a row with top [n,L,1] = -inf.

    As a power of two: PyTorch's `exp` on CPUs takes twice as long, and for -inf or a result below
    the normal numbers up to 60 times as long.
    """
    s.sub_(top.clamp(min=torch.finfo(top.dtype).min)).mul_(LOG2_E).exp2_()


def softmax_(s: torch.Tensor, lse: torch.Tensor, total: torch.Tensor) -> None:
    """s -> exp(s - max); total [n,L,1] = their sum; lse [n,L,1] = max + log(total).

    A row of -inf becomes zeros with lse = -inf and total = 1, so that dividing by it is safe.
    """
    torch.amax(s, -1, keepdim=True, out=lse)
    exp_(s, lse)
    torch.sum(s, -1, keepdim=True, out=total)
    lse.add_(total.log())
    total.masked_fill_(total == 0.0, 1.0)


def weigh_(
    o: torch.Tensor, p: torch.Tensor, vs: Sequence[torch.Tensor], scale: float = 1.0, beta: int = 0
) -> None:
    """o [n,L,E] = beta * o + scale * p v; p [n,L,S], the values in pieces [n,Si,E]."""
    at = 0
    for v in vs:
        part = p[..., at : at + v.shape[1]]
        torch.baddbmm(o, part, v, beta=1 if at else beta, alpha=scale, out=o)
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
