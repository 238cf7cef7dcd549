"""Forward mode and second derivatives agree with PyTorch's derivatives of the formula.

On tiles; run with TRITON_INTERPRET=1, by Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.modifiers import Modifier
from attn_graph.machine.tensors import copy_laid_as
from attn_graph.spec import FLOATS, dense_like
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.strategies import graphs, seeds, shapes
from attn_graph.testing.tangents import (
    Directions,
    expect_gradient_tangents,
    expect_tangents,
)
from attn_graph.testing.tensors import tensors_for
from tests.lowering.test_lowering import planned

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
HALF = (torch.float32, torch.float16, torch.bfloat16)
DRAWN = {  # several tiles a side, but few heads: the interpreter is slow
    "math": graphs(),
    "triton": graphs(shapes(most=80, heads=4), st.sampled_from(HALF)),
}
Tensor = torch.Tensor


def subset(graph: ag.Graph, seed: int) -> tuple[str, ...]:
    """Some of the floating inputs, at least one."""
    names = [i.name for i in graph.inputs if i.spec.dtype in FLOATS]
    chosen = tuple(name for n, name in enumerate(names) if seed >> n & 1)
    return chosen or tuple(names)


def draw_moves(graph: ag.Graph, names: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Tangents of some inputs, laid out as they are declared."""
    random = torch.Generator().manual_seed(seed)
    specs = {i.name: dense_like(i.spec) for i in graph.inputs if i.name in names}
    return {
        name: copy_laid_as(torch.randn(x.shape, generator=random).to(x.dtype), x)
        for name, x in specs.items()
    }


def only_derived(graph: ag.Graph) -> ag.Graph:
    """The same attention, which returns o and lse."""
    fused = ag.vjp(graph)[0]
    first = len(fused.inputs)
    return ag.Graph(fused.inputs, fused.eqns, (first, first + 1))


Compile = Callable[[ag.Graph], ag.Plan]


def check_tangents(compile: Compile, graph: ag.Graph, names: Sequence[str], seed: int) -> None:
    """o, lse and their tangents, along inputs by name, are those of the formula."""
    tensors, attention = tensors_for(graph, seed), only_derived(graph)
    moves = draw_moves(graph, names, seed)
    plan = compile(ag.jvp(attention, names))
    results = run_plan(plan, (*tensors, *moves.values()))
    for x, n in zip(results, plan.graph.outputs, strict=True):
        assert ag.TensorSpec.like(x) == result_spec(plan.graph, n)
    for x, due in zip(results, expect_outputs(attention, tensors), strict=False):
        due.check(x)
    for x, due in zip(results[2:], expect_tangents(attention, tensors, moves), strict=True):
        due.check(x)


@given(graph=DRAWN[BACKEND], seed=seeds)
def test_tangents_agree_with_the_formula(graph: ag.Graph, seed: int) -> None:
    check_tangents(planned, graph, subset(graph, seed), seed)


def check_gradient_tangents(
    compile: Compile,
    graph: ag.Graph,
    wants: Sequence[str],
    names: Sequence[str],
    seed: int,
    given_too: bool,
) -> None:
    """The tangents of gradients by name are those of the formula, along inputs by name; given_too:
    along o and lse as well."""
    tensors, attention = tensors_for(graph, seed), only_derived(graph)
    moves = draw_moves(graph, names, seed)
    forward = compile(ag.jvp(attention, names))
    o, lse, to, tlse = forward(*tensors, *moves.values())
    random = torch.Generator().manual_seed(seed)
    do, tdo, dlse, tdlse = (
        torch.empty_like(x).copy_(torch.randn(x.shape, generator=random)) for x in (o, o, lse, lse)
    )
    _, backward = ag.vjp(attention, wants)
    saved, moved = ("o", "lse"), {**moves, "o": to, "lse": tlse}
    named = {
        **moves,
        **({x: moved[x] for x in saved} if given_too else {}),
        "do": tdo,
        "dlse": tdlse,
    }
    graph_of = ag.jvp(backward, tuple(named))
    plan, given = compile(graph_of), (*tensors, o, lse, do, dlse, *named.values())
    results = run_plan(plan, given)
    due = expect_gradient_tangents(attention, tensors, Directions(moves, do, dlse, tdo, tdlse))
    half = len(graph_of.outputs) // 2
    for x, name in zip(results[half:], wants, strict=True):
        due[name].check(x)


