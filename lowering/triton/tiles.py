"""Which tiles kernels take: the table's, variants of them, and others where programs are few."""

from __future__ import annotations

from attn_graph.kernels.tilings import (
    SHORT,
    VARIANTS,
    Pass,
    PushPass,
    Tiling,
    padded_head_size,
    push_tiling,
    table_arch,
    tiling,
)
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.operands import copies_tiles, is_copied_in_tiles
from attn_graph.lowering.triton.programs import MIXED, count_strip_tiles, static_strip
from attn_graph.lowering.triton.tile_lists import blocks
from attn_graph.machine.target import Target
from attn_graph.masks.places import Strip

HALVED = (90, 120)  # rows of the table whose tiles may be halved
PAIRED = (90, 128)  # row and width whose tiles are made for two programs on a multiprocessor
WARPS, ROWS = 4, 64  # of the least tile that matrix units take at full speed


def choose_tiling(
    problem: Problem, target: Target, pass_: Pass, variant: str | None = None,
    invariant: bool = False, dense: bool = True,
) -> Tiling:  # fmt: skip
    """What the table has for a pass, or a variant of that.

    invariant: whatever the batch. dense: whether operands lie neither packed nor in pages.
    """
    p = problem
    width = padded_head_size(max(p.D, p.E))
    modified, drops = bool(p.node.modifiers), p.node.dropout > 0
    copied = dense and copies_tiles(p, target) and all(map(is_copied_in_tiles, p.specs[:3]))
    decided = p.node.mask is not None and bool(p.node.mask.needs)
    usual = tiling(target.sm, p.dtype.itemsize, width, pass_, modified, drops, copied, decided)
    if copied and not modified and (short := SHORT.get((table_arch(target.sm), pass_, width))):
        usual = shorten_tiling(p, usual, *short)
    if variant is None and not invariant:
        return spread_tiling(p, target, pass_ == "key_gradient", usual)
    return usual if variant is None else VARIANTS[variant](usual)


def choose_push_tiling(
    problem: Problem, target: Target, pass_: PushPass, variant: str | None = None
) -> Tiling:
    """The same of forward mode."""
    width = padded_head_size(max(problem.D, problem.E))
    usual = push_tiling(target.sm, problem.dtype.itemsize, width, pass_)
    return usual if variant is None else VARIANTS[variant](usual)


def shorten_tiling(problem: Problem, usual: Tiling, short: Tiling, longer: float) -> Tiling:
    """The smaller tile where tiles of its size leave out more of what a narrow mask drops than they
    take longer, with all places taken to be computed."""
    strip = static_strip(problem)
    if strip is None or strip.low is None or strip.high is None:
        return usual
    whole, parts = (walked_places(strip, problem, tile) for tile in (usual, short))
    return short if longer * parts < whole else usual


def walked_places(strip: Strip, problem: Problem, tile: Tiling) -> float:
    """Places in all tiles of one head, those in mixed tiles as MIXED times as many."""
    full, mixed = count_strip_tiles(strip, problem, tile, by_keys=False)
    return float(full.sum() + MIXED * mixed.sum()) * tile.block_m * tile.block_n


def spread_tiling(problem: Problem, target: Target, by_keys: bool, usual: Tiling) -> Tiling:
    """Another tile where there are fewer programs than the table's tiles are chosen for.

    Where each has a multiprocessor to itself, long blocks of queries on four warps take twice the
    keys and warps: by lowering/triton/predict.py the time is 0.81 of the usual one with head size
    128 on sm_90. Where half of all multiprocessors stay idle, blocks are half as long on half the
    warps: one that is alone takes 0.6 of the time of a whole one, with head size 128 on sm_90, and
    0.7 on sm_120; elsewhere it gains nothing.
    """
    p, arch, count = problem, table_arch(target.sm), target.multiprocessors
    length, block = (p.N, usual.block_n) if by_keys else (p.M, usual.block_m)
    programs = p.B * p.H * blocks(length, block)
    if count is None or programs > count:
        return usual
    width = padded_head_size(max(p.D, p.E))
    if (arch, width) == PAIRED and not by_keys and usual.warps == WARPS and block == 2 * ROWS:
        usual = VARIANTS["twice the keys and warps"](usual)
    halves = usual.warps == 2 * WARPS and block >= 2 * ROWS and length > block // 2
    if not (halves and 2 * programs <= count and arch in HALVED):
        return usual
    return VARIANTS[f"half the {'keys' if by_keys else 'queries'} and warps"](usual)
