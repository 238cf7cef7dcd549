"""The places of sequences in packed tensors, and of keys in pages, found by each program itself.

A packed tensor has T rows of each head, among them sequence b from starts[b] on, with lengths[b] of
the starts[b + 1] - starts[b] rows as its own. Places outside of the tensors are clamped: no program
reads or writes there, with any starts, lengths and pages. `steps`: the strides of starts, of
lengths, and of a table along its pages.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import (
    head_ptr,
    line_of,
    list_at,
    listed_block,
    numbers_in,
    place_program,
    tile_of,
)

# Times weights in float16 of values with one scale: those that are too small for it weigh nothing.
LARGEST: tl.constexpr = tl.constexpr(2.0**15)
# Sequences whose starts a program reads at a time; with more of them it walks on.
AT_ONCE: tl.constexpr = tl.constexpr(4096)


@triton.jit
def place_in_sequences(
    starts_ptr, lengths_ptr, steps, B, H, T, MOST, TOGETHER,
    BATCH: tl.constexpr, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """block, h, b of this program, then the first row, the length and the extent of its sequence.

    The extent is its rows and the unused ones after it. All T rows are in the blocks of some
    sequence, of length 0 where they are of none: b is any then. But sequences with an extent up to
    SHORT have no blocks. BATCH: at least B + 2, or more than AT_ONCE. MOST: the most rows of a
    sequence. Programs beyond the last block have extent 0.
    """
    blocks = tl.cdiv(T, BLOCK) + tl.minimum(B, T // (SHORT + 1)) + 2
    place, h, _ = place_program(blocks, H, TOGETHER, LAST_FIRST)
    COUNT: tl.constexpr = BATCH if BATCH < AT_ONCE else AT_ONCE
    slot, earlier, first, extent, blocks = blocks_of(
        0, 0, place, starts_ptr, steps[0], B, T, COUNT, BLOCK, SHORT
    )
    if BATCH > AT_ONCE:
        for n in range(COUNT, B + 2, COUNT):
            of_these = blocks_of(n, blocks, place, starts_ptr, steps[0], B, T, COUNT, BLOCK, SHORT)
            slot, earlier = slot + of_these[0], earlier + of_these[1]
            first, extent = first + of_these[2], extent + of_these[3]
            blocks = of_these[4]
    b = tl.minimum(tl.maximum(slot - 1, 0), B - 1)
    length = clamp(tl.load(lengths_ptr + b * steps[1]), tl.minimum(extent, MOST))
    length = tl.where((slot > 0) & (slot <= B), length, 0)
    return place - earlier, h, b, first, length, extent


@triton.jit
def blocks_of(
    begin, before, place, starts_ptr, step, B, T,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Of sequences begin - 1 to begin + COUNT - 2, whose blocks have `before` others before them:
    the one that block `place` is of, counted from -1 on as 0, how many blocks come before those of
    that one, its first row and its extent, all 0 if it is none of them; and `before` of the next.

    -1: the rows before all sequences, B: those after all.
    """
    n = begin + tl.arange(0, COUNT)
    start = tl.load(starts_ptr + (n - 1) * step, mask=(n > 0) & (n < B + 2), other=0)
    start = tl.where(n > B + 1, T, clamp(start, T))
    stop = clamp(tl.load(starts_ptr + n * step, mask=n <= B, other=T), T)
    extents = tl.maximum(stop - start, 0)
    blocks = (extents + BLOCK - 1) // BLOCK
    if SHORT:
        blocks = tl.where((extents <= SHORT) & (n > 0) & (n <= B), 0, blocks)
    ends = before + tl.cumsum(blocks, 0)
    begins = ends - blocks
    here = (begins <= place) & (place < ends)
    slot, earlier = tl.sum(tl.where(here, n, 0), 0), tl.sum(tl.where(here, begins, 0), 0)
    first, extent = tl.sum(tl.where(here, start, 0), 0), tl.sum(tl.where(here, extents, 0), 0)
    return slot, earlier, first, extent, before + tl.sum(blocks, 0)


@triton.jit
def place_rows(
    starts_ptr, lengths_ptr, steps, lists_ptr, lists_strides, B, H, M, T, TOGETHER,
    BATCH: tl.constexpr, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, LISTED: tl.constexpr,
    SHORT: tl.constexpr = 0,
):  # fmt: skip
    """place, block, h, b of this program, then the first row of its batch entry, how many rows it
    has and writes, and where the line of its head begins in statistics, at that row.

    starts_ptr: of packed rows, as `place_in_sequences` takes them; None: each entry has M.
    """
    if starts_ptr is None:
        place, h, b = place_program(tl.cdiv(M, BLOCK), H, TOGETHER, LAST_FIRST)
        block = listed_block(place, lists_ptr, lists_strides, LISTED)
        row, extent = 0, M
    else:
        block, h, b, row, M, extent = place_in_sequences(
            starts_ptr, lengths_ptr, steps, B, H, T, M, TOGETHER, BATCH, BLOCK, LAST_FIRST, SHORT
        )
        place = block
    return place, block, h, b, row, M, extent, line_at(starts_ptr, b, h, H, row, M, T)


