"""The backward kernels in a direction: the tangents of dq, dk and dv, without atomics.

With the letters of `backward.py`, a `t` before each tangent, mu = tlse and u = ts - mu:
tp = p u, tdp = (tdo v^T + do tv^T) z, tdelta = sum_e (tdo o + do to) - tdlse,
tds = p u (dp - delta) + p (tdp - tdelta) and back through the modifiers, with their curvature,
tdq = scale (tds k + ds tk), tdk = scale (tds^T q + ds^T tq), tdv = (p u z)^T do + (p z)^T tdo.
`attn_graph.ir.tangents` has the derivation.
"""

import triton
import triton.language as tl

from attn_graph.kernels.backward import (
    load_rest,
    load_statistics,
    outweigh,
    weigh_scores,
)
from attn_graph.kernels.common import (
    SIZES,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    head_ptr,
    list_at,
    listed_block,
    live_tile_of,
    place_program,
    present_sizes,
    round_to,
    rows_at,
    rows_of,
    store_rows,
    tile_at,
    tile_bounds,
)


@triton.jit
def load_row_tangents(
    lse, mu_row, tdelta_row, first, M, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr
):
    """mu, 0 in rows that saw nothing, and tdelta, of rows first.. of one head. lse: `outweigh`."""
    mu = load_statistics(mu_row, first, M, 0.0, BLOCK_M, WHOLE)
    surplus = load_statistics(tdelta_row, first, M, 0.0, BLOCK_M, WHOLE)
    return tl.where(lse == float("inf"), 0.0, mu), surplus


