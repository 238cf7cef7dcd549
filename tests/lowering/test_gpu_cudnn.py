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
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.run import Engine, Run
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Workspace
from attn_graph.testing import rule
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
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
    case, call = describe_problem(Request(simple, here, Options()))
    backend, frontend = here.cudnn_versions
    assert backend is not None
    assert frontend is not None
    pair = backend, frontend
    built = cudnn_plan.build_away(call, cudnn_plan.describe_own_gpu(), here.sm, pair)
    run = Run.of(case, call, simple, Workspace(), built.workspace, Engine(built.data))
    tensors = tuple(map(aligned, tensors_for(graph, 1, "cuda")))
    rule.expect_outputs(graph, tensors)[0].check(run(*tensors)[0][0])


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
