"""Places an attention's batch, heads or sequence on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from attn_graph.mesh.counts import count_seen
from attn_graph.mesh.layout import (
    Holding,
    Ranges,
    balance_chunks,
    contiguous,
    divide,
    divide_heads,
    zigzag,
)
from attn_graph.mesh.sharded import Sharded


def place_ranks(whole: Sharded) -> Iterator[Holding]:
    """What each rank has."""
    (B, H, M, N), ranks = whole.sizes, whole.mesh.ranks
    G = whole.graph.types[whole.eqn.args[1]].shape[1]
    all_ = Holding(range(B), range(H), range(G), (range(M),), (range(N),))
    if whole.placement == "batch":
        yield from (evolve(all_, batch=batch) for batch in divide(B, ranks))
    elif whole.placement == "heads":
        yield from (evolve(all_, heads=h, groups=g) for h, g in divide_heads(H, G, ranks))
    else:
        rows, keys = place_sequence(whole)
        yield from (evolve(all_, rows=i, keys=j) for i, j in zip(rows, keys, strict=True))


def place_sequence(whole: Sharded) -> tuple[list[Ranges], list[Ranges]]:
    """The chunks of queries and of keys of each rank."""
    (_, _, M, N), ranks, grain = whole.sizes, whole.mesh.ranks, whole.grain
    if whole.placement == "zigzag":
        return zigzag(M, ranks, grain), zigzag(N, ranks, grain)
    if whole.placement == "contiguous":
        return contiguous(M, ranks, grain), contiguous(N, ranks, grain)
    rows = balance_chunks(M, ranks, lambda chunks: [count_seen(whole, c) for c in chunks], grain)
    return rows, rows if M == N else contiguous(N, ranks, grain)
