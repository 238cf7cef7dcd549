"""The tiles of the score matrix that a mask leaves, for calls of PyTorch's fused kernel.

What the mask exactly keeps gives rectangles and triangles without an addend. Where that is unknown,
blocks of queries read the keys that they may see, with -inf added to those they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from math import log2, prod

from attrs import evolve

from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import CpuRates
from attn_graph.masks import Mask
from attn_graph.masks.places import Block
from attn_graph.sparsity.layers import Layer, Region
from attn_graph.sparsity.parts import Part, Tile, cut_parts, exact_parts

ROW_BLOCKS = (32, 512)  # queries of a tile: the kernel's own blocks, and a cache's worth
FEW_REPEATS = 2  # windows of queries moved along, not worth a tile that repeats
MOST_SHARED = 2**19  # numbers of keys in windows that overlap: 2 MiB; more gradients are slower
LEAST_TASKS = 32  # heads of windows: the kernel computes each in one thread
DATA_ROWS = 128  # queries a tile, if data decides their keys
LEAST_FULL = 512  # keys: a longer run without mask is worth a call of its own and a merge
BRIDGE = 32  # keys: a hole this small costs less to compute than a tile to begin
MOST_TILES = 2**13  # listed and made ready ahead of calls; beyond, each call lists them


# Prices


def score_seconds(problem: Problem, rates: CpuRates) -> float:
    """The price of a score of the kernel's forward."""
    p = problem
    return 4 * max(p.D, p.E) / rates.flops[p.wide] + p.wide.itemsize / rates.kernel_softmax


def key_seconds(problem: Problem, rates: CpuRates) -> float:
    """The price of reading a key and its value, of all heads."""
    return problem.G * (problem.D + problem.E) / rates.kernel_reads


def kernel_calls(tiles: Iterable[Tile]) -> int:
    return sum(len(tile.parts) for tile in tiles)


def tiles_seconds(problem: Problem, rates: CpuRates, tiles: Sequence[Tile]) -> float:
    """The price of tiles' calls, scores, keys and values, and addends."""
    p = problem
    added = (len(t.rows) * len(x) for t in tiles for x in t.parts if x.kind == "mixed")
    return (
        kernel_calls(tiles) * rates.product_call
        + p.H * sum(tile.area for tile in tiles) * score_seconds(p, rates)
        + sum(tile.entries * tile.keys for tile in tiles) * key_seconds(p, rates)
        + sum(added) * rates.hides
    )


def choose_rows(problem: Problem, rates: CpuRates, keys: int, calls: int = 1) -> int:
    """Queries of a tile with an addend, of about so many keys. Where keys begin or end later from
    query to query, r queries compute r / 2 scores too many for each, and read each key once."""
    p = problem
    once = calls * rates.product_call + p.B * keys * key_seconds(p, rates)
    best = int(2.0 ** round(log2(once / (p.B * p.H * score_seconds(p, rates))) / 2))
    return min(max(best, ROW_BLOCKS[0]), ROW_BLOCKS[-1])


def looks_pay(problem: Problem, rates: CpuRates) -> bool:
    """True if finding each batch entry's kept keys takes less time than it saves: half of all
    scores, by assumption."""
    saved = prod(problem.sizes) * score_seconds(problem, rates) / 2
    return count_looks(problem) * rates.look < saved


