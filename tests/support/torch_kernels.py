"""PyTorch's fused kernels for GPUs, played on a CPU: their contracts, by plain formulas in float64.

What the lowering must mend is played as it is: lse padded with infinity, or with an axis more; 0
where a row sees nothing. What it must not do is caught: arguments, layouts and lse that the real
kernels refuse or read wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

INF = float("inf")
Tensor = torch.Tensor


def scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    s = scale * q.double() @ heads(k, q).mT
    if bias is not None:
        assert bias.shape == s.shape
        s = s + bias
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).tril().logical_not(), -INF)
    return s


def heads(k: Tensor, q: Tensor) -> Tensor:
    """Key/value heads repeated for the query heads that share them."""
    return k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)


def check_aligned(*tensors: Tensor) -> None:
    """Kernels load 16 bytes at a time, and fault where a tensor begins in between."""
    assert not any(x.data_ptr() % 16 for x in tensors)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    check_aligned(q, k, v)
    s = scores(q, k, bias, causal, scale)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse == -INF, 0.0)[..., None])
    o = (p @ heads(v, q)).to(q.dtype)
    return o, lse.masked_fill(lse == -INF, 0.0).float()


def pull(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bias: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and the gradient of the scores, from the lse that is given."""
    check_aligned(do, q, k, v, o)
    assert lse.isfinite().all()
    p = torch.exp(scores(q, k, bias, causal, scale) - lse[..., None])
    delta = (do.double() * o.double()).sum(-1, keepdim=True)
    ds = p * (do.double() @ heads(v, q).mT - delta)
    dq, dk = scale * ds @ heads(k, q), scale * ds.mT @ q.double()
    dv = p.mT @ do.double()
    B, G, N = k.shape[:3]
    both = [x.view(B, G, -1, N, x.shape[-1]).sum(2).to(k.dtype) for x in (dk, dv)]
    return dq.to(q.dtype), both[0], both[1], ds.to(q.dtype)


def bshd(x: Tensor) -> Tensor:
    """The same, written as kernels do that know [B,M,H,D] alone."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def flash(
    q: Tensor, k: Tensor, v: Tensor, rate: float, causal: bool, *, scale: float
) -> tuple[Any, ...]:  # Any: tensors, numbers and nothing, as PyTorch has them
    assert rate == 0
    assert not causal or q.shape[2] == k.shape[2]
    o, lse = attend(q, k, v, None, causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    return bshd(o), lse, None, None, q.shape[2], k.shape[2], seed, seed, None


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cum_q: None, cum_k: None,
    max_q: int, max_k: int, rate: float, causal: bool, seed: Tensor, offset: Tensor, *,
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (cum_q, cum_k, max_q, max_k, rate) == (None, None, q.shape[2], k.shape[2], 0)
    assert lse.is_contiguous()
    return tuple(map(bshd, pull(do, q, k, v, o, lse, None, causal, scale)[:3]))


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, stats: bool, rate: float, causal: bool,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert stats
    assert rate == 0
    assert bias is None or bias.stride(3) == 1
    o, lse = attend(q, k, v, bias, causal, scale)
    M = q.shape[2]
    room = lse.new_full((*lse.shape[:2], -(-M // 32) * 32), INF)
    room[:, :, :M] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return bshd(o), room, seed, seed


def efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, rate: float, wants: list[bool], causal: bool, *, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    M = q.shape[2]
    assert rate == 0
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert (lse[:, :, M:] == INF).all()
    assert o.transpose(1, 2).is_contiguous()  # read so, whatever its strides
    *found, ds = pull(do, q, k, v, o, lse[:, :, :M], bias, causal, scale)
    wide = ds.new_full((*ds.shape[:3], -(-ds.shape[3] // 16) * 16), INF)
    wide[..., : ds.shape[3]] = ds
    return *map(bshd, found), wide[..., : ds.shape[3]] if wants[3] else None


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, stats: bool, rate: float = 0.0,
    causal: bool = False, *, scale: float = 1.0,
) -> tuple[Any, ...]:  # fmt: skip  # Any: tensors, numbers and nothing, as PyTorch has them
    assert stats
    assert rate == 0
    o, lse = attend(q, k, v, bias, causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return o, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed, None


def cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int, rate: float,
    causal: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (cum_q, cum_k, max_q, max_k, rate) == (None, None, q.shape[2], k.shape[2], 0)
    assert lse.shape == (*q.shape[:3], 1)
    return pull(do, q, k, v, o, lse[..., 0], bias, causal, scale)[:3]


def packed_scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, left: int, right: int
) -> Tensor:
    """Of one sequence, q [M,H,D], k [N,H,D] -> [H,M,N]; the window bottom right."""
    s = scale * q.transpose(0, 1).double() @ k.transpose(0, 1).double().mT
    M, N = s.shape[1:]
    gap = torch.arange(N) - torch.arange(M)[:, None] - (N - M)
    assert causal == ((left, right) == (-1, 0))
    assert min(left, right) >= -1
    hidden = (gap < -left) & (left >= 0) | (gap > right) & (right >= 0)
    return s.masked_fill(hidden, -INF)


def sequence_slices(
    starts: tuple[Tensor, Tensor], most: tuple[int, int], grouped: bool
) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of each sequence. What the kernel takes for granted is checked."""
    ends = [x.tolist() for x in starts]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in starts)
    assert most[0] > 1 or not grouped
    for each in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        rows, keys = slice(*each[:2]), slice(*each[2:])
        assert 0 <= rows.stop - rows.start <= most[0]
        assert 0 <= keys.stop - keys.start <= most[1]
        yield rows, keys


