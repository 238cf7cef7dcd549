"""PyTorch's own numerical checks of derivatives: reverse, forward and second order.

Not batched: those take PyTorch's older vmap, which enters no Function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd import gradcheck, gradgradcheck

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.testing.agreement import run_plan

F64, I64 = torch.float64, torch.int64
CPU = ag.Target.of("cpu")
B, H, G, M, N, D, E = 2, 4, 2, 3, 5, 4, 3
Tensors = tuple[torch.Tensor, ...]


def spec(*shape: int, dtype: torch.dtype = F64) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype)


Q, K, V = spec(B, H, M, D), spec(B, G, N, D), spec(B, G, N, E)
LENGTHS = spec(B, dtype=I64)
GRAPHS = {
    "causal": ag.attention(Q, K, K, mask=ag.Causal("bottom_right"), stats=True),
    "every step": ag.attention(
        Q, K, V, mask=ag.Window(2, 2, "bottom_right"), soft_cap=5.0, bias=spec(1, H, M, N),
        alibi=spec(H), sinks=spec(H), kv_lengths=LENGTHS, align="bottom_right", dropout=0.3,
        stats=True,
    ),
}  # fmt: skip


def draw(graph: ag.Graph) -> Tensors:
    """Tensors for the inputs; floating ones require grad. The second sequence has one key less."""
    random = torch.Generator().manual_seed(0)
    fixed = {"kv_lengths": torch.tensor([N, N - 1]), "seed": torch.tensor(7)}
    fixed |= {"offset": torch.tensor(0)}
    return tuple(
        fixed[i.name]
        if i.name in fixed
        else torch.randn(i.spec.shape, dtype=F64, generator=random, requires_grad=True)
        for i in graph.inputs
    )


def calls_of(name: str) -> Iterator[tuple[Callable[..., Tensors], Tensors]]:
    """A plan of a graph by each backend that computes in float64, tangents by `math`; tensors."""
    graph = GRAPHS[name]
    for backend in ag.extend.BACKENDS:
        if ag.explain(graph, target=CPU, backends=(backend, "math")).backend == backend.name:
            plan = ag.compile(graph, target=CPU, backends=(backend, "math"))
            yield lambda *tensors, plan=plan: run_plan(plan, tensors), draw(plan.graph)


ORDERS = {
    "first": partial(gradcheck, check_forward_ad=True),
    "second": partial(gradgradcheck, check_fwd_over_rev=True),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("order", ORDERS)
def test_derivatives_pass_the_numerical_check(order: str, name: str) -> None:
    check = partial(ORDERS[order], fast_mode=True, check_batched_grad=True, nondet_tol=1e-12)
    for call, tensors in calls_of(name):
        assert check(call, tensors)


def test_calls_without_a_plan_pass_both_checks() -> None:
    def call(*qkv: torch.Tensor) -> Tensors:
        o, lse = attention(*qkv, mask=ag.Causal("bottom_right"), soft_cap=5.0, stats=True)
        return o, lse

    tensors = draw(GRAPHS["causal"])
    assert gradcheck(call, tensors, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(
        call, tensors, fast_mode=True, check_fwd_over_rev=True, check_batched_grad=True
    )


def test_the_older_vmap_and_that_of_func_compute_batched_gradients() -> None:
    graph = GRAPHS["causal"]
    plan, (q, k, v) = ag.compile(graph, target=CPU), draw(graph)
    o = run_plan(plan, (q, k, v))[0]
    cotangents = torch.randn(2, *o.shape, dtype=F64)
    inputs = (q, k, v)
    older = torch.autograd.grad(o, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    for n, do in enumerate(cotangents):
        dues = torch.autograd.grad(o, inputs, do, retain_graph=True)
        for x, due in zip(older, dues, strict=True):
            torch.testing.assert_close(x[n], due)
    pull = torch.func.vjp(lambda x: run_plan(plan, (x, k, v))[0], q)[1]
    (batched,) = torch.func.vmap(pull)(cotangents)
    for x, do in zip(batched, cotangents, strict=True):
        (due,) = torch.autograd.grad(o, q, do, retain_graph=True)
        torch.testing.assert_close(x, due)


def test_the_older_vmap_within_another_is_refused_by_name() -> None:
    graph = GRAPHS["causal"]
    plan, (q, k, v) = ag.compile(graph, target=CPU), draw(graph)
    o = run_plan(plan, (q, k, v))[0]

    def pull(do: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(o, q, do, retain_graph=True)[0]

    twice = _vmap(_vmap(pull))
    with pytest.raises(ag.GraphError, match=r"within another; torch\.func\.vmap may be nested"):
        twice(torch.randn(2, 2, *o.shape, dtype=F64))
