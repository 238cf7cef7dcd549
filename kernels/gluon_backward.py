"""The backward kernels for Hopper: softmax and its derivative run beside the matrix products.

Programs are made as in kernels/gluon_forward.py, of a loader and two consumers. A consumer of
`gluon_key_gradient` owns ROWS keys, and tiles of queries and do pass by; one of
`gluon_query_gradient` owns ROWS queries, and tiles of keys and values pass by. Each issues the
scores of tile t and the last product of tile t - 1, which adds to dk or to dq and needs what t - 1
ended with; it takes the weights of t while that one runs. Weights and ds stay in registers: scores
of `gluon_key_gradient` are transposed, [keys,queries]. What these need of each query, lse in base 2
and delta, the loader brings beside the tile.

A buffer has two mbarriers: `ready` counts the copies, and the loader where it stores statistics,
`free` the consumers that are done with it, which is one tile later than its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_graph.kernels.backward import differentiate_scores, outweigh, weigh_scores
from attn_graph.kernels.common import full_tile, head_ptr, line_of, mixed_tile
from attn_graph.kernels.gluon_forward import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOADER_REGISTERS,
    OWN,
    ROWS,
    WARPS,
    as_operand,
    copy,
    flat,
    head_tiles,
    make_barriers,
    make_buffers,
    place_walk,
    product_layout,
    visited_tile,
)


@gluon.jit(do_not_specialize=["H", "M", "N", "TOGETHER"])
def gluon_key_gradient(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, lists_ptr,
    data, numbers, dk_strides, dv_strides, lists_strides, H, GROUP, M, N, TOGETHER, scale,
    D: gl.constexpr, E: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    LAST_FIRST: gl.constexpr, KEEP: gl.constexpr, STRIP: gl.constexpr, CHANGE: gl.constexpr,
    BACK: gl.constexpr, LISTED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One program: dk and dv of OWN keys, from one query head.

    q [B,H,M,D], k [B,G,N,D], v [B,G,N,E], do [B,H,M,E] by descriptors, lse and delta [B,H,M] ->
    dk [B,H,N,D], dv [B,H,N,E]; the rest as in kernels/backward.py. MASKED: whether a tile may be
    mixed; without, each is full. Each query sees a key.
    """
    b, h, first, walk = place_walk(
        lists_ptr, lists_strides, H, 1, M, N, TOGETHER, data, numbers,
        STRIP, BLOCK_M, OWN, LAST_FIRST, LISTED, MASKED, True,
    )  # fmt: skip
    tiles = head_tiles(0, walk, LISTED)
    own = make_own(k_desc, v_desc)
    passing = make_buffers(q_desc, STAGES), make_buffers(do_desc, STAGES)
    lines = make_lines(STAGES, BLOCK_M), make_lines(STAGES, BLOCK_M)
    turns = make_barriers(STAGES, 3), make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    line = line_of(b, h, H, M)
    dk = head_ptr(dk_ptr, dk_strides, b, h), dk_strides[2], dk_strides[3]
    dv = head_ptr(dv_ptr, dv_strides, b, h), dv_strides[2], dv_strides[3]
    gl.warp_specialize(
        [
            (sum_queries, (0, own, passing, lines, turns, (dk, dv), tiles,
                           (b, h, first, M, N), data, numbers, scale,
                           D, E, KEEP, CHANGE, BACK, LISTED, MASKED)),
            (sum_queries, (1, own, passing, lines, turns, (dk, dv), tiles,
                           (b, h, first + ROWS, M, N), data, numbers, scale,
                           D, E, KEEP, CHANGE, BACK, LISTED, MASKED)),
            (load_queries, (q_desc, k_desc, v_desc, do_desc, lse_ptr + line, delta_ptr + line,
                            own, passing, lines, turns, tiles, b, h, h // GROUP, first, M, LISTED)),
        ],
        [WARPS, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["H", "M", "TOGETHER"])
def gluon_query_gradient(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_ptr, lists_ptr,
    data, numbers, dq_strides, lists_strides, H, GROUP, M, N, TOGETHER, scale,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    LAST_FIRST: gl.constexpr, KEEP: gl.constexpr, STRIP: gl.constexpr, CHANGE: gl.constexpr,
    BACK: gl.constexpr, LISTED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One program: dq [B,H,M,D] of OWN queries; the rest as above."""
    b, h, first, walk = place_walk(
        lists_ptr, lists_strides, H, 1, M, N, TOGETHER, data, numbers,
        STRIP, OWN, BLOCK_N, LAST_FIRST, LISTED, MASKED, False,
    )  # fmt: skip
    tiles = head_tiles(0, walk, LISTED)
    own = make_own(q_desc, do_desc)
    passing = make_buffers(k_desc, STAGES), make_buffers(v_desc, STAGES)
    turns = make_barriers(STAGES, 2), make_barriers(STAGES, CONSUMERS)
    fence_async_shared()
    line = line_of(b, h, H, M)
    lines = lse_ptr + line, delta_ptr + line
    dq = head_ptr(dq_ptr, dq_strides, b, h), dq_strides[2], dq_strides[3]
    gl.warp_specialize(
        [
            (sum_keys, (0, own, passing, lines, turns, dq, tiles, (b, h, first, M, N),
                        data, numbers, scale, D, KEEP, CHANGE, BACK, LISTED, MASKED)),
            (sum_keys, (1, own, passing, lines, turns, dq, tiles, (b, h, first + ROWS, M, N),
                        data, numbers, scale, D, KEEP, CHANGE, BACK, LISTED, MASKED)),
            (load_keys, (q_desc, k_desc, v_desc, do_desc, own, passing, turns, tiles,
                         b, h, h // GROUP, first, LISTED)),
        ],
        [WARPS, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def make_own(one_desc, other_desc):
    """Buffers for what each consumer owns of two tensors, and a barrier for each."""
    one, other = make_buffers(one_desc, CONSUMERS), make_buffers(other_desc, CONSUMERS)
    return one, other, make_barriers(CONSUMERS, 2)


@gluon.jit
def make_lines(COUNT: gl.constexpr, SIZE: gl.constexpr):
    """Buffers in shared memory for COUNT lines of a statistic."""
    return gl.allocate_shared_memory(
        gl.float32, [COUNT, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def load_own(one_desc, other_desc, own, b, h, first):
    """Copy what each consumer owns: ROWS rows of two tensors."""
    one, other, ready = own
    for c in gl.static_range(CONSUMERS):
        copy(one_desc, b, h, first + c * ROWS, ready.index(c), one.index(c))
        copy(other_desc, b, h, first + c * ROWS, ready.index(c), other.index(c))


@gluon.jit
def load_queries(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr,
    own, passing, lines, turns, tiles, b, h, g, first, M, LISTED: gl.constexpr,
):  # fmt: skip
    """The loader of `gluon_key_gradient`: keys and values, then each tile with its statistics."""
    q, do = passing
    lse, surplus = lines
    ready, free = turns
    STAGES: gl.constexpr = q.shape[0]
    BLOCK_M: gl.constexpr = q.shape[3]
    load_own(k_desc, v_desc, own, b, g, first)
    row = gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for t in range(tiles[2] + tiles[3]):
        query = visited_tile(t, tiles, LISTED) * BLOCK_M
        inside = row < M - query
        of_lse = outweigh(gl.load(lse_ptr + query + row, mask=inside, other=float("-inf")))
        of_delta = gl.load(delta_ptr + query + row, mask=inside, other=0.0)
        at = t % STAGES
        mbarrier.wait(free.index(at), t // STAGES & 1 ^ 1)
        copy(q_desc, b, h, query, ready.index(at), q.index(at))
        copy(do_desc, b, h, query, ready.index(at), do.index(at))
        lse.index(at).store(of_lse)
        surplus.index(at).store(of_delta)
        mbarrier.arrive(ready.index(at), count=1)


@gluon.jit
def load_keys(
    q_desc, k_desc, v_desc, do_desc, own, passing, turns, tiles, b, h, g, first,
    LISTED: gl.constexpr,
):  # fmt: skip
    """The loader of `gluon_query_gradient`: queries and do, then each tile of keys and values."""
    k, v = passing
    ready, free = turns
    STAGES: gl.constexpr = k.shape[0]
    load_own(q_desc, do_desc, own, b, h, first)
    for t in range(tiles[2] + tiles[3]):
        key = visited_tile(t, tiles, LISTED) * k.shape[3]
        at = t % STAGES
        mbarrier.wait(free.index(at), t // STAGES & 1 ^ 1)
        copy(k_desc, b, g, key, ready.index(at), k.index(at))
        copy(v_desc, b, g, key, ready.index(at), v.index(at))


@gluon.jit
def sum_queries(
    which: gl.constexpr, own, passing, lines, turns, outputs, tiles, place, data, numbers, scale,
    D: gl.constexpr, E: gl.constexpr, KEEP: gl.constexpr, CHANGE: gl.constexpr,
    BACK: gl.constexpr, LISTED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A consumer of `gluon_key_gradient`: ROWS keys against all tiles, and their dk and dv."""
    k, v, own_ready = own
    q, do = passing
    list_ptr, bounds, full, mixed = tiles
    BLOCK_M: gl.constexpr = q.shape[3]
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    WIDTH_D: gl.constexpr = q.shape[4]
    WIDTH_E: gl.constexpr = do.shape[4]
    OF_K: gl.constexpr = product_layout(WIDTH_D)
    OF_V: gl.constexpr = product_layout(WIDTH_E)
    dk = gl.zeros([ROWS, WIDTH_D], gl.float32, OF_K)
    dv = gl.zeros([ROWS, WIDTH_E], gl.float32, OF_V)
    ds = as_operand(gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES), q.dtype, OF_K)
    k, v = flat(k.index(which)), flat(v.index(which))
    mbarrier.wait(own_ready.index(which), 0)
    if MASKED:
        for t in range(mixed):
            n = mixed_tile(t, list_ptr, bounds, full, LISTED)
            dk, dv, ds = add_queries(
                t, n * BLOCK_M, k, v, dk, dv, ds, passing, lines, turns, place, data, numbers,
                scale, SCORES, OF_K, OF_V, KEEP, CHANGE, BACK, True,
            )  # fmt: skip
    for t in range(mixed, mixed + full):
        n = full_tile(t - mixed, list_ptr, bounds, LISTED)
        dk, dv, ds = add_queries(
            t, n * BLOCK_M, k, v, dk, dv, ds, passing, lines, turns, place, data, numbers,
            scale, SCORES, OF_K, OF_V, KEEP, CHANGE, BACK, False,
        )  # fmt: skip
    dk = add_last(mixed + full, ds, q, dk)
    store_sums(outputs[0], place[2], place[4], dk * scale, D, OF_K)
    store_sums(outputs[1], place[2], place[4], dv, E, OF_V)


@gluon.jit
def sum_keys(
    which: gl.constexpr, own, passing, lines, turns, output, tiles, place, data, numbers, scale,
    D: gl.constexpr, KEEP: gl.constexpr, CHANGE: gl.constexpr,
    BACK: gl.constexpr, LISTED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """A consumer of `gluon_query_gradient`: ROWS queries against all tiles, and their dq."""
    q, do, own_ready = own
    k, _ = passing
    list_ptr, bounds, full, mixed = tiles
    BLOCK_N: gl.constexpr = k.shape[3]
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    WIDTH: gl.constexpr = k.shape[4]
    OF_Q: gl.constexpr = product_layout(WIDTH)
    dq = gl.zeros([ROWS, WIDTH], gl.float32, OF_Q)
    ds = as_operand(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES), k.dtype, OF_Q)
    row = place[2] + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    lse = outweigh(gl.load(lines[0] + row, mask=row < place[3], other=float("-inf")))[:, None]
    surplus = gl.load(lines[1] + row, mask=row < place[3], other=0.0)[:, None]
    q, do = flat(q.index(which)), flat(do.index(which))
    mbarrier.wait(own_ready.index(which), 0)
    if MASKED:
        for t in range(mixed):
            n = mixed_tile(t, list_ptr, bounds, full, LISTED)
            dq, ds = add_keys(
                t, n * BLOCK_N, q, do, lse, surplus, dq, ds, passing, turns, place, data, numbers,
                scale, SCORES, OF_Q, KEEP, CHANGE, BACK, True,
            )  # fmt: skip
    for t in range(mixed, mixed + full):
        n = full_tile(t - mixed, list_ptr, bounds, LISTED)
        dq, ds = add_keys(
            t, n * BLOCK_N, q, do, lse, surplus, dq, ds, passing, turns, place, data, numbers,
            scale, SCORES, OF_Q, KEEP, CHANGE, BACK, False,
        )  # fmt: skip
    dq = add_last(mixed + full, ds, k, dq)
    store_sums(output, place[2], place[3], dq * scale, D, OF_Q)


@gluon.jit
def add_queries(
    t, query, k, v, dk, dv, ds, passing, lines, turns, place, data, numbers, scale,
    SCORES: gl.constexpr, OF_K: gl.constexpr, OF_V: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, BACK: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """dk with tile t - 1 and its ds, dv with tile t, and the ds of t.

    The second wait for the tile ends at once. It is a branch, without which the compiler moves the
    wait for dk before the exponentials.
    """
    b, h, first, M, N = place
    ready, free = turns
    STAGES: gl.constexpr = passing[0].shape[0]
    at, before = t % STAGES, gl.maximum(t - 1, 0) % STAGES  # of the first tile, ds is 0 before
    mbarrier.wait(ready.index(at), t // STAGES & 1)
    q, do = flat(passing[0].index(at)), flat(passing[1].index(at))
    s = multiply_tiles(k, q, SCORES)
    dk = warpgroup_mma(ds, flat(passing[0].index(before)), dk, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    i = query + gl.arange(0, q.shape[0], layout=gl.SliceLayout(0, SCORES))[None, :]
    j = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))[:, None]
    lse = lines[0].index(at).load(gl.SliceLayout(0, SCORES))[None, :]
    p = weigh_scores(
        s, lse, 0.0, b, h, i, j, M, N, scale, data, numbers,
        CHANGE, KEEP, MIXED, MIXED and CHANGE is not None,
    )  # fmt: skip
    mbarrier.wait(ready.index(at), t // STAGES & 1)
    dk, ds = warpgroup_mma_wait(0, [dk, ds])
    mbarrier.arrive(free.index(before), count=1, pred=t > 0)
    dp = multiply_tiles(v, do, SCORES)
    weights = as_operand(p, do.dtype, OF_V)
    dv = warpgroup_mma(weights, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    surplus = lines[1].index(at).load(gl.SliceLayout(0, SCORES))[None, :]
    ds = differentiate_scores(
        p, dp, s, surplus, b, h, i, j, M, N, scale, data, numbers, BACK, MIXED
    )
    ds = as_operand(ds, q.dtype, OF_K)
    dv, weights, ds = warpgroup_mma_wait(0, [dv, weights, ds])
    return dk, dv, ds


@gluon.jit
def add_keys(
    t, key, q, do, lse, surplus, dq, ds, passing, turns, place, data, numbers, scale,
    SCORES: gl.constexpr, OF_Q: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, BACK: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """dq with tile t - 1 and its ds, and the ds of t; the second wait as in `add_queries`."""
    b, h, first, M, N = place
    ready, free = turns
    STAGES: gl.constexpr = passing[0].shape[0]
    at, before = t % STAGES, gl.maximum(t - 1, 0) % STAGES  # of the first tile, ds is 0 before
    mbarrier.wait(ready.index(at), t // STAGES & 1)
    k, v = flat(passing[0].index(at)), flat(passing[1].index(at))
    s = multiply_tiles(q, k, SCORES)
    dp = multiply_tiles(do, v, SCORES)
    dq = warpgroup_mma(ds, flat(passing[0].index(before)), dq, is_async=True)
    s = warpgroup_mma_wait(2, [s])
    i = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))[:, None]
    j = key + gl.arange(0, k.shape[0], layout=gl.SliceLayout(0, SCORES))[None, :]
    p = weigh_scores(
        s, lse, 0.0, b, h, i, j, M, N, scale, data, numbers, CHANGE, KEEP, MIXED, False
    )
    mbarrier.wait(ready.index(at), t // STAGES & 1)
    dp = warpgroup_mma_wait(1, [dp])
    following = differentiate_scores(
        p, dp, s, surplus, b, h, i, j, M, N, scale, data, numbers, BACK, MIXED
    )
    following = as_operand(following, k.dtype, OF_Q)
    dq, ds, following = warpgroup_mma_wait(0, [dq, ds, following])
    mbarrier.arrive(free.index(before), count=1, pred=t > 0)
    return dq, following


@gluon.jit
def multiply_tiles(a, b, SCORES: gl.constexpr):
    """Issue a b^T of two tiles in shared memory."""
    COLUMNS: gl.constexpr = b.shape[0]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def add_last(count, ds, passing, total):
    """The sum with the last of `count` tiles and its ds."""
    if count > 0:
        last = flat(passing.index((count - 1) % passing.shape[0]))
        total = warpgroup_mma_wait(0, [warpgroup_mma(ds, last, total, is_async=True)])
    return total


@gluon.jit
def store_sums(output, first, count, x, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Write x, rounded once, to the rows first.. of one head [count,SIZE]."""
    ptr, stride_row, stride_column = output
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = ptr + gl.cast(first, gl.int64) * stride_row + row * stride_row + column * stride_column
    inside = (row < count - first) & (column < SIZE)
    gl.store(at, x.to(ptr.dtype.element_ty), mask=inside)
