"""PyTorch's fused CPU attention on a tile: some queries against some neighbouring keys.

The kernel computes a softmax without ever holding the scores. Three of its habits need care. It
gives lse = 0 to a row with all keys masked: here the row gets -inf. It divides by zero for sizes of
0: callers never pass them. It takes every last stride for 1: callers pack.
"""

from __future__ import annotations

import torch

from attn_graph.spec import INF, accumulator

flash = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]  # the binding: faster than torch.ops
flash_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
)  # the function behind its call

# The kernel's block: most keys, and most rows by the least number of queries
KEYS, ROWS = 512, ((768, 256), (192, 64), (0, 32))
PACKED = 32  # oneDNN rounds up to its multiples the sizes of operands that it packs


def block_bytes(M: int, N: int, D: int, dtype: torch.dtype, *, backward: bool = False) -> int:
    """Bytes of the block that each thread works in, at most, for M queries and N keys.

    As aten/src/ATen/native/cpu/FlashAttentionKernel.cpp allocates it: scores in wider precision,
    and for each row its maximum, its sum and o; in a backward scores, their gradients, and delta of
    each row. Half precision has the weights once more, rounded, and in a backward their gradients
    and the operands of one product, which oneDNN packs.
    """
    rows = min(M, next(most for least, most in ROWS if least <= M))
    keys, wide, half = min(N, KEYS), accumulator(dtype).itemsize, dtype.itemsize == 2
    scores = rows * keys
    if not backward:
        return (scores + rows * (2 + D)) * wide + half * scores * dtype.itemsize
    m, n, d = (-(-size // PACKED) * PACKED for size in (rows, keys, D))
    packed = m * n * dtype.itemsize + (m + n) * d * wide
    return (2 * scores + rows) * wide + half * (2 * scores * dtype.itemsize + packed)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    addend: torch.Tensor | None = None,
    unseen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,H,M,D], k and v [B,G,N,D], addend broadcasts to [B,H,M,N] -> o, lse [B,H,M].

    The addend is added to the scores; at -inf it masks a key. `causal` keeps j <= i. unseen: rows
    with all keys masked, broadcasts to [B,H,M]; None without such rows.
    """
    o, lse = flash(q, k, v, 0.0, causal, attn_mask=addend, scale=scale)
    return o, lse if unseen is None else lse.masked_fill(unseen, -INF)


def pull_heads(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> list[torch.Tensor]:
    """dq, dk, dv in C order, of q, k, v and o in C order with as many heads of k as of q.

    The kernel gives gradients in the order of [B,L,H,D], and copies do to it: so each head is a
    batch entry here.
    """
    each = [x.flatten(0, 1).unsqueeze(1) for x in (do, q, k, v, o, lse)]
    made = flash_backward(*each, 0.0, causal, scale=scale)
    return [x.view(like.shape) for x, like in zip(made, (q, k, v), strict=True)]


def find_unseen(addend: torch.Tensor) -> torch.Tensor:
    """Rows of an addend [...,M,N] with all keys masked, [...,M].

    By a maximum of the numbers: `any` of booleans takes twenty times longer.
    """
    return addend.amax(-1) == -INF


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool = False,
    addend: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of a tile. o and lse are of the whole row, so the tiles add up exactly.

    lse must be finite: a row without keys may have any finite number, as its weights are 0.
    """
    dq, dk, dv = flash_backward(do, q, k, v, o, lse, 0.0, causal, attn_mask=addend, scale=scale)
    return dq, dk, dv
