"""The forward of few queries: programs share the keys of one head, and another kernel merges.

Each reads a part of the keys once for all query heads that share them. What the parts give is
merged by their lse, in a fixed order, which is that of a longer cache too.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    LN2,
    LOG2E,
    SIZES,
    even_length,
    head_ptr,
    key_tiles,
    mixed_tile,
    round_to,
    strip_of,
)
from attn_graph.kernels.forward import attend
from attn_graph.kernels.sequences import head_at, length_of

AT_ONCE: tl.constexpr = tl.constexpr(16)  # parts that are merged at a time, however many there are


@triton.jit(do_not_specialize=SIZES)
def split_forward(
    q_ptr, k_ptr, v_ptr, parts_ptr, parts_lse_ptr, kv_starts_ptr, kv_lengths_ptr, pages_ptr,
    data, numbers, q_strides, k_strides, v_strides, pages_stride,
    B, H, G, GROUP, SPLITS, EACH, M, N, T_KEYS, POOL, scale,
    EVEN: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    KEEP: tl.constexpr, STRIP: tl.constexpr, CHANGE: tl.constexpr, FOLD: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: rows of one key/value head against a part of the keys that they may see.

    Rows are the M queries of the first of the GROUP heads that share k and v, then of the next;
    M <= BLOCK_M. SPLITS parts have EACH tiles of keys at least. parts [SPLITS,B,H,M,E] float32 and
    parts_lse [SPLITS,B,H,M] in base 2; a row that sees nothing of a part has lse -inf and no part.
    """
    N = even_length(N, EVEN)
    blocks = tl.cdiv(GROUP * M, BLOCK_M)
    pid = tl.program_id(0)
    block, part, head = pid % blocks, pid // blocks % SPLITS, pid // blocks // SPLITS
    g, b = head % G, head // G
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < GROUP * M
    h, i = (g * GROUP + tl.minimum(row // M, GROUP - 1))[:, None], (row % M)[:, None]
    col = tl.arange(0, WIDTH_D)[None, :]
    at = head_ptr(q_ptr, q_strides, b, 0) + h.to(tl.int64) * q_strides[1] + i * q_strides[2]
    q = tl.load(at + col * q_strides[3], mask=there[:, None] & (col < D), other=0.0)
    if UPCAST and q_ptr.dtype.element_ty == tl.bfloat16:
        q = q.to(tl.float32)
    key, N = length_of(kv_starts_ptr, kv_lengths_ptr, b, T_KEYS, N)
    pages = tl.cast(b, tl.int64) * pages_stride
    k_head = head_at(k_ptr, k_strides, b, g, kv_starts_ptr, key, PAGE)
    v_head = head_at(v_ptr, v_strides, b, g, kv_starts_ptr, key, PAGE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 1], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH_E], tl.float32)

    begin, full_start, full_stop, end = part_of_tiles(
        part, SPLITS, EACH, b, M, N, data, numbers, KEEP, STRIP, BLOCK_M, BLOCK_N
    )
    for n in range(full_start, full_stop):
        acc, total, m = attend(
            acc, total, m, q, k_head, v_head, None, None, n * BLOCK_N, 0, i,
            None, None, pages_ptr, pages, data, numbers, k_strides, v_strides,
            b, h, 1, H, M, N, POOL, scale, 0, None, D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
            PAGE, 1, KEEP, CHANGE, FOLD, False, False, UPCAST, PRECISION,
        )  # fmt: skip
    # What no row sees is not read: it may be memory that was never written.
    _, _, keys, _ = strip_of(b, M, N, data, numbers, STRIP)
    for t in range(end - begin - (full_stop - full_start)):
        n = mixed_tile(t, None, begin, full_start, full_stop, 0, False)
        acc, total, m = attend(
            acc, total, m, q, k_head, v_head, None, None, n * BLOCK_N, 0, i,
            None, None, pages_ptr, pages, data, numbers, k_strides, v_strides,
            b, h, 1, H, M, tl.minimum(keys, N), POOL, scale, 0, None,
            D, E, WIDTH_D, WIDTH_E, BLOCK_M, BLOCK_N,
            PAGE, 1, KEEP, CHANGE, FOLD, False, True, UPCAST, PRECISION,
        )  # fmt: skip

    total = tl.sum(total, 1)
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    line = ((tl.cast(part, tl.int64) * B + b) * H + h) * M + i
    lse = tl.where(blind, float("-inf"), m + tl.log2(total))[:, None]
    tl.store(parts_lse_ptr + line, lse, mask=there[:, None])
    out = tl.arange(0, WIDTH_E)[None, :]
    saw = (there & (blind == 0))[:, None] & (out < E)
    tl.store(parts_ptr + line * E + out, acc * (1 / total)[:, None], mask=saw)


