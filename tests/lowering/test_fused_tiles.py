"""Tiles of PyTorch's fused kernel: what they are, and what they give, whatever they cost."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.attention import Attention
from attn_graph.lowering.cpu import fused_tiles, schedule
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem, is_readable
from attn_graph.lowering.rates import CpuRates, cpu_rates
from attn_graph.machine.overlap import overlaps_itself
from attn_graph.masks.places import Block, Place
from attn_graph.sparsity import layers
from attn_graph.sparsity.layers import Edge, Layer, list_layers
from attn_graph.sparsity.parts import Part, Tile
from attn_graph.testing import rule
from attn_graph.testing import strategies as drawn
from attn_graph.testing.agreement import (
    check_gradients,
    check_outputs,
    run_gradients,
    run_plan,
)
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.planning import force_kernel, forget_plans
from tests.support.planning import new_plans as new_plans

CPU = ag.Target.of("cpu")
PLAIN = evolve(CPU, native=(), interprets=False)
RATES = cpu_rates(False)
INF = float("inf")
Data = dict[str, torch.Tensor]
Case = tuple[m.Mask, int, int, Data]  # mask, queries, keys, what it reads
FEATURES = 8
ENDS = {"kv_lengths": torch.tensor([0, 2]), "q_lengths": torch.tensor([1, 2])}

bands = st.builds(m.Band, st.none() | st.integers(-60, 20), st.none() | st.integers(-20, 60))
ragged = st.builds(m.Band, st.none(), st.integers(-9, 9), st.just(m.LENGTHS))
integers = st.sampled_from((torch.int32, torch.int64))
leaves = st.one_of(
    bands,
    st.builds(m.Band, st.none(), st.integers(-60, 60)),
    st.builds(m.Prefix, st.integers(0, 90)),
    ragged,
    st.just(m.KeyLengths()),
    st.just(m.QueryLengths()),
)
strips = st.recursive(
    leaves,
    lambda x: st.builds(m.And, x, x) | st.builds(m.Or, x, x) | st.builds(m.Not, x),
    max_leaves=4,
)
conjunctions = st.lists(leaves, max_size=2).map(
    lambda x: m.join_masks(m.And, [m.SameSegment(), *x])
)
# Calls that cost nothing, as they are, or more than all scores; keys that are always looked for.
prices = st.builds(
    lambda call, look: evolve(RATES, product_call=call, look=look),
    st.sampled_from((1e-9, RATES.product_call, 1.0)),
    st.sampled_from((0.0, RATES.look)),
)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_bounds_far_beyond_lengths_are_none(kind: torch.dtype) -> None:
    lengths = {name: torch.tensor([3, 3], dtype=kind) for name in m.LENGTHS}
    mask = m.Band(-(2**40), 2**40, m.LENGTHS)
    found = list_layers(mask, Block(range(2), range(1), range(9), 1, 9, 8, lengths), 10**6)
    assert found is not None
    assert [region.layers for region in found] == [(Layer(range(9), ((Edge(0), Edge(8)),)),)]


def numbers(draw: st.DrawFn, most: int, *, in_order: bool) -> list[int]:
    """The numbers of some documents, of none, one or more queries each."""
    sizes = draw(st.lists(st.integers(0, 60), max_size=6))
    ends = [min(most, end) for end in accumulate([0, *sizes])]
    order = range(len(ends)) if in_order else draw(st.permutations(range(len(ends))))
    out = [order[n] for n, (a, b) in enumerate(pairwise(ends)) for _ in range(b - a)]
    return out + [order[-1]] * (most - len(out))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Masks of strips or documents, with lengths of 0, 1 and more, some of them equal."""
    mask = draw(strips | conjunctions)
    M, N, B = draw(st.integers(1, 250)), draw(st.integers(1, 150)), draw(st.integers(1, 4))
    least, most = st.sampled_from((0, 1)), st.integers(0, 150)
    data: Data = {}
    for name in mask.needs:
        size = M if name.startswith("q") else N
        if name in m.LENGTHS:
            lengths = draw(st.lists(least | most, min_size=B, max_size=B))
            data[name] = torch.tensor(lengths).clamp(max=size).to(draw(integers))
        else:
            in_order = draw(st.booleans())
            data[name] = torch.tensor([numbers(draw, size, in_order=in_order) for _ in range(B)])
    if M == N and data.keys() >= {"q_segments", "kv_segments"} and draw(st.booleans()):
        data["kv_segments"] = data["q_segments"]
    return mask, M, N, data


