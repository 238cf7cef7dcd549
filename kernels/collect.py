"""Gradients of tensors read by modifiers: contributions recomputed and summed, no atomics.

COLLECT is generated: from ds it computes the contribution of each place to one tensor. If the
tensor has one element along an axis, contributions are summed: along queries or keys here, along
other axes by the caller. For gradients in a direction tlse_ptr is given, and so are the tangents of
moving tensors; COLLECT then reads ds, tds, s and ts, and gives ds too.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    SIZES,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    head_ptr,
    key_tiles,
    line_of,
    list_at,
    listed_block,
    numbers_in,
    place_program,
    present_sizes,
    round_to,
    rows_of,
    tile_bounds,
)
from attn_graph.kernels.pieces import multiply_pieces, query_pieces, scale_ahead
from attn_graph.kernels.scores import (
    drop,
    load_rest,
    load_statistics,
    moving_rows,
    outweigh,
    push_dot,
    score_gradient,
)
from attn_graph.kernels.sequences import scale_columns, scale_heads


@triton.jit
def contribution(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr,
    tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, seed_ptr, offset_ptr,
    data, numbers, q_strides, k_strides, v_strides, do_strides,
    tq_strides, tk_strides, tv_strides, tdo_strides, scales, scale_strides,
    b, h, H, GROUP, query, key, M, N, scale, keep_scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr, PUSH: tl.constexpr,
    COLLECT: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What each place of a tile [BLOCK_M,BLOCK_N] adds to the gradient; 0 outside of q and k."""
    i = (query + tl.arange(0, BLOCK_M))[:, None]
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    g = h // GROUP
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    q_head, k_head = head_ptr(q_ptr, q_strides, b, h), head_ptr(k_ptr, k_strides, b, g)
    q = query_pieces(None, q_head, q_strides, b, h, query, rows, D, BLOCK_M, WIDTH_D, False, UPCAST)
    k = query_pieces(
        None, k_head, k_strides, b, g, key, keys, D // K_BLOCKS[2], BLOCK_N, WIDTH_D // K_BLOCKS[2],
        False, UPCAST,
    )  # fmt: skip
    v = rows_of(
        v_ptr, v_strides, b, g, key, keys, E // V_BLOCKS[2], BLOCK_N, WIDTH_E // V_BLOCKS[2], UPCAST
    )
    k_scale, v_scale = scale_heads(scales, scale_strides, b, g, None, 0, 0)
    k, k_scale = scale_ahead(
        k, k_scale, q[0], None, None, b, g, key, keys, 0, D, BLOCK_N, False, 0, K_BLOCKS
    )
    values, v_scale = scale_ahead(
        (v,), v_scale, q[0], None, None, b, g, key, keys, 0, E, BLOCK_N, False, 0, V_BLOCKS
    )
    v = values[0]
    do = None if do_ptr is None else rows_of(
        do_ptr, do_strides, b, h, query, rows, E, BLOCK_M, WIDTH_E, UPCAST
    )  # fmt: skip
    s = multiply_pieces(q, k, PRECISION)
    dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if do is not None:
        dp = tl.dot(do, tl.trans(numbers_in(v, do.dtype)), input_precision=PRECISION)
    s = scale_columns(s, k_scale, None, None, b, g, key, keys, 0, BLOCK_N, False, 0, K_BLOCKS)
    dp = scale_columns(dp, v_scale, None, None, b, g, key, keys, 0, BLOCK_N, False, 0, V_BLOCKS)
    z = None
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, query, key, threshold, origin, BLOCK_M, BLOCK_N
        )
    dp = drop(dp, z, keep_scale)
    row = (tl.cast(b, tl.int64) * H + h) * M
    lse = outweigh(load_statistics(lse_ptr + row, query, M, float("-inf"), BLOCK_M, False))
    rest = load_rest(rest_ptr, row, query, M, BLOCK_M, False)[:, None]
    surplus = load_statistics(delta_ptr + row, query, M, 0.0, BLOCK_M, False)[:, None]
    ahead = None
    if tlse_ptr is not None:
        tq = moving_rows(
            tq_ptr, tq_strides, b, h, query, rows, None, D, BLOCK_M, WIDTH_D, False, False, UPCAST
        )
        tk = moving_rows(
            tk_ptr, tk_strides, b, g, key, keys, None, D, BLOCK_N, WIDTH_D, False, False, UPCAST
        )
        tv = moving_rows(
            tv_ptr, tv_strides, b, g, key, keys, None, E, BLOCK_N, WIDTH_E, False, False, UPCAST
        )
        tdo = moving_rows(
            tdo_ptr, tdo_strides, b, h, query, rows, None, E, BLOCK_M, WIDTH_E, False, False, UPCAST
        )
        ts = push_dot(q[0], tq, k[0], tk, BLOCK_M, BLOCK_N, PRECISION)
        tdp = drop(push_dot(do, tdo, v, tv, BLOCK_M, BLOCK_N, PRECISION), z, keep_scale)
        mu = load_statistics(tlse_ptr + row, query, M, 0.0, BLOCK_M, False)[:, None]
        tsurplus = load_statistics(tdelta_ptr + row, query, M, 0.0, BLOCK_M, False)[:, None]
        ahead = ts, tdp, mu, tsurplus
    _, _, _, share = score_gradient(
        s, dp, lse[:, None], rest, surplus, ahead, b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, COLLECT, PUSH, True, False,
    )  # fmt: skip
    return share


