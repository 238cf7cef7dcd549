"""What a plan costs: counted by hand, place by place."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given

import attn_graph as ag
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph
from attn_graph.testing import mask_formula
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
H200 = ag.Target.of("h200")
X = ag.TensorSpec((2, 4, 96, 16), torch.bfloat16)


def plan_of(graph: ag.Graph, target: ag.Target = CPU) -> ag.Plan:
    return ag.compile(graph, target=target, backends=("math",))


def mask_data(graph: Graph, node: Attention, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors of a fused graph's mask, by the mask's own names."""
    (eqn,) = graph.eqns
    return {name: given[graph.inputs[i].name] for name, i in node.split(eqn.args).mask.items()}


@given(graph=graphs(), seed=seeds)
def test_pairs_and_flops_are_those_of_every_place_asked(graph: ag.Graph, seed: int) -> None:
    plan = plan_of(graph)
    (eqn,) = plan.graph.eqns
    node = eqn.op
    assert isinstance(node, Attention)
    tensors = dict(zip([i.name for i in graph.inputs], tensors_for(graph, seed), strict=True))
    q, k, v = (i.spec.shape for i in plan.graph.inputs[:3])
    sizes = (q[0], q[1], q[2], k[2])
    given_data = mask_data(plan.graph, node, tensors)
    due = torch.ones(sizes, dtype=torch.bool)
    if node.mask is not None:
        due = mask_formula.evaluate_place_by_place(node.mask, sizes, given_data)
    names = {plan.graph.inputs[i].name for i in node.split(eqn.args).mask.values()}
    cost = plan.cost(**{name: tensors[name] for name in names})
    assert cost.exact
    assert (cost.pairs, cost.places) == (int(due.sum()), prod(sizes))
    assert cost.forward.flops == 2 * cost.pairs * (q[3] + v[3])
    assert cost.backward is not None
    assert cost.backward.flops == 2 * cost.pairs * (3 * q[3] + 2 * v[3])
    most = plan.cost()
    assert most.pairs >= cost.pairs
    assert most.forward.bytes >= cost.forward.bytes
    assert most.exact or names
    if most.exact:
        assert most == cost


def test_bytes_are_each_operand_and_result_once() -> None:
    cost = plan_of(ag.attention(X, X, X, stats=True, mask=ag.Causal())).cost()
    one, lse = prod(X.shape) * 2, prod(X.shape[:3]) * 4
    assert cost.forward.bytes == 4 * one + lse
    assert cost.backward is not None
    assert cost.backward.bytes == 8 * one + lse  # q k v o do lse -> dq dk dv, no gradient of lse
    assert plan_of(ag.attention(X, X, X)).cost().forward.bytes == 4 * one  # lse is not asked for


def test_keys_that_no_query_sees_are_not_read() -> None:
    q, k = (
        ag.TensorSpec((1, 8, 1, 64), torch.float16),
        ag.TensorSpec((1, 2, 4096, 64), torch.float16),
    )
    window = ag.Window(255, align="bottom_right")
    cost = plan_of(ag.attention(q, k, k, mask=window & ag.Causal("bottom_right"))).cost()
    assert cost.pairs == 8 * 256
    assert cost.forward.bytes == 2 * (2 * 8 * 64 + 2 * 2 * 256 * 64)


def test_keys_that_one_head_of_a_group_sees_are_read() -> None:
    q, k = (ag.TensorSpec((1, heads, 4, 8), torch.float32) for heads in (2, 1))
    keep = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]])[None, :, None] > 0
    cost = plan_of(ag.attention(q, k, k, keep=ag.TensorSpec.like(keep))).cost(keep=keep)
    assert cost.pairs == 4 * 3
    assert cost.forward.bytes == 2 * q.type.bytes + 2 * 2 * 8 * 4 + keep.numel()


def test_a_broadcast_tensor_is_read_once() -> None:
    flat = ag.TensorSpec((2, 4, 96, 16), torch.float32, (0, 0, 16, 1))
    x = ag.TensorSpec((2, 4, 96, 16), torch.float32)
    cost = plan_of(ag.attention(x, flat, flat)).cost()
    assert cost.forward.bytes == 4 * (2 * prod(x.shape) + 2 * 96 * 16)


def test_gaps_between_elements_are_not_read() -> None:
    x = ag.TensorSpec((2, 4, 96, 16), torch.float32)
    dense, apart = (ag.TensorSpec((2, 96), torch.int64, (96 * n, n)) for n in (1, 4))
    one, two = (plan_of(ag.attention(x, x, x, segments=(s, s))).cost() for s in (dense, apart))
    assert one == two


