"""The corner that a causal mask hides, where PyTorch's fused kernel hides it slowly by itself.

It reads keys in blocks of 512, the last one to its end: of sequences not much longer it computes
nearly all scores, and hides half. Steps, a call for each of a few blocks of queries with the keys
up to that of its last query, leave most of those out, and add numbers that hide the rest.

Of few queries after many keys the corner is small: numbers that hide it are added in one call,
which takes less time than one for it, another for the keys before, and merging both.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from attn_graph.lowering.cpu.schedule import BLOCKS, Part, Tile
from attn_graph.lowering.problem import Problem
from attn_graph.masks import Band

CAUSAL = Band(None, 0)  # as the kernel itself knows it
KERNEL_KEYS = 512  # that it reads at a time
STEP, KERNEL_ROWS = BLOCKS[1]  # queries of a step, the fewest of which it takes so many at a time
# Queries that are worth steps: two of them to three, beyond which one call leaves out nearly as
# much. And what is left out at least, in multiplications and additions: the calls cost a fifth of
# that. Measured on a CPU with AVX2, 1 and 2 threads: each pass is 1.1 to 1.3 times as fast as one
# call. Of 640 queries it would be 0.95 to 1.06.
FEWEST, MOST = 2 * STEP, 3 * STEP
LEAST_LEFT_OUT = 2**27
MOST_JOINED = 2**14  # scores of a head that have such numbers, which a plan holds: 64 KiB


def takes_steps(problem: Problem) -> bool:
    """Whether a causal problem takes less time in steps than as one call of the kernel."""
    p = problem
    if p.node.mask != CAUSAL or p.node.modifiers or p.low_scale:
        return False
    if not FEWEST <= p.M <= min(MOST, p.N):
        return False
    left_out = count_scores(p, KERNEL_ROWS, KERNEL_KEYS) - count_scores(p, STEP)
    return 2 * p.B * p.H * (p.D + p.E) * left_out >= LEAST_LEFT_OUT


def count_scores(problem: Problem, rows: int, keys: int = 1) -> int:
    """Scores of a head in blocks of so many queries, each with the keys up to its last query: of
    whole blocks of so many keys."""
    M, N = problem.M, problem.N
    starts = range(0, M, rows)
    stops = [min(at + rows, M) for at in starts]
    read = [min(-(-stop // keys) * keys, N) for stop in stops]
    return sum((b - a) * n for a, b, n in zip(starts, stops, read, strict=True))


def cut_steps(tile: Tile) -> Iterator[Tile]:
    """The steps of a tile with one causal part. The last one is first: it has all keys that others
    have, so that their gradients are added to its own. What is left over has the first queries,
    which need no numbers: so those of the others are the same for all lengths."""
    queries, start = tile.rows, tile.parts[0].start
    for stop in range(len(queries), 0, -STEP):
        at = max(0, stop - STEP)
        part = Part(start, start + stop, "mixed" if at else "causal")
        yield Tile(tile.batch, queries[at:stop], (part,))


def join_corner(problem: Problem, tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """Tiles of which one that is a small corner and the keys before it is a single part; others as
    they are."""
    if problem.M * problem.N > MOST_JOINED:
        return tiles
    match tiles:
        case (Tile(parts=(Part(kind="full") as first, Part(kind="causal") as corner)) as tile,):
            return (evolve(tile, parts=(Part(first.start, corner.stop, "mixed"),)),)
    return tiles
