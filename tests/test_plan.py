"""Plans: caches, memory, workspace, threads, errors, and what is never done in silence."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given

import attn_graph as ag
from attn_graph.errors import HOMES
from attn_graph.extend import Backend, Executable, Options, Store
from attn_graph.ir.reference import compare
from attn_graph.kernels.products import reaches_far
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
PLAIN = evolve(CPU, interprets=False)  # triton refuses, in its interpreter too
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
HALF = ag.TensorSpec((3, 1, 5, 8), torch.float16)


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    ag.clear_cache()


def three(spec: ag.TensorSpec = X, grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(spec.shape, dtype=spec.dtype).requires_grad_(grad) for _ in range(3))


def traced(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
    p, _ = ag.scores(q, k).mask(ag.Window(3) & ag.Causal()).softmax()
    return p.weigh(v)


def test_equal_graphs_built_in_two_ways_share_one_plan() -> None:
    called = ag.attention(X, X, X, mask=ag.Causal("top_left") & ag.Window(3, align="bottom_right"))
    plan = ag.compile(called, target=CPU)
    assert ag.compile(ag.graph(traced, q=X, k=X, v=X), target=CPU) is plan
    assert ag.compile(ag.parse(str(called)), target=CPU) is plan
    info = ag.cache_info()
    assert (info.builds, info.misses, info.hits, info.size) == (1, 2, 1, 1)
    assert ag.compile(called, target=CPU) is plan
    assert ag.cache_info().hits == 2


def test_fifty_steps_of_training_build_two_plans() -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal(), soft_cap=5.0)
    for _ in range(50):
        q, k, v = three(grad=True)
        o = ag.compile(graph, target=CPU)(q, k, v)
        assert isinstance(o, torch.Tensor)
        (o * o).sum().backward()
    assert ag.cache_info().builds == 2


@given(graph=graphs(), seed=seeds)
def test_memory_is_what_the_arena_holds_to_the_byte(graph: ag.Graph, seed: int) -> None:
    """Less, where booleans of the mask decide which of two ways a call takes. Rows of large scores
    may run a second time, which no plan foresees."""
    workspace = ag.Workspace()
    plan = ag.compile(graph, target=CPU, backends=("math",), workspace=workspace)
    tensors = tensors_for(graph, seed)
    may_be_less = any(t.dtype == torch.bool for t in tensors)
    plan(*tensors)
    assume(not any(map(reaches_far, plan.run(*tensors)[1])))
    memory, alone = plan.memory(), plan.executable.workspace
    assert memory.workspace_forward == max(alone, plan.recorded.executable.workspace)
    assert workspace.bytes == alone or (may_be_less and workspace.bytes < alone)
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    outputs = plan(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert sum(o.numel() * o.itemsize for o in outputs) == memory.outputs
    assert [o.requires_grad for o in outputs] == [
        i in plan.graph.differentiable_outputs for i in plan.graph.outputs
    ]
    used = [o for o in outputs if o.requires_grad]
    torch.autograd.backward(used, [torch.ones_like(o) for o in used])
    most = max(memory.workspace_forward, plan_backward(plan.recorded, given))
    assert workspace.bytes == most or (may_be_less and workspace.bytes < most)


def plan_backward(plan: ag.Plan, given: list[torch.Tensor]) -> int:
    """The workspace of the backward plan that autograd used: cotangents are dense, in C order."""
    (used,) = plan.memo.pulls.values()
    return used.plan.executable.workspace


def test_one_arena_of_the_larger_need_serves_many_plans() -> None:
    workspace = ag.Workspace()
    plans = [
        ag.compile(ag.attention(s, s, s, soft_cap=3.0), target=CPU, workspace=workspace)
        for s in (X, ag.TensorSpec((1, 2, 200, 8), torch.float32), HALF)
    ]
    for plan in plans * 2:
        spec = plan.graph.inputs[0].spec
        o = plan(*three(spec, grad=True))
        assert isinstance(o, torch.Tensor)
        o.sum().backward()
    used = [*plans, *(pull.plan for plan in plans for pull in plan.memo.pulls.values())]
    needs = [plan.executable.workspace for plan in used]
    assert workspace.bytes == max(needs) < sum(needs)
    workspace.release()
    assert workspace.bytes == 0


def test_a_step_without_buffers_takes_no_arena() -> None:
    """As one of `generate`, which is a call of PyTorch's kernel on tensors as they lie."""
    workspace, N = ag.Workspace(), ag.Dim("N", most=256)
    q, k = ag.TensorSpec((1, 4, 1, 8), torch.float32), ag.TensorSpec((1, 2, N, 8), torch.float32)
    plan = ag.compile(ag.attention(q, k, k), target=CPU, backends=("math",), workspace=workspace)
    for keys in (3, 200):
        plan(torch.randn(1, 4, 1, 8), *torch.randn(2, 1, 2, keys, 8))
    assert not workspace.arenas


