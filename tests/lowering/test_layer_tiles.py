"""Tiles cut out of what a mask exactly keeps: what they are, and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.attention import Attention
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.hiding import hide_, hiding_bits
from attn_graph.lowering.cpu import layer_tiles, schedule
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.schedule import Part, Tile
from attn_graph.lowering.problem import Problem
from attn_graph.masks.layers import list_layers
from attn_graph.masks.places import Block, Place
from attn_graph.masks.regions import Edge, Layer
from attn_graph.testing import rule
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.tensors import cotangents_for, tensors_for

CPU = ag.Target.of("cpu")
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


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_bounds_far_beyond_lengths_are_none(kind: torch.dtype) -> None:
    lengths = {name: torch.tensor([3, 3], dtype=kind) for name in m.LENGTHS}
    mask = m.Band(-(2**40), 2**40, m.LENGTHS)
    found = list_layers(mask, Block(range(2), range(1), range(9), 1, 9, 8, lengths), 10**6)
    assert found is not None
    assert [layers for _, layers in found] == [(Layer(range(9), ((Edge(0), Edge(8)),)),)]


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
    M, N, B = draw(st.integers(1, 150)), draw(st.integers(1, 150)), draw(st.integers(1, 4))
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
    for batch, layers in kept:
        for layer in layers:
            for i in layer.rows:
                for start, stop in layer.runs:
                    found[batch.start : batch.stop, i, start.of(i) : stop.of(i)] = True
    assert torch.equal(found, due)
    assert [b for batch, _ in kept for b in batch] == [*range(entries(data))]


def keeps(tile: Tile, part: Part) -> torch.Tensor:
    """What the kernel keeps of a part by itself."""
    whole = torch.ones(len(tile.rows), len(part), dtype=torch.bool)
    return whole.tril() if part.kind == "causal" else whole


# Queries that keep less than those above them, whose triangle is not a part of one with them.
SHORTER: Case = (
    m.Band(None, 4) & (m.QueryLengths() | m.Band(None, 0)), 3, 6, {"q_lengths": torch.tensor([2])}
)  # fmt: skip


@settings(max_examples=2 * settings().max_examples)
@example(case=(m.Band(0, None), 1, 1, {}), call_seconds=0.0, most=40, single=True)
@example(case=(m.Band(-9, 0), 150, 150, {}), call_seconds=6e-5, most=8, single=False)
@example(case=(m.Band(-9, 3) | m.Prefix(5), 150, 140, {}), call_seconds=0.0, most=8, single=False)
@example(case=SHORTER, call_seconds=0.0, most=8, single=True)
@given(
    case=cases(),
    call_seconds=st.sampled_from((0.0, schedule.CALL_SECONDS)),
    most=st.sampled_from((8, 40)),
    single=st.booleans(),
)
def test_tiles_of_layers_have_each_place_once(
    case: Case, call_seconds: float, most: int, single: bool
) -> None:
    mask, M, N, data = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "CALL_SECONDS", call_seconds)
        problem = problem_of(mask, M, N, data)
        kept = layer_tiles.find_layers_of(problem, data, 10**6)
        tiles = None
        if kept is not None:
            tiles = layer_tiles.tile_layers(problem, kept, most, 8, single=single)
    due = kept_by(mask, M, N, data)
    seen, rows = torch.zeros(due.shape, dtype=torch.int64), torch.zeros(due.shape[:2])
    for tile in tiles or ():
        mixed = any(part.kind == "mixed" for part in tile.parts)
        assert not mixed or (len(tile.rows) <= most and not (single and len(tile.batch) > 1))
        assert tile.repeat == 1 or (mixed and len(tile.batch) == 1 and not single)
        for at in range(tile.repeat):
            moved = schedule.move_tile(tile, at * tile.step)
            rows[place_of(moved)] += 1
            for first, part in zip(tile.parts, moved.parts, strict=True):
                added = due[place_of(tile, first)]  # which all that it repeats share
                seen[place_of(moved, part)] += added if part.kind == "mixed" else keeps(tile, part)
    if tiles is not None:
        assert (rows == 1).all()
        assert torch.equal(seen, due.to(torch.int64))


def place_of(tile: Tile, part: Part | None = None) -> tuple[slice, ...]:
    """Where a tile's queries, or those of a part with its keys, are among all."""
    ranges = [tile.batch, tile.rows, *([] if part is None else [range(part.start, part.stop)])]
    return tuple(slice(x.start, x.stop) for x in ranges)


