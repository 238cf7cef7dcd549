"""Keys and values that few queries read are packed a part at a time, in little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.lowering.cpu import fused_tiles, planned_tiles
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans

CPU = ag.Target.of("cpu")
HALF = torch.float16
LENGTHS = ag.TensorSpec((2,), torch.int64)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lengths": {"mask": ag.KeyLengths(), "kv_lengths": LENGTHS},
    "causal": {"mask": ag.Causal("top_left")},
    "last queries": {"mask": ag.Causal("bottom_right")},
    "window": {"mask": ag.Window(20, 5, align="bottom_right")},
    "padding": {"keep": ag.TensorSpec((2, 1, 1, 90), torch.bool)},
    "bias": {"bias": ag.TensorSpec((1, 4, 5, 90), HALF)},
    "sinks": {"sinks": ag.TensorSpec((4,), torch.float32)},
}


def make_graph(E: int = 8, layout: str = "bhsd", M: int = 5, N: int = 90, **more: Any) -> ag.Graph:
    """Attention of five queries on ninety keys in float16."""
    q = ag.TensorSpec((2, 4, M, 8), HALF)
    k, v = (ag.TensorSpec((2, 2, N, n), HALF, layout=layout) for n in (8, E))
    return ag.attention(q, k, v, **more)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts are of sixteen keys at most."""
    monkeypatch.setattr(fused_tiles, "MOST_PACKED", 2**10)
    monkeypatch.setattr(fused_tiles, "LEAST_KEYS", 16)
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("E", "layout"), [(8, "bhsd"), (12, "bhsd"), (8, "bshd"), (8, "bhds")])
@pytest.mark.usefixtures("little_room")
def test_parts_add_up_to_the_whole(name: str, E: int, layout: str) -> None:
    graph = make_graph(E, layout, stats=True, **OPTIONS[name])
    plan = ag.compile(graph, target=CPU, backends=("math",))
    for seed in range(3):
        check_outputs(plan, graph, tensors_for(graph, seed))


@pytest.mark.parametrize("name", ["lengths", "padding"])
@pytest.mark.usefixtures("little_room")
def test_parts_of_tiles_that_data_decide_add_up_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_tiles, "CALL_SECONDS", 0.0)  # else all scores are one tile
    graph = make_graph(stats=True, **OPTIONS[name])
    plan = ag.compile(graph, target=CPU, backends=("math",))
    for seed in range(3):
        check_outputs(plan, graph, tensors_for(graph, seed))


def test_a_long_cache_in_half_precision_takes_some_megabytes() -> None:
    for options in ({}, OPTIONS["lengths"]):
        graph = make_graph(M=1, N=2**20, **options)
        memory = ag.compile(graph, target=CPU, backends=("math",)).executable.workspace
        assert memory <= 2 * fused_tiles.MOST_PACKED