@triton.jit
def line_at(starts_ptr, b, h, H, row, M, T):
    """Where the line of a head begins in statistics, at the first row of its batch entry."""
    line = line_of(b, h, H, M)
    if starts_ptr is not None:
        line = line_of(0, h, H, T) + row
    return line


@triton.jit
def sequence_at(starts_ptr, lengths_ptr, steps, b, T, MOST):
    """The first row and the length of sequence b."""
    first = clamp(tl.load(starts_ptr + b * steps[0]), T)
    return first, clamp(tl.load(lengths_ptr + b * steps[1]), tl.minimum(T - first, MOST))


@triton.jit
def rows_of_entry(starts_ptr, lengths_ptr, steps, b, T, M):
    """The first row of batch entry b, how many it has, and these and the unused ones after them.

    starts_ptr: of packed rows; None: each entry has M.
    """
    first, count, extent = 0, M, M
    if starts_ptr is not None:
        first, extent = sequence_extent(starts_ptr, steps, b, T)
        count = clamp(tl.load(lengths_ptr + b * steps[1]), tl.minimum(extent, M))
    return first, count, extent


@triton.jit
def sequence_extent(starts_ptr, steps, b, T):
    """The first row of sequence b, and how many there are until the next one begins."""
    first = clamp(tl.load(starts_ptr + b * steps[0]), T)
    return first, tl.maximum(clamp(tl.load(starts_ptr + (b + 1) * steps[0]), T) - first, 0)


@triton.jit
def few_rows_of_entry(starts_ptr, lengths_ptr, steps, b, B, T, M, SHORT: tl.constexpr):
    """The first row of batch entry b and how many it has; then in a line of all parts: where this
    entry's rows begin, the length of the line, and from where to where it stores, absent rows too.

    starts_ptr: of packed rows; None: each entry has M. SHORT: a line has M rows of each entry, of
    which those with a larger extent have none.
    """
    first, count, extent = rows_of_entry(starts_ptr, lengths_ptr, steps, b, T, M)
    place, line, begin, stop = first, M, first, first + extent
    if SHORT:
        extent = tl.where(extent > M, 0, extent)
        count = tl.minimum(count, extent)
        place, line = b * M, B * M
        begin, stop = place, place + extent
    elif starts_ptr is not None:
        line, begin, stop = T, tl.where(b == 0, 0, first), tl.where(b == B - 1, T, stop)
    return first, count, place, line, begin, stop


@triton.jit
def clamp(x, most):
    """x between 0 and most, in 32 bits."""
    return tl.minimum(tl.maximum(x, 0), most).to(tl.int32)


@triton.jit
def length_of(starts_ptr, lengths_ptr, steps, b, T, MOST):
    """The first row of batch entry b, and how many it has.

    starts_ptr: of packed rows, else None. lengths_ptr: None where each entry has all MOST.
    """
    first, count = 0, MOST
    if starts_ptr is not None:
        first, count = sequence_at(starts_ptr, lengths_ptr, steps, b, T, MOST)
    elif lengths_ptr is not None:
        count = clamp(tl.load(lengths_ptr + b * steps[1]), MOST)
    return first, count


@triton.jit
def within_pages(kv_lengths_ptr, steps, b, count, extent, PAGE: tl.constexpr):
    """How many keys batch entry b has, and of how many it writes gradients: in pages of the same.

    count, extent: the two of keys that are not in pages.
    """
    if PAGE:
        _, count = length_of(None, kv_lengths_ptr, steps, b, 0, count)
        extent = count
    return count, extent


@triton.jit
def head_at(ptr, strides, b, h, starts_ptr, first, PAGE: tl.constexpr):
    """The address of x[b,h], or, of packed tensors, of row `first` of x[h]. PAGE: of pages."""
    at = head_ptr(ptr, strides, 0 if PAGE else b, h)
    if starts_ptr is not None:
        at += tl.cast(first, tl.int64) * strides[2]
    return at


@triton.jit
def list_of(lists_ptr, lists_strides, b, h, place, starts_ptr, first, rows):
    """`list_at`; of a block beyond the last row any list."""
    if starts_ptr is not None:
        place = tl.where(first < rows, place, 0)
    return list_at(lists_ptr, lists_strides, b, h, place)


