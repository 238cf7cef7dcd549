"""Tiles of kernels: from the table, variants of them, and others for few programs."""

from __future__ import annotations

from attn_graph.kernels.tilings import (
    ALONE,
    FULL,
    HALVED,
    SHORT,
    VARIANTS,
    Pass,
    PushPass,
    Tiling,
    push_tiling,
    table_arch,
    tiling,
)
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.few_rows import ENOUGH
from attn_graph.lowering.triton.operands import copies_tiles, is_copied_in_tiles, table_width
from attn_graph.lowering.triton.programs import count_programs, count_strip_tiles, static_strip
from attn_graph.machine.target import Target

ROWS = 64  # of the least tile at full speed of matrix units


def choose_tiling(
    problem: Problem, target: Target, pass_: Pass, variant: str | None = None, dense: bool = True
) -> Tiling:
    """The table's tiling for a pass, or a variant.

    dense: True if operands are neither packed nor in pages.
    """
    p = problem
    width = table_width(p)
    modified, drops = bool(p.node.modifiers), p.node.dropout > 0
    copied = dense and copies_tiles(p, target) and all(map(is_copied_in_tiles, p.specs[:3]))
    decided = p.node.mask is not None and bool(p.node.mask.needs)
    usual = tiling(target.sm, p.dtype.itemsize, width, pass_, modified, drops, copied, decided)
    if copied and not modified and (short := short_tiling(p, target, pass_)):
        fewer = walked_places(p, short) < ENOUGH * walked_places(p, usual)
        usual = short if fewer else usual
    return usual if variant is None else VARIANTS[variant](usual)


def choose_push_tiling(
    problem: Problem, target: Target, pass_: PushPass, variant: str | None = None
) -> Tiling:
    """The table's tiling for forward mode, or a variant."""
    width = table_width(problem)
    usual = push_tiling(target.sm, problem.dtype.itemsize, width, pass_)
    return usual if variant is None else VARIANTS[variant](usual)


def short_tiling(problem: Problem, target: Target, pass_: Pass) -> Tiling | None:
    """The tile of a narrow mask, if there is one of its own."""
    width = table_width(problem)
    strip = static_strip(problem)
    narrow = strip is not None and strip.low is not None and strip.high is not None
    return SHORT.get((table_arch(target.sm), pass_, width)) if narrow else None


def walked_places(problem: Problem, tile: Tiling) -> int:
    """Places in all tiles of blocks of queries of one head, under a strip."""
    strip = static_strip(problem)
    assert strip is not None
    full, mixed = count_strip_tiles(strip, problem, tile, by_keys=False)
    return int((full + mixed).sum()) * tile.block_m * tile.block_n


def spread_tilings(problem: Problem, target: Target, pass_: Pass, usual: Tiling) -> list[Tiling]:
    """The table's tile, and others for few programs.

    Tiles for two programs on a multiprocessor give way to ALONE if each has one at most. Blocks may
    be half as long, except for narrow masks with a short tile.
    """
    p, processors, by_keys = problem, target.multiprocessors, pass_ == "key_gradient"
    block = usual.block_n if by_keys else usual.block_m
    if processors is None or target.interprets or block < 2 * ROWS:
        return [usual]
    if short_tiling(p, target, pass_) is not None:
        return [usual]
    arch, side, tiles = table_arch(target.sm), "keys" if by_keys else "queries", [usual]
    alone = ALONE.get((arch, side, table_width(p)))
    if alone is not None and usual.warps < FULL:
        tiles.append(VARIANTS[alone](usual))
    if (arch, side) in HALVED and tiles[-1].warps == FULL:
        tiles.append(VARIANTS[f"half the {side} and warps"](tiles[-1]))
    few = alone is not None and count_programs(p, usual, by_keys) <= processors
    return tiles[1:] if few and usual.warps < FULL else tiles
