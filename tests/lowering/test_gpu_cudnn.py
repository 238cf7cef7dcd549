"""On a real GPU: cuDNN's plans agree with the formula, train, replay, and go round known errors."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cudnn import offline as cudnn_offline
from attn_graph.lowering.cudnn import plan as cudnn_plan
from attn_graph.lowering.cudnn.backend import versions
from attn_graph.lowering.cudnn.graph import describe_call
from attn_graph.lowering.cudnn.run import Engine, Run
from attn_graph.lowering.problem import sole
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Workspace
from attn_graph.testing import rule
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.capture import replayed
from tests.support.cudnn_graphs import aligned, cudnn_graphs

pytestmark = pytest.mark.gpu
HALF = torch.float16
lengths = st.sampled_from([1, 2, 5, 63, 64, 65, 127, 128, 129, 192, 257, 320])


def checked(
    graph: Graph, tensors: Sequence[torch.Tensor], seed: int = 1
) -> dict[str, torch.Tensor]:
    """o and every gradient of cuDNN's plan on these tensors, each as it should be."""
    plan = ag.compile(graph, backends=("cudnn",))
    (o,) = check_outputs(plan, graph, tensors)
    found = check_gradients(plan, graph, tensors, seed)
    assert all(gradient.isfinite().all() for gradient in found.values())
    return {"o": o, **found}


@given(graph=cudnn_graphs(lengths), seed=seeds)
@settings(max_examples=100)
def test_results_and_gradients_agree_with_the_formula(graph: Graph, seed: int) -> None:
    try:
        found = checked(graph, [*map(aligned, tensors_for(graph, seed, "cuda"))], seed)
    except ag.NoBackendError:
        reject()
    assert {"o", "q", "k", "v"} <= found.keys()


def test_the_table_of_devices_tells_what_cudnn_reads_off_this_one() -> None:
    name = next(
        (n for n in ("h100", "h200", "a100", "b200") if n.upper() in Target.here().name), ""
    )
    if not name:
        pytest.skip(f"{Target.here().name} is not in the table of devices")
    found = json.loads(cudnn_plan.describe_own_gpu())
    told = json.loads(cudnn_offline.describe_target(Target.of(name)))
    matter = set(cudnn_plan.COMPARED) - {"driverVer"}
    assert {key: found[key] for key in matter} == {key: told[key] for key in matter}


