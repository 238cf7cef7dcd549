"""The forward of few queries: programs share the keys of one head, and another kernel merges.

Each reads a part of the keys once for all query heads sharing them. The results of the parts are
merged by their lse, in a fixed order, equal to the order of a longer cache. So are the parts of
long blocks from kernels/forward.py. Queries may be packed, with few of them in each sequence.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    LN2,
    SIZES,
    count_tiles,
    even_length,
    head_ptr,
    in_scores,
    key_tiles,
    line_of,
    natural,
    place_program,
    present_sizes,
    raise_to,
    store_rows,
    tile_at,
)
from attn_graph.kernels.forward import attend, divide_sums, store_part, store_statistic
from attn_graph.kernels.pieces import pieces_at
from attn_graph.kernels.sequences import (
    common_scales,
    few_rows_of_entry,
    head_at,
    length_of,
    line_at,
    pages_of,
    scale_heads,
    sequence_extent,
)


@triton.jit(do_not_specialize=SIZES)
def split_forward(
    q_ptr, k_ptr, v_ptr, parts_ptr, parts_lse_ptr, q_starts_ptr, q_lengths_ptr,
    kv_starts_ptr, kv_lengths_ptr, pages_ptr, data, numbers, q_steps, kv_steps,
    q_strides, k_strides, v_strides, scales, scale_strides, pages_stride,
    B, H, G, GROUP, SPLITS, EACH, M, N, T, T_KEYS, POOL, scale,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr, COMMON: tl.constexpr,
    V_IN_K: tl.constexpr, SHORT: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, ENDS: tl.constexpr, SEEN: tl.constexpr,
    CHANGE: tl.constexpr,
    FOLD: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: rows of one key/value head against a part of the keys that they may see.

    Rows are the M queries of the first of the GROUP heads that share k and v, then of the next;
    M <= BLOCK_M. SPLITS parts have EACH tiles of keys at least. parts [B,H*SPLITS,M,E] float32 and
    parts_lse [B,H*SPLITS,M,2], see `store_part`; a row that sees nothing of a part has no part.

    With q_starts_ptr q is packed, and so are parts [H*SPLITS,T,E] and parts_lse [H*SPLITS,T,2]. M
    is the most of a sequence then; blocks beyond its own rows are empty. SHORT: sequences with an
    extent above M have no parts, and the others M rows each, [H*SPLITS,B*M,E].
    """
    N = even_length(N, EVEN)
    blocks = tl.cdiv(GROUP * M, BLOCK_M)
    pid = tl.program_id(0)
    block, part, head = pid % blocks, pid // blocks % SPLITS, pid // blocks // SPLITS
    g, b = head % G, head // G
    first, M, place, length, begin, stop = few_rows_of_entry(
        q_starts_ptr, q_lengths_ptr, q_steps, b, B, T, M, SHORT
    )
    if q_starts_ptr is not None:
        for n in range(g * GROUP, tl.where(block == 0, (g + 1) * GROUP, 0)):
            line_ptr = parts_lse_ptr + 2 * line_of(0, n * SPLITS + part, H * SPLITS, length)
            store_absent(line_ptr, begin, place, BLOCK_M)
            store_absent(line_ptr, place + M, stop, BLOCK_M)
    row, each = block * BLOCK_M + tl.arange(0, BLOCK_M), M
    if q_starts_ptr is not None:
        each = tl.maximum(M, 1)
    there = row < GROUP * M
    h, i = (g * GROUP + tl.minimum(row // each, GROUP - 1))[:, None], (row % each)[:, None]
    at = head_at(q_ptr, q_strides, b, 0, q_starts_ptr, first, 0)
    at += h.to(tl.int64) * q_strides[1] + i * q_strides[2]
    key, N = length_of(kv_starts_ptr, kv_lengths_ptr, kv_steps, b, T_KEYS, N)
    rows, keys = present_sizes(b, M, N, data, numbers, ENDS)
    read = there[:, None] & (i < rows)
    q = pieces_at(at, q_strides[3], read, D, WIDTH_D, UPCAST)
    pages, keys = pages_of(b, M, N, keys, pages_stride, kv_steps[2], data, numbers, SEEN)
    k_head = head_at(k_ptr, k_strides, b, g, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, g, kv_starts_ptr, key, PAGE)
    k_scale, v_scale = scale_heads(scales, scale_strides, b, g, kv_starts_ptr, key, PAGE)
    q, k_scale, v_scale, o_scale = common_scales(
        q, k_scale, v_scale, COMMON, q_ptr.dtype.element_ty
    )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 1], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH_E], tl.float32)

    own = M
    if q_starts_ptr is not None:
        own = tl.where(block * BLOCK_M < GROUP * M, M, 0)
    bounds = part_of_tiles(
        part, SPLITS, EACH, b, own, N, data, numbers, KEEP, STRIP, SEEN, BLOCK_M, BLOCK_N
    )
    tiles = count_tiles(None, bounds, False)
    for MIXED in tl.static_range(2):  # full tiles, then mixed ones
        for t in range(tiles[MIXED]):
            n = tile_at(t, None, bounds, 0, False, MIXED)
            acc, total, m, _ = attend(
                acc, total, m, (), q, k_head, v_head, None, None, None, n * BLOCK_N, 0, i,
                None, None, pages_ptr, pages, data, numbers, k_strides, v_strides,
                k_scale, v_scale, b, h, 1, H, M, N, keys, POOL, scale, 0, None,
                D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
                PAGE, 1, V_IN_K, KEEP, CHANGE, None, FOLD, False, MIXED, UPCAST, PRECISION,
                K_BLOCKS, V_BLOCKS,
            )  # fmt: skip

    total = tl.sum(total, 1)
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    line = line_at(q_starts_ptr, b, h * SPLITS + part, H * SPLITS, place, M, length) + i
    store_part(parts_lse_ptr, line, m[:, None], total[:, None], blind[:, None], there[:, None])
    out = tl.arange(0, WIDTH_E)[None, :]
    saw = (there & (blind == 0))[:, None] & (out < E)
    acc = divide_sums(acc, total, blind, o_scale, COMMON)
    tl.store(parts_ptr + line * E + out, acc, mask=saw)


