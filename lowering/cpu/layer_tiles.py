"""Tiles cut exactly along a mask: rectangles and triangles without an addend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attn_graph.lowering.cpu.schedule import (
    BRIDGE,
    MOST_TILES,
    Part,
    Tensors,
    Tile,
    estimate_tile,
)
from attn_graph.lowering.problem import Problem
from attn_graph.masks import Mask
from attn_graph.masks.layers import Kept, is_layered, list_layers
from attn_graph.masks.places import Block, join_intervals
from attn_graph.masks.regions import Layer, Run

POINTS_A_CALL = 2**12  # places a call may evaluate a mask at to list layers: some 5 ms


def may_take_layers(problem: Problem) -> bool:
    """With a modifier each part has an addend anyway. For low scales see `plain_tiles`."""
    node = problem.node
    return not (node.mask is None or node.modifiers or problem.low_scale or problem.is_empty)


def takes_layers(problem: Problem, data: Tensors) -> bool:
    if not may_take_layers(problem):
        return False
    assert problem.node.mask is not None
    return is_layered(problem.node.mask, block_of_problem(problem, data))


def block_of_problem(problem: Problem, data: Tensors) -> Block:
    """All places of a problem, with the mask's tensors."""
    p = problem
    return Block(range(p.B), range(p.H), range(p.M), p.H, p.M, p.N, data)


def find_layers_of(problem: Problem, data: Tensors, most_points: int) -> list[Kept] | None:
    """The kept places of each batch entry; None if unknown, or with too many edges."""
    mask = problem.node.mask
    assert isinstance(mask, Mask)
    return list_layers(mask, block_of_problem(problem, data), most_points)


def tile_layers(
    problem: Problem, kept: Iterable[Kept], rows: int, least_full: int, *, single: bool
) -> list[Tile] | None:
    """Tiles of layers; None if they are too many.

    rows: the most queries of a tile with an addend. single: this tile has one batch entry.
    """
    tiles: list[Tile] = []
    for batch, layers in kept:
        own: list[Tile] = []
        for layer in layers:
            if count_blocks(layer, rows, single=single) > MOST_TILES:
                return None
            own += tiles_of_layer(batch, layer, rows, least_full, single=single)
        tiles += join_small(problem, join_triangles(own), rows, single=single)
        if len(tiles) > MOST_TILES:
            return None
    return tiles


