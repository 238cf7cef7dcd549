"""Which problems run on whole rows of scores, by the limits that were measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import keeps_weights
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.product_slots import share_evenly
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.machine.target import Target

CPU = Target.of("cpu")


def plan_square(*sizes: int, **options: object) -> ag.Plan:
    """A plan of attention of q, k and v of these sizes, in float32."""
    x = ag.TensorSpec(sizes, torch.float32)
    return ag.compile(ag.attention(x, x, x, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(64, 4, 64, 32), (16, 12, 128, 64)])
def test_some_heads_of_short_rows_do(sizes: tuple[int, ...]) -> None:
    plan = plan_square(*sizes)
    (tiles,) = plan_tiles(plan.graph, CPU, ag.extend.Options())
    assert plan.backend == "math"
    assert isinstance(tiles, RowTiles)


@pytest.mark.parametrize("mask", [None, ag.Causal("top_left")], ids=str)
@pytest.mark.parametrize("sizes", [(8, 4, 128, 64), (16, 12, 128, 64), (32, 8, 16, 64)])
def test_short_rows_with_gaps_are_read_as_they_lie(
    sizes: tuple[int, ...], mask: ag.Mask | None
) -> None:
    """As layers of models bring heads: one call of the kernel, forward and in training."""
    _, H, M, D = sizes
    for step in (H * D, 3 * H * D):  # q alone, or beside k and v
        x = ag.TensorSpec(sizes, torch.float32, (M * step, D, step, 1))
        plan = ag.compile(ag.attention(x, x, x, mask=mask))
        assert {plan.backend, plan.recorded.backend} == {"torch_sdpa"}
        assert not keeps_weights(plan.recorded.graph)


def plan_rows(dtype: torch.dtype, *sizes: int, **options: Any) -> RowTiles | None:
    """The tiles of few queries, if rows are whole: B, H, G, M and N of heads of 64."""
    B, H, G, M, N = sizes
    q, k = (ag.TensorSpec((B, *x, 64), dtype) for x in ((H, M), (G, N)))
    native = evolve(CPU, native=("bf16",))
    plan = ag.compile(ag.attention(q, k, k, **options), target=native)
    if plan.backend == "torch_sdpa":
        return None
    (tiles,) = plan_tiles(plan.graph, native, ag.extend.Options())
    return tiles if isinstance(tiles, RowTiles) else None


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (1, 8, 8, 1, 128)),
        (torch.bfloat16, (1, 32, 8, 1, 512)),
        (torch.bfloat16, (32, 8, 8, 2, 32)),
        (torch.float32, (8, 8, 8, 2, 64)),
        (torch.float32, (32, 8, 8, 1, 128)),
        (torch.float32, (3, 32, 16, 1, 512)),
    ],
)
def test_few_queries_of_many_heads_do(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    assert plan_rows(dtype, *sizes) is not None


def test_a_backward_divides_weights_whose_lse_is_of_rounded_scores() -> None:
    """However few products it has, where its forward's are in bfloat16."""
    native, sizes = evolve(CPU, native=("bf16",)), (1, 8, 8, 1, 512)
    assert plan_rows(torch.bfloat16, *sizes) is not None
    q, k = (ag.TensorSpec((1, 8, n, 64), torch.bfloat16) for n in (1, 512))
    plan = ag.compile(ag.attention(q, k, k), target=native)
    assert not keeps_weights(plan.recorded.graph)
    (tiles,) = plan_tiles(plan.training_vjp.graph, native, ag.extend.Options())
    assert isinstance(tiles, RowTiles)
    assert plan.training_vjp.backend == "math"


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.bfloat16, (1, 8, 8, 1, 64)),
        (torch.bfloat16, (1, 8, 2, 1, 128)),
        (torch.float32, (1, 8, 8, 2, 64)),
        (torch.float32, (1, 32, 8, 1, 1024)),
        (torch.float32, (1, 16, 16, 8, 512)),
    ],
)
def test_few_queries_of_few_heads_do_not(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    assert plan_rows(dtype, *sizes) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_queries_do_unless_a_mask_hides_most_keys(dtype: torch.dtype) -> None:
    sizes = 3, 16, 16, 2, 512
    assert plan_rows(dtype, *sizes, mask=ag.Causal("bottom_right")) is not None
    assert plan_rows(dtype, *sizes, mask=ag.Window(63, align="bottom_right")) is None


def test_few_queries_with_lengths_read_all_keys_in_half_precision_alone() -> None:
    lengths = {"mask": ag.KeyLengths(), "kv_lengths": ag.TensorSpec((8,), torch.int32)}
    tiles = plan_rows(torch.bfloat16, 8, 8, 8, 1, 2048, **lengths)
    assert isinstance(tiles, RowTiles)
    assert tiles.by_entries
    tiles = plan_rows(torch.float32, 8, 8, 8, 1, 2048, **lengths)
    assert isinstance(tiles, RowTiles)
    assert tiles.spans


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ((8, 12, 12, 128, 128), True),
        ((2, 4, 4, 1, 4096), True),
        ((64, 8, 8, 1, 256), True),
        ((8, 8, 8, 1, 64), False),  # one product of all
        ((64, 4, 4, 32, 32), False),
        ((4, 12, 12, 512, 512), False),  # the kernel's loop, entry by entry
    ],
)
def test_batch_entries_with_much_to_compute_or_to_read_are_cut(
    sizes: tuple[int, ...], cut: bool
) -> None:
    keep = ag.TensorSpec((sizes[0], 1, 1, sizes[4]), torch.bool)
    tiles = plan_rows(torch.float32, *sizes, keep=keep)
    assert (tiles is not None and tiles.spans) == cut


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 128])
def test_short_sequences_with_a_mask_of_booleans_keep_weights(
    dtype: torch.dtype, rows: int
) -> None:
    x = ag.TensorSpec((16, 12, 128, 64), dtype)
    keep = ag.TensorSpec((16, 1, rows, 128), torch.bool)
    native = evolve(CPU, native=("bf16",))
    plan = ag.compile(ag.attention(x, x, x, keep=keep), target=native)
    assert keeps_weights(plan.recorded.graph)
    (tiles,) = plan_tiles(plan.recorded.graph, native, ag.extend.Options())
    assert isinstance(tiles, RowTiles)
    assert tiles.by_entries


