"""Predicted times order the backends of a GPU until one measures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.lowering.problem import sole
from attn_graph.lowering.rates import rates, read_rates
from attn_graph.machine.gpus import devices
from attn_graph.masks.tiles import count_pairs, most_pairs
from attn_graph.planner.choose import BACKENDS
from attn_graph.planner.predict import forecast, predict_parts, rank
from tests.support.equipped import equip

HALF = torch.bfloat16
Shape = tuple[int, ...]
LONG = (4, 32, 4096, 128)


def declare(
    q: Shape, kv: Shape | None = None, dtype: torch.dtype = HALF, mask: ag.Mask | None = None
) -> ag.Graph:
    """A graph of these sizes."""
    other = ag.TensorSpec(kv or q, dtype)
    return ag.attention(ag.TensorSpec(q, dtype), other, other, mask=mask)


def forward(graph: ag.Graph) -> ag.Graph:
    """The graph as backends see it."""
    return ag.explain(graph, target="cpu").graph


def seconds(graph: ag.Graph, target: str, name: str) -> float:
    """What is predicted for the forward of a graph."""
    made = forecast(forward(graph), ag.Target.of(target), name)
    assert made is not None
    return made.seconds


def test_every_rate_names_a_backend_and_is_a_share_of_a_peak() -> None:
    known = {backend.name for backend in BACKENDS}
    for (name, _), rate in rates().items():
        assert name in known
        shares = [*rate.forward, *rate.backward]
        assert all(0 < share < 1 for _, share in shares)
        assert [*rate.forward] == sorted(rate.forward)


@pytest.mark.parametrize("name", sorted(devices()))
def test_every_gpu_of_the_table_has_a_rate_for_each_kernel_of_both_passes(name: str) -> None:
    target = ag.Target.of(name)
    assert {b for b, sm in rates() if sm == target.sm} >= {"cudnn", "triton", "torch_flash"}


def test_a_long_product_takes_its_flops_at_the_share_of_the_peak() -> None:
    B, H, S, D = LONG
    flops = 4 * B * H * S * S * D
    peak = ag.Target.of("h200").peak("bf16")
    assert peak is not None
    share = dict(rates()["cudnn", 90].forward)[128]
    programs = B * H * S // 128
    waves = -(-programs // 132)
    expected = flops / (peak * share) * waves * 132 / programs
    assert seconds(declare(LONG), "h200", "cudnn") == pytest.approx(expected)


def test_a_decode_step_takes_its_bytes_at_the_bandwidth_if_keys_are_split() -> None:
    graph = declare((1, 32, 1, 128), (1, 8, 32768, 128))
    bandwidth = ag.Target.of("h200").bandwidth
    assert bandwidth is not None
    reading = 2 * 8 * 32768 * 128 * 2 / bandwidth
    least = reading + read_rates()["launch"]  # of what joins the parts
    assert seconds(graph, "h200", "torch_flash") == pytest.approx(least, rel=0.01)
    assert seconds(graph, "h200", "triton") == pytest.approx(least, rel=0.01)
    assert seconds(graph, "h200", "triton") < 50e-6
    many = declare((1, 32, 65, 128), (1, 8, 32768, 128))  # each head by itself, of rows half empty
    assert 3 * least < seconds(many, "h200", "triton") < 6 * least  # which share keys too
    enough = declare((64, 32, 1, 128), (64, 8, 4096, 128))  # programs without parts
    assert seconds(enough, "h200", "triton") == pytest.approx(8 * reading, rel=0.01)


@pytest.mark.parametrize("target", ["a100", "l40s", "rtx4090", "h100", "b200", "gb10"])
def test_decode_goes_to_who_reads_each_key_once(target: str) -> None:
    """cuDNN shares keys too, but its programs have the rows of one head each."""
    said = ag.explain(declare((1, 32, 1, 128), (1, 8, 32768, 128)), target=equip(target))
    assert said.backend == "triton"
    assert "predicted to be the fastest, at best: triton" in said.cause
    names = [name for name in said.also if name != "math"]
    assert names == ["torch_flash", "cudnn"]


@pytest.mark.parametrize("target", sorted(devices()))
@pytest.mark.parametrize(("G", "M"), [(8, 1), (32, 1), (8, 4)])
def test_equal_predictions_are_ordered_by_what_programs_move(target: str, G: int, M: int) -> None:
    graph, place = forward(declare((1, 32, M, 128), (1, G, 8192, 128))), ag.Target.of(target)
    times = [*rank(graph, place, [b.name for b in BACKENDS]).items()]
    ties = [(a, b) for (a, x), (b, y) in pairwise(times) if x == y]
    assert ties
    for pair in ties:
        first, second = (forecast(graph, place, name) for name in pair)
        assert first is not None
        assert second is not None
        assert first.traffic <= second.traffic


def test_cudnn_has_about_as_many_parts_on_an_a100_as_in_its_plan() -> None:
    """266,368 bytes of workspace for 32 heads of 128 are 16 parts of each, with two statistics."""
    problem = sole(forward(declare((1, 32, 1, 128), (1, 32, 8192, 128))))
    assert problem is not None
    assert 266_368 // (4 * 32 * (128 + 2)) == 16
    assert predict_parts(rates()["cudnn", 80], problem, 108) == pytest.approx(16, abs=2)


def test_fewer_pairs_take_less_time_and_no_pair_is_left_out() -> None:
    full, causal = (declare(LONG, mask=mask) for mask in (None, ag.Causal()))
    assert seconds(causal, "h200", "triton") < 0.6 * seconds(full, "h200", "triton")
    sizes = (2, 4, 2, 300, 400)
    for mask in (None, ag.Causal("top_left"), ag.Window(64, align="top_left")):
        assert most_pairs(mask, sizes) == count_pairs(mask, sizes, {}).pairs
    assert most_pairs(ag.SameSegment(), sizes) == 2 * 4 * 300 * 400


def test_the_order_is_that_of_the_predictions_and_the_cause_says_them() -> None:
    said = ag.explain(declare(LONG, mask=ag.Causal()), target="h200")
    names = [b.name for b in BACKENDS]
    times = rank(said.graph, ag.Target.of("h200"), names)
    assert [*times.values()] == sorted(times.values())
    able = [name for name in times if name == said.backend or name in said.also]
    assert [said.backend, *said.also][: len(able)] == able
    assert said.cause.startswith("predicted to be the fastest, at best: ")


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.float32}, {"peaks": ()}, {"bandwidth": None}, {"sm": 87}],
    ids=["float32", "no peak", "no bandwidth", "unknown architecture"],
)
def test_nothing_is_predicted_without_a_rate(change: dict[str, Any]) -> None:
    target = ag.Target.of("h200")
    dtype = change.get("dtype", HALF)
    target = evolve(target, **{k: x for k, x in change.items() if k != "dtype"})
    graph = forward(declare((1, 2, 256, 64), dtype=dtype))
    assert rank(graph, target, [b.name for b in BACKENDS]) == {}
    assert "predicted" not in ag.explain(declare((1, 2, 256, 64), dtype=dtype), target=target).cause
