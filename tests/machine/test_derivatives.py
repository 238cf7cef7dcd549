"""Derivatives of a plan: second ones and tangents, by every way to them that PyTorch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.nn.varlen import varlen_attn
from tests.support.calls import Leaves, check_gradients, leaves_of, output_of

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
Route = Callable[[ag.Plan, Leaves], None]


def penalty(plan: ag.Plan, leaves: Leaves) -> None:
    o = output_of(plan, leaves)
    (g,) = torch.autograd.grad(o.sum(), leaves[0], create_graph=True)
    (o.sum() + 10 * (g.norm() - 1) ** 2).backward()


def hessian(plan: ag.Plan, leaves: Leaves) -> None:
    q, k, v = leaves
    torch.autograd.functional.hessian(lambda x: output_of(plan, (x, k, v)).sum(), q)


def inside_of_a_transform(plan: ag.Plan, leaves: Leaves) -> None:
    o = output_of(plan, leaves).sum()

    def slope(x: torch.Tensor) -> torch.Tensor:
        return (torch.autograd.grad(o, leaves[0], create_graph=True)[0] * x).sum()

    torch.func.grad(slope)(leaves[1].detach())


def forward_mode(plan: ag.Plan, leaves: Leaves) -> None:
    with forward_ad.dual_level(), torch.no_grad():
        plan(forward_ad.make_dual(leaves[0], torch.ones_like(leaves[0])), *leaves[1:])


def of_jvp(plan: ag.Plan, leaves: Leaves) -> None:
    q, k, v = (t.detach() for t in leaves)
    torch.func.jvp(lambda x: plan(x, k, v), (q,), (torch.ones_like(q),))


def thrice(plan: ag.Plan, leaves: Leaves) -> None:
    g: torch.Tensor = output_of(plan, leaves).square().sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(g.sum(), leaves[:1], create_graph=True)


ROUTES: dict[Route, str] = {
    thrice: "third derivatives",
    inside_of_a_transform: "call the plan within the transform",
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_to_a_derivative_that_is_not_there_raises(route: Route) -> None:
    x = ag.TensorSpec((1, 1, 3, 2), torch.float64)
    plan = ag.compile(ag.attention(x, x, x), target=CPU)
    with pytest.raises(ag.GraphError, match=ROUTES[route]):
        route(plan, leaves_of(plan.graph))


@pytest.mark.parametrize("backend", ["math", "torch_sdpa"])
@pytest.mark.parametrize("route", [penalty, hessian, forward_mode, of_jvp])
def test_every_route_to_a_derivative_is_open(backend: str, route: Route) -> None:
    x = ag.TensorSpec((1, 1, 3, 2), torch.float64)
    plan = ag.compile(ag.attention(x, x, x), target=CPU)
    route(plan, leaves_of(plan.graph))
    alone = ag.compile(ag.attention(x, x, x), target=CPU, backends=(backend,))
    if backend == "math":
        route(alone, leaves_of(alone.graph))
    else:
        with pytest.raises(ag.NoBackendError, match="computes no tangents"):
            route(alone, leaves_of(alone.graph))


def test_the_gradient_by_hand_has_one_too() -> None:
    """That of dq is as PyTorch's autograd derives it from the formula."""
    x = ag.TensorSpec((1, 1, 3, 2), torch.float64)
    graph = ag.attention(x, x, x)
    forward, backward = ag.vjp(graph)
    q, k, v = leaves = leaves_of(graph)
    outputs = ag.compile(forward, target=CPU)(*leaves)
    do, weights = torch.randn_like(outputs[0]), torch.randn_like(q)
    dq, *_ = ag.compile(backward, target=CPU)(*leaves, *outputs, do)
    o = (q @ k.mT / 2**0.5).softmax(-1) @ v
    (formula,) = torch.autograd.grad(o, q, do, create_graph=True)
    torch.testing.assert_close(dq, formula)
    second, due = (torch.autograd.grad(first, leaves, weights) for first in (dq, formula))
    torch.testing.assert_close(second, due)


Y = ag.TensorSpec((1, 2, 3, 2), torch.float64)
KV = ag.TensorSpec((1, 1, 4, 2), torch.float64)
CHECKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {
        "mask": ag.Causal("top_left") & ag.Window(2, 0, "top_left"),
        "soft_cap": 2.0,
        "bias": ag.TensorSpec((1, 1, 3, 4), torch.float64),
        "stats": ("lse", "max"),
    },
    "every step": {
        "mask": ag.Window(2, 2, "bottom_right"),
        "soft_cap": 5.0,
        "bias": ag.TensorSpec((1, 2, 1, 4), torch.float64),
        "sinks": ag.TensorSpec((2,), torch.float64),
        "alibi": ag.TensorSpec((2,), torch.float64),
        "kv_lengths": ag.TensorSpec((1,), torch.int64),
        "dropout": 0.3,
        "align": "bottom_right",
        "stats": True,
    },
}


