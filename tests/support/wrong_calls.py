"""Wrong calls as newcomers write them: each with the edit that its message has to name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import attn_graph as ag
from attn_graph import nn
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.testing.gpu import virtual_gpu

Call = Callable[[], object]
Wrong = dict[str, tuple[Call, str]]  # by what is wrong: the call, and the edit

Q, K = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 10, 16)
TWO = torch.randn(2, 2, 8, 16)  # of two heads
PACKED, STARTS = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
POOL, TABLE = torch.randn(6, 4, 4, 16), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([5, 8], dtype=torch.int32)
BYTES, SCALE = torch.zeros(2, 4, 8, 16, dtype=torch.int8), torch.ones(1, 1, 1, 1)
BYTE_POOL = torch.zeros(6, 3, 4, 16, dtype=torch.int8)
SPEC = ag.TensorSpec((2, 4, 8, 16), torch.float32)
SLOPES = torch.rand(4)
RELATIVE, FLAGS = torch.randn(16, 4), torch.ones(16).bool()
any_spec: Any = ag.TensorSpec  # Any: wrong on purpose, as all of these
any_dim: Any = ag.Dim
any_blocks: Any = ag.KeepBlocks
any_window: Any = ag.Window
any_compile: Any = ag.compile
any_explain: Any = ag.explain
any_graph: Any = ag.attention(SPEC, SPEC, SPEC)
any_attention: Any = attention
any_sdpa: Any = scaled_dot_product_attention
any_flex: Any = ag.from_flex
any_scores: Any = ag.from_flex_score


def plan_like(*tensors: Tensor, **named: Tensor) -> Any:  # Any: called wrongly
    like = ag.TensorSpec.like
    specs: Any = {name: like(x) for name, x in named.items()}
    return ag.compile(ag.attention(*map(like, tensors), **specs))


PACKED_PLAN = plan_like(PACKED, PACKED, PACKED, q_starts=STARTS)
PAGED_PLAN = plan_like(Q, *(torch.randn(6, 3, 2, 16),) * 2, pages=TABLE, kv_lengths=LENGTHS)
PAGED = (*(torch.randn(6, 3, 2, 16),) * 2, LENGTHS, TABLE)
SCALED_PLAN = plan_like(Q, BYTES, BYTES, k_scale=SCALE, v_scale=SCALE)


def attend(q: Tensor = Q, k: Tensor = Q, v: Tensor = Q, /, **options: Any) -> Call:
    return lambda: any_attention(q, k, v, **options)


def describe(**options: Any) -> Call:
    return lambda: ag.attention(SPEC, SPEC, SPEC, **options)


def compiled(**options: Any) -> Call:
    return lambda: any_compile(any_graph, **options)


def plan_of(*tensors: Tensor, **named: Any) -> Call:
    return lambda: ag.compile(any_graph)(*tensors, **named)


def packed(**options: Any) -> Call:
    return lambda: any_attention(PACKED, PACKED, PACKED, **{"q_starts": STARTS} | options)


def paged(pool: Tensor = POOL, **options: Any) -> Call:
    given = {"pages": TABLE, "kv_lengths": LENGTHS} | options
    return lambda: any_attention(Q, pool, pool, **given)


def quantised(k: Tensor = BYTES, v: Tensor = BYTES, **options: Any) -> Call:
    return lambda: any_attention(Q, k, v, **options)


def under_autocast() -> object:
    half = ag.TensorSpec((2, 4, 8, 16), torch.bfloat16)
    plan = ag.compile(ag.attention(half, half, half))
    with torch.autocast("cpu", torch.bfloat16):
        return plan(Q, Q, Q)


def block_mask() -> Any:  # Any: PyTorch's
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")


def two_sizes_of_a_dim() -> object:
    short, long = (ag.TensorSpec((2, 4, ag.Dim("N", most=n), 16), torch.float32) for n in (4, 8))
    return ag.attention(short, long, long)


WORDS: Wrong = {  # of other libraries, and words near none of ours
    f"word {word}": (attend(**{word: value}), edit)
    for word, value, edit in [
        ("is_causal", True, "use mask=Causal()"),
        ("causal", True, "use mask=Causal()"),
        ("attn_mask", Q, "use keep="),
        ("dropout_p", 0.1, "use dropout="),
        ("enable_gqa", True, "k and v with fewer heads"),
        ("query", Q, "pass q, k and v first"),
        ("key", Q, "pass q, k and v first"),
        ("value", Q, "pass q, k and v first"),
        ("block_mask", None, "block_mask.mask_mod"),
        ("mask_mod", None, "from_flex"),
        ("score_mod", None, "from_flex_score"),
        ("return_lse", True, "stats="),
        ("return_aux", None, 'stats=("lse", "max")'),
        ("kernel_options", {}, "tune=True"),
        ("softcap", 30.0, "use soft_cap="),
        ("softmax_scale", 1.0, "use scale="),
        ("window_size", (3, 0), "mask=Window(left, right)"),
        ("alibi_slopes", SLOPES, "use alibi="),
        ("return_attn_probs", True, "stats="),
        ("rng_state", None, "seed="),
        ("num_splits", 1, "batch_invariant=True"),
        ("cu_seqlens_q", STARTS, "use q_starts="),
        ("cu_seqlens_k", STARTS, "use kv_starts="),
        ("max_seqlen_q", 8, "use max_lengths="),
        ("max_seqlen_k", 8, "use max_lengths="),
        ("max_q", 8, "use max_lengths="),
        ("max_k", 8, "use max_lengths="),
        ("seqused_k", LENGTHS, "use kv_lengths="),
        ("seqused_q", LENGTHS, "use q_lengths="),
        ("cache_seqlens", LENGTHS, "use kv_lengths="),
        ("cache_batch_idx", LENGTHS, "k.index_select"),
        ("cache_leftpad", LENGTHS, "keep="),
        ("rotary_cos", Q, "rotate q and k before"),
        ("rotary_sin", Q, "rotate q and k before"),
        ("kv_cache", Q, "pass the cache as k and v"),
        ("block_table", TABLE, "use pages="),
        ("page_table", TABLE, "use pages="),
        ("attn_bias", Q, "use bias="),
        ("p", 0.1, "use dropout="),
        ("op", None, "use backends="),
        ("output_dtype", torch.float32, "convert o"),
        ("local_window_size", 3, 'mask=Window(left, right, "top_left")'),
        ("query_seq_lengths", LENGTHS, "use q_lengths="),
        ("key_value_seq_lengths", LENGTHS, "use kv_lengths="),
        ("return_residual", True, "stats="),
        ("implementation", "cudnn", "use backends="),
        ("kv_indptr", STARTS, "pages="),
        ("kv_indices", STARTS, "pages="),
        ("kv_last_page_len", STARTS, "kv_lengths="),
        ("qo_indptr", STARTS, "use q_starts="),
        ("paged_kv_cache", Q, "pages="),
        ("logits_soft_cap", 30.0, "use soft_cap="),
        ("sm_scale", 1.0, "use scale="),
        ("attn_scale", 1.0, "use scale="),
        ("use_causal_mask", True, "use mask=Causal()"),
        ("diagonal_band_right_bound", 0, "mask=Window(left, right)"),
        ("seq_len_kv", LENGTHS, "use kv_lengths="),
        ("generate_stats", True, "stats="),
        ("attn_mask_type", "causal", "use mask=Causal()"),
        ("core_attention_bias", Q, "use bias="),
        ("num_gqa_groups", 2, "k and v with fewer heads"),
        ("attention_mask", Q, "use keep="),
        ("sliding_window", 8, "mask=Window(left, right)"),
        ("position_bias", Q, "use bias="),
        ("output_attentions", True, "stats="),
        ("past_key_values", Q, "pass the cache as k and v"),
        ("head_mask", Q, "multiply o"),
        ("key_padding_mask", Q, "use kv_lengths="),
        ("need_weights", True, "stats="),
        ("lengths", LENGTHS, "use kv_lengths="),
        ("seq_lens", LENGTHS, "use kv_lengths="),
        ("prefix_length", 2, "mask=Causal() | Prefix(length)"),
        ("s_aux", SLOPES, "use sinks="),
        ("tune", True, "attn_graph.compile"),
        ("target", "h200", "attn_graph.compile"),
        ("device", "cuda", "attn_graph.compile"),
        ("workspace", None, "attn_graph.compile"),
        ("store", False, "attn_graph.compile"),
        ("backend", "math", "use backends="),
        ("page_size", 16, "leave it out"),
        ("head_dim", 64, "leave it out"),
        ("kv_layout", "HND", "pool.transpose(1, 2)"),
        ("kv_data_type", None, "k_scale="),
        ("slot_mapping", LENGTHS, "k[slots // P, slots % P] = rows"),
        ("fullgraph", True, "has no argument fullgraph"),
        ("zebra", 1, "has no argument zebra"),
    ]
}  # fmt: skip
OPTIONS: Wrong = {
    "compile twice": (compiled(graph=any_graph), "write compile(graph)"),
    "compile mode": (compiled(mode="max-autotune"), "tune=True"),
    "compile dynamic": (compiled(dynamic=True), "Dim"),
    "compile fullgraph": (compiled(fullgraph=True), "leave it out"),
    "compile backend": (compiled(backend="math"), "backends=('math',)"),
    "compile device": (compiled(device="cpu"), "target='cpu'"),
    "compile causal": (compiled(is_causal=True), "use mask=Causal()"),
    "explain mode": (lambda: any_explain(any_graph, mode="max"), "tune=True"),
    "spec device": (lambda: any_spec((2, 4, 8, 16), torch.float32, device="cuda"), "target="),
    "spec of a tensor": (lambda: any_spec(Q), "TensorSpec.like(tensor)"),
    "spec without dtype": (lambda: any_spec((2, 4, 8, 16)), "TensorSpec((2, 4, 8, 16), torch."),
    "spec stride": (
        lambda: any_spec((2, 4, 8, 16), torch.float32, stride=(512, 128, 16, 1)), "strides=",
    ),
    "spec of like": (lambda: ag.TensorSpec.like(any_spec), "TensorSpec((2, 8, 512, 64)"),
    "graph called": (lambda: any_graph(Q, Q, Q), "compile(graph)(q, k, v)"),
    "compile of tensors": (lambda: any_compile(Q, Q, Q), "compile(attention(q, k, v))"),
    "compile of a tensor": (lambda: any_compile(Q), "attn_graph.nn.functional.attention"),
    "Dim without most": (lambda: any_dim("N"), 'Dim("N", most='),
    "Dim max": (lambda: any_dim("N", max=3), 'Dim("N", most=3)'),
    "Dim min": (lambda: any_dim("N", min=3, most=8), "most="),
    "KeepBlocks of one number": (lambda: any_blocks(16), "KeepBlocks(rows, keys"),
    "multihead mask": (lambda: multihead(mask=ag.Causal()), "mask"),
    "sdpa of a mask": (lambda: any_sdpa(Q, Q, Q, attn_mask=ag.Causal()), "is_causal=True"),
    "sdpa without values": (lambda: any_sdpa(Q, Q, None), "value is a NoneType, not a tensor"),
    "sdpa of a list": (lambda: any_sdpa(Q, Q, Q, attn_mask=[[True]]), "torch.tensor"),
    "plan by query": (plan_of(query=Q, key=Q, value=Q), "plan(q, k, v)"),
    "plan is_causal": (plan_of(Q, Q, Q, is_causal=torch.tensor(True)), "mask=Causal()"),
    "plan mask": (plan_of(Q, Q, Q, mask=None), "mask="),
    "plan by other words": (
        lambda: PAGED_PLAN(Q, POOL, POOL, block_table=TABLE, seq_lens=LENGTHS), "write pages=",
    ),
    "prepare by other words": (
        lambda: PAGED_PLAN.prepare(block_table=TABLE, seq_lens=LENGTHS), "write kv_lengths=",
    ),
    "prepare of a stranger": (
        lambda: PAGED_PLAN.prepare(zebra=TABLE, causal=True), "in attention(q, k, v, ...), zebra=",
    ),
    "out that is q": (lambda: PAGED_PLAN(Q, *PAGED, out=Q), "pass another tensor"),
    "modifiers of one": (
        attend(modifiers=ag.RelativeBias(5)), "write modifiers=(RelativeBias(entries=5),)",
    ),
    "table missing": (attend(modifiers=(ag.RelativeBias(5),)), "pass table="),
    "segments missing": (attend(mask=ag.SameSegment()), "pass segments=(x, x)"),
    "keep missing": (attend(mask=ag.Causal() & ag.Keep()), "pass keep="),
    "word beside a mask": (attend(mask=ag.Causal(), zebra=1), "reads no tensor of that name"),
    "formula without axes": (
        lambda: ag.Formula("j < prompt"), 'Formula("j < prompt", (("prompt", "b"),)) if it is [B]',
    ),
    "formula of a function": (lambda: ag.Formula("f(j) < i"), "f(j) is not read"),
    "window of a pair": (lambda: any_window((16, 0)), "write Window(16, 0)"),
    "window of a pair without ends": (lambda: any_window((-1, -1)), "write Window(None, None)"),
    "plan under autocast": (under_autocast, "autocast"),
    "plan on meta": (plan_of(*(Q.to("meta"),) * 3), "meta"),
    "stats of a text": (attend(stats="max"), 'stats=("max",)'),
    "stats of another": (attend(stats=("sum",)), "lse, max"),
    "soft_cap of 0": (attend(soft_cap=0.0), "soft_cap=None"),
    "soft_cap negative": (attend(soft_cap=-3.0), "soft_cap"),
    "soft_cap flag": (attend(soft_cap=True), "soft_cap"),
    "dropout of 1": (attend(dropout=1.0), "dropout"),
    "scale of text": (attend(scale="1"), "scale"),
    "lengths list": (attend(kv_lengths=[5, 8]), "torch.tensor("),
    "lengths number": (attend(kv_lengths=5), "torch.tensor("),
    "bias list": (attend(bias=[0.0]), "torch.tensor("),
    "block mask of Flex": (lambda: any_flex(block_mask()), "block_mask.mask_mod"),
    "mask of a block mask": (
        lambda: any_attention(Q, Q, Q, mask=block_mask()), "block_mask.mask_mod",
    ),
    "mod of two": (lambda: any_flex(lambda i, j: i >= j), "mask_mod(b, h, q_idx, kv_idx)"),
    "score mod of four": (
        lambda: any_scores(lambda s, b, i, j: s), "score_mod(score, b, h, q_idx, kv_idx)",
    ),
    "relative table": (
        lambda: any_scores(lambda s, b, h, i, j: s + RELATIVE[i - j + 8, h]), "RelativeBias",
    ),
    "relative mask": (
        lambda: any_flex(lambda b, h, i, j: FLAGS[i - j + 8]), "Formula",
    ),
    "outputs of the function": (attend(outputs="bshd"), '{"o": "bshd"}'),
    "outputs of another size": (
        attend(outputs={"o": ag.TensorSpec((2, 4, 8, 8), torch.float32)}), "f32[2, 4, 8, 16]",
    ),
    "o_scale of the function": (attend(o_scale=SCALE), "q_scale"),
    "v of a large number": (lambda: any_attention(Q, Q, 17), "keys have 16"),
    "v of None": (lambda: any_attention(Q, Q, None), "v"),
    "out transposed": (
        lambda: any_attention(Q, Q, Q, out=torch.empty(2, 8, 4, 16).transpose(1, 2)),
        'outputs={"o": "bshd"}',
    ),
    "out of another shape": (attend(out=torch.empty(2, 4, 8, 8)), "[2, 4, 8, 16]"),
}  # fmt: skip


def multihead(**options: Any) -> object:
    any_module: Any = nn.MultiheadAttention
    return any_module(64, 4, **options)


SHAPES: Wrong = {
    "Dims of two sizes": (two_sizes_of_a_dim, 'Dim("N", most=8)'),
    "heads": (attend(Q, TWO[:, :1].expand(2, 3, 8, 16), Q[:, :3]), "not a divisor of q's 4 heads"),
    "batch": (attend(Q, Q[:1], Q[:1]), "k and v have batch size 1 (axis 0)"),
    "keys": (attend(Q, K, Q), "v has 8 keys (axis 2)"),
    "head size": (attend(Q, Q[..., :8], Q), "k has head size 8 (axis 3)"),
    "keep keys": (attend(keep=torch.ones(2, 4, 8, 9).bool()), "keep has 9 keys (axis 3)"),
    "keep queries": (attend(keep=torch.ones(2, 1, 3, 8).bool()), "keep has 3 queries (axis 2)"),
    "bias heads": (attend(bias=torch.zeros(1, 3, 8, 8)), "bias has 3 heads (axis 1)"),
    "bias batch": (attend(bias=torch.zeros(3, 4, 8, 8)), "bias has batch size 3 (axis 0)"),
    "keep two axes": (attend(keep=torch.ones(8, 8).bool()), "keep[None, None]"),
    "keep padding": (attend(keep=torch.ones(2, 8).bool()), "keep[:, None, None]"),
    "bias three axes": (attend(bias=torch.zeros(4, 8, 8)), "bias[None]"),
    "lengths two axes": (attend(kv_lengths=LENGTHS[:, None]), "kv_lengths.flatten()"),
    "lengths none": (attend(kv_lengths=LENGTHS[0]), "kv_lengths"),
    "lengths of three": (attend(kv_lengths=torch.ones(3).int()), "kv_lengths has batch size 3"),
    "segments one axis": (attend(segments=(torch.zeros(8).int(),) * 2), "q_segments.expand(2, -1)"),
    "segments alone": (attend(segments=torch.zeros(2, 8).int()), "segments=(x, x)"),
    "segments short": (attend(segments=(torch.zeros(2, 7).int(),) * 2), "has 7 queries (axis 1)"),
    "alibi four axes": (attend(alibi=SLOPES[None, :, None, None]), "alibi.flatten()"),
    "alibi heads": (attend(alibi=torch.rand(3)), "alibi has 3 heads (axis 0)"),
    "sinks four axes": (attend(sinks=SLOPES[None, :, None, None]), "sinks.flatten()"),
    "sinks heads": (attend(sinks=torch.rand(3)), "sinks has 3 heads (axis 0)"),
    "keep_blocks two axes": (
        attend(mask=ag.KeepBlocks(4, 4), keep_blocks=torch.ones(2, 2).bool()),
        "keep_blocks[None, None]",
    ),
    "keep_blocks blocks": (
        attend(mask=ag.KeepBlocks(4, 4), keep_blocks=torch.ones(2, 4, 2, 3).bool()),
        "keep_blocks has 3 blocks of keys (axis 3)",
    ),
    "one axis less": (attend(Q[0], Q[0], Q[0]), "q[None]"),
    "packed causal": (
        lambda: any_attention(
            PACKED, PACKED, PACKED, q_starts=STARTS, kv_starts=STARTS, mask=ag.Causal()
        ),
        'align="bottom_right"',
    ),
    "packed M": (packed(max_lengths=2), "max_lengths=(2, 2)"),
    "packed bias": (packed(bias=torch.zeros(2, 2, 2, 2)), "max_lengths=(2, 2)"),
    "packed segments": (
        packed(segments=(torch.zeros(2, 2, dtype=torch.long),) * 2), "max_lengths=(2, None)"
    ),
    "packed M of tensors": (packed(max_lengths=LENGTHS), "max_lengths=(M, N)"),
    "packed starts 2": (packed(q_starts=STARTS[None]), "q_starts.flatten()"),
    "starts of four axes": (attend(q_starts=STARTS), "q"),
    "pages float": (paged(pages=TABLE.float()), "pages.int()"),
    "pages one axis": (paged(pages=TABLE[0]), "pages.expand(2, -1)"),
    "pages batch": (paged(pages=TABLE[:1], kv_lengths=None), "pages has batch size 1"),
    "pages and batches": (paged(pages=TABLE[:1]), "pages has batch size 1"),
    "pool transposed": (paged(torch.randn(6, 4, 3, 16)), "k.transpose(1, 2)"),
    "scale missing": (quantised(), "k_scale="),
    "scale of one": (quantised(k_scale=SCALE), "v_scale"),
    "scales of one element": (
        quantised(k_scale=SCALE[0, 0, 0], v_scale=SCALE[0, 0, 0]), "k_scale.reshape(1, 1, 1, 1)",
    ),
    "scales of numbers": (quantised(k_scale=0.05, v_scale=SCALE), "torch.full((1, 1, 1, 1), 0.05)"),
    "scales of packed numbers": (
        lambda: any_attention(
            PACKED, PACKED.char(), PACKED.char(), q_starts=STARTS, k_scale=1, v_scale=SCALE[0]
        ),
        "torch.full((1, 1, 1), 1.0)",
    ),
    "scales of heads": (
        quantised(k_scale=torch.ones(4), v_scale=torch.ones(4)), "k_scale[None, :, None, None]",
    ),
    "scales of heads of packed keys": (
        lambda: any_attention(
            PACKED, PACKED.char(), PACKED.char(), q_starts=STARTS,
            k_scale=SLOPES, v_scale=SLOPES,
        ),
        "k_scale[None, :, None] if it is [G]",
    ),
    "scales of heads of pools": (
        paged(BYTE_POOL, k_scale=torch.ones(4), v_scale=torch.ones(4)),
        "k_scale[None, None, :, None] if it is [G]",
    ),
    "scales of rows of pools": (
        paged(BYTE_POOL, k_scale=torch.ones(6, 3, 4), v_scale=torch.ones(6, 3, 4)),
        "k_scale[..., None] if it is [n,P,G]",
    ),
    "scales of pages": (
        paged(BYTE_POOL, k_scale=torch.ones(6, 4), v_scale=torch.ones(6, 4)),
        "k_scale[:, None, :, None] if it is [n,G]",
    ),
    "scales of other sizes": (
        quantised(k_scale=torch.ones(3), v_scale=torch.ones(3)), "each a divisor of its own",
    ),
    "scales along elements": (
        quantised(k_scale=torch.ones(1, 1, 1, 3), v_scale=torch.ones(1, 1, 1, 3)),
        "3 on axis 3, not a divisor of 16",
    ),
    "one query of each": (
        lambda: any_attention(Q[:, :, 0], POOL, POOL, pages=TABLE), "write q[:, :, None]",
    ),
    "one query of each without pages": (
        lambda: any_attention(Q[:, :, 0], Q, Q, kv_lengths=LENGTHS), "write q[:, :, None]",
    ),
    "queries of one sequence": (lambda: any_attention(Q[0], Q[:1], Q[:1]), "write q[None]"),
    "one cache of pools": (paged(POOL[:, None].expand(6, 2, 4, 4, 16)), "cache[:, 0]"),
    "one cache of two parts": (paged(POOL.expand(2, 6, 4, 4, 16)), "cache[0] and cache[1]"),
    "length below 0": (paged(kv_lengths=-LENGTHS), "give 0 to 8"),
    "length beyond the pages": (
        paged(kv_lengths=2 * LENGTHS), "give 0 to 8, or a table of more pages",
    ),
    "packed length below 0": (packed(kv_lengths=-LENGTHS, kv_starts=STARTS), "give 0 to 3"),
    "starts of B numbers": (
        lambda: PACKED_PLAN(PACKED, PACKED, PACKED, STARTS[:2]),
        "starts are one more than sequences, with 0 first",
    ),
    "plan of pools of another order": (
        lambda: PAGED_PLAN(Q, *(torch.randn(6, 2, 3, 16),) * 2, pages=TABLE, kv_lengths=LENGTHS),
        "if axes 1 and 2 are exchanged, declare TensorSpec.like(k.transpose(1, 2)) and pass k.tr",
    ),
    "plan of a scale of a number": (
        lambda: SCALED_PLAN(Q, BYTES, BYTES, 0.5, SCALE), "pass torch.full((1, 1, 1, 1), 0.5)",
    ),
    "scales for floats": (attend(k_scale=SCALE, v_scale=SCALE), "k_scale"),
    "scales half": (quantised(k_scale=SCALE.half(), v_scale=SCALE.half()), "k_scale.float()"),
}  # fmt: skip
DTYPES: Wrong = {
    "keep of floats": (attend(keep=torch.zeros(2, 4, 8, 8)), "bias="),
    "keep of integers": (attend(keep=torch.ones(2, 4, 8, 8).long()), "keep.bool()"),
    "keep of bytes": (attend(keep=torch.ones(2, 4, 8, 8).byte()), "keep.bool()"),
    "bias of booleans": (attend(bias=torch.ones(2, 4, 8, 8).bool()), "keep="),
    "bias of integers": (attend(bias=torch.ones(2, 4, 8, 8).int()), "bias.float()"),
    "bias of half": (attend(bias=torch.ones(2, 4, 8, 8).half()), "bias.float()"),
    "keep_blocks of integers": (
        attend(mask=ag.KeepBlocks(4, 4), keep_blocks=torch.ones(2, 4, 2, 2).int()),
        "keep_blocks.bool()",
    ),
    "lengths short": (attend(kv_lengths=LENGTHS.short()), "kv_lengths.int()"),
    "lengths of floats": (attend(kv_lengths=LENGTHS.float()), "kv_lengths.int()"),
    "segments of floats": (attend(segments=(torch.zeros(2, 8),) * 2), "q_segments.int()"),
    "starts of floats": (packed(q_starts=STARTS.float()), "q_starts.int()"),
    "q complex": (attend(Q.to(torch.complex64), Q, Q), "q is torch.complex64"),
    "q of integers": (attend(Q.int(), Q.int(), Q.int()), "q.float()"),
    "v of half": (attend(Q, Q, Q.half()), "v.float()"),
    "k of half": (attend(Q, Q.half(), Q), "k.float()"),
    "alibi of booleans": (attend(alibi=SLOPES > 0.5), "alibi.float()"),
    "sinks of integers": (attend(sinks=SLOPES.int()), "sinks.float()"),
    "seed of int32": (attend(dropout=0.5, seed=LENGTHS[0], offset=LENGTHS[0]), "seed.long()"),
    "plan of half": (plan_of(Q.half(), Q.half(), Q.half()), "q.float()"),
    "plan of bytes": (plan_of(Q.byte(), Q, Q), "q"),
    "spec of shorts": (lambda: ag.TensorSpec((2, 8), torch.int16), "torch.int16"),
}
any_shard: Any = ag.shard
any_plan: Any = ag.compile(any_graph)
any_evaluate: Any = ag.evaluate
any_layer: Any = nn.Attention
any_varlen: Any = nn.varlen_attn
any_append: Any = nn.append_to_pages
any_step: Any = ag.SoftCap
any_prefix: Any = ag.Prefix
any_lengths: Any = ag.KeyLengths
any_mesh: Any = ag.Mesh
MESH, ROWS = ag.Mesh(2), Q[:, :, 0]
PACKED_SPEC, FOURS = ag.TensorSpec((7, 4, 16), torch.float32), torch.zeros(2, 4, 8, 8).byte()
PACKED_GRAPH: Any = ag.attention(
    PACKED_SPEC, PACKED_SPEC, PACKED_SPEC, q_starts=ag.TensorSpec((3,), torch.int32),
    mask=ag.Causal("bottom_right"),
)  # fmt: skip
JAGGED: Any = torch.nested.nested_tensor(
    [torch.randn(3, 4, 16), torch.randn(5, 4, 16)], layout=torch.jagged
)
HEADS = JAGGED.transpose(1, 2)


def call_of(*given: Any, on: Any) -> Call:
    return lambda: on(*given)


PLACES: Wrong = {  # arguments in a place that has none, or a stranger by name
    f"{name} by position": (call_of(Q, Q, Q, fourth, on=any_sdpa), edit)
    for name, fourth, edit in [
        ("sdpa True", True, "write is_causal=True"),
        ("sdpa scale", 0.5, "write scale=0.5"),
        ("sdpa mask", ag.Causal(), "write is_causal=True"),
    ]
} | {
    "sdpa of a rate that is a flag": (call_of(Q, Q, Q, None, True, on=any_sdpa), "is_causal=True"),
    "plan of a mask by position": (call_of(Q, Q, Q, ag.Causal(), on=any_plan), "mask=..."),
    "plan of a bias by position": (call_of(Q, Q, Q, Q, on=any_plan), "keep=, bias=, scale="),
    "evaluate by position": (call_of(any_graph, Q, Q, Q, on=any_evaluate), "(graph, (q, k, v))"),
    "scores of a mask": (call_of(Q, Q, ag.Causal(), on=ag.scores), ".mask(Causal())"),
    "varlen mask": (
        call_of(PACKED, PACKED, PACKED, STARTS, STARTS, 4, 4, ag.Causal(), on=any_varlen),
        "attn_graph.nn.functional.attention(q, k, v, mask=...)",
    ),
    "layer of a mask by position": (call_of(ag.Causal(), on=any_layer), "Attention(mask=Causal()"),
    "layer called with a mask": (
        call_of(Q, Q, Q, ag.Causal(), on=any_layer()), "Attention(mask=Causal())",
    ),
    "layer of a tensor": (lambda: any_layer(keep=FLAGS), "(q, k, v, keep=...)"),
    "multihead called with a mask": (
        lambda: nn.MultiheadAttention(16, 4)(*(Q[0],) * 3, ag.Causal()),
        "attn_mask=tensor",
    ),
    "compile for a name": (call_of(any_graph, "h200", on=any_compile), "target='h200'"),
    "compile of a mask": (call_of(any_graph, ag.Causal(), on=any_compile), "mask=..."),
    "explain of a keyword": (lambda: any_explain(any_graph, mask=1), "(q, k, v, mask=...)"),
    "shard by position": (call_of(Q, Q, Q, MESH, on=any_shard), "shard(graph, mesh, placements"),
    "graph of specs by position": (call_of(None, SPEC, on=ag.graph), "graph(fn, /, **specs)"),
    "window of a size": (lambda: any_window(size=4), "Window(left, right=0, align=None)"),
    "prefix of nothing": (any_prefix, "write Prefix(length)"),
    "soft cap of nothing": (any_step, "write SoftCap(cap)"),
    "lengths in a mask": (call_of(LENGTHS, on=any_lengths), "to attention(q, k, v, ...) by name"),
    "tiles of a mask": (call_of(ag.Causal(), on=ag.tiles), "tiles(mask, M, N)"),
    "replace_sdpa of a model": (
        call_of(torch.nn.Identity(), on=ag.replace_sdpa), "with replace_sdpa():",
    ),
}  # fmt: skip
SERVING: Wrong = {
    "keys longer than queries": (
        lambda: any_attention(PACKED, *(torch.randn(9, 4, 16),) * 2, q_starts=STARTS),
        "pass kv_starts= too",
    ),
    "starts of keys alone": (
        lambda: any_attention(PACKED, PACKED, PACKED, kv_starts=STARTS), "give q_starts=",
    ),
    "starts descend": (packed(q_starts=STARTS.flip(0)), "the first row of each sequence"),
    "starts past the end": (packed(q_starts=STARTS + STARTS), "of 7 rows"),
    "lengths for starts": (packed(q_starts=torch.tensor([3, 4, 7])), "expected 0 first"),
    "starts of a list": (packed(q_starts=[0, 3, 7]), "torch.tensor([0, 3, 7])"),
    "longest too short": (packed(max_lengths=(2, 2)), "a larger max_lengths="),
    "all_rows of padded ones": (attend(all_rows=True), "leave it out"),
    "max_lengths of padded ones": (attend(max_lengths=(8, 8)), "leave it out"),
    "finite_pages without pages": (attend(finite_pages=True), "leave it out"),
    "pages below 0": (paged(pages=-TABLE), "of a pool of 6"),
    "pages past the pool": (paged(pages=TABLE + 9), "of a pool of 6"),
    "pages of a list": (paged(pages=[[0, 1], [2, 3]]), "torch.tensor([[0, 1], [2, 3]])"),
    "pools of other pages": (
        lambda: any_attention(Q, POOL, POOL[:5], pages=TABLE), "one table of pages serves both",
    ),
    "jagged with rows first": (attend(JAGGED, JAGGED, JAGGED), "x.transpose(1, 2)"),
    "jagged beside dense": (attend(HEADS, Q, Q), "pass q, k and v nested"),
    "jagged with starts": (attend(HEADS, HEADS, HEADS, q_starts=STARTS), "leave it out"),
    "jagged into a tensor": (attend(HEADS, HEADS, HEADS, out=Q), "leave out= out"),
    "4 bits without scales": (quantised(FOURS, FOURS), "pass k_scale= and v_scale="),
    "4 bits of full size": (
        quantised(BYTES.byte(), BYTES.byte(), k_scale=SCALE, v_scale=SCALE), "k.view(dtype)",
    ),
    "4 bits of queries": (
        attend(FOURS, FOURS, FOURS, q_scale=SCALE, k_scale=SCALE, v_scale=SCALE), "in a float",
    ),
    "scale of queries alone": (attend(BYTES, Q, Q, q_scale=SCALE), "k_scale is not"),
    "block of 3": (
        quantised(k_scale=torch.ones(2, 4, 8, 3), v_scale=SCALE), "3 on axis 3, not a divisor of 16"
    ),
    "block of other batches": (
        quantised(k_scale=torch.ones(3, 1, 1, 1), v_scale=SCALE), "3 on axis 0, not a divisor of 2"
    ),
    "zero points": (quantised(k_zero_point=SCALE), "without zero points"),
    "descale": (quantised(k_scale=SCALE, v_descale=SCALE), "use v_scale="),
    "scale as double": (quantised(k_scale=SCALE.double(), v_scale=SCALE), "k_scale.float()"),
    "one new row of each": (
        call_of(ROWS, ROWS, POOL, POOL, TABLE, LENGTHS, on=any_append), "write k[:, :, None]",
    ),
    "splits": (
        lambda: any_varlen(PACKED, PACKED, PACKED, STARTS, STARTS, 4, 4, num_splits=2), "pass None",
    ),
    "shard by ring": (call_of(any_graph, MESH, "ring", on=any_shard), 'write "balanced"'),
    "shard on a number": (call_of(any_graph, 2, "zigzag", on=any_shard), "write ag.Mesh(8)"),
    "mesh of 0": (call_of(0, on=any_mesh), "write ag.Mesh(8)"),
    "shard of cu_seqlens": (
        lambda: any_shard(PACKED_GRAPH, MESH, "zigzag", cu_seqlens=STARTS), "write q_starts=",
    ),
    "shard of a list": (
        lambda: any_shard(PACKED_GRAPH, MESH, "zigzag", q_starts=[0, 3, 7]), "torch.tensor(",
    ),
    "shard without starts": (call_of(PACKED_GRAPH, MESH, "zigzag", on=any_shard), "q_starts="),
    "virtual GPU of a CPU": (lambda: virtual_gpu("cpu").__enter__(), 'its name, "h200"'),
    "virtual GPU of a slip": (lambda: virtual_gpu("h400").__enter__(), "known are cpu, cuda, a100"),
}  # fmt: skip
WRONG: Wrong = WORDS | OPTIONS | SHAPES | DTYPES | PLACES | SERVING
