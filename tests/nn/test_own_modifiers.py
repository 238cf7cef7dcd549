"""Modifiers of a user's own under derivatives, met for the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from attrs import frozen
from torch.func import grad, hessian, jvp, vmap

import attn_graph as ag
from attn_graph import Modifier
from attn_graph.extend import Place
from attn_graph.nn.functional import attention

Run = Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]  # Any: a derivative
Q, T = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RUNS: dict[str, Run] = {
    "jvp": lambda f: jvp(f, (Q,), (T,))[1],
    "jvp of grad": lambda f: jvp(grad(f), (Q,), (T,))[1],
    "hessian": lambda f: hessian(f)(Q),
    "vmap of grad": lambda f: vmap(grad(f))(torch.stack([Q, T])),
    "vmap of jvp": lambda f: vmap(lambda q: jvp(f, (q,), (T,))[1])(torch.stack([Q, T])),
}


def new_step() -> Modifier:
    """A step whose class nobody has seen, so that its promises are checked by the call."""

    @final
    @frozen
    class Bounded(Modifier):
        def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
            return s.sigmoid() * 4

        def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
            return ds * s * (s / -4 + 1)

    return Bounded()


@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_met_within_a_transform_for_the_first_time(name: str) -> None:
    """Its promises are checked in forward mode, with tensors of zeros that have no memory."""
    step = new_step()

    def attend(q: torch.Tensor) -> torch.Tensor:
        o = attention(q, q, q, modifiers=(step,))
        assert isinstance(o, torch.Tensor)
        return o.sin().sum()

    def formula(q: torch.Tensor) -> torch.Tensor:
        s = (q @ q.mT / 8**0.5).sigmoid() * 4
        return (s.softmax(-1) @ q).sin().sum()

    torch.testing.assert_close(RUNS[name](attend), RUNS[name](formula))


@final
@frozen
class OfInput(Modifier):
    """Its back takes s for the step's input."""

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.sigmoid() * 4

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        return ds * s.sigmoid() * (1 - s.sigmoid()) * 4


def test_a_back_that_is_not_the_derivative_is_refused() -> None:
    with pytest.raises(ag.GraphError, match="the s of back\\(ds, s, at\\) is the result of change"):
        attention(Q, Q, Q, modifiers=(OfInput(),))


@final
@frozen
class Gated(Modifier):
    """It reads a tensor that it does not train."""

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"gate": ag.Data("h", (torch.float64,))}

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        changed: torch.Tensor = s * at.load("gate", at.h).sigmoid()
        return changed

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        pulled: torch.Tensor = ds * at.load("gate", at.h).sigmoid()
        return pulled


def test_a_tensor_that_a_step_does_not_train_has_no_derivative_and_says_so() -> None:
    """It was 0."""
    gate = torch.randn(2, dtype=torch.float64)

    def attend(q: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        o = attention(q, q, q, modifiers=(Gated(),), gate=gate)
        assert isinstance(o, torch.Tensor)
        return o.sum()

    (dq,) = torch.autograd.grad(attend(q := Q.clone().requires_grad_(), gate), q)
    assert dq.any()
    with pytest.raises(ag.GraphError, match=r"vjp: no derivative by gate: .* in `trains`"):
        attend(Q, gate.clone().requires_grad_()).backward()
    with pytest.raises(ag.GraphError, match=r"jvp: no derivative by gate: .* in `trains`"):
        jvp(lambda g: attend(Q, g), (gate,), (gate,))