@given(
    cases(),
    st.sampled_from((torch.float32, torch.float16, torch.float64)),
    st.sampled_from((0.0, schedule.CALL_SECONDS)),
    st.integers(0, 5),
    st.booleans(),
)
def test_they_agree_with_the_formula(
    case: Case, dtype: torch.dtype, call_seconds: float, seed: int, stats: bool
) -> None:
    """Forward and backward, four heads on two."""
    mask, M, N, data = case
    B, names = entries(data), set(mask.needs)
    q = ag.TensorSpec((B, 4, M, FEATURES), dtype)
    k = ag.TensorSpec((B, 2, N, FEATURES), dtype)
    specs: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in data.items()}
    graph = ag.attention(q, k, k, mask=mask, stats=stats, **specs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "CALL_SECONDS", call_seconds)
        plan = ag.compile(graph, target=CPU, backends=("math",))
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


def parts_of(tile: Tile) -> list[tuple[int, int, str]]:
    return [(part.start, part.stop, part.kind) for part in tile.parts]


def static(mask: m.Mask, M: int, N: int, **options: Any) -> tuple[Tile, ...]:
    x, y = (ag.TensorSpec((4, 12, n, 64), torch.float32) for n in (M, N))
    tiles = FusedTiles.plan(Problem.of(Attention(0.125, mask=mask, **options), (x, y, y))).static
    assert tiles is not None
    return tiles


