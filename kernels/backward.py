"""The backward kernels: delta, then the gradients of q and of k and v, each without atomics.

With p = exp(s - lse) / 2^rest, z the mask of dropout over 1 - rate, and delta = sum_e do o - dlse:
dv = (p z)^T do, dp = (do v^T) z, ds = p (dp - delta) and back through the modifiers,
dq = scale ds k, dk = scale ds^T q. `attn_graph.ir.attention` has the derivation.

In a direction, the tangents of these instead, with a `t` before each tangent:
tdp = (tdo v^T + do tv^T) z, tdelta = sum_e (tdo o + do to) - tdlse, tp and tds as of
kernels/scores.py, tdq = scale (tds k + ds tk), tdk = scale (tds^T q + ds^T tq) and
tdv = (tp z)^T do + (p z)^T tdo. `attn_graph.ir.transforms.tangents` has the derivation.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    SIZES,
    count_parts,
    count_tiles,
    dropout_keeps_tile,
    even_length,
    head_and_part,
    head_ptr,
    line_of,
    live_tile_of,
    numbers_in,
    place_program,
    present_sizes,
    round_to,
    rows_of,
    store_rows,
    tile_at,
    tile_bounds,
    walk_part,
)
from attn_graph.kernels.forward import store_statistic
from attn_graph.kernels.pieces import (
    add_pieces,
    key_pieces,
    multiply_pieces,
    query_pieces,
    scale_ahead,
    scale_pieces,
    store_pieces,
    zero_pieces,
)
from attn_graph.kernels.scores import (
    drop,
    load_rest,
    load_statistics,
    moving_rows,
    outweigh,
    push_dot,
    score_gradient,
)
from attn_graph.kernels.sequences import (
    head_at,
    key_rows,
    length_of,
    line_at,
    list_of,
    pages_of,
    place_rows,
    scale_columns,
    scale_heads,
    sequence_at,
    tiles_within,
    within_pages,
    within_sequence,
)


@triton.jit(do_not_specialize=SIZES)
def delta(
    o_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, to_ptr, tdo_ptr, tdlse_ptr, tdelta_ptr,
    o_strides, do_strides, dlse_strides, to_strides, tdo_strides, tdlse_strides, H, M,
    E: tl.constexpr, WIDTH_E: tl.constexpr, BLOCK_M: tl.constexpr, BLIND: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """o, do [B,H,M,E], dlse [B,H,M] -> delta [B,H,M] float32, C order. do or dlse may be absent.

    In a direction, with to, tdo and tdlse, of which the latter may be absent, also tdelta. BLIND:
    rows may see no key. Their results are 0, whatever the cotangents hold.
    """
    block, h, b = place_program(tl.cdiv(M, BLOCK_M), H, 1, False)
    first, line = block * BLOCK_M, line_of(b, h, H, M)
    total = tl.zeros([BLOCK_M], tl.float32)
    moved = tl.zeros([BLOCK_M], tl.float32)
    if do_ptr is not None or tdo_ptr is not None:
        o = rows_of(o_ptr, o_strides, b, h, first, M, E, BLOCK_M, WIDTH_E, UPCAST)
    if do_ptr is not None:
        do = rows_of(do_ptr, do_strides, b, h, first, M, E, BLOCK_M, WIDTH_E, UPCAST)
        total += tl.sum(weigh_cotangent(o, do, BLIND), 1)
        if to_ptr is not None:
            to = rows_of(to_ptr, to_strides, b, h, first, M, E, BLOCK_M, WIDTH_E, UPCAST)
            moved += tl.sum(weigh_cotangent(to, do, BLIND), 1)
    if tdo_ptr is not None:
        tdo = rows_of(tdo_ptr, tdo_strides, b, h, first, M, E, BLOCK_M, WIDTH_E, UPCAST)
        moved += tl.sum(weigh_cotangent(o, tdo, BLIND), 1)
    total = subtract_numbers(total, dlse_ptr, dlse_strides, b, h, first, M, BLOCK_M)
    moved = subtract_numbers(moved, tdlse_ptr, tdlse_strides, b, h, first, M, BLOCK_M)
    if BLIND:
        lse = load_statistics(lse_ptr + line, first, M, 0.0, BLOCK_M, False)
        total = tl.where(lse == float("-inf"), 0.0, total)
        moved = tl.where(lse == float("-inf"), 0.0, moved)
    store_statistic(delta_ptr + line, total, first, M, BLOCK_M)
    if tdelta_ptr is not None:
        store_statistic(tdelta_ptr + line, moved, first, M, BLOCK_M)


@triton.jit
def subtract_numbers(total, ptr, strides, b, h, first, M, BLOCK_M: tl.constexpr):
    """total less the rows first.. of x[b,h] [M]; total where x is absent."""
    if ptr is not None:
        row = tl.arange(0, BLOCK_M)
        at = head_ptr(ptr, strides, b, h) + (first + row).to(tl.int64) * strides[2]
        total -= tl.load(at, mask=row < M - first, other=0.0)
    return total


@triton.jit
def weigh_cotangent(o, do, BLIND: tl.constexpr):
    """o do in float32. BLIND: 0 where o is, as in rows that see nothing, whatever do holds."""
    do = do.to(tl.float32)
    if BLIND:
        do = tl.where(o == 0, 0.0, do)
    return o.to(tl.float32) * do


@triton.jit(do_not_specialize=SIZES)
def query_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr, dq_ptr, seed_ptr, offset_ptr,
    lists_ptr,
    q_starts_ptr, q_lengths_ptr, kv_starts_ptr, kv_lengths_ptr, pages_ptr,
    q_desc, k_desc, v_desc, do_desc, tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr,
    data, numbers, q_steps, kv_steps, q_strides, k_strides, v_strides, do_strides, dq_strides,
    tq_strides, tk_strides, tv_strides, tdo_strides,
    lists_strides, scales, scale_strides, pages_stride,
    B, H, GROUP, PARTS, M, N, T, T_KEYS, POOL, TOGETHER,
    scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr,
    BATCH: tl.constexpr, PAGE: tl.constexpr, PARTED: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, SEEN: tl.constexpr,
    CHANGE: tl.constexpr,
    BACK: tl.constexpr, PUSH: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dq [BLOCK_M,D] of one head, over all keys that its queries may see, or, PARTED,
    one of PARTS of their tiles; dq then has H * PARTS heads, which `sum_parts` adds up.

    BLIND: whether rows may see no key: 0 no, 1 only by the mask, and so never in a full tile, 2
    by a modifier too. Packed tensors, pages and scales are as those of `forward`, and so are
    tangents: with tlse_ptr dq is the tangent of dq.
    """
    N = even_length(N, EVEN)
    heads = count_parts(H, PARTS, PARTED)
    place, block, head, b, row, M, extent, line = place_rows(
        q_starts_ptr, q_lengths_ptr, q_steps, lists_ptr, lists_strides, B, heads, M, T, TOGETHER,
        BATCH, BLOCK_M, LAST_FIRST, LISTED,
    )  # fmt: skip
    h, part = head_and_part(head, PARTS, PARTED)
    if PARTED:
        line = line_at(q_starts_ptr, b, h, H, row, M, T)
    key, N = length_of(kv_starts_ptr, kv_lengths_ptr, kv_steps, b, T_KEYS, N)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    pages, keys = pages_of(b, M, N, keys, pages_stride, kv_steps[2], data, numbers, SEEN)
    first = block * BLOCK_M
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    q_head = head_at(q_ptr, q_strides, b, h, q_starts_ptr, row, 0)
    q = query_pieces(
        q_desc, q_head, q_strides, b, h, first, rows, D, BLOCK_M, WIDTH_D, False, UPCAST
    )
    lse = outweigh(load_statistics(lse_ptr + line, first, M, float("-inf"), BLOCK_M, False))
    lse = lse[:, None]
    rest = load_rest(rest_ptr, line, first, M, BLOCK_M, False)[:, None]
    surplus = load_statistics(delta_ptr + line, first, M, 0.0, BLOCK_M, False)[:, None]
    do = None
    if do_ptr is not None:
        do_head = head_at(do_ptr, do_strides, b, h, q_starts_ptr, row, 0)
        do = live_tile_of(
            do_desc, do_head, do_strides, b, h, first, rows, lse,
            E, BLOCK_M, WIDTH_E, False, BLIND > 0, UPCAST,
        )  # fmt: skip
    along = None
    if tlse_ptr is not None:
        along = (
            moving_rows(
                tq_ptr, tq_strides, b, h, first, rows, None,
                D, BLOCK_M, WIDTH_D, False, False, UPCAST,
            ),
            moving_rows(
                tdo_ptr, tdo_strides, b, h, first, rows, lse,
                E, BLOCK_M, WIDTH_E, False, BLIND > 0, UPCAST,
            ),
            tk_ptr, tk_strides, tv_ptr, tv_strides,
            load_statistics(tlse_ptr + line, first, M, 0.0, BLOCK_M, False)[:, None],
            load_statistics(tdelta_ptr + line, first, M, 0.0, BLOCK_M, False)[:, None],
        )  # fmt: skip
    k_head = head_at(k_ptr, k_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    k_scale, v_scale = scale_heads(scales, scale_strides, b, h // GROUP, kv_starts_ptr, key, PAGE)
    dq = zero_pieces(BLOCK_M, WIDTH_D)

    list_ptr = list_of(lists_ptr, lists_strides, b, h, place, q_starts_ptr, first, M)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, False)
    full, mixed = count_tiles(list_ptr, bounds, LISTED)
    full, mixed = tiles_within(full, mixed, q_starts_ptr, first, M, LISTED)
    begins, ends = walk_part(part, PARTS, full, mixed, PARTED)
    for MIXED in tl.static_range(2):  # full tiles, then mixed ones
        for t in range(begins[MIXED], ends[MIXED]):
            n = tile_at(t, list_ptr, bounds, full, LISTED, MIXED)
            dq = add_query_gradient(
                dq, q, do, lse, rest, surplus, along, k_head, v_head, k_desc, v_desc, n * BLOCK_N,
                first, i, seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides,
                v_strides, k_scale, v_scale, b, h, GROUP, H, M, N, keys, POOL, scale, keep_scale,
                threshold, origin, D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                PAGE, KEEP, CHANGE, BACK, PUSH, DROPOUT, MIXED, UPCAST, PRECISION,
                K_BLOCKS, V_BLOCKS,
            )  # fmt: skip
    dq_head = head_at(dq_ptr, dq_strides, b, head, q_starts_ptr, row, 0)
    store_pieces(
        dq_head, dq_strides, first, extent, dq, scale, q_starts_ptr, M, D, BLOCK_M, WIDTH_D, UPCAST
    )


@triton.jit
def add_query_gradient(
    dq, q, do, lse, rest, surplus, along, k_head, v_head, k_desc, v_desc, key, first, i,
    seed_ptr, offset_ptr, pages_ptr, pages, data, numbers, k_strides, v_strides,
    k_scale, v_scale, b, h, GROUP, H, M, N, keys, POOL, scale, keep_scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, BACK: tl.constexpr, PUSH: tl.constexpr,
    DROPOUT: tl.constexpr, MIXED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr,
):  # fmt: skip
    """dq [BLOCK_M,D] + ds k over keys `key`.. before `keys`, still to be scaled.

    k_scale, v_scale: as of `attend`; k is multiplied by its scales before ds weighs it, as v is
    there. along: as of `attend`, with tdo and the rows of mu and tdelta; then dq + tds k + ds tk.
    """
    j = (key + tl.arange(0, BLOCK_N))[None, :]
    g = h // GROUP
    k = key_pieces(
        k_desc, k_head, k_strides, pages_ptr, pages, b, g, key, keys, POOL,
        D // K_BLOCKS[2], BLOCK_N, WIDTH_D // K_BLOCKS[2], not MIXED, PAGE, UPCAST,
    )  # fmt: skip
    tk = None
    if along is not None:
        tq, tdo, tk_ptr, tk_strides, tv_ptr, tv_strides, mu, tsurplus = along
        tk = moving_rows(
            tk_ptr, tk_strides, b, g, key, keys, None,
            D, BLOCK_N, WIDTH_D, not MIXED, False, UPCAST,
        )  # fmt: skip
        tv = moving_rows(
            tv_ptr, tv_strides, b, g, key, keys, None,
            E, BLOCK_N, WIDTH_E, not MIXED, False, UPCAST,
        )  # fmt: skip
    k, k_rest = scale_ahead(
        k, k_scale, q[0], pages_ptr, pages, b, g, key, keys, POOL,
        D, BLOCK_N, not MIXED, PAGE, K_BLOCKS,
    )  # fmt: skip
    s = scale_columns(
        multiply_pieces(q, k, PRECISION), k_rest, pages_ptr, pages, b, g, key, keys, POOL,
        BLOCK_N, not MIXED, PAGE, K_BLOCKS,
    )  # fmt: skip
    dp = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if do is not None or along is not None:
        v = key_rows(
            v_desc, v_head, v_strides, pages_ptr, pages, b, g, key, keys, POOL,
            E // V_BLOCKS[2], BLOCK_N, WIDTH_E // V_BLOCKS[2], not MIXED, PAGE, UPCAST,
        )  # fmt: skip
    if do is not None:
        values, v_scale = scale_ahead(
            (v,), v_scale, do, pages_ptr, pages, b, g, key, keys, POOL,
            E, BLOCK_N, not MIXED, PAGE, V_BLOCKS,
        )  # fmt: skip
        v = values[0]
        dp = scale_columns(
            tl.dot(do, tl.trans(numbers_in(v, do.dtype)), input_precision=PRECISION),
            v_scale, pages_ptr, pages, b, g, key, keys, POOL, BLOCK_N, not MIXED, PAGE, V_BLOCKS,
        )  # fmt: skip
    z = None
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, first, key, threshold, origin, BLOCK_M, BLOCK_N
        )
    dp = drop(dp, z, keep_scale)
    ahead = None
    if along is not None:
        ts = push_dot(q[0], tq, k[0], tk, BLOCK_M, BLOCK_N, PRECISION)
        tdp = drop(push_dot(do, tdo, v, tv, BLOCK_M, BLOCK_N, PRECISION), z, keep_scale)
        ahead = ts, tdp, mu, tsurplus
    _, ds, _, tds = score_gradient(
        s, dp, lse, rest, surplus, ahead, b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, BACK, PUSH, MIXED, False,
    )  # fmt: skip
    k = scale_pieces(
        k, k_rest, q[0], pages_ptr, pages, b, g, key, keys, POOL,
        D, BLOCK_N, not MIXED, PAGE, K_BLOCKS,
    )  # fmt: skip
    tds = round_to(tds, k_head.dtype.element_ty if len(k_scale) == 0 else k[0].dtype, UPCAST)
    dq = add_pieces(dq, tds, k, PRECISION)
    if tk is not None:
        dq = add_pieces(dq, round_to(ds, k_head.dtype.element_ty, UPCAST), (tk,), PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def key_gradient(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, rest_ptr, dk_ptr, dv_ptr,
    seed_ptr, offset_ptr, lists_ptr, q_starts_ptr, q_lengths_ptr, kv_starts_ptr, kv_lengths_ptr,
    pages_ptr, q_desc, k_desc, v_desc, do_desc,
    tq_ptr, tk_ptr, tv_ptr, tdo_ptr, tlse_ptr, tdelta_ptr, data, numbers, q_steps, kv_steps,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, lists_strides,
    tq_strides, tk_strides, tv_strides, tdo_strides,
    pages_stride, B, G, GROUP, SPLITS, PARTS, M, N, T, T_KEYS, POOL, TOGETHER,
    scale, keep_scale, threshold, origin,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAST_FIRST: tl.constexpr, BATCH: tl.constexpr,
    PAGE: tl.constexpr, GROUPED: tl.constexpr, PARTED: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, SEEN: tl.constexpr,
    CHANGE: tl.constexpr,
    BACK: tl.constexpr, PUSH: tl.constexpr, DROPOUT: tl.constexpr, LISTED: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dk [BLOCK_N,D] and dv [BLOCK_N,E] from a part of the query heads of a k/v head.

    Sums over these heads and all queries that may see its keys, or, PARTED, one of PARTS of their
    tiles. SPLITS: how many programs share the GROUP query heads; dk and dv then have
    G * SPLITS * PARTS heads, which `sum_parts` adds up. Tiles are transposed, [BLOCK_N,BLOCK_M], so
    that weights enter the products untransposed. Without dk_ptr or dv_ptr only the other is
    computed, for tiles where the registers cannot hold both sums. GROUPED: whether GROUP is not 1;
    a loop less takes fewer registers. Packed tensors and pages are as those of `forward`; dk and dv
    of pages lie as keys in one piece do, for `sum_pages` to add up, and past the keys of an entry
    nothing is written. Tangents are as those of `query_gradient`.
    """
    N = even_length(N, EVEN)
    sums = count_parts(SPLITS, PARTS, PARTED)
    place, block, part, b, key, N, extent, _ = place_rows(
        kv_starts_ptr, kv_lengths_ptr, kv_steps, lists_ptr, lists_strides, B, G * sums, N, T_KEYS,
        TOGETHER, BATCH, BLOCK_N, LAST_FIRST, LISTED,
    )  # fmt: skip
    N, extent = within_pages(kv_lengths_ptr, kv_steps, b, N, extent, PAGE)
    row, line, length = 0, line_of(b, 0, G * GROUP, M), M
    if q_starts_ptr is not None:
        row, M = sequence_at(q_starts_ptr, q_lengths_ptr, q_steps, b, T, M)
        line, length = tl.cast(row, tl.int64), T
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    pages, keys = pages_of(b, M, N, keys, pages_stride, kv_steps[2], data, numbers, SEEN)
    g = part // sums
    split, piece = head_and_part(part % sums, PARTS, PARTED)
    each = tl.cdiv(GROUP, SPLITS)
    first = block * BLOCK_N
    j = (first + tl.arange(0, BLOCK_N))[:, None]
    k_head = head_at(k_ptr, k_strides, b, g, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, g, kv_starts_ptr, key, PAGE)
    k = key_pieces(
        k_desc, k_head, k_strides, pages_ptr, pages, b, g, first, keys, POOL,
        D, BLOCK_N, WIDTH_D, False, PAGE, UPCAST,
    )  # fmt: skip
    v = key_rows(
        v_desc, v_head, v_strides, pages_ptr, pages, b, g, first, keys, POOL,
        E, BLOCK_N, WIDTH_E, False, PAGE, UPCAST,
    )  # fmt: skip
    tk = moving_rows(
        tk_ptr, tk_strides, b, g, first, keys, None, D, BLOCK_N, WIDTH_D, False, False, UPCAST
    )
    tv = moving_rows(
        tv_ptr, tv_strides, b, g, first, keys, None, E, BLOCK_N, WIDTH_E, False, False, UPCAST
    )
    dk = zero_pieces(BLOCK_N, WIDTH_D)
    dv = tl.zeros([BLOCK_N, WIDTH_E], tl.float32)
    bounds = tile_bounds(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, True)
    for r in range(tl.minimum(each, GROUP - split * each) if GROUPED else 1):
        h = g * GROUP + split * each + r
        list_ptr = list_of(lists_ptr, lists_strides, b, h, place, kv_starts_ptr, first, N)
        full, mixed = count_tiles(list_ptr, bounds, LISTED)
        full, mixed = tiles_within(full, mixed, kv_starts_ptr, first, N, LISTED)
        q_head = head_at(q_ptr, q_strides, b, h, q_starts_ptr, row, 0)
        do_head = None
        if do_ptr is not None:
            do_head = head_at(do_ptr, do_strides, b, h, q_starts_ptr, row, 0)
        at = line + tl.cast(h, tl.int64) * length
        along = None
        if tlse_ptr is not None:
            along = (
                tk, tv, tq_ptr, tq_strides, tdo_ptr, tdo_strides, tlse_ptr + at, tdelta_ptr + at,
            )  # fmt: skip
        begins, ends = walk_part(piece, PARTS, full, mixed, PARTED)
        for MIXED in tl.static_range(2):  # full tiles, then mixed ones
            for t in range(begins[MIXED], ends[MIXED]):
                n = tile_at(t, list_ptr, bounds, full, LISTED, MIXED)
                dk, dv = add_key_gradient(
                    dk, dv, k, v, q_head, do_head, along, q_desc, do_desc, lse_ptr + at,
                    delta_ptr + at, rest_ptr, at, n * BLOCK_M, first, j, dk_ptr, dv_ptr, seed_ptr,
                    offset_ptr, data, numbers, q_strides, do_strides, b, h, G * GROUP, M, N, rows,
                    scale, keep_scale, threshold, origin, D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                    KEEP, CHANGE, BACK, PUSH, DROPOUT, MIXED, BLIND > 1 - MIXED, UPCAST, PRECISION,
                )  # fmt: skip
    if dk_ptr is not None:
        dk_head = head_at(dk_ptr, dk_strides, b, part, kv_starts_ptr, key, 0)
        store_pieces(
            dk_head, dk_strides, first, extent, dk, scale, kv_starts_ptr, N,
            D, BLOCK_N, WIDTH_D, UPCAST,
        )  # fmt: skip
    if dv_ptr is not None:
        dv = within_sequence(dv, kv_starts_ptr, first, N, 0.0, BLOCK_N)
        dv_head = head_at(dv_ptr, dv_strides, b, part, kv_starts_ptr, key, 0)
        store_rows(dv_head, dv_strides, first, extent, dv, E, BLOCK_N, WIDTH_E, UPCAST)


@triton.jit
def add_key_gradient(
    dk, dv, k, v, q_head, do_head, along, q_desc, do_desc, lse_row, delta_row, rest_ptr, at,
    query, first, j, dk_ptr, dv_ptr, seed_ptr, offset_ptr, data, numbers,
    q_strides, do_strides,
    b, h, H, M, N, rows, scale, keep_scale, threshold, origin,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, BACK: tl.constexpr, PUSH: tl.constexpr,
    DROPOUT: tl.constexpr, MIXED: tl.constexpr, BLIND: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk + ds^T q, still to be scaled, and dv + (p z)^T do, of queries `query`.. before `rows`.

    along: tk, tv, then tq and tdo by their pointers and strides, and where the lines of mu and
    tdelta begin; then dk + tds^T q + ds^T tq and dv + (tp z)^T do + (p z)^T tdo.
    """
    i = (query + tl.arange(0, BLOCK_M))[None, :]
    q = query_pieces(
        q_desc, q_head, q_strides, b, h, query, rows, D, BLOCK_M, WIDTH_D, not MIXED, UPCAST
    )
    tq = None
    if along is not None:
        tk, tv, tq_ptr, tq_strides, tdo_ptr, tdo_strides, mu_row, tdelta_row = along
        tq = moving_rows(
            tq_ptr, tq_strides, b, h, query, rows, None,
            D, BLOCK_M, WIDTH_D, not MIXED, False, UPCAST,
        )  # fmt: skip
    s = multiply_pieces(k, q, PRECISION)
    lse = outweigh(load_statistics(lse_row, query, M, float("-inf"), BLOCK_M, not MIXED))
    rest = load_rest(rest_ptr, at, query, M, BLOCK_M, not MIXED)[None, :]
    surplus = load_statistics(delta_row, query, M, 0.0, BLOCK_M, not MIXED)[None, :]
    do = None
    dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if do_head is not None:
        do = live_tile_of(
            do_desc, do_head, do_strides, b, h, query, rows, lse[:, None],
            E, BLOCK_M, WIDTH_E, not MIXED, BLIND, UPCAST,
        )  # fmt: skip
        if dk_ptr is not None:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    z = None
    if DROPOUT:
        z = dropout_keeps_tile(
            seed_ptr, offset_ptr, b, h, H, query, first, threshold, origin, BLOCK_M, BLOCK_N
        )
        z = tl.trans(z)
    dp = drop(dp, z, keep_scale)
    tdo, ahead = None, None
    if along is not None:
        tdo = moving_rows(
            tdo_ptr, tdo_strides, b, h, query, rows, lse[:, None],
            E, BLOCK_M, WIDTH_E, not MIXED, BLIND, UPCAST,
        )  # fmt: skip
        ts = push_dot(k[0], tk, q[0], tq, BLOCK_N, BLOCK_M, PRECISION)
        tdp = drop(push_dot(v, tv, do, tdo, BLOCK_N, BLOCK_M, PRECISION), z, keep_scale)
        mu = load_statistics(mu_row, query, M, 0.0, BLOCK_M, not MIXED)[None, :]
        tsurplus = load_statistics(tdelta_row, query, M, 0.0, BLOCK_M, not MIXED)[None, :]
        ahead = ts, tdp, mu, tsurplus
    p, ds, tp, tds = score_gradient(
        s, dp, lse[None, :], rest, surplus, ahead, b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, BACK, PUSH, MIXED, MIXED and CHANGE is not None,
    )  # fmt: skip
    if do is not None and dv_ptr is not None:
        tp = round_to(drop(tp, z, keep_scale), do_head.dtype.element_ty, UPCAST)
        dv = tl.dot(tp, do, dv, input_precision=PRECISION)
    if tdo is not None and dv_ptr is not None:
        p = round_to(drop(p, z, keep_scale), tdo_ptr.dtype.element_ty, UPCAST)
        dv = tl.dot(p, tdo, dv, input_precision=PRECISION)
    if dk_ptr is not None:
        dk = add_pieces(dk, round_to(tds, q_head.dtype.element_ty, UPCAST), q, PRECISION)
    if tq is not None and dk_ptr is not None:
        dk = add_pieces(dk, round_to(ds, q_head.dtype.element_ty, UPCAST), (tq,), PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=("G", "SUMMANDS", "N"))
def sum_parts(
    parts_ptr, out_ptr, parts_strides, out_strides, G, SUMMANDS, N,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """parts [B,G*SUMMANDS,N,SIZE] float32 -> out [B,G,N,SIZE]: sums of SUMMANDS heads, in order."""
    block, g, b = place_program(tl.cdiv(N, BLOCK_N), G, 1, False)
    first = block * BLOCK_N
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for n in range(SUMMANDS):
        part = g * SUMMANDS + n
        total += rows_of(parts_ptr, parts_strides, b, part, first, N, SIZE, BLOCK_N, WIDTH, UPCAST)
    out_head = head_ptr(out_ptr, out_strides, b, g)
    store_rows(out_head, out_strides, first, N, total, SIZE, BLOCK_N, WIDTH, UPCAST)
