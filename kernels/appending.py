"""Rows of keys and values written to pages of a cache, rotated and rounded to 8 bits on the way."""

from typing import Any

import torch
import triton
import triton.language as tl

from attn_graph.kernels.common import round_to
from attn_graph.kernels.page_sums import count_below

TILE = 4096  # elements of the heads that a program has in registers
FRACTION = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits
SIZES = ("B", "M", "G", "H", "POOL", "PAGES", "LONGEST", "STEPS")


@triton.jit(do_not_specialize=SIZES)
def append_rows(
    k_ptr, v_ptr, q_ptr, out_ptr, pool_k_ptr, pool_v_ptr, pages_ptr, lengths_ptr, starts_ptr,
    slots_ptr, positions_ptr, cos_ptr, sin_ptr, k_scale_ptr, v_scale_ptr,
    k_strides, v_strides, q_strides, out_strides, pool_k_strides, pool_v_strides, pages_strides,
    steps, cos_strides, sin_strides, k_scale_strides, v_scale_strides, k_number, v_number,
    B, M, G, H, POOL, PAGES, LONGEST, STEPS, PAGE,
    D: tl.constexpr, E: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr,
    HEADS_D: tl.constexpr, HEADS_E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    EIGHT_K: tl.constexpr, EIGHT_V: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: one row of k [B,M,G,D], v [B,M,G,E] and q [B,M,H,D], all heads.

    Rows without a place in the pools write nothing there, and 0 to out. STEPS: bits of B + 2.
    steps: the strides of lengths, slots and positions. starts lie dense.
    """
    row = tl.program_id(0)
    b, m = row // M, row % M
    page, line, position = place_of(
        row, b, m, pages_ptr, lengths_ptr, starts_ptr, slots_ptr, positions_ptr, pages_strides,
        steps, B, M, POOL, PAGES, STEPS, PAGE,
    )  # fmt: skip
    there = page >= 0
    position = tl.minimum(tl.maximum(position, 0), LONGEST - 1)
    cos_line = None if cos_ptr is None else cos_ptr + position * cos_strides[0]
    sin_line = None if sin_ptr is None else sin_ptr + position * sin_strides[0]
    write_heads(
        k_ptr + b * k_strides[0] + m * k_strides[1], k_strides,
        pool_k_ptr + page * pool_k_strides[0] + line * pool_k_strides[1], pool_k_strides,
        cos_line, sin_line, cos_strides, sin_strides, k_scale_ptr, k_scale_strides, page, line,
        k_number, there, there, G, D, ROTATED, PAIRS, HEADS_D, WIDTH_D, EIGHT_K, WIDE, UPCAST,
    )  # fmt: skip
    if v_ptr is not None:
        write_heads(
            v_ptr + b * v_strides[0] + m * v_strides[1], v_strides,
            pool_v_ptr + page * pool_v_strides[0] + line * pool_v_strides[1], pool_v_strides,
            None, None, cos_strides, sin_strides, v_scale_ptr, v_scale_strides, page, line,
            v_number, there, there, G, E, 0, PAIRS, HEADS_E, WIDTH_E, EIGHT_V, WIDE, UPCAST,
        )  # fmt: skip
    if q_ptr is not None:
        write_heads(
            q_ptr + b * q_strides[0] + m * q_strides[1], q_strides,
            out_ptr + b * out_strides[0] + m * out_strides[1], out_strides,
            cos_line, sin_line, cos_strides, sin_strides, None, k_scale_strides, page, line,
            1.0, there, True, H, D, ROTATED, PAIRS, HEADS_D, WIDTH_D, 0, WIDE, UPCAST,
        )  # fmt: skip


@triton.jit
def place_of(
    row, b, m, pages_ptr, lengths_ptr, starts_ptr, slots_ptr, positions_ptr, pages_strides, steps,
    B, M, POOL, PAGES, STEPS, PAGE,
):  # fmt: skip
    """The page of a row, -1 without one, its line there, and its position in its sequence."""
    if slots_ptr is None:
        first, count, there = row - m, M, True
        if starts_ptr is not None:
            b = count_below(starts_ptr, row + 1, B + 1, STEPS) - 1
            there = (b >= 0) & (b < B)
            b = tl.where(there, b, 0)
            first = tl.load(starts_ptr + b)
            count = tl.load(starts_ptr + b + 1) - first
        position = tl.load(lengths_ptr + b * steps[0]).to(tl.int64) - count + row - first
        there = there & (position >= 0) & (position < PAGES.to(tl.int64) * PAGE)
        at = tl.where(there, position, 0)
        entry = pages_ptr + b.to(tl.int64) * pages_strides[0] + at // PAGE * pages_strides[1]
        page = tl.load(entry, mask=there, other=-1).to(tl.int64)
        line = at % PAGE
    else:
        slot = tl.load(slots_ptr + row.to(tl.int64) * steps[1]).to(tl.int64)
        there = slot >= 0
        position = tl.where(there, slot, 0)
        page, line = position // PAGE, position % PAGE
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row.to(tl.int64) * steps[2]).to(tl.int64)
    return tl.where(there & (page >= 0) & (page < POOL), page, -1), line, position


@triton.jit
def write_heads(
    x_ptr, x_strides, out_ptr, out_strides, cos_line, sin_line, cos_strides, sin_strides,
    scale_ptr, scale_strides, page, line, number, there, writes, HEADS,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, EIGHT: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The heads [HEADS,SIZE] at x_ptr, rotated and divided by the scale, to out_ptr.

    scale_strides: of a scale, the last None if all columns have one, then how many pages, lines,
    heads and columns have one.
    """
    d = tl.arange(0, WIDTH)[None, :]
    HALF: tl.constexpr = ROTATED // 2
    for start in range(0, HEADS, BLOCK):
        h = start + tl.arange(0, BLOCK)[:, None]
        inside = (h < HEADS) & (d < SIZE)
        at = x_ptr + h.to(tl.int64) * x_strides[2]
        x = tl.load(at + d * x_strides[3], mask=inside & there, other=0.0).to(WIDE)
        if cos_line is not None:
            turned = inside & (d < ROTATED)
            first = (d % 2 == 0) if PAIRS else (d < HALF)
            other = tl.where(first, d + 1, d - 1) if PAIRS else tl.where(first, d + HALF, d - HALF)
            pair = d // 2 if PAIRS else d % HALF
            y = tl.load(at + other * x_strides[3], mask=turned & there, other=0.0).to(WIDE)
            cos = tl.load(cos_line + pair * cos_strides[1], mask=d < ROTATED, other=1.0).to(WIDE)
            sin = tl.load(sin_line + pair * sin_strides[1], mask=d < ROTATED, other=0.0).to(WIDE)
            x = tl.where(turned, x * cos + tl.where(first, -y, y) * sin, x)
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        if scale_ptr is not None:
            own = scale_ptr + page // scale_strides[4] * scale_strides[0]
            own += line // scale_strides[5] * scale_strides[1]
            own += h // scale_strides[6] * scale_strides[2]
            inner = (h < HEADS) & there
            if scale_strides[3] is not None:
                own += d // scale_strides[7] * scale_strides[3]
                inner = inside & there
            x = x / tl.load(own, mask=inner, other=1.0).to(WIDE)
        x = x / number
        to = out_ptr + h.to(tl.int64) * out_strides[2] + d * out_strides[3]
        tl.store(to, to_cache(x, DTYPE, EIGHT, UPCAST), mask=inside & writes)


@triton.jit
def to_cache(x, DTYPE: tl.constexpr, EIGHT: tl.constexpr, UPCAST: tl.constexpr):
    """x in DTYPE, to nearest, ties to even; no larger than the largest of a dtype of 8 bits.

    EIGHT: the bits of a fraction in float8, 0 of other dtypes. A byte of float8 is made of bits:
    not all GPUs convert to it.
    """
    if tl.int8 == DTYPE:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -127.0), 127.0)
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: no bits below 1 are left
    if EIGHT == 3:  # float8_e4m3fn: from 2^-6 on, exponents 120 less; below it multiples of 2^-9
        near = to_grid(x, 448.0, 20, 0.015625, 24576.0)
        bits = near.to(tl.uint32, bitcast=True)
        size = (bits & 0x7FFFFFFF) >> 20
        size = tl.where(size < 968, (tl.abs(near) * 512.0).to(tl.uint32), size - 960)
        return (bits >> 24 & 0x80 | tl.where(x == x, size, 0x7F)).to(tl.uint8)
    if EIGHT == 2:  # float8_e5m2, the upper half of float16: from 2^-14 on, below it 2^-16 apart
        near = to_grid(x, 57344.0, 21, 0.00006103515625, 192.0).to(tl.float16)
        return (near.to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)
    return round_to(x, DTYPE, UPCAST)


