"""Which attention has so few queries that programs may share its keys, and how many do."""

from __future__ import annotations

from attn_graph.lowering.problem import Problem
from attn_graph.spec.formulas import lowest

MOST_QUERIES = 64  # which one tile holds,
MOST_ROWS = 256  # and queries of the heads that share keys: some tiles, which read them from L2
LEAST_KEYS = 256  # of a part: fewer take as long to merge as to read
FILLED = 0.8  # of a GPU: with so many programs nothing is divided
ENOUGH = 0.85  # of the best efficiency of waves: what is taken if it takes fewer parts
MOST_PARTS = 128


def is_decoding(problem: Problem) -> bool:
    """Whether an attention has so few queries that programs may share its keys."""
    p = problem
    few = p.M <= MOST_QUERIES and p.M * (p.H // p.G) <= MOST_ROWS
    return few and p.grad is None and not p.node.dropout and "max" not in p.node.stats


def choose_parts(programs: int, places: int, tiles: int, least: int) -> int:
    """How many programs share the tiles of keys of each of so few, so many tiles at least: those
    that fill a GPU, where `places` programs do."""
    return lowest(-(-places // programs), -(-tiles // least))


def useful_parts(tiles: int) -> list[int]:
    """Into how many parts so many tiles may be divided: those that spare a tile of the longest."""
    counts = range(2, min(MOST_PARTS, tiles) + 1)
    return [n for n in counts if -(-tiles // n) < -(-tiles // (n - 1))]