def entries(data: Mapping[str, torch.Tensor]) -> int:
    return max((len(x) for x in data.values()), default=2)


def kept_by(mask: m.Mask, M: int, N: int, data: Data) -> torch.Tensor:
    """What a mask keeps [B,M,N]."""
    block = Block(range(entries(data)), range(1), range(M), 1, M, N, data)
    keep = torch.as_tensor(mask.keep(Place.of(block, range(N))))
    return keep.expand(entries(data), 1, M, N)[:, 0]


def problem_of(mask: m.Mask, M: int, N: int, data: Data, scale: float = 1.0) -> Problem:
    B = entries(data)
    q, k = (ag.TensorSpec((B, 2, n, FEATURES), torch.float32) for n in (M, N))
    read = [ag.TensorSpec.like(data[name]) for name in mask.needs]
    return Problem.of(Attention(scale, mask=mask), (q, k, k, *read))


@settings(max_examples=2 * settings().max_examples)
@example((m.Band(None, 0) & m.Band(None, 0, m.LENGTHS), 2, 3, ENDS))
@given(cases())
def test_layers_are_what_the_mask_keeps(case: Case) -> None:
    mask, M, N, data = case
    kept = list_layers(mask, Block(range(entries(data)), range(1), range(M), 1, M, N, data), 10**6)
    due = kept_by(mask, M, N, data)
    if kept is None:
        assert isinstance(mask, m.SameSegment | m.And)
        return
    found = torch.zeros_like(due)
    for region in kept:
        batch = region.batch
        for layer in region.layers:
            for i in layer.rows:
                for start, stop in layer.runs:
                    found[batch.start : batch.stop, i, start.of(i) : stop.of(i)] = True
    assert torch.equal(found, due)
    assert [b for region in kept for b in region.batch] == [*range(entries(data))]


def keeps(tile: Tile, part: Part) -> torch.Tensor:
    """What the kernel keeps of a part by itself."""
    whole = torch.ones(len(tile.rows), len(part), dtype=torch.bool)
    return whole.tril() if part.kind == "causal" else whole


# Queries that keep less than those above them.
SHORTER: Case = (
    m.Band(None, 4) & (m.QueryLengths() | m.Band(None, 0)), 3, 6, {"q_lengths": torch.tensor([2])}
)  # fmt: skip
CHEAP = evolve(RATES, product_call=1e-9, look=0.0)


@settings(max_examples=2 * settings().max_examples)
@example(case=(m.Band(0, None), 1, 1, {}), rates=CHEAP, shared=1, least_full=8)
@example(case=(m.Band(-9, 0), 250, 250, {}), rates=RATES, shared=1, least_full=8)
@example(case=(m.Band(-9, 3) | m.Prefix(5), 250, 140, {}), rates=CHEAP, shared=1, least_full=8)
@example(case=SHORTER, rates=CHEAP, shared=1, least_full=512)
@given(
    case=cases(),
    rates=prices,
    shared=st.sampled_from((1, 2**19)),
    least_full=st.sampled_from((8, 512)),
)
def test_tiles_have_each_place_once(
    case: Case, rates: CpuRates, shared: int, least_full: int
) -> None:
    mask, M, N, data = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MOST_SHARED", shared)
        patch.setattr(schedule, "LEAST_TASKS", 3)
        patch.setattr(schedule, "LEAST_FULL", least_full)
        planned = FusedTiles.plan(problem_of(mask, M, N, data), rates)
        tiles = planned.tiles(data)
    due = kept_by(mask, M, N, data)
    seen, rows = torch.zeros(due.shape, dtype=torch.int64), torch.zeros(due.shape[:2])
    for tile in tiles:
        for n in range(tile.repeat):
            for moved in schedule.move_tile(tile, n * len(tile.rows)):
                rows[place_of(moved)] += 1
                for first, part in zip(tile.parts, moved.parts, strict=True):
                    own = evolve(tile, batch=moved.batch)  # its addend is that of all repeats
                    added = due[place_of(own, first)]
                    seen[place_of(moved, part)] += (
                        added if part.kind == "mixed" else keeps(tile, part)
                    )
    assert (rows == 1).all()
    assert torch.equal(seen, due.to(torch.int64))
    if planned.static is None:
        mixed = [tile for tile in tiles if tile.is_mixed]
        assert all(len(x.rows) * x.keys <= planned.most_scores for x in mixed)


