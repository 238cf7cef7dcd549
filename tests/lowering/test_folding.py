"""Heads that share a key/value head run as rows of one, where nothing tells these rows apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.folding import fold_heads
from attn_graph.lowering.problem import facts_of
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
LENGTHS = ag.TensorSpec((2,), torch.int64)
PADDING = ag.TensorSpec((2, 1, 1, 9), torch.bool)
FOLDED: dict[str, dict[str, Any]] = {  # options with which rows are alike
    "nothing": {},
    "lengths": {"mask": ag.KeyLengths(), "kv_lengths": LENGTHS},
    "padding": {"keep": PADDING},
    "both": {"mask": ag.KeyLengths() & ag.Prefix(7), "kv_lengths": LENGTHS, "keep": PADDING},
    "soft cap": {"soft_cap": 3.0},
    "bias": {"bias": ag.TensorSpec((2, 1, 1, 9), torch.float32), "keep": PADDING},
}
TOLD_APART: dict[str, dict[str, Any]] = {
    "causal": {"mask": ag.Causal("top_left")},
    "mask of rows": {"keep": ag.TensorSpec((2, 1, 3, 9), torch.bool)},
    "mask of heads": {"keep": ag.TensorSpec((2, 6, 1, 9), torch.bool)},
    "bias of rows": {"bias": ag.TensorSpec((1, 1, 3, 9), torch.float32)},
    "bias of heads": {"bias": ag.TensorSpec((1, 6, 1, 9), torch.float32)},
    "slopes": {"alibi": True, "align": "top_left"},
    "sinks": {"sinks": ag.TensorSpec((6,), torch.float32)},
    "dropout": {"dropout": 0.1},
    "segments": {
        "segments": (ag.TensorSpec((2, 3), torch.int64), ag.TensorSpec((2, 9), torch.int64))
    },
}


def make_graph(
    M: int = 3, layout: str = "bhsd", dtype: torch.dtype = torch.float32, **options: Any
) -> ag.Graph:
    """Attention of six heads on two key/value heads and nine keys."""
    q = ag.TensorSpec((2, 6, M, 8), dtype, layout=layout)
    k = ag.TensorSpec((2, 2, 9, 8), dtype, layout=layout)
    return ag.attention(q, k, k, **options)


def folded(graph: ag.Graph) -> tuple[int, ...] | None:
    """The shape of q as the lowerings of CPUs get it; None as it is."""
    folding = fold_heads(facts_of(simplify(graph)))
    return None if folding is None else folding.graph.inputs[0].spec.shape


@given(
    st.sampled_from(sorted(FOLDED)),
    st.sampled_from((1, 3)),
    st.sampled_from(("bhsd", "bshd")),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    st.booleans(),
    st.sampled_from(("math", "torch_sdpa")),
    st.integers(0, 99),
)
def test_results_and_gradients_are_those_of_the_formula(
    name: str, M: int, layout: str, dtype: torch.dtype, stats: bool, backend: str, seed: int
) -> None:
    graph = make_graph(M, layout, dtype, stats=stats, **FOLDED[name])
    plan = ag.compile(graph, target=CPU, backends=(backend, "math"))
    tensors = tensors_for(graph, seed)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed, skip=(None, 0, 1)[seed % 3])


@pytest.mark.parametrize("name", FOLDED)
def test_rows_that_nothing_tells_apart_are_of_one_head(name: str) -> None:
    graph = make_graph(**FOLDED[name])
    assert folded(graph) == (2, 2, 9, 8)
    gradient = fold_heads(facts_of(training_gradient(simplify(graph))))
    assert gradient is not None
    shapes = {i.name: i.spec.shape for i in gradient.graph.inputs}
    assert shapes["do"] == shapes["o"] == (2, 2, 9, 8)
    assert shapes["lse"] == (2, 2, 9)
    assert "heads that share keys are rows of one: q is [2, 2, 9, 8]" in str(
        ag.explain(graph, target=CPU)
    )


@pytest.mark.parametrize("name", TOLD_APART)
def test_rows_that_a_step_tells_apart_stay(name: str) -> None:
    assert folded(make_graph(**TOLD_APART[name])) is None


def test_the_last_query_of_a_cache_sees_all_of_it() -> None:
    """Causal attention of one query means the lengths of keys, and no more."""
    options: dict[str, Any] = {"kv_lengths": LENGTHS, "mask": ag.Causal("bottom_right")}
    graph = make_graph(1, **options)
    assert simplify(graph) == simplify(make_graph(1, mask=ag.KeyLengths(), kv_lengths=LENGTHS))
    assert simplify(make_graph(2, **options)) != simplify(
        make_graph(2, mask=ag.KeyLengths(), kv_lengths=LENGTHS)
    )
    assert folded(graph) == (2, 2, 3, 8)
    assert folded(make_graph(1, mask=ag.Causal("bottom_right"))) == (2, 2, 3, 8)


@pytest.mark.parametrize(
    ("layout", "M", "due"),
    [("bshd", 3, None), ("bshd", 1, (2, 2, 3, 8)), ("bhsd", 3, (2, 2, 9, 8))],
)
def test_q_is_viewed_and_never_copied(layout: str, M: int, due: object) -> None:
    assert folded(make_graph(M, layout)) == due


def test_inputs_may_come_in_any_order() -> None:
    def attend(k: ag.Value, query: ag.Value) -> ag.Value:
        return ag.scores(query, k).softmax()[0].weigh(k)

    q, k = ag.TensorSpec((2, 6, 3, 8), torch.float32), ag.TensorSpec((2, 2, 9, 8), torch.float32)
    graph = ag.graph(attend, k=k, query=q)
    plan = ag.compile(graph, target=CPU)
    assert "heads that share keys are rows of one: query is [2, 2, 9, 8]" in plan.executable.notes
    check_outputs(plan, graph, tensors_for(graph, 0))


def test_heads_with_a_gap_between_them_stay() -> None:
    q = ag.TensorSpec((2, 6, 3, 8), torch.float32, (288, 48, 8, 1))
    k = ag.TensorSpec((2, 2, 9, 8), torch.float32)
    assert folded(ag.attention(q, k, k)) is None


def test_a_call_hands_the_kernel_q_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_graph.kernels import fused_cpu
    from attn_graph.lowering.cpu import sdpa

    addresses: list[int] = []
    flash: Callable[..., Any] = fused_cpu.flash

    def look(q: torch.Tensor, *rest: Any, **more: Any) -> Any:
        addresses.append(q.data_ptr())
        return flash(q, *rest, **more)

    monkeypatch.setattr(sdpa, "flash", look)
    q, k = torch.randn(1, 8, 1, 16), torch.randn(1, 2, 40, 16)
    spec, keys = ag.TensorSpec.like(q), ag.TensorSpec.like(k)
    plan = ag.compile(ag.attention(spec, keys, keys), backends=("torch_sdpa",))
    plan(q, k, k)
    assert addresses == [q.data_ptr()]
