"""Which tiles the kernels of a problem take: the table's, variants of them, halves of long ones."""

from __future__ import annotations

from attn_graph.kernels.tilings import (
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
from attn_graph.lowering.triton.tile_lists import blocks
from attn_graph.machine.target import Target

HALVED = (90, 120)  # rows of the table whose tiles may be halved
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


def spread_tiling(problem: Problem, target: Target, by_keys: bool, usual: Tiling) -> Tiling:
    """Half a tile on half the warps, where whole ones leave half of all multiprocessors idle.

    By lowering/triton/predict.py one that is alone on a multiprocessor takes 0.6 of the time of a
    whole one, with head size 128 on sm_90, and 0.7 on sm_120; elsewhere it gains nothing.
    """
    p, least = problem, 2 * ROWS
    length, block = (p.N, usual.block_n) if by_keys else (p.M, usual.block_m)
    programs = p.B * p.H * blocks(length, block)
    halves = usual.warps == 2 * WARPS and block >= least and length > block // 2
    idle = target.multiprocessors is not None and 2 * programs <= target.multiprocessors
    if not (halves and idle and table_arch(target.sm) in HALVED):
        return usual
    return VARIANTS[f"half the {'keys' if by_keys else 'queries'} and warps"](usual)