def count_looks(problem: Problem) -> int:
    """How many blocks of queries have their keys found, if data pick them."""
    return problem.B * -(-problem.M // DATA_ROWS)


# Blocks of queries


def block_tile(mask: Mask | None, block: Block, groups: range, least_full: int) -> Tile:
    """A block of queries against the keys it may keep; full runs of `least_full` keys stand alone.
    groups: the key/value heads of its heads."""
    if mask is None:
        parts: tuple[Part, ...] = (Part(0, block.N, "full"),) if block.N else ()
    else:
        parts = cut_parts(mask.bound_keys(block), least_full, BRIDGE)
    return Tile(block.batch, block.heads, groups, block.rows, parts)


def row_tiles(mask: Mask | None, whole: Block, groups: range, rows: int) -> list[Tile]:
    """A tile for each block of `rows` queries. groups: the key/value heads of these heads."""
    return [block_tile(mask, block, groups, LEAST_FULL) for block in whole.split(rows)]


def gather_parts(tile: Tile, least: int, most: int) -> Tile:
    """A tile with parts of fewer than `least` keys made one for each `most` keys: copying them
    takes less time than a call for each, and a merge."""
    parts = [part for part in tile.parts if len(part) >= least]
    for kind in ("full", "mixed"):
        short = [part for part in tile.parts if part.kind == kind and len(part) < least]
        ends = [*accumulate(map(len, short))]
        groups = groupby(zip(short, ends, strict=True), key=lambda pair: pair[1] // most)
        parts += [side_by_side([part for part, _ in group]) for _, group in groups]
    return evolve(tile, parts=tuple(parts))


def side_by_side(parts: Sequence[Part]) -> Part:
    """Parts of one kind as one."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    gathered = tuple(range(x.start, x.stop) for x in parts)
    return Part(first.start, last.stop, first.kind, gathered)


def shorten_parts(tile: Tile, most: int) -> Tile:
    """A tile with parts of at most `most` keys, at least its number of queries."""
    parts: list[Part] = []
    for part in tile.parts:
        if part.kind == "causal":  # the last query keeps as many keys as there are queries
            parts.append(evolve(part, stop=min(part.stop, part.start + len(tile.rows))))
        else:
            cuts = range(part.start, part.stop, most)
            parts += [evolve(part, start=at, stop=min(at + most, part.stop)) for at in cuts]
    return evolve(tile, parts=tuple(parts))


def join_neighbours(tiles: Iterable[Tile], most: int, bounded: bool) -> list[Tile]:
    """Neighbours with equal keys made one, up to `most` scores under a mask. bounded: full tiles
    too, since something else is added to their scores."""
    out: list[Tile] = []
    for tile in tiles:
        last = out[-1] if out else None
        if last is not None and last.parts == tile.parts and last.batch == tile.batch:
            joined = evolve(last, rows=range(last.rows.start, tile.rows.stop))
            free = not bounded and all(p.kind == "full" for p in tile.parts)
            if free or len(joined.rows) * joined.keys <= most:
                out[-1] = joined
                continue
        out.append(tile)
    return out


def join_entries(entries: Iterable[Sequence[Tile]], most: int | None, bounded: bool) -> list[Tile]:
    """Neighbouring batch entries with equal tiles made one, up to `most` scores of a tile with an
    addend. None: all entries have one addend."""
    out: list[Tile] = []
    for _, group in groupby(entries, key=lambda tiles: [(x.rows, x.parts) for x in tiles]):
        same = [*group]
        added = [x for x in same[0] if bounded or x.is_mixed]
        largest = max((len(x.rows) * x.keys for x in added), default=0)
        count = max(1, most // largest) if most is not None and largest else len(same)
        for at in range(0, len(same), count):
            first, last = same[at], same[at : at + count][-1]
            pairs = zip(first, last, strict=True)
            out += [evolve(x, batch=range(x.batch.start, y.batch.stop)) for x, y in pairs]
    return out


# Layers: rectangles and triangles


def layer_tiles(
    problem: Problem, regions: Iterable[Region], rows: int, rates: CpuRates, *, single: bool
) -> list[Tile] | None:
    """Tiles of the places that a mask exactly keeps; None if they are many.

    rows: the most queries of a tile with an addend. single: this tile has one batch entry.
    """
    listed = (
        x
        for region in regions
        for layer in region.layers
        for tile in tiles_of_layer(problem, region.batch, layer, rows, rates)
        for x in (split_entries(tile) if single else [tile])
    )
    tiles = [*islice(listed, MOST_TILES + 1)]
    return None if len(tiles) > MOST_TILES else tiles


def split_entries(tile: Tile) -> list[Tile]:
    """A tile for each batch entry if it has an addend; else as it is."""
    return [evolve(tile, batch=range(b, b + 1)) for b in tile.batch] if tile.is_mixed else [tile]


def tiles_of_layer(
    problem: Problem, batch: range, layer: Layer, rows: int, rates: CpuRates
) -> Iterator[Tile]:
    """One tile; or blocks of `rows` queries if a run's start moves. If all edges move, blocks
    repeat: their calls are few."""
    heads = range(problem.H), range(problem.G)
    if all(start.moves == 0 for start, _ in layer.runs):  # no run needs an addend
        yield Tile(batch, *heads, layer.rows, exact_parts(layer))
        return
    queries = layer.rows
    if all(edge.moves for run in layer.runs for edge in run):  # blocks of queries are alike
        tile = first_window(problem, batch, layer, rates)
        step = len(tile.rows)
        count = len(queries) // step
        if count > max(FEW_REPEATS, len(batch)):
            queries = queries[count * step :]
            most = count if problem.grad is None else count_windows(problem, tile)
            for at in range(0, count, most):
                yield from move_tile(tile, at * step, min(most, count - at))
    for at in range(0, len(queries), rows):
        block = queries[at : at + rows]
        yield Tile(batch, *heads, block, block_parts(layer, block))


def first_window(problem: Problem, batch: range, layer: Layer, rates: CpuRates) -> Tile:
    """The first block of a layer of which all blocks are alike."""
    _, keys = layer.bound_keys(layer.rows[:1])
    rows = choose_rows(problem, rates, len(keys.bridged(BRIDGE)), calls=0)
    first, heads = layer.rows[:rows], (range(problem.H), range(problem.G))
    return Tile(batch, *heads, first, block_parts(layer, first))


def count_windows(problem: Problem, tile: Tile) -> int:
    """How many windows a backward computes at a time: gradients of their keys overlap."""
    few = MOST_SHARED // (problem.G * tile.keys * max(problem.D, problem.E))
    return max(few, -(-LEAST_TASKS // problem.H))


def move_tile(tile: Tile, by: int, repeat: int = 1) -> list[Tile]:
    """A tile of each batch entry, moved along the diagonal."""
    rows = range(tile.rows.start + by, tile.rows.stop + by)
    parts = tuple(evolve(x, start=x.start + by, stop=x.stop + by) for x in tile.parts)
    moved = evolve(tile, rows=rows, parts=parts, repeat=repeat)
    return [evolve(moved, batch=range(b, b + 1)) for b in tile.batch]


def block_parts(layer: Layer, rows: range) -> tuple[Part, ...]:
    """Parts of a block of queries, with some runs that begin later from query to query."""
    return cut_parts(layer.bound_keys(rows), LEAST_FULL, BRIDGE)