def place_of(tile: Tile, part: Part | None = None) -> tuple[slice, ...]:
    """Where a tile's queries, or those of a part with its keys, are among all."""
    ranges = [tile.batch, tile.rows, *([] if part is None else [range(part.start, part.stop)])]
    return tuple(slice(x.start, x.stop) for x in ranges)


@example((m.Band(-40, 5), 250, 250, {}), RATES, 1, False, torch.float32, "bhsd", 2**19)
@example((m.Band(-40, 5), 250, 250, {}), RATES, 1, False, torch.float32, "bhsd", 1)
@example((m.Band(-40, 5), 250, 250, {}), CHEAP, 1, False, torch.float32, "bhsd", 2**19)
@example((m.Band(None, -100), 250, 40, {}), RATES, 1, False, torch.float16, "bhsd", 1)
@example((m.Band(-139, 40), 250, 40, {}), RATES, 1, False, torch.float16, "bhsd", 1)
@given(
    case=cases(), rates=prices, seed=st.integers(0, 5), stats=st.booleans(),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.float16)),
    layout=st.sampled_from(("bhsd", "bshd", "sbhd")), shared=st.sampled_from((1, 2**19)),
)  # fmt: skip
def test_tiles_of_what_is_exactly_kept_agree_with_the_formula(
    case: Case, rates: CpuRates, seed: int, stats: bool, dtype: torch.dtype, layout: str,
    shared: int,
) -> None:  # fmt: skip
    """Forward and backward, four heads on two."""
    mask, M, N, data = case
    B, names = entries(data), set(mask.needs)
    q = ag.TensorSpec((B, 4, M, FEATURES), dtype, layout=layout)
    k = ag.TensorSpec((B, 2, N, FEATURES), dtype, layout=layout)
    specs: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in data.items()}
    graph = ag.attention(q, k, k, mask=mask, stats=stats, **specs)
    with pytest.MonkeyPatch.context() as patch:
        force_kernel(patch, rates)
        patch.setattr(schedule, "MOST_SHARED", shared)
        patch.setattr(schedule, "LEAST_TASKS", 1)
        plan = ag.compile(graph, target=PLAIN, backends=("math",))
        drawn = tensors_for(graph, seed)
        tensors = [data.get(i.name, x) for i, x in zip(graph.inputs, drawn, strict=True)]
        results = run_plan(plan, tensors)
        for found, due in zip(results, rule.expect_outputs(graph, tensors), strict=True):
            due.check(found)
        cotangents = cotangents_for(plan.graph, 3)
        gradients = run_gradients(plan, tensors, cotangents)
        for name, due in rule.expect_gradients(graph, tensors, cotangents).items():
            assert name in gradients or name in names
            if name in gradients:
                due.check(gradients[name])


