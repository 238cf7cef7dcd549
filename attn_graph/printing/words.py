"""Other libraries' words for the arguments of attention, and what to write for each here.

Every message about an unknown argument reads this table, and so does guides/coming-from.md.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches

from attn_graph.errors import show

CAUSAL = "mask=Causal()"
EITHER_CAUSAL = 'mask=Causal(), or Causal("bottom_right") if the last query sees the last key'
WINDOW = "mask=Window(left, right), with None for a side without a bound"
LENGTHS = "kv_lengths=lengths [B], the number of keys of each sequence"
Q_LENGTHS = "q_lengths=lengths [B], the number of queries of each sequence"
STARTS = "q_starts=starts [B + 1] with packed tensors [T, H, D]"
KV_STARTS = "kv_starts=starts [B + 1]; as q's where they are left out"
LONGEST = "max_lengths=(M, N), the most queries and keys of a sequence"
FLEX = "mask=m, **tensors, where m, tensors = from_flex(mask_mod)"
GROUPS = "pass k and v with fewer heads than q; no argument is needed"
TENSORS = "pass q, k and v first, without names: attention(q, k, v)"
BIAS = "bias=tensor [B, H, M, N], each axis full or 1"
KEEP = "keep=tensor of booleans [B, H, M, N], True where a key is seen"
LSE = 'stats=("lse",), and lse comes after o'
WEIGHTS = 'stats=("received",) for their sums by key; all of them: o of v = torch.eye(N)'
SINKS = "sinks=tensor [H]"
PAGES = "pages=table [B, pages], beside k and v as pools [n, P, G, D]"
CACHE = (
    "pass the cache as k and v, with kv_lengths= for what is filled; write new rows into it before"
)
ROTATED = "rotate q and k before the call"
SEEDS = "seed= and offset=, which dropout reads"
CAP = "soft_cap=, None for none"
IN_SHAPES = "leave it out: the shapes of q and of the pools [n, P, G, D] have it"
SYMMETRIC = "quantise without zero points: k is read as k_scale times its numbers, and v alike"

FIRST = dict.fromkeys(("query", "key", "value"), TENSORS)
SDPA = {
    **FIRST,
    "attn_mask": f"{KEEP}, or bias=floats",
    "dropout_p": "dropout=",
    "is_causal": CAUSAL,
    "enable_gqa": GROUPS,
}
VARLEN = {
    **FIRST,
    "cu_seq_q": STARTS,
    "cu_seq_k": KV_STARTS,
    "max_q": LONGEST,
    "max_k": LONGEST,
    "window_size": WINDOW,
    "is_causal": CAUSAL,
    "return_aux": 'stats=("lse", "max"), and they come after o',
    "enable_gqa": GROUPS,
    "seqused_k": LENGTHS,
    "block_table": PAGES,
    "num_splits": "batch_invariant=True for 1; other numbers are the backend's choice",
}
FLEX_ATTENTION = {
    **FIRST,
    "block_mask": FLEX.replace("mask_mod", "block_mask.mask_mod"),
    "mask_mod": FLEX,
    "score_mod": "modifiers=m, **tensors, where m, tensors = from_flex_score(score_mod)",
    "enable_gqa": GROUPS,
    "return_lse": LSE,
    "return_aux": VARLEN["return_aux"],
    "kernel_options": "compile(graph, tune=True) measures what there is to choose from",
}
FLASH_ATTN = {
    "causal": EITHER_CAUSAL,
    "window_size": WINDOW,
    "softcap": CAP,
    "alibi_slopes": "alibi=slopes [H] or [B, H]",
    "softmax_scale": "scale=",
    "dropout_p": "dropout=",
    "rng_state": SEEDS,
    "return_attn_probs": WEIGHTS,
    "return_softmax_lse": LSE,
    "cu_seqlens": STARTS,
    "cu_seqlens_q": STARTS,
    "cu_seqlens_k": KV_STARTS,
    "max_seqlen_q": LONGEST,
    "max_seqlen_k": LONGEST,
    "seqused_q": Q_LENGTHS,
    "seqused_k": LENGTHS,
    "cache_seqlens": LENGTHS,
    "block_table": PAGES,
    "page_table": PAGES,
    "cache_batch_idx": "gather k and v before the call: k.index_select(0, index)",
    "cache_leftpad": "keep=, False where a key is padding, or segments=; or gather k and v before",
    "k_cache": CACHE,
    "v_cache": CACHE,
    "kv_cache": CACHE,
    **dict.fromkeys(("rotary_cos", "rotary_sin", "rotary_interleaved"), ROTATED),
    "num_splits": VARLEN["num_splits"],
    "learnable_sink": SINKS,
    "q_descale": "q_scale=",
    "k_descale": "k_scale=",
    "v_descale": "v_scale=",
}
XFORMERS = {
    "attn_bias": f"{BIAS}, or mask=m, **tensors, where m, tensors = from_xformers(attn_bias)",
    "p": "dropout=",
    "op": "backends=names, in order of preference",
    "output_dtype": "convert o: it has q's dtype",
}
JAX = {
    **FIRST,
    "is_causal": CAUSAL,
    "query_seq_lengths": Q_LENGTHS,
    "key_value_seq_lengths": LENGTHS,
    "local_window_size": 'mask=Window(left, right, "top_left")',
    "return_residual": LSE,
    "implementation": "backends=names, in order of preference",
}
FLASHINFER = {
    "causal": EITHER_CAUSAL,
    "sm_scale": "scale=",
    "logits_soft_cap": CAP,
    "window_left": WINDOW,
    "custom_mask": KEEP,
    "packed_custom_mask": KEEP,
    "pos_encoding_mode": ROTATED,
    "qo_indptr": STARTS,
    "kv_indptr": "pages=table [B, pages]; kv_starts= where keys are packed, not in pages",
    "kv_indices": "pages=table [B, pages], a row of page numbers for each sequence",
    "kv_last_page_len": f"{LENGTHS}: (pages - 1) * P + the last page's",
    "paged_kv_cache": "pages=table, and the pools as k and v [n, P, G, D]",
    "return_lse": LSE,
    "page_size": IN_SHAPES,
    "head_dim": IN_SHAPES,
    "num_qo_heads": GROUPS,
    "num_kv_heads": GROUPS,
}
CUDNN = {
    "attn_scale": "scale=",
    "use_causal_mask": CAUSAL,
    "use_causal_mask_bottom_right": 'mask=Causal("bottom_right")',
    "use_padding_mask": LENGTHS,
    "use_alibi_mask": "alibi=True",
    "diagonal_alignment": "align=",
    "diagonal_band_left_bound": WINDOW,
    "diagonal_band_right_bound": WINDOW,
    "sliding_window_length": WINDOW,
    "seq_len_q": Q_LENGTHS,
    "seq_len_kv": LENGTHS,
    "paged_attention_k_table": PAGES,
    "paged_attention_v_table": PAGES,
    "paged_attention_max_seq_len_kv": LONGEST,
    "generate_stats": LSE,
    "is_inference": 'stats=("lse",) for what training reads; leave it out',
    "sink_token": SINKS,
    "block_mask": FLEX_ATTENTION["block_mask"],
}
TRANSFORMER_ENGINE = {
    "attn_mask_type": f'{CAUSAL} for "causal"; kv_lengths= for "padding"',
    "attention_mask": KEEP,
    "window_size": WINDOW,
    "core_attention_bias": BIAS,
    "core_attention_bias_type": BIAS,
    "softmax_scale": "scale=",
    "attention_dropout": "dropout=",
    "num_gqa_groups": GROUPS,
    "qkv_format": 'pass tensors as they lie: q.transpose(1, 2), or q_starts= for "thd"',
    "cu_seqlens_q": STARTS,
    "cu_seqlens_kv": KV_STARTS,
    "max_seqlen_q": LONGEST,
    "max_seqlen_kv": LONGEST,
    "softmax_type": SINKS,
}
HUGGING_FACE = {
    "attention_mask": KEEP,
    "sliding_window": WINDOW,
    "scaling": "scale=",
    "softcap": CAP,
    "dropout_p": "dropout=",
    "position_bias": BIAS,
    "head_mask": "multiply o by it after the call",
    "output_attentions": WEIGHTS,
    "past_key_value": CACHE,
    "past_key_values": CACHE,
    "s_aux": SINKS,
    "num_key_value_heads": GROUPS,
    "num_key_value_groups": GROUPS,
    "key_padding_mask": f"{LENGTHS}, or keep=~padding[:, None, None]",
    "need_weights": WEIGHTS,
}
ELSEWHERE = {  # words of no one library
    "kv_layout": "leave it out: pools are [n, P, G, D]; pass HND as pool.transpose(1, 2)",
    "kv_data_type": "leave it out: k and v have their dtype; of 8 bits, give k_scale= and v_scale=",
    "slot_mapping": "write new rows into the pools before: k[slots // P, slots % P] = rows",
    "window": WINDOW,
    **dict.fromkeys(("lengths", "seq_lens", "seqlens", "seqlens_k", "context_lens"), LENGTHS),
    "prefix_length": "mask=Causal() | Prefix(length)",
    "prefix_len": "mask=Causal() | Prefix(length)",
    "document_ids": "segments=(ids, ids), [B, M] of integers",
    "segment_ids": "segments=(ids, ids), [B, M] of integers",
    "temperature": "scale=1 / (temperature * math.sqrt(D))",
    "most": "max_lengths=",
    "k_zero_point": SYMMETRIC,
    "v_zero_point": SYMMETRIC,
    "fullgraph": "leave it out: a graph is always whole",
}
LIBRARIES: dict[str, Mapping[str, str]] = {
    "`F.scaled_dot_product_attention`": SDPA,
    "`torch.nn.attention.varlen`": VARLEN,
    "FlexAttention": FLEX_ATTENTION,
    "flash-attn": FLASH_ATTN,
    "xformers": XFORMERS,
    "`jax.nn.dot_product_attention`": JAX,
    "FlashInfer": FLASHINFER,
    "cuDNN": CUDNN,
    "Transformer Engine": TRANSFORMER_ENGINE,
    "Hugging Face, `nn.MultiheadAttention`": HUGGING_FACE,
}
SAID: dict[str, str] = {
    name: text for table in (ELSEWHERE, *LIBRARIES.values()) for name, text in table.items()
}
OF_CALLS = {*re.findall(r"\b([a-z_]+)=", " ".join(SAID.values()))}  # with q, k and v, and others
OPTIONS = {  # other words for options of `compile`
    "backend": "backends=",
    "device": "target=",
    "fallback": "on_fallback=",
    "autotune": "tune=True",
    "mode": "tune=True, which measures the kernels that there are to choose from",
    "dynamic": 'leave it out; sizes that change are Dims: TensorSpec((Dim("B", most=8), ...))',
    "fullgraph": ELSEWHERE["fullgraph"],
    "wants": "gradients=",
}
NO_TENSOR = ", and the mask reads no tensor of that name"
NEAR = 0.8  # of two names that differ by a slip


def use(text: str) -> str:
    """A text of the tables as an order: those that begin with an argument get a verb."""
    return f"use {text}" if "=" in text.partition(" ")[0] else text


def nearest(name: str, own: Iterable[str], said: Mapping[str, str] = SAID) -> str:
    """The name that was probably meant; "" if none is near, or another library's is nearer."""
    near = get_close_matches(name, [*own, *said], 1, NEAR)
    return near[0] if near else ""


