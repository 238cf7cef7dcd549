"""check_backend: compares a backend with the formula on every graph it supports."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attn_graph.compiler import compile
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.plan import Plan
from attn_graph.testing.agreement import check_gradients, check_outputs, search
from attn_graph.testing.strategies import graphs as any_graph
from attn_graph.testing.strategies import seeds, simple_graphs, with_layouts
from attn_graph.testing.tensors import tensors_for


def check_backend(
    backend: Backend, target: Target | str = "cpu", *, graphs: SearchStrategy[Graph] | None = None
) -> None:
    """Raise AssertionError unless a backend is right about every graph that it supports.

    It refuses a graph with reasons, equal ones each time; or it lowers the graph, and outputs and
    gradients agree with the formula: given do, dlse, or both, with NaN in the gaps of tensors and
    in cotangents of rows that see nothing. If it refuses the gradient, `math` computes it from the
    saved results of its forward pass. For a target other than this machine, graphs are planned but
    not run.

    graphs: a strategy; by default any graph and, as often, graphs that most kernels support. It is
    an AssertionError if the backend supports no drawn graph: pass a strategy closer to the backend.
    """
    machine = Target.of(target) if isinstance(target, str) else target
    runs, taken = is_here(machine), list[Graph]()

    def check(graph: Graph, seed: int, skip: int | None) -> None:
        plan = plan_graph(backend, graph, machine)
        if plan is None:
            return
        taken.append(graph)
        if runs:
            check_runs(plan, graph, seed, skip, machine)

    drawn = with_layouts(st.one_of(simple_graphs(), any_graph())) if graphs is None else graphs
    search(check, graph=drawn, seed=seeds, skip=st.sampled_from((None, 0, 1)))
    assert taken, f"{backend.name} supports none of the drawn graphs; pass graphs= that fit it"


def is_here(target: Target) -> bool:
    """True if plans for a target run on this machine."""
    if target.tensors_on == "cpu":
        return True
    return torch.cuda.is_available() and target == Target.here()


def plan_graph(backend: Backend, graph: Graph, target: Target) -> Plan | None:
    """The backend's plan, its gradient by `math` if refused; None if the graph is refused.

    Raises AssertionError for a refusal without reasons, or with different ones the second time.
    """
    simple = simplify(graph)
    once, again = (
        [*map(str, backend.why_not(Request(simple, target, Options())))] for _ in range(2)
    )
    assert once == again, f"{backend.name} gives the reasons {once}, the next time {again}"
    names = (backend,) if backend.name == "math" else (backend, "math")
    plan = compile(graph, target=target, backends=names)
    if plan.backend == backend.name:
        return plan
    ((_, reasons),) = plan.refusals
    texts = [*map(str, reasons)]
    assert all(text.strip() for text in texts or [""]), (
        f"{backend.name} refuses a graph with the reasons {texts}; each must be a clause that "
        f'follows "can\'t: "\n{graph}'
    )
    return None


def check_runs(plan: Plan, graph: Graph, seed: int, skip: int | None, target: Target) -> None:
    """Raise AssertionError unless a plan's outputs and gradients agree with the formula."""
    tensors = tensors_for(graph, seed, target.tensors_on)
    check_outputs(plan, graph, tensors)
    if graph.has_gradient:
        check_gradients(plan, graph, tensors, seed, skip=skip)
