"""Kernels of Triton write results into the caller's tensors; interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import seeds, with_layouts
from attn_graph.testing.tensors import tensors_for
from tests.machine.test_memory import allocated
from tests.support.kernels import CPU, interpreted
from tests.test_declared_layouts import check_laid
from tests.test_outputs import check_written

pytestmark = interpreted
ROWS = ag.TensorSpec((2, 4, 20, 16), torch.float32)
SHARED = ag.TensorSpec((2, 2, 20, 16), torch.float32)
NAMED = ag.TensorSpec((ag.Dim("B", most=4), 4, ag.Dim("M", most=64), 16), torch.float32)
WRITTEN = (
    ag.attention(ROWS, SHARED, SHARED, mask=ag.Causal(), stats=("lse", "max")),
    ag.attention(ROWS, ROWS, ROWS, soft_cap=2.0),
    ag.vjp(ag.attention(ROWS, SHARED, SHARED, mask=ag.Causal()))[1],
)


@pytest.mark.parametrize("graph", WRITTEN)
def test_kernels_write_into_the_callers_tensors_and_nowhere_around(
    graph: ag.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ag.compile(graph, target=CPU, backends=("triton",))
    check_written(plan, tensors_for(graph, 2), 5)
    tensors = tensors_for(graph, 2)
    due = plan(*tensors)
    monkeypatch.setattr(torch, "empty_strided", forbid)
    plan(*tensors, out=due)


@pytest.mark.parametrize("graph", [*WRITTEN[:2], ag.vjp(WRITTEN[1])[1]])
def test_a_captured_call_is_launches_alone(
    graph: ag.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `out=` a call allocates nothing, and a replay of what it launched writes the results of
    other numbers in the same places."""
    plan = ag.compile(graph, target=CPU, backends=("triton",))
    drawn = [tensors_for(graph, seed) for seed in range(2)]
    tensors = tuple(x.clone() for x in drawn[0])
    rooms = tuple(torch.full_like(x, torch.nan) for x in run_plan(plan, tensors))
    out = rooms[0] if plan.single else rooms
    launched: list[tuple[Launch, dict[str, Any]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda *given: launched.append((given[0], {**given[1]})))
        plan(*tensors, out=out)  # warms up: tensors are checked
        launched.clear()
        _, held, most = allocated(lambda: plan(*tensors, out=out))
    assert launched
    assert (held, most) == (0, 0)
    for x, y in zip(tensors, drawn[1], strict=True):
        x.copy_(y)
    for launch, named in launched:
        launch(named)
    for x, y in zip(rooms, run_plan(plan, drawn[1]), strict=True):
        assert torch.equal(x, y)


STARTS = torch.tensor([0, 3, 3, 11, 20])
T = ag.TensorSpec((20, 4, 16), torch.float32)
POOL = ag.TensorSpec((6, 8, 2, 16), torch.float32)
LIKE = ag.TensorSpec.like
RAGGED = (
    ag.attention(T, T, T, q_starts=LIKE(STARTS), mask=ag.Causal(), stats=True),
    ag.attention(ROWS, POOL, POOL, pages=LIKE(torch.tensor([[3, 1], [0, 5]])), stats=True),
)
GRADIENTS = tuple(ag.vjp(graph)[1] for graph in RAGGED)


@settings(max_examples=max(3, settings().max_examples // 8))  # each runs several kernels
@given(graph=with_layouts(st.sampled_from((*WRITTEN, *RAGGED, *GRADIENTS))), seed=seeds)
def test_kernels_write_o_and_gradients_in_declared_layouts(graph: ag.Graph, seed: int) -> None:
    plain = ag.Graph(graph.inputs, graph.eqns, graph.outputs)
    plan, due = (ag.compile(g, target=CPU, backends=("triton",)) for g in (graph, plain))
    tensors = [
        {"q_starts": STARTS, "kv_starts": STARTS, "pages": torch.tensor([[3, 1], [0, 5]])}.get(
            i.name, x
        )
        for i, x in zip(graph.inputs, tensors_for(graph, seed), strict=True)
    ]
    check_laid(plan, due, tuple(tensors))
    notes = "\n".join(plan.executable.notes)
    assert not any(f"{name} is copied" in notes for name in ("o", "dq", "dk", "dv"))
    assert not any(f"{name} may be copied" in notes for name in ("o", "dq", "dk", "dv"))


def test_kernels_of_any_sizes_write_in_declared_layouts() -> None:
    graph = ag.attention(NAMED, NAMED, NAMED, stats=True, outputs={"o": "bhds"})
    plain = ag.Graph(graph.inputs, graph.eqns, graph.outputs)
    plan, due = (ag.compile(g, target=CPU, backends=("triton",)) for g in (graph, plain))
    assert plan.sized is not None
    for B, M in ((1, 3), (2, 5)):
        tensors = tensors_for(due.at(B=B, M=M).graph, M)
        (o, lse), (due_o, due_lse) = run_plan(plan, tensors), run_plan(due, tensors)
        assert torch.equal(o, due_o)
        assert torch.equal(lse, due_lse)
        assert o.mT.is_contiguous()
        check_written(plan, tensors, 1)


def test_kernels_of_any_sizes_write_into_the_callers_tensors() -> None:
    plan = ag.compile(ag.attention(NAMED, NAMED, NAMED), target=CPU, backends=("triton",))
    for B, M in ((1, 3), (2, 5)):
        check_written(plan, tensors_for(plan.at(B=B, M=M).graph, M), 1)


def forbid(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("a result is allocated")