@triton.jit
def push_dot(
    x, tx, y, ty, x_ptr, tx_ptr, y_ptr, ty_ptr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x y^T [ROWS,COLUMNS] and its tangent tx y^T + x ty^T; absent ones, by pointer, are 0.

    A quantised y, without a tangent, is read in x's dtype.
    """
    dot = tl.zeros([ROWS, COLUMNS], tl.float32)
    moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    if x_ptr is not None and y_ptr is not None:
        dot = tl.dot(x, tl.trans(y.to(x.dtype)), input_precision=PRECISION)
    if tx_ptr is not None and y_ptr is not None:
        moved = tl.dot(tx, tl.trans(y), input_precision=PRECISION)
    if x_ptr is not None and ty_ptr is not None:
        moved = tl.dot(x, tl.trans(ty), moved, input_precision=PRECISION)
    return dot, moved


@triton.jit
def head_or(ptr, strides, b, h, other):
    """The address of x[b,h], or another where x is absent."""
    if ptr is not None:
        return head_ptr(ptr, strides, b, h)
    return other


@triton.jit
def live_rows_or(
    ptr, head, strides, first, count, lse, other,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same as `live_tile_of` of one head, or another tile where the tensor is absent."""
    if ptr is not None:
        return live_tile_of(
            None, head, strides, 0, 0, first, count, lse,
            SIZE, ROWS, WIDTH, WHOLE, BLIND, UPCAST,
        )  # fmt: skip
    return other


@triton.jit
def push_score_gradient(
    s, ts, dp, tdp, lse, rest, mu, surplus, tsurplus, b, h, i, j, M, N, scale, data, numbers,
    CHANGE: tl.constexpr, KEEP: tl.constexpr, PUSH: tl.constexpr, BEND: tl.constexpr,
    MIXED: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """p and p u, and ds and tds before the modifiers, of a tile; s = q k^T and its tangent ts.

    lse, rest, mu, delta and tdelta broadcast. PAST: as in `backward.score_gradient`.
    """
    p = weigh_scores(
        s, lse, rest, b, h, i, j, M, N, scale, data, numbers, CHANGE, KEEP, MIXED, PAST
    )
    s, ts = s * scale, ts * scale
    u = ts
    if PUSH is not None:
        u = PUSH(ts, s, b, h, i, j, M, N, data, numbers)
    u = u - mu
    if MIXED or CHANGE is not None:
        u = tl.where(p == 0, 0.0, u)
    pu = p * u
    g = dp - surplus
    ds, tds = p * g, pu * g + p * (tdp - tsurplus)
    if BEND is not None:
        ds, tds = BEND(ds, tds, s, ts, b, h, i, j, M, N, data, numbers)
        ds, tds = tl.where(p == 0, 0.0, ds), tl.where(p == 0, 0.0, tds)
    return p, pu, ds, tds


@triton.jit(do_not_specialize=SIZES)
def push_query_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr, tq_ptr, tk_ptr, tv_ptr, tdo_ptr,
    tlse_ptr, tdelta_ptr, dq_ptr, seed_ptr, offset_ptr, lists_ptr, data, numbers,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides,
    dq_strides, lists_strides, H, GROUP, M, N, TOGETHER, scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr,
    PUSH: tl.constexpr, BEND: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the tangent of dq [BLOCK_M,D] of one head, over all keys that it may see.

    BLIND: as in `backward.query_gradient`. What does not move is absent: its pointer is None.
    """
    N = even_length(N, EVEN)
    place, h, b = place_program(tl.cdiv(M, BLOCK_M), H, TOGETHER, LAST_FIRST)
    block = listed_block(place, lists_ptr, lists_strides, LISTED)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    first = block * BLOCK_M
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    row = (tl.cast(b, tl.int64) * H + h) * M
    lse = outweigh(load_statistics(lse_ptr + row, first, M, float("-inf"), BLOCK_M, False))
    mu, tsurplus = load_row_tangents(
        lse, tlse_ptr + row, tdelta_ptr + row, first, M, BLOCK_M, False
    )
    lse, mu, tsurplus = lse[:, None], mu[:, None], tsurplus[:, None]
    rest = load_rest(rest_ptr, row, first, M, BLOCK_M, False)[:, None]
    surplus = load_statistics(delta_ptr + row, first, M, 0.0, BLOCK_M, False)[:, None]
    q = rows_of(q_ptr, q_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, UPCAST)
    tq = q
    if tq_ptr is not None:
        tq = rows_of(tq_ptr, tq_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, UPCAST)
    do = live_rows_or(
        do_ptr, head_or(do_ptr, do_strides, b, h, q_ptr), do_strides, first, rows, lse, q,
        E, BLOCK_M, WIDTH_E, False, BLIND > 0, UPCAST,
    )  # fmt: skip
    tdo = live_rows_or(
        tdo_ptr, head_or(tdo_ptr, tdo_strides, b, h, q_ptr), tdo_strides, first, rows, lse, q,
        E, BLOCK_M, WIDTH_E, False, BLIND > 0, UPCAST,
    )  # fmt: skip
    k_head = head_ptr(k_ptr, k_strides, b, h // GROUP)
    v_head = head_ptr(v_ptr, v_strides, b, h // GROUP)
    tk_head = head_or(tk_ptr, tk_strides, b, h // GROUP, k_head)
    tv_head = head_or(tv_ptr, tv_strides, b, h // GROUP, v_head)
    dq = tl.zeros([BLOCK_M, WIDTH_D], tl.float32)

    list_ptr = list_at(lists_ptr, lists_strides, b, h, place)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, False)
    tiles = count_tiles(list_ptr, bounds, LISTED)
    for MIXED in tl.static_range(2):  # full tiles, then mixed ones
        for t in range(tiles[MIXED]):
            n = tile_at(t, list_ptr, bounds, tiles[0], LISTED, MIXED)
            dq = push_add_query_gradient(
                dq, q, tq, do, tdo, lse, rest, mu, surplus, tsurplus, k_head, v_head, tk_head,
                tv_head, n * BLOCK_N, first, i, k_ptr, tq_ptr, tk_ptr, tv_ptr, do_ptr, tdo_ptr,
                seed_ptr, offset_ptr, data, numbers, k_strides, v_strides, tk_strides, tv_strides,
                b, h, H, M, N, keys, scale, keep_scale, threshold, origin,
                D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                KEEP, CHANGE, PUSH, BEND, DROPOUT, MIXED, UPCAST, PRECISION,
            )  # fmt: skip
    dq_head = head_ptr(dq_ptr, dq_strides, b, h)
    store_rows(dq_head, dq_strides, first, M, dq * scale, D, BLOCK_M, WIDTH_D, UPCAST)


@triton.jit
def push_add_query_gradient(
    dq, q, tq, do, tdo, lse, rest, mu, surplus, tsurplus, k_head, v_head, tk_head, tv_head,
    key, first, i, k_ptr, tq_ptr, tk_ptr, tv_ptr, do_ptr, tdo_ptr, seed_ptr, offset_ptr,
    data, numbers, k_strides, v_strides, tk_strides, tv_strides,
    b, h, H, M, N, keys, scale, keep_scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, PUSH: tl.constexpr, BEND: tl.constexpr,
    DROPOUT: tl.constexpr, MIXED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M,D] + tds k + ds tk over keys `key`.. before `keys`, still to be scaled."""
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    k = rows_at(k_head, k_strides, key, keys, D, BLOCK_N, WIDTH_D, not MIXED, UPCAST)
    v = rows_at(v_head, v_strides, key, keys, E, BLOCK_N, WIDTH_E, not MIXED, UPCAST)
    tk, tv = k, v
    if tk_ptr is not None:
        tk = rows_at(tk_head, tk_strides, key, keys, D, BLOCK_N, WIDTH_D, not MIXED, UPCAST)
    if tv_ptr is not None:
        tv = rows_at(tv_head, tv_strides, key, keys, E, BLOCK_N, WIDTH_E, not MIXED, UPCAST)
    s, ts = push_dot(q, tq, k, tk, k_ptr, tq_ptr, k_ptr, tk_ptr, BLOCK_M, BLOCK_N, PRECISION)
    dp, tdp = push_dot(do, tdo, v, tv, do_ptr, tdo_ptr, k_ptr, tv_ptr, BLOCK_M, BLOCK_N, PRECISION)
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, first, key, threshold, origin, BLOCK_M, BLOCK_N
        )
        dp, tdp = tl.where(z, dp * keep_scale, 0.0), tl.where(z, tdp * keep_scale, 0.0)
    _, _, ds, tds = push_score_gradient(
        s, ts, dp, tdp, lse, rest, mu, surplus, tsurplus, b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, PUSH, BEND, MIXED, False,
    )  # fmt: skip
    dq = tl.dot(round_to(tds, k_head.dtype.element_ty, UPCAST), k, dq, input_precision=PRECISION)
    if tk_ptr is not None:
        ds = round_to(ds, k_head.dtype.element_ty, UPCAST)
        dq = tl.dot(ds, tk, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def push_key_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr, tq_ptr, tk_ptr, tv_ptr, tdo_ptr,
    tlse_ptr, tdelta_ptr, dk_ptr, dv_ptr, seed_ptr, offset_ptr, lists_ptr, data, numbers,
    q_strides, k_strides, v_strides, do_strides, tq_strides, tk_strides, tv_strides, tdo_strides,
    dk_strides, dv_strides, lists_strides,
    G, GROUP, SPLITS, M, N, TOGETHER, scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr, GROUPED: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, CHANGE: tl.constexpr,
    PUSH: tl.constexpr, BEND: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the tangents of dk [BLOCK_N,D] and dv [BLOCK_N,E], as `backward.key_gradient`.

    What does not move is absent: its pointer is None.
    """
    N = even_length(N, EVEN)
    place, part, b = place_program(tl.cdiv(N, BLOCK_N), G * SPLITS, TOGETHER, LAST_FIRST)
    block = listed_block(place, lists_ptr, lists_strides, LISTED)
    g, split = part // SPLITS, part % SPLITS
    each = tl.cdiv(GROUP, SPLITS)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    first = block * BLOCK_N
    j = (first + tl.arange(0, BLOCK_N))[:, None]
    k = rows_of(k_ptr, k_strides, b, g, first, keys, D, BLOCK_N, WIDTH_D, UPCAST)
    v = rows_of(v_ptr, v_strides, b, g, first, keys, E, BLOCK_N, WIDTH_E, UPCAST)
    tk, tv = k, v
    if tk_ptr is not None:
        tk = rows_of(tk_ptr, tk_strides, b, g, first, keys, D, BLOCK_N, WIDTH_D, UPCAST)
    if tv_ptr is not None:
        tv = rows_of(tv_ptr, tv_strides, b, g, first, keys, E, BLOCK_N, WIDTH_E, UPCAST)
    dk = tl.zeros([BLOCK_N, WIDTH_D], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_E], tl.float32)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, True)
    for r in range(tl.minimum(each, GROUP - split * each) if GROUPED else 1):
        h = g * GROUP + split * each + r
        list_ptr = list_at(lists_ptr, lists_strides, b, h, place)
        tiles = count_tiles(list_ptr, bounds, LISTED)
        q_head = head_ptr(q_ptr, q_strides, b, h)
        tq_head = head_or(tq_ptr, tq_strides, b, h, q_head)
        do_head = head_or(do_ptr, do_strides, b, h, q_head)
        tdo_head = head_or(tdo_ptr, tdo_strides, b, h, q_head)
        row = (tl.cast(b, tl.int64) * (G * GROUP) + h) * M
        for MIXED in tl.static_range(2):  # full tiles, then mixed ones
            for t in range(tiles[MIXED]):
                n = tile_at(t, list_ptr, bounds, tiles[0], LISTED, MIXED)
                dk, dv = push_add_key_gradient(
                    dk, dv, k, v, tk, tv, q_head, tq_head, do_head, tdo_head,
                    lse_ptr + row, delta_ptr + row, rest_ptr, row, tlse_ptr + row, tdelta_ptr + row,
                    n * BLOCK_M, first, j, dk_ptr, dv_ptr, q_ptr, tq_ptr, tk_ptr, tv_ptr, do_ptr,
                    tdo_ptr, seed_ptr, offset_ptr, data, numbers,
                    q_strides, tq_strides, do_strides, tdo_strides,
                    b, h, G * GROUP, M, N, rows, scale, keep_scale, threshold, origin,
                    D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                    KEEP, CHANGE, PUSH, BEND, DROPOUT, MIXED, BLIND > 1 - MIXED, UPCAST, PRECISION,
                )  # fmt: skip
    if dk_ptr is not None:
        dk_head = head_ptr(dk_ptr, dk_strides, b, part)
        store_rows(dk_head, dk_strides, first, N, dk * scale, D, BLOCK_N, WIDTH_D, UPCAST)
    if dv_ptr is not None:
        dv_head = head_ptr(dv_ptr, dv_strides, b, part)
        store_rows(dv_head, dv_strides, first, N, dv, E, BLOCK_N, WIDTH_E, UPCAST)


@triton.jit
def push_add_key_gradient(
    dk, dv, k, v, tk, tv, q_head, tq_head, do_head, tdo_head, lse_row, delta_row, rest_ptr,
    row, mu_row, tdelta_row, query, first, j,
    dk_ptr, dv_ptr, q_ptr, tq_ptr, tk_ptr, tv_ptr, do_ptr, tdo_ptr,
    seed_ptr, offset_ptr, data, numbers, q_strides, tq_strides, do_strides, tdo_strides,
    b, h, H, M, N, rows, scale, keep_scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, PUSH: tl.constexpr, BEND: tl.constexpr,
    DROPOUT: tl.constexpr, MIXED: tl.constexpr, BLIND: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk + tds^T q + ds^T tq, still to be scaled, and dv + (p u z)^T do + (p z)^T tdo."""
    i = (query + tl.arange(0, BLOCK_M))[None, :]
    q = rows_at(q_head, q_strides, query, rows, D, BLOCK_M, WIDTH_D, not MIXED, UPCAST)
    tq = q
    if tq_ptr is not None:
        tq = rows_at(tq_head, tq_strides, query, rows, D, BLOCK_M, WIDTH_D, not MIXED, UPCAST)
    s, ts = push_dot(k, tk, q, tq, q_ptr, tk_ptr, q_ptr, tq_ptr, BLOCK_N, BLOCK_M, PRECISION)
    lse = outweigh(load_statistics(lse_row, query, M, float("-inf"), BLOCK_M, not MIXED))
    mu, tsurplus = load_row_tangents(lse, mu_row, tdelta_row, query, M, BLOCK_M, not MIXED)
    rest = load_rest(rest_ptr, row, query, M, BLOCK_M, not MIXED)[None, :]
    surplus = load_statistics(delta_row, query, M, 0.0, BLOCK_M, not MIXED)[None, :]
    do = live_rows_or(
        do_ptr, do_head, do_strides, query, rows, lse[:, None], q,
        E, BLOCK_M, WIDTH_E, not MIXED, BLIND, UPCAST,
    )  # fmt: skip
    tdo = live_rows_or(
        tdo_ptr, tdo_head, tdo_strides, query, rows, lse[:, None], q,
        E, BLOCK_M, WIDTH_E, not MIXED, BLIND, UPCAST,
    )  # fmt: skip
    dp, tdp = push_dot(v, tv, do, tdo, q_ptr, tv_ptr, do_ptr, tdo_ptr, BLOCK_N, BLOCK_M, PRECISION)
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, query, first, threshold, origin, BLOCK_M, BLOCK_N
        )
        z = tl.trans(z)
        dp, tdp = tl.where(z, dp * keep_scale, 0.0), tl.where(z, tdp * keep_scale, 0.0)
    p, pu, ds, tds = push_score_gradient(
        s, ts, dp, tdp, lse[None, :], rest, mu[None, :], surplus, tsurplus[None, :],
        b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, PUSH, BEND, MIXED, MIXED and CHANGE is not None,
    )  # fmt: skip
    if dv_ptr is not None:
        if DROPOUT:
            p, pu = tl.where(z, p * keep_scale, 0.0), tl.where(z, pu * keep_scale, 0.0)
        if do_ptr is not None:
            pu = round_to(pu, do_head.dtype.element_ty, UPCAST)
            dv = tl.dot(pu, do, dv, input_precision=PRECISION)
        if tdo_ptr is not None:
            p = round_to(p, tdo_head.dtype.element_ty, UPCAST)
            dv = tl.dot(p, tdo, dv, input_precision=PRECISION)
    if dk_ptr is not None:
        tds = round_to(tds, q_head.dtype.element_ty, UPCAST)
        dk = tl.dot(tds, q, dk, input_precision=PRECISION)
        if tq_ptr is not None:
            ds = round_to(ds, q_head.dtype.element_ty, UPCAST)
            dk = tl.dot(ds, tq, dk, input_precision=PRECISION)
    return dk, dv