def count_blocks(layer: Layer, rows: int, *, single: bool) -> int:
    """How many tiles a layer is, as far as they grow with its queries."""
    folds = stands_still(layer) or (moves_along(layer) and not single)
    return 2 if folds else -(-len(layer.rows) // rows)


def stands_still(layer: Layer) -> bool:
    """True if all runs begin at one key for all queries: none needs an addend."""
    return all(start.moves == 0 for start, _ in layer.runs)


def tiles_of_layer(
    batch: range, layer: Layer, rows: int, least_full: int, *, single: bool
) -> Iterator[Tile]:
    """One tile; or row blocks if a run's start moves; a single repeating tile if all edges move.
    single: tiles have one batch entry, and none repeats."""
    if stands_still(layer):
        yield Tile(
            batch, layer.rows, tuple(x for run in layer.runs for x in exact_parts(run, layer.rows))
        )
        return
    queries = layer.rows
    count = len(queries) // rows if moves_along(layer) and not single else 0
    if count > len(batch):
        first, queries = queries[:rows], queries[count * rows :]
        parts = block_parts(layer.runs, first, least_full)
        yield from (Tile(range(b, b + 1), first, parts, count, rows) for b in batch)
    entries = [range(b, b + 1) for b in batch] if single else [batch]
    for at in range(0, len(queries), rows):
        block = queries[at : at + rows]
        parts = block_parts(layer.runs, block, least_full)
        yield from (Tile(entry, block, parts) for entry in entries)


def moves_along(layer: Layer) -> bool:
    """True if all edges move with the queries: blocks of these are alike."""
    return all(edge.moves for run in layer.runs for edge in run)


def exact_parts(run: Run, rows: range) -> Iterator[Part]:
    """A run with one first key: the keys kept by all queries, and a triangle if its end moves.

    The triangle's first key is the last one of the first query, so each of its queries keeps a key.
    """
    start, stop = run
    first, last = stop.of(rows.start), stop.of(rows[-1])
    begin, full = start.of(rows.start), first - 1 if first < last else first
    if begin < full:
        yield Part(begin, full, "full")
    if first < last:
        yield Part(full, last, "causal")


def block_parts(runs: Sequence[Run], rows: range, least_full: int) -> tuple[Part, ...]:
    """Parts of a block of queries, with some runs that begin later from query to query."""
    a, b = rows[0], rows[-1]
    pieces = join_intervals([(start.of(a), stop.of(b)) for start, stop in runs], BRIDGE)
    sure = [(start.of(b), stop.of(a)) for start, stop in runs]
    parts: list[Part] = []
    for begin, end in pieces:
        at = begin
        for x, y in sure:
            if begin <= x and y <= end and (y - x >= least_full or (x, y) == (begin, end)):
                parts += [Part(at, x, "mixed")] if at < x else []
                parts.append(Part(x, y, "full"))
                at = y
        parts += [Part(at, end, "mixed")] if at < end else []
    return tuple(parts)


def join_triangles(tiles: Iterable[Tile]) -> list[Tile]:
    """Tiles with each triangle and the rectangle below it as one, a call of the kernel: a causal
    mask and a length of keys, say."""
    out: list[Tile] = []
    for tile in tiles:
        joined = join_triangle(out[-1], tile) if out else None
        if joined is None:
            out.append(tile)
        else:
            out[-1] = joined
    return out


def join_triangle(above: Tile, below: Tile) -> Tile | None:
    """A tile ending in a triangle, joined with the tile below, if the queries there keep all keys
    of the triangle's last query, and at most one more; None for others."""
    apart = above.batch != below.batch or above.rows.stop != below.rows.start
    if apart or not (above.parts and below.parts):
        return None
    *others, corner = above.parts
    *same, base = below.parts
    begin = corner.start
    if others and others[-1].stop == begin:  # the rectangle of the same run
        begin = others[-1].start
        same = [*same, others[-1]]
    fits = corner.kind == "causal" and same == others and base.start == begin
    if not fits or {x.kind for x in (*others, base)} != {"full"}:
        return None
    if not corner.stop <= base.stop <= corner.start + len(above.rows) + 1:
        return None
    grown = Part(corner.start, base.stop, "causal")
    return Tile(above.batch, range(above.rows.start, below.rows.stop), (*others, grown))


def join_small(problem: Problem, tiles: Iterable[Tile], rows: int, *, single: bool) -> list[Tile]:
    """Neighbours made one tile with an addend, of at most `rows` queries, if it costs less: a call
    takes as long as many scores."""
    out: list[Tile] = []
    for tile in tiles:
        joined = join_mixed(out[-1], tile, rows) if out else None
        if joined is not None and not (single and len(tile.batch) > 1):
            apart = estimate_tile(problem, out[-1]) + estimate_tile(problem, tile)
            if estimate_tile(problem, joined) < apart:
                out[-1] = joined
                continue
        out.append(tile)
    return out


def join_mixed(above: Tile, below: Tile, rows: int) -> Tile | None:
    """Two neighbours as one tile with an addend; None if they are apart, repeat, or have more than
    `rows` queries."""
    joined = range(above.rows.start, below.rows.stop)
    apart = above.batch != below.batch or above.rows.stop != below.rows.start
    if apart or len(joined) > rows:
        return None
    keys = sorted((part.start, part.stop) for part in (*above.parts, *below.parts))
    parts = tuple(Part(a, b, "mixed") for a, b in join_intervals(keys, BRIDGE))
    return Tile(above.batch, joined, parts)
