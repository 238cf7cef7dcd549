"""Tables of blocks: what they mean, which tiles they leave, and what calls of them skip.

Run with TRITON_INTERPRET=1, as `make test` does too, the tests of attention are Triton's.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.moving import Box, move_mask
from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.tile_lists import DeviceLists
from attn_graph.lowering.problem import sole
from attn_graph.masks.places import Block, Keys, Place
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.kernels import CPU, interpreted

BACKEND = "triton" if CPU.interprets else "math"
sizes = st.sampled_from([1, 3, 16, 32, 48, 64, 100])


def spread(table: torch.Tensor, mask: ag.KeepBlocks, M: int, N: int) -> torch.Tensor:
    """The table at each of M x N places."""
    full = table.repeat_interleave(mask.rows, 2).repeat_interleave(mask.keys, 3)
    i, j = mask.start
    return full[:, :, i : i + M, j : j + N]


def graph_of(mask: ag.Mask, M: int, N: int, heads: int = 2) -> ag.Graph:
    """Two heads of few features."""
    q, k = (ag.TensorSpec((1, 2, n, 16), torch.float32) for n in (M, N))
    (data,) = (x for name, x in mask.needs.items() if name == "keep_blocks")
    shape = data.shape({"b": 1, "h": heads, "i": M, "j": N})
    return ag.attention(q, k, k, mask=mask, keep_blocks=ag.TensorSpec(shape, torch.bool))


@interpreted
@given(
    rows=sizes, keys=sizes, M=st.integers(1, 150), N=st.integers(1, 150), by_keys=st.booleans(),
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)), seed=st.integers(0, 99),
)  # fmt: skip
@example(rows=48, keys=20, M=70, N=90, by_keys=False, at=(0, 0), seed=0)
def test_lists_have_the_tiles_that_the_table_leaves(
    rows: int, keys: int, M: int, N: int, by_keys: bool, at: tuple[int, int], seed: int
) -> None:
    """Each once, as full or mixed, also of a part of all places."""
    random = torch.Generator().manual_seed(seed)
    whole = Box(range(1), range(2), range(at[0], at[0] + M), range(at[1], at[1] + N),
                (1, 2, at[0] + M + 5, at[1] + N + 5))  # fmt: skip
    mask = move_mask(ag.KeepBlocks(rows, keys), whole)
    assert isinstance(mask, ag.KeepBlocks)
    problem, tiling = sole(simplify(graph_of(mask, M, N))), Tiling(32, 16, 4, 1)
    assert problem is not None
    (spec,) = problem.by_role.mask.values()
    table = torch.rand(spec.shape, generator=random) < 0.5
    lists = DeviceLists.plan("lists", problem, tiling, by_keys, ("table",))
    tensors = {"table": table}
    tensors |= {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in lists.buffers.items()}
    for launch in lists.launches:
        launch(tensors)
    made, kept = tensors["lists"].view(lists.shape), spread(table, mask, M, N)
    lines = [(h, x) for h, each in enumerate(made[0].tolist()) for x in each]
    for h, line in lines:
        block, full, mixed, *tiles = line
        kinds = dict.fromkeys(tiles[full : full + mixed], 1) | dict.fromkeys(tiles[:full], 2)
        assert len(kinds) == full + mixed
        for n in range(-(-M // 32) if by_keys else -(-N // 16)):
            x, y = (n, block) if by_keys else (block, n)
            part = kept[0, h, x * 32 : (x + 1) * 32, y * 16 : (y + 1) * 16]
            whole_tile = (x + 1) * 32 <= M if by_keys else (y + 1) * 16 <= N
            due = 2 if part.all() and whole_tile else 1 if part.any() else 0
            assert kinds.get(n, 0) == due, (h, x, y)


@given(
    rows=sizes, keys=sizes, M=st.integers(1, 60), N=st.integers(1, 60),
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)), data=st.data(),
)  # fmt: skip
@example(rows=3, keys=16, M=9, N=40, at=(2, 5), data=None)
def test_a_part_of_a_table_keeps_its_places_and_bounds_them_exactly(
    rows: int, keys: int, M: int, N: int, at: tuple[int, int], data: st.DataObject | None
) -> None:
    (i, j), whole = at, (at[0] + M + 5, at[1] + N + 5)
    box = Box(range(1), range(1), range(i, i + M), range(j, j + N), (1, 1, *whole))
    mask = move_mask(ag.KeepBlocks(rows, keys), box)
    shape = mask.needs["keep_blocks"].shape({"b": 1, "h": 1, "i": M, "j": N})
    assert shape == (1, 1, -(-whole[0] // rows), -(-whole[1] // keys))
    first = data.draw(st.integers(0, M - 1)) if data else 2
    table = torch.rand(shape, generator=torch.Generator().manual_seed(M + 61 * N)) < 0.5
    kept = table.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[0, 0, i : i + M, j : j + N]
    block = Block(range(1), range(1), range(first, M), 1, M, N, {"keep_blocks": table})
    assert torch.equal(mask.keep(Place.of(block, range(N))).expand(M - first, N), kept[first:])
    assert mask.span(block) == Keys.where(kept[first:].any(0))
    assert mask.surely(block) == Keys.where(kept[first:].all(0))


@pytest.mark.parametrize(
    ("rows", "keys", "joined"), [(16, 32, True), (48, 20, False), (64, 64, False), (128, 1, True)]
)
def test_attention_sees_the_blocks_of_its_table(rows: int, keys: int, joined: bool) -> None:
    mask: ag.Mask = ag.KeepBlocks(rows, keys)
    mask = mask & ag.Causal("bottom_right") | ag.Prefix(3) if joined else mask
    graph = graph_of(mask, 100, 130, heads=2 if joined else 1)
    plan, tensors = ag.compile(graph, target=CPU, backends=(BACKEND,)), tensors_for(graph, rows)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 0)


@given(st.data())
def test_a_table_has_the_blocks_that_are_named(data: st.DataObject) -> None:
    X, most, blocks = (data.draw(st.integers(1, 6)) for _ in range(3))
    line = st.lists(st.integers(0, blocks - 1), min_size=most, max_size=most)
    named = data.draw(st.lists(line, min_size=X, max_size=X))
    counts = data.draw(st.lists(st.integers(0, most), min_size=X, max_size=X))
    table = ag.select_blocks(torch.tensor(named), blocks, torch.tensor(counts))
    due = [[y in each[:n] for y in range(blocks)] for each, n in zip(named, counts, strict=True)]
    assert table.tolist() == due
    everything = [[y in each for y in range(blocks)] for each in named]
    assert ag.select_blocks(torch.tensor(named), blocks).tolist() == everything


def test_wrong_tables_are_refused_in_words() -> None:
    with pytest.raises(ag.GraphError, match="blocks of 0 queries and 4 keys"):
        ag.KeepBlocks(0, 4)
    x = ag.TensorSpec((1, 2, 64, 16), torch.float32)
    table = ag.TensorSpec((1, 2, 8, 8), torch.bool)
    with pytest.raises(ag.GraphError, match="64 queries in blocks of 16 are 4"):
        ag.attention(x, x, x, mask=ag.KeepBlocks(16, 8), keep_blocks=table)
    with pytest.raises(ag.TensorError, match="they must be integers"):
        ag.select_blocks(torch.ones(2, 2), 4)
    with pytest.raises(ag.TensorError, match=r"must be \[..., most\] and \[...\]"):
        ag.select_blocks(torch.ones(2, 2).long(), 4, torch.ones(3).long())
