"""Batch entries that keep the same keys share tiles, as far as an addend has room."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu import fused_tiles, planned_tiles
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.planned_tiles import DATA_ROWS
from attn_graph.lowering.cpu.schedule import Tile
from attn_graph.lowering.problem import sole
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans

M, N = 2 * DATA_ROWS + 9, 190
KINDS = (  # flags [M,N]
    torch.ones(M, N, dtype=torch.bool),
    (torch.arange(N) < 70).expand(M, N),
    torch.arange(M)[:, None] % 3 != torch.arange(N) % 3,
)


def keeping(entries: int, heads: int = 1) -> ag.Graph:
    """Attention under flags of each entry, and perhaps of each head."""
    q, k = (ag.TensorSpec((entries, 2, n, 8), torch.float32) for n in (M, N))
    keep = ag.TensorSpec((entries, heads, M, N), torch.bool)
    return ag.attention(q, k, k, mask=ag.Keep(), keep=keep, stats=True)


def tiles_of(graph: ag.Graph, keep: torch.Tensor) -> list[Tile]:
    """The tiles of a call."""
    problem = sole(simplify(graph))
    assert problem is not None
    tiles = FusedTiles.plan(problem)
    assert tiles.static is None
    return [*tiles.tiles({"keep": keep})]


@pytest.mark.parametrize("heads", [1, 2])
@given(kinds=st.lists(st.integers(0, 2), min_size=1, max_size=6), room=st.sampled_from((0, 2, 100)))
@example(kinds=[2, 2, 2, 0], room=2)
def test_entries_with_the_same_keys_are_one_tile(heads: int, kinds: list[int], room: int) -> None:
    graph = keeping(len(kinds), heads)
    keep = torch.stack([KINDS[kind] for kind in kinds])[:, None].expand(-1, heads, -1, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_tiles, "CALL_SECONDS", 0.0)  # else all scores are one tile
        patch.setattr(fused_tiles, "JOINED", room * M * N * heads)
        forget_plans()
        tiles = tiles_of(graph, keep)
        plan = ag.compile(graph, target="cpu", backends=("math",))
        tensors = [*tensors_for(graph, 1)[:3], keep.contiguous()]
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, 1)
    forget_plans()
    seen = [(b, i) for tile in tiles for b in tile.batch for i in tile.rows]
    assert sorted(seen) == [(b, i) for b in range(len(kinds)) for i in range(M)]
    if room == 100:
        groups = 1 + sum(a != b for a, b in pairwise(kinds))
        assert len({tile.batch for tile in tiles}) == groups
    most = max(DATA_ROWS * N, room * M * N)
    added = [t for t in tiles if any(part.kind == "mixed" for part in t.parts)]
    assert all(len(t.batch) * len(t.rows) * t.keys <= most for t in added)
