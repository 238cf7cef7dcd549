"""Every backend that takes a graph agrees with the formula, forward and backward.

Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.modifiers import Bias
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.schedule import move_tile
from attn_graph.lowering.problem import sole
from attn_graph.lowering.rates import cpu_rates
from attn_graph.masks import needs_of
from attn_graph.testing import formula, rule
from attn_graph.testing.agreement import (
    as_leaves,
    check_gradients,
    check_outputs,
    run_gradients,
    run_plan,
)
from attn_graph.testing.strategies import (
    Shape,
    graphs,
    seeds,
    shapes,
    shuffled_graphs,
    simple_graphs,
)
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.kernels import CPU, problem_of
from tests.support.planning import one_way

NAMES = ("triton",) if CPU.interprets else ("torch_sdpa", "math")
INF = float("inf")
elsewhere = pytest.mark.skipif(CPU.interprets, reason="nothing of Triton's runs in it")

EXAMPLES = settings().max_examples
FEW = 2 * EXAMPLES // 5 if CPU.interprets else EXAMPLES  # gradients are interpreted for seconds
DRAWN = {
    "torch_sdpa": simple_graphs(),
    "math": graphs(),
    "triton": graphs(  # several tiles a side, but few heads: the interpreter is slow
        shapes(most=80, heads=4), st.sampled_from((torch.float32, torch.float16, torch.bfloat16))
    ),
}


def planned(graph: ag.Graph, backend: str = NAMES[-1]) -> ag.Plan:
    """The backend's plan; a graph that it refuses, with reasons, is not drawn."""
    try:
        return ag.compile(graph, target=CPU, backends=(backend,))
    except ag.NoBackendError as error:
        refused(error)


def refused(error: ag.NoBackendError) -> NoReturn:
    """A refusal has reasons; the graph is then not for this test."""
    if not all(reasons for _, reasons in error.refusals):
        raise AssertionError(f"a refusal without a reason: {error}")
    reject()


@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds)
def test_forward_agrees_with_the_formula(backend: str, data: st.DataObject, seed: int) -> None:
    graph = data.draw(DRAWN[backend])
    check_outputs(planned(graph, backend), graph, tensors_for(graph, seed))


@pytest.mark.parametrize("backend", NAMES)
def test_data_of_a_mask_that_keeps_everything_is_taken_and_not_read(backend: str) -> None:
    x, lengths = ag.TensorSpec((1, 1, 1, 16), torch.bfloat16), ag.TensorSpec((1,), torch.int32)
    graph = ag.graph(
        lambda q, k, v, n: (
            ag.scores(q, k).mask(ag.Causal() | ag.KeyLengths(), kv_lengths=n).softmax()[0].weigh(v)
        ),
        q=x,
        k=x,
        v=x,
        n=lengths,
    )
    q, k, v = torch.randn(3, 1, 1, 1, 16, dtype=torch.bfloat16).requires_grad_().unbind()
    o = planned(graph, backend)(q, k, v, torch.tensor([0], dtype=torch.int32))
    assert isinstance(o, torch.Tensor)
    assert torch.equal(o, v)
    (dv,) = torch.autograd.grad(o.sum(), v)
    assert torch.equal(dv, torch.ones_like(v))


@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds)
@settings(max_examples=FEW)
def test_whether_gradients_may_follow_changes_no_bit_of_a_result(
    backend: str, data: st.DataObject, seed: int
) -> None:
    """But where weights are kept for them, and the result is within the rule."""
    graph = data.draw(DRAWN[backend])
    plan, tensors = planned(graph, backend), tensors_for(graph, seed)
    if plan.recorded is not plan:
        assert "keeps the weights" in str(plan.explain())
        check_outputs(plan, graph, as_leaves(tensors))
        return
    without = run_plan(plan, tensors)
    for a, b in zip(without, run_plan(plan, as_leaves(tensors)), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a.stride() == b.stride()


@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds, skipped=st.sampled_from((None, 0, 1)))
@settings(max_examples=FEW)
def test_gradients_agree_with_the_formula(
    backend: str, data: st.DataObject, seed: int, skipped: int | None
) -> None:
    """With dlse fed in; and, where there are two outputs, with either left out."""
    graph = data.draw(DRAWN[backend])
    gradients = gradients_agree(planned(graph, backend), graph, seed, skipped)
    assert gradients.keys() <= {i.name for i in graph.inputs if i.spec.dtype.is_floating_point}


