"""Lengths that calls read as numbers: what they hide is held, and keys beyond them are not read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.extend import Options
from attn_graph.ir.passes import keeps_weights
from attn_graph.lowering.cpu import tile_grid
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.cpu.run_mask import MOST_NUMBERS
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans, prefer_kept_weights, prefer_way

NATIVE = evolve(Target.of("cpu"), native=("bf16",))
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
I32 = torch.int32
MASKS = {
    "keys": (ag.KeyLengths(), ("kv_lengths",)),
    "keys, causal": (ag.Causal("bottom_right"), ("kv_lengths",)),
    "both": (ag.KeyLengths() & ag.QueryLengths(), ("kv_lengths", "q_lengths")),
    "last keys": (ag.KeyLengths() & ~ag.Prefix(3), ("kv_lengths",)),
    "a window of them": (
        ag.KeyLengths() & ag.Window(20, 5).aligned("bottom_right"),
        ("kv_lengths",),
    ),
}


def ragged(
    q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, kind: str = "keys"
) -> ag.Graph:
    """Attention of q and k, which is v too in size, under lengths."""
    mask, names = MASKS[kind]
    lengths = {name: ag.TensorSpec((q[0],), I32) for name in names}
    specs = (ag.TensorSpec(x, dtype) for x in (q, k, k))
    return ag.attention(*specs, mask=mask, **lengths)  # type: ignore[arg-type]


def plan_of(graph: ag.Graph) -> ag.Plan:
    """A plan of `math` for a CPU that multiplies bfloat16 itself."""
    return ag.compile(graph, target=NATIVE, backends=("math",))


def tiles_of(graph: ag.Graph) -> RowTiles:
    """How a graph of one attention is tiled."""
    (tiles,) = plan_tiles(Request(plan_of(graph).graph, NATIVE, Options()))
    assert isinstance(tiles, RowTiles)
    return tiles


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_sequences_with_lengths_train(dtype: torch.dtype) -> None:
    """With weights that the forward keeps, of all batch entries at once."""
    graph = ragged((16, 4, 16, 64), (16, 4, 16, 64), dtype)
    plan = plan_of(graph)
    assert keeps_weights(plan.recorded.graph)
    check_gradients(plan, graph, tensors_for(graph, 1), 1)


@pytest.fixture
def on_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Problems run on whole rows."""
    prefer_way(monkeypatch, "rows")
    yield
    forget_plans()


