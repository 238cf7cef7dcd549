"""On a real GPU: streams, captured graphs and full memory, and what memory held before a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

import attn_graph as ag
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.testing import rule
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.tensors import cotangents_for, tensors_for
from benchmarks.gpu.device import capture_step
from tests.support.cudnn_graphs import aligned

pytestmark = pytest.mark.gpu
BACKENDS = ("cudnn", "triton", "math")
X = ag.TensorSpec((2, 8, 512, 64), torch.float16)
CAUSAL = ag.attention(X, X, X, mask=ag.Causal())
STREAMS = 2
Leaves = Sequence[torch.Tensor]


def plan_of(graph: ag.Graph, backend: str, workspace: ag.Workspace) -> ag.Plan:
    """Both passes by one backend. Skips where it takes either not."""
    try:
        plan = ag.compile(graph, backends=(backend,), workspace=workspace)
        _ = plan.vjp
    except ag.NoBackendError as error:
        pytest.skip(str(error))
    return plan


def leaves_for(graph: ag.Graph, seed: int) -> Leaves:
    tensors = map(aligned, tensors_for(graph, seed, "cuda"))
    return [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]


def step(plan: ag.Plan, leaves: Leaves, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """o and the gradients by a fixed cotangent."""
    o = plan(*leaves)
    assert isinstance(o, torch.Tensor)
    (do,) = cotangents_for(plan.graph, seed, "cuda")
    return (o, *torch.autograd.grad(o, [t for t in leaves if t.requires_grad], do))


def check(graph: ag.Graph, leaves: Leaves, results: Sequence[torch.Tensor], seed: int = 0) -> None:
    """By the formula, each result by the accuracy rule."""
    tensors = [t.detach() for t in leaves]
    (do,) = cotangents_for(graph, seed, "cuda")
    gradients = rule.expect_gradients(graph, tensors, (do,))
    names = [i.name for i, t in zip(graph.inputs, leaves, strict=True) if t.requires_grad]
    dues = [rule.expect_outputs(graph, tensors)[0], *(gradients[name] for name in names)]
    for due, found in zip(dues, results, strict=True):
        due.check(found)


def poison(workspace: ag.Workspace) -> None:
    """Fill the memory that is handed out next with bytes of 255, which are NaN in every dtype."""
    bytes_ = max(workspace.bytes, 2**20)
    scratch = Scratch({"room": Buffer((bytes_,), torch.uint8)})
    with workspace.lease(scratch, torch.device("cuda", 0)) as rooms:
        rooms["room"].fill_(255)
    sizes = (512, 2**12, 2**15, 2**18, 2**20 - 512, 2**21, 2**23, 2**25)
    held = [torch.full((n,), 255, dtype=torch.uint8, device="cuda") for n in sizes * 8]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_that_was_not_written(backend: str) -> None:
    """Rows past the lengths, masked keys and all scratch: NaN there before the call shows nowhere.

    Without a single key too: kv_lengths of 0.
    """
    lengths = ag.TensorSpec((2,), torch.int32)
    graph = ag.attention(X, X, X, q_lengths=lengths, kv_lengths=lengths)
    workspace = ag.Workspace()
    plan = plan_of(graph, backend, workspace)
    q, k, v = leaves_for(CAUSAL, 1)
    few, none = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([511, 3], [200, 0]))
    leaves = (q, k, v, few, none)
    for _ in range(3):
        poison(workspace)
        check(graph, leaves, step(plan, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_a_bias_masks_whole_give_zeros(backend: str) -> None:
    bias = ag.TensorSpec((1, 1, 512, 512), torch.float16)
    graph = ag.attention(X, X, X, bias=bias)
    workspace = ag.Workspace()
    plan = plan_of(graph, backend, workspace)
    q, k, v = leaves_for(CAUSAL, 1)
    b = torch.zeros(bias.shape, dtype=torch.float16, device="cuda")
    b[:, :, ::3] = -torch.inf
    leaves = (q, k, v, b.requires_grad_())
    poison(workspace)
    check(graph, leaves, step(plan, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_share_one_arena_on_each_stream(backend: str) -> None:
    """Autograd runs the backward in a thread of its own, on the stream of the forward."""
    workspace = ag.Workspace()
    plan = plan_of(CAUSAL, backend, workspace)
    leaves = leaves_for(CAUSAL, 1)
    torch.cuda.synchronize()
    step(plan, leaves)
    (pull,) = plan.memo.pulls.values()
    need = max(plan.executable.workspace, pull.plan.executable.workspace)
    assert workspace.bytes == need > 0
    with torch.cuda.stream(torch.cuda.Stream()):
        step(plan, leaves)
    assert workspace.bytes == 2 * need
    thread = threading.Thread(target=workspace.release)
    thread.start()
    thread.join()
    assert workspace.bytes == 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_on_side_streams_do_not_disturb_each_other(backend: str) -> None:
    plan = plan_of(CAUSAL, backend, ag.Workspace())
    jobs = [leaves_for(CAUSAL, seed) for seed in range(STREAMS)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in jobs]
    results: list[tuple[torch.Tensor, ...]] = []
    for _ in range(20):
        results = []
        for stream, leaves in zip(streams, jobs, strict=True):
            with torch.cuda.stream(stream):
                results.append(step(plan, leaves))
    torch.cuda.synchronize()
    for leaves, each in zip(jobs, results, strict=True):
        check(CAUSAL, leaves, each)


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_graphs_may_be_replayed_at_once(backend: str) -> None:
    """Two graphs that one thread captured, on two streams, while a third stream runs the plan.

    The workspace is released before, and a thread that captures ends.
    """
    workspace = ag.Workspace()
    plan = plan_of(CAUSAL, backend, workspace)
    jobs = [leaves_for(CAUSAL, seed) for seed in range(STREAMS + 1)]
    graphs: list[tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]] = []

    def capture() -> None:
        graphs.extend(capture_step(lambda x=leaves: step(plan, x)) for leaves in jobs[1:])  # type: ignore[misc]  # bound now

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    workspace.release()
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    eager = step(plan, jobs[0])
    for _ in range(50):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = step(plan, jobs[0])
    torch.cuda.synchronize()
    for leaves, results in zip(jobs, (eager, *(r for _, r in graphs)), strict=True):
        check(CAUSAL, leaves, results)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_calls_write_into_the_callers_tensors(backend: str, gradient: bool) -> None:
    """In layouts unlike q's, with other numbers in the inputs at each replay. A capture allocates
    nothing for results."""
    graph = ag.attention(X, X, X, mask=ag.Causal(), outputs={"o": "bshd"})
    _, back = ag.vjp(graph, outputs=dict.fromkeys(("dq", "dk", "dv"), "sbhd"))
    plan = plan_of(graph, backend, ag.Workspace())
    plan = plan.plan_simplified(back) if gradient else plan
    jobs = [(*map(aligned, tensors_for(plan.graph, seed, "cuda")),) for seed in range(3)]
    inputs = [t.clone() for t in jobs[0]]
    due = [run_plan(plan, job) for job in jobs]
    rooms = tuple(torch.empty_like(x).fill_(torch.nan) for x in due[0])
    captured, _ = capture_step(lambda: plan(*inputs, out=rooms[0] if plan.single else rooms))
    for job, each in zip(jobs[1:], due[1:], strict=True):
        for x, y in zip(inputs, job, strict=True):
            x.copy_(y)
        captured.replay()
        torch.cuda.synchronize()
        for x, y in zip(rooms, each, strict=True):
            assert (x - y).abs().max() <= 2e-2 * y.abs().max()


@pytest.fixture
def full() -> Iterator[list[torch.Tensor]]:
    """A list to put tensors into until memory is full; emptied in the end."""
    held: list[torch.Tensor] = []
    yield held
    held.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_finds_memory_full_can_be_tried_again(
    backend: str, full: list[torch.Tensor]
) -> None:
    workspace = ag.Workspace()
    plan = plan_of(CAUSAL, backend, workspace)
    leaves = leaves_for(CAUSAL, 1)
    o = plan(*leaves)
    assert isinstance(o, torch.Tensor)
    (do,) = cotangents_for(CAUSAL, 0, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    size = 2**34
    while size >= 2**9:
        try:
            full.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.grad(o, leaves, do, retain_graph=True)
    assert not torch.cuda.is_current_stream_capturing()
    full.clear()
    torch.cuda.empty_cache()
    check(CAUSAL, leaves, (o, *torch.autograd.grad(o, leaves, do)))
