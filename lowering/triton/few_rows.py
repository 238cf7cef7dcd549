"""Which attention has so few queries that programs may share its keys."""

from __future__ import annotations

from attn_graph.lowering.problem import Problem

MOST_QUERIES = 64  # which one tile holds,
MOST_ROWS = 256  # and queries of the heads that share keys: some tiles, which read them from L2


def is_decoding(problem: Problem) -> bool:
    """Whether an attention has so few queries that programs may share its keys."""
    p = problem
    few = p.M <= MOST_QUERIES and p.M * (p.H // p.G) <= MOST_ROWS
    return few and p.grad is None and not p.node.dropout and "max" not in p.node.stats
