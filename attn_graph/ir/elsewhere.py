"""Arguments of other attention functions, and their equivalents in `attention`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CAUSAL = 'mask=Causal(), or Causal("bottom_right") if the last query sees the last key'
WINDOW = "mask=Window(left, right), with None for a side without a bound"
LENGTHS = "kv_lengths=lengths [B], the number of keys of each sequence"
STARTS = "q_starts=starts [B + 1] with packed tensors [T, H, D]"
FLEX = "mask=m, **tensors, where m, tensors = from_flex(mask_mod)"
GROUPS = "k and v with fewer heads than q, which needs no argument"
SAID: dict[str, str] = {
    "is_causal": "mask=Causal()",
    "causal": CAUSAL,
    "window": WINDOW,
    "window_size": WINDOW,
    "sliding_window": WINDOW,
    "window_left": WINDOW,
    "attn_mask": "keep=tensor of booleans [B, H, M, N], True where a key is seen, or bias=floats",
    "attention_mask": "keep=tensor of booleans [B, H, M, N], True where a key is seen",
    "key_padding_mask": f"{LENGTHS}, or keep=~padding[:, None, None]",
    "attn_bias": "bias=tensor [B, H, M, N]",
    "block_mask": FLEX.replace("mask_mod", "block_mask.mask_mod"),
    "mask_mod": FLEX,
    "score_mod": "modifiers=m, **tensors, where m, tensors = from_flex_score(score_mod)",
    "softcap": "soft_cap=",
    "logits_soft_cap": "soft_cap=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "dropout_p": "dropout=",
    "alibi_slopes": "alibi=",
    "return_lse": 'stats=("lse",), and lse comes after o',
    "return_attn_probs": 'stats=("lse",); the weights themselves are never made',
    "return_softmax_lse": 'stats=("lse",), and lse comes after o',
    "enable_gqa": GROUPS,
    "num_kv_heads": GROUPS,
    "s_aux": "sinks=tensor [H]",
    "learnable_sink": "sinks=tensor [H]",
    "block_table": "pages=table [B, pages]",
    "page_table": "pages=table [B, pages]",
    "cache_seqlens": LENGTHS,
    "seqused_k": LENGTHS,
    "seqlens_k": LENGTHS,
    "seqused_q": "q_lengths=lengths [B]",
    "cu_seqlens": STARTS,
    "cu_seqlens_q": STARTS,
    "cu_seq_q": STARTS,
    "cu_seqlens_k": "kv_starts=starts [B + 1]; as q's where they are left out",
    "cu_seq_k": "kv_starts=starts [B + 1]; as q's where they are left out",
    "max_seqlen_q": "max_lengths=(M, N), the most queries and keys of a sequence",
    "max_seqlen_k": "max_lengths=(M, N), the most queries and keys of a sequence",
}


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """The message for an argument unknown to `attention`. known: the names it has."""
    if name in SAID:
        return f"attention() has no argument {name}; use {SAID[name]}"
    if name in (names := [*known]):  # of `attention` for specs alone
        return f"attention() of tensors has no argument {name}; make a graph with ag.attention"
    near = get_close_matches(name, names, 1)
    way_out = (
        f"; did you mean {near[0]}?" if near else ", and the mask reads no tensor of that name"
    )
    return f"attention() has no argument {name}{way_out}"
