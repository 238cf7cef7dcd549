"""A row's values for the backward, computed again: lse or o were rounded too far to give them.

A forward gives lse = m + log Z as one number, and a large m swallows the logarithm. If |lse| is
above FAR_LSE the scores of a row are computed again: rest = log2 sum_j exp(s - lse), a sink's among
them, and weights are exp2((s - lse) log2(e) - rest).

delta = sum_e do o is of an o rounded to the dtype of q. The exact number is sum_j p z dp - dlse: it
cancels dp of a row with one key, and its ds add up to 0.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    LOG2E,
    SIZES,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    numbers_in,
    present_sizes,
    softmax_step,
    tile_bounds,
    tile_of,
)
from attn_graph.kernels.forward import store_statistic, with_sink
from attn_graph.kernels.pieces import key_pieces, multiply_pieces, query_pieces, scale_ahead
from attn_graph.kernels.scores import load_statistics
from attn_graph.kernels.sequences import (
    head_at,
    key_rows,
    length_of,
    list_of,
    pages_of,
    place_rows,
    scale_columns,
    scale_heads,
    tiles_within,
)


@triton.jit(do_not_specialize=("sinks_stride", *SIZES))
def sum_weights(
    q_ptr, k_ptr, v_ptr, do_ptr, dlse_ptr, lse_ptr, delta_ptr, rest_ptr, sinks_ptr,
    seed_ptr, offset_ptr, lists_ptr,
    q_starts_ptr, q_lengths_ptr, kv_starts_ptr, kv_lengths_ptr, pages_ptr, data, numbers,
    q_steps, kv_steps, q_strides, k_strides, v_strides, do_strides, dlse_strides, lists_strides,
    scales, scale_strides, sinks_stride, pages_stride, B, H, GROUP, M, N, T, T_KEYS, POOL,
    scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH: tl.constexpr, PAGE: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, SEEN: tl.constexpr,
    CHANGE: tl.constexpr,
    DROPOUT: tl.constexpr, LISTED: tl.constexpr, FAR_LSE: tl.constexpr, WEIGHED: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: rest and delta [B,H,M] of BLOCK_M queries of one head.

    rest, float32 in C order: 0 in rows that are not far, and not stored where its pointer is None.
    WEIGHED: of which rows delta is written over, 0 none, 1 those of blocks that see no more tiles
    than on a diagonal, 2 all; do_ptr is None where it is 0. Packed tensors, pages and scales are as
    those of `forward`.
    """
    N = even_length(N, EVEN)
    place, block, h, b, row, M, extent, line = place_rows(
        q_starts_ptr, q_lengths_ptr, q_steps, lists_ptr, lists_strides, B, H, M, T, 1,
        BATCH, BLOCK_M, False, LISTED,
    )  # fmt: skip
    first = block * BLOCK_M
    list_ptr = list_of(lists_ptr, lists_strides, b, h, place, q_starts_ptr, first, M)
    key, N = length_of(kv_starts_ptr, kv_lengths_ptr, kv_steps, b, T_KEYS, N)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, False)
    full, mixed = count_tiles(list_ptr, bounds, LISTED)
    full, mixed = tiles_within(full, mixed, q_starts_ptr, first, M, LISTED)
    lse = load_statistics(lse_ptr + line, first, M, float("-inf"), BLOCK_M, False)
    sees = lse != float("-inf")
    far = sees & (tl.abs(lse) > FAR_LSE)
    again = far
    if WEIGHED == 1:
        again = far | (sees & (full + mixed <= tl.cdiv(BLOCK_M, BLOCK_N) + 1))
    if WEIGHED == 2:
        again = sees
    tiles = tl.where(tl.max(again.to(tl.int32), 0) > 0, full + mixed, 0)

    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    pages, keys = pages_of(b, M, N, keys, pages_stride, kv_steps[2], data, numbers, SEEN)
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    q_head = head_at(q_ptr, q_strides, b, h, q_starts_ptr, row, 0)
    q = query_pieces(None, q_head, q_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, False, UPCAST)
    do = q[0]
    if do_ptr is not None:
        do_head = head_at(do_ptr, do_strides, b, h, q_starts_ptr, row, 0)
        do = tile_of(
            None, do_head, do_strides, b, h, first, rows, E, BLOCK_M, WIDTH_E, False, UPCAST
        )
    k_head = head_at(k_ptr, k_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    k_scale, v_scale = scale_heads(scales, scale_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    m = tl.where(far, float("-inf"), lse)  # of others weights are those of the kernels, bit for bit
    total = tl.zeros([BLOCK_M], tl.float32)
    weighed = tl.zeros([BLOCK_M, 1], tl.float32)
    for t in range(tiles):
        n = bounds[0] + t
        if LISTED:
            n = tl.load(list_ptr + 3 + t)
        weighed, total, m = add_weights(
            weighed, total, m, q, do, k_head, v_head, n * BLOCK_N, first, i,
            do_ptr, seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides, v_strides,
            k_scale, v_scale, b, h, h // GROUP, H, M, N, keys, POOL, scale, threshold, origin,
            D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N, PAGE, KEEP, CHANGE, DROPOUT, UPCAST,
            PRECISION, K_BLOCKS, V_BLOCKS,
        )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h * sinks_stride).to(tl.float32)
        weighed, total, m, _, _ = with_sink(weighed, total, m, sink, False)
    again = again & (total > 0)
    total = tl.where(again, total, 1.0)
    if rest_ptr is not None:
        rest = tl.where(again & far, (m - lse) * LOG2E + tl.log2(total), 0.0)
        store_statistic(rest_ptr + line, rest, first, extent, BLOCK_M)
    if WEIGHED:
        delta = tl.sum(weighed, 1) * (keep_scale / total)
        at = first + tl.arange(0, BLOCK_M)
        if dlse_ptr is not None:
            dlse_row = head_at(dlse_ptr, dlse_strides, b, h, q_starts_ptr, row, 0)
            delta -= tl.load(dlse_row + at.to(tl.int64) * dlse_strides[2], mask=again, other=0.0)
        tl.store(delta_ptr + line + at, delta, mask=again)


@triton.jit
def add_weights(
    weighed, total, m, q, do, k_head, v_head, key, first, i,
    do_ptr, seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides, v_strides,
    k_scale, v_scale, b, h, g, H, M, N, keys, POOL, scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, KEEP: tl.constexpr,
    CHANGE: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """weighed [BLOCK_M,1] = sum_j p z do v^T, total and m [BLOCK_M] with keys `key`.. before `keys`
    too. See `softmax_step`."""
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    k = key_pieces(
        None, k_head, k_strides, pages_ptr, pages, b, g, key, keys, POOL,
        D // K_BLOCKS[2], BLOCK_N, WIDTH_D // K_BLOCKS[2], False, PAGE, UPCAST,
    )  # fmt: skip
    k, k_scale = scale_ahead(
        k, k_scale, q[0], pages_ptr, pages, b, g, key, keys, POOL,
        D, BLOCK_N, False, PAGE, K_BLOCKS,
    )  # fmt: skip
    s = multiply_pieces(q, k, PRECISION)
    s = scale_columns(
        s, k_scale, pages_ptr, pages, b, g, key, keys, POOL, BLOCK_N, False, PAGE, K_BLOCKS
    )
    p, m, shrink = softmax_step(
        s, m, b, h, i, j, M, N, scale, data, numbers, KEEP, CHANGE, False, True
    )
    total = total * shrink + tl.sum(p, 1)
    if do_ptr is not None:
        v = key_rows(
            None, v_head, v_strides, pages_ptr, pages, b, g, key, keys, POOL,
            E // V_BLOCKS[2], BLOCK_N, WIDTH_E // V_BLOCKS[2], False, PAGE, UPCAST,
        )  # fmt: skip
        values, v_scale = scale_ahead(
            (v,), v_scale, do, pages_ptr, pages, b, g, key, keys, POOL,
            E, BLOCK_N, False, PAGE, V_BLOCKS,
        )  # fmt: skip
        v = values[0]
        dp = tl.dot(do, tl.trans(numbers_in(v, do.dtype)), input_precision=PRECISION)
        dp = scale_columns(
            dp, v_scale, pages_ptr, pages, b, g, key, keys, POOL, BLOCK_N, False, PAGE, V_BLOCKS
        )
        if DROPOUT:
            z = dropout_keeps_tile(
                seed_ptr, offset_ptr, b, h, H, first, key, threshold, origin, BLOCK_M, BLOCK_N
            )
            p = tl.where(z, p, 0.0)
        weighed = weighed * shrink[:, None] + tl.sum(tl.where(p == 0, 0.0, p * dp), 1)[:, None]
    return weighed, total, m