KINDS = (  # flags of a batch entry [M,N]
    lambda M, N: torch.ones(M, N, dtype=torch.bool),
    lambda M, N: (torch.arange(N) <= N // 3).expand(M, N),
    lambda M, N: torch.arange(M)[:, None] % 3 != torch.arange(N) % 3,
)
block_sizes = st.sampled_from([1, 7, 16, 32, 40, 64, 200])


@st.composite
def looked_up(draw: st.DrawFn) -> ag.Graph:
    """Attention whose keys a table or booleans pick, alone or beside other masks and steps."""
    G, M, N = draw(st.integers(1, 3)), draw(st.integers(1, 300)), draw(st.integers(1, 150))
    size = drawn.Shape(draw(st.integers(1, 3)), G * draw(st.integers(1, 2)), G, M, N, 8, 8)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    blocks = ag.KeepBlocks(draw(block_sizes), draw(block_sizes))
    mask = draw(st.sampled_from([
        blocks, blocks, blocks & ag.Causal("bottom_right"), ~blocks | ag.Prefix(3),
        blocks | ag.KeepBlocks(33, 20, "other"), ag.Keep(),
    ]))  # fmt: skip
    options: dict[str, Any] = draw(drawn.data_specs(mask.needs, size))
    options |= {"bias": draw(drawn.maybe(drawn.addend_specs("bias", size, dtype)))}
    if dtype != torch.bfloat16:  # which the kernel rounds before the sink: too coarse for one key
        options |= {"sinks": draw(drawn.maybe(drawn.addend_specs("sinks", size, dtype)))}
    q, k, v = (draw(drawn.specs(x, dtype)) for x in (size.q, size.k, size.v))
    return ag.attention(q, k, v, mask=mask, **options, stats=draw(st.booleans()))


def tabled(rows: int, keys: int, N: int, table: tuple[int, ...], **more: Any) -> ag.Graph:
    x = ag.TensorSpec((1, 4, N, 16), torch.float32)
    spec = ag.TensorSpec(table, torch.bool)
    return ag.attention(x, x, x, mask=ag.KeepBlocks(rows, keys), keep_blocks=spec, **more)


SINKS = ag.TensorSpec((4,), torch.float32)  # of each head another


def kept_apart() -> ag.Graph:
    """Booleans of each of three batch entries."""
    x = ag.TensorSpec((3, 2, 150, 8), torch.float32)
    return ag.attention(x, x, x, keep=ag.TensorSpec((3, 1, 150, 150), torch.bool))


@given(
    graph=looked_up(), rates=prices, seed=drawn.seeds, at_once=st.sampled_from((2**9, 2**23)),
    joined=st.sampled_from((0, 2**12, 2**21)), kinds=st.lists(st.integers(0, 2), min_size=3),
)  # fmt: skip
@example(kept_apart(), CHEAP, 3, 2**23, 0, [2] * 3)
@example(tabled(64, 64, 200, (1, 4, 4, 4)), CHEAP, 3, 2**23, 0, [0] * 3)
@example(tabled(64, 64, 200, (1, 4, 4, 4), sinks=SINKS), CHEAP, 3, 2**23, 0, [0] * 3)
@example(tabled(40, 8, 200, (1, 1, 5, 25)), CHEAP, 3, 2**9, 0, [0] * 3)
def test_tiles_of_keys_that_data_pick_agree_with_the_formula(
    graph: ag.Graph, rates: CpuRates, seed: int, at_once: int, joined: int, kinds: list[int]
) -> None:
    """However few keys are copied, and numbers added, at a time."""
    with pytest.MonkeyPatch.context() as patch:
        force_kernel(patch, rates)
        patch.setattr(fused_tiles, "MOST_PACKED", at_once)
        patch.setattr(fused_tiles, "JOINED", joined)
        plan, tensors = (
            ag.compile(graph, target=CPU, backends=("math",)),
            tensors_for(graph, seed),
        )
        for i, x in zip(graph.inputs, tensors, strict=True):
            if i.name == "keep" and not overlaps_itself(x):  # entries that are alike, and others
                for b, own in enumerate(x):
                    own.copy_(KINDS[kinds[b]](*x.shape[2:]))
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, seed)


def parts_of(tile: Tile) -> list[tuple[int, int, str]]:
    return [(part.start, part.stop, part.kind) for part in tile.parts]


def plan_tiles(mask: m.Mask, M: int, N: int, **data: torch.Tensor) -> FusedTiles:
    q, k = (ag.TensorSpec((entries(data), 8, n, 64), torch.float32) for n in (M, N))
    read = [ag.TensorSpec.like(data[name]) for name in mask.needs]
    return FusedTiles.plan(Problem.of(Attention(0.125, mask=mask), (q, k, k, *read)), RATES)


