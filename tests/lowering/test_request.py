"""One request travels, not its parts; and users' functions of the parts still work."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from hypothesis import given

import attn_graph as ag
from attn_graph.extend import Backend, Executable, Options, Reason, RefusedError, Request
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu.math import BACKEND as MATH
from attn_graph.lowering.problem import Facts
from attn_graph.planner.choose import choose, permitted_backends
from attn_graph.planner.forms.sized import Sized
from attn_graph.testing.strategies import graphs
from tests.support.sources import source_files, tree_of

CPU = ag.Target.of("cpu")
X = ag.TensorSpec((1, 2, 4, 8), torch.float32)
PARTS = {"graph", "target", "options"}
HOME = "attn_graph.lowering.request"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return {each.arg for each in every}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node


def test_no_function_takes_a_request_apart_in_its_signature() -> None:
    apart = [
        f"{module}, line {node.lineno}"
        for module, path in source_files("*.py").items()
        if module != HOME
        for node in functions(tree_of(path))
        if parameters(node) >= PARTS
    ]
    assert not apart, f"say `request` for graph, target and options: {apart}"


@given(graph=graphs())
def test_a_request_is_a_value(graph: ag.Graph) -> None:
    request = Request(simplify(graph), CPU, Options(), ("math",))
    assert request.with_graph(request.graph) is request
    assert hash(request) == hash(evolve(request))
    again = pickle.loads(pickle.dumps(request))
    assert (again.graph, again.target, again.among) == (request.graph, CPU, ("math",))
    assert hash(again.graph) == hash(request.graph)


def test_a_request_with_other_parts_keeps_the_rest() -> None:
    request = Request(ag.attention(X, X, X), CPU, Options(deterministic=True), ("math",))
    other = request.with_graph(ag.attention(X, X, X, mask=ag.Causal()))
    assert (other.target, other.options, other.among) == (CPU, request.options, ("math",))
    tf32 = request.with_options(precision="tf32")
    assert (tf32.graph, tf32.among, tf32.options.deterministic) == (request.graph, ("math",), True)


def test_the_backends_of_a_request_are_looked_up_late() -> None:
    own = Backend("own", lambda request: (), MATH.lower)
    request = Request(simplify(ag.attention(X, X, X)), CPU, Options(), (own, "math"))
    assert permitted_backends(request) == (own, MATH)
    assert permitted_backends(evolve(request, among=None)) is None
    assert choose(request).backend is own
    with pytest.raises(ag.GraphError, match="no backend is named 'maths'"):
        choose(evolve(request, among=("maths",)))


def test_a_plan_of_many_sizes_says_so_to_every_backend() -> None:
    """A backend with plans of one size would build one for each call otherwise."""
    B = ag.Dim("B", most=8)
    x = ag.TensorSpec((B, 2, 4, 8), torch.float32)
    made = Sized.of(Request(simplify(ag.attention(x, x, x)), CPU, Options(), ("math",)))
    assert made.request.options.resized
    assert made.quiet.options.resized


# Backends written before there were requests

GIVEN = Request(ag.attention(X, X, X), CPU, Options(), ("math",))
Function = Callable[..., Any]


def three(graph: object, target: object, options: object) -> object:
    return graph, target, options


def by_default(graph: object, target: object = None, options: object = None) -> object:
    return graph, target, options


def rest(graph: object, *others: object) -> object:
    return (graph, *others)


class Method:
    def three(self, graph: object, target: object, options: object) -> object:
        return graph, target, options


OLD = (three, by_default, rest, Method().three, lambda *parts: parts, lambda g, t, o: (g, t, o))
FIELDS = ("why_not", "lower", "foresees", "variants", "device_test", "lower_any")


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("function", OLD)
def test_a_function_of_three_arguments_gets_the_parts_of_a_request(
    name: str, function: Function
) -> None:
    given: dict[str, Any] = {"why_not": three, "lower": three, name: function}
    made = Backend("own", **given)
    assert getattr(made, name)(GIVEN) == (GIVEN.graph, GIVEN.target, GIVEN.options)
    assert getattr(evolve(made, name="other"), name)(GIVEN)[2] is GIVEN.options


@pytest.mark.parametrize("name", FIELDS)
def test_a_function_of_one_argument_gets_the_request(name: str) -> None:
    given: dict[str, Any] = {"why_not": three, "lower": three, name: lambda request: request}
    made = Backend("own", **given)
    assert getattr(made, name)(GIVEN) is GIVEN


def test_every_function_of_a_backend_takes_a_request() -> None:
    """A new field of Backend has to say whether users' old functions serve it."""
    converted = {x.name for x in attrs.fields(Backend) if x.converter is not None}
    assert converted == {*FIELDS}
    assert {x.name for x in attrs.fields(Backend)} - converted == {
        "name",
        "price",
        "no_device",
        "one_size",
        "lays",
        "real",
    }


def test_backends_of_equal_old_functions_are_equal() -> None:
    assert Backend("own", three, three) == Backend("own", three, three)
    assert hash(Backend("own", three, three)) == hash(Backend("own", three, three))
    assert Backend("own", three, three) != Backend("own", three, by_default)


def test_an_old_backend_runs() -> None:
    def why_not(graph: ag.Graph, target: ag.Target, options: Options) -> Iterator[Reason]:
        if target.kind != "cpu" or len(graph.eqns) != 1 or graph.is_gradient:
            yield Reason("cpu", "runs one attention on CPUs", f"this is {graph} on {target}")

    def lower(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
        (eqn,) = graph.eqns

        def run(*x: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
            results = eqn.op.run(*(x[i] for i in eqn.args))
            return [results[i - len(x)] for i in graph.outputs], results[:2]

        return Executable(run, notes=(f"deterministic: {options.deterministic}",))

    old = Backend("old", why_not, lower)
    plan = ag.compile(ag.attention(X, X, X), backends=(old, "math"), deterministic=True)
    assert plan.backend == "old"
    assert "deterministic: True" in plan.executable.notes
    tensors = torch.randn(3, *X.shape).unbind()
    assert plan.verify(*tensors)
    assert ag.explain(plan.graph, backends=(old,), gradients=()).backend == "old"


@given(graph=graphs())
def test_equal_graphs_share_what_is_known_of_them(graph: ag.Graph) -> None:
    """Whatever the options: a question is answered once, and no answer is part of a value."""
    first, second = (Request(simplify(graph), CPU, Options(x)) for x in (False, True))
    assert first.facts is second.facts
    seen: list[ag.Graph] = []

    def count(facts: Facts, more: int) -> int:
        seen.append(facts.graph)
        return len(facts.graph.eqns) + more

    counts = [x.facts.once(count, more) for x in (first, second) for more in (0, 1)]
    assert counts == [len(first.graph.eqns) + more for _ in range(2) for more in (0, 1)]
    assert seen == [first.graph] * 2
    again = pickle.loads(pickle.dumps(first))
    assert again.graph == first.graph
    assert not again.facts.answers.keys() - first.facts.answers.keys()


def test_a_reason_that_shows_in_lowering_says_so() -> None:
    late, early = RefusedError("needs luck").reasons[0], Reason.of("needs luck")
    assert late == early
    assert (late.late, early.late) == (True, False)