def test_a_prefix_is_two_rectangles_and_a_triangle() -> None:
    first, second = static(m.Band(None, 0) | m.Prefix(300), 1024, 1024)
    assert (first.rows, parts_of(first)) == (range(300), [(0, 300, "full")])
    assert second.rows == range(300, 1024)
    assert parts_of(second) == [(0, 300, "full"), (300, 1024, "causal")]
    assert (first.area + second.area) == 4 * (1024 * 300 + 724 * 725 // 2)


def test_the_triangle_of_a_kernel_that_masks_before_it_scales_needs_a_scale() -> None:
    x = ag.TensorSpec((4, 12, 1024, 64), torch.float32)
    mask = m.Band(None, 0) | m.Prefix(300)
    for scale in (0.0, -1.0, 1e-40):
        tiles = FusedTiles.plan(Problem.of(Attention(scale, mask=mask), (x, x, x))).static or ()
        assert "causal" not in {part.kind for tile in tiles for part in tile.parts}


def tiles_of(mask: m.Mask, M: int, N: int, heads: int = 8, **data: torch.Tensor) -> list[Tile]:
    B = entries(data)
    q, k = (ag.TensorSpec((B, heads, n, 64), torch.float32) for n in (M, N))
    read = [ag.TensorSpec.like(data[name]) for name in mask.needs]
    planned = FusedTiles.plan(Problem.of(Attention(0.125, mask=mask), (q, k, k, *read)))
    assert planned.layered == ("rectangles" in planned.summary())
    return list(planned.tiles(data))


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


def test_a_causal_mask_and_a_length_of_keys_are_one_tile() -> None:
    mask, lengths = m.Band(None, 9) & m.KeyLengths(), torch.tensor([500, 1024, 4])
    tiles = tiles_of(mask, 1024, 1024, kv_lengths=lengths)
    assert [tile.rows for tile in tiles] == [range(1024)] * 3
    first, *others = map(parts_of, tiles)
    assert first == [(0, 9, "full"), (9, 500, "causal")]
    assert others == [[(0, 9, "full"), (9, 1024, "causal")], [(0, 4, "full")]]


@pytest.mark.parametrize(
    ("stop", "kind", "due"),
    [(5, "full", 5), (6, "full", 6), (7, "full", None), (4, "full", None), (6, "mixed", None)],
)
def test_a_triangle_grows_by_what_all_queries_below_keep(
    stop: int, kind: Any, due: int | None
) -> None:
    batch, other = range(1), Part(9, 20, "full")
    above = Tile(batch, range(3, 8), (other, Part(0, 5, "causal")))
    joined = layer_tiles.join_triangle(
        above, Tile(batch, range(8, 11), (other, Part(0, stop, kind)))
    )
    parts = None if due is None else (other, Part(0, due, "causal"))
    assert joined == (parts and Tile(batch, range(3, 11), parts))
    assert (
        layer_tiles.join_triangle(above, Tile(batch, range(8, 11), (Part(0, 5, "full"),))) is None
    )


@pytest.mark.parametrize(("band", "kind"), [(None, "full"), (m.Band(None, 0), "causal")])
def test_documents_are_cut_at_their_ends(band: m.Mask | None, kind: str) -> None:
    sizes = torch.tensor([400, 300, 324])
    numbers = torch.repeat_interleave(torch.tensor([7, 3, 9]), sizes)[None]
    mask = m.SameSegment() if band is None else m.SameSegment() & band
    tiles = tiles_of(mask, 1024, 1024, q_segments=numbers, kv_segments=numbers)
    ends = [(0, 400), (400, 700), (700, 1024)]
    assert [tile.rows for tile in tiles] == [range(a, b) for a, b in ends]
    assert [parts_of(tile) for tile in tiles] == [[(a, b, kind)] for a, b in ends]


def test_small_documents_share_a_tile_and_scattered_ones_are_looked_up() -> None:
    small = (torch.arange(1024) // 20)[None]
    tiles = tiles_of(m.SameSegment(), 1024, 1024, q_segments=small, kv_segments=small)
    assert {part.kind for tile in tiles for part in tile.parts} == {"mixed"}
    assert len(tiles) < 1024 // 60
    scattered = (torch.arange(1024) % 7)[None]
    tiles = tiles_of(m.SameSegment(), 1024, 1024, q_segments=scattered, kv_segments=scattered)
    assert {len(tile.rows) for tile in tiles} == {1024}  # all see the same keys, as far as known


SIDES = (slice(3, 4), slice(4, 5), slice(3, 5))  # queries, keys, both


def test_a_window_of_documents_has_an_addend_in_blocks_alone() -> None:
    numbers = (torch.arange(1024) // 512)[None]
    mask = m.SameSegment() & m.Band(-100, 0)
    tiles = tiles_of(mask, 1024, 1024, q_segments=numbers, kv_segments=numbers)
    assert max(len(tile.rows) for tile in tiles if "mixed" in {x.kind for x in tile.parts}) <= 128
    assert sum(tile.keys * len(tile.rows) for tile in tiles) < 1024 * 300


def test_rows_without_keys_are_looked_for_only_where_lse_is_wanted_and_there_may_be_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = ag.TensorSpec((1, 2, 300, 8), torch.float32)
    addends: list[torch.Tensor] = []
    find = fused_cpu.find_unseen

    def note(addend: torch.Tensor) -> torch.Tensor:
        addends.append(addend)
        return find(addend)

    monkeypatch.setattr(fused_cpu, "find_unseen", note)
    alibi = ag.TensorSpec((2,), torch.float32)
    full, blind = ag.Window(7), ag.Window(7, -3)
    for mask, with_lse, due in ((full, True, False), (blind, False, False), (blind, True, True)):
        graph = ag.attention(x, x, x, mask=mask, alibi=alibi, stats=with_lse)
        plan = ag.compile(graph, target=CPU, backends=("math",))
        run_plan(plan, tensors_for(graph, 1))
        assert bool(addends) == due


def test_parts_of_which_rows_see_nothing_are_merged_alike_with_and_without_lse() -> None:
    x = ag.TensorSpec((1, 4, 1000, 64), torch.float32)
    mask = ag.Window(7) | ag.Window(507, -500)  # rows up to 500 see nothing of the second
    results = []
    for stats in (False, True):
        graph = ag.attention(x, x, x, mask=mask, stats=stats)
        plan = ag.compile(graph, target=CPU, backends=("math",))
        results.append(run_plan(plan, tensors_for(graph, 1))[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_dropped_is_hidden_whatever_was_there(dtype: torch.dtype) -> None:
    sums = torch.tensor([0.0, -0.0, 1.5, INF, -INF, float("nan")], dtype=dtype).repeat(3, 2)
    keep = torch.arange(12) < 6
    due = sums.masked_fill(~keep, -INF)
    hide_(sums, hiding_bits(keep, sums.dtype))
    assert torch.equal(sums.view(torch.int32), due.view(torch.int32))
