"""Weights that a forward keeps for its backward: by the rule, in known memory, differentiable."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from attn_graph.ir.passes import keeps_weights
from attn_graph.lowering.cpu import tile_grid
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_gradients, check_outputs, run_gradients
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans, prefer_kept_weights

NATIVE = evolve(Target.of("cpu"), native=("bf16",))
DTYPES = st.sampled_from((torch.bfloat16, torch.float32, torch.float64))
BLIND = ~ag.Window(29, 24)  # of 60 queries those from 25 on see nothing, until the 30th
MASKS = [None, ag.Causal(), ag.Window(40), BLIND, ag.Prefix(9) | ag.Causal()]
LAYOUTS = st.sampled_from(("bhsd", "bshd"))


@pytest.fixture(autouse=True)
def every_size_pays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems keep their weights too, in several tiles."""
    monkeypatch.setattr(tile_grid, "FEW_SCORES", 2**8)
    monkeypatch.setattr(tile_grid, "SCORES", 2**12)
    prefer_kept_weights(monkeypatch)
    yield
    forget_plans()


def bare(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype,
    layout: str = "bhsd", mask: ag.Mask | None = None,
) -> ag.Graph:  # fmt: skip
    """Attention under a mask and no more, of these shapes."""
    return ag.attention(*(ag.TensorSpec(x, dtype, layout=layout) for x in (q, k, v)), mask=mask)


def square(
    *sizes: int, dtype: torch.dtype = torch.float32, mask: ag.Mask | None = None
) -> ag.Graph:
    """The same of one shape."""
    return bare(sizes, sizes, sizes, dtype, mask=mask)


def keeps(plan: ag.Plan) -> bool:
    """Whether what autograd records keeps its weights."""
    return keeps_weights(plan.recorded.graph)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("biased", [False, True], ids=["bare", "biased"])
