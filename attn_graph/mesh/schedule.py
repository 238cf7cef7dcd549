"""The messages and the jobs of all ranks, known before anything runs, and their bytes, forward and
backward, to the byte.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod
from operator import itemgetter
from typing import final

from attrs import frozen

from attn_graph.ir.transforms.moving import Box
from attn_graph.masks.places import Keys, join_intervals
from attn_graph.mesh.counts import find_seen
from attn_graph.mesh.layout import Ranges
from attn_graph.mesh.results import Flow
from attn_graph.mesh.sharded import Sharded, Stretch, shift
from attn_graph.spec import accumulator


@final
@frozen
class Job:
    """Queries against keys by one plan. here: the queries in the rank's own; at: the keys among its
    own or received ones.
    """

    box: Box
    here: range
    at: range


@final
@frozen
class Visit:
    """Messages of a rank to the one `step` further on and from the one `step` before.

    Keys and values, or queries if heads are exchanged, by their places in the whole. jobs: the
    computations with the received tensors; at step 0, with its own.
    """

    step: int
    to: int
    source: int
    sends: Ranges
    receives: Ranges
    jobs: tuple[Job, ...]


def seen_keys(sharded: Sharded) -> tuple[tuple[Keys, ...], ...]:
    """For each rank and chunk of its queries the keys possibly visible to them."""
    return tuple(tuple(find_seen(sharded, rows) for rows in own.rows) for own in sharded.holdings)


def hull_within(keys: Keys, chunk: range, grain: int) -> range:
    """From the first to the last key of a set within a chunk; empty without any.

    It begins at a multiple of `grain` from the chunk's start.
    """
    n = bisect_right(keys.intervals, chunk.start, key=itemgetter(1))
    m = bisect_left(keys.intervals, chunk.stop, key=itemgetter(0))
    if n >= m:
        return range(0)
    first, last = max(chunk.start, keys.intervals[n][0]), min(chunk.stop, keys.intervals[m - 1][1])
    return range(first - (first - chunk.start) % grain, last)


def needed_keys(sharded: Sharded, rank: int, source: int) -> Ranges:
    """Of each chunk of `source`'s keys, those from the first to the last needed by `rank`.

    Chunks without needed keys are left out.
    """
    intervals = sorted(x for keys in sharded.once(seen_keys)[rank] for x in keys.intervals)
    seen = Keys(join_intervals(intervals, gap=0))
    hulls = (hull_within(seen, chunk, sharded.grain) for chunk in sharded.holdings[source].keys)
    return tuple(hull for hull in hulls if hull)


def list_jobs(sharded: Sharded, rank: int, chunks: Ranges) -> Iterator[Job]:
    """A rank's computations with some chunks of keys, contiguous in memory."""
    start, queries = 0, sharded.once(place_queries, rank)
    for chunk in chunks:
        for own in sharded.find_stretches("j", chunk):
            for rows, here, seen in queries.get(own, ()):
                if keys := hull_within(seen, chunk, sharded.grain):
                    box = sharded.box(own, rows, keys, sharded.holdings[rank].heads)
                    yield Job(box, here, shift(keys, start - chunk.start))
        start += len(chunk)


def absent_rows(sharded: Sharded, rows: Ranges) -> Ranges:
    """The queries of no sequence by their places in a tensor of these chunks."""
    ends = pairwise(accumulate(map(len, rows), initial=0))
    each = zip(rows, ends, strict=True)
    return tuple(range(*here) for own, here in each if not any(sharded.find_stretches("i", own)))


def place_queries(sharded: Sharded, rank: int) -> dict[Stretch, list[tuple[range, range, Keys]]]:
    """A rank's chunks of queries by their stretch: with their places in the rank's own tensors, and
    the keys they may see.
    """
    queries = defaultdict[Stretch, list[tuple[range, range, Keys]]](list)
    own, seen = sharded.holdings[rank].rows, sharded.once(seen_keys)[rank]
    ends = pairwise(accumulate(map(len, own), initial=0))
    for rows, keys, here in zip(own, seen, ends, strict=True):
        for stretch in sharded.find_stretches("i", rows):
            queries[stretch].append((rows, range(*here), keys))
    return queries


