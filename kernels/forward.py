"""The forward kernel: o and lse of a block of queries, by an online softmax over tiles of keys.

And in forward mode their tangents beside them. With ts the tangent of the scores, of
scale (tq k^T + q tk^T) forward through the modifiers, and mu = sum_j p ts = tlse, that of o is
to = sum_j p z (ts v + tv) - mu o. p z ts is rounded for the product with v, and mu o may cancel
nearly all of it. So the sum is of p z (ts - c), c the mean of ts so far:
to = sum_j p z ((ts - c) v + tv) + (c - mu) o. When c moves, the sum moves by its change times the
sum of p z v.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    LN2,
    SIZES,
    count_parts,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    head_and_part,
    head_ptr,
    in_scores,
    natural,
    present_sizes,
    raise_to,
    round_to,
    softmax_step,
    store_rows,
    sum_columns,
    tile_at,
    tile_bounds,
    walk_part,
)
from attn_graph.kernels.pieces import key_pieces, multiply_pieces, query_pieces, scale_ahead
from attn_graph.kernels.scores import moving_rows, push_dot, push_scores
from attn_graph.kernels.sequences import (
    LARGEST,
    common_scales,
    head_at,
    key_rows,
    length_of,
    list_of,
    pages_of,
    place_rows,
    scale_columns,
    scale_heads,
    scale_rows,
    tiles_within,
    unpack_pairs,
    within_sequence,
)


@triton.jit(do_not_specialize=("sinks_stride", "tsinks_stride", *SIZES))
def forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, max_ptr, sinks_ptr, seed_ptr, offset_ptr, lists_ptr,
    q_starts_ptr, q_lengths_ptr, kv_starts_ptr, kv_lengths_ptr, pages_ptr, q_desc, k_desc, v_desc,
    tq_ptr, tk_ptr, tv_ptr, to_ptr, tlse_ptr, tsinks_ptr,
    data, numbers, q_steps, kv_steps, q_strides, k_strides, v_strides, o_strides, lists_strides,
    tq_strides, tk_strides, tv_strides, scales, scale_strides, sinks_stride, tsinks_stride,
    pages_stride,
    B, H, GROUP, PARTS, M, N, T, T_KEYS, POOL, TOGETHER,
    scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr,
    BATCH: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr, PARTED: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr, COMMON: tl.constexpr, V_IN_K: tl.constexpr,
    SHORT: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, SEEN: tl.constexpr,
    CHANGE: tl.constexpr,
    PUSH: tl.constexpr, FOLD: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head against all keys that they may see, or, PARTED, one
    of PARTS of their tiles.

    q [B,H,M,D], k [B,G,N,D], v [B,G,N,E] -> o [B,H,M,E], lse [B,H,M] (natural logarithm), max
    [B,H,M] (of the scores); both float32 in C order, and not stored where their pointer is None.
    GROUP = H / G. q, k and v are read by descriptors of their tiles where these are given. FOLD,
    COLUMNS: see `softmax_step` and `sum_columns`. V_IN_K: v is the first piece of k, read once.
    PARTED: o and lse have H * PARTS heads, o is float32 and lse two numbers a row; see
    `merge_parts`.

    With q_starts_ptr q is packed, T rows of each head, and so are o and the statistics [H,T]; with
    kv_starts_ptr k and v are, T_KEYS rows. M and N are the most of a sequence then. Sequences with
    an extent up to SHORT are left to `split_forward`. With pages_ptr k and v are POOL pages of PAGE
    rows; see kernels/sequences.py. scales: of quantised k and v, or None. K_BLOCKS, V_BLOCKS,
    COMMON: see `scales_of` and `common_scales`.

    With tlse_ptr also to, which lies as o does, and tlse [B,H,M] as lse, from the tangents tq, tk,
    tv and tsinks, any of which may be absent; nothing is packed, in pages, quantised or PARTED.
    """
    N = even_length(N, EVEN)
    heads = count_parts(H, PARTS, PARTED)
    place, block, head, b, row, M, extent, line = place_rows(
        q_starts_ptr, q_lengths_ptr, q_steps, lists_ptr, lists_strides, B, heads, M, T, TOGETHER,
        BATCH, BLOCK_M, LAST_FIRST, LISTED, SHORT,
    )  # fmt: skip
    h, part = head_and_part(head, PARTS, PARTED)
    key, N = length_of(kv_starts_ptr, kv_lengths_ptr, kv_steps, b, T_KEYS, N)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    pages, keys = pages_of(b, M, N, keys, pages_stride, kv_steps[2], data, numbers, SEEN)
    first = block * BLOCK_M
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    q_head = head_at(q_ptr, q_strides, b, h, q_starts_ptr, row, 0)
    q = query_pieces(
        q_desc, q_head, q_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, False, UPCAST
    )
    k_head = head_at(k_ptr, k_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    k_scale, v_scale = scale_heads(scales, scale_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    q, k_scale, v_scale, o_scale = common_scales(
        q, k_scale, v_scale, COMMON, q_ptr.dtype.element_ty
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH_E], tl.float32)
    along, moved = None, begin_tangents(tlse_ptr, BLOCK_M, WIDTH_E)
    if tlse_ptr is not None:
        tq = moving_rows(
            tq_ptr, tq_strides, b, h, first, rows, None, D, BLOCK_M, WIDTH_D, False, False, UPCAST
        )
        along = tq, tk_ptr, tk_strides, tv_ptr, tv_strides

    list_ptr = list_of(lists_ptr, lists_strides, b, h, place, q_starts_ptr, first, M)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, False)
    full, mixed = count_tiles(list_ptr, bounds, LISTED)
    full, mixed = tiles_within(full, mixed, q_starts_ptr, first, M, LISTED)
    begins, ends = walk_part(part, PARTS, full, mixed, PARTED)
    for MIXED in tl.static_range(2):  # full tiles, then mixed ones
        for t in range(begins[MIXED], ends[MIXED]):
            n = tile_at(t, list_ptr, bounds, full, LISTED, MIXED)
            acc, total, m, moved = attend(
                acc, total, m, moved, q, k_head, v_head, along, k_desc, v_desc, n * BLOCK_N, first,
                i, seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides, v_strides,
                k_scale, v_scale, b, h, GROUP, H, M, N, keys, POOL, scale, threshold, origin,
                D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                PAGE, COLUMNS, V_IN_K, KEEP, CHANGE, PUSH, FOLD, DROPOUT, MIXED, UPCAST, PRECISION,
                K_BLOCKS, V_BLOCKS,
            )  # fmt: skip

    total = tl.sum(total, 1)
    if max_ptr is not None:
        lost = (total != total) & (m != float("inf"))  # a maximum drops NaN, the sum keeps it
        most = tl.where(lost, total, natural(m, FOLD))
        most = within_sequence(most, q_starts_ptr, first, M, float("-inf"), BLOCK_M)
        store_statistic(max_ptr + line, most, first, extent, BLOCK_M)
    if sinks_ptr is not None:
        sink = in_scores(tl.load(sinks_ptr + h * sinks_stride).to(tl.float32), FOLD)
        if PARTED:  # the first part has it
            sink = tl.where(part == 0, sink, float("-inf"))
        acc, total, m, shrink, share = with_sink(acc, total, m, sink, FOLD)
        moved = push_sink(moved, shrink, share, tsinks_ptr, h, tsinks_stride)
    blind = total == 0  # rows that saw nothing
    total = tl.where(blind, 1.0, total)
    lse = tl.where(blind, float("-inf"), natural(m, FOLD) + tl.log2(total) * LN2)
    acc = divide_sums(acc, total, blind, keep_scale * o_scale, COMMON)
    lse = within_sequence(lse, q_starts_ptr, first, M, float("-inf"), BLOCK_M)
    acc = within_sequence(acc, q_starts_ptr, first, M, 0.0, BLOCK_M)
    o_head = head_at(o_ptr, o_strides, b, head, q_starts_ptr, row, 0)
    store_rows(o_head, o_strides, first, extent, acc, E, BLOCK_M, WIDTH_E, UPCAST)
    if tlse_ptr is not None:
        to, mu = end_tangents(moved, acc, total, keep_scale)
        to_head = head_ptr(to_ptr, o_strides, b, h)
        store_rows(to_head, o_strides, first, M, to, E, BLOCK_M, WIDTH_E, UPCAST)
        store_statistic(tlse_ptr + line, mu, first, M, BLOCK_M)
    if PARTED:
        m = within_sequence(m, q_starts_ptr, first, M, float("-inf"), BLOCK_M)
        rows = line + first + tl.arange(0, BLOCK_M)
        store_part(lse_ptr, rows, m, total, blind, tl.arange(0, BLOCK_M) < extent - first)
    elif lse_ptr is not None:
        store_statistic(lse_ptr + line, lse, first, extent, BLOCK_M)