@pytest.mark.parametrize("sizes", [(2, 16, 256, 64), (1, 7, 197, 64), (1, 8, 64, 64)])
def test_long_rows_few_heads_and_few_scores_do_not(sizes: tuple[int, ...]) -> None:
    assert plan_square(*sizes).backend == "torch_sdpa"


def test_heads_that_share_keys_are_cut_where_their_scores_are_many() -> None:
    native = evolve(CPU, native=("bf16",))
    tiles = {2**14: "128 heads x 1 queries", 2**15: "1 x 1 heads x 64 queries"}
    for keys, size in tiles.items():
        q, k = (ag.TensorSpec((1, *s, 64), torch.bfloat16) for s in ((128, 1), (1, keys)))
        plan = ag.compile(ag.attention(q, k, k), target=native, backends=("math",))
        assert f"products on tiles of {size}" in str(plan.explain())
        assert "rows of one: q is [1, 1, 128, 64]" in str(plan.explain())


def test_weights_that_are_kept_and_a_tile_beside_them_are_no_more_than_32_mebibytes() -> None:
    """Of the largest problem that `benchmarks/cpu.py` trains so in float32."""
    memory = plan_square(8, 12, 256, 64).memory()
    assert memory.saved - memory.outputs == 8 * 12 * 256 * 256 * 4
    assert memory.saved - memory.outputs + memory.workspace_backward <= 2**25


@pytest.mark.parametrize("sizes", [(2, 2, 16, 256), (3, 1, 16, 256), (4, 2, 16, 1024)])
def test_the_choice_for_grouped_heads_is_that_of_rows_of_one(sizes: tuple[int, ...]) -> None:
    """So that what a limit of the workspace counts is what a call takes."""
    B, G, r, N = sizes
    q, k = (ag.TensorSpec(x, torch.float32) for x in ((B, G * r, 1, 64), (B, G, N, 64)))
    workspace = ag.Workspace()
    options: dict[str, Any] = {"backends": ("math",), "workspace": workspace}
    plan = ag.compile(ag.attention(q, k, k), max_workspace=0, **options)
    plan(torch.randn(q.shape), *(torch.randn(k.shape) for _ in range(2)))
    assert workspace.bytes == plan.memory().workspace_forward == 0


@pytest.mark.parametrize("sizes", [(160, 16, 256, 64), (2, 130, 520, 130)])
def test_a_backward_of_many_tiles_reads_kept_weights_too(sizes: tuple[int, ...]) -> None:
    B, H, M, D = sizes
    plan = plan_square(B, H, M, D, bias=ag.TensorSpec((1, 1, M, M), torch.float32))
    assert keeps_weights(plan.recorded.graph)
    for each in (plan.recorded, plan.training_vjp):
        (tiles,) = plan_tiles(each.graph, CPU, ag.extend.Options())
        assert isinstance(tiles, RowTiles)


@given(count=st.integers(1, 300), most=st.integers(1, 300))
def test_even_shares_are_as_many_as_full_ones(count: int, most: int) -> None:
    share = share_evenly(count, most)
    shares = -(-count // share)
    assert share <= most
    assert shares == -(-count // most)
    assert share == 1 or -(-count // (share - 1)) > shares