def test_interleaved_plans_do_not_disturb_each_other() -> None:
    """Forward A, forward B, backward A, backward B, in one workspace."""
    graphs_ = [ag.attention(X, X, X, soft_cap=c, mask=ag.Causal()) for c in (2.0, 7.0)]
    a, b = (ag.compile(g, target=CPU) for g in graphs_)
    tensors = three(grad=True)

    def grads(plan: ag.Plan) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(plan), tensors)

    def forward(plan: ag.Plan) -> torch.Tensor:
        o = plan(*tensors)
        assert isinstance(o, torch.Tensor)
        return o.square().sum()

    alone = grads(a), grads(b)
    first, second = forward(a), forward(b)
    together = torch.autograd.grad(first, tensors), torch.autograd.grad(second, tensors)
    for x, y in zip((*alone[0], *alone[1]), (*together[0], *together[1]), strict=True):
        assert torch.equal(x, y)


def test_threads_that_run_one_plan_do_not_meet_in_its_workspace() -> None:
    plan = ag.compile(ag.attention(X, X, X, soft_cap=3.0), target=CPU)
    jobs = [three() for _ in range(32)]
    alone = [plan(*job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: plan(*job), jobs))
    for a, b in zip(alone, together, strict=True):
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        assert torch.equal(a, b)


def test_a_plan_holds_no_tensor_of_a_call() -> None:
    plan = ag.compile(ag.attention(X, X, X, soft_cap=3.0), target=CPU)
    tensors = three(grad=True)
    plan(*tensors)
    refs = [*map(weakref.ref, tensors)]
    del tensors
    assert [ref() for ref in refs] == [None] * 3


def test_a_call_with_other_tensors_lists_every_difference() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    q, k, v = three()
    with pytest.raises(ag.PlanMismatchError) as caught:
        plan(q.half(), k[:1], v.mT.contiguous().mT)
    told = str(caught.value)
    assert "q: expected f32[2, 4, 16, 8], got f16[2, 4, 16, 8]" in told
    assert "k: expected f32[2, 4, 16, 8], got f32[1, 4, 16, 8]" in told
    assert "v: expected f32[2, 4, 16, 8], got f32[2, 4, 16, 8](strides=(512, 128, 1, 16))" in told
    assert "TensorSpec.like" in told


def test_a_call_by_name_says_what_is_missing_unknown_and_double() -> None:
    bias = ag.TensorSpec((1, 1, 16, 16), torch.float32)
    plan = ag.compile(ag.attention(X, X, X, bias=bias), target=CPU)
    q, k, v = three()
    with pytest.raises(ag.PlanMismatchError) as caught:
        plan(q, k, q=q, mask=v)
    assert [d.split(":")[0] for d in caught.value.differences] == ["q", "mask", "v", "bias"]
    with pytest.raises(ag.PlanMismatchError, match="expected 4 tensors"):
        plan(q, k, v, v, v)
    with pytest.raises(ag.PlanMismatchError, match="got 3"):
        plan(q, k, v, bias=3)  # type: ignore[arg-type]  # what a user might try
    with pytest.raises(ag.PlanMismatchError, match="bias: given twice"):
        plan(q, k, v, v, bias=v)
    zeros = torch.zeros(bias.shape)
    o = plan(q, k, v, zeros)
    orders = [
        plan(v=v, k=k, q=q, bias=zeros),
        plan(q, bias=zeros, k=k, v=v),
        plan(q, k, v=v, bias=zeros),
        plan(q=q, k=k, v=v, bias=zeros),
    ]
    for each in orders:
        assert isinstance(o, torch.Tensor)
        assert isinstance(each, torch.Tensor)
        assert torch.equal(each, o)


def test_a_plan_for_another_machine_can_be_read_but_not_called() -> None:
    plan = ag.compile(ag.attention(X, X, X), target="h200", backends=("math",))
    assert "h200 (cuda sm_90)" in str(plan.explain())
    with pytest.raises(ag.PlanTargetError, match="h200"):
        plan(*three())
    with pytest.raises(ag.GraphError, match="known are"):
        ag.compile(ag.attention(X, X, X), target="h2000")


