"""Calls of PyTorch's fused kernel on tiles: rows without keys, masks of users, packed keys."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.ir.attention import Attention
from attn_graph.ir.modifiers import Bias
from attn_graph.kernels import fused_cpu
from attn_graph.kernels.hiding import hide_, hiding_bits
from attn_graph.lowering.cpu import fused_tiles
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import cpu_rates
from attn_graph.masks.places import Place
from attn_graph.testing.agreement import as_leaves, check_outputs, run_plan
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import new_plans as new_plans

CPU = ag.Target.of("cpu")
PLAIN = evolve(CPU, native=(), interprets=False)
RATES = cpu_rates(False)
INF = float("inf")


@final
@frozen
class UpTo(ag.Mask):
    """Query i sees the keys below ends[i]."""

    ends: tuple[int, ...]

    def keep(self, at: Place) -> Any:
        return at.j < (self.ends[at.i] if isinstance(at.i, int) else torch.tensor(self.ends)[at.i])


def test_a_mask_of_a_user_is_asked_about_queries_that_there_are() -> None:
    x = ag.TensorSpec((1, 1, 700, 8), torch.float32)
    graph = ag.attention(x, x, x, mask=UpTo(tuple(range(1, 701))))
    check_outputs(ag.compile(graph, backends=("math",)), graph, tensors_for(graph, 1))


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


@pytest.mark.parametrize("mask", [ag.Causal(), ag.Window(70, 0), ag.Causal() | ag.Prefix(9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_lie_as_their_inputs_do(mask: ag.Mask, dtype: torch.dtype) -> None:
    x = ag.TensorSpec((2, 3, 400, 8), dtype, layout="bshd")
    graph = ag.attention(x, x, x, mask=mask.aligned("top_left"))
    plan, leaves = ag.compile(graph, target=PLAIN), as_leaves(tensors_for(graph, 1))
    (o,) = run_plan(plan, leaves)
    grads = torch.autograd.grad(o, leaves, torch.randn_like(o))
    assert [x.stride() for x in grads] == [x.stride() for x in leaves]


ADDED = {  # dtypes of q and of the bias
    "f32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f32 beside bf16": (torch.bfloat16, torch.float32),
    "f64": (torch.float64, torch.float64),
    "f32 beside f64": (torch.float64, torch.float32),
}


@pytest.mark.parametrize("dtypes", ADDED)
@pytest.mark.parametrize("shape", [(2, 4, 3, 70), (1, 4, 1, 70), (1, 1, 3, 70), (2, 1, 3, 1)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("stats", [False, True])
def test_a_bias_is_added_in_place_where_the_kernel_reads_it_so(
    dtypes: str, shape: tuple[int, ...], turned: bool, stats: bool
) -> None:
    """Else, as where its keys lie apart, each call copies it to the workspace."""
    dtype, own = ADDED[dtypes]
    q, k = (ag.TensorSpec((2, 4, n, 8), dtype) for n in (3, 70))
    bias = ag.TensorSpec(shape, own, layout="bhds" if turned else "bhsd")
    graph = ag.attention(q, k, k, bias=bias, stats=stats)
    tensors = tensors_for(graph, 1)
    tensors[3][..., 1:2, :] = -INF  # a row without keys, if there are several
    problem = Problem.of(Attention(0.125, (Bias(),)), (q, k, k, bias))
    in_place = bias.unit_last and dtypes != "f32 beside f64"
    assert (FusedTiles.plan(problem, RATES).addends == 0) == in_place
    check_outputs(ag.compile(graph, target=PLAIN, backends=("math",)), graph, tensors)


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


def five_queries(E: int = 8, layout: str = "bhsd", M: int = 5, N: int = 90, **x: Any) -> ag.Graph:
    """Attention of five queries on ninety keys in float16."""
    q = ag.TensorSpec((2, 4, M, 8), HALF)
    k, v = (ag.TensorSpec((2, 2, N, n), HALF, layout=layout) for n in (8, E))
    return ag.attention(q, k, v, **x)


def test_a_long_cache_in_half_precision_takes_some_megabytes() -> None:
    for options in ({}, OPTIONS["lengths"]):
        graph = five_queries(M=1, N=2**20, **options)
        memory = ag.compile(graph, target=CPU, backends=("math",)).executable.workspace
        assert memory <= 2 * fused_tiles.MOST_PACKED


def test_a_mask_may_leave_fewer_keys_than_a_bias_has() -> None:
    q, k, v = (torch.randn(1, 1, n, 4) for n in (1, 2, 2))
    causal, bias = ag.Causal("top_left"), torch.randn(1, 1, 1, 2)
    o = ag.nn.functional.attention(q, k, v, mask=causal, bias=bias, backends=["math"])
    torch.testing.assert_close(o, v[:, :, :1])
