"""Code shared by kernels: a program's place, tiles of tensors, scores, masks and dropout.

The generated functions passed to kernels (`KEEP`, `CHANGE`, `BACK`, `STRIP`, see
`lowering/codegen/device_code.py`) take b and h as scalars, i and j as tensors that broadcast to the
tile, `data` (pointers of the tensors read by masks and modifiers) and `numbers` (their strides, and
integers of the masks).
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# For e4m3_in_half, of four bytes: the first two as the upper halves of 16 bits, then the others.
TWO_E4M3: tl.constexpr = tl.constexpr(
    "".join(
        f"""{{.reg .b32 x, size;
        prmt.b32 x, $2, 0, {bytes_};
        shr.b32 size, x, 1;
        and.b32 size, size, 0x3F803F80;
        and.b32 x, x, 0x80008000;
        or.b32 x, x, size;
        add.u32 size, size, 0x00800080;
        and.b32 size, size, 0x40004000;
        or.b32 ${n}, x, size;}}"""
        for n, bytes_ in enumerate(("0x1404", "0x3424"))
    )
)
FAR: tl.constexpr = tl.constexpr(1 << 30)  # beyond every position
# Parameters of which no kernel is made for 1 or for multiples of 16 apart: it would gain nothing.
SIZES = (
    *(
        "B",
        "H",
        "G",
        "GROUP",
        "SPLITS",
        "PARTS",
        "EACH",
        "M",
        "N",
        "T",
        "T_KEYS",
        "POOL",
        "TOGETHER",
    ),
    *("pages_stride", "threshold"),
)


@triton.jit
def place_program(blocks, H, TOGETHER, LAST_FIRST: tl.constexpr):
    """block, h, b of this program: all blocks of TOGETHER heads, then those of as many others.

    Of these heads, whose keys and values are to stay in cache, the same block comes one after
    another; blocks come from the first to the last, or, LAST_FIRST, the other way around, so that
    what takes longest is begun first.
    """
    pid = tl.program_id(0)
    earlier = pid // (blocks * TOGETHER) * TOGETHER
    heads = tl.minimum(TOGETHER, tl.num_programs(0) // blocks - earlier)
    rest = pid - earlier * blocks
    block, head = rest // heads, earlier + rest % heads
    if LAST_FIRST:
        block = blocks - 1 - block
    return block, head % H, head // H


@triton.jit
def listed_block(place, lists_ptr, lists_strides, LISTED: tl.constexpr):
    """The block at a place of the order: a list begins with the block that it is for.

    Lists of all heads are in one order.
    """
    block = place
    if LISTED:
        block = tl.load(lists_ptr + place * lists_strides[2])
    return block


@triton.jit
def list_at(lists_ptr, lists_strides, b, h, place):
    """The list of tiles of a head at a place of the order; 0 if there are no lists."""
    list_ptr = 0  # a function can't return None
    if lists_ptr is not None:
        list_ptr = head_ptr(lists_ptr, lists_strides, b, h) + place * lists_strides[2]
    return list_ptr


@triton.jit
def even_length(N, EVEN: tl.constexpr):
    """N. EVEN: it is a multiple of 16, and the compiler sees that it is.

    Then `j < N` is one for 16 keys, and rows of biases and masks are loaded many at once.
    """
    if EVEN:
        N = N // 16 * 16
    return N


@triton.jit
def head_ptr(ptr, strides, b, h):
    """The address of x[b,h], computed in 64 bits."""
    return ptr + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]


@triton.jit
def line_of(b, h, H, M):
    """Where the line of a head begins in a statistic [B,H,M], which is in C order."""
    return (tl.cast(b, tl.int64) * H + h) * M


@triton.jit
def rows_at(
    ptr, strides, first, count,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows first.. of one head [count,SIZE], as [ROWS,WIDTH]; 0 outside of it.

    WHOLE: all ROWS rows exist. UPCAST: bfloat16 becomes float32, for Triton's interpreter, which
    can't compute in bfloat16.
    """
    at, row, col = row_pointers(ptr, strides, first, ROWS, WIDTH)
    if WHOLE and SIZE == WIDTH:
        x = tl.load(at)
    elif WHOLE:
        x = tl.load(at, mask=col < SIZE, other=0.0)
    elif SIZE == WIDTH:
        x = tl.load(at, mask=row < count - first, other=0.0)
    else:
        x = tl.load(at, mask=(row < count - first) & (col < SIZE), other=0.0)
    if UPCAST and ptr.dtype.element_ty == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def tile_of(
    desc, head, strides, b, h, first, count,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The same as `rows_at` of x[b,h], whose address is `head`: by the copy engine, if there is a
    descriptor of x in tiles [1,1,ROWS,WIDTH]."""
    if desc is None:
        x = rows_at(head, strides, first, count, SIZE, ROWS, WIDTH, WHOLE, UPCAST)
    else:
        x = desc.load([b, h, first, 0]).reshape(ROWS, WIDTH)
        if UPCAST and desc.dtype == tl.bfloat16:
            x = x.to(tl.float32)
    return x


@triton.jit
def rows_of(
    ptr, strides, b, h, first, count,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows first.. of x[b,h] [count,SIZE], as [ROWS,WIDTH]; 0 outside of it."""
    return rows_at(
        head_ptr(ptr, strides, b, h), strides, first, count, SIZE, ROWS, WIDTH, False, UPCAST
    )


@triton.jit
def live_rows_at(
    ptr, strides, first, count, lse,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same as `rows_at`, and 0 also in rows whose lse [ROWS,1] is +inf, see `outweigh`."""
    at, row, col = row_pointers(ptr, strides, first, ROWS, WIDTH)
    live = (lse != float("inf")) & (row < count - first)
    x = tl.load(at, mask=live & (col < SIZE), other=0.0)
    if UPCAST and ptr.dtype.element_ty == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def live_tile_of(
    desc, head, strides, b, h, first, count, lse,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same as `live_rows_at`, by the copy engine as `tile_of` where no row is to become 0."""
    if BLIND:
        x = live_rows_at(head, strides, first, count, lse, SIZE, ROWS, WIDTH, UPCAST)
    else:
        x = tile_of(desc, head, strides, b, h, first, count, SIZE, ROWS, WIDTH, WHOLE, UPCAST)
    return x


@triton.jit
def row_pointers(ptr, strides, first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers [ROWS,WIDTH] to rows first.. of one head, and the numbers of rows and columns."""
    base = ptr + tl.cast(first, tl.int64) * strides[2]
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    return base + row * strides[2] + col * strides[3], row, col


@triton.jit
def store_rows(
    ptr, strides, first, count, x,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write x [ROWS,WIDTH], rounded once, to the rows first.. of one head [count,SIZE]."""
    at, row, col = row_pointers(ptr, strides, first, ROWS, WIDTH)
    inside = (row < count - first) & (col < SIZE)
    tl.store(at, round_to(x, ptr.dtype.element_ty, UPCAST), mask=inside)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """x float32 in DTYPE, to nearest, ties to even.

    UPCAST: bfloat16 is rounded here and stays float32, because Triton's interpreter truncates.
    Adding 0x7FFF and the lowest bit of the upper half rounds that half.
    """
    if UPCAST and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


@triton.jit
def numbers_in(x, DTYPE: tl.constexpr):
    """x of 8 bits, or of DTYPE, in DTYPE, exactly. Bytes of integers become float16 by their bits,
    between 1024 and 2048: GPUs convert integers as slowly as they divide. Unsigned bytes are
    float8_e4m3fn, for GPUs that do not convert it."""
    if x.dtype == tl.uint8:
        return (e4m3_in_half(x) * 256.0).to(DTYPE)
    if x.dtype == tl.int8 and tl.float16 == DTYPE:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16) ^ 0x6480
        return bits.to(tl.float16, bitcast=True) - 1152.0
    return x.to(DTYPE)


@triton.jit
def e4m3_in_half(x):
    """2^-8 of float8_e4m3fn, given as bytes: float16 has the same exponent and fraction. Of NaN,
    which is 127 beside the sign, and of no other, 1 more carries into the exponent's first bit."""
    if is_cuda():  # two at a time in 32 bits, which Triton would not do
        return tl.inline_asm_elementwise(
            TWO_E4M3, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:  # noqa: RET505 - Triton compiles one branch
        bits = x.to(tl.uint16) << 7
        bits = (bits & 0x3F80) | ((bits & 0x3F80) + 0x80 & 0x4000) | (bits << 1 & 0x8000)
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def modify_scores(
    s, b, h, i, j, M, N, scale, data, numbers,
    CHANGE: tl.constexpr, KEEP: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Scores from q k^T: scaled, modified, and -inf at masked places of a MIXED tile."""
    s = s * scale
    if CHANGE is not None:
        s = CHANGE(s, b, h, i, j, M, N, data, numbers)
    return mask_scores(s, b, h, i, j, M, N, data, numbers, KEEP, MIXED)


@triton.jit
def mask_scores(s, b, h, i, j, M, N, data, numbers, KEEP: tl.constexpr, MIXED: tl.constexpr):
    """s with -inf at the masked places of a MIXED tile, and past the last key.

    Past the last query nothing is masked: results of those rows are never stored, and they add 0
    to gradients, since their weights are 0 (`outweigh` and PAST in kernels/backward.py) where k is
    finite; what is not finite in k spreads over the rows of its own tile.
    """
    if MIXED:
        keep = j < N
        if KEEP is not None:
            keep = KEEP(b, h, i, j, M, N, data, numbers)  # false past the last key, too
        s = tl.where(keep, s, float("-inf"))
    return s


@triton.jit
def softmax_step(
    s, m, b, h, i, j, M, N, scale, data, numbers,
    KEEP: tl.constexpr, CHANGE: tl.constexpr, FOLD: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax on s = q k^T: p, m, and what shrinks earlier sums.

    m [rows]: the maximum so far, of which p is exp(s - m). It is -inf, and the weights 0, until a
    row has seen a key. Differences are taken before they are put to base 2: what is common to
    scores, as the lowest number of a bias, times log2(e) would round, or be infinite. FOLD: without
    modifiers and with scale > 0 the maximum is taken before scaling, and m is in base 2.
    """
    if FOLD:
        s = mask_scores(s, b, h, i, j, M, N, data, numbers, KEEP, MIXED)
        new = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
        s = s * (scale * LOG2E)
    else:
        s = modify_scores(s, b, h, i, j, M, N, scale, data, numbers, CHANGE, KEEP, MIXED)
        new = tl.maximum(m, tl.max(s, 1))
    safe = new
    if MIXED or CHANGE is not None:
        safe = tl.where(new == float("-inf"), 0.0, new)
    p = raise_to(s - safe[:, None], FOLD)
    return p, new, raise_to(m - safe, FOLD)


@triton.jit
def raise_to(x, FOLD: tl.constexpr):
    """exp(x); exp2(x) where scores are in base 2, see `softmax_step`."""
    if not FOLD:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def in_scores(x, FOLD: tl.constexpr):
    """A number beside scores, of a sink, as these are: in base 2 if FOLD."""
    if FOLD:
        x = x * LOG2E
    return x


@triton.jit
def natural(m, FOLD: tl.constexpr):
    """A maximum of scores, which are in base 2 if FOLD."""
    if FOLD:
        m = m * LN2
    return m


@triton.jit
def sum_columns(p, COLUMNS: tl.constexpr):
    """p [rows,keys] summed over every COLUMNS-th key: [rows,COLUMNS].

    Of Hopper's products a lane holds two of 8 columns. The sums of 8 cost it no exchange of numbers
    with others; these are added up once, when all tiles are done.
    """
    return tl.sum(tl.reshape(p, (p.shape[0], p.shape[1] // COLUMNS, COLUMNS)), 1)


@triton.jit
def strip_of(b, M, N, data, numbers, STRIP: tl.constexpr):
    """low, high, keys, rows: place i, j is kept if low <= j - i <= high, j < keys and i < rows."""
    low, high, keys, rows = -FAR, FAR, N, M
    if STRIP is not None:
        low, high, keys, rows = STRIP(b, M, N, data, numbers)
        keys, rows = tl.minimum(keys, N), tl.minimum(rows, M)
    return low, high, keys, rows


@triton.jit
def present_sizes(b, M, N, data, numbers, ENDS: tl.constexpr):
    """The queries and keys of batch entry b that there are of M and N: those before its lengths."""
    rows, keys = M, N
    if ENDS is not None:
        rows, keys = ENDS(b, M, N, data, numbers)
        rows, keys = tl.minimum(rows, M).to(tl.int32), tl.minimum(keys, N).to(tl.int32)
    return rows, keys


@triton.jit
def key_tiles(
    block, b, M, N, data, numbers,
    STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """start, full_start, full_stop, stop: the tiles of keys that a block of queries may see.

    Of those from full_start to full_stop it sees every key.
    """
    low, high, keys, rows = strip_of(b, M, N, data, numbers, STRIP)
    first = block * BLOCK_M
    end = tl.minimum(first + BLOCK_M, M)
    live = (high >= low) & (first < rows)
    start = tl.maximum(first + low, 0)
    stop = tl.where(live, tl.minimum(tl.minimum(end, rows) + high, keys), start)
    sure = tl.maximum(end - 1 + low, 0)
    surely = tl.where(live & (end <= rows), tl.minimum(first + high + 1, keys), sure)
    return in_tiles(start, sure, surely, stop, BLOCK_N)


@triton.jit
def query_tiles(
    block, b, M, N, data, numbers,
    STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """start, full_start, full_stop, stop: the tiles of queries that may see a block of keys.

    Those from full_start to full_stop see every key of it.
    """
    low, high, keys, rows = strip_of(b, M, N, data, numbers, STRIP)
    first = block * BLOCK_N
    end = tl.minimum(first + BLOCK_N, N)
    live = (high >= low) & (first < keys)
    start = tl.maximum(first - high, 0)
    stop = tl.where(live, tl.minimum(tl.minimum(end, keys) - low, rows), start)
    sure = tl.maximum(end - 1 - high, 0)
    surely = tl.where(live & (end <= keys), tl.minimum(first - low + 1, rows), sure)
    return in_tiles(start, sure, surely, stop, BLOCK_M)


@triton.jit
def in_tiles(start, sure, surely, stop, BLOCK: tl.constexpr):
    """Positions [start, stop) in tiles, and among these the tiles that lie in [sure, surely)."""
    stop = tl.maximum(stop, start)
    start, stop = (
        start // BLOCK,
        tl.where(stop > start, (stop + BLOCK - 1) // BLOCK, start // BLOCK),
    )
    full_start = tl.minimum(tl.maximum((sure + BLOCK - 1) // BLOCK, start), stop)
    full_stop = tl.maximum(tl.minimum(tl.maximum(surely, 0) // BLOCK, stop), full_start)
    return start.to(tl.int32), full_start.to(tl.int32), full_stop.to(tl.int32), stop.to(tl.int32)


@triton.jit
def tile_bounds(
    block, b, M, N, data, numbers, STRIP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """`key_tiles` of a block of queries, or, BY_KEYS, `query_tiles` of one of keys; 0 of a list."""
    if LISTED:
        bounds = 0, 0, 0, 0
    elif BY_KEYS:
        bounds = query_tiles(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N)
    else:
        bounds = key_tiles(block, b, M, N, data, numbers, STRIP, BLOCK_M, BLOCK_N)
    return bounds


@triton.jit
def count_tiles(list_ptr, bounds, LISTED: tl.constexpr):
    """The number of full tiles and the number of mixed ones, by the list or by `tile_bounds`."""
    start, full_start, full_stop, stop = bounds
    full, mixed = full_stop - full_start, stop - start - (full_stop - full_start)
    if LISTED:
        full, mixed = tl.load(list_ptr + 1), tl.load(list_ptr + 2)
    return full, mixed


@triton.jit
def count_parts(heads, PARTS, PARTED: tl.constexpr):
    """How many parts there are of the tiles of so many heads, or of shares of a group of heads."""
    if PARTED:
        heads *= PARTS
    return heads


@triton.jit
def head_and_part(n, PARTS, PARTED: tl.constexpr):
    """Of which head the n-th part is, and which of the head's."""
    part = 0
    if PARTED:
        n, part = n // PARTS, n % PARTS
    return n, part


@triton.jit
def walk_part(part, PARTS, full, mixed, PARTED: tl.constexpr):
    """Where a part of the full tiles and of the mixed ones begins, and where it ends.

    Each of PARTS has as many, but for the last ones; all are one part's unless PARTED.
    """
    if not PARTED:
        return (0, 0), (full, mixed)
    each = tl.cdiv(full + mixed, PARTS)
    begin = tl.minimum(part * each, full + mixed)
    end = tl.minimum(begin + each, full + mixed)
    begins = tl.minimum(begin, full), tl.maximum(begin - full, 0)
    return begins, (tl.minimum(end, full), tl.maximum(end - full, 0))


@triton.jit
def tile_at(t, list_ptr, bounds, full, LISTED: tl.constexpr, MIXED: tl.constexpr):
    """The t-th full tile, or, MIXED, mixed one: those before the full ones, then those after."""
    start, full_start, full_stop, _ = bounds
    if LISTED:
        n = tl.load(list_ptr + 3 + full + t) if MIXED else tl.load(list_ptr + 3 + t)
    elif MIXED:
        n = start + t
        n += tl.where(n >= full_start, full_stop - full_start, 0)
    else:
        n = full_start + t
    return n


@triton.jit
def dropout_keeps_tile(
    seed_ptr, offset_ptr, b, h, H, first_row, first_key, threshold, origin,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """z [BLOCK_M,BLOCK_N], true where dropout keeps: the bits of `attn_graph.machine.philox`.

    origin: of a part, where its first batch entry, head, row and key lie in the whole, the whole's
    H, and after how many batch entries draws repeat; or None. The key is a multiple of 4.
    """
    slab = b * H + h
    if origin is not None:
        slab = (origin[0] + b) % origin[5] * origin[4] + origin[1] + h
        first_row += origin[2]
        first_key += origin[3]
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    c0 = (first_key // 4 + tl.arange(0, BLOCK_N // 4)[None, :]).to(tl.uint32)
    c1 = (first_row + tl.arange(0, BLOCK_M)[:, None]).to(tl.uint32)
    zero = c0 * 0 + c1 * 0
    c0, c1 = c0 + zero, c1 + zero
    c2, c3 = tl.cast(slab, tl.uint32) + zero, offset.to(tl.uint32) + zero
    c0, c1, c2, c3 = philox(seed, c0, c1, c2, c3)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # the last axis is the lowest: 0 1, 2 3
    return tl.reshape(words, (BLOCK_M, BLOCK_N)).to(tl.int64) >= threshold


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Ten rounds of Philox 4x32 on counters of four words; see `attn_graph.machine.philox`."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
