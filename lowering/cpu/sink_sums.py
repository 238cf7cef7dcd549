"""Gradients of sinks on a CPU: sums over rows, which no tile computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.gradient_ops import sink_gradient
from attn_graph.lowering.problem import Problem


def sink_bytes(problem: Problem) -> int:
    """What `sink_gradient_of` allocates at one time, in the dtype of scores: the product of do and
    o, each of them where it is narrower, and four numbers a row."""
    grad = problem.grad
    if grad is None or not dict(zip(grad.attention.roles, grad.wants, strict=True)).get("sinks"):
        return 0
    each = problem.E * (3 if problem.dtype != problem.wide else 1) + 4
    return problem.B * problem.H * problem.M * each * problem.wide.itemsize


def sink_gradient_of(grad: AttentionGrad, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """dsinks [H] = sum_bi exp(sink - lse) (dlse - delta), the same bits however lse lies."""
    given = grad.split(operands)
    sinks, lse = grad.attention.split(given.own).sinks, given.lse.contiguous()
    assert sinks is not None
    surplus = torch.zeros_like(lse) if given.dlse is None else given.dlse.clone()
    if given.do is not None:
        surplus -= (given.do.to(lse.dtype) * given.o).sum(-1)
    return sink_gradient(sinks, lse, surplus)