@pytest.mark.parametrize(
    ("case", "fast"), [("every step", False), *((name, True) for name in CHECKED)]
)
def test_derivatives_of_both_orders_and_modes_are_those_by_differences(
    case: str, fast: bool
) -> None:
    """And batches of them, as PyTorch's own tests ask of its operators, by its older vmap."""
    plan = ag.compile(ag.attention(Y, KV, KV, **CHECKED[case]), target=CPU)
    leaves = tuple(leaves_of(plan.graph))
    check: dict[str, Any] = {"fast_mode": fast, "check_batched_grad": fast}
    assert torch.autograd.gradcheck(
        differentiable(plan), leaves, check_forward_ad=True, check_batched_forward_grad=fast,
        **check,
    )  # fmt: skip
    assert torch.autograd.gradgradcheck(
        differentiable(plan), leaves, check_fwd_over_rev=True, **check
    )


def differentiable(plan: ag.Plan) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The outputs of a plan that have a gradient."""

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = plan(*tensors)
        outputs = found if isinstance(found, tuple) else (found,)
        return tuple(x for n, x in enumerate(outputs) if n not in plan.constants)

    return call


def test_the_older_vmap_within_another_is_refused_by_name() -> None:
    leaves = leaves_of(CAPPED.graph)
    o = output_of(CAPPED, leaves)

    def pull(do: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(o, leaves[0], do, retain_graph=True)[0]

    with pytest.raises(ag.GraphError, match=r"within another; torch\.func\.vmap may be nested"):
        _vmap(_vmap(pull))(torch.randn(2, 2, *o.shape, dtype=o.dtype))


def capped(*tensors: torch.Tensor) -> torch.Tensor:
    return output_of(CAPPED, tensors)


def called(*tensors: torch.Tensor) -> Any:
    q, k, v = tensors
    return attention(q, k, v, soft_cap=2.0)


def sized(*tensors: torch.Tensor) -> torch.Tensor:
    return output_of(SIZED, tensors)


def packed(*tensors: torch.Tensor) -> Any:
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    return varlen_attn(q, k, v, starts, starts, 2, 2)


CAPPED = ag.compile(ag.attention(Y, Y, Y, soft_cap=2.0), target=CPU)
N = ag.Dim("n", most=8)
NAMED = ag.TensorSpec((1, 2, N, 2), torch.float64)
SIZED = ag.compile(ag.attention(NAMED, NAMED, NAMED), target=CPU)


@pytest.mark.parametrize("call", [capped, called, sized, packed])
def test_a_jacobian_by_forward_mode_is_the_one_by_reverse_mode(call: Any) -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()
    jacobian: Any = torch.autograd.functional.jacobian  # untyped
    every = jacobian(lambda a: call(a, k, v), q, strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(every, jacobian(lambda a: call(a, k, v), q))


def test_a_jacobian_by_no_numbers_is_empty() -> None:
    k, v = torch.randn(2, 1, 2, 3, 2).unbind()
    q, jacobian = torch.randn(1, 2, 0, 2), cast(Any, torch.autograd.functional.jacobian)
    every = jacobian(lambda a: attention(a, k, v), q, strategy="forward-mode", vectorize=True)
    assert every.shape == (1, 2, 0, 2, 1, 2, 0, 2)


def test_a_hessian_by_forward_mode_is_the_one_by_reverse_mode() -> None:
    def loss(q: torch.Tensor) -> torch.Tensor:
        return capped(q, *x[1:]).square().sum()

    x = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()
    hessian: Any = torch.autograd.functional.hessian  # untyped
    every = hessian(loss, x[0], vectorize=True, outer_jacobian_strategy="forward-mode")
    torch.testing.assert_close(every, hessian(loss, x[0]))


def test_a_jacobian_within_a_dispatch_mode_is_the_one_without() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()
    jacobian: Any = torch.autograd.functional.jacobian  # untyped
    with FlopCounterMode(display=False):
        every = jacobian(lambda a: capped(a, k, v), q, vectorize=True)
    torch.testing.assert_close(every, jacobian(lambda a: capped(a, k, v), q))


def test_a_first_gradient_that_is_recorded_is_right() -> None:
    graph = ag.attention(X, X, X)
    plan = ag.compile(graph, target=CPU)
    leaves, do = leaves_of(graph), torch.randn(X.shape)
    found = torch.autograd.grad(output_of(plan, leaves), leaves, do, create_graph=True)
    assert all(g.requires_grad for g in found)
    check_gradients(graph, leaves, [g.detach() for g in found], do)
