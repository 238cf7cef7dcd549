"""Forward mode in one kernel: o, lse and their tangents of a block of queries.

With r the products, ts is scale (tq k^T + q tk^T), forward through the modifiers (their derivative
serves both ways), and mu = sum_j p ts = tlse; then to = sum_j p z (ts v + tv) - mu o. The sums of
both run beside the forward's, and shrink with them when the maximum moves.

p z ts is rounded for the product with v, and mu o may cancel nearly all of it. So the sum is of
p z (ts - c), c the mean of ts so far: to = sum_j p z ((ts - c) v + tv) + (c - mu) o. When c moves,
the sum moves by its change times the sum of p z v.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    LN2,
    SIZES,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    head_ptr,
    line_of,
    list_at,
    listed_block,
    place_program,
    present_sizes,
    raise_to,
    round_to,
    rows_at,
    rows_of,
    softmax_step,
    store_rows,
    tile_at,
    tile_bounds,
)
from attn_graph.kernels.forward import store_statistic


@triton.jit(do_not_specialize=("sinks_stride", "tsinks_stride", *SIZES))
def push(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, o_ptr, lse_ptr, to_ptr, tlse_ptr, max_ptr,
    sinks_ptr, tsinks_ptr, seed_ptr, offset_ptr, lists_ptr, data, numbers,
    q_strides, k_strides, v_strides, tq_strides, tk_strides, tv_strides, o_strides, lists_strides,
    sinks_stride, tsinks_stride, H, GROUP, M, N, TOGETHER, scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr,
    PUSH: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head against all keys that they may see.

    q, tq [B,H,M,D], k, tk [B,G,N,D], v, tv [B,G,N,E] -> o, to [B,H,M,E], which lie alike, and lse,
    tlse, max [B,H,M] float32 in C order. Tangents, and max, may be absent: their pointer is None.
    """
    N = even_length(N, EVEN)
    place, h, b = place_program(tl.cdiv(M, BLOCK_M), H, TOGETHER, LAST_FIRST)
    block = listed_block(place, lists_ptr, lists_strides, LISTED)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    first, line = block * BLOCK_M, line_of(b, h, H, M)
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    q = rows_of(q_ptr, q_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, UPCAST)
    tq = q
    if tq_ptr is not None:
        tq = rows_of(tq_ptr, tq_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, UPCAST)
    k_head = head_ptr(k_ptr, k_strides, b, h // GROUP)
    v_head = head_ptr(v_ptr, v_strides, b, h // GROUP)
    tk_head, tv_head = k_head, v_head
    if tk_ptr is not None:
        tk_head = head_ptr(tk_ptr, tk_strides, b, h // GROUP)
    if tv_ptr is not None:
        tv_head = head_ptr(tv_ptr, tv_strides, b, h // GROUP)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mu = tl.zeros([BLOCK_M], tl.float32)
    c = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH_E], tl.float32)
    moved = tl.zeros([BLOCK_M, WIDTH_E], tl.float32)

    list_ptr = list_at(lists_ptr, lists_strides, b, h, place)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, False)
    tiles = count_tiles(list_ptr, bounds, LISTED)
    for MIXED in tl.static_range(2):  # full tiles, then mixed ones
        for t in range(tiles[MIXED]):
            n = tile_at(t, list_ptr, bounds, tiles[0], LISTED, MIXED)
            acc, moved, total, mu, c, m = attend_along(
                acc, moved, total, mu, c, m, q, tq, k_head, v_head, tk_head, tv_head, n * BLOCK_N,
                first, i, tq_ptr, tk_ptr, tv_ptr, seed_ptr, offset_ptr, data, numbers,
                k_strides, v_strides, tk_strides, tv_strides,
                b, h, H, M, N, keys, scale, threshold, origin,
                D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                KEEP, CHANGE, PUSH, DROPOUT, MIXED, UPCAST, PRECISION,
            )  # fmt: skip

    if max_ptr is not None:
        # A maximum drops NaN, and the sum keeps it.
        lost = (total != total) & (m != float("inf"))
        store_statistic(max_ptr + line, tl.where(lost, total, m), first, M, BLOCK_M)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h * sinks_stride).to(tl.float32)
        new = tl.maximum(m, sink)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, share = raise_to(m - safe, False), raise_to(sink - safe, False)
        acc, moved = acc * shrink[:, None], moved * shrink[:, None]
        total, mu, m = total * shrink + share, mu * shrink, new
        if tsinks_ptr is not None:
            tsink = tl.load(tsinks_ptr + h * tsinks_stride).to(tl.float32)
            mu += tl.where(share == 0, 0.0, share * tsink)
    blind = total == 0  # rows that saw nothing
    total = tl.where(blind, 1.0, total)
    lse = tl.where(blind, float("-inf"), m + tl.log2(total) * LN2)
    mu = mu / total
    factor = (keep_scale / total)[:, None]
    acc = acc * factor
    moved = moved * factor + (c - mu)[:, None] * acc
    o_head, to_head = head_ptr(o_ptr, o_strides, b, h), head_ptr(to_ptr, o_strides, b, h)
    store_rows(o_head, o_strides, first, M, acc, E, BLOCK_M, WIDTH_E, UPCAST)
    store_rows(to_head, o_strides, first, M, moved, E, BLOCK_M, WIDTH_E, UPCAST)
    store_statistic(lse_ptr + line, lse, first, M, BLOCK_M)
    store_statistic(tlse_ptr + line, mu, first, M, BLOCK_M)


