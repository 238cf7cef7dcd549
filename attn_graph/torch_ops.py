"""Plans under PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from attn_graph.plan import Plan

Context = Any  # autograd's own, on which torch puts what it likes


class Call(torch.autograd.Function):
    """A plan's forward, with the plan of its gradient behind it."""

    @staticmethod
    def forward(ctx: Context, plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = plan.run(*tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.plan = plan
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch names ctx as it likes
        ctx: Context, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        found = iter(ctx.plan.pulled(needs, ctx.saved_tensors, grads))
        return (None, *(next(found) if need else None for need in needs))


def differentiable(plan: Plan, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The plan's outputs, differentiable by every input that requires grad."""
    return Call.apply(plan, *tensors)  # type: ignore[no-any-return, no-untyped-call]  # of torch