def test_no_backend_gives_every_backend_and_every_reason() -> None:
    graph = ag.attention(X, X, X, soft_cap=3.0, mask=ag.Prefix(3))
    with pytest.raises(ag.NoBackendError) as caught:
        ag.compile(graph, target=CPU, backends=("cudnn", "torch_sdpa"))
    refusals = {name: tuple(map(str, reasons)) for name, reasons in caught.value.refusals}
    assert refusals["cudnn"] == ("needs an NVIDIA GPU, and the target is cpu",)
    assert any("SoftCap" in r for r in refusals["torch_sdpa"])
    assert any("Prefix" in r for r in refusals["torch_sdpa"])
    assert all(r in str(caught.value) for reasons in refusals.values() for r in reasons)
    with pytest.raises(ag.GraphError, match="no backend is named 'flash'"):
        ag.compile(graph, target=CPU, backends=("flash",))


def test_a_workspace_over_the_limit_is_refused_with_both_numbers() -> None:
    graph = ag.attention(X, X, X, soft_cap=3.0)
    need = ag.compile(graph, target=PLAIN).memory().workspace_forward
    assert ag.compile(graph, target=PLAIN, max_workspace=need).backend == "math"
    with pytest.raises(ag.NoBackendError, match=rf"{need:,} bytes.*{need - 1:,} bytes"):
        ag.compile(graph, target=PLAIN, max_workspace=need - 1)
    with pytest.raises(ag.GraphError, match="'1 parsec'"):
        ag.compile(graph, target=CPU, max_workspace="1 parsec")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_verify_judges_scores_beyond_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    """float16 ends at 65504; the scores are float32."""
    x = ag.TensorSpec((1, 2, 16, 64), dtype)
    plan = ag.compile(ag.attention(x, x, x, scale=8.0, stats=True), target=CPU)
    q, k, v = (torch.randn(x.shape, generator=torch.Generator().manual_seed(n)) for n in range(3))
    given = [60 * q.to(dtype), 60 * k.to(dtype), v.to(dtype)]
    found = plan.verify(*given)
    assert plan(*given)[1].abs().max() > 65504
    assert found.ok, found
    assert all(isfinite(x) for x in (*found.errors, *found.allowed))


def test_verify_tells_nan_from_a_number() -> None:
    graph = ag.attention(X, X, X)
    q, k, v = three()
    q[..., 0, 0] = torch.nan
    assert ag.compile(graph, target=CPU).verify(q, k, v).ok
    assert not compare(graph, (q, k, v), [torch.zeros(v.shape)]).ok
    assert not compare(graph, three(), [torch.full(v.shape, torch.nan)]).ok


def test_verify_passes_right_results_and_catches_wrong_ones() -> None:
    graph = ag.attention(X, X, X, stats=True)
    assert ag.compile(graph, target=CPU).verify(*three()).ok

    def lower(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
        right = ag.compile(graph, target=CPU, backends=("math",)).executable.run
        return Executable(lambda *x: (tuple(y + 1e-3 for y in right(*x)[0]), right(*x)[1]))

    wrong = Backend("wrong", lambda *_: (), lower)
    found = ag.compile(graph, target=CPU, backends=(wrong,)).verify(*three())
    assert not found.ok
    assert str(found).startswith("WRONG")


def make_wrong(spoil: Callable[[ag.Graph, list[torch.Tensor]], None]) -> Backend:
    """A backend with the results of math, spoilt."""

    def lower(graph: ag.Graph, target: ag.Target, options: Options) -> Executable:
        right = ag.compile(graph, target=CPU, backends=("math",)).executable.run

        def run(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
            outputs, saved = right(*tensors)
            made = [*outputs]
            spoil(graph, made)
            return made, saved

        return Executable(run)

    return Backend("wrong", lambda *_: (), lower)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("by", [torch.nan, 1e-3])
def test_verify_catches_a_wrong_gradient_of_right_results(name: str, by: float) -> None:
    def spoil(graph: ag.Graph, made: list[torch.Tensor]) -> None:
        if graph.is_gradient:
            made[graph.result_names.index(name)] += by

    plan = ag.compile(ag.attention(X, X, X), target=CPU, backends=(make_wrong(spoil),))
    found = plan.verify(*three())
    assert found.names == ("o", "dq", "dk", "dv")
    wrong = [n for n, e, a in zip(found.names, found.errors, found.allowed, strict=True) if e > a]
    assert wrong == [name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": ag.Causal(), "stats": True, "alibi": True},
        {"soft_cap": 3.0, "sinks": ag.TensorSpec((4,), torch.float32)},
        {"dropout": 0.3, "bias": ag.TensorSpec((1, 4, 8, 1), torch.float32)},
        {"kv_lengths": ag.TensorSpec((2,), torch.int32), "mask": ag.Formula("i >= j")},
    ],
    ids=str,
)
def test_verify_passes_right_gradients(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k = ag.TensorSpec((2, 4, 8, 16), dtype), ag.TensorSpec((2, 2, 8, 16), dtype)
    graph = ag.attention(q, k, k, **options)
    random = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(i.spec.shape, generator=random).to(i.spec.dtype)
        if i.spec.dtype.is_floating_point
        else torch.full(i.spec.shape, 5, dtype=i.spec.dtype)
        for i in graph.inputs
    ]
    with torch.inference_mode():
        found = ag.compile(graph, target=CPU).verify(*tensors)
    assert {"dq", "dk", "dv"} <= {*found.names}
    assert found.ok, found


def test_a_gradient_of_a_second_derivative_is_refused() -> None:
    plan = ag.compile(ag.attention(X, X, X), target=CPU)
    assert plan.vjp.vjp.backend == plan.jvp.vjp.backend == plan.vjp.jvp.backend == "math"
    for second in (plan.vjp.vjp, plan.vjp.jvp, plan.jvp.vjp):
        with pytest.raises(ag.GraphError, match="third derivatives are not built"):
            _ = second.vjp
    with pytest.raises(ag.GraphError, match="jvp of a jvp is not built"):
        _ = plan.jvp.jvp


def test_the_pair_of_vjp_is_what_autograd_runs() -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal(), soft_cap=4.0, stats=True)
    forward, backward = (ag.compile(g, target=CPU) for g in ag.vjp(graph))
    q, k, v = three(grad=True)
    do, dlse = torch.randn(X.shape), torch.randn(X.shape[:3])
    due = torch.autograd.grad(ag.compile(graph, target=CPU)(q, k, v), (q, k, v), (do, dlse))
    with torch.no_grad():
        found = backward(q, k, v, *forward(q, k, v), do, dlse)
    assert all(torch.equal(a, b) for a, b in zip(found, due, strict=True))