@triton.jit
def attend_along(
    acc, moved, total, mu, c, m, q, tq, k_head, v_head, tk_head, tv_head, key, first, i,
    tq_ptr, tk_ptr, tv_ptr, seed_ptr, offset_ptr, data, numbers,
    k_strides, v_strides, tk_strides, tv_strides,
    b, h, H, M, N, keys, scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, PUSH: tl.constexpr, DROPOUT: tl.constexpr,
    MIXED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step over keys `key`.. before `keys`: sums of p z v, p z ((ts - c) v + tv), p and p ts.

    p = exp(s - m), m the maximum so far, as in the forward kernel; c is the mean of ts so far.
    """
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    k = rows_at(k_head, k_strides, key, keys, D, BLOCK_N, WIDTH_D, not MIXED, UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    ts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if tq_ptr is not None:
        ts = tl.dot(tq, tl.trans(k), input_precision=PRECISION)
    if tk_ptr is not None:
        tk = rows_at(tk_head, tk_strides, key, keys, D, BLOCK_N, WIDTH_D, not MIXED, UPCAST)
        ts = tl.dot(q, tl.trans(tk), ts, input_precision=PRECISION)
    ts = ts * scale
    if PUSH is not None:
        ts = PUSH(ts, s * scale, b, h, i, j, M, N, data, numbers)
    p, new, shrink = softmax_step(
        s, m, b, h, i, j, M, N, scale, data, numbers, KEEP, CHANGE, False, MIXED
    )
    total = total * shrink + tl.sum(p, 1)
    if MIXED or CHANGE is not None:
        ts = tl.where(p == 0, 0.0, ts)
    mu = mu * shrink + tl.sum(p * ts, 1)
    mean = mu / tl.where(total == 0, 1.0, total)
    pts = p * (ts - mean[:, None])
    moved -= (mean - c)[:, None] * acc
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, first, key, threshold, origin, BLOCK_M, BLOCK_N
        )
        p, pts = tl.where(z, p, 0.0), tl.where(z, pts, 0.0)
    v = rows_at(v_head, v_strides, key, keys, E, BLOCK_N, WIDTH_E, not MIXED, UPCAST)
    p = round_to(p, v_head.dtype.element_ty, UPCAST)
    pts = round_to(pts, v_head.dtype.element_ty, UPCAST)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision=PRECISION)
    moved = tl.dot(pts, v, moved * shrink[:, None], input_precision=PRECISION)
    if tv_ptr is not None:
        tv = rows_at(tv_head, tv_strides, key, keys, E, BLOCK_N, WIDTH_E, not MIXED, UPCAST)
        moved = tl.dot(p, tv, moved, input_precision=PRECISION)
    return acc, moved, total, mu, mean, new
