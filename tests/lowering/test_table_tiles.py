"""Tables of blocks on a CPU: tiles follow blocks and heads, and read the kept keys alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu import fused_tiles, planned_tiles
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import sole
from attn_graph.testing import strategies as drawn
from attn_graph.testing.agreement import check_gradients, check_outputs, run_plan
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
block_sizes = st.sampled_from([1, 7, 16, 32, 40, 64, 200])


@st.composite
def tabled(draw: DrawFn) -> ag.Graph:
    """Attention whose keys a table of blocks picks, alone or beside other masks and steps."""
    G, M, N = draw(st.integers(1, 3)), draw(st.integers(1, 150)), draw(st.integers(1, 150))
    size = drawn.Shape(draw(st.integers(1, 2)), G * draw(st.integers(1, 2)), G, M, N, 8, 8)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    blocks = ag.KeepBlocks(draw(block_sizes), draw(block_sizes))
    mask = draw(st.sampled_from([
        blocks, blocks, blocks & ag.Causal("bottom_right"), ~blocks | ag.Prefix(3),
        blocks | ag.KeepBlocks(33, 20, "other"),
    ]))  # fmt: skip
    options: dict[str, Any] = draw(drawn.data_specs(mask.needs, size))
    options |= {"bias": draw(drawn.maybe(drawn.bias_specs(size, dtype)))}
    if dtype != torch.bfloat16:  # which the kernel rounds before the sink: too coarse for one key
        options |= {"sinks": draw(drawn.maybe(drawn.sink_specs(size, dtype)))}
    q, k, v = (draw(drawn.specs(x, dtype)) for x in (size.q, size.k, size.v))
    return ag.attention(q, k, v, mask=mask, **options, stats=draw(st.booleans()))


def plain(rows: int, keys: int, N: int, table: tuple[int, ...]) -> ag.Graph:
    q, k = (ag.TensorSpec((1, 4, n, 16), torch.float32) for n in (N, N))
    return ag.attention(
        q, k, k, mask=ag.KeepBlocks(rows, keys), keep_blocks=ag.TensorSpec(table, torch.bool)
    )


@given(graph=tabled(), seed=drawn.seeds, at_once=st.sampled_from((2**9, 2**23)))
@example(graph=plain(64, 64, 200, (1, 4, 4, 4)), seed=3, at_once=2**23)
@example(graph=plain(40, 8, 200, (1, 1, 5, 25)), seed=3, at_once=2**9)
@settings(max_examples=settings().max_examples * 12 // 5)
def test_tiles_by_tables_add_up_to_the_whole(graph: ag.Graph, seed: int, at_once: int) -> None:
    """Values and gradients, however few keys are copied at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_tiles, "CALL_SECONDS", 0.0)  # else all scores are one tile
        patch.setattr(fused_tiles, "MOST_PACKED", at_once)
        plan, tensors = ag.compile(graph, target=CPU), tensors_for(graph, seed)
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, seed)


def tiles_of(graph: ag.Graph, table: torch.Tensor) -> list[tuple[range | None, int, int]]:
    """Of each tile its heads, queries and computed keys."""
    problem = sole(simplify(graph))
    assert problem is not None
    tiles = FusedTiles.plan(problem)
    assert tiles.static is None
    listed = tiles.tiles({"keep_blocks": table})
    assert all(len(tile.parts) <= 1 for tile in listed)
    return [(tile.groups, len(tile.rows), tile.keys) for tile in listed]


@pytest.mark.parametrize("heads", [1, 4])
def test_a_tile_has_the_kept_keys_of_a_block_in_one_part(heads: int) -> None:
    N, size = 1024, 64
    table = torch.rand(1, heads, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3
    made = tiles_of(plain(size, size, N, (1, heads, 16, 16)), table)
    assert sum(rows * keys for _, rows, keys in made) == int(table.sum()) * size**2
    due = [None] if heads == 1 else [range(g, g + 1) for g in range(4)]
    assert list(dict.fromkeys(groups for groups, _, _ in made)) == due


def test_nan_in_keys_stays_in_the_blocks_that_keep_them() -> None:
    graph = plain(64, 64, 1024, (1, 4, 16, 16))
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
