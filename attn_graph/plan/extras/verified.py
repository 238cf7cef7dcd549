"""Compares a plan's results, and the gradients of a training step, with the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve

from attn_graph.errors import NoBackendError
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import result_spec, statistics
from attn_graph.ir.reference import Verification, compare, evaluate, evaluate_low, in_single_steps
from attn_graph.ir.storage.data_checks import show_seen_pages
from attn_graph.ir.transforms.binding import bind_graph
from attn_graph.ir.transforms.vjp import (
    backward,
    cotangent_specs,
    main_outputs,
    output_names,
    residuals,
    wanted_inputs,
    with_residuals,
)
from attn_graph.plan import Plan

Tensors = Sequence[torch.Tensor]
DRAWS = 3


def verify_plan(
    plan: Plan, tensors: tuple[torch.Tensor, ...], named: Mapping[str, torch.Tensor]
) -> Verification:
    """`Plan.verify`."""
    with torch.no_grad():
        given = plan.arranged(tensors, named)
        plan(*given)  # checks the tensors
        graph = bind_graph(plan.graph, plan.sizes_of(given))
        given = (*show_seen_pages(graph, given),)
        own = compare(graph, given, plan.run(*given)[0], plan.request.options.precision)
        own = evolve(own, names=tuple(output_names(graph)))
        if graph.is_gradient or graph.gradient_problems or not wanted_inputs(graph, None):
            return own
        return append(own, verify_gradients(plan, graph, given))


def append(a: Verification, b: Verification | None) -> Verification:
    """All numbers of both."""
    if b is None:
        return a
    return Verification(a.names + b.names, a.errors + b.errors, a.allowed + b.allowed)


def verify_gradients(plan: Plan, graph: Graph, tensors: Tensors) -> Verification | None:
    """The gradients by every input that has one, as autograd takes them; None if no backend does.

    graph: of these sizes. What is due is the gradient of single steps.
    """
    wants = wanted_inputs(graph, None)
    needs = tuple(n in wants for n in range(len(tensors)))
    cotangents = draw_cotangents(graph, tensors)
    try:
        recorded = plan.recorded
        results = recorded.pull(needs, [*tensors, *recorded.run(*tensors)[1]], cotangents)
    except NoBackendError:
        return None
    specs = cotangent_specs(graph, main_outputs(graph))
    given = [x for x in cotangents if x is not None]
    steps, fused = (backward(x, wants, specs) for x in (in_single_steps(graph), graph))
    also = evaluate_low(fused, [*tensors, *save_low(graph, tensors), *given])
    read = [*tensors, *given]
    # With drawn errors: all of these are exact by luck less often than one.
    random = torch.Generator().manual_seed(0)
    apart = [evaluate_low(steps, read, "ieee", random) for _ in range(DRAWS)]
    own = compare(steps, read, results, also=[also, *apart])
    return evolve(own, names=tuple(f"d{graph.inputs[n].name}" for n in wants))


def save_low(graph: Graph, tensors: Tensors) -> Tensors:
    """The values that a backward reads beside the inputs: o as `evaluate_low` has it, statistics
    right to the last digit, as no kernel rounds them to half precision."""
    whole, known = with_residuals(graph), statistics(graph)
    low, exact = evaluate_low(whole, tensors), evaluate(whole, tensors)
    values = {
        i: right.to(torch.float32) if i in known else x
        for i, x, right in zip(whole.outputs, low, exact, strict=True)
    }
    return [values[i] for i in residuals(graph)]


def draw_cotangents(graph: Graph, tensors: Tensors) -> list[torch.Tensor | None]:
    """The same at each call, laid out as the outputs are; None for lse beside other outputs."""
    random, main = torch.Generator().manual_seed(0), main_outputs(graph)
    drawn = list[torch.Tensor | None]()
    for i in graph.outputs:
        spec = result_spec(graph, i)
        x = torch.empty_strided(
            spec.shape, spec.strides, dtype=spec.dtype, device=tensors[0].device
        )
        drawn.append(
            x.copy_(torch.randn(spec.shape, generator=random, device="cpu")) if i in main else None
        )
    return drawn
