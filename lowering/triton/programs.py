"""Programs of a launch: their tiles, their order, and how often they fill a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_graph.kernels.tilings import (
    ALONE,
    COPYING,
    FULL,
    HALVED,
    HELD,
    SHORT,
    VARIANTS,
    WIDE_TF32,
    Pass,
    PushPass,
    Tiling,
    own_tiling,
    padded_head_size,
    push_tiling,
    shared_memory,
    table_arch,
    tiling,
)
from attn_graph.lowering.problem import Problem, is_broadcast, is_misaligned
from attn_graph.machine.target import Target
from attn_graph.masks.places import Place, Strip
from attn_graph.sparsity.tiles import tiles
from attn_graph.spec import TensorSpec

ROWS = 64  # of the least tile at full speed of matrix units
MOST_IN_FLIGHT = 2  # tiles, in kernels with as much shared memory in use besides
WAVES = 8  # programs of a multiprocessor: with as many, long ones first, loads even out
INTERPRETED = 4, 2**13  # multiprocessors and bytes of cache of Triton's interpreter


def choose_tiling(
    problem: Problem, target: Target, pass_: Pass, variant: str | None = None, dense: bool = True
) -> Tiling:
    """The table's tiling for a pass, or a variant.

    dense: True if operands are neither packed nor in pages.
    """
    p = problem
    width, modified = table_width(p), bool(p.node.modifiers)
    copied = dense and copies_tiles(p, target) and all(map(is_copied_in_tiles, p.specs[:3]))
    decided = p.node.mask is not None and bool(p.node.mask.needs)
    of = target.sm, p.dtype.itemsize, width, pass_
    usual = tiling(*of, modified, copied, decided)
    if copied and not modified and (narrow := short_tiling(p, target, pass_)):
        short, speed = narrow
        walked, fewer = (walked_places(p, tile) for tile in (usual, short))
        usual = short if fewer < speed * walked else usual
    if gathers_by_distance(p):  # entries at the places of a tile are in flight too
        usual = fewer_in_flight(usual)
    usual = own_tiling(*of, features_of(p)) or usual
    return usual if variant is None else VARIANTS[variant](usual)


def gathers_by_distance(problem: Problem) -> bool:
    """True if a modifier reads a table by distance."""
    return any("n" in data.axes for m in problem.node.modifiers for data in m.needs.values())


def features_of(problem: Problem) -> Iterator[str]:
    """What may have a tile of its own, what takes the most registers first."""
    if gathers_by_distance(problem):
        yield "gathered"
    mask = problem.node.mask
    read = () if mask is None else (data.axes for data in mask.needs.values() if data)
    if any({"i", "j"} <= {*axes} or {"x", "y"} <= {*axes} for axes in read):
        yield "placed"  # by query and key
    if any(m.needs for m in problem.node.modifiers):
        yield "biased"
    if problem.node.dropout:
        yield "dropout"


def fewer_in_flight(tile: Tiling) -> Tiling:
    return VARIANTS["a stage less"](tile) if tile.stages > MOST_IN_FLIGHT else tile


def choose_push_tiling(
    problem: Problem, target: Target, pass_: PushPass, variant: str | None = None
) -> Tiling:
    """The table's tiling for forward mode, or a variant."""
    width = table_width(problem)
    of = target.sm, problem.dtype.itemsize, width, pass_
    partial = () if {problem.D, problem.E} <= {width} else ("partial",)
    usual = own_tiling(*of, partial) or push_tiling(*of)
    return usual if variant is None else VARIANTS[variant](usual)


def short_tiling(problem: Problem, target: Target, pass_: Pass) -> tuple[Tiling, float] | None:
    """The tile of a narrow mask, if there is one of its own, and its speed."""
    width = table_width(problem)
    strip = static_strip(problem)
    narrow = strip is not None and strip.low is not None and strip.high is not None
    return SHORT.get((table_arch(target.sm), pass_, width)) if narrow else None


def walked_places(problem: Problem, tile: Tiling) -> int:
    """Places in all tiles of a tiling with a kept place, of one head."""
    size = tile.block_m, tile.block_n
    counted = tiles(problem.node.mask, problem.M, problem.N, block=size)
    return (counted.full + counted.mixed) * size[0] * size[1]