@pytest.mark.parametrize("mask", [*MASKS, ag.KeyLengths()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_keeps_weights_whatever_is_hidden(
    dtype: torch.dtype, mask: ag.Mask | None, biased: bool, shared: bool
) -> None:
    """And the gradient draws nothing: what is dropped is the sign of a weight."""
    by_data = mask is not None and bool(mask.needs)
    M, N, G = (24, 40, 4 // (1 + shared)) if by_data else (60, 50, 4 // (1 + shared))
    q, k, v = (ag.TensorSpec(x, dtype) for x in ((3, 4, M, 24), (3, G, N, 24), (3, G, N, 40)))
    more: dict[str, Any] = {"bias": ag.TensorSpec((3, 1, M, N), dtype)} if biased else {}
    if by_data:
        more["kv_lengths"] = ag.TensorSpec((3,), torch.int32)
    elif mask is not None:
        mask = mask.aligned("top_left")
    graph = ag.attention(q, k, v, mask=mask, dropout=0.3, **more)
    plan = ag.compile(graph, target=NATIVE, backends=("math",))
    assert keeps(plan) == (not biased or dtype == torch.float32)
    tensors = tensors_for(graph, 1)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 1)


def test_few_scores_with_dropout_keep_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few: the gradient would draw again."""
    x = ag.TensorSpec((1, 1, 8, 8), torch.float32)
    monkeypatch.undo()
    forget_plans()
    assert keeps(ag.compile(ag.attention(x, x, x, dropout=0.5)))
    assert not keeps(ag.compile(ag.attention(x, x, x)))


@st.composite
def biased_graphs(draw: st.DrawFn) -> ag.Graph:
    """Attention of scores that a bias is added to, most of sizes that keep weights. Data may hide
    some of them."""
    B, G, r, D, E = (draw(st.integers(1, most)) for most in (3, 3, 2, 24, 24))
    M, N = draw(st.integers(16, 60)), draw(st.integers(1, 2 * (D + E)))
    dtype, layout = draw(st.sampled_from((torch.float32, torch.float64))), draw(LAYOUTS)
    q, k, v = (
        ag.TensorSpec(x, dtype, layout=layout)
        for x in ((B, G * r, M, D), (B, G, N, D), (B, G, N, E))
    )
    axes = draw(st.tuples(*(st.sampled_from((1, n)) for n in (B, G * r, M, N))))
    bias = ag.TensorSpec(axes, draw(st.sampled_from((torch.float32, dtype))))
    mask = draw(st.sampled_from((None, ag.Window(9), ag.Prefix(5) | ag.Window(3, 3))))
    rate = draw(st.sampled_from((0.0, 0.4)))
    aligned = None if mask is None else mask.aligned("top_left")
    flags = draw(st.tuples(*(st.sampled_from((1, n)) for n in (B, G * r, M, N))))
    data: dict[str, Any] = draw(st.sampled_from((
        {}, {"kv_lengths": ag.TensorSpec((B,), torch.int64)},
        {"keep": ag.TensorSpec(flags, torch.bool)},
    )))  # fmt: skip
    return ag.attention(q, k, v, bias=bias, mask=aligned, dropout=rate, **data)


@given(graph=biased_graphs(), seed=seeds, hidden=st.sampled_from((0.0, 0.3, 1.0)))
def test_a_bias_keeps_weights_also_where_it_hides_all_keys_of_some_rows(
    graph: ag.Graph, seed: int, hidden: float
) -> None:
    """hidden: which share of the bias is -inf. do is NaN in rows that see nothing."""
    plan, tensors = ag.compile(graph), [*tensors_for(graph, seed)]
    at = next(n for n, x in enumerate(graph.inputs) if x.name == "bias")
    draw, bias = torch.Generator().manual_seed(seed), tensors[at]
    tensors[at] = bias.masked_fill(torch.rand(bias.shape, generator=draw) < hidden, -torch.inf)
    if keeps(plan):
        check_gradients(plan, graph, tensors, seed)


def test_results_are_the_formulas_however_saved_tensors_come_back() -> None:
    """As hooks give them that keep tensors elsewhere: in another order, and in a larger room."""
    graph = square(2, 3, 40, 16)
    plan, tensors = ag.compile(graph), tensors_for(graph, 1)
    do = torch.randn(2, 3, 40, 16)
    dues = run_gradients(plan, tensors, [do])

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)

    for unpack in (move, lambda x: x.mT.contiguous().mT):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            made = run_gradients(plan, tensors, [do])
        for name, due in dues.items():
            torch.testing.assert_close(made[name], due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cotangent_that_is_one_number_is_no_other(dtype: torch.dtype) -> None:
    graph = square(2, 3, 40, 16, dtype=dtype)
    plan, tensors = ag.compile(graph, target=NATIVE, backends=("math",)), tensors_for(graph, 1)
    made = run_gradients(plan, tensors, [torch.ones((), dtype=dtype).expand(2, 3, 40, 16)])
    dues = run_gradients(plan, tensors, [torch.ones(2, 3, 40, 16, dtype=dtype)])
    assert all(torch.equal(made[name], due) for name, due in dues.items())


def biased() -> ag.Graph:
    """A small attention with a bias of all batch entries."""
    x = ag.TensorSpec((2, 2, 5, 4), torch.float64)
    return ag.attention(x, x, x, bias=ag.TensorSpec((1, 2, 5, 5), torch.float64))


@pytest.mark.parametrize(
    "graph",
    [
        *(square(2, 2, 5, 4, dtype=torch.float64, mask=x) for x in (None, ~ag.Window(1, 2))),
        biased(),
    ],
    ids=["bare", "masked", "biased"],
)
def test_all_derivatives_are_those_of_differences(graph: ag.Graph) -> None:
    plan = ag.compile(graph)
    assert keeps(plan)
    leaves = [x.requires_grad_() for x in tensors_for(graph, 3)]
    checks = {"check_batched_grad": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(plan, leaves, **checks)
    assert torch.autograd.gradgradcheck(plan, leaves)


def test_a_gradient_of_some_inputs_is_that_of_all() -> None:
    graph = square(2, 3, 40, 16)
    plan, (q, k, v) = ag.compile(graph), tensors_for(graph, 1)
    do = torch.randn(2, 3, 40, 16)
    dues = run_gradients(plan, (q, k, v), [do])
    leaf = k.clone().requires_grad_()
    o = plan(q, leaf, v)
    assert isinstance(o, torch.Tensor)
    (dk,) = torch.autograd.grad(o, leaf, do)
    assert torch.equal(dk, dues["k"])


def test_memory_counts_the_weights_that_are_saved() -> None:
    graph = square(2, 3, 40, 16)
    plan = ag.compile(graph)
    saved: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    leaves = [x.requires_grad_() for x in tensors_for(graph, 1)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = plan(*leaves)
    assert isinstance(o, torch.Tensor)
    inputs = {x.data_ptr() for x in leaves}
    kept = [x for x in saved if x.data_ptr() not in inputs]
    assert [x.shape for x in kept] == [(2, 3, 40, 40)]
    assert plan.memory().saved == kept[0].nbytes + o.nbytes


def test_explaining_a_graph_says_what_its_plan_does() -> None:
    for graph in (square(2, 3, 40, 16), square(2, 3, 40, 16, mask=ag.Causal())):
        plan = ag.compile(graph)
        assert str(ag.explain(graph)) == str(plan.explain())
        assert ag.explain(graph).memory == plan.memory()
        assert "keeps the weights for the backward, 37.5 KiB" in str(plan.explain())
        forward = ag.explain(graph, gradients=())
        assert not any("keeps the weights" in note for note in forward.notes)


def test_no_weights_are_kept_where_they_are_more_bytes_than_the_operands() -> None:
    assert keeps(ag.compile(square(1, 2, 64, 16)))
    assert not keeps(ag.compile(square(1, 2, 65, 16)))


def test_no_weights_are_kept_where_bytes_bits_or_backends_were_named() -> None:
    graph = square(2, 3, 40, 16)
    assert keeps(ag.compile(graph))
    assert keeps(ag.compile(graph, backends=("math",)))
    others = (
        ag.compile(graph, max_workspace="1GiB"),
        ag.compile(graph, deterministic=True),
        ag.compile(graph, backends=("torch_sdpa",)),
        ag.compile(graph, avoid=("math",)),
        ag.compile(square(2, 3, 40, 16, dtype=torch.float16)),
    )
    assert not any(map(keeps, others))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not keeps(ag.compile(graph))


def test_sizes_that_have_names_keep_no_weights() -> None:
    B = ag.Dim("B", most=4)
    x = ag.TensorSpec((B, 3, 40, 16), torch.float32)
    plan = ag.compile(ag.attention(x, x, x))
    assert not keeps(plan)
    assert not keeps(plan.at(B=2))
    assert str(ag.explain(plan.graph, B=2)).count("keeps the weights") == 0


def test_a_plan_that_keeps_weights_pickles() -> None:
    plan = ag.compile(square(2, 3, 40, 16))
    assert pickle.loads(pickle.dumps(plan.recorded)).graph == plan.recorded.graph
    assert keeps(pickle.loads(pickle.dumps(plan)))


def test_what_autograd_does_not_record_runs_as_before() -> None:
    graph = square(2, 3, 40, 16)
    plan, tensors = ag.compile(graph), tensors_for(graph, 1)
    o = plan(*tensors)
    assert plan.memo.recorded is None
    assert isinstance(o, torch.Tensor)
    assert torch.equal(o, plan.infer(*tensors)[0][0])
