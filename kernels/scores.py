"""The weights of a tile of scores and the gradients of these, and the tangents of all of them.

With the letters of `attn_graph.ir.transforms.tangents`, a `t` before each tangent, mu = tlse and
u = ts - mu:
tp = p u, tds = p u (dp - delta) + p (tdp - tdelta), and back through the modifiers, with their
curvature. Kernels that push tangents through are given these; in others they are None.
"""

import triton
import triton.language as tl

from attn_graph.kernels.common import LOG2E, head_ptr, live_tile_of, mask_scores, modify_scores


@triton.jit
def load_statistics(ptr, first, M, other, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr):
    """Rows first.. of one head of x [B,H,M]."""
    row = tl.arange(0, BLOCK_M)
    if WHOLE:
        return tl.load(ptr + first + row)
    return tl.load(ptr + first + row, mask=row < M - first, other=other)


@triton.jit
def load_rest(ptr, start, first, M, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr):
    """The same of `rest`, of a head whose line begins at `start`; zeros where it is absent."""
    rest = tl.zeros([BLOCK_M], tl.float32)
    if ptr is not None:
        rest = load_statistics(ptr + start, first, M, 0.0, BLOCK_M, WHOLE)
    return rest


@triton.jit
def outweigh(lse):
    """lse for exp(s - lse); +inf, so that weights are 0, of rows that saw nothing."""
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def weigh_scores(
    s, lse, rest, b, h, i, j, M, N, scale, data, numbers,
    CHANGE: tl.constexpr, KEEP: tl.constexpr, MIXED: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """p of a tile of s = q k^T. rest: see kernels/weight_sums.py; scores that are products alone
    have none, since they were rounded themselves by as much as lse.

    PAST: whether a row past the last query counts for other rows, so that its weights must be 0
    even where a modifier says +inf.
    """
    if CHANGE is None:  # one multiplication with the scale's, as FOLD of `softmax_step`
        s = mask_scores(s * (scale * LOG2E), b, h, i, j, M, N, data, numbers, KEEP, MIXED)
        p = tl.exp2(s - lse * LOG2E)
    else:
        s = modify_scores(s, b, h, i, j, M, N, scale, data, numbers, CHANGE, KEEP, MIXED)
        p = tl.exp2((s - lse) * LOG2E - rest)
    if PAST:
        p = tl.where(lse == float("inf"), 0.0, p)
    return p


@triton.jit
def drop(x, z, keep_scale):
    """x with 0 where dropout drops it, and times keep_scale elsewhere; x if z is None."""
    return x if z is None else tl.where(z, x * keep_scale, 0.0)


@triton.jit
def moving_rows(
    ptr, strides, b, h, first, count, lse,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    BLIND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`live_tile_of` of a tangent x[b,h]; None of one that is absent. lse: None unless BLIND."""
    x = None
    if ptr is not None:
        x = live_tile_of(
            None, head_ptr(ptr, strides, b, h), strides, b, h, first, count, lse,
            SIZE, ROWS, WIDTH, WHOLE, BLIND, UPCAST,
        )  # fmt: skip
    return x


@triton.jit
def push_dot(x, tx, y, ty, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    """The tangent of x y^T [ROWS,COLUMNS], tx y^T + x ty^T; of what is None nothing."""
    moved = tl.zeros([ROWS, COLUMNS], tl.float32)
    if tx is not None and y is not None:
        moved = tl.dot(tx, tl.trans(y), moved, input_precision=PRECISION)
    if x is not None and ty is not None:
        moved = tl.dot(x, tl.trans(ty), moved, input_precision=PRECISION)
    return moved


@triton.jit
def push_scores(
    ts, s, p, mu, b, h, i, j, M, N, scale, data, numbers,
    CHANGE: tl.constexpr, PUSH: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """ts after the modifiers, less mu, from ts of s = q k^T; 0 where p is."""
    ts = ts * scale
    if PUSH is not None:
        ts = PUSH(ts, s * scale, b, h, i, j, M, N, data, numbers)
    ts = ts - mu
    if MIXED or CHANGE is not None:
        ts = tl.where(p == 0, 0.0, ts)
    return ts


@triton.jit
def score_gradient(
    s, dp, lse, rest, delta, along, b, h, i, j, M, N, scale, data, numbers,
    CHANGE: tl.constexpr, KEEP: tl.constexpr, BACK: tl.constexpr, PUSH: tl.constexpr,
    MIXED: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """p and ds before the modifiers of a tile, then the tangents of both; s = q k^T.

    lse, rest and delta broadcast. along: ts of s, tdp, mu and tdelta; None: nothing moves, and p
    and ds stand for their tangents. BACK takes ds alone then. PAST: see `weigh_scores`.
    """
    p = weigh_scores(
        s, lse, rest, b, h, i, j, M, N, scale, data, numbers, CHANGE, KEEP, MIXED, PAST
    )
    if along is None:
        ds = p * (dp - delta)
        if BACK is not None:
            ds = BACK(ds, s * scale, b, h, i, j, M, N, data, numbers)
        if MIXED and BACK is not None:
            ds = tl.where(p == 0, 0.0, ds)
        tp, tds = p, ds
    else:
        ts, tdp, mu, tdelta = along
        mu = tl.where(lse == float("inf"), 0.0, mu)  # of rows that saw nothing it may be anything
        tp = p * push_scores(
            ts, s, p, mu, b, h, i, j, M, N, scale, data, numbers, CHANGE, PUSH, MIXED
        )
        dp = dp - delta
        ds, tds = p * dp, tp * dp + p * (tdp - tdelta)
        if BACK is not None:
            ds, tds = BACK(ds, tds, s * scale, ts * scale, b, h, i, j, M, N, data, numbers)
            ds, tds = tl.where(p == 0, 0.0, ds), tl.where(p == 0, 0.0, tds)
    return p, ds, tp, tds