def tiles_of(mask: m.Mask, M: int, N: int, **data: torch.Tensor) -> list[Tile]:
    planned = plan_tiles(mask, M, N, **data)
    assert not data or planned.layered == ("rectangles" in planned.summary())
    return list(planned.tiles(data))


def test_a_prefix_is_two_rectangles_and_a_triangle() -> None:
    first, second = tiles_of(m.Band(None, 0) | m.Prefix(300), 1024, 1024)
    assert (first.rows, parts_of(first)) == (range(300), [(0, 300, "full")])
    assert second.rows == range(300, 1024)
    assert parts_of(second) == [(0, 300, "full"), (300, 1024, "causal")]
    assert (first.area + second.area) == 2 * (1024 * 300 + 724 * 725 // 2)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-40])
def test_the_triangle_of_a_kernel_that_masks_before_it_scales_needs_a_scale(scale: float) -> None:
    problem = problem_of(m.Band(None, 0) | m.Prefix(300), 1024, 1024, {}, scale)
    tiles = FusedTiles.plan(problem, RATES).static or ()
    assert "causal" not in {part.kind for tile in tiles for part in tile.parts}


def test_entries_of_one_length_that_lie_side_by_side_are_one_tile() -> None:
    lengths = torch.tensor([500, 500, 0, 1024])
    first, none, whole = tiles_of(m.KeyLengths(), 1024, 1024, kv_lengths=lengths)
    assert (first.batch, parts_of(first)) == (range(2), [(0, 500, "full")])
    assert (none.batch, none.parts) == (range(2, 3), ())
    assert (whole.batch, parts_of(whole)) == (range(3, 4), [(0, 1024, "full")])


def test_ragged_causal_entries_are_rectangles_and_triangles() -> None:
    mask = m.Band(None, 0, m.LENGTHS) & m.KeyLengths() & m.QueryLengths()
    q, k = torch.tensor([400]), torch.tensor([900])
    seen, none = tiles_of(mask, 512, 1024, q_lengths=q, kv_lengths=k)
    assert (seen.rows, parts_of(seen)) == (range(400), [(0, 500, "full"), (500, 900, "causal")])
    assert (none.rows, none.parts) == (range(400, 512), ())


@pytest.mark.parametrize(("band", "kind"), [(None, "full"), (m.Band(None, 0), "causal")])
def test_documents_are_cut_at_their_ends(band: m.Mask | None, kind: str) -> None:
    sizes = torch.tensor([400, 300, 324])
    numbers = torch.repeat_interleave(torch.tensor([7, 3, 9]), sizes)[None]
    mask = m.SameSegment() if band is None else m.SameSegment() & band
    tiles = tiles_of(mask, 1024, 1024, q_segments=numbers, kv_segments=numbers)
    ends = [(0, 400), (400, 700), (700, 1024)]
    assert [tile.rows for tile in tiles] == [range(a, b) for a, b in ends]
    assert [parts_of(tile) for tile in tiles] == [[(a, b, kind)] for a, b in ends]


def test_tiny_documents_share_a_tile_and_scattered_ones_are_looked_up() -> None:
    small = (torch.arange(1024) // 4)[None]
    tiles = tiles_of(m.SameSegment(), 1024, 1024, q_segments=small, kv_segments=small)
    assert {part.kind for tile in tiles for part in tile.parts} == {"mixed"}
    assert len(tiles) < 1024 // 4
    scattered = (torch.arange(1024) % 7)[None]
    tiles = tiles_of(m.SameSegment(), 1024, 1024, q_segments=scattered, kv_segments=scattered)
    assert {len(tile.rows) for tile in tiles} == {1024}  # all see the same keys, as far as known


def test_a_window_of_documents_has_an_addend_in_blocks_alone() -> None:
    numbers = (torch.arange(1024) // 512)[None]
    mask = m.SameSegment() & m.Band(-100, 0)
    tiles = tiles_of(mask, 1024, 1024, q_segments=numbers, kv_segments=numbers)
    assert max(len(tile.rows) for tile in tiles if tile.is_mixed) <= 128
    assert sum(tile.keys * len(tile.rows) * tile.repeat for tile in tiles) < 1024 * 300


def test_a_long_window_is_tiles_moved_along() -> None:
    for queries in (10**4, 5 * 10**5):
        static = plan_tiles(m.Band(-100, 0), queries, queries).static or ()
        assert sum(len(tile.batch) * len(tile.rows) * tile.repeat for tile in static) == 2 * queries
        assert len(static) < queries / 100


def test_a_small_corner_is_one_call_with_the_keys_before_it() -> None:
    for M, calls in ((4, 1), (256, 2)):
        planned = plan_tiles(m.Band(None, 512 - M), M, 512)
        assert planned.summary().startswith(f"{calls} call")
        assert planned.holds


@pytest.mark.parametrize("heads", [1, 8])
def test_a_tile_has_the_kept_keys_of_a_block_in_one_part(heads: int) -> None:
    N, size = 1024, 64
    table = torch.rand(1, heads, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    listed = tiles_of(ag.KeepBlocks(size, size), N, N, keep_blocks=table)
    assert all(len(tile.parts) <= 1 for tile in listed)
    assert sum(len(x.rows) * x.keys for x in listed) == int(table.sum()) * size**2
    due = [range(8)] if heads == 1 else [range(g, g + 1) for g in range(8)]
    assert list(dict.fromkeys(tile.groups for tile in listed)) == due


def test_nan_in_keys_stays_in_the_blocks_that_keep_them() -> None:
    x = ag.TensorSpec((1, 4, 1024, 64), torch.float32)
    blocks = ag.TensorSpec((1, 4, 16, 16), torch.bool)
    graph = ag.attention(x, x, x, mask=ag.KeepBlocks(64, 64), keep_blocks=blocks)
    plan, (q, k, v, table) = ag.compile(graph, target=CPU), tensors_for(graph, 1)
    table[..., 5] = torch.rand(1, 4, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    table[..., 6] = True
    k[:, :, 320:384], v[:, :, 330] = torch.nan, torch.inf
    (o,) = run_plan(plan, [q, k, v, table])
    finite = o.isfinite().unflatten(2, (16, 64)).all((3, 4))
    assert torch.equal(finite, ~table[..., 5])


@pytest.mark.parametrize("keys", [range(2), range(2, 4), range(3, 7)], ids=str)
def test_a_part_of_a_table_may_begin_at_any_block(keys: range) -> None:
    """As blocks of pages and ranks of a mesh have them."""
    q, k = (ag.TensorSpec((1, 1, n, 8), torch.float32) for n in (3, len(keys)))
    part = ag.KeepBlocks(1, 1, start=(0, keys.start), whole=(3, 7))
    table = ag.TensorSpec((1, 1, 3, 7), torch.bool)
    graph = ag.attention(q, k, k, mask=part, keep_blocks=table)
    tensors = tensors_for(graph, 0)
    dense = ag.TensorSpec((1, 1, 3, len(keys)), torch.bool)
    due = ag.compile(ag.attention(q, k, k, mask=ag.Keep(), keep=dense), target=CPU)
    flags = tensors[3][..., keys.start : keys.stop].contiguous()
    plan = ag.compile(graph, target=CPU)
    torch.testing.assert_close(plan(*tensors), due(*tensors[:3], flags))


def test_a_plan_asks_once_what_its_mask_keeps_and_what_the_kernel_reads() -> None:
    x = ag.TensorSpec((2, 4, 502, 64), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal() & ag.Window(61))
    forget_plans()
    layers.known_regions.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        cut, reads = Mock(wraps=layers.layers_of_strip), Mock(wraps=is_readable)
        patch.setattr(layers, "layers_of_strip", cut)
        patch.setattr(fused_tiles, "is_readable", reads)
        ag.compile(graph, target=CPU)
    assert (cut.call_count, reads.call_count) == (1, 3)  # its one strip; q, k and v
