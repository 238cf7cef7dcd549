"""Counts of the mask's pairs for some queries, and their visible keys."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from attrs import evolve

from attn_graph.ir.transforms.moving import WHOLE, Box, cut_data
from attn_graph.masks import Mask
from attn_graph.masks.places import Block, Keys, join_intervals
from attn_graph.mesh.sharded import Sharded, common, shift
from attn_graph.sparsity.layers import MOST_POINTS, Edge, Layer, Region, Run, list_layers
from attn_graph.sparsity.tiles import bounds, check_tensors, count_pairs


def bound_mask(sharded: Sharded) -> tuple[Mask, Block]:
    """A mask from known tensors only, with at least the graph's places; and the box of all
    places.
    """
    data = check_tensors(sharded.node.mask, sharded.sizes, sharded.mask_data())
    block = Block.whole(sharded.sizes, data)
    return bounds(sharded.node.mask, block)[0], block


def kept_layers(sharded: Sharded) -> tuple[Region, ...] | None:
    """The kept places as layers of queries; None if they can only be counted."""
    mask, block = sharded.once(bound_mask)
    kept = list_layers(mask, block, MOST_POINTS)
    return None if kept is None else tuple(kept)


def clip_layers(layers: tuple[Layer, ...], rows: range) -> Iterator[Layer]:
    for layer in layers:
        own = range(max(layer.rows.start, rows.start), min(layer.rows.stop, rows.stop))
        if own and layer.runs:
            yield evolve(layer, rows=own)


def count_seen(sharded: Sharded, rows: range) -> int:
    """The pairs of some queries, over all batch entries and heads; an upper bound unless all is
    known.
    """
    heads = range(sharded.sizes[1])
    return sum(
        count_box(sharded, sharded.box(own, common(own.rows, rows), own.keys, heads))
        for own in sharded.find_stretches("i", rows)
    )


def count_box(sharded: Sharded, box: Box) -> int:
    """The kept pairs of a box of places; an upper bound unless all is known."""
    kept = sharded.once(kept_layers)
    if kept is None:
        return count_moved(sharded, box)
    return len(box.heads) * sum(
        len(common(region.batch, box.batch))
        * (sum_below(run, layer.rows, box.keys.stop) - sum_below(run, layer.rows, box.keys.start))
        for region in entries_of(kept, box.batch)
        for layer in clip_layers(region.layers, box.rows)
        for run in layer.runs
    )


def entries_of(kept: tuple[Region, ...], batch: range) -> tuple[Region, ...]:
    """The layers of some batch entries."""
    first = bisect_right(kept, batch.start, key=first_entry) - 1
    return kept[max(0, first) : bisect_left(kept, batch.stop, key=first_entry)]


def first_entry(region: Region) -> int:
    return region.batch.start


def sum_below(run: Run, rows: range, key: int) -> int:
    """How many places of a run lie before a key."""
    start, stop = (sum_least(edge, rows, key) for edge in run)
    return stop - start


def sum_least(edge: Edge, rows: range, key: int) -> int:
    """The sum, over queries, of the lesser of an edge's place and a key."""
    if not edge.moves:
        return len(rows) * min(edge.at, key)
    before = max(0, min(len(rows), key - edge.of(rows.start)))
    return before * edge.of(rows.start) + before * (before - 1) // 2 + (len(rows) - before) * key


def count_moved(sharded: Sharded, box: Box) -> int:
    """The kept pairs of a box by the mask moved there."""
    piece, data = sharded.piece(box), sharded.mask_data()
    mask = piece.node.mask
    needs = {} if mask is None else {n: x.axes for n, x in mask.needs.items()}
    known = {n: axes for n, axes in needs.items() if n.removeprefix(WHOLE) in data}
    B, H, M, N = box.shape
    return count_pairs(mask, (B, H, H, M, N), cut_data(known, box, data)).pairs


def find_seen(sharded: Sharded, rows: range) -> Keys:
    """The keys possibly visible to any of some queries."""
    intervals = [
        (a + own.keys.start, min(b, len(own.keys)) + own.keys.start)
        for own in sharded.find_stretches("i", rows)
        for a, b in list_seen(sharded, own.batch, shift(common(own.rows, rows), -own.rows.start))
        if a < len(own.keys)
    ]
    return Keys(join_intervals(sorted(intervals), gap=0))


def list_seen(sharded: Sharded, batch: range, rows: range) -> list[tuple[int, int]]:
    """The keys possibly visible to some queries of some batch entries, as intervals."""
    mask, block = sharded.once(bound_mask)
    kept = sharded.once(kept_layers)
    if kept is None:
        return [*(mask.span(evolve(block, batch=batch, rows=rows)) & block.all).intervals]
    return [
        keys
        for region in entries_of(kept, batch)
        for layer in clip_layers(region.layers, rows)
        for keys in layer.reach(layer.rows)
    ]
