"""Places an attention's batch, heads or sequence on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from attrs import evolve

from attn_graph.mesh.counts import count_seen
from attn_graph.mesh.layout import (
    SEQUENCES,
    Holding,
    Ranges,
    balance_chunks,
    chunk,
    chunk_by_weight,
    contiguous,
    zigzag,
)
from attn_graph.mesh.sharded import STARTS, Sharded


def place_ranks(whole: Sharded) -> Iterator[Holding]:
    """Each rank's part. Raises GraphError for packed sequences with unknown starts."""
    (B, H, _, _), ranks, sizes = whole.sizes, whole.mesh.ranks, whole.axis_sizes
    all_ = Holding(
        range(B), range(H), range(sizes["g"]), (range(sizes["i"]),), (range(sizes["j"]),)
    )
    if whole.placement == "heads":
        yield from (evolve(all_, heads=h, groups=g) for h, g in whole.head_parts)
    elif whole.placement in SEQUENCES:
        rows, keys = place_positions(whole)
        yield from (evolve(all_, rows=i, keys=j) for i, j in zip(rows, keys, strict=True))
    elif whole.starts:
        yield from place_sequences(whole, all_)
    else:
        yield from (evolve(all_, batch=batch) for batch in chunk(B, ranks))


def place_sequences(whole: Sharded, all_: Holding) -> Iterator[Holding]:
    """Some packed sequences for each rank, contiguous, with nearly equal rows.

    Rows of no sequence go along with those before them.
    """
    starts = {x: [int(at) for at in whole.numbers(n)] for x, n in whole.starts.items()}
    ends = next(iter(starts.values()))
    batches = chunk_by_weight([b - a for a, b in pairwise(ends)], whole.mesh.ranks)
    rows, keys = [all_.rows] * len(batches), [all_.keys] * len(batches)
    for letter, parts, axis in zip(STARTS.values(), (rows, keys), "ij", strict=True):
        if letter in starts:
            inner = [starts[letter][batch.start] for batch in batches[1:]]
            cuts = pairwise([0, *inner, whole.axis_sizes[axis]])
            parts[:] = [(range(a, b),) for a, b in cuts]
    for batch, i, j in zip(batches, rows, keys, strict=True):
        yield evolve(all_, batch=batch, rows=i, keys=j)


def place_positions(whole: Sharded) -> tuple[list[Ranges], list[Ranges]]:
    """The chunks of queries and of keys of each rank."""
    ranks, grain, rows, keys = whole.mesh.ranks, whole.grain, whole.spans("i"), whole.spans("j")
    if whole.placement == "zigzag":
        return zigzag(rows, ranks, grain), zigzag(keys, ranks, grain)
    if whole.placement == "contiguous":
        return contiguous(rows, ranks, grain), contiguous(keys, ranks, grain)
    own = balance_chunks(
        rows, ranks, lambda chunks: [whole.once(count_seen, c) for c in chunks], grain
    )
    return own, own if rows == keys else contiguous(keys, ranks, grain)
