"""How many programs share the work of one if they are too few to fill a GPU."""

from __future__ import annotations

from attn_graph.lowering.problem import Problem

FILLED = 0.8  # of a GPU: beyond this share nothing is divided
ENOUGH = 0.85  # of the best efficiency of waves: enough with fewer parts
MOST_PARTS = 128
LEAST = 256  # positions of a part: fewer take as long to join as to walk
MOST_QUERIES = 64  # of one tile of few queries,
MOST_ROWS = 256  # and queries of heads on common keys: some tiles, reading them from L2
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
    return few and p.grad is None and not p.node.dropout and "max" not in p.node.stats
