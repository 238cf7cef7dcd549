"""Rows of heads wider than HELD, in two pieces: their first HELD columns, and the rest.

Tiles are powers of two wide. As one tile, a head of 576 would be 1024 wide, almost half of it
zeros; as two it is 512 and 64. Narrower heads are one piece. Pieces are a tuple. Triton compiles
what follows an early return, so each function has one return.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import numbers_in, store_rows
from attn_graph.kernels.sequences import key_rows, scale_rows, unpack_pairs, within_sequence

HELD: tl.constexpr = tl.constexpr(512)


@triton.jit
def query_pieces(
    desc, head, strides, b, h, first, count,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """`tile_of` in pieces."""
    return key_pieces(
        desc, head, strides, None, None, b, h, first, count, 0, SIZE, ROWS, WIDTH, WHOLE, 0, UPCAST
    )


@triton.jit
def key_pieces(
    desc, ptr, strides, pages_ptr, line, b, g, first, count, POOL,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    PAGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`key_rows` in pieces."""
    return (
        key_rows(
            desc, ptr, strides, pages_ptr, line, b, g, first, count, POOL,
            SIZE, ROWS, WIDTH, WHOLE, PAGE, UPCAST,
        ),
    ) if WIDTH <= HELD else (
        key_rows(
            desc, ptr, strides, pages_ptr, line, b, g, first, count, POOL,
            HELD, ROWS, HELD, WHOLE, PAGE, UPCAST,
        ),
        key_rows(
            desc, ptr + HELD * strides[3], strides, pages_ptr, line, b, g, first, count, POOL,
            SIZE - HELD, ROWS, WIDTH - HELD, WHOLE, PAGE, UPCAST,
        ),
    )  # fmt: skip


@triton.jit
def scale_pieces(
    x, scale, like, pages_ptr, line, b, g, first, count, POOL,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """`scale_rows` of pieces."""
    one = scale_rows(
        x[0], scale, like, pages_ptr, line, b, g, first, count, POOL,
        0, SIZE if SIZE < HELD else HELD, ROWS, WHOLE, PAGE, BLOCKS,
    )  # fmt: skip
    return (
        one,
        scale_rows(
            x[1], scale, like, pages_ptr, line, b, g, first, count, POOL,
            HELD, SIZE - HELD, ROWS, WHOLE, PAGE, BLOCKS,
        ),
    ) if len(x) > 1 else (one,)  # fmt: skip


@triton.jit
def scale_ahead(
    x, scale, like, pages_ptr, line, b, g, first, count, POOL,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PAGE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pieces of rows as loaded, before a product, and the scales of its columns: none where columns
    of x have scales of their own, which x is times then."""
    if BLOCKS[2] == 2:
        x = (unpack_pairs(x[0], BLOCKS),)
    return (
        scale_pieces(
            x, scale, like, pages_ptr, line, b, g, first, count, POOL,
            SIZE, ROWS, WHOLE, PAGE, BLOCKS,
        ),
        (),
    ) if BLOCKS[1] > 0 else (x, scale)  # fmt: skip


@triton.jit
def pieces_at(at, step, read, SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr):
    """Rows that begin at pointers `at` [ROWS,1], their elements `step` apart, in pieces; 0 where
    not `read`."""
    return (columns_at(at, step, read, SIZE, WIDTH, UPCAST),) if WIDTH <= HELD else (
        columns_at(at, step, read, HELD, HELD, UPCAST),
        columns_at(at + HELD * step, step, read, SIZE - HELD, WIDTH - HELD, UPCAST),
    )  # fmt: skip


@triton.jit
def columns_at(at, step, read, SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr):
    """Columns [ROWS,WIDTH] of such rows."""
    col = tl.arange(0, WIDTH)[None, :]
    x = tl.load(at + col * step, mask=read & (col < SIZE), other=0.0)
    if UPCAST and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def zero_pieces(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of rows [ROWS,WIDTH] in pieces, to begin with."""
    return (tl.zeros([ROWS, WIDTH], tl.float32),) if WIDTH <= HELD else (
        tl.zeros([ROWS, HELD], tl.float32),
        tl.zeros([ROWS, WIDTH - HELD], tl.float32),
    )  # fmt: skip


@triton.jit
def multiply_pieces(x, y, PRECISION: tl.constexpr):
    """x y^T, in x's dtype."""
    s = tl.dot(x[0], tl.trans(numbers_in(y[0], x[0].dtype)), input_precision=PRECISION)
    if len(x) > 1:
        s = tl.dot(x[1], tl.trans(numbers_in(y[1], x[1].dtype)), s, input_precision=PRECISION)
    return s


@triton.jit
def add_pieces(total, p, x, PRECISION: tl.constexpr):
    """total + p x."""
    one = tl.dot(p, x[0], total[0], input_precision=PRECISION)
    return (one, tl.dot(p, x[1], total[1], input_precision=PRECISION)) if len(x) > 1 else (one,)


@triton.jit
def store_pieces(
    ptr, strides, first, extent, x, scale, starts_ptr, count,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write scale * x as `store_rows`; 0 in unused rows of packed ones, past `count`."""
    one = within_sequence(x[0], starts_ptr, first, count, 0.0, ROWS) * scale
    if len(x) > 1:
        store_rows(ptr, strides, first, extent, one, HELD, ROWS, HELD, UPCAST)
        more = within_sequence(x[1], starts_ptr, first, count, 0.0, ROWS) * scale
        at = ptr + HELD * strides[3]
        store_rows(at, strides, first, extent, more, SIZE - HELD, ROWS, WIDTH - HELD, UPCAST)
    else:
        store_rows(ptr, strides, first, extent, one, SIZE, ROWS, WIDTH, UPCAST)
