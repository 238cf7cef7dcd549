"""What calls cost the host, and captured steps replayed beside each other."""

from __future__ import annotations

from collections.abc import Callable

import torch

import attn_graph as ag
from benchmarks.gpu.cases import Case, stream_cases
from benchmarks.gpu.child import Emit
from benchmarks.gpu.device import REFUSALS, Device, Tensors
from benchmarks.gpu.tables import OURS, RUNS, difference, make_tensors, refuse
from benchmarks.host import call_rows

STREAMS = 2
REPLAYS = 20


def measure_host(device: Device, emit: Emit) -> None:
    """Calls on tensors too small to compute with, beside PyTorch's own, as benchmarks/host.py."""
    for row in call_rows(device.place, torch.float16, device.rounds):
        emit(row)


def measure_streams(device: Device, emit: Emit) -> None:
    """Training steps in CUDA graphs, replayed one after another and on streams of their own."""
    for whole in stream_cases():
        case = device.fit(whole)
        for backend in OURS:
            try:
                plan = device.compile(case.graph(), backend)
                _ = plan.vjp
            except REFUSALS as error:
                emit(refuse(whole, f"attn_graph {backend}", error))
                continue
            emit({"job": whole.title, "by": f"attn_graph {backend}"} | replay(device, case, plan))


def replay(device: Device, case: Case, plan: ag.Plan) -> dict[str, float]:
    """Times of all replays in turn and together, and how far their results are from eager ones."""
    steps = [make_step(plan, make_tensors(device, case)) for _ in range(STREAMS)]
    eager = [[t.clone() for t in step()] for step in steps]
    graphs = [device.capture(step) for step in steps]
    replays = [graph for graph, _ in graphs]
    calls = {
        "ms in turn": lambda: [each() for each in replays],
        "ms together": lambda: device.replay_together(replays),
    }
    times = device.milliseconds(calls, RUNS)
    for _ in range(REPLAYS):
        device.replay_together(replays)
    device.milliseconds({}, 0)  # waits for them
    pairs = [
        (a, b) for (_, x), y in zip(graphs, eager, strict=True) for a, b in zip(x, y, strict=True)
    ]
    return {n: round(ms, 5) for n, ms in times.items()} | {
        "apart": max(difference(a, b) for a, b in pairs)
    }


def make_step(plan: ag.Plan, leaves: Tensors) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward of a plan on these tensors: o and the gradients."""
    do = torch.randn_like(leaves[0].detach())

    def step() -> tuple[torch.Tensor, ...]:
        o = plan(*leaves)
        assert isinstance(o, torch.Tensor)
        return (o, *torch.autograd.grad(o, leaves, do))

    return step