def packed_heads(k: Tensor, q: Tensor) -> Tensor:
    """[Tk,G,D], key/value heads repeated for the query heads that share them."""
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def packed_flash(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor, max_q: int, max_k: int,
    rate: float, causal: bool, debug: bool, *, scale: float, window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rows of no sequence are left as memory was, here NaN; lse is infinite of blind rows."""
    assert (rate, debug) == (0, False)
    check_aligned(q, k, v)
    o = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    grouped = q.shape[1] > k.shape[1]
    for rows, keys in sequence_slices((q_starts, kv_starts), (max_q, max_k), grouped):
        k1, v1 = (packed_heads(x[keys], q) for x in (k, v))
        s = packed_scores(q[rows], k1, causal, scale, window_size_left, window_size_right)
        own = s.logsumexp(-1)
        p = torch.exp(s - own.masked_fill(own == -INF, 0.0)[..., None])
        o[rows] = (p @ v1.transpose(0, 1).double()).transpose(0, 1).to(q.dtype)
        lse[:, rows] = own.masked_fill(own == -INF, INF).float()
    seed = torch.zeros(2, dtype=torch.uint64)
    return o, lse, seed, seed[:0], o[:0]


def packed_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_starts: Tensor,
    kv_starts: Tensor, max_q: int, max_k: int, rate: float, causal: bool, seed: Tensor,
    unused: Tensor, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rows of no sequence are left as memory was, here NaN."""
    assert rate == 0
    check_aligned(do, q, k, v, o)
    assert lse.is_contiguous()
    made = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    grouped, r = q.shape[1] > k.shape[1], q.shape[1] // k.shape[1]
    for rows, keys in sequence_slices((q_starts, kv_starts), (max_q, max_k), grouped):
        q1, do1, o1 = (x[rows].transpose(0, 1).double() for x in (q, do, o))
        k1, v1 = (packed_heads(x[keys], q).transpose(0, 1).double() for x in (k, v))
        window = causal, scale, window_size_left, window_size_right
        s = packed_scores(q[rows], packed_heads(k[keys], q), *window)
        assert (lse[:, rows] != -INF).all()
        p = torch.exp(s - lse[:, rows, None])
        ds = p * (do1 @ v1.mT - (do1 * o1).sum(-1, keepdim=True))
        made[0][rows] = (scale * ds @ k1).transpose(0, 1).to(q.dtype)
        for x, each in zip(made[1:], (scale * ds.mT @ q1, p.mT @ do1), strict=True):
            x[keys] = each.transpose(0, 1).unflatten(1, (-1, r)).sum(2).to(k.dtype)
    return tuple(made)


PLAYED = SimpleNamespace(
    _flash_attention_forward=SimpleNamespace(default=packed_flash),
    _flash_attention_backward=SimpleNamespace(default=packed_flash_backward),
    **{
        f"_scaled_dot_product_{name}": SimpleNamespace(default=call)
        for name, call in {
            "flash_attention": flash,
            "flash_attention_backward": flash_backward,
            "efficient_attention": efficient,
            "efficient_attention_backward": efficient_backward,
            "cudnn_attention": cudnn,
            "cudnn_attention_backward": cudnn_backward,
        }.items()
    },
)
