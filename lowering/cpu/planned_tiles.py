"""The tiles of PyTorch's fused CPU kernel that planning lists, before data is known."""

from __future__ import annotations

from functools import cache, lru_cache

from attrs import evolve

from attn_graph.lowering.cpu.layer_tiles import find_layers_of, may_take_layers, tile_layers
from attn_graph.lowering.cpu.schedule import (
    CALL_SECONDS,
    MOST_TILES,
    Part,
    Tile,
    Way,
    choose_cheapest,
    estimate_seconds,
    fold_tiles,
    join_neighbours,
    plain_tiles,
    row_tiles,
)
from attn_graph.lowering.problem import Problem
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.layers import Kept
from attn_graph.masks.regions import MOST_POINTS
from attn_graph.spec import TensorSpec

LEAST_FULL = 512  # keys: a longer run without mask is worth a call of its own and a merge
DATA_ROWS = 128  # queries a tile, if data decides their keys
FEW_ROUNDED = 512  # queries: from here on numbers with equal leading bits are tiled alike
SIZE_BITS = 4  # leading bits of a rounded number


def whole_tile(problem: Problem) -> Tile:
    """All scores as one tile, with the mask evaluated everywhere."""
    return Tile(range(problem.B), range(problem.M), (Part(0, problem.N, "mixed"),))


def is_small(problem: Problem) -> bool:
    """True if finding each batch entry's kept keys takes longer than it saves: half of all scores,
    by assumption."""
    looks = problem.B * -(-problem.M // DATA_ROWS)
    return estimate_seconds(problem, [whole_tile(problem)]) <= 2 * looks * CALL_SECONDS


def static_tiles(problem: Problem, axes: str) -> tuple[Tile, ...] | None:
    """The tiles; None if data decide them, or if there are too many to list."""
    node = problem.node
    mask, bounded = node.mask, bool(node.modifiers)
    plain = plain_tiles(problem, mask)
    if plain is not None and (not bounded or (mask is None and problem.M <= DATA_ROWS)):
        return tuple(plain)
    if mask is not None and mask.needs:
        return (whole_tile(problem),) if is_small(problem) else None
    way = choose_way(round_sizes(problem), axes)
    if way is None:
        return None
    number, rows = way
    ways = list_ways(problem, axes)
    made = ways[number](rows) or ways[1 - number](rows)  # rounded sizes may have another
    return None if made is None else tuple(made)


def list_ways(problem: Problem, axes: str) -> tuple[Way, Way]:
    """Two ways to tile: by blocks of rows, and by the exact layers of the mask. Layers are used
    alone if the mask depends on j - i only."""
    node, most = problem.node, DATA_ROWS * problem.N
    mask, bounded = node.mask, bool(node.modifiers)
    relative = mask is not None and mask.relative and all(m.relative for m in node.modifiers)

    def tiles(rows: int) -> list[Tile] | None:
        if mask is not None and relative and "b" not in axes:
            return None if kept() else fold_tiles(problem, mask, rows, LEAST_FULL)
        if rows * MOST_TILES < problem.M:
            return None
        in_rows = row_tiles(problem, mask, range(problem.B), rows, LEAST_FULL)
        return join_neighbours(in_rows, most, bounded)

    @cache
    def kept() -> list[Kept] | None:
        return find_layers_of(problem, {}, MOST_POINTS) if may_take_layers(problem) else None

    def exact(rows: int) -> list[Tile] | None:
        layers = kept()
        if layers is None:
            return None
        return tile_layers(problem, layers, rows, LEAST_FULL, single=False)

    return tiles, exact


@lru_cache(64)
def choose_way(problem: Problem, axes: str) -> tuple[int, int] | None:
    """The cheaper way and its queries a tile; None if each gives too many tiles."""
    return choose_cheapest(problem, list_ways(problem, axes))


def round_sizes(problem: Problem) -> Problem:
    """The problem with up to an eighth more queries and keys, planned once for all sizes of equal
    rounding: listing tiles takes longer than the rest of planning. Few queries, more queries than
    keys, and users' masks, possibly limited to their sizes, are not rounded."""
    q, k, v, *more = problem.specs
    M, N, mask = problem.M, problem.N, problem.node.mask
    if not FEW_ROUNDED <= M <= N or not (mask is None or is_ours(mask)):
        return problem
    grown = -M % (1 << (M.bit_length() - SIZE_BITS))
    rows, keys = (*q.shape[:2], M + grown), (*k.shape[:2], N + grown)
    sides = (rows, q), (keys, k), (keys, v)
    specs = (TensorSpec((*shape, x.shape[3]), x.dtype) for shape, x in sides)
    return evolve(problem, specs=(*specs, *more))
