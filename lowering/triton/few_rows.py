"""Attention of few queries, with programs sharing its keys."""

from __future__ import annotations

from attn_graph.lowering.problem import Problem
from attn_graph.spec.formulas import lowest

MOST_QUERIES = 64  # of one tile,
MOST_ROWS = 256  # and queries of heads on common keys: some tiles, reading them from L2
LEAST_KEYS = 256  # of a part: fewer take as long to merge as to read
FILLED = 0.8  # of a GPU: beyond this share nothing is divided
ENOUGH = 0.85  # of the best efficiency of waves: enough with fewer parts
MOST_PARTS = 128


def is_decoding(problem: Problem) -> bool:
    """True if queries are few enough for programs to share keys."""
    p = problem
    few = p.M <= MOST_QUERIES and p.M * (p.H // p.G) <= MOST_ROWS
    return few and p.grad is None and not p.node.dropout and "max" not in p.node.stats


def choose_parts(programs: int, places: int, tiles: int, least: int) -> int:
    """The number of programs to share `tiles` of keys, each with about `least` or more: enough to
    fill a GPU with room for `places` programs."""
    return lowest(-(-places // programs), -(-tiles // least))


def useful_parts(tiles: int) -> list[int]:
    """Numbers of parts for tiles: each spares the longest part a tile."""
    counts = range(2, min(MOST_PARTS, tiles) + 1)
    return [n for n in counts if -(-tiles // n) < -(-tiles // (n - 1))]
