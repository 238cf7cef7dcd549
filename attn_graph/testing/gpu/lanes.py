"""Instructions between the lanes of a warp. PTX ISA 9.7.9.6 shfl, 9.7.13 votes and others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attn_graph.testing.gpu.program import POISON, Program
from attn_graph.testing.gpu.rules import DTYPES, Array, DType, action
from attn_graph.testing.gpu.threads import WARP, Threads

REDUCTIONS: dict[str, np.ufunc] = {"and": np.bitwise_and, "or": np.bitwise_or}
REDUCTIONS |= {"xor": np.bitwise_xor, "add": np.add}
REDUCTIONS |= {"min": np.fmin, "max": np.fmax}  # NaN counts only if all are NaN
LANES = np.arange(WARP, dtype=np.int64)
EVERY = 0xFFFFFFFF  # the mask of all lanes


def rows(g: Threads, values: Array) -> Array:
    """Values by warp and lane."""
    return np.broadcast_to(values, g.count).reshape(-1, WARP)


def members(m: Program, g: Threads, lanes: Array) -> list[tuple[int, Array]]:
    """The lanes that execute an instruction together: rows of warps, and flags of their lanes.

    lanes: the mask of each lane; it names all that wait for each other. Raises Fault.
    """
    masks = rows(g, lanes)
    if g.active is None and (masks == EVERY).all():
        return [(row, np.ones(WARP, bool)) for row in range(len(masks))]
    active, gone = rows(g, g.flags), rows(g, m.gone[g.span])
    found = []
    for row in np.flatnonzero(active.any(1)).tolist():
        for mask in np.unique(masks[row, active[row]]).tolist():
            named, here = mask >> LANES & 1 != 0, active[row] & (masks[row] == mask)
            check_named(m, g, row, here, named & ~gone[row], mask)
            found.append((row, here))
    return found


def check_named(m: Program, g: Threads, row: int, here: Array, named: Array, mask: int) -> None:
    """Raise Fault unless exactly the lanes execute an instruction that its mask names."""
    if (here & ~named).any():
        text = f"lanes {np.flatnonzero(here & ~named).tolist()} of a warp execute an instruction"
        m.fault(f"{text} with the mask {mask:#x}, which does not name them")
    missing, at = named & ~here, m.at[g.span].reshape(-1, WARP)[row]
    if (missing & (at == at[here][0])).any():
        text = f"lanes {np.flatnonzero(missing).tolist()} skip an instruction"
        m.fault(f"{text} whose mask {mask:#x} names them: the others wait for them")
    if missing.any():
        m.refuse(f"lanes {np.flatnonzero(missing).tolist()} come to an instruction later")


@action(r"shfl\.sync\.(?P<way>bfly|idx|up|down)\.b32", "b32|pred? <- b32 u32 u32 u32")
def shuffle(
    m: Program, g: Threads, a: Array, b: Array, limits: Array, lanes: Array, way: str
) -> tuple[Array, Array]:
    """d = a of another lane: lane ^ b, b, lane - b or lane + b; its own beyond the limits.

    p: within the limits. limits: bits 8 to 12 cut a warp in segments, and the others limit the
    reach within a segment. What lanes hold that take no part is undefined.
    """
    part = np.zeros((g.count // WARP, WARP), bool)
    for row, here in members(m, g, lanes):
        part[row] |= here
    step, limit = rows(g, b).astype(np.int64) & 31, rows(g, limits).astype(np.int64)
    segment, clamp = limit >> 8 & 31, limit & 31
    last, first = (LANES & segment) | (clamp & ~segment), LANES & segment
    source = {
        "bfly": LANES ^ step,
        "idx": first | (step & ~segment),
        "up": LANES - step,
        "down": LANES + step,
    }[way]
    near = source >= last if way == "up" else source <= last
    held = np.where(part, rows(g, a), np.uint32(POISON & EVERY))
    taken = np.take_along_axis(held, np.where(near, source, LANES) & 31, 1)
    return taken.reshape(-1), near.reshape(-1)


def by_warp(
    m: Program, g: Threads, lanes: Array, dtype: DType, join: Callable[[int, Array], object]
) -> Array:
    """Values for all lanes that execute an instruction together, by their row and flags."""
    joined = np.zeros((g.count // WARP, WARP), dtype)
    for row, here in members(m, g, lanes):
        joined[row, here] = join(row, here)
    return joined.reshape(-1)


@action(r"redux\.sync\.(?P<way>add|min|max|and|or|xor)\.(?P<type>[busf]32)", "{type} <- {type} u32")
def reduce_warp(m: Program, g: Threads, a: Array, lanes: Array, way: str, type: str) -> Array:
    """d = the sum of a over the lanes, or their smallest, largest, and so on."""
    reduce, kind, values = REDUCTIONS[way].reduce, DTYPES[type], rows(g, a)
    return by_warp(m, g, lanes, kind, lambda row, here: reduce(values[row, here], dtype=kind))


@action(r"elect\.sync", "u32|pred <- u32")
def elect(m: Program, g: Threads, lanes: Array) -> tuple[Array, Array]:
    """d = one of the lanes, p: this is it. It is the first here; other GPUs may choose another."""
    chosen = by_warp(m, g, lanes, DTYPES["u32"], lambda row, here: np.flatnonzero(here)[0])
    return chosen, (rows(g, chosen) == LANES).reshape(-1)


@action(r"vote\.sync\.(?P<way>any|all)\.pred", "pred <- pred u32")
def vote(m: Program, g: Threads, a: Array, lanes: Array, way: str) -> Array:
    """d: a is true in one of the lanes, or in all."""
    join = getattr(np, way)
    return by_warp(m, g, lanes, DTYPES["pred"], lambda row, here: join(rows(g, a)[row, here]))


@action(r"vote\.sync\.ballot\.b32", "b32 <- pred u32")
def ballot(m: Program, g: Threads, a: Array, lanes: Array) -> Array:
    """d = a bit for each lane: its a is true."""
    return by_warp(m, g, lanes, DTYPES["u32"], lambda row, here: bits_of(rows(g, a)[row] & here))


def bits_of(flags: Array) -> Array:
    return np.asarray((flags.astype(np.int64) << LANES).sum(-1))


@action(r"activemask\.b32", "b32 <-")
def active_lanes(m: Program, g: Threads) -> Array:
    """d = a bit for each lane that executes it."""
    active = rows(g, g.flags)
    return np.repeat(bits_of(active), WARP).astype(np.uint32)


@action(r"bar\.warp\.sync", "<- u32")
def meet_in_warp(m: Program, g: Threads, lanes: Array) -> None:
    """Lanes of each warp wait for each other."""
    members(m, g, lanes)
