"""Layouts: the division of the batch, the heads, or the queries and keys among ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Literal, final

from attrs import field, frozen

from attn_graph.errors import GraphError, show
from attn_graph.spec import to_integer

Placement = Literal["batch", "heads", "contiguous", "zigzag", "balanced"]
Method = Literal["ring", "gather", "heads"]
SEQUENCES: tuple[Placement, ...] = (
    "contiguous",
    "zigzag",
    "balanced",
)  # placements that divide queries and keys
EVEN = 1.02  # the slowest rank over the mean: a layout of fewer chunks wins up to it
DEALT = (2, 4, 8)  # chunks that a rank has where the mask leaves queries uneven work

Ranges = tuple[range, ...]
Weigh = Callable[[Sequence[range]], list[int]]  # the pairs that each range of queries sees


def to_ranks(value: object) -> int:
    """A number of ranks. Raises GraphError for less than one."""
    ranks = to_integer(value)
    if ranks is None or ranks < 1:
        raise GraphError(f"mesh: {show(value)} is not a number of ranks; write ag.Mesh(8)")
    return ranks


@final
@frozen
class Mesh:
    """`ranks` equal devices, each linked to each, for planning.

    A plan runs on a process group of as many ranks; the mesh itself has none.
    """

    ranks: int = field(converter=to_ranks)


@final
@frozen
class Holding:
    """One rank's part: of the batch, of the query and key/value heads, of queries and of keys.

    rows and keys are chunks in their order, contiguous in the rank's tensors.
    """

    batch: range
    heads: range
    groups: range
    rows: Ranges
    keys: Ranges


def divide(size: int, parts: int, grain: int = 1) -> list[range]:
    """`size` positions in `parts` neighbouring ranges, with lengths differing by at most one grain.

    Each begins at a multiple of `grain`.
    """
    grains = -(-size // grain)
    ends = [min(size, grains * n // parts * grain) for n in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def chunk(size: int, parts: int, grain: int = 1) -> list[range]:
    """Ranges as of PyTorch's chunk, and so of its DTensors: all but the last have one length.

    The last ones may be empty.
    """
    each = max(1, -(-size // (parts * grain))) * grain
    return [range(min(size, n * each), min(size, (n + 1) * each)) for n in range(parts)]


def chunk_by_weight(weights: Sequence[int], parts: int) -> list[range]:
    """Neighbours in parts of nearly equal weight: the middle of each decides its part."""
    whole, ends = max(1, sum(weights)), [*accumulate(weights, initial=0)]
    owners = [(a + b) * parts // (2 * whole) for a, b in pairwise(ends)]
    firsts = [bisect_left(owners, n) for n in range(parts)]
    return [range(a, b) for a, b in pairwise([*firsts, len(weights)])]


def join_touching(chunks: Iterable[range]) -> Ranges:
    """Chunks in their order, without empty ones, with touching ones joined."""
    out: list[range] = []
    for own in sorted((c for c in chunks if c), key=lambda c: c.start):
        if out and out[-1].stop == own.start:
            out[-1] = range(out[-1].start, own.stop)
        else:
            out.append(own)
    return tuple(out)


def divide_heads(H: int, G: int, ranks: int) -> list[tuple[range, range]]:
    """Each rank's query heads and their key/value heads.

    Whole groups if there are enough for all ranks. Else ranks share groups: each has some query
    heads of one, and all of them its key/value head.
    """
    each = H // max(1, G)
    if ranks <= G or not G:
        return [(range(g.start * each, g.stop * each), g) for g in chunk(G, ranks)]
    return [
        (range(group * each + own.start, group * each + own.stop), range(group, group + bool(own)))
        for group, sharing in enumerate(divide(ranks, G))
        for own in divide(each, len(sharing))
    ]


def cut_at_borders(own: Iterable[range], spans: Ranges, grain: int) -> Ranges:
    """The parts of ranges in each span, beginning at multiples of `grain` from its start."""

    def place(at: int, span: range) -> int:
        at = min(max(at, span.start), span.stop)
        return at if at == span.stop else at - (at - span.start) % grain

    each = (range(place(x.start, s), place(x.stop, s)) for x in own for s in spans)
    return tuple(part for part in each if part)


def zigzag(spans: Ranges, ranks: int, grain: int = 1) -> list[Ranges]:
    """Rank r has, of each span, chunks r and 2 R - 1 - r of 2 R: equal work under a causal mask."""
    each = [
        [range(s.start + x.start, s.start + x.stop) for x in divide(len(s), 2 * ranks, grain)]
        for s in spans
    ]
    return [
        tuple(part for own in each for part in join_touching((own[r], own[-1 - r])))
        for r in range(ranks)
    ]


def contiguous(spans: Ranges, ranks: int, grain: int = 1) -> list[Ranges]:
    """Rank r has chunk r of R, cut at the borders of spans."""
    return [cut_at_borders([own], spans, grain) for own in chunk(spans[-1].stop, ranks, grain)]


def balance(work: Sequence[int]) -> float:
    """The slowest rank over the mean; 1 without any work."""
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def balance_chunks(spans: Ranges, ranks: int, weigh: Weigh, grain: int = 1) -> list[Ranges]:
    """Chunks of queries for each rank, of equal numbers of queries and nearly equal pairs.

    The first within EVEN of the mean among the contiguous layout, zigzag, and ever smaller chunks
    dealt by their counts; else the best one. Of several spans zigzag comes last: it parts each.
    """
    size = spans[-1].stop
    fine = (divide(size, ranks * n, grain) for n in DEALT if ranks * n * grain <= size)
    dealt = (
        [cut_at_borders(x, spans, grain) for x in deal(chunks, ranks, weigh)] for chunks in fine
    )
    tries: list[tuple[float, list[Ranges]]] = []
    near, even = [contiguous(spans, ranks, grain)], [zigzag(spans, ranks, grain)]
    for chunks in chain(near, even, dealt) if len(spans) == 1 else chain(near, dealt, even):
        tries.append((balance([sum(weigh(own)) for own in chunks]), chunks))
        if tries[-1][0] <= EVEN:
            break
    return min(tries, key=lambda one: one[0])[1]


def deal(chunks: Sequence[range], ranks: int, weigh: Weigh) -> list[Ranges]:
    """As many chunks for each rank: heavy ones first, each to the rank with the least so far."""
    weights, each = weigh(chunks), len(chunks) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for n in sorted(range(len(chunks)), key=lambda n: (-weights[n], n)):
        free = [hand for hand in hands if len(hand) < each]
        min(free, key=lambda hand: sum(weights[m] for m in hand)).append(n)
    return [join_touching(chunks[n] for n in hand) for hand in hands]
