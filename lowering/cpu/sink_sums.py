"""Gradients of a call on a CPU: of tiles, and of sinks, a sum over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.gradient_ops import sink_gradient
from attn_graph.lowering.problem import Problem


def sink_bytes(problem: Problem) -> int:
    """Bytes of `sink_gradient_of`, in the dtype of scores: the product of do and o, each of them if
    it is narrower, and five numbers a row; divisors are a sixth."""
    grad = problem.grad
    if grad is None or not dict(zip(grad.attention.roles, grad.wants, strict=True)).get("sinks"):
        return 0
    each = problem.E * (3 if problem.dtype != problem.wide else 1) + 6
    return problem.B * problem.H * problem.M * each * problem.wide.itemsize


def sink_gradient_of(
    grad: AttentionGrad, operands: Sequence[torch.Tensor], divisors: torch.Tensor | None = None
) -> torch.Tensor:
    """dsinks [H] = sum_bi exp(sink - lse) (dlse - delta), with bits independent of lse's strides.

    divisors: [B,H,M], dividing exp(. - lse); None: 1.
    """
    given = grad.split(operands)
    sinks, lse = grad.attention.split(given.own).sinks, given.lse.contiguous()
    assert sinks is not None
    surplus = torch.zeros_like(lse) if given.dlse is None else given.dlse.clone()
    if given.do is not None:
        surplus -= (given.do.to(lse.dtype) * given.o).sum(-1)
    if divisors is not None:
        surplus /= divisors
    return sink_gradient(sinks, lse, surplus)


def run_backward(
    problem: Problem,
    backward: Callable[..., dict[int, torch.Tensor]],
    operands: Sequence[torch.Tensor],
    scratch: Mapping[str, torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The wanted gradients, in the order of the operands. backward: gives gradients by number."""
    grad = problem.grad
    assert grad is not None
    gradients = backward(operands, scratch)
    if grad.attention.sinks:
        place = grad.attention.roles.index("sinks")
        if place not in gradients:
            wanted = grad.wants[place]
            gradients[place] = sink_gradient_of(grad, operands) if wanted else operands[place]
    return [gradients[i] for i, wanted in enumerate(grad.wants) if wanted]