@triton.jit(do_not_specialize=("B", *SIZES))
def collect_places(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr,
    tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, out_ptr, seed_ptr, offset_ptr,
    data, numbers, q_strides, k_strides, v_strides, do_strides,
    tq_strides, tk_strides, tv_strides, tdo_strides, out_strides, scales, scale_strides,
    B, H, GROUP, M, N, scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_BATCH: tl.constexpr, PER_HEAD: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr,
    PUSH: tl.constexpr, COLLECT: tl.constexpr, DROPOUT: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a gradient [B or 1, H or 1, M, N], summed along axes of size 1."""
    N = even_length(N, EVEN)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    column, row = pid % columns, pid // columns % rows
    each = pid // columns // rows
    b_first, b_count, h_first, h_count = 0, B, 0, H
    if PER_HEAD:
        h_first, h_count = each % H, 1
        each = each // H
    if PER_BATCH:
        b_first, b_count = each, 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(b_first, b_first + b_count):
        start, _, _, stop = key_tiles(row, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N)
        if (start <= column) & (column < stop):
            for h in range(h_first, h_first + h_count):
                total += contribution(
                    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr,
                    tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, seed_ptr, offset_ptr,
                    data, numbers, q_strides, k_strides, v_strides, do_strides,
                    tq_strides, tk_strides, tv_strides, tdo_strides, scales, scale_strides,
                    b, h, H, GROUP, row * BLOCK_M, column * BLOCK_N, M, N,
                    scale, keep_scale, threshold, origin, D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                    KEEP, ENDS, CHANGE, PUSH, COLLECT, DROPOUT, UPCAST, PRECISION,
                    K_BLOCKS, V_BLOCKS,
                )  # fmt: skip
    i = (row * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    j = (column * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    out = head_ptr(out_ptr, out_strides, tl.cast(b_first, tl.int32), tl.cast(h_first, tl.int32))
    at = out + i.to(tl.int64) * out_strides[2] + j.to(tl.int64) * out_strides[3]
    tl.store(at, round_to(total, out_ptr.dtype.element_ty, UPCAST), mask=(i < M) & (j < N))


@triton.jit(do_not_specialize=SIZES)
def collect_lines(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr,
    tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, out_ptr, seed_ptr, offset_ptr, lists_ptr,
    data, numbers, q_strides, k_strides, v_strides, do_strides,
    tq_strides, tk_strides, tv_strides, tdo_strides, lists_strides, scales, scale_strides,
    H, GROUP, M, N, scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_KEYS: tl.constexpr,
    ENTRIES: tl.constexpr, FOLDS: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr,
    PUSH: tl.constexpr, COLUMN: tl.constexpr, COLLECT: tl.constexpr, DROPOUT: tl.constexpr,
    LISTED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: the sums over keys for BLOCK_M queries, or, BY_KEYS, over queries for BLOCK_N.

    out [B,H,M] or [B,H,N], float32, C order. With COLUMN, sums over the columns of a table for
    BLOCK_M queries: it is generated, the column of a place, by its j - i, from 0 to ENTRIES - 1,
    where columns of equal number lie side by side in this order. In a tile turned by one place a
    row, a diagonal is a column of it, above FOLDS of them. out is [B,H,blocks,FOLDS,ENTRIES] then:
    each fold of a tile stores where no other does, except in the first and the last column.
    """
    N = even_length(N, EVEN)
    length = N if BY_KEYS else M
    LINES: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    place, h, b = place_program(tl.cdiv(length, LINES), H, 1, not (LISTED or BY_KEYS))
    block = listed_block(place, lists_ptr, lists_strides, LISTED)
    list_ptr = list_at(lists_ptr, lists_strides, b, h, place)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, BY_KEYS)
    full, mixed = count_tiles(list_ptr, bounds, LISTED)
    total = tl.zeros([LINES], tl.float32)
    if COLUMN is not None:
        line = (tl.cast(b, tl.int64) * H + h) * tl.cdiv(M, BLOCK_M) + block
        out_ptr += line * (FOLDS * ENTRIES)
        each = tl.arange(0, BLOCK_N)
        for n in range(0, FOLDS * ENTRIES, BLOCK_N):
            tl.store(out_ptr + n + each, 0.0, mask=n + each < FOLDS * ENTRIES)
        tl.debug_barrier()
        turned = each[None, :] + tl.arange(0, BLOCK_M)[:, None]
        head, tail = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for t in range(full + mixed):
        n = bounds[0] + t
        if LISTED:
            n = tl.load(list_ptr + 3 + t)
        row, column = (n * BLOCK_M, block * BLOCK_N) if BY_KEYS else (block * BLOCK_M, n * BLOCK_N)
        share = contribution(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr,
            tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, seed_ptr, offset_ptr,
            data, numbers, q_strides, k_strides, v_strides, do_strides,
            tq_strides, tk_strides, tv_strides, tdo_strides, scales, scale_strides,
            b, h, H, GROUP, row, column, M, N, scale, keep_scale, threshold,
            origin, D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
            KEEP, ENDS, CHANGE, PUSH, COLLECT, DROPOUT, UPCAST, PRECISION, K_BLOCKS, V_BLOCKS,
        )  # fmt: skip
        if COLUMN is None:
            total += tl.sum(share, 0 if BY_KEYS else 1)
        else:
            least = COLUMN(b, h, row + BLOCK_M - 1, column, M, N, data, numbers)
            most = COLUMN(b, h, row, column + BLOCK_N - 1, M, N, data, numbers)
            if least == most:
                sums = tl.sum(share, 0)
                head += tl.where(most == 0, sums, 0.0)
                tail += tl.where(most > 0, sums, 0.0)
            else:
                share = tl.gather(share, turned % BLOCK_N, 1)
                for fold in tl.static_range(FOLDS):
                    sums = tl.sum(tl.where(turned // BLOCK_N == fold, share, 0.0), 0)
                    at = COLUMN(b, h, row, column + each - fold * BLOCK_N, M, N, data, numbers)
                    inner = (at > 0) & (at < ENTRIES - 1)
                    tl.store(out_ptr + fold * ENTRIES + at, sums, mask=inner)
                    head += tl.where(at == 0, sums, 0.0)
                    tail += tl.where(inner | (at == 0), 0.0, sums)
    if COLUMN is None:
        at = line_of(b, h, H, length) + block * LINES + tl.arange(0, LINES)
        tl.store(out_ptr + at, total, mask=block * LINES + tl.arange(0, LINES) < length)
    else:
        tl.store(out_ptr, tl.sum(head, 0))
        tl.store(out_ptr + ENTRIES - 1, tl.sum(tail, 0))
