"""PyTorch's three fused attention kernels for GPUs, each as one pair of functions, and flash on
packed tensors as another.

They compute a softmax without ever holding the scores. The functions here hide the kernels'
differences: the padding of lse, rows without keys, unread arguments for dropout. The limits of the
kernels stand in lowering/torch_cuda/dense.py; callers check them first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.spec import INF

ROWS = 32  # the efficient kernel pads lse to a multiple, and reads the padding backward
LEAST_ROWS = 2  # with 1 and grouped heads flash takes each sequence to have a row, and q as [B,H,D]
aten = torch.ops.aten
Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


@final
@frozen
class Kernel:
    """One kernel. Shapes: q, do, o [B,H,M,.], k, v [B,G,N,.], lse [B,H,M], bias [B,H,M,N] or None.

    forward: q, k, v, bias, causal, scale -> o, lse: float32, natural logarithm, -inf if a row sees
    no key; rows may lie apart. backward: do, q, k, v, o, lse, bias, causal, scale, wants_bias ->
    dq, dk, dv and dbias, or None; lse is of the whole row, finite or -inf.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`Kernel.forward` by FlashAttention, without a bias."""
    results = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scale)
    return results[0], results[1]


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bias: None, causal: bool, scale: float, wants_bias: bool,
) -> Gradients:  # fmt: skip
    """`Kernel.backward` by FlashAttention."""
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        seed, seed[:1], scale=scale,
    )  # fmt: skip
    return dq, dk, dv, None


@final
@frozen(eq=False)
class SequencePlaces:
    """The places of packed sequences for the flash kernel, and each row's keys: from `window[0]`
    before the diagonal, bottom right, to `window[1]` after it; -1: all.

    starts: of q and of k, int32 [B+1]. most: no fewer than the rows of each, and of the keys.
    """

    starts: tuple[Tensor, Tensor]
    most: tuple[int, int]
    window: tuple[int, int]

    @property
    def where(self) -> tuple[Tensor | int, ...]:
        """The arguments after q, k and v."""
        rows, keys = self.most
        return *self.starts, max(LEAST_ROWS, rows), keys

    @property
    def causal(self) -> bool:
        """True if a row sees its own key and all before it."""
        return self.window == (-1, 0)


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: SequencePlaces, scale: float
) -> tuple[Tensor, Tensor]:
    """q [T,H,D], k, v [Tk,G,D] -> o [T,H,D], lse [H,T], by FlashAttention. lse is +inf in rows
    without keys. Rows of no sequence are not written."""
    left, right = sequences.window
    results = aten._flash_attention_forward.default(
        q, k, v, *sequences.where, 0.0, sequences.causal, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return results[0], results[1]


def packed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, sequences: SequencePlaces,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of packed tensors, with lse from `packed_forward`."""
    left, right = sequences.window
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._flash_attention_backward.default(
        do, q, k, v, o, lse, *sequences.where, 0.0, sequences.causal, seed, seed[:0],
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq, dk, dv


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`Kernel.forward` by the memory-efficient kernel."""
    results = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    lse = results[1][:, :, : q.shape[2]]
    if bias is not None:  # a row with all keys masked gets lse = 0
        lse = lse.masked_fill(bias.amax(-1) == -INF, -INF)
    return results[0], lse


def efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bias: Tensor | None, causal: bool, scale: float, wants_bias: bool,
) -> Gradients:  # fmt: skip
    """`Kernel.backward` by the memory-efficient kernel. In half precision it reads o as it writes
    it, [B,M,H,E] without gaps, whatever the strides: kernel_backward.h, o_strideM."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    o = o.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward.default(
        do, q, k, v, bias, o, pad_lse(lse), seed, seed, 0.0, [True, True, True, wants_bias],
        causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv, dbias.contiguous() if wants_bias else None


def pad_lse(lse: Tensor) -> Tensor:
    """lse [B,H,M] for the efficient kernel: padded to a multiple of ROWS. It is infinite beyond M,
    so padding weighs nothing, and finite in rows without keys."""
    M = lse.shape[2]
    room = lse.new_full((*lse.shape[:2], -(-M // ROWS) * ROWS), INF)
    room[:, :, :M] = lse.masked_fill(lse == -INF, 0.0)
    return room


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """`Kernel.forward` by cuDNN through PyTorch, without a bias."""
    results = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return results[0], results[1].view(q.shape[:3])


def cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bias: None, causal: bool, scale: float, wants_bias: bool,
) -> Gradients:  # fmt: skip
    """`Kernel.backward` by cuDNN through PyTorch."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    lse = lse.contiguous()
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward.default(
        do, q, k, v, o, lse[..., None] if has_column() else lse, seed, seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv, None


@cache
def has_column() -> bool:
    """True if this PyTorch's cuDNN attention has lse [B,H,M,1], by its shape function."""
    x: Any = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")  # Any: of torch.ops
    results = aten._scaled_dot_product_cudnn_attention.default(x, x, x, None, True)
    return bool(results[1].ndim == 4)


FLASH = Kernel(flash_forward, flash_backward)
EFFICIENT = Kernel(efficient_forward, efficient_backward)
CUDNN = Kernel(cudnn_forward, cudnn_backward)
