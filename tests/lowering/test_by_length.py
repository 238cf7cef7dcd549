"""Few queries with lengths in half precision: how much of the keys is left decides what runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.cpu import by_length, row_choice
from attn_graph.lowering.cpu.by_length import TilesByLength
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans

NATIVE = evolve(Target.of("cpu"), native=("bf16",))
BF16, F16, NAN = torch.bfloat16, torch.float16, float("nan")
DECODE = (2, 8, 4, 1, 2048)  # B, H, G, M and N


def cached(sizes: tuple[int, ...] = DECODE, dtype: torch.dtype = BF16, **options: Any) -> ag.Graph:
    """Few queries of a cache of keys, so many of which count."""
    B, H, G, M, N = sizes
    q, k = (ag.TensorSpec((B, *x, 64), dtype) for x in ((H, M), (G, N)))
    given: dict[str, Any] = {
        "mask": ag.KeyLengths(),
        "kv_lengths": ag.TensorSpec((B,), torch.int32),
    }
    return ag.attention(q, k, k, **(given | options))


def plan_of(graph: ag.Graph) -> ag.Plan:
    """A plan for a CPU that multiplies bfloat16 itself."""
    return ag.compile(graph, target=NATIVE, backends=("math",))


def tiles_of(graph: ag.Graph) -> object:
    """How a graph of one attention is tiled."""
    (tiles,) = plan_tiles(plan_of(graph).graph, NATIVE, ag.Options())
    return tiles


@pytest.fixture
def every_cache_is_long(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short ones are chosen for too."""
    monkeypatch.setattr(by_length, "LEAST_READ", 0)
    monkeypatch.setattr(row_choice, "LEAST_SUMMED", 0)  # of float16
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 8, 8, 1, 2048), {}),  # one row, on which the kernel spends as long as on four
        ((2, 8, 4, 9, 2048), {}),
        ((1, 8, 4, 1, 1024), {}),
        (DECODE, {"dtype": torch.float32}),
        (DECODE, {"mask": None, "kv_lengths": None}),
        (DECODE, {"soft_cap": 20.0}),
        (DECODE, {"mask": ag.KeyLengths() & ag.Window(99, align="bottom_right")}),  # heads apart
        (DECODE, {"q_lengths": ag.TensorSpec((2,), torch.int32), "mask": ag.QueryLengths()}),
    ],
)
def test_other_problems_run_in_one_way(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    assert isinstance(tiles_of(cached()), TilesByLength)
    assert not isinstance(tiles_of(cached(sizes, **options)), TilesByLength)


@pytest.mark.usefixtures("every_cache_is_long")
@given(data=st.data(), seed=seeds.filter(lambda seed: seed % 8 < 6))
def test_either_way_is_within_the_rule(data: st.DataObject, seed: int) -> None:
    B, G, r, M = (data.draw(st.integers(1, most)) for most in (4, 3, 4, 3))
    N = data.draw(st.integers(40, 150))
    dtype = data.draw(st.sampled_from((BF16, F16)))
    stats = data.draw(st.sampled_from(((), ("lse",))))
    graph = cached((B, G * r, G, M, N), dtype, stats=stats)
    assert dtype == BF16 or r * M != 2 or isinstance(tiles_of(graph), TilesByLength)
    *tensors, lengths = tensors_for(graph, seed)
    most = data.draw(st.sampled_from((N // 3, N)))
    lengths.copy_(torch.tensor(data.draw(st.tuples(*[st.integers(0, most)] * B))))
    check_outputs(plan_of(graph), graph, (*tensors, lengths))


def test_an_lse_near_0_is_off_by_what_the_exponential_is() -> None:
    """Of one key, whose weight PyTorch's kernel takes for 1 - 5.3e-5."""
    graph = cached((1, 1, 1, 1, 40), stats=("lse",))
    *tensors, lengths = tensors_for(graph, 32)
    check_outputs(plan_of(graph), graph, (*tensors, lengths.fill_(1)))


def test_lengths_that_change_in_place_choose_again() -> None:
    """And the kernel reads no key that they leave out."""
    graph = cached()
    q, k, v, lengths = tensors_for(graph, 1)
    plan, tiles = plan_of(graph), tiles_of(graph)
    assert isinstance(tiles, TilesByLength)
    few = ((600, 700), (0, 1365), (0, 0))
    for numbers in (*few, (2048, 3), (683, 683), *few):
        lengths.copy_(torch.tensor(numbers))
        assert tiles.leaves_few((q, k, v, lengths)) == (numbers in few)
        check_outputs(plan, graph, (q, k, v, lengths))
    k[:, :, 1400:] = v[:, :, 1400:] = NAN
    o = plan(q, k, v, lengths.copy_(torch.tensor((600, 700))))
    assert isinstance(o, torch.Tensor)
    assert o.isfinite().all()


def test_a_call_without_gradient_gives_the_same_bits() -> None:
    graph = cached()
    *tensors, lengths = tensors_for(graph, 1)
    plan = plan_of(graph)
    for numbers in ((600, 700), (2000, 3)):
        given = (*tensors, lengths.copy_(torch.tensor(numbers)))
        assert torch.equal(plan.infer(*given)[0][0], plan.run(*given)[0][0])


def test_memory_is_that_of_the_larger_way() -> None:
    graph = cached()
    *tensors, lengths = tensors_for(graph, 1)
    workspace = ag.Workspace()
    plan = ag.compile(graph, target=NATIVE, backends=("math",), workspace=workspace)
    for numbers in ((600, 700), (2000, 300)):
        plan(*tensors, lengths.copy_(torch.tensor(numbers)))
    assert workspace.bytes == plan.memory().workspace_forward
    assert "where lengths leave a third of the keys or less, PyTorch's fused" in str(plan.explain())