def spread_tilings(
    problem: Problem, target: Target, pass_: Pass, usual: Tiling
) -> tuple[Tiling, Tiling | None]:
    """The table's tile or another for few programs; and one of blocks half as long, or None.

    A tile for two programs on a multiprocessor gives way to ALONE if each has one at most. Blocks
    may be half as long if all of their programs run at once, except for narrow masks with a short
    tile.
    """
    p, processors, by_keys = problem, target.multiprocessors, pass_ == "key_gradient"
    block = usual.block_n if by_keys else usual.block_m
    if processors is None or target.interprets or block < 2 * ROWS:
        return usual, None
    if short_tiling(p, target, pass_) is not None or count_programs(p, usual, by_keys) > processors:
        return usual, None
    arch, side, tile = table_arch(target.sm), "keys" if by_keys else "queries", usual
    if usual.warps < FULL and (alone := ALONE.get((arch, side, table_width(p)))):
        tile = VARIANTS[alone](usual)
    if tile.warps == FULL and (arch, side) in HALVED:
        half = VARIANTS[f"half the {side} and warps"](tile)
        return tile, half if count_programs(p, half, by_keys) <= processors else None
    return tile, None


def static_strip(problem: Problem) -> Strip | None:
    """The mask as a strip of known bounds; None for other masks, or if data decide."""
    mask = problem.node.mask
    if mask is None:
        return Strip()
    if mask.needs:
        return None
    return mask.strip(Place(0, 0, 0, 0, problem.H, problem.M, problem.N))


def begins_last(problem: Problem, by_keys: bool) -> bool:
    """True if the last block has the most to do, of queries or of keys.

    Under a causal mask the last queries have, and the first keys. This is assumed if data decide. A
    mask bounded below alone is the other way around.
    """
    strip = static_strip(problem)
    below = strip is not None and strip.low is not None and strip.high is None
    return by_keys == below


def count_programs(problem: Problem, tile: Tiling, by_keys: bool) -> int:
    """The number of programs without divided work."""
    p = problem
    if by_keys:
        return p.B * p.G * -(-p.N // tile.block_n)
    return p.B * p.H * -(-p.M // tile.block_m)


def processors_of(target: Target) -> int | None:
    """How many multiprocessors there are; None: not known."""
    return INTERPRETED[0] if target.interprets else target.multiprocessors


def places_of(target: Target, tile: Tiling) -> int | None:
    """How many programs run at once; None: not known."""
    processors = processors_of(target)
    return None if processors is None else processors * tile.resident


def heads_together(
    problem: Problem, target: Target, tiling: Tiling, pass_: Pass, splits: int, parts: int = 1
) -> int:
    """How many heads are walked at a time: their tensors fill half of the L2 cache.

    Programs read keys and values. Programs of dk and dv read the queries and the gradient of o of
    their share of a group, and of these one of `parts` walked side by side. At least about WAVES of
    programs run. Heads are shared out evenly.
    """
    p, group, by_keys = problem, problem.H // problem.G, pass_ == "key_gradient"
    heads, each, length = p.B * p.H * parts, group, -(-p.N // parts)
    other, block = p.M, tiling.block_m
    if by_keys:
        heads, each = p.B * p.G * splits * parts, -(-group // splits)
        length, other, block = -(-p.M // parts), p.N, tiling.block_n
    blocks, processors = -(-other // block), processors_of(target) or 0
    size = length * (p.D + p.E) * p.dtype.itemsize
    cache = INTERPRETED[1] if target.interprets else target.l2 or 0
    fit = cache // 2 // (size * each) if by_keys else cache // 2 * each // size
    groups = -(-heads // max(1, fit, -(-WAVES * processors // blocks)))
    return -(-heads // groups)


def table_width(problem: Problem) -> int:
    """The width by which tables have tiles: of the larger head size, or of its widest piece."""
    return min(HELD, padded_head_size(max(problem.D, problem.E)))


def reads_v_in_k(problem: Problem) -> bool:
    """True if v begins each key and is as wide as the first piece of keys: it is not read again."""
    widths = (min(HELD, padded_head_size(size)) for size in (problem.D, problem.E))
    return problem.node.v_in_k and len({*widths}) == 1


def takes_tf32(problem: Problem, sm: int) -> bool:
    """True if kernels with TF32 exist: products of other dtypes have one precision, and wide tiles
    need much shared memory then."""
    width = table_width(problem)
    fits = width <= 128 or (width < HELD and shared_memory(sm) >= WIDE_TF32)
    return problem.dtype == torch.float32 and fits


def is_copied_in_tiles(spec: TensorSpec) -> bool:
    """True if the copy engine of Hopper GPUs (TMA) can read an operand."""
    apart = spec.unit_last and not is_misaligned(spec) and not is_broadcast(spec)
    return spec.dtype.itemsize == 2 and apart


def copies_tiles(problem: Problem, target: Target) -> bool:
    """True if the copy engine brings tiles: tilings reckon with it, or the interpreter runs."""
    width = table_width(problem)
    copying = COPYING.get(table_arch(target.sm), ())
    return problem.D <= HELD and (target.interprets or width in copying)