def test_a_workspace_grown_while_serving_can_train() -> None:
    """Memory made in inference mode could not be written to outside of it."""
    plan = ag.compile(ag.attention(X, X, X, soft_cap=3.0), target=CPU, workspace=ag.Workspace())
    q, k, v = three(grad=True)
    with torch.inference_mode():
        served = plan(*three())
    o = plan(q, k, v)
    assert isinstance(served, torch.Tensor)
    assert isinstance(o, torch.Tensor)
    o.sum().backward()
    assert q.grad is not None


DOOR: list[tuple[dict[str, Any], str]] = [
    ({"target": 3}, "target 3 is not a Target"),
    ({"max_workspace": 1.5}, "size 1.5 is not a number of bytes from 0 on"),
    ({"max_workspace": -5}, "size -5 is not a number of bytes from 0 on"),
    ({"max_workspace": True}, "size True is not a number of bytes from 0 on"),
    ({"precision": ""}, "precision '' is not known"),
    ({"backends": ()}, "backends= names none; there are cudnn, triton"),
    ({"store": 3}, "store 3 is not a folder, a Store, True or False"),
    ({"store": ""}, "store '' is not a folder"),
]


@pytest.mark.parametrize(("options", "told"), DOOR, ids=str)
def test_what_means_nothing_is_told_at_the_door(options: dict[str, Any], told: str) -> None:
    graph = ag.attention(X, X, X, scale=0.77)
    for ask in (ag.compile, ag.explain):
        with pytest.raises(ag.GraphError, match=re.escape(told)):
            ask(graph, **options)


def test_a_store_may_be_given_by_its_folder(tmp_path: Path) -> None:
    graph = ag.attention(X, X, X, scale=0.78)
    plan = ag.compile(graph, target=CPU, store=Store(tmp_path))
    for folder in (tmp_path, str(tmp_path)):
        assert ag.compile(graph, target=CPU, store=folder) is plan
        assert ag.explain(graph, target=CPU, store=folder).backend == plan.backend
    assert ag.compile(graph, target=CPU, store=False) is not plan


def test_what_is_no_graph_is_told_at_the_door() -> None:
    for ask in (ag.compile, ag.explain):
        with pytest.raises(ag.GraphError, match=r"expected a Graph, got \[1\]; write attn_graph"):
            ask([1])  # type: ignore[call-overload]  # that is the point
    with pytest.raises(ag.GraphError, match=re.escape("wants 'q' is one name; write ('q',)")):
        ag.explain(ag.attention(X, X, X), gradients="q")


def test_a_call_without_gradient_passes_three_functions_of_ours() -> None:
    """Plan.__call__, Plan.run_known, and what the backend lowered to."""
    plan = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target=CPU, backends=("torch_sdpa",))
    tensors = three()
    plan(*tensors)  # the first call checks them in full
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOMES):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        plan(*tensors)
    finally:
        sys.setprofile(None)
    assert len(calls) == 3, calls