@given(graph=DRAWN[BACKEND], seed=seeds, given_too=st.booleans())
@settings(max_examples=settings().max_examples // (2 if CPU.interprets else 1))
def test_tangents_of_gradients_agree_with_the_formula(
    graph: ag.Graph, seed: int, given_too: bool
) -> None:
    wants, names = subset(graph, seed // 7), subset(graph, seed)
    check_gradient_tangents(planned, graph, wants, names, seed, given_too)


X = ag.TensorSpec((1, 2, 8, 4), torch.float32)


@pytest.mark.parametrize(
    "backend", [b.name for b in ag.extend.BACKENDS if b.name not in ("math", "triton")]
)
def test_the_other_backends_say_that_they_compute_no_tangents(backend: str) -> None:
    target = "cpu" if backend == "torch_sdpa" else "h200"
    forward, backward = ag.vjp(ag.attention(X, X, X))
    for graph in (ag.jvp(forward), ag.jvp(backward), ag.vjp(backward)[1]):
        with pytest.raises(ag.NoBackendError, match="computes no tangents"):
            ag.compile(graph, target=target, backends=(backend,))


EVERYTHING = ag.attention(
    ag.TensorSpec((2, 4, 70, 16), torch.float32),
    *(ag.TensorSpec((2, 2, 70, 16), torch.float32),) * 2,
    mask=ag.Causal(),
    soft_cap=2.0,
    bias=ag.TensorSpec((1, 4, 70, 70), torch.float32),
    sinks=ag.TensorSpec((4,), torch.float32),
    dropout=0.25,
)


def test_tangents_of_gradients_have_the_same_bits_in_every_run() -> None:
    _, backward = ag.vjp(EVERYTHING)
    plan = planned(ag.jvp(backward))
    tensors = tensors_for(plan.graph, 3)
    once, again = (run_plan(plan, tensors) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_triton_computes_second_derivatives_and_explain_counts_them() -> None:
    """Their memory: the sums of do o and their tangents, no more, where programs have no parts."""
    x = ag.TensorSpec((2, 32, 512, 64), torch.bfloat16)
    _, backward = ag.vjp(ag.attention(x, x, x, mask=ag.Causal(), soft_cap=30.0))
    for graph in (ag.jvp(backward), ag.vjp(backward)[1]):
        known = ag.explain(graph, target="h200")
        assert known.backend == "triton"
        assert known.memory is not None
        assert known.memory.workspace_forward == 2 * 4 * 2 * 32 * 512
        text = str(known)
        for kernel in ("forward", "delta", "query_gradient", "key_gradient"):
            assert f"{kernel}: " in text


@final
@frozen
class Quadratic(Modifier):
    """s + s^2 / 100, whose derivatives say nothing of how they are made."""

    hides = False

    def change(self, s: Tensor, at: ag.extend.Place) -> Tensor:
        return s + s * s * 0.01

    def back(self, ds: Tensor, s: Tensor, at: ag.extend.Place) -> Tensor:
        return ds * (1.0 + s * 0.04).sqrt()  # s is the result: 1 + s / 50 of the step's input


def test_triton_names_what_a_modifier_of_ones_own_does_not_define() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        p, lse = ag.scores(q, k).then(Quadratic()).softmax()
        return p.weigh(v), lse

    _, backward = ag.vjp(ag.graph(attend, q=X, k=X, v=X))
    with pytest.raises(ag.NoBackendError, match=r"Quadratic defines no bend\(ds, t, s, at\)"):
        ag.compile(ag.jvp(backward), target="h200", backends=("triton",))