@triton.jit
def part_of_tiles(
    part, SPLITS, EACH, b, M, N, data, numbers,
    KEEP: tl.constexpr, STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """begin, full_start, full_stop, end: the tiles of a part; a mask that is no strip has no full
    ones. Parts count from the first tile that a row sees, so that a cache's capacity is nothing to
    them."""
    start, full_start, full_stop, stop = key_tiles(
        0, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N
    )
    if KEEP is not None and STRIP is None:
        full_start, full_stop = start, start
    each = tl.maximum(EACH, tl.cdiv(stop - start, SPLITS))
    begin = tl.minimum(start + part * each, stop)
    end = tl.minimum(begin + each, stop)
    full_start = tl.minimum(tl.maximum(full_start, begin), end)
    return begin, full_start, tl.minimum(tl.maximum(full_stop, full_start), end), end


@triton.jit(do_not_specialize=("sinks_stride", *SIZES))
def merge_parts(
    parts_ptr, parts_lse_ptr, o_ptr, lse_ptr, sinks_ptr, o_strides, sinks_stride, H, SPLITS, M,
    E: tl.constexpr, WIDTH_E: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: a row of o [B,H,M,E] and of lse [B,H,M] from its parts; see `split_forward`.

    lse is in C order, and not stored where lse_ptr is None. The sink of the row's head enters here.
    """
    line, lines = tl.program_id(0), tl.num_programs(0)
    h = line // M % H
    m = tl.cast(float("-inf"), tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h * sinks_stride).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    for first in range(0, SPLITS, AT_ONCE):
        m = tl.maximum(m, tl.max(load_parts_lse(parts_lse_ptr, first, SPLITS, line, lines), 0))
    safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([WIDTH_E], tl.float32)
    col = tl.arange(0, WIDTH_E)
    for first in range(0, SPLITS, AT_ONCE):
        lse = load_parts_lse(parts_lse_ptr, first, SPLITS, line, lines)
        weight = tl.exp2(lse - safe)
        n = (first + tl.arange(0, AT_ONCE)).to(tl.int64)
        at = parts_ptr + (n * lines + line)[:, None] * E + col[None, :]
        saw = (lse != float("-inf"))[:, None] & (col < E)[None, :]
        acc += tl.sum(tl.load(at, mask=saw, other=0.0) * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - safe)
    blind = total == 0
    total = tl.where(blind, 1.0, total)
    at = head_ptr(o_ptr, o_strides, line // M // H, h) + line % M * o_strides[2]
    o = round_to(acc / total, o_ptr.dtype.element_ty, UPCAST)
    tl.store(at + col * o_strides[3], o, mask=col < E)
    if lse_ptr is not None:
        tl.store(lse_ptr + line, tl.where(blind, float("-inf"), (safe + tl.log2(total)) * LN2))


@triton.jit
def load_parts_lse(ptr, first, SPLITS, line, lines):
    """lse [AT_ONCE] of a row in the parts `first`..; -inf past the last."""
    n = first + tl.arange(0, AT_ONCE)
    return tl.load(ptr + n.to(tl.int64) * lines + line, mask=n < SPLITS, other=float("-inf"))