@pytest.fixture
def nothing_is_few(on_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems run on whole rows, and their scores are not few."""
    monkeypatch.setattr(tile_grid, "FEW_SCORES", 2**8)


@pytest.mark.usefixtures("nothing_is_few")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 20])
def test_runs_of_batch_entries_hide_what_the_lengths_of_each_say(
    M: int, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three entries, and of the last two."""
    scores = 3 * 4 * M * 150 * dtype.itemsize // torch.float32.itemsize
    monkeypatch.setattr(tile_grid, "SCORES", scores)
    graph = ragged((5, 4, M, 16), (5, 2, 150, 16), dtype, kind)
    tiles, plan, tensors = tiles_of(graph), plan_of(graph), tensors_for(graph, 1)
    assert tiles.by_entries
    assert tiles.runs == 2
    assert torch.equal(plan.infer(*tensors)[0][0], plan.run(*tensors)[0][0])
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_data_hides_has_gradients_of_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its cotangent holds. Other rows are as they are without it."""
    prefer_kept_weights(monkeypatch)
    x = ag.TensorSpec((8, 12, 64, 16), dtype)
    graph = ag.attention(x, x, x, keep=ag.TensorSpec((8, 1, 64, 64), torch.bool))
    q, k, v, keep = tensors_for(graph, 1)
    keep[2, :, 5], do = False, torch.randn(q.shape).to(dtype)
    plan, grads = plan_of(graph), []
    assert keeps_weights(plan.recorded.graph)
    for odd in (1.0, float("inf")):
        do[2, :, 5] = odd
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = plan(*leaves, keep)
        assert isinstance(o, torch.Tensor)
        assert not o[2, :, 5].any()
        grads.append(torch.autograd.grad(o, leaves, do))
    assert all(map(torch.equal, *grads))
    assert not grads[0][0][2, :, 5].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_that_change_in_place_are_read_again(dtype: torch.dtype) -> None:
    graph = ragged((3, 4, 1, 16), (3, 2, 100, 16), dtype)
    q, k, v, lengths = tensors_for(graph, 1)
    for numbers in ((100, 1, 7), (0, 100, 7), (100, 1, 7), (0, 0, 0)):
        lengths.copy_(torch.tensor(numbers))
        check_outputs(plan_of(graph), graph, (q, k, v, lengths))


@pytest.mark.parametrize(
    ("dtype", "reaches"),
    [
        (torch.float32, {0: 1, 1: 1, 17: 17, 1990: 1990, 2000: 2000}),
        (torch.bfloat16, {0: 16, 1: 16, 496: 496, 497: 2000}),  # oneDNN copies keys with gaps
    ],
)
def test_keys_beyond_all_lengths_are_not_read(dtype: torch.dtype, reaches: dict[int, int]) -> None:
    graph = ragged((2, 32, 1, 16), (2, 32, 2000, 16), dtype)
    q, k, v, lengths = tensors_for(graph, 1)
    mask = tiles_of(graph).mask
    assert mask is not None
    for longest, due in reaches.items():
        lengths.copy_(torch.tensor([longest, min(longest, 3)]))
        hiding = mask.read((q, k, v, lengths))
        assert hiding.reach == due
        assert hiding.blind == (longest == 0)
        k[:, :, due:] = v[:, :, due:] = float("nan")
        o = plan_of(graph)(q, k, v, lengths)
        assert isinstance(o, torch.Tensor)
        assert o.isfinite().all()
        k.nan_to_num_()
        v.nan_to_num_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_are_hidden_may_overflow(dtype: torch.dtype) -> None:
    graph = ragged((2, 4, 1, 16), (2, 4, 40, 16), dtype)
    q, k, v, lengths = tensors_for(graph, 1)
    lengths.copy_(torch.tensor([40, 3]))
    q.abs_()
    due = plan_of(graph)(q, k, v, lengths)
    k[1, :, 3:] = torch.finfo(dtype).max
    assert torch.equal(plan_of(graph)(q, k, v, lengths), due)  # type: ignore[arg-type]  # one


def test_what_lengths_hide_is_held_by_their_numbers() -> None:
    graph = ragged((2, 4, 1, 16), (2, 4, 50, 16), torch.float32)
    q, k, v, lengths = tensors_for(graph, 1)
    mask = tiles_of(graph).mask
    assert mask is not None
    first = mask.read((q, k, v, lengths))
    assert mask.read((q, k, v, lengths.clone())) is first
    assert mask.read((q, k, v, lengths + 1)) is not first


@pytest.mark.usefixtures("on_rows")
def test_many_lengths_are_not_read_as_numbers() -> None:
    for B in (MOST_NUMBERS, MOST_NUMBERS + 1):
        graph = ragged((B, 1, 1, 16), (B, 1, 8, 16), torch.bfloat16)
        mask = tiles_of(graph).mask
        assert mask is not None
        assert mask.holds == (B == MOST_NUMBERS)
        check_outputs(plan_of(graph), graph, tensors_for(graph, 1))


@pytest.mark.usefixtures("on_rows")
def test_what_no_data_decides_is_held_for_every_batch() -> None:
    x = ag.TensorSpec((64, 4, 64, 64), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    mask, operands = tiles_of(graph).mask, tensors_for(graph, 1)
    assert mask is not None
    assert mask.read(operands) is mask.read(operands)


class Watch(TorchDispatchMode):
    """Sees what is computed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        return func(*args, **(kwargs or {}))


def test_who_watches_a_computation_sees_lengths_as_tensors() -> None:
    graph = ragged((2, 32, 1, 16), (2, 32, 2000, 16), torch.float32)
    operands, mask = tensors_for(graph, 1), tiles_of(graph).mask
    assert mask is not None
    held = mask.read(operands)
    assert held.reach
    with Watch():  # type: ignore[no-untyped-call]  # as above
        made = mask.read(operands)
    assert made is not held
    assert made.reach is None


@pytest.mark.parametrize("mask", [ag.KeepBlocks(64, 4096), ~ag.KeepBlocks(64, 4096)], ids=str)
@pytest.mark.parametrize("kept", [True, False])
def test_one_block_of_all_places_is_a_mask_without_axes(mask: ag.Mask, kept: bool) -> None:
    q, k = (
        ag.TensorSpec((2, 16, 1, 64), torch.float32),
        ag.TensorSpec((2, 16, 4096, 64), torch.float32),
    )
    graph = ag.attention(q, k, k, mask=mask, keep_blocks=ag.TensorSpec((1, 1, 1, 1), torch.bool))
    *tensors, _ = tensors_for(graph, 1)
    plan = ag.compile(graph, target="cpu", backends=("math",))
    check_outputs(plan, graph, [*tensors, torch.full((1, 1, 1, 1), kept)])
