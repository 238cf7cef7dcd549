"""Builds plans: of a graph, of its gradient, of the graph that autograd records, and for sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from attn_graph.errors import GraphError, NoBackendError
from attn_graph.ir.binding import bind_graph, complete_sizes, largest
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.ir.vjp import (
    backward,
    check_gradient,
    cotangent_specs,
    result_spec,
    saved_specs,
    wanted_inputs,
)
from attn_graph.lowering.backend import Backend
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.imports import load_modules
from attn_graph.plan import Plan
from attn_graph.plan.cache import cache
from attn_graph.plan.pull import generalise, generalise_given
from attn_graph.planner.choose import choose, choose_and_lower
from attn_graph.planner.recipe import Recipe
from attn_graph.planner.recorded import RUNS_KEPT, recorded_graph
from attn_graph.planner.sized import Sized, lower_graph
from attn_graph.planner.tuning import choose_fastest
from attn_graph.planner.views import core_of
from attn_graph.spec import TensorSpec

if TYPE_CHECKING:
    from attn_graph.planner.choose import Refusals
    from attn_graph.planner.explanation import Refusal


def plan_graph(recipe: Recipe, graph: Graph) -> Plan:
    """The plan of a graph. Raises NoBackendError, which searches for fixes when it is read."""
    try:
        return plan_simplified(recipe, simplify(graph))
    except NoBackendError as error:
        error.search = partial(find_fixes, recipe, graph, error.refusals)
        raise


def find_fixes(recipe: Recipe, graph: Graph, refusals: Refusals) -> tuple[Refusal, ...]:
    """The refusals of a graph's forward, with their fixes."""
    search = load_modules("attn_graph.planner.explain").explain_refusals
    told: tuple[Refusal, ...] = search(graph, recipe.target, recipe.options, recipe.among, refusals)
    return told


def plan_simplified(recipe: Recipe, graph: Graph) -> Plan:
    """The plan of a simplified graph, built unless it is known."""
    return cache.plans.get_or_build((graph, recipe), lambda: build(recipe, graph))


def build(recipe: Recipe, graph: Graph) -> Plan:
    """Choose a backend and make a plan of a simplified graph. Raises NoBackendError."""
    target, options, among = recipe.target, recipe.options, recipe.backends
    start = time.perf_counter()
    sized = None
    if graph.symbols:
        if options.tune:
            names = ", ".join(f"{symbol.name}=..." for symbol in graph.symbols)
            raise GraphError(
                "tune=True measures one size, and sizes of the graph have names; "
                f"say compile(compile(graph).at({names}).graph, tune=True)"
            )
        sized = Sized.of(graph, target, options, among)
        choice, executable = sized.most.choice, sized.executable
    else:
        by = choose_fastest if options.tune else choose_and_lower
        choice, executable = lower_graph(graph, target, options, among, by)
    notes = [*executable.notes, *options.notes(graph, target)]
    if not graph.is_gradient:
        notes += [f"runs forward alone: {text}" for text in graph.gradient_problems]
    cache.builds.add(graph, time.perf_counter() - start)
    return Plan(
        graph,
        choice.backend.name,
        choice.cause,
        choice.refusals,
        choice.also,
        evolve(executable, notes=(*notes,)),
        recipe,
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
    graph, recipe = plan.graph, plan.recipe
    check_gradient(graph)
    given = wanted_inputs(graph, None) if wants is None else wants
    dense = [result_spec(graph, i) for i in graph.outputs]
    every = cotangent_specs(graph, graph.differentiable_outputs)
    specs = every if cotangents is None else cotangents
    same = [None if x is None else own for x, own in zip(specs, dense, strict=True)]
    as_found, as_declared = (backward(graph, given, each, saved) for each in (specs, same))
    if as_found != as_declared and loses(recipe, as_found, as_declared):
        return plan_simplified(recipe, as_declared)
    return plan_simplified(recipe, as_found)


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
    own = None if cotangents is None else generalise_given(due, cotangents, sizes)
    pairs = zip(saved_specs(plan.graph).values(), saved or (), strict=False)
    moved = None if saved is None else [generalise(spec, own, sizes) for spec, own in pairs]
    gradient = plan.backward(wants, own, moved)
    named = {symbol.name for symbol in gradient.graph.symbols}
    return gradient.at(**{name: n for name, n in sizes.items() if name in named})


def loses(recipe: Recipe, odd: Graph, plain: Graph) -> bool:
    """True if a layout of cotangents costs the backend that else runs the gradient."""
    best = best_backend(recipe, plain)
    return best is not None and best is not best_backend(recipe, odd)


def best_backend(recipe: Recipe, graph: Graph) -> Backend | None:
    """The planner's choice; None if all backends refuse."""
    try:
        with neutral_state():
            quiet = evolve(recipe.options, on_fallback="ignore")
            exact = bind_graph(graph, largest(graph)) if graph.symbols else graph
            return choose(core_of(exact), recipe.target, quiet, recipe.backends).backend
    except NoBackendError:
        return None


def plan_recorded(plan: Plan) -> Plan | None:
    """The plan that autograd records in place of this one; None: this one."""
    if plan.whole is not None:
        return None
    recipe = plan.recipe
    kept = recorded_graph(plan.graph, recipe.target, recipe.options, recipe.backends, plan.backend)
    return kept and plan_simplified(evolve(recipe, among=RUNS_KEPT), kept)