def gradients_agree(
    plan: ag.Plan, graph: ag.Graph, seed: int, skip: int | None = None
) -> dict[str, torch.Tensor]:
    """Compare with the formula; a graph whose gradient is refused, with reasons, is not drawn."""
    try:
        return check_gradients(plan, graph, tensors_for(graph, seed), seed, skip=skip)
    except ag.NoBackendError as error:
        refused(error)


@given(data=st.data(), seed=seeds)
@settings(max_examples=FEW)
def test_steps_in_any_order_agree_with_the_formula(data: st.DataObject, seed: int) -> None:
    """Biases of -inf before a soft cap among them, and more than one of a kind."""
    graph = data.draw(shuffled_graphs())
    if any(i.spec.dtype == torch.float64 for i in graph.inputs):
        reject()  # the rule would want float64 of what float32 scores give
    plan, tensors = planned(graph), tensors_for(graph, seed)
    check_outputs(plan, graph, tensors)
    gradients_agree(plan, graph, seed)


def test_a_bias_of_minus_infinity_stays_so_under_a_soft_cap() -> None:
    x, b = ag.TensorSpec((1, 2, 6, 8), torch.float32), ag.TensorSpec((1, 1, 6, 6), torch.float32)

    def attend(**x: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(x["q"], x["k"]).then(Bias(), x["bias"]).soft_cap(2.0)
        p, lse = s.then(Bias(), x["more"]).soft_cap(1.0).softmax()
        return p.weigh(x["v"]), lse

    graph = ag.graph(attend, q=x, k=x, v=x, bias=b, more=b)
    *tensors, bias, more = tensors_for(graph, 1)
    seen = torch.arange(6) < torch.tensor([[0], [6], [2], [5], [1], [3]])
    tensors += [torch.where(seen, bias, -INF), torch.where(seen.flip(0), more, -INF)]
    plan = planned(graph)
    check_outputs(plan, graph, tensors)
    assert all(x.isfinite().all() for x in check_gradients(plan, graph, tensors, 1).values())


@pytest.mark.parametrize("modified", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gradient_of_sinks_is_that_of_the_formula(dtype: torch.dtype, modified: bool) -> None:
    """By both kinds of math's tiles; with a sink of -inf, where rows see nothing then."""
    x = ag.TensorSpec((2, 3, 6, 8), dtype)
    graph = ag.attention(
        *(x, x, x),
        mask=ag.Causal() & ag.QueryLengths(),
        q_lengths=ag.TensorSpec((2,), torch.int64),
        sinks=ag.TensorSpec((3,), torch.float32),
        soft_cap=3.0 if modified else None,
        stats=modified,
    )
    q, k, v, *_ = tensors_for(graph, 1)
    names = [i.name for i in graph.inputs]
    more = {"q_lengths": torch.tensor([4, 0]), "sinks": torch.tensor([0.5, -INF, 2.0])}
    tensors = (q, k, v, *(more[name] for name in names[3:]))
    cotangents = cotangents_for(graph, 2)
    poisoned = formula.poison_blind_rows(graph, tensors, cotangents, 2)
    found = run_gradients(planned(graph), tensors, poisoned)
    dues = rule.expect_gradients(graph, tensors, cotangents)
    assert dues["sinks"].ref[[0, 2]].abs().min() > 0.1
    assert dues["sinks"].ref[1] == 0
    for name, due in dues.items():
        due.check(found[name])


@elsewhere
@given(graph=graphs(stats=True), seed=seeds)
def test_rows_that_are_said_to_see_a_key_do(graph: ag.Graph, seed: int) -> None:
    problem = problem_of(graph)
    if problem.is_empty or problem.has_blind_rows:
        reject()
    assert (formula.evaluate(graph, tensors_for(graph, seed))[1] > -INF).all()


SEEING = (None, ag.Causal(), ag.Window(5), ag.Window(None, 0), ag.Prefix(1) | ag.Window(-3, 4))
UNSEEING = (ag.Window(-3, 4), ag.Prefix(0), ~ag.Causal(), ag.Keep(), ag.KeyLengths())


@pytest.mark.parametrize("mask", [*SEEING, *UNSEEING])
@pytest.mark.parametrize("size", [8, 10**9])
def test_what_no_row_needs_is_not_paid_for(mask: ag.Mask | None, size: int) -> None:
    """Whether a query may see no key is told by the mask's algebra, for any sizes at once."""
    x, needs = ag.TensorSpec((1, 1, size, 8), torch.float32), needs_of(mask)
    read = {"keep": ag.TensorSpec((1, 1, 1, 1), torch.bool)}
    read |= {"kv_lengths": ag.TensorSpec((1,), torch.int64)}
    specs: dict[str, Any] = {name: read[name] for name in needs}
    problem = problem_of(ag.attention(x, x, x, mask=mask, **specs))
    assert problem.has_blind_rows == (mask in UNSEEING)


BLIND: dict[str, dict[str, Any]] = {  # what leaves some queries without a key: 0 and 3 of 6
    "lengths": {"q_lengths": torch.tensor([3, 0])},
    "keep": {"keep": torch.tensor([0, 1, 1, 0, 1, 1])[None, None, :, None].repeat(2, 1, 1, 6) > 0},
    "bias": {
        "bias": torch.tensor([-INF, 1, 1, -INF, 1, 1])[None, None, :, None].repeat(2, 1, 1, 6)
    },
    "all of a bias": {"bias": torch.full((2, 1, 6, 6), -INF)},
    "segments": {"segments": (torch.tensor([[0, 1, 1, 3, 1, 1]] * 2), torch.ones(2, 6).long())},
}


RUNS = [pytest.param(name, "", id=name) for name in NAMES]
RUNS += [pytest.param("math", "kernel", id="kernel")] * (not CPU.interprets)


@pytest.mark.parametrize(("backend", "way"), RUNS)
@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("stats", [True, False])
def test_rows_that_see_nothing_take_nothing_from_a_loss(
    backend: str, way: str, kind: str, stats: bool
) -> None:
    """`where(lse > -inf, lse**2, 0)` hands NaN back in such rows, as where's own gradient does."""
    given = BLIND[kind]
    if backend == "torch_sdpa" and "bias" not in given:
        pytest.skip("PyTorch's CPU kernel has no such mask")
    options = {n: spec_like(x) for n, x in given.items()}
    x = ag.TensorSpec((2, 2, 6, 8), torch.float32)
    q, k, v = as_leaves(
        tuple(torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(0)))
    )
    named = {n: t for n, t in given.items() if n != "segments"}
    named |= dict(zip(("q_segments", "kv_segments"), given.get("segments", ()), strict=False))
    with one_way(way):
        plan = ag.compile(ag.attention(x, x, x, **options, stats=stats), backends=(backend,))
        o, *rest = run_plan(plan, (q, k, v), **named)
        blind = (o == 0).all(-1)
        loss = torch.where(blind, 0.0, o.square().sum(-1).sqrt()).sum()  # 0 * inf in its gradient
        if rest:
            loss = loss + torch.where(rest[0] > -INF, rest[0] ** 2, 0).sum()
        found = torch.autograd.grad(loss, (q, k, v))
    assert blind.any()
    assert all(g.isfinite().all() for g in found)
    assert (found[0][blind] == 0).all()
    assert blind.all() or all((g != 0).any() for g in found)


def spec_like(x: Any) -> Any:  # Any: tensors, or a pair of them, and specs
    return tuple(map(spec_like, x)) if isinstance(x, tuple) else ag.TensorSpec.like(x)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("scale", [0.0, -1e-46, 1e-40])
@pytest.mark.parametrize("mask", [None, ag.Causal(), ag.Window(3)])
def test_scales_that_float32_takes_for_0_are_right_or_refused(
    backend: str, scale: float, mask: ag.Mask | None
) -> None:
    x = ag.TensorSpec((1, 2, 20, 8), torch.float32)
    graph = ag.attention(x, x, x, mask=mask, scale=scale, stats=True)
    try:
        plan = ag.compile(graph, target=CPU, backends=(backend,))
    except ag.NoBackendError as error:
        reasons = [str(r) for _, against in error.refusals for r in against]
        assert any("scale above 0" in r or "the mask is" in r for r in reasons)
        return
    tensors = tensors_for(graph, 1)
    check_outputs(plan, graph, tensors)
    gradients_agree(plan, graph, 1)


@pytest.mark.parametrize("backend", NAMES)
def test_gradients_come_through_lse_as_through_o(backend: str) -> None:
    x = ag.TensorSpec((1, 2, 20, 8), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True)
    assert gradients_agree(planned(graph, backend), graph, 3).keys() == {"q", "k", "v"}


@pytest.mark.parametrize("backend", NAMES)
def test_weights_made_of_a_large_lse_are_within_the_bound(backend: str) -> None:
    """Scores of some hundreds, one of which outweighs the others: exp(s - lse) is of two roundings
    that the plain formula has not."""
    x = ag.TensorSpec((1, 2, 64, 256 if CPU.interprets else 1024), torch.float32)
    graph = ag.attention(x, x, x, scale=2.5, stats=True)
    assert gradients_agree(planned(graph, backend), graph, 0).keys() == {"q", "k", "v"}


@pytest.mark.parametrize("rows", [20] if CPU.interprets else [20, 150])  # two ways of the CPU
@pytest.mark.parametrize("scale", [None, 1e5])
@pytest.mark.parametrize("cap", [2.0**-126, 1e-37, 2.0**126])
def test_soft_caps_at_the_ends_of_what_is_taken_are_right(
    cap: float, scale: float | None, rows: int
) -> None:
    x = ag.TensorSpec((1, 2, rows, 8), torch.float32)
    graph = ag.attention(x, x, x, soft_cap=cap, scale=scale, stats=True)
    plan = planned(graph)
    check_outputs(plan, graph, tensors_for(graph, 1))
    gradients_agree(plan, graph, 1)


@pytest.mark.parametrize("cap", [2.0**-126, 1e-37, 2.0**126])
def test_gradients_move_by_numbers_under_a_cap_at_the_ends(cap: float) -> None:
    x = ag.TensorSpec((1, 2, 20, 8), torch.float32)
    bent = ag.jvp(ag.vjp(ag.attention(x, x, x, soft_cap=cap))[1], ("q",))
    results = run_plan(ag.compile(bent, target=CPU), tensors_for(bent, 1))
    assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("order", ["vkq", "kqv", "qvk"])
def test_gradients_are_of_their_inputs_in_whatever_order(backend: str, order: str) -> None:
    x = ag.TensorSpec((1, 2, 6, 8), torch.float32)

    def attend(**given: ag.Value) -> ag.Value:
        return ag.scores(given["q"], given["k"]).softmax()[0].weigh(given["v"])

    graph = ag.graph(attend, **dict.fromkeys(order, x))
    assert [i.name for i in graph.inputs] == [*order]
    tensors = tensors_for(graph, 1)
    cotangents = cotangents_for(graph, 1)
    found = run_gradients(planned(graph, backend), tensors, cotangents)
    dues = rule.expect_gradients(graph, tensors, cotangents)
    for name in order:
        dues[name].check(found[name])
    _, back = ag.vjp(graph, wants=["v", "q"])
    plan = ag.compile(back, target=CPU, backends=(backend,))
    forward = ag.compile(ag.vjp(graph)[0], target=CPU, backends=(backend,))
    dv, dq = plan(*tensors, *forward(*tensors), *cotangents)
    dues["v"].check(dv)
    dues["q"].check(dq)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_row_that_sees_nothing_is_zero_and_its_gradients_too(
    backend: str, dtype: torch.dtype
) -> None:
    """By a mask where the backend has one, else by a bias of -inf."""
    x, wide = ag.TensorSpec((2, 2, 6, 8), dtype), torch.float32 if dtype != torch.float64 else dtype
    blind = torch.tensor([0, 3])
    q, k, v = (torch.randn(2, 2, 6, 8, dtype=torch.float64).to(dtype) for _ in range(3))
    bias = torch.zeros(1, 1, 6, 6, dtype=wide)
    bias[:, :, blind] = -INF
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("Triton's kernels compute in float32 at most")
    if backend != "torch_sdpa":
        spec = ag.TensorSpec.like(bias == 0)
        graph = ag.attention(x, x, x, keep=spec, stats=True)
        more = {"keep": bias == 0}
    else:
        graph = ag.attention(x, x, x, bias=ag.TensorSpec.like(bias), stats=True)
        more = {"bias": bias}
    plan = ag.compile(graph, target=CPU, backends=(backend,))
    given = as_leaves((q, k, v))
    o, lse = plan(*given, **more)
    assert (o[:, :, blind] == 0).all()
    assert (lse[:, :, blind] == -INF).all()
    dq, dk, dv = torch.autograd.grad([o, lse], given, [torch.ones_like(o), torch.ones_like(lse)])
    assert (dq[:, :, blind] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize("backend", sorted({*NAMES} - {"torch_sdpa"}))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_and_slopes_are_taken_in_the_dtype_of_q(backend: str, dtype: torch.dtype) -> None:
    x, logits = ag.TensorSpec((2, 4, 6, 8), dtype), ag.TensorSpec((4,), dtype, (3,))
    slopes = ag.TensorSpec((2, 4), dtype)
    graph = ag.attention(x, x, x, mask=ag.Causal(), alibi=slopes, sinks=logits, stats=True)
    assert [i.name for i in graph.inputs] == ["q", "k", "v", "alibi", "sinks"]
    plan, tensors = ag.compile(graph, target=CPU, backends=(backend,)), tensors_for(graph, 1)
    check_outputs(plan, graph, tensors)
    grads = check_gradients(plan, graph, tensors, 2)
    assert grads["alibi"].dtype == grads["sinks"].dtype == dtype


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_causal_mask_survives_scales_that_turn_infinity_around(scale: float) -> None:
    """PyTorch's kernel masks before it scales: it must not be given such a graph."""
    x = ag.TensorSpec((1, 1, 8, 4), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal(), scale=scale, stats=True)
    plan, tensors = ag.compile(graph, target=CPU), tensors_for(graph, 1)
    assert plan.backend == "math"
    assert any("scale above 0" in str(r) for _, reasons in plan.refusals for r in reasons)
    check_outputs(plan, graph, tensors)


@elsewhere
@given(seed=seeds, dtype=st.sampled_from((torch.float32, torch.float16)))
@settings(max_examples=EXAMPLES // 5)
def test_a_nan_stays_in_the_tiles_that_read_it(seed: int, dtype: torch.dtype) -> None:
    """A NaN in key and value 200: rows that may see it have it, other tiles' rows are the same."""
    x = ag.TensorSpec((1, 16, 256, 64), dtype)
    graph = ag.attention(x, x, x, mask=ag.Causal() & ag.Window(3), stats=True)
    plan = ag.compile(graph, target=CPU)
    q, k, v = tensors_for(graph, seed * 8)
    clean = run_plan(plan, (q, k, v))
    k[..., 200, :], v[..., 200, :] = float("nan"), float("nan")
    dirty = run_plan(plan, (q, k, v))
    problem = sole(plan.graph)
    assert problem is not None
    reading = torch.zeros(256, dtype=torch.bool)
    for tile in FusedTiles.plan(problem, cpu_rates(False)).static or ():
        for n in range(tile.repeat):
            (moved,) = move_tile(tile, n * len(tile.rows))
            parts = [range(p.start, p.stop) for p in moved.parts]
            reading[moved.rows.start : moved.rows.stop] |= any(200 in part for part in parts)
    assert reading[200:204].all()
    assert not reading[:128].any()
    for a, b in zip(clean, dirty, strict=True):
        assert b[:, :, 200:204].isnan().all()
        assert torch.equal(a[:, :, ~reading], b[:, :, ~reading])


@pytest.mark.skipif(CPU.interprets, reason="all graphs drawn there are of several tiles a side")
@given(data=st.data())
@settings(max_examples=EXAMPLES // 3)
def test_larger_shapes_agree_too(data: st.DataObject) -> None:
    """Several tiles a side, so that folding, merging and overlapping windows are seen."""
    large = [(1, 2, 1, 300, 300), (2, 4, 2, 130, 290), (1, 2, 2, 290, 130)]
    B, H, G, M, N = data.draw(st.sampled_from(large))
    sizes = st.just(Shape(B, H, G, M, N, 8, data.draw(st.sampled_from((8, 4)))))
    graph = data.draw(graphs(sizes, st.sampled_from((torch.float32, torch.float16))))
    graph = without_dropout(graph)
    plan, tensors = planned(graph), tensors_for(graph, data.draw(seeds))
    check_outputs(plan, graph, tensors)
    cotangents = cotangents_for(plan.graph, 3)
    found_grads = run_gradients(plan, tensors, cotangents)
    for name, due in rule.expect_gradients(graph, tensors, cotangents).items():
        if name in found_grads:
            due.check(found_grads[name])


def without_dropout(graph: ag.Graph) -> ag.Graph:
    """A scalar Philox over 10^5 places takes minutes; test_philox holds the bits of blocks."""
    if any(i.name == "seed" for i in graph.inputs):
        reject()
    return graph
