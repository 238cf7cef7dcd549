"""Attention on a tile by matrix products with its scores in memory, if no fused kernel supports it.

Scores, weights and their gradients lie in the caller's buffers. Batch entries and key/value heads
are one axis n here, and the r query heads of a key/value head lie beside the queries in
L = r * rows: so each product is one batched matrix product without repeating keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _is_tracing

from attn_graph.spec import INF

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LEAST_FLOAT = 2.0**-149  # of float32
# From this |lse| on exp(s - lse) loses more to the rounding of lse than to the scores' own: rows of
# weights are then divided by their own sum. docs/semantics.md, "Edges", has the derivation.
FAR = 2.0**5
softmax_backward = torch.ops.aten._softmax_backward_data.out


def scores_(
    s: torch.Tensor, q: torch.Tensor, ks: Sequence[torch.Tensor], scale: float, beta: int = 0,
    room: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """s [n,L,S] = beta * s + scale * q k^T; q [n,L,D], the keys in pieces [n,Si,D] of S in all.

    room: [n,L,S] in the dtype of q, if s has another; beta is 0 then.
    """
    at = 0
    for k in ks:
        keys = slice(at, at + k.shape[1])
        if room is None:
            torch.baddbmm(s[..., keys], q, k.mT, beta=beta, alpha=scale, out=s[..., keys])
        else:
            multiply_(room[..., keys], q, k.mT, scale)
        at += k.shape[1]
    if room is not None:
        s.copy_(room)


def cap_(s: torch.Tensor, t: torch.Tensor, cap: float) -> None:
    """t = tanh t, and s = cap * t, perhaps in one memory.

    t holds scores over their cap: the products divide by it. With s written from t, this takes two
    passes fewer.
    """
    torch.mul(t.tanh_(), cap, out=s)


def cap_back_(ds: torch.Tensor, t: torch.Tensor) -> None:
    """ds -> ds * (1 - t^2): the gradient by the scores before a soft cap, t = tanh(s / cap)."""
    torch.ops.aten.tanh_backward.grad_input(ds, t, grad_input=ds)


def bend_cap_(t: torch.Tensor, ds: torch.Tensor, tanh: torch.Tensor, cap: float) -> None:
    """t -> -2 ds tanh t / cap: the gain of ds as scores after a soft cap, cap * tanh, move by t."""
    t.mul_(ds).mul_(tanh).mul_(-2 / cap)


def exp_(s: torch.Tensor, top: torch.Tensor) -> None:
    """s -> exp(s - top), and zeros in a row with top [n,L,1] = -inf.

    As a power of two: PyTorch's `exp` on CPUs takes twice as long, and for -inf or a result below
    the normal numbers up to 60 times as long.
    """
    s.sub_(top.clamp(min=torch.finfo(top.dtype).min)).mul_(LOG2_E).exp2_()


def reaches_far(lse: torch.Tensor) -> bool:
    """True if an lse is large enough for its rounding to show. Rows without keys do not count.
    False for tensors without readable numbers."""
    if type(lse) is not torch.Tensor or not lse.is_cpu or not lse.numel() or _is_tracing():
        return False
    most: float = torch.linalg.vector_norm(lse, INF).item()
    if most == INF:
        most = torch.linalg.vector_norm(lse.masked_fill(lse == -INF, 0.0), INF).item()
    return most > FAR


def exp_of(sinks: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(sinks - top) [n,L,1], of sinks [n,L,1]: 1 if both are +inf, 0 if top is -inf, as it is
    in rows of no sequence."""
    apart = (sinks - top).nan_to_num_(0.0, INF, -INF)
    return apart.exp_().masked_fill_(top == -INF, 0.0)


def softmax_(
    s: torch.Tensor, lse: torch.Tensor, total: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor | None:
    """s -> exp(s - max); total [n,L,1] = their sum; lse [n,L,1] = max + log(total).

    sinks [n,L,1] count in all three. Their share of the sum is returned. A row of -inf becomes
    zeros with lse = -inf and total = 1, so dividing by it is safe.
    """
    torch.amax(s, -1, keepdim=True, out=lse)
    if sinks is not None:
        torch.maximum(lse, sinks, out=lse)
    exp_(s, lse)
    torch.sum(s, -1, keepdim=True, out=total)
    own = None
    if sinks is not None:
        own = exp_of(sinks, lse)
        total.add_(own)
    lse.add_(total.log())
    total.masked_fill_(total == 0.0, 1.0)
    return own


def drop_(dp: torch.Tensor, p: torch.Tensor) -> None:
    """dp -> 0 unless p is positive: at 0, or dropped."""
    torch.ops.aten.threshold_backward.grad_input(dp, p, 0, grad_input=dp)


def weigh_(
    o: torch.Tensor, p: torch.Tensor, vs: Sequence[torch.Tensor], scale: float = 1.0,
    beta: int = 0, room: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """o [n,L,E] = beta * o + scale * p v; p [n,L,S], the values in pieces [n,Si,E].

    room: as many elements as o in the dtype of p, if o has another.
    """
    at = 0
    for v in vs:
        add_product_(o, p[..., at : at + v.shape[1]], v, scale, 1 if at else beta, room)
        at += v.shape[1]


def add_transposed_(
    totals: Sequence[torch.Tensor], p: torch.Tensor, x: torch.Tensor, scale: float = 1.0,
    room: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Each total [n,Si,E] += scale * p_i^T x; p [n,L,S] in the totals' pieces, x [n,L,E].

    room: as many elements as the largest total in the dtype of p, if totals have another.
    """
    at = 0
    for total in totals:
        add_product_(total, p[..., at : at + total.shape[1]].mT, x, scale, 1, room)
        at += total.shape[1]


def add_product_(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, beta: int,
    room: torch.Tensor | None,
) -> None:  # fmt: skip
    """total = beta * total + scale * a b; beta is 0 or 1. room: for a product of another dtype."""
    if room is None:
        torch.baddbmm(total, a, b, beta=beta, alpha=scale, out=total)
        return
    product = multiply_(room[: total.numel()].view(total.shape), a, b, scale)
    total.add_(product) if beta else total.copy_(product)


def multiply_(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """out = scale * a b. For a scale rounded to 0 in float32, oneDNN would leave 0 times the memory
    before, NaN included. Products without a scale take up to a quarter less time."""
    if scale == 1.0:
        return torch.bmm(a, b, out=out)
    if abs(scale) < LEAST_FLOAT:
        return out.zero_()
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)