@triton.jit
def to_grid(x, MOST: tl.constexpr, DROP: tl.constexpr, LEAST: tl.constexpr, MAGIC: tl.constexpr):
    """x float32, no larger than MOST, without its last DROP bits, to nearest, ties to even; NaN
    stays. Below LEAST, where the step is 2^-23 of 2 / 3 MAGIC, add MAGIC and take it away."""
    x = x.to(tl.float32)
    ended = tl.minimum(tl.maximum(x, -MOST), MOST)
    bits = ended.to(tl.uint32, bitcast=True)
    bits = (bits + (1 << (DROP - 1)) - 1 + ((bits >> DROP) & 1)) >> DROP << DROP
    small = (ended + MAGIC) - MAGIC
    near = tl.where(tl.abs(ended) < LEAST, small, bits.to(tl.float32, bitcast=True))
    return tl.where(x == x, near, x)


Tensor = torch.Tensor
NONE = (0, 0, 0, 0)


def launch(
    rows: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    pools: tuple[Tensor, Tensor | None],
    places: tuple[Tensor | None, ...],
    turns: tuple[Tensor | None, Tensor | None, bool],
    scales: tuple[Tensor | float, Tensor | float],
    interprets: bool = False,
) -> None:
    """Run `append_rows`. rows: k, v, q and its result, each [B,M,heads,size]. pools: of k and v.

    places: pages, lengths, starts, slots and positions. turns: cos, sin, and whether pairs are
    neighbours. scales: float32 with the axes of the pools, or numbers.
    """
    k, v, q, _ = rows
    (B, M, G, D), cos = k.shape, turns[0]
    pages, lengths, starts, slots, positions = places
    E, H = 1 if v is None else v.shape[3], 0 if q is None else q.shape[2]
    if starts is not None:
        starts, B = starts.contiguous(), len(starts) - 1
    width_d, width_e = triton.next_power_of_2(D), triton.next_power_of_2(E)
    heads = triton.next_power_of_2(max(G, H, 1))
    wide = torch.float64 in (k.dtype, pools[0].dtype)
    eight = [0 if x is None else FRACTION.get(x.dtype, 0) for x in pools]
    room = [
        x.view(torch.uint8) if x is not None and n else x for x, n in zip(pools, eight, strict=True)
    ]
    given = [*rows, *room, pages, lengths, starts, slots, positions, *turns[:2]]
    held = [x if isinstance(x, Tensor) else None for x in scales]
    lying = [strides_of(x) for x in (*rows, *pools, pages)]
    turned: list[tuple[int | None, ...]] = [strides_of(x) for x in turns[:2]]
    turned += [scale_steps(x, pool) for x, pool in zip(held, pools, strict=True)]
    steps = tuple(1 if x is None else x.stride(0) for x in (lengths, slots, positions))
    append_rows[(k.shape[0] * M,)](
        *given, *held, *lying, steps,
        *turned, *(1.0 if isinstance(x, Tensor) else x for x in scales),
        B, M, G, H, pools[0].shape[0], 0 if pages is None else pages.shape[1],
        1 if cos is None else len(cos), (B + 2).bit_length(), pools[0].shape[1],
        D, E, 0 if cos is None else 2 * cos.shape[1], turns[2],
        min(heads, max(1, TILE // width_d)), min(heads, max(1, TILE // width_e)), width_d, width_e,
        *eight, tl.float64 if wide else tl.float32, interprets,
    )  # fmt: skip


def strides_of(x: Any) -> tuple[int, ...]:  # Any: a tensor, or None
    """Strides of a tensor, 0 along axes of size 1."""
    if x is None:
        return NONE
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


def scale_steps(scale: Tensor | None, pool: Tensor | None) -> tuple[int | None, ...]:
    """The strides of a scale, and its blocks, as of `write_heads`."""
    if scale is None or pool is None:
        return NONE
    *steps, last = strides_of(scale)
    columns = None if scale.shape[-1] == 1 else last
    pairs = zip(pool.shape, scale.shape, strict=True)
    return *steps, columns, *(max(1, n // max(1, scales)) for n, scales in pairs)
