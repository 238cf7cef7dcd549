"""Flops of our operators, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

from functools import lru_cache

from attn_graph.plan import Plan

MOST_PLANS = 256


@lru_cache(MOST_PLANS)
def count_flops(plan: Plan) -> int:
    """The flops of a plan, without masked places; masks decided by tensors count as full."""
    return plan.cost().forward.flops


@lru_cache(MOST_PLANS)
def count_gradient_flops(plan: Plan, needs: tuple[bool, ...]) -> int:
    return plan.backward([n for n, need in enumerate(needs) if need]).cost().forward.flops
