"""Lists the tiles left by a mask, on the device, if data decide."""

import triton
import triton.language as tl

from attn_graph.kernels.common import SIZES, head_ptr, place_program


@triton.jit(do_not_specialize=("H", "rows", "columns"))
def extremes(
    x_ptr,
    least_ptr,
    most_ptr,
    strides,
    H,
    rows,
    columns,
    sizes,
    starts,
    TILE_I: tl.constexpr,
    TILE_J: tl.constexpr,
    WIDTH_I: tl.constexpr,
    WIDTH_J: tl.constexpr,
):
    """One program: the least and the greatest element of x [B,H,...] for a tile of places.

    Query i reads row (starts[0] + i) // sizes[0] of x, key j column (starts[1] + j) // sizes[1].
    rows, columns: how many queries and keys there are. Both results are int64, in C order by batch
    entry, head and tile. WIDTH: powers of two, at least the rows and columns that a tile reads.
    """
    tiles_i, tiles_j = tl.cdiv(rows, TILE_I), tl.cdiv(columns, TILE_J)
    pid = tl.program_id(0)
    x, y = pid // tiles_j % tiles_i, pid % tiles_j
    each = pid // tiles_j // tiles_i
    i0, j0 = x * TILE_I + starts[0], y * TILE_J + starts[1]
    i1 = tl.minimum(i0 + TILE_I, rows + starts[0]) - 1
    j1 = tl.minimum(j0 + TILE_J, columns + starts[1]) - 1
    i = (i0 // sizes[0] + tl.arange(0, WIDTH_I))[:, None]
    j = (j0 // sizes[1] + tl.arange(0, WIDTH_J))[None, :]
    inside = (i <= i1 // sizes[0]) & (j <= j1 // sizes[1])
    at = head_ptr(x_ptr, strides, each // H, each % H)
    value = tl.load(
        at + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3], mask=inside, other=0
    )
    value = value.to(tl.int64)
    least = tl.where(inside, value, 0x7FFFFFFFFFFFFFFF)
    most = tl.where(inside, value, -0x7FFFFFFFFFFFFFFF)
    tl.store(least_ptr + pid, tl.min(tl.min(least, 1), 0))
    tl.store(most_ptr + pid, tl.max(tl.max(most, 1), 0))


@triton.jit(do_not_specialize=SIZES)
def list_tiles(
    lists_ptr, kinds, data, numbers, lists_strides, H, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, BY_KEYS: tl.constexpr,
    CLASSIFY: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of one block of queries, or, BY_KEYS, of one block of keys.

    A list is its block, the number of full tiles, the number of mixed ones, then the tiles, full
    ones first. With `kinds`, for another library's kernels, these get how many are mixed, which,
    how many are full, and which; a tile past the last query or key is mixed there.
    TILES: a power of two, at least the number of tiles.
    """
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    block, h, b = place_program(columns if BY_KEYS else rows, H, 1, False)
    t = tl.arange(0, TILES)
    count = rows if BY_KEYS else columns
    near = tl.minimum(t, count - 1)
    x, y = (near, block) if BY_KEYS else (block, near)
    i0, j0 = x * BLOCK_M, y * BLOCK_N
    i1, j1 = tl.minimum(i0 + BLOCK_M, M) - 1, tl.minimum(j0 + BLOCK_N, N) - 1
    full, some = CLASSIFY(b, h, i0, i1, j0, j1, x, y, data, numbers)
    whole = i0 + BLOCK_M <= M if BY_KEYS else j0 + BLOCK_N <= N
    if kinds is not None:
        whole = (i0 + BLOCK_M <= M) & (j0 + BLOCK_N <= N)
    inside = t < count
    some = (some & inside) != 0  # a vector, even if CLASSIFY gives one scalar
    full = (full & some & whole) != 0
    mixed = some & (full == 0)
    ones, others = full.to(tl.int32), mixed.to(tl.int32)
    most = tl.sum(ones, 0)
    if kinds is not None:
        line = (b * H + h) * (columns if BY_KEYS else rows) + block
        first = line.to(tl.int64) * count - 1
        tl.store(kinds[0] + line, tl.sum(others, 0))
        tl.store(kinds[1] + first + tl.cumsum(others, 0), t, mask=mixed)
        tl.store(kinds[2] + line, most)
        tl.store(kinds[3] + first + tl.cumsum(ones, 0), t, mask=full)
    else:
        lists_ptr = head_ptr(lists_ptr, lists_strides, b, h) + block * lists_strides[2]
        tl.store(lists_ptr, block)
        tl.store(lists_ptr + 1, most)
        tl.store(lists_ptr + 2, tl.sum(others, 0))
        tl.store(lists_ptr + 2 + tl.cumsum(ones, 0), t, mask=full)
        tl.store(lists_ptr + 2 + most + tl.cumsum(others, 0), t, mask=mixed)
