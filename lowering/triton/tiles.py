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
from attn_graph.machine.target import Target
from attn_graph.masks.places import Strip

# Rows of the table whose tiles may have half of their queries or keys, and how many times as long
# halves take for a score where eight warps of them are resident; others gain nothing, or spill.
HALVED = {(80, "queries"): 1.1}
HALVED |= dict.fromkeys(((90, "queries"), (90, "keys"), (120, "queries"), (120, "keys")), 1.1)
# Rows and widths whose tiles of queries are made for two programs on a multiprocessor: a variant
# for fewer, and how many times as long that takes for a score, likewise.
PAIRED = {
    (80, 64): ("half the queries", 1.05),
    (90, 64): ("half the queries", 1.15),
    (90, 128): ("twice the keys and warps", 1.04),
}
WARPS, ROWS = 4, 64  # of the least tile that matrix units take at full speed


def choose_tiling(
    problem: Problem, target: Target, pass_: Pass, variant: str | None = None, dense: bool = True
) -> Tiling:
    """What the table has for a pass, or a variant of that.

    dense: whether operands lie neither packed nor in pages.
    """
    p = problem
    width = padded_head_size(max(p.D, p.E))
    modified, drops = bool(p.node.modifiers), p.node.dropout > 0
    copied = dense and copies_tiles(p, target) and all(map(is_copied_in_tiles, p.specs[:3]))
    decided = p.node.mask is not None and bool(p.node.mask.needs)
    usual = tiling(target.sm, p.dtype.itemsize, width, pass_, modified, drops, copied, decided)
    if copied and not modified and (short := SHORT.get((table_arch(target.sm), pass_, width))):
        usual = shorten_tiling(p, usual, *short)
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


def spread_tilings(
    problem: Problem, target: Target, by_keys: bool, usual: Tiling
) -> dict[Tiling, float]:
    """The table's tile, and others for fewer programs than that is chosen for; of each how many
    times as long as the table's it takes for a score, by lowering/triton/predict.py.

    Blocks of queries of which two are on a multiprocessor may have one to themselves, with twice
    the keys and warps, or be half as long; and long ones on eight warps half as long on half the
    warps.
    """
    p, arch, block = problem, table_arch(target.sm), usual.block_n if by_keys else usual.block_m
    if target.multiprocessors is None or block < 2 * ROWS:
        return {usual: 1.0}
    tiles, whole, width = {usual: 1.0}, usual, padded_head_size(max(p.D, p.E))
    if usual.warps == WARPS and not by_keys and (arch, width) in PAIRED:
        variant, slower = PAIRED[arch, width]
        whole = VARIANTS[variant](usual)
        tiles[whole] = slower
    side, length = ("keys", p.N) if by_keys else ("queries", p.M)
    if whole.warps == 2 * WARPS and (arch, side) in HALVED and length > block // 2:
        tiles[VARIANTS[f"half the {side} and warps"](whole)] = HALVED[arch, side]
    return tiles