def test_a_bias_is_read_where_pairs_remain() -> None:
    x, bias = (
        ag.TensorSpec((1, 1, 64, 8), torch.float32),
        ag.TensorSpec((1, 1, 64, 64), torch.float32),
    )
    bare = plan_of(ag.attention(x, x, x, mask=ag.Causal())).cost()
    cost = plan_of(ag.attention(x, x, x, mask=ag.Causal(), bias=bias)).cost()
    assert cost.forward.bytes - bare.forward.bytes == 4 * cost.pairs == 4 * 64 * 65 // 2


def test_the_least_time_is_the_longer_of_computing_and_moving() -> None:
    forward = plan_of(ag.attention(X, X, X), H200).cost().forward
    peak, bandwidth = H200.peak("bf16"), H200.bandwidth
    assert peak is not None
    assert bandwidth is not None
    assert forward.compute_seconds == forward.flops / peak
    assert forward.memory_seconds == forward.bytes / bandwidth
    assert forward.seconds == max(forward.flops / peak, forward.bytes / bandwidth)
    assert forward.bound == "memory"
    assert forward.intensity == forward.flops / forward.bytes
    assert forward.achieved(2 * forward.bytes / bandwidth) == 0.5
    slow = evolve(H200, peaks=(("bf16", 1e9),))
    assert plan_of(ag.attention(X, X, X), slow).cost().forward.bound == "compute"


def test_a_target_without_rates_has_no_least_time() -> None:
    forward = plan_of(ag.attention(X, X, X)).cost().forward
    assert (forward.seconds, forward.bound, forward.achieved(1.0)) == (None, None, None)
    x = ag.TensorSpec(X.shape, torch.float64)  # the table has no rates of it
    assert plan_of(ag.attention(x, x, x), H200).cost().forward.seconds is None


def test_a_gradient_costs_what_its_forward_said() -> None:
    plan = plan_of(ag.attention(X, X, X, mask=ag.Causal()))
    own = plan.vjp.cost()
    assert own.backward is None
    assert own.forward == plan.cost().backward
    _, backward = ag.vjp(plan.graph, ("v",))
    only = plan_of(backward).cost().forward
    assert only.flops == 2 * own.pairs * (16 + 16)  # q k^T again, and p^T do


def weights(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
    """An attention that also gives its weights, and so stays in steps."""
    p, _ = ag.scores(q, k).soft_cap(5.0).mask(ag.Causal()).softmax()
    return p.weigh(v), p


def test_a_graph_that_does_not_fuse_counts_its_products() -> None:
    cost = plan_of(ag.graph(weights, q=X, k=X, v=X)).cost()
    places = 2 * 4 * 96 * 96
    assert cost.forward.flops == 2 * places * (16 + 16)
    assert cost.backward is not None
    assert cost.backward.flops == 2 * places * (3 * 16 + 2 * 16)
    assert str(cost).startswith("forward 4.719 Mflop")


def test_a_gradient_in_steps_costs_what_its_forward_said() -> None:
    forward, backward = ag.vjp(ag.graph(weights, q=X, k=X, v=X))
    own = plan_of(backward).cost()
    assert own.backward is None
    assert own.forward == plan_of(forward).cost().backward


def test_cost_says_which_tensors_it_takes() -> None:
    lengths = ag.TensorSpec((2,), torch.int64)
    plan = plan_of(ag.attention(X, X, X, kv_lengths=lengths))
    with pytest.raises(ag.GraphError, match="no mask reads q; the masks read kv_lengths"):
        plan.cost(q=torch.zeros(X.shape))
    with pytest.raises(ag.GraphError, match=r"kv_lengths has batch size 3 \(axis 0\), and q has 2"):
        plan.cost(kv_lengths=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ag.GraphError, match="no mask reads lengths; the masks read no input"):
        plan_of(ag.attention(X, X, X)).cost(lengths=torch.zeros(2))


def test_cost_prints_in_one_line() -> None:
    lengths = ag.TensorSpec((2,), torch.int64)
    plan = plan_of(ag.attention(X, X, X, mask=ag.Causal(), kv_lengths=lengths), H200)
    assert str(plan.cost()) == (
        "at most 37,248 of 73,728 pairs (50.5 %); "
        "forward 2.384 Mflop, 96.02 KiB, 24.25 flop/B, at the roofline 20.48 ns, bound by memory; "
        "backward 5.96 Mflop, 195 KiB, 29.84 flop/B, at the roofline 41.6 ns, bound by memory"
    )
