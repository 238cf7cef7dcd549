"""Flops of our operators, as `torch.utils.flop_counter.FlopCounterMode` asks for them."""

from __future__ import annotations

from functools import lru_cache

from attn_graph.plan import Plan

MOST_PLANS = 256


@lru_cache(MOST_PLANS)
def count_flops(plan: Plan) -> int:
    """The flops of a plan: those that its masks leave; masks that tensors decide leave all."""
    return plan.cost().forward.flops


@lru_cache(MOST_PLANS)
def count_gradient_flops(plan: Plan, needs: tuple[bool, ...]) -> int:
    """The flops of the gradients of the inputs marked in `needs`."""
    return plan.backward([n for n, need in enumerate(needs) if need]).cost().forward.flops
