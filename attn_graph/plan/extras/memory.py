"""The memory of a plan and of its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_graph.planner.memory import sum_memory

if TYPE_CHECKING:
    from attn_graph.machine.sizes import Memory
    from attn_graph.plan import Plan


def sum_needs(plan: Plan, gradient: Plan | None) -> Memory:
    """The memory of a plan's pass and of the gradient."""
    ahead = plan.executable.foreseen
    if gradient is None:
        return sum_memory(plan.graph, ahead)
    behind, recorded = gradient.executable.foreseen, plan.recorded
    ahead = ahead if recorded is plan else ahead.or_more(recorded.executable.foreseen)
    return sum_memory(recorded.graph, ahead, gradient.graph, behind)
