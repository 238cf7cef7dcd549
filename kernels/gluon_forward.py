"""The forward kernel for Hopper: softmax runs beside the matrix products, copies beside both.

A program has three parts that run at once. The loader, one warp, copies tiles of keys and values
to shared memory by the copy engine (TMA), as far ahead as there are buffers. Two consumers of four
warps, with ROWS queries each, multiply and take softmax. A consumer issues the scores of tile t,
then the weights of tile t - 1 times values, and takes the softmax of t while the second runs.

Each buffer has two mbarriers. `ready` counts the loader and the bytes that arrive, `free` the
consumers that are done; the n-th use of a buffer has phase n & 1 of both. A program takes the same
queries of several heads in turn: uses and phases run on from head to head, so that the next head's
tiles are on their way while the last one's results are stored.

With TURNS the consumers issue their products one after the other, tile by tile, so that the softmax
of one falls beside the products of the other. Each consumer's barrier counts the other's turns.

Gluon is Triton's lower level, and Triton's interpreter can't run it. What this kernel uses of it:
allocate_shared_memory (index, reshape, permute), mbarrier (init, expect, wait, arrive), tma
(async_copy_global_to_shared), fence_async_shared, warp_specialize, warpgroup_mma (asynchronous)
and its wait; arange, zeros, full, where, maximum, max, sum, exp2, log2, cast, convert_layout, load
and store. The functions of kernels/common.py that it calls compute scalars, or one element at a
time. The same names stand in Triton 3.6 to 3.9, but for the copy's, see `start_copy`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_graph.kernels.common import (
    LN2,
    count_tiles,
    full_tile,
    head_ptr,
    in_scores,
    line_of,
    list_at,
    listed_block,
    mixed_tile,
    natural,
    place_program,
    raise_to,
    softmax_step,
    tile_bounds,
)

CONSUMERS: gl.constexpr = gl.constexpr(2)
ROWS: gl.constexpr = gl.constexpr(64)  # queries of one consumer: what wgmma takes at a time
OWN: gl.constexpr = gl.constexpr(CONSUMERS.value * ROWS.value)  # queries of a program
WARPS: gl.constexpr = gl.constexpr(4)  # of one consumer
CONSUMER_REGISTERS: gl.constexpr = gl.constexpr(240)  # of a thread, and
LOADER_REGISTERS: gl.constexpr = gl.constexpr(24)  # 2 * 128 * 240 + 128 * 24 fit into 65536


@gluon.jit(do_not_specialize=["H", "M", "TOGETHER"])
def gluon_forward(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, max_ptr, sinks_ptr, lists_ptr,
    data, numbers, o_strides, lists_strides, sinks_stride, H, GROUP, EACH, M, N, TOGETHER, scale,
    E: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LAST_FIRST: gl.constexpr,
    KEEP: gl.constexpr, STRIP: gl.constexpr, CHANGE: gl.constexpr, FOLD: gl.constexpr,
    LISTED: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One program: OWN queries of EACH heads, a divisor of H, in turn, against all keys that they
    may see.

    q [B,H,M,D], k [B,G,N,D], v [B,G,N,E] by descriptors of tiles [1,1,ROWS or BLOCK_N,width], in
    which what lies outside is 0 -> o [B,H,M,E], lse and max [B,H,M]; the rest as in
    kernels/forward.py. MASKED: whether a tile may be mixed; without, each is full. TURNS: above.
    """
    b, h, first, walk = place_walk(
        lists_ptr, lists_strides, H, EACH, M, N, TOGETHER, data, numbers,
        STRIP, OWN, BLOCK_N, LAST_FIRST, LISTED, MASKED, False,
    )  # fmt: skip
    queries = make_ring(q_desc, CONSUMERS, 1)
    keys, values = make_ring(k_desc, STAGES, CONSUMERS), make_ring(v_desc, STAGES, CONSUMERS)
    turns = make_barriers(CONSUMERS, 1) if TURNS else ()  # whose turn it is
    inputs = queries, keys, values, turns
    fence_async_shared()
    outputs = o_ptr, o_strides, lse_ptr, max_ptr, sinks_ptr, sinks_stride, H
    gl.warp_specialize(
        [
            (consume, (0, inputs, outputs, walk, (b, h, first, M, N), EACH, data, numbers, scale, E,
                       BLOCK_N, STAGES, KEEP, CHANGE, FOLD, LISTED, MASKED, TURNS)),
            (consume, (1, inputs, outputs, walk, (b, h, first + ROWS, M, N), EACH, data, numbers,
                       scale, E, BLOCK_N, STAGES, KEEP, CHANGE, FOLD, LISTED, MASKED, TURNS)),
            (load, (q_desc, k_desc, v_desc, inputs, walk, (b, h, first, M, N), EACH, GROUP,
                    BLOCK_N, STAGES, LISTED, MASKED)),
        ],
        [WARPS, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def place_walk(
    lists_ptr, lists_strides, H, EACH, M, N, TOGETHER, data, numbers,
    STRIP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LAST_FIRST: gl.constexpr,
    LISTED: gl.constexpr, MASKED: gl.constexpr, BY_KEYS: gl.constexpr,
):  # fmt: skip
    """b, the first of EACH heads, the first query, or, BY_KEYS, key, of this program; and, for
    `head_tiles`, the first head's list, how far the next one's lies from it, and `tile_bounds`."""
    blocks = gl.cdiv(N, BLOCK_N) if BY_KEYS else gl.cdiv(M, BLOCK_M)
    place, group, b = place_program(blocks, H // EACH, TOGETHER, LAST_FIRST)
    h = group * EACH
    block = listed_block(place, lists_ptr, lists_strides, LISTED)
    list_ptr = list_at(lists_ptr, lists_strides, b, h, place)
    if MASKED:
        bounds = tile_bounds(
            block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N, LISTED, BY_KEYS
        )
    else:
        count = gl.cdiv(M, BLOCK_M) if BY_KEYS else gl.cdiv(N, BLOCK_N)
        bounds = 0, 0, count, count
    return b, h, block * OWN, (list_ptr, lists_strides[1], bounds)


@gluon.jit
def head_tiles(r, walk, LISTED: gl.constexpr):
    """What the r-th head of a program visits: list, bounds, how many tiles are full and mixed."""
    list_ptr, stride, bounds = walk
    if LISTED:
        list_ptr += r * stride
    full, mixed = count_tiles(list_ptr, bounds, LISTED)
    return list_ptr, bounds, full, mixed


@gluon.jit
def some_tiles(r, walk, past, LISTED: gl.constexpr, MASKED: gl.constexpr):
    """`head_tiles`; in place of no tile one `past` the last key, where all is 0 and masked."""
    list_ptr, bounds, full, mixed = head_tiles(r, walk, LISTED)
    if MASKED:
        start, full_start, full_stop, stop = bounds
        blind = full + mixed == 0
        start, mixed = gl.where(blind, past, start), gl.where(blind, 1, mixed)
        if LISTED:  # an empty list has its count of full tiles, 0, for a tile
            list_ptr += gl.where(blind, -2, 0)
        else:
            full_start = gl.where(blind, past, full_start)
            full_stop = gl.where(blind, past, full_stop)
        bounds = start, full_start, full_stop, stop
    return list_ptr, bounds, full, mixed


@gluon.jit
def make_ring(desc, COUNT: gl.constexpr, READERS: gl.constexpr):
    """COUNT buffers that READERS consumers read, and their barriers, `ready` and `free`."""
    return make_buffers(desc, COUNT), make_barriers(COUNT, 1), make_barriers(COUNT, READERS)


@gluon.jit
def make_buffers(desc, COUNT: gl.constexpr):
    """Buffers in shared memory for COUNT tiles of a descriptor."""
    return gl.allocate_shared_memory(
        desc.dtype, [COUNT, 1, 1, desc.block_shape[2], desc.block_shape[3]], desc.layout
    )


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers, each of which waits for ARRIVALS."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(bars.index(n), count=ARRIVALS)
    return bars


@gluon.jit
def flat(buffer):
    """A tile in shared memory [1,1,rows,width] as [rows,width]."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def visited_tile(t, tiles, LISTED: gl.constexpr):
    """The tile that is visited t-th: first the mixed ones, then the full ones.

    Most masks have few mixed tiles, and the forward's first is not in a loop.
    """
    list_ptr, bounds, full, mixed = tiles
    if t < mixed:
        n = mixed_tile(t, list_ptr, bounds, full, LISTED)
    else:
        n = full_tile(t - mixed, list_ptr, bounds, LISTED)
    return n


@gluon.jit
def load(
    q_desc, k_desc, v_desc, inputs, walk, own, EACH, GROUP,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LISTED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The loader: of each head the queries of each consumer, then each tile of keys and values."""
    queries, keys, values, _ = inputs
    q, q_ready, q_free = queries
    k, k_ready, k_free = keys
    v, v_ready, v_free = values
    b, head, first, _, N = own
    done = 0
    for r in range(EACH):
        h = head + r
        g = h // GROUP
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_free.index(c), r & 1 ^ 1)
            copy(q_desc, b, h, first + c * ROWS, q_ready.index(c), q.index(c))
        tiles = some_tiles(r, walk, gl.cdiv(N, BLOCK_N), LISTED, MASKED)
        count = tiles[2] + tiles[3]
        for t in range(count):
            n = visited_tile(t, tiles, LISTED)
            at, phase = (done + t) % STAGES, (done + t) // STAGES & 1
            mbarrier.wait(k_free.index(at), phase ^ 1)
            copy(k_desc, b, g, n * BLOCK_N, k_ready.index(at), k.index(at))
            mbarrier.wait(v_free.index(at), phase ^ 1)
            copy(v_desc, b, g, n * BLOCK_N, v_ready.index(at), v.index(at))
        done += count


@gluon.jit
def copy(desc, b, h, row, ready, buffer):
    """Start to copy rows row.. of x[b,h] to a buffer; `ready` counts the bytes."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    start_copy(desc, b, h, row, ready, buffer)


if hasattr(tma, "async_load"):  # as Triton 3.9 calls it

    @gluon.jit
    def start_copy(desc, b, h, row, ready, buffer):
        """Let the copy engine fill a buffer with rows row.. of x[b,h]."""
        tma.async_load(desc, [b, h, row, 0], ready, buffer)

else:

    @gluon.jit
    def start_copy(desc, b, h, row, ready, buffer):
        """Let the copy engine fill a buffer with rows row.. of x[b,h]."""
        tma.async_copy_global_to_shared(desc, [b, h, row, 0], ready, buffer)


@gluon.jit
def consume(
    which: gl.constexpr, inputs, outputs, walk, own, EACH, data, numbers, scale,
    E: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, FOLD: gl.constexpr,
    LISTED: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """A consumer: ROWS queries of each head against all tiles, and their results."""
    b, head, first, M, N = own
    done = 0
    for r in range(EACH):
        tiles = some_tiles(r, walk, gl.cdiv(N, BLOCK_N), LISTED, MASKED)
        attend_head(
            which, r, done, inputs, outputs, tiles, (b, head + r, opaque(first), M, N), data,
            numbers, scale, E, BLOCK_N, STAGES, KEEP, CHANGE, FOLD, LISTED, MASKED, TURNS,
        )  # fmt: skip
        done += tiles[2] + tiles[3]


@gluon.jit
def opaque(x):
    """x int32, of which the compiler knows nothing.

    What follows from it is computed for each head anew, and takes no registers until the next.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def attend_head(
    which: gl.constexpr, r, done, inputs, outputs, tiles, own, data, numbers, scale,
    E: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, FOLD: gl.constexpr,
    LISTED: gl.constexpr, MASKED: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """ROWS queries of the r-th head against all its tiles, and their results.

    done: the tiles of the heads before.
    """
    queries, keys, values, turns = inputs
    q, q_ready, q_free = queries
    k, k_ready, k_free = keys
    v, v_ready, v_free = values
    list_ptr, bounds, full, mixed = tiles
    count = full + mixed
    WIDTH: gl.constexpr = v.shape[4]
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    SUMS: gl.constexpr = product_layout(WIDTH)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)

    q = flat(q.index(which))
    mbarrier.wait(q_ready.index(which), r & 1)
    mbarrier.wait(k_ready.index(done % STAGES), done // STAGES & 1)
    n = visited_tile(0, tiles, LISTED)
    if TURNS:
        mbarrier.wait(turns.index(which), done & 1 ^ 1 - which)
    issued = multiply_keys(q, k, done % STAGES, SCORES, BLOCK_N)
    if TURNS:
        mbarrier.arrive(turns.index(1 - which), count=1)
    s = warpgroup_mma_wait(0, [issued])
    mbarrier.arrive(k_free.index(done % STAGES), count=1)
    p, m, total, _ = softmax(
        s, m, total, n * BLOCK_N, own, data, numbers, scale, SCORES, KEEP, CHANGE, FOLD, MASKED
    )
    p = as_operand(p, v.dtype, SUMS)
    w = done + 1
    mbarrier.wait(k_ready.index(w % STAGES), w // STAGES & 1, pred=count > 1)
    if MASKED:
        for t in range(1, mixed):
            n = mixed_tile(t, list_ptr, bounds, full, LISTED)
            p, acc, m, total = step(
                which, done + t, done + count, n * BLOCK_N, q, p, acc, m, total, inputs, own, data,
                numbers, scale, SCORES, SUMS, BLOCK_N, STAGES, KEEP, CHANGE, FOLD, True, TURNS,
            )  # fmt: skip
    for t in range(gl.maximum(mixed, 1), count):
        n = full_tile(t - mixed, list_ptr, bounds, LISTED)
        p, acc, m, total = step(
            which, done + t, done + count, n * BLOCK_N, q, p, acc, m, total, inputs, own, data,
            numbers, scale, SCORES, SUMS, BLOCK_N, STAGES, KEEP, CHANGE, FOLD, False, TURNS,
        )  # fmt: skip
    mbarrier.arrive(q_free.index(which), count=1)
    last = done + count - 1
    mbarrier.wait(v_ready.index(last % STAGES), last // STAGES & 1)
    acc = warpgroup_mma_wait(
        0, [warpgroup_mma(p, flat(v.index(last % STAGES)), acc, is_async=True)]
    )
    mbarrier.arrive(v_free.index(last % STAGES), count=1)
    store(acc, m, total, outputs, own, E, FOLD, SUMS)


@gluon.constexpr_function
def product_layout(columns):
    """How a consumer's registers hold a product [ROWS,columns]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, columns, 16])


@gluon.jit
def multiply_keys(q, k, at, SCORES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Issue q times the keys of a buffer: scores [ROWS,BLOCK_N]."""
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    keys = flat(k.index(at)).permute((1, 0))
    return warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """Weights as the left operand of a product; they stay in registers."""
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def step(
    which: gl.constexpr, t, count, key, q, p, acc, m, total, inputs, own, data, numbers, scale,
    SCORES: gl.constexpr, SUMS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, FOLD: gl.constexpr, MIXED: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """The scores and weights of tile t, and acc with the values of tile t - 1 and its weights p.

    The wait for the next keys stands between the exponentials and the wait for the second product:
    it is a branch, without which the compiler moves that second wait before the exponentials.
    """
    _, keys, values, turns = inputs
    k, k_ready, k_free = keys
    v, v_ready, v_free = values
    if TURNS:
        mbarrier.wait(turns.index(which), t & 1 ^ 1 - which)
    issued = multiply_keys(q, k, t % STAGES, SCORES, BLOCK_N)
    u = t - 1
    mbarrier.wait(v_ready.index(u % STAGES), u // STAGES & 1)
    summed = warpgroup_mma(p, flat(v.index(u % STAGES)), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - which), count=1)
    s = warpgroup_mma_wait(1, [issued])
    mbarrier.arrive(k_free.index(t % STAGES), count=1)
    weights, m, total, shrink = softmax(
        s, m, total, key, own, data, numbers, scale, SCORES, KEEP, CHANGE, FOLD, MIXED
    )
    following = as_operand(weights, v.dtype, SUMS)
    w = t + 1
    mbarrier.wait(k_ready.index(w % STAGES), w // STAGES & 1, pred=w < count)
    acc, p, following = warpgroup_mma_wait(0, [summed, p, following])
    mbarrier.arrive(v_free.index(u % STAGES), count=1)
    acc = acc * by_rows(shrink, SUMS)
    return following, acc, m, total


@gluon.jit
def by_rows(x, SUMS: gl.constexpr):
    """x [ROWS] as [ROWS,1] beside acc."""
    return gl.convert_layout(x, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def softmax(
    s, m, total, key, own, data, numbers, scale, SCORES: gl.constexpr,
    KEEP: gl.constexpr, CHANGE: gl.constexpr, FOLD: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax over keys `key`.. : p, m, total, and what shrinks acc."""
    b, h, first, M, N = own
    i = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))[:, None]
    j = key + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, SCORES))[None, :]
    p, m, shrink = softmax_step(
        s, m, b, h, i, j, M, N, scale, data, numbers, KEEP, CHANGE, FOLD, MIXED
    )
    return p, m, total * shrink + gl.sum(p, 1), shrink


@gluon.jit
def store(
    acc, m, total, outputs, own, E: gl.constexpr, FOLD: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Store o and the statistics of ROWS queries."""
    o_ptr, o_strides, lse_ptr, max_ptr, sinks_ptr, sinks_stride, H = outputs
    b, h, first, M, _ = own
    o_ptr, line = head_ptr(o_ptr, o_strides, b, h), line_of(b, h, H, M)
    row = gl.arange(0, ROWS, layout=m.type.layout)
    if max_ptr is not None:
        # A maximum drops NaN, and the sum keeps it.
        lost = (total != total) & (m != float("inf"))
        gl.store(
            max_ptr + line + first + row,
            gl.where(lost, total, natural(m, FOLD)),
            mask=row < M - first,
        )
    shrink = 1.0
    if sinks_ptr is not None:
        sink = in_scores(gl.load(sinks_ptr + h * sinks_stride).to(gl.float32), FOLD)
        new = gl.maximum(m, sink)
        safe = gl.where(new == float("-inf"), 0.0, new)
        shrink = raise_to(m - safe, FOLD)
        total = total * shrink + raise_to(sink - safe, FOLD)
        m = new
    blind = total == 0  # rows that saw nothing
    total = gl.where(blind, 1.0, total)
    if lse_ptr is not None:
        lse = gl.where(blind, float("-inf"), natural(m, FOLD) + gl.log2(total) * LN2)
        gl.store(lse_ptr + line + first + row, lse, mask=row < M - first)
    acc = acc * by_rows(shrink / total, SUMS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))[:, None]
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, SUMS))[None, :]
    at = o_ptr + gl.cast(first, gl.int64) * o_strides[2] + row * o_strides[2]
    at += column * o_strides[3]
    inside = (row < M - first) & (column < E)
    gl.store(at, acc.to(o_ptr.dtype.element_ty), mask=inside)
