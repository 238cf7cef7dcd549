"""Instructions between the lanes of a warp. PTX ISA 9.7.9.6 shfl, 9.7.13 redux, elect, vote."""

from __future__ import annotations

import numpy as np

from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import DTYPES, Array, action
from attn_graph.testing.gpu.threads import WARP, Threads

REDUCTIONS = {  # NaN counts only if all are NaN
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
LANES = np.arange(WARP, dtype=np.int64)


def rows(g: Threads, values: Array) -> Array:
    """Values by warp and lane."""
    return np.broadcast_to(values, g.count).reshape(-1, WARP)


@action(r"shfl\.sync\.(?P<way>bfly|idx|up|down)\.b32", "b32 <- b32 u32 u32 u32")
def shuffle(
    m: Program, g: Threads, a: Array, b: Array, limits: Array, lanes: Array, way: str
) -> Array:
    """d = a of another lane: lane ^ b, b, lane - b or lane + b; its own beyond the limits.

    limits: bits 8 to 12 cut a warp in segments, and the others limit the reach within a segment.
    """
    m.together(g)
    step, limit = rows(g, b).astype(np.int64), rows(g, limits).astype(np.int64)
    segment, clamp = limit >> 8 & 31, limit & 31
    last, first = (LANES & segment) | (clamp & ~segment), LANES & segment
    source = {
        "bfly": LANES ^ step,
        "idx": first | (step & ~segment),
        "up": LANES - step,
        "down": LANES + step,
    }[way]
    near = source >= last if way == "up" else source <= last
    return np.take_along_axis(rows(g, a), np.where(near, source, LANES) & 31, 1).reshape(-1)


@action(r"redux\.sync\.(?P<way>add|min|max|and|or|xor)\.(?P<type>[busf]32)", "{type} <- {type} u32")
def reduce_warp(m: Program, g: Threads, a: Array, lanes: Array, way: str, type: str) -> Array:
    """d = the sum of a over the lanes, or their smallest, largest, and so on."""
    m.together(g)
    return np.repeat(REDUCTIONS[way].reduce(rows(g, a), 1, dtype=DTYPES[type]), WARP)


@action(r"elect\.sync", "u32|pred <- u32")
def elect(m: Program, g: Threads, lanes: Array) -> tuple[Array, Array]:
    """d = one lane of the warp, p: this is it. It is lane 0 here; other GPUs may choose another."""
    m.together(g)
    return np.zeros(g.count, np.uint32), np.tile(LANES == 0, g.count // WARP)


@action(r"vote\.sync\.(?P<way>any|all)\.pred", "pred <- pred u32")
def vote(m: Program, g: Threads, a: Array, lanes: Array, way: str) -> Array:
    """d: a is true in one lane of the warp, or in all."""
    m.together(g)
    return np.repeat(getattr(rows(g, a), way)(1), WARP)


@action(r"vote\.sync\.ballot\.b32", "b32 <- pred u32")
def ballot(m: Program, g: Threads, a: Array, lanes: Array) -> Array:
    """d = a bit for each lane: its a is true."""
    m.together(g)
    bits = (rows(g, a).astype(np.int64) << LANES).sum(1)
    return np.repeat(bits.astype(np.uint32), WARP)