@triton.jit
def store_absent(line_ptr, begin, end, ROWS: tl.constexpr):
    """Store for the rows of no sequence from `begin` to `end`, in the line of a part, -inf as the
    maximum and as the sum's logarithm, which is finite of each row that there is."""
    for n in range(begin, end, ROWS):
        row = n + tl.arange(0, ROWS)
        tl.store(line_ptr + 2 * row, float("-inf"), mask=row < end)
        tl.store(line_ptr + 2 * row + 1, float("-inf"), mask=row < end)


@triton.jit
def part_of_tiles(
    part, SPLITS, EACH, b, M, N, data, numbers,
    KEEP: tl.constexpr, STRIP: tl.constexpr, SEEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """begin, full_start, full_stop, end: the tiles of a part; a mask that is not a strip has no
    full ones. Parts count from the first tile that a row sees, whatever a cache's capacity is."""
    start, full_start, full_stop, stop = key_tiles(
        0, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N
    )
    if KEEP is not None and STRIP is None and SEEN is not None:
        first, end_key = SEEN(b, M, N, data, numbers)
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(end_key, 0), BLOCK_N)).to(tl.int32)
        start = tl.minimum(first // BLOCK_N, stop).to(tl.int32)
    if KEEP is not None and STRIP is None:
        full_start, full_stop = start, start
    each = tl.maximum(EACH, tl.cdiv(stop - start, SPLITS))
    begin = tl.minimum(start + part * each, stop)
    end = tl.minimum(begin + each, stop)
    full_start = tl.minimum(tl.maximum(full_start, begin), end)
    return begin, full_start, tl.minimum(tl.maximum(full_stop, full_start), end), end


@triton.jit(do_not_specialize=("sinks_stride", *SIZES))
def merge_parts(
    parts_ptr, parts_lse_ptr, o_ptr, lse_ptr, sinks_ptr, q_starts_ptr, o_strides, q_steps,
    sinks_stride, H, PARTS, M, T,
    E: tl.constexpr, WIDTH_E: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    SHORT: tl.constexpr, FOLD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of o [B,H,M,E] and of lse [B,H,M] from their parts, in order.

    parts [B,H*PARTS,M,E] float32, and of each its maximum and log2 of its sum [B,H*PARTS,M,2], of
    scores as FOLD says; the maximum is -inf where a row saw nothing of a part. AT_ONCE parts are
    merged at a time. lse is in C order, and not stored where lse_ptr is None. The sink of the head
    enters here, where sinks_ptr is not None.

    SHORT: parts have as many rows of each sequence, and o has T rows; those of a sequence with an
    extent up to SHORT are merged.
    """
    block, h, b = place_program(tl.cdiv(M, ROWS), H, 1, False)
    first = block * ROWS
    own, stop, past, length = first, M, M, M
    if SHORT:
        start, extent = sequence_extent(q_starts_ptr, q_steps, first // SHORT, T)
        extent = tl.where(extent > SHORT, 0, extent)
        own, past, length = start + first % SHORT, start + extent, T
        stop = first - first % SHORT + extent
    line = line_of(b, h, H, M)
    slot = tl.arange(0, ROWS * AT_ONCE)  # the parts of a row, then those of the next
    i, one = first + slot // AT_ONCE, slot % AT_ONCE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = in_scores(tl.load(sinks_ptr + h * sinks_stride).to(tl.float32), FOLD)
        m = tl.maximum(m, sink)
    for n in range(0, PARTS, AT_ONCE):
        most, _, _ = load_part(parts_lse_ptr, n + one, PARTS, line, i, M, stop)
        m = tl.maximum(m, tl.max(tl.reshape(most, (ROWS, AT_ONCE)), 1))
    safe = tl.where(m == float("-inf"), 0.0, m)
    each = tl.reshape(tl.broadcast_to(safe[:, None], (ROWS, AT_ONCE)), (ROWS * AT_ONCE,))
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH_E], tl.float32)
    col = tl.arange(0, WIDTH_E)[None, :]
    for n in range(0, PARTS, AT_ONCE):
        most, size, at = load_part(parts_lse_ptr, n + one, PARTS, line, i, M, stop)
        # Products are chosen before they are added: fused with a sum they would not be rounded, so
        # that warps which hold one row, and add in another order, would differ in the last bit.
        saw = most != float("-inf")
        weight = tl.where(saw, raise_to(most - each, FOLD) * tl.exp2(size), 0.0)
        kept = saw[:, None] & (col < E)
        part = tl.load(parts_ptr + at[:, None] * E + col, mask=kept, other=0.0)
        part = tl.where(kept, part * weight[:, None], 0.0)
        acc += tl.sum(tl.reshape(part, (ROWS, AT_ONCE, WIDTH_E)), 1)
        total += tl.sum(tl.reshape(weight, (ROWS, AT_ONCE)), 1)
    if sinks_ptr is not None:  # but to the rows of no sequence
        row = first + tl.arange(0, ROWS)
        _, size, _ = load_part(parts_lse_ptr, 0, PARTS, line, row, M, stop)
        total += tl.where(size == float("-inf"), 0.0, raise_to(sink - safe, FOLD))
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    o_head = head_ptr(o_ptr, o_strides, b, h)
    store_rows(o_head, o_strides, own, past, acc / total[:, None], E, ROWS, WIDTH_E, UPCAST)
    if lse_ptr is not None:
        lse = tl.where(blind, float("-inf"), natural(safe, FOLD) + tl.log2(total) * LN2)
        store_statistic(lse_ptr + line_of(b, h, H, length), lse, own, past, ROWS)


@triton.jit
def load_part(ptr, n, PARTS, line, i, M, stop):
    """What `store_part` stored of rows i in parts n, and where each lies; -inf and 0 from `stop`
    on and past the last part."""
    at = line * PARTS + tl.cast(n, tl.int64) * M + i
    inside = (n < PARTS) & (i < stop)
    most = tl.load(ptr + 2 * at, mask=inside, other=float("-inf"))
    return most, tl.load(ptr + 2 * at + 1, mask=inside, other=0.0), at
