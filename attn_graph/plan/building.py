"""Builds plans: of a graph, of its gradient, of the graph recorded by autograd, and for sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.errors import GraphError, NoBackendError
from attn_graph.ir.layouts import output_specs
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.binding import bind_graph, complete_sizes, largest
from attn_graph.ir.transforms.vjp import (
    backward,
    check_gradient,
    cotangent_specs,
    saved_specs,
    wanted_inputs,
)
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.imports import require_imports
from attn_graph.plan import Plan
from attn_graph.plan.cache import cache
from attn_graph.plan.pull import generalise, generalise_given
from attn_graph.planner.choose import choose, choose_and_lower
from attn_graph.planner.forms.recorded import RUNS_KEPT, recorded_graph
from attn_graph.planner.forms.sized import Sized
from attn_graph.planner.forms.views import core_of, lower_graph
from attn_graph.rings import HOMES, find, load_present
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.instruments.explanation import Refusal
    from attn_graph.planner.choose import Refusals


def plan_graph(request: Request) -> Plan:
    """The plan of a graph as written. Raises NoBackendError, which searches for fixes when it is
    read."""
    try:
        return plan_simplified(request.with_graph(simplify(request.graph)))
    except NoBackendError as error:
        error.search = partial(find_fixes, request, error.refusals)
        raise


def find_fixes(request: Request, refusals: Refusals) -> tuple[Refusal, ...]:
    """The refusals of a graph's forward, with their fixes, if their ring is there."""
    return tuple(
        fix
        for module in load_present(HOMES["explain_refusals"])
        for fix in module.explain_refusals(request, refusals)
    )


def plan_simplified(request: Request) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return cache.plans.get_or_build(request, lambda: build(request))


def build(request: Request) -> Plan:
    """Choose a backend and make a plan of a simplified graph. Raises NoBackendError."""
    require_imports()
    graph, tune = request.graph, request.options.tune
    start = time.perf_counter()
    sized = None
    if graph.symbols:
        if tune:
            names = ", ".join(f"{symbol.name}=..." for symbol in graph.symbols)
            raise GraphError(
                "tune=True measures one size, and sizes of the graph have names; "
                f"say compile(compile(graph).at({names}).graph, tune=True)"
            )
        sized = Sized.of(request)
        choice, executable = sized.most.choice, sized.executable
    else:
        by = find("choose_fastest") if tune else choose_and_lower
        choice, executable = lower_graph(request, by)
    notes = [*executable.notes, *request.notes()]
    if not graph.is_gradient:
        notes += [f"runs forward alone: {text}" for text in graph.gradient_problems]
    cache.builds.add(graph, time.perf_counter() - start)
    return Plan(
        request,
        choice.backend.name,
        choice.cause,
        choice.refusals,
        choice.also,
        evolve(executable, notes=(*notes,)),
        sized,
    )


def plan_gradient(
    plan: Plan,
    wants: Sequence[int] | None,
    cotangents: Sequence[TensorSpec | None] | None,
    saved: Sequence[TensorSpec] | None,
) -> Plan:
    """`Plan.backward`."""
    if plan.whole is not None:
        return bind_backward(*plan.whole, wants, cotangents, saved)
    graph, request = plan.graph, plan.request
    check_gradient(graph)
    given = wanted_inputs(graph, None) if wants is None else wants
    dense = output_specs(graph)
    every = cotangent_specs(graph, graph.differentiable_outputs)
    specs = every if cotangents is None else cotangents
    same = [None if x is None else own for x, own in zip(specs, dense, strict=True)]
    odd, plain = (request.with_graph(backward(graph, given, each, saved)) for each in (specs, same))
    return plan_simplified(plain if odd != plain and loses(odd, plain) else odd)


def bind_plan(plan: Plan, sizes: Mapping[str, int]) -> Plan:
    """`Plan.at`."""
    given = complete_sizes(plan.graph, "at", sizes)
    if plan.sized is None:
        return plan
    bound = plan.sized.at(tuple(given.values()))
    choice = plan.sized.choice_of(bound)
    return evolve(
        plan,
        request=plan.request.with_graph(bound.graph),
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
    due = output_specs(plan.graph)
    own = None if cotangents is None else generalise_given(due, cotangents, sizes)
    pairs = zip(saved_specs(plan.graph).values(), saved or (), strict=False)
    moved = None if saved is None else [generalise(spec, own, sizes) for spec, own in pairs]
    gradient = plan.backward(wants, own, moved)
    named = {symbol.name for symbol in gradient.graph.symbols}
    return gradient.at(**{name: n for name, n in sizes.items() if name in named})


def loses(odd: Request, plain: Request) -> bool:
    """True if a layout of cotangents costs the backend that else runs the gradient."""
    best = best_backend(plain)
    return best is not None and best is not best_backend(odd)


def best_backend(request: Request) -> Backend | None:
    """The planner's choice; None if all backends refuse."""
    try:
        with neutral_state():
            graph = request.graph
            exact = bind_graph(graph, largest(graph)) if graph.symbols else graph
            quiet = request.with_graph(core_of(exact)).with_options(on_fallback="ignore")
            return choose(quiet).backend
    except NoBackendError:
        return None


def plan_recorded(plan: Plan) -> Plan | None:
    """The plan recorded by autograd in place of this one; None: this one."""
    if plan.whole is not None:
        return None
    kept = recorded_graph(plan.request, plan.backend)
    return kept and plan_simplified(evolve(plan.request, graph=kept, among=RUNS_KEPT))
