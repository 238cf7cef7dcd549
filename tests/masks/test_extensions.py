"""Masks and modifiers of one's own, written as a stranger would, are computed as they say.

Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.ir.modifiers import Modifier
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import sole
from attn_graph.lowering.rates import cpu_rates
from attn_graph.testing.tensors import tensors_for
from tests.support.extensions import graph_of

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
S = 70 if CPU.interprets else 200  # positions: several tiles, so that folding would show
X = ag.TensorSpec((2, 3, S, 8), torch.float32)
SMALL = ag.TensorSpec((2, 2, 6, 8), torch.float32)
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@final
@frozen
class Exponential(Modifier):
    """exp(s / 4), in memory of its own, as its derivative."""

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        changed: torch.Tensor = (s * 0.25).exp()
        return changed

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return ds * s * 0.25


@final
@frozen
class Squared(Modifier):
    """s^2 / 100, without a derivative."""

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return s**2 * 0.01


@final
@frozen
class Rows(Modifier):
    """Every seventh query scales its scores; nothing is said of what the step depends on."""

    def factor(self, at: ag.extend.Place) -> Any:
        return (at.i % 7 == 0).to(torch.float32) * 2.0 + 0.5

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return s.mul_(self.factor(at))

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return ds.mul_(self.factor(at))


@final
@frozen
class Shifted(Modifier):
    """Every seventh query adds j / 50; nothing is said of what the step depends on."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return s.add_((at.i % 7 == 0).to(torch.float32) * at.j * 0.02)


@final
@frozen
class Heads(Modifier):
    """Head h adds h * j / 100, and reads nothing."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return s.add_(at.h * at.j * 0.01)


@final
@frozen
class Entries(Modifier):
    """The same by batch entry and head, by functions that nobody traces."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        return s + torch.mul(at.b + at.h, at.j) * 0.01


@final
@frozen
class Late(Modifier):
    """Adds 1 / (S - i): infinite just past the last query, where kernels compute as well."""

    additive = True

    def change(self, s: torch.Tensor, at: ag.extend.Place) -> torch.Tensor:
        changed: torch.Tensor = s + 1.0 / (S - at.i).to(torch.float32)
        return changed


CHANGES: dict[Modifier, Change] = {
    Exponential(): lambda s, b, h, i: (s / 4).exp(),
    Squared(): lambda s, b, h, i: s * s * 0.01,
    Rows(): lambda s, b, h, i: s * torch.where(i % 7 == 0, 2.5, 0.5),
    Shifted(): lambda s, b, h, i: s + (i % 7 == 0) * torch.arange(S) * 0.02,
    Heads(): lambda s, b, h, i: s + h * torch.arange(S) * 0.01,
    Entries(): lambda s, b, h, i: s + (b + h) * torch.arange(S) * 0.01,
    Late(): lambda s, b, h, i: s + 1.0 / (S - i),
}
TRACED = [m for m in CHANGES if not (BACKEND == "triton" and isinstance(m, Entries))]
MASK = ag.Window(20, 5)


def by_hand(change: Change, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o in float64, with autograd behind it."""
    b, h, i = (torch.arange(n).reshape([-1] + [1] * (3 - a)) for a, n in enumerate((2, 3, S)))
    s = change(q @ k.mT / 8**0.5, b, h, i)
    j = torch.arange(S)
    kept = (i - 20 <= j) & (j <= i + 5)
    return s.masked_fill(~kept, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("modifier", TRACED, ids=lambda m: type(m).__name__)
def test_a_modifier_of_ones_own_is_computed_as_it_says(modifier: Modifier) -> None:
    graph, tensors = graph_of(modifier, X, MASK), tensors_for(graph_of(modifier, X, MASK), 1)
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    given = [t.requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    due = by_hand(CHANGES[modifier], *exact)
    o, _ = plan(*given)
    assert (o - due).abs().max() < 2e-5
    if isinstance(modifier, Squared):
        return
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    due_grads = torch.autograd.grad(due, exact, cotangent.double())
    for grad, due_grad in zip(torch.autograd.grad(o, given, cotangent), due_grads, strict=True):
        assert (grad - due_grad).abs().max() < 2e-5 * max(1.0, float(due_grad.abs().max()))


@pytest.mark.skipif(BACKEND != "math", reason="tiles are folded along the diagonal on CPUs alone")
def test_a_step_that_depends_on_i_is_not_moved_along_the_diagonal() -> None:
    x = ag.TensorSpec((1, 2, 1024, 8), torch.float32)
    graph = graph_of(Shifted(), x, MASK)
    plan, tensors = ag.compile(graph, target=CPU, backends=("math",)), tensors_for(graph, 1)
    assert plan.verify(*tensors).ok


def test_what_fused_kernels_add_has_the_axes_that_the_definitions_use() -> None:
    for modifier, axes in ((Heads(), "h"), (Entries(), "bh"), (Shifted(), "")):
        problem = sole(
            ag.compile(graph_of(modifier, X, MASK), target=CPU, backends=("math",)).graph
        )
        assert problem is not None
        assert FusedTiles.plan(problem, cpu_rates(False)).axes == axes


def test_a_step_without_a_derivative_runs_forward_and_its_gradient_is_refused_by_name() -> None:
    graph = graph_of(Squared(), SMALL, MASK)
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    given = [t.requires_grad_() for t in tensors_for(graph, 1)]
    o, _ = plan(*given)
    assert isinstance(o, torch.Tensor)
    for attempt in (lambda: o.sum().backward(), lambda: ag.vjp(graph), lambda: plan.vjp):
        with pytest.raises(ag.GraphError, match=r"Squared has no gradient.* no back\(ds, s, at\)"):
            attempt()
    assert "runs forward alone: Squared has no gradient" in str(plan.explain())
    assert ag.explain(graph).backward is None
    assert plan.cost().backward is None
    assert plan.memory().gradients == 0


@final
@frozen
class FirstHeadAll(ag.Mask):
    """Head 0 sees all keys, the others what came before."""

    def keep(self, at: ag.extend.Place) -> Any:
        return (at.h == 0) | (at.j <= at.i)


def test_a_mask_that_one_head_keeps_whole_is_not_simplified_away() -> None:
    graph = ag.attention(X, X, X, mask=FirstHeadAll())
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    assert plan.verify(*tensors_for(graph, 1)).ok
    q, k, v = tensors_for(graph, 1)
    causal = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target=CPU, backends=(BACKEND,))
    o, due = plan(q, k, v), causal(q, k, v)
    assert isinstance(o, torch.Tensor)
    assert isinstance(due, torch.Tensor)
    assert torch.allclose(o[:, 1:], due[:, 1:], atol=2e-5)