@triton.jit
def tiles_within(full, mixed, starts_ptr, first, rows, LISTED: tl.constexpr):
    """How many full and mixed tiles there are; none of a block beyond the last row."""
    if LISTED and starts_ptr is not None:
        full, mixed = tl.where(first < rows, full, 0), tl.where(first < rows, mixed, 0)
    return full, mixed


@triton.jit
def within_sequence(x, starts_ptr, first, count, other, BLOCK: tl.constexpr):
    """x [BLOCK] or [BLOCK,WIDTH] of rows `first`.., with `other` in unused rows of packed ones."""
    if starts_ptr is not None:
        row = tl.arange(0, BLOCK)
        if len(x.shape) == 2:
            row = row[:, None]
        x = tl.where(row < count - first, x, other)
    return x


@triton.jit
def pages_of(b, M, N, keys, stride, step, data, numbers, SEEN: tl.constexpr):
    """Where the pages of batch entry b begin in their table, the stride there, and, unless all keys
    are seen, the first that some query sees; then the end of these keys, at most `keys`."""
    at = tl.cast(b, tl.int64) * stride
    line = at, step
    if SEEN is not None:
        first, stop = SEEN(b, M, N, data, numbers)
        keys = tl.minimum(keys, stop).to(tl.int32)
        line = at, step, first.to(tl.int32)  # type: ignore[assignment]  # Triton's tuples are free
    return line, keys


