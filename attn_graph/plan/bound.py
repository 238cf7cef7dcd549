"""Plans with named sizes, bound to numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.ir.binding import complete_sizes
from attn_graph.ir.vjp import result_spec, saved_specs
from attn_graph.planner.handed_back import generalise_all, generalise_given
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.plan import Plan


def bind_plan(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """`Plan.at`."""
    given = complete_sizes(plan.graph, "at", sizes)
    if plan.sized is None:
        return plan
    bound = plan.sized.at(tuple(given.values()))
    choice = plan.sized.choice_of(bound)
    return evolve(
        plan,
        graph=bound.graph,
        backend=choice.backend.name,
        refusals=choice.refusals,
        also=choice.also,
        executable=bound.executable,
        sized=None,
        whole=(plan, given),
    )


def bind_backward(
    plan: Plan,
    sizes: Mapping[str, int],
    wants: Sequence[int] | None,
    cotangents: Sequence[TensorSpec | None] | None,
    saved: Sequence[TensorSpec] | None,
) -> Plan:
    """`Plan.backward` for sizes as numbers, by the gradient's own plan."""
    due = [result_spec(plan.graph, i) for i in plan.graph.outputs]
    lies = [*saved_specs(plan.graph).values()]
    own = None if cotangents is None else generalise_given(due, cotangents, sizes)
    moved = None if saved is None else generalise_all(lies, saved, sizes)
    gradient = plan.backward(wants, own, moved)
    named = {symbol.name for symbol in gradient.graph.symbols}
    return gradient.at(**{name: n for name, n in sizes.items() if name in named})