def visits_of(sharded: Sharded, rank: int) -> tuple[Visit, ...]:
    """A rank's steps under "ring" and "gather", in order; own keys come first.

    Every rank has a visit for each step, even without messages: keys and gradients between two
    ranks then go in one order on both sides, and the order tells messages apart.
    """
    ranks = sharded.mesh.ranks
    own = Visit(0, rank, rank, (), (), tuple(list_jobs(sharded, rank, sharded.holdings[rank].keys)))
    visits = [own]
    for step in range(1, ranks if sharded.method in ("ring", "gather") else 1):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        sends, receives = (
            sharded.once(needed_keys, *pair) for pair in ((to, rank), (rank, source))
        )
        jobs = tuple(list_jobs(sharded, rank, receives))
        visits.append(Visit(step, to, source, sends, receives, jobs))
    return tuple(visits)


def heads_problem(sharded: Sharded) -> str | None:
    """Why the sequence can't be exchanged for heads; None: it can."""
    (_, H, M, _), ranks = sharded.sizes, sharded.mesh.ranks
    if ranks > H:
        return f"has {H} heads for {ranks} ranks"
    for n in sharded.open_inputs:
        shape = sharded.graph.types[n].shape
        rows = any(x == "i" and size == M for x, size in zip(sharded.axes[n], shape, strict=True))
        if rows and n not in sharded.eqn.args[:3]:
            name = sharded.graph.inputs[n].name
            return f"would have to exchange {name}, of which a rank has the rows of its queries"
    return None


def count(chunks: Ranges) -> int:
    """How many positions chunks have."""
    return sum(map(len, chunks))


def flow_between(sharded: Sharded, a: int, b: int) -> Flow:
    """The bytes from rank `a` to another rank `b`."""
    sums = Flow(0, sum(gradient_bytes(sharded, n, a) for n in shared_inputs(sharded, a, b)))
    if sharded.method is None:
        return sums
    if sharded.method == "heads":
        return sums + heads_flow(sharded, a, b)
    _, k, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    _, keys = sharded.totals
    each = (prod(k.shape) + prod(v.shape)) // max(1, keys) * k.dtype.itemsize
    there, back = (each * count(sharded.once(needed_keys, *x)) for x in ((b, a), (a, b)))
    return sums + Flow(there, there + back)


def heads_flow(sharded: Sharded, a: int, b: int) -> Flow:
    """The bytes from rank `a` to rank `b` if the sequence is exchanged for heads.

    There: q, k and v; then o and the statistics back. Backward: do there, and dlse if lse is an
    output; then dq, dk and dv back.
    """
    q, _, v = (sharded.graph.types[i] for i in sharded.eqn.args[:3])
    B, D, E, item = sharded.entries, q.shape[-1], v.shape[-1], q.dtype.itemsize
    wide = accumulator(q.dtype).itemsize

    def size(of: int, to: int, row: int, key: int) -> int:
        """Bytes of what the rank `of` has of the sequence, of the heads that `to` computes."""
        own, (heads, groups) = sharded.holdings[of], sharded.head_parts[to]
        return B * (count(own.rows) * len(heads) * row + count(own.keys) * len(groups) * key)

    results = E * item + wide * len(sharded.node.stats)
    keys = (D + E) * item
    cotangents = E * item + wide * sharded.has_lse
    return Flow(
        size(a, b, D * item, keys) + size(b, a, results, 0),
        size(a, b, cotangents, 0) + size(b, a, D * item, keys),
    )


def shared_inputs(sharded: Sharded, a: int, b: int) -> tuple[int, ...]:
    """The numbers of the trained inputs with one part on two ranks.

    Their gradients are added up over these ranks.
    """
    trained = sharded.trained
    return tuple(
        n
        for n in sharded.open_inputs
        if n in trained
        and sharded.once(input_parts, n, a) == sharded.once(input_parts, n, b)
        and gradient_bytes(sharded, n, a)
    )


def input_parts(sharded: Sharded, n: int, rank: int) -> list[Ranges]:
    """A rank's part of an input, along each axis."""
    return sharded.parts(rank, sharded.graph.types[n].shape, sharded.axes[n])


def gradient_bytes(sharded: Sharded, n: int, rank: int) -> int:
    """Bytes of the gradient of a rank's part of an input."""
    size = prod(count(chunks) for chunks in sharded.once(input_parts, n, rank))
    return size * accumulator(sharded.graph.types[sharded.eqn.args[0]].dtype).itemsize


def sum_bytes(sharded: Sharded) -> int:
    """All bytes of both passes."""
    ranks = range(sharded.mesh.ranks)
    flows = (sharded.once(flow_between, a, b) for a in ranks for b in ranks if a != b)
    return sum(flow.forward + flow.backward for flow in flows)