def test_a_plan_built_away_from_its_gpu_runs_on_it() -> None:
    x = ag.TensorSpec((2, 4, 192, 64), torch.float16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    simple, here = simplify(graph), Target.here()
    problem = sole(simple)
    assert problem is not None
    call, (backend, frontend) = describe_call(problem), versions(here)
    assert backend is not None
    assert frontend is not None
    pair = backend, frontend
    built = cudnn_plan.build_away(call, cudnn_plan.describe_own_gpu(), here.sm, pair)
    run = Run.of(call, problem, simple, Workspace(), built.workspace, Engine(built.data))
    tensors = tuple(map(aligned, tensors_for(graph, 1, "cuda")))
    rule.expect_outputs(graph, tensors)[0].check(run.forward(*tensors)[0][0])


@pytest.mark.parametrize("M", [64, 192, 320])
@pytest.mark.parametrize("N", [64, 192, 1216])
def test_no_gradient_is_nan_where_all_scores_are_very_low(M: int, N: int) -> None:
    """lse near -120: cuDNN below 9.26 reads past the keys where N leaves half a tile."""
    q, k = (ag.TensorSpec((1, 2, n, 128), torch.bfloat16) for n in (M, N))
    plan = ag.compile(ag.attention(q, k, k, stats=True), backends=("cudnn", "triton"))
    leaves = [
        torch.full(s.shape, value, dtype=s.dtype, device="cuda").requires_grad_()
        for s, value in ((q, 3.25), (k, -3.25), (k, 1.0))
    ]
    o, lse = plan(*leaves)
    assert lse.max() < -88.7
    found = torch.autograd.grad(o, leaves, torch.randn_like(o))
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("N", [64, 129, 1000])
def test_a_single_query_has_gradients(N: int) -> None:
    q, k = (ag.TensorSpec((2, 4, n, 64), torch.float16) for n in (1, N))
    graph = ag.attention(q, k, k)
    found = checked(graph, [*map(aligned, tensors_for(graph, 3, "cuda"))])
    assert [*found] == ["o", "q", "k", "v"]


def test_forward_and_backward_by_hand_are_cudnns() -> None:
    """lse is handed out, and a step uses o alone: by hand as by autograd."""
    x = ag.TensorSpec((2, 4, 256, 64), torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True)
    q, k, v = map(aligned, tensors_for(graph, 1, "cuda"))
    do = torch.randn(x.shape, device="cuda").bfloat16()
    forward, backward = (
        ag.compile(each, backends=("cudnn",)) for each in ag.vjp(graph, cotangents=("o",))
    )
    outputs = forward(q, k, v)
    gradients = backward(q, k, v, *outputs, do)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    o, _ = ag.compile(graph, backends=("cudnn",))(*leaves)
    for found, due in zip(gradients, torch.autograd.grad(o, leaves, do), strict=True):
        assert (found - due).abs().max() <= 2e-2 * due.abs().max()


def test_rows_off_16_bytes_are_refused() -> None:
    x = ag.TensorSpec((1, 2, 64, 64), torch.float16, (2 * 64 * 68, 64 * 68, 68, 1))
    with pytest.raises(ag.NoBackendError, match="multiples of 16 bytes"):
        ag.compile(ag.attention(x, x, x), backends=("cudnn",))


def test_captured_and_replayed_with_one_workspace() -> None:
    x = ag.TensorSpec((2, 8, 500, 64), torch.float16)
    workspace = Workspace()
    plan = ag.compile(
        ag.attention(x, x, x, mask=ag.Causal()), backends=("cudnn",), workspace=workspace
    )
    leaves = [torch.randn(x.shape, device="cuda").half().requires_grad_() for _ in "qkv"]
    do = torch.randn(x.shape, device="cuda").half()

    def step() -> tuple[torch.Tensor, ...]:
        o = plan(*leaves)
        assert isinstance(o, torch.Tensor)
        return (o, *torch.autograd.grad(o, leaves, do))

    results = replayed(step, leaves)
    due = rule.expect_outputs(plan.graph, leaves)[0]
    due.check(results[0])
    again = step()
    for a, b in zip(results, again, strict=True):
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


def steps(backends: Sequence[str], workspace: Workspace, count: int) -> list[float]:
    """The losses of a training in half precision."""
    torch.manual_seed(0)
    q, k, v, target = torch.randn(4, 1, 4, 256, 64, device="cuda").unbind()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    optimizer = torch.optim.Adam(leaves, lr=1e-3)
    x = ag.TensorSpec(q.shape, torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan = ag.compile(graph, backends=backends, workspace=workspace)
    found = []
    for _ in range(count):
        o = plan(*(t.bfloat16() for t in leaves))
        assert isinstance(o, torch.Tensor)
        loss = (o - target).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_thousand_steps_of_training_use_one_arena() -> None:
    workspace = Workspace()
    first = steps(("cudnn",), workspace, 2)
    held = workspace.bytes
    losses = steps(("cudnn",), workspace, 1000)
    assert workspace.bytes == held
    assert losses[:2] == pytest.approx(first, rel=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    assert losses[-1] == pytest.approx(steps(("math",), Workspace(), 1000)[-1], rel=1e-2)


def test_threads_and_streams_each_have_their_handle() -> None:
    """The same plan from several threads at once, each on a stream of its own."""
    from concurrent.futures import ThreadPoolExecutor

    x = ag.TensorSpec((1, 4, 256, 64), torch.float16)
    graph = ag.attention(x, x, x)
    plan = ag.compile(graph, backends=("cudnn",))
    tensors = tuple(map(aligned, tensors_for(graph, 1, "cuda")))
    (due,) = rule.expect_outputs(graph, tensors)

    def call(n: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = plan(*tensors)
            torch.cuda.current_stream().synchronize()
        assert isinstance(found, torch.Tensor)
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(call, range(32)):
            due.check(found)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors are full of NaN, where they would hold what lay there before."""
    empty = torch.empty_strided

    def full(*args: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **options)  # type: ignore[arg-type]
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty_strided", full)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("lengths", [(0, 64, 200), (0, 0, 0), (1, 0, 128)])
@pytest.mark.parametrize("M", [1, 64, 200])
def test_sequences_without_keys_are_zero_and_so_are_their_gradients(
    M: int, lengths: tuple[int, ...]
) -> None:
    """NVIDIA/cudnn-frontend#943 and #944: what is not written would be NaN here."""
    q, k = (ag.TensorSpec((3, 4, n, 64), HALF) for n in (M, 200))
    graph = ag.attention(q, k, k, kv_lengths=ag.TensorSpec((3,), torch.int32))
    tensors = [torch.randn(s.shape, device="cuda").half() for s in (q, k, k)]
    found = checked(graph, [*tensors, torch.tensor(lengths, dtype=torch.int32, device="cuda")])
    for b, length in enumerate(lengths):
        if length == 0:
            assert not any(found[name][b].any() for name in ("o", "q", "k", "v"))
        assert not any(found[name][b, :, length:].any() for name in ("k", "v"))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [slice(0, 1), slice(60, 70), slice(128, 200), slice(None)])
def test_rows_that_a_bias_masks_are_zero_and_so_are_their_gradients(rows: slice) -> None:
    x, bias = ag.TensorSpec((2, 4, 200, 64), HALF), ag.TensorSpec((1, 4, 200, 200), HALF)
    graph = ag.attention(x, x, x, bias=bias)
    tensors = [torch.randn(s.shape, device="cuda").half() for s in (x, x, x, bias)]
    tensors[3][:, :, rows] = -torch.inf
    found = checked(graph, tensors)
    assert not found["o"][:, :, rows].any()
    assert not found["q"][:, :, rows].any()
    assert not found["bias"][:, :, rows].any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mask", [None, ag.Causal(), ag.Causal() & ag.Window(40)])
@pytest.mark.parametrize("size", [(200, 200), (1, 333), (129, 257)])
def test_all_of_a_result_is_written(mask: ag.Mask | None, size: tuple[int, int]) -> None:
    q, k = (ag.TensorSpec((2, 4, n, 64), HALF, layout="bshd") for n in size)
    graph = ag.attention(q, k, k, mask=mask, align="top_left")
    checked(graph, tensors_for(graph, 1, "cuda"))


def test_over_two_to_the_31_elements() -> None:
    """The last batch entry begins past 2^31 elements, in o and in dq as in q."""
    B, M, N, D = 34, 2**19, 64, 128  # 2.28e9 elements of half precision
    free, _ = torch.cuda.mem_get_info()
    need = 12 * B * M * D  # q, o, do and dq, and dq in float32 as cuDNN sums it
    if free < 1.1 * need:
        pytest.skip(f"needs {need} bytes of GPU memory, {free} are free")
    q = torch.zeros(B, 1, M, D, dtype=HALF, device="cuda")
    q[-1].normal_()
    k = torch.randn(B, 1, N, D, device="cuda").half()
    do = torch.zeros_like(q)
    do[-1].normal_()
    leaves = [t.requires_grad_() for t in (q, k, k.clone())]
    specs = [ag.TensorSpec.like(t) for t in leaves]
    o = ag.compile(ag.attention(*specs), backends=("cudnn",))(*leaves)
    assert isinstance(o, torch.Tensor)
    found = torch.autograd.grad(o, leaves, do)
    last = [t.detach()[-1:] for t in leaves]
    small = ag.attention(*map(ag.TensorSpec.like, last))
    rule.expect_outputs(small, last)[0].check(o[-1:])
    dues = rule.expect_gradients(small, last, (do[-1:],))
    for name, gradient in zip("qkv", found, strict=True):
        dues[name].check(gradient[-1:])


def test_calls_without_gradients_give_the_same_by_a_plan_that_stores_no_lse() -> None:
    x = ag.TensorSpec((2, 4, 200, 64), HALF)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan, tensors = ag.compile(graph, backends=("cudnn",)), tensors_for(graph, 1, "cuda")
    (due,) = rule.expect_outputs(graph, tensors)
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.no_grad():
        off = plan(*leaves)
    for o in (off, plan(*tensors), plan(*leaves)):
        assert isinstance(o, torch.Tensor)
        due.check(o)
    assert "by a plan of their own, built" in str(plan.explain())


def test_loading_a_plan_captures_nothing() -> None:
    """On a side stream, whose capture would go on where the frontend's warm-up fails."""
    x = ag.TensorSpec((2, 4, 200, 64), HALF)
    graph = ag.attention(x, x, x)
    ag.compile(graph, backends=("cudnn",))  # built, and stored
    ag.clear_cache()
    tensors = tensors_for(graph, 1, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = ag.compile(graph, backends=("cudnn",))(*tensors)
        assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    assert isinstance(found, torch.Tensor)
    rule.expect_outputs(graph, tensors)[0].check(found)
