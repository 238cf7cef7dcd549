"""How many programs share the work of one if they are too few to fill a GPU."""

from __future__ import annotations

from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem

FILLED = 0.8  # of a GPU: beyond this share nothing is divided
ENOUGH = 0.85  # of the best efficiency of waves: enough with fewer parts
MOST_PARTS = 128
LEAST = 256  # positions of a part: fewer take as long to join as to walk
MOST_QUERIES = 64  # of one tile of few queries,
MOST_ROWS = 256  # and queries of heads on common keys: some tiles, reading them from L2
MOST_SHORT = 16  # of a sequence in a batch with longer ones: a power of two, within the least tile
WORTH = 16  # times as many keys as rows: reading them once saves more than merging one part takes


def choose_parts(programs: int, places: int, tiles: int) -> int:
    """How many programs share the work of each of `programs`, with room for `places` of them.

    By the rule of flash-decoding, `num_splits_heuristic` of csrc/flash_attn/flash_api.cpp in
    github.com/Dao-AILab/flash-attention: one if they nearly fill the GPU, else the fewest with
    almost the best efficiency of waves. tiles: of each one's work; a number of parts that shortens
    no part is left out.
    """
    if programs >= FILLED * places:
        return 1
    most = max(1, min(MOST_PARTS, places, tiles))
    counts = [n for n in range(1, most + 1) if n == 1 or -(-tiles // n) < -(-tiles // (n - 1))]
    filled = [efficiency(programs * n, places) for n in counts]
    goal = ENOUGH * max(filled)
    return next(n for n, share in zip(counts, filled, strict=True) if share >= goal)


def efficiency(programs: int, places: int) -> float:
    """The share of a GPU at work, over all waves of programs that are alike."""
    return programs / (places * -(-programs // places))


def is_decoding(problem: Problem) -> bool:
    """True if queries are few enough for all heads on a key to be rows of one tile."""
    p = problem
    few = p.M <= MOST_QUERIES and p.M * (p.H // p.G) <= MOST_ROWS
    return few and may_fold(p)


def may_fold(problem: Problem) -> bool:
    """True if kernels for few queries exist, however many there are."""
    node = problem.node
    return problem.grad is None and not node.dropout and "max" not in node.stats


def short_rows(lying: Lying) -> int:
    """The most rows of a sequence that has its heads on a key as rows of one tile, in a batch with
    longer ones: prompts beside decoding steps, as servers make them. 0 for other batches: if all
    sequences may be as long as the longest, and if keys are packed as well, few of few rows."""
    p = lying.problem
    if lying.T is None or "keys" in lying.sides or lying.fewest == p.B:
        return 0
    each = max(1, lying.T // p.B)  # their sums in float32 have no more rows than q
    most = min(MOST_SHORT, MOST_ROWS // (p.H // p.G), each)
    return 1 << most.bit_length() - 1 if most and may_fold(p) and not is_decoding(p) else 0