@triton.jit
def divide_sums(acc, total, blind, factor, COMMON: tl.constexpr):
    """acc times factor over total, by one division for each row. COMMON: a scale of v is in the
    factor, and a row that saw nothing stays 0 whatever it is."""
    share = factor / total
    if COMMON:
        share = tl.where(blind, 0.0, share)
    return acc * share[:, None]


@triton.jit
def store_part(ptr, rows, m, total, blind, inside):
    """Store for each of these rows m, -inf if it saw nothing, and log2(total), beside each other:
    as one number, m would take the digits of the other."""
    tl.store(ptr + 2 * rows, tl.where(blind, float("-inf"), m), mask=inside)
    tl.store(ptr + 2 * rows + 1, tl.log2(total), mask=inside)


@triton.jit
def store_statistic(line_ptr, values, first, count, BLOCK_M: tl.constexpr):
    """Store values [BLOCK_M] of queries `first`.. in a line of `count`."""
    row = tl.arange(0, BLOCK_M)
    tl.store(line_ptr + first + row, values, mask=row < count - first)


@triton.jit
def attend(
    acc, total, m, moved, q, k_head, v_head, along, k_desc, v_desc, key, first, i,
    seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides, v_strides,
    k_scale, v_scale, b, h, GROUP, H, M, N, keys, POOL, scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr,
    V_IN_K: tl.constexpr, KEEP: tl.constexpr, CHANGE: tl.constexpr, PUSH: tl.constexpr,
    FOLD: tl.constexpr, DROPOUT: tl.constexpr, MIXED: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M,E], total [BLOCK_M,COLUMNS] and m [BLOCK_M] with keys `key`.. before `keys`
    too.

    See `softmax_step` and `sum_columns`. k_scale, v_scale: as of `scale_heads`. Quantised k and v
    become q's dtype: scores are multiplied by k's scales, since they are exact then, and values
    and values before they are weighed, since weights times small scales would underflow.

    along: tq, then tk and tv by their pointers and strides; None: nothing moves, and moved is ().
    Else moved is the sums of p z ((ts - c) v + tv) and of p ts, and c.
    """
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    g = h // GROUP
    k = key_pieces(
        k_desc, k_head, k_strides, pages_ptr, pages, b, g, key, keys, POOL,
        D // K_BLOCKS[2], BLOCK_N, WIDTH_D // K_BLOCKS[2], not MIXED, PAGE, UPCAST,
    )  # fmt: skip
    k, k_scale = scale_ahead(
        k, k_scale, q[0], pages_ptr, pages, b, g, key, keys, POOL,
        D, BLOCK_N, not MIXED, PAGE, K_BLOCKS,
    )  # fmt: skip
    s = multiply_pieces(q, k, PRECISION)
    s = scale_columns(
        s, k_scale, pages_ptr, pages, b, g, key, keys, POOL, BLOCK_N, not MIXED, PAGE, K_BLOCKS
    )
    if along is not None:
        tq, tk_ptr, tk_strides, tv_ptr, tv_strides = along
        tk = moving_rows(
            tk_ptr, tk_strides, b, g, key, keys, None,
            D, BLOCK_N, WIDTH_D, not MIXED, False, UPCAST,
        )  # fmt: skip
        ts = push_dot(q[0], tq, k[0], tk, BLOCK_M, BLOCK_N, PRECISION)
    p, m, shrink = softmax_step(
        s, m, b, h, i, j, M, N, scale, data, numbers, KEEP, CHANGE, FOLD, MIXED
    )
    total = total * shrink[:, None] + sum_columns(p, COLUMNS)
    if along is not None:
        ts = push_scores(ts, s, p, 0.0, b, h, i, j, M, N, scale, data, numbers, CHANGE, PUSH, MIXED)
        to, mu, c = moved
        mu = mu * shrink + tl.sum(p * ts, 1)
        weight = tl.sum(total, 1)
        mean = mu / tl.where(weight == 0, 1.0, weight)
        to = (to - (mean - c)[:, None] * acc) * shrink[:, None]
        pts = p * (ts - mean[:, None])
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, first, key, threshold, origin, BLOCK_M, BLOCK_N
        )
        p = tl.where(z, p, 0.0)
        if along is not None:
            pts = tl.where(z, pts, 0.0)
    v = k[0]
    if not V_IN_K:
        v = key_rows(
            v_desc, v_head, v_strides, pages_ptr, pages, b, g, key, keys, POOL,
            E // V_BLOCKS[2], BLOCK_N, WIDTH_E // V_BLOCKS[2], not MIXED, PAGE, UPCAST,
        )  # fmt: skip
    v = unpack_pairs(v, V_BLOCKS)
    v = scale_rows(
        v, v_scale, q[0], pages_ptr, pages, b, g, key, keys, POOL,
        0, E, BLOCK_N, not MIXED, PAGE, V_BLOCKS,
    )  # fmt: skip
    if len(v_scale) == 0 and v_head.dtype.element_ty.primitive_bitwidth > 8:
        p = round_to(p, v_head.dtype.element_ty, UPCAST)
    else:
        if len(v_scale) == 0 and v.dtype == tl.float16:
            p = p * LARGEST
        p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
    if along is not None:
        pts = round_to(pts, v_head.dtype.element_ty, UPCAST)
        to = tl.dot(pts, v, to, input_precision=PRECISION)
        tv = moving_rows(
            tv_ptr, tv_strides, b, g, key, keys, None,
            E, BLOCK_N, WIDTH_E, not MIXED, False, UPCAST,
        )  # fmt: skip
        if tv is not None:
            to = tl.dot(p, tv, to, input_precision=PRECISION)
        moved = to, mu, mean
    return acc, total, m, moved


@triton.jit
def with_sink(acc, total, m, sink, FOLD: tl.constexpr):
    """The sums with the sink's exponential in the total, weight that goes to no value, then what
    shrinks earlier sums, and the exponential."""
    new = tl.maximum(m, sink)
    safe = tl.where(new == float("-inf"), 0.0, new)
    shrink = raise_to(m - safe, FOLD)
    acc, total = acc * shrink[:, None], total * shrink
    share = raise_to(sink - safe, FOLD)
    return acc, total + share, new, shrink, share


@triton.jit
def begin_tangents(tlse_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sums that move, as of `attend`, to begin with; () if nothing does."""
    return () if tlse_ptr is None else (
        tl.zeros([ROWS, WIDTH], tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS], tl.float32),
    )  # fmt: skip


@triton.jit
def push_sink(moved, shrink, share, tsinks_ptr, h, stride):
    """The sums that move, if any, with the sink's exponential `share` and its tangent, if any."""
    if len(moved) > 0:
        to, mu, c = moved
        mu = mu * shrink
        if tsinks_ptr is not None:
            tsink = tl.load(tsinks_ptr + h * stride).to(tl.float32)
            mu += tl.where(share == 0, 0.0, share * tsink)
        moved = to * shrink[:, None], mu, c
    return moved


@triton.jit
def end_tangents(moved, acc, total, keep_scale):
    """to and tlse, from the sums that move, o and the total of weights."""
    to, mu, c = moved
    mu = mu / total
    return to * (keep_scale / total)[:, None] + (c - mu)[:, None] * acc, mu