def own_name(name: str, own: Iterable[str]) -> str:
    """The name of `own` meant by another library's word, or by a slip; "" if none."""
    names = [*own]
    meant = SAID.get(name, "").partition("=")[0]
    return meant if meant in names else nearest(name, names, {})


def unknown_argument(
    name: str, own: Iterable[str], options: Container[str], none: str = NO_TENSOR
) -> str:
    """The message for an argument that attention lacks. own: the names that it has. options: those
    of `compile`. none: the end for a name near none of them."""
    names = [*own]
    begin = f"attention() has no argument {name}"
    if name in options or (name in OPTIONS and name not in SAID):
        option = name if name in options else OPTIONS[name].partition("=")[0]
        if option in names:
            return f"{begin}; use {option}="
        return f"{begin}; it is for attn_graph.compile(graph, {option}=...)"
    near = nearest(name, names) if name not in SAID else name
    if near in SAID:
        return f"{begin}; {use(SAID[near])}"
    return f"{begin}{f'; did you mean {near}?' if near else none}"


def option_message(
    who: str, own: Iterable[str], options: Container[str], name: str, value: object
) -> str:
    """The message for an option that `compile`, or a function like it, lacks. options: those of
    `compile`."""
    begin = f"{who}() has no argument {name}"
    if name in OPTIONS and OPTIONS[name].endswith("="):
        return f"{begin}; did you mean {OPTIONS[name]}{show_option(OPTIONS[name][:-1], value)}?"
    if name in OPTIONS:
        return f"{begin}; {use(OPTIONS[name])}"
    if name in SAID:
        return f"{begin}; it belongs to the graph: attention(q, k, v, ...); {use(SAID[name])}"
    if name in OF_CALLS and name not in options:
        return f"{begin}; give it with q, k and v: (q, k, v, {name}=...)"
    near = nearest(name, own, {})
    return f"{begin}; did you mean {near}={show_option(near, value)}?" if near else begin


SEVERAL = ("backends", "avoid", "gradients")  # options that are sequences of names


def show_option(option: str, value: object) -> str:
    return show((value,) if option in SEVERAL and isinstance(value, str) else value)
