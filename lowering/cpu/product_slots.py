"""Which tiles matrix products compute: their sizes, and what is known of each ahead of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import final

import torch
from attrs import Factory, field, frozen

from attn_graph.lowering.cpu.schedule import MOST_READY, Cut, Part, Tile, parts_of, row_tiles
from attn_graph.lowering.problem import Problem
from attn_graph.masks.places import Block, join_intervals
from attn_graph.spec import TensorSpec

# Scores held at a time, 4 MiB of float32, which a shared cache holds. Timed by one thread whose own
# cache has 1 MiB, shapes from 64 to 4096 keys: 2^21 is no faster, with twice the memory; 2^19 takes
# up to 1.1 times as long, 2^17 1.5 times. Products and tanh take most of the time, which a nearer
# cache does not shorten, and each tile costs 30 calls of PyTorch.
SCORES = 2**20
# With a mask: 64 of 1024 causal queries compute 1.06 times the scores that count, 256 of them 1.25.
MOST_ROWS = 64
# Without one no score is wasted, and long products are up to a tenth faster.
UNMASKED_ROWS = 256
PLACES = 2**18  # at which modifiers are evaluated at a time, of up to POSITIONS bytes each
DROPOUT_SCORES = SCORES // 2  # its random words take three times the memory of the scores
LEAST_ROWS = 16
LEAST_FULL = 64  # keys: on a longer run the mask is not evaluated


@final
@frozen
class Chunk:
    """Batch entries and key/value heads that are computed together."""

    batch: range
    groups: range


@final
@frozen(eq=False)
class ProductSlot:
    """A tile of a chunk, made ready for calls.

    heads: its query heads. shape: how many batch entries, groups, query heads a group and queries.
    rows: cuts its queries out of x [B,H,M,...]. groups: cuts its batch entries and groups out of
    x [B,G,N,D]. runs: its keys, in runs without a hole. mixed: the parts that the mask decides,
    each with its first column among the tile's scores.
    """

    tile: Tile
    heads: range
    shape: tuple[int, int, int, int]
    rows: Cut
    groups: Cut
    runs: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, Part], ...]
    keys: int = field(init=False, default=Factory(lambda slot: slot.tile.keys, takes_self=True))


def choose_sizes(problem: Problem) -> tuple[int, int, int]:
    """Queries, batch entries and key/value heads of a tile: so many that its scores are near
    SCORES, rows first, then heads, then batch."""
    p, r, mask = problem, problem.H // problem.G, problem.node.mask
    scores = DROPOUT_SCORES if p.node.dropout else SCORES
    most = MOST_ROWS if mask else find_unmasked_rows(p)
    rows = min(p.M, most, max(LEAST_ROWS, scores // (p.N * r)))
    one = find_reach(p, rows) * r * rows  # scores of a key/value head
    groups = min(p.G, max(1, scores // one))
    merges = groups == p.G and all(merges_batch(s) or packs(s, p) for s in p.specs[1:3])
    by_data = mask is not None and bool(mask.needs)
    batch = min(p.B, max(1, scores // (one * groups))) if merges and not by_data else 1
    return rows, batch, groups


def find_unmasked_rows(problem: Problem) -> int:
    """The most queries of a tile without a mask."""
    if not problem.node.modifiers:
        return UNMASKED_ROWS
    return min(UNMASKED_ROWS, max(MOST_ROWS, PLACES // problem.N))


def list_chunks(problem: Problem, batch: int, groups: int) -> Iterator[Chunk]:
    """The batch entries and key/value heads that run together, in order."""
    p = problem
    for b in range(0, p.B, batch):
        for g in range(0, p.G, groups):
            yield Chunk(range(b, min(b + batch, p.B)), range(g, min(g + groups, p.G)))


def list_slots(
    problem: Problem, rows: int, batch: int, groups: int, data: Mapping[str, torch.Tensor]
) -> Iterator[ProductSlot]:
    """All tiles of these sizes, given what the mask reads."""
    for chunk in list_chunks(problem, batch, groups):
        for start in range(0, problem.M, rows):
            queries = range(start, min(start + rows, problem.M))
            yield make_slot(problem, chunk, queries, data)


def make_slot(
    problem: Problem, chunk: Chunk, rows: range, data: Mapping[str, torch.Tensor]
) -> ProductSlot:
    """The tile of these queries of a chunk."""
    p, r = problem, problem.H // problem.G
    b, g = chunk.batch, chunk.groups
    heads = range(g.start * r, g.stop * r)
    parts = parts_of(p.node.mask, Block(b, heads, rows, p.H, p.M, p.N, data), LEAST_FULL)
    return ProductSlot(
        Tile(b, rows, parts),
        heads,
        (len(b), len(g), r, len(rows)),
        itemgetter(tuple(slice(x.start, x.stop) for x in (b, heads, rows))),
        itemgetter(tuple(slice(x.start, x.stop) for x in (b, g))),
        join_intervals([(x.start, x.stop) for x in parts], gap=0),
        tuple(find_mixed(parts)),
    )


def find_reach(problem: Problem, rows: int) -> int:
    """About the most keys of a block of `rows` queries, of all batch entries and heads; all keys
    where data decide, or there are many blocks."""
    p, mask = problem, problem.node.mask
    if mask is None or mask.needs or rows * MOST_READY < p.M:
        return p.N
    tiles = row_tiles(p, mask, range(p.B), rows, LEAST_FULL)
    return max(1, *(tile.keys for tile in tiles))


def find_mixed(parts: Sequence[Part]) -> Iterator[tuple[int, Part]]:
    """The parts of which the mask must be asked, each with how many keys come before it."""
    at = 0
    for part in parts:
        if part.kind == "mixed":
            yield at, part
        at += len(part)


def packs(spec: TensorSpec, problem: Problem) -> bool:
    """Whether the products would copy an operand in secret: other dtype, or no unit stride."""
    return spec.dtype != problem.wide or not spec.unit_last


def merges_batch(spec: TensorSpec) -> bool:
    """Whether batch and heads are one axis in memory."""
    return (
        spec.shape[0] <= 1
        or spec.shape[1] <= 1
        or spec.strides[0] == spec.shape[1] * spec.strides[1]
    )
