"""Gradients of pools of pages: each page's sum over its entries in the table."""

import triton
import triton.language as tl

from attn_graph.kernels.common import head_ptr, round_to
from attn_graph.kernels.sequences import length_of


@triton.jit(do_not_specialize=("G", "SUMMANDS", "N", "PAGES", "ENTRIES", "POOL", "STEPS"))
def sum_pages(
    parts_ptr, out_ptr, named_ptr, order_ptr, kv_lengths_ptr, kv_steps, parts_strides, out_strides,
    G, SUMMANDS, N, PAGES, ENTRIES, POOL, STEPS,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """parts [B,G*SUMMANDS,N,SIZE] float32 -> out, POOL pages of PAGE rows of G heads, all written.

    order [ENTRIES]: the entries of the table [B,PAGES], by the page that they name, of one page as
    they lie; named [ENTRIES]: that page, and POOL for entries past the lengths. Sums go in this
    order, and within an entry over SUMMANDS heads. STEPS: bits of ENTRIES.
    """
    block, g = tl.program_id(0) // G, tl.program_id(0) % G  # heads of a row lie side by side
    row, col = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    page = row // PAGE
    there = page < POOL
    start = count_below(named_ptr, page, ENTRIES, STEPS)
    stop = tl.where(there, count_below(named_ptr, page + 1, ENTRIES, STEPS), start)
    total = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for t in range(tl.max(stop - start, 0)):
        use = t < stop - start
        entry = tl.load(order_ptr + start + t, mask=use, other=0).to(tl.int32)
        b, j = entry // PAGES, entry % PAGES * PAGE + row % PAGE
        _, count = length_of(None, kv_lengths_ptr, kv_steps, b, 0, N)
        use = use & (j < count)
        line = head_ptr(parts_ptr, parts_strides, b, g * SUMMANDS)
        at = (line + j.to(tl.int64) * parts_strides[2])[:, None] + col * parts_strides[3]
        for _ in range(SUMMANDS):
            total += tl.load(at, mask=use[:, None] & (col < SIZE), other=0.0)
            at += parts_strides[1]
    line = head_ptr(out_ptr, out_strides, page, g) + (row % PAGE).to(tl.int64) * out_strides[2]
    total = round_to(total, out_ptr.dtype.element_ty, UPCAST)
    at = line[:, None] + col * out_strides[3]
    tl.store(at, total, mask=there[:, None] & (col < SIZE))


@triton.jit
def count_below(named_ptr, page, ENTRIES, STEPS):
    """How many of the ascending numbers at named_ptr are below each of `page` [BLOCK]."""
    low = page * 0
    high = low + ENTRIES
    for _ in range(STEPS):
        middle = (low + high) // 2
        open_ = low < high
        below = open_ & (tl.load(named_ptr + middle, mask=open_, other=0) < page)
        low, high = tl.where(below, middle + 1, low), tl.where(open_ & ~below, middle, high)
    return low
