"""The function behind `torch.nn.MultiheadAttention`, with another attention inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool], Tensor]
Pair = tuple[Tensor, Tensor]


def multi_head_attention(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = False,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """`torch.nn.functional.multi_head_attention_forward` without weights, by `attend`.

    query [M,B,H*D], key and value [N,B,...], or without B -> [M,B,H*D]. Arguments as PyTorch's.
    attend: a function of q, k and v [B,H,...], a mask or None, the dropout rate, and is_causal.
    Masks stay small: padding is [B,1,1,N], not one for each head and query. Raises AssertionError
    and RuntimeError like PyTorch.
    """
    assert not need_weights  # callers leave these to PyTorch
    batched: bool = F._mha_shape_check(  # type: ignore[attr-defined]  # of torch.nn.functional
        query, key, value, key_padding_mask, attn_mask, num_heads
    )
    if not batched:
        same = key is query, value is key
        query = query.unsqueeze(1)
        key = query if same[0] else key.unsqueeze(1)
        value = key if same[1] else value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    (M, B, _), N = query.shape, key.shape[0]
    require_sizes(query, key, value, embed_dim_to_check, num_heads, use_separate_proj_weight)
    require_masks(attn_mask, key_padding_mask, is_causal, (B, num_heads, M, N))
    separate = q_proj_weight, k_proj_weight, v_proj_weight
    weights = separate if use_separate_proj_weight else in_proj_weight
    q, k, v = project(query, key, value, weights, in_proj_bias)
    k, v = append_bias(k, v, bias_k, bias_v)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = replace_static(k, v, static_k, static_v)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    more = (bias_k is not None) + add_zero_attn  # keys at the end that no mask hides
    if is_causal and (key_padding_mask is None or not more):
        attn_mask = None
    else:
        is_causal = False
    mask = merge_masks(attn_mask, key_padding_mask, query.dtype, (B, num_heads), more)
    o = attend(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    merged = apply_linear(o.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (merged if batched else merged.squeeze(1)), None


def require_sizes(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, separate: bool
) -> None:
    """Raise AssertionError for sizes that PyTorch refuses."""
    if query.shape[-1] != width:
        raise AssertionError(
            f"was expecting embedding dimension of {width}, but got {query.shape[-1]}"
        )
    if width % heads:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {heads}")
    axes = slice(2) if separate else slice(None)
    if key.shape[axes] != value.shape[axes]:
        raise AssertionError(
            f"key shape {[*key.shape]} does not match value shape {[*value.shape]}"
        )


def require_masks(
    mask: Tensor | None, padding: Tensor | None, is_causal: bool, sizes: tuple[int, int, int, int]
) -> None:
    """Raise RuntimeError or AssertionError for masks that PyTorch refuses."""
    B, H, M, N = sizes
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if mask is not None and (shape := (M, N) if mask.ndim == 2 else (B * H, M, N)) != mask.shape:
        raise RuntimeError(
            f"The shape of the {mask.ndim}D attn_mask is {[*mask.shape]}, but should be {[*shape]}."
        )
    if padding is not None and padding.shape != (B, N):
        raise AssertionError(
            f"expecting key_padding_mask shape of {(B, N)}, but got {tuple(padding.shape)}"
        )


def project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor | tuple[Tensor | None, ...] | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the layer's inputs: in one product if these are one tensor."""
    if isinstance(weights, Tensor) and query is key and key is value:
        q, k, v = apply_linear(query, weights, bias).chunk(3, -1)
        return q, k, v
    each = weights.chunk(3) if isinstance(weights, Tensor) else weights
    if each is None or any(weight is None for weight in each):
        raise AssertionError("the weights of the projections of query, key and value are missing")
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip((query, key, value), each, biases, strict=True)
    q, k, v = (apply_linear(x, weight, b) for x, weight, b in parts)  # type: ignore[arg-type]  # none is None
    return q, k, v


def apply_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of x [M,B,...], which copies x unless rows are dense: in the order of its memory."""
    turned = x.transpose(0, 1)
    if turned.is_contiguous():
        return F.linear(turned, weight, bias).transpose(0, 1)
    return F.linear(x, weight, bias)


def append_bias(k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None) -> Pair:
    """k and v [N,B,...] with one more key if given, equal in every entry."""
    if (bias_k is None) != (bias_v is None):
        raise AssertionError("bias_k and bias_v have to be set both, or neither")
    if bias_k is None or bias_v is None:
        return k, v
    B = k.shape[1]
    return torch.cat([k, bias_k.expand(1, B, -1)]), torch.cat([v, bias_v.expand(1, B, -1)])


def replace_static(k: Tensor, v: Tensor, static_k: Tensor | None, static_v: Tensor | None) -> Pair:
    """k and v [B,H,N,D], or the caller's precomputed ones, [B*H,N,D]."""
    B, H, _, D = k.shape
    for x in (static_k, static_v):
        if x is not None and (x.shape[0] != B * H or x.shape[2] != D):
            raise AssertionError(
                f"expecting static tensors [{B * H}, N, {D}], but got {[*x.shape]}"
            )
    k = k if static_k is None else static_k.unflatten(0, (B, H))
    return k, v if static_v is None else static_v.unflatten(0, (B, H))


def merge_masks(
    mask: Tensor | None,
    padding: Tensor | None,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    more: int,
) -> Tensor | None:
    """Both masks as one for scores [B,H,M,N]: booleans, True for may attend, or numbers.

    sizes: B and H. more: further keys at the end that no mask hides.
    """
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, sizes)
    parts = [
        x for x in (mask, None if padding is None else padding[:, None, None]) if x is not None
    ]
    if not parts:
        return None
    if all(x.dtype == torch.bool for x in parts):
        hidden = parts[0] if len(parts) == 1 else parts[0] | parts[1]
        return ~append_places(hidden, more)
    numbers = [as_numbers(x, dtype) for x in parts]
    total = numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]
    return append_places(total, more)


def append_places(mask: Tensor, more: int) -> Tensor:
    """A mask [...,N] with zeros, which hide nothing, for more keys."""
    return F.pad(mask, (0, more)) if more else mask


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of PyTorch's layer as numbers to add to the scores: -inf for True."""
    if mask.dtype == torch.bool:
        numbers = torch.zeros_like(mask, dtype=dtype)
        numbers.masked_fill_(mask, -torch.inf)
        return numbers
    if not mask.is_floating_point():
        raise AssertionError(
            f"only bool and floating types of masks are supported, not {mask.dtype}"
        )
    return mask