@triton.jit
def key_rows(
    desc, ptr, strides, pages_ptr, line, b, g, first, count, POOL,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `tile_of`; PAGE: of keys in pages of so many rows, POOL pages in all; 0: not in pages.

    line: from `pages_of`; rows before the first key that is seen are 0, as those from `count` on.
    strides: of pages, heads, rows and elements.
    """
    if PAGE == 0:
        x = tile_of(desc, ptr, strides, b, g, first, count, SIZE, ROWS, WIDTH, WHOLE, UPCAST)
    else:
        row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
        at = paged_rows(
            ptr, strides, pages_ptr + line[0], line[1], first, count, POOL, ROWS, WHOLE, PAGE
        )
        at += col * strides[3]
        if WHOLE and SIZE == WIDTH:
            x = tl.load(at)
        elif WHOLE:
            x = tl.load(at, mask=col < SIZE, other=0.0)
        else:
            there = row < count - first
            if len(line) > 2:
                there = there & (row >= line[2] - first)
            x = tl.load(at, mask=there & (col < SIZE), other=0.0)
        if UPCAST and ptr.dtype.element_ty == tl.bfloat16:
            x = x.to(tl.float32)
    return x


@triton.jit
def scale_heads(scales, strides, b, g, starts_ptr, first, PAGE: tl.constexpr):
    """For k and for v, where the scales of a head lie, and their strides; () without scales."""
    return (
        ((), ())
        if scales is None
        else (
            (head_at(scales[0], strides[0], b, g, starts_ptr, first, PAGE), strides[0]),
            (head_at(scales[1], strides[1], b, g, starts_ptr, first, PAGE), strides[1]),
        )
    )


@triton.jit
def common_scales(q, k_scale, v_scale, COMMON: tl.constexpr, DTYPE: tl.constexpr):
    """q in pieces, scales for k and v, and one that o is to be multiplied by. COMMON: the keys of a
    head have one scale of k, by which scores are multiplied, and one of v, which o takes.

    q of bfloat16, its DTYPE, is in float16 then: 8 bits become float16 by far fewer instructions.
    Powers of two bring the largest of each row to 1 to 2, and go to the scores.
    """
    o_scale = 1.0
    if COMMON:
        k_size, o_scale = tl.load(k_scale[0]), tl.load(v_scale[0])
        v_scale = ()
        if tl.bfloat16 == DTYPE:
            most = tl.max(tl.abs(q[0].to(tl.float32)), 1)
            if len(q) > 1:
                most = tl.maximum(most, tl.max(tl.abs(q[1].to(tl.float32)), 1))
            power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            power = tl.minimum(tl.maximum(power, 2.0**-126), 2.0**126)[:, None]
            q = (in_half(q[0], power),) if len(q) == 1 else (
                in_half(q[0], power), in_half(q[1], power),
            )  # fmt: skip
            k_size = k_size * power
        if q[0].dtype == tl.float16:
            o_scale /= LARGEST
        k_scale = (k_size,)
    return q, k_scale, v_scale, o_scale


@triton.jit
def in_half(x, power):
    """Rows x over powers of two of them, in float16."""
    return (x.to(tl.float32) * (1 / power)).to(tl.float16)


@triton.jit
def scale_columns(
    x, scale, pages_ptr, line, b, g, first, count, POOL,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """x [.,ROWS], a product with quantised rows, times their scales; as is without these. One scale
    alone is of all rows, see `common_scales`."""
    return x if len(scale) == 0 else x * scale[0] if len(scale) == 1 else x * tl.trans(
        scales_of(
            scale, pages_ptr, line, b, g, first, count, POOL, 0, 1, ROWS, 1, WHOLE, PAGE, BLOCKS
        )
    )  # fmt: skip


@triton.jit
def scale_rows(
    x, scale, like, pages_ptr, line, b, g, first, count, POOL,
    COLUMN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    PAGE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows x [ROWS,.] in the dtype of `like`, quantised ones times their scales, if these are.
    COLUMN: the first of SIZE columns."""
    return numbers_in(x, like.dtype) if len(scale) == 0 else (
        numbers_in(x, tl.float32)
        * scales_of(
            scale, pages_ptr, line, b, g, first, count, POOL,
            COLUMN, SIZE, ROWS, x.shape[1], WHOLE, PAGE, BLOCKS,
        )
    ).to(like.dtype)  # fmt: skip


@triton.jit
def unpack_pairs(x, BLOCKS: tl.constexpr):
    """Rows of bytes [ROWS,WIDTH / 2] as int8 [ROWS,WIDTH], where each byte has two integers of 4
    bits, the first in its lower half: they less 8. Others unchanged. BLOCKS: last, how many a byte
    has."""
    if BLOCKS[2] == 2:
        low, high = (x & 15).to(tl.int8) - 8, (x >> 4).to(tl.int8) - 8
        x = tl.reshape(tl.join(low, high), (x.shape[0], 2 * x.shape[1]))
    return x


@triton.jit
def scales_of(
    scale, pages_ptr, line, b, g, first, count, POOL,
    COLUMN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, PAGE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The scales of a tile of k or v: [ROWS,WIDTH], or [ROWS,1] if all columns have one.

    They are read as rows of keys are. BLOCKS: how many rows and how many columns have one, 0: all;
    they are powers of two, so a tile has whole blocks, or is within one.
    """
    EACH: tl.constexpr = 1 if BLOCKS[0] == 0 else BLOCKS[0]
    SHARE: tl.constexpr = EACH if EACH < ROWS else ROWS
    WIDE: tl.constexpr = BLOCKS[1]
    COUNT: tl.constexpr = 1 if WIDE == 0 else SIZE // WIDE
    ACROSS: tl.constexpr = 1 if WIDE == 0 else WIDTH // WIDE
    TIMES: tl.constexpr = 1 if WIDE == 0 else WIDE
    at, near = scale[0], line
    if WIDE > 0:
        at += (COLUMN // WIDE) * scale[1][3]
    if PAGE and len(line) > 2:
        near = line[0], line[1], line[2] // EACH
    x = key_rows(
        None, at, scale[1], pages_ptr, near, b, g, first // EACH, tl.cdiv(count, EACH), POOL,
        COUNT, ROWS // SHARE, ACROSS, WHOLE, PAGE // EACH, False,
    )  # fmt: skip
    if SHARE * TIMES > 1:
        apart = tl.broadcast_to(x[:, None, :, None], (ROWS // SHARE, SHARE, ACROSS, TIMES))
        x = tl.reshape(apart, (ROWS, ACROSS * TIMES))
    return x


@triton.jit
def paged_rows(
    ptr, strides, pages_ptr, step, first, count, POOL,
    ROWS: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Pointers [ROWS,1] to rows `first`.. of a batch entry; where all lie in one page, by one
    look into its table, whose stride is `step`. WHOLE: all ROWS rows exist. Offsets within a page
    are in 32 bits."""
    row = tl.arange(0, ROWS)[:, None]
    if PAGE % ROWS == 0:
        page = clamp(tl.load(pages_ptr + first // PAGE * step), POOL - 1).to(tl.int64)
        at = (
            ptr
            + page * strides[0]
            + tl.cast(first % PAGE, tl.int64) * strides[2]
            + row * strides[2]
        )
    else:
        j = first + row
        if WHOLE:
            page = tl.load(pages_ptr + j // PAGE * step)
        else:
            page = tl.load(pages_ptr + j // PAGE * step, mask=j < count, other=0)
        if ROWS % PAGE == 0:  # `first` begins a page: rows lie at the same places in every tile
            j = row
        at = ptr + clamp(page, POOL - 1).to(tl.int64) * strides[0] + (j % PAGE) * strides[2]
    return at
