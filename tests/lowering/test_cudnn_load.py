"""How cuDNN's plans are loaded on the machine's own GPU, and by which versions of its frontend."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cudnn import plan as cudnn_plan
from attn_graph.lowering.cudnn import run as cudnn_run
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.offline import describe_target
from attn_graph.lowering.cudnn.plan import CudnnPlan
from attn_graph.lowering.cudnn.run import Engine, Handles
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.store import Store
from attn_graph.machine.target import Target
from tests.support.command_line import run
from tests.support.cudnn_frontend import FIRST_WITH_HANDLES, MINORS, Machine, stand_in

X = ag.TensorSpec((2, 8, 1024, 128), torch.bfloat16)
GRAPH = simplify(ag.attention(X, X, X, mask=ag.Causal()))
GPU = torch.device("cuda", 0)
STREAM = 7
TOLD: dict[str, Any] = {  # Any: JSON
    "plans": ["eng2"],
    "engine": "eng2",
    "knobs": [],
    "notes": [],
    "workspace": 0,
    "seconds": 0,
}


def target_with(minor: int) -> Target:
    libraries = (("nvidia-cudnn-frontend", f"1.{minor}.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
    return evolve(Target.of("h200"), libraries=libraries)


OTHERS = {
    "deviceName": "NVIDIA H200 NVL",
    "pciDeviceId": 7,
    "cudaDeviceId": 5,
    "isTccDriver": 1,
    "maxCtasPerSM": 24,
    "smClockRateKHz": 1785000,
    "memClockRateKHz": 3200000,
    "l2CacheSize": 52428800,
    "totalGlobalMem": 150109945856,
}
needs_cudnn = pytest.mark.skipif(
    find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend: make venv installs it"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An H200 with the frontend 1.28."""
    found = Machine(describe_target(Target.of("h200")))
    become(monkeypatch, FIRST_WITH_HANDLES, found)
    return found


def become(monkeypatch: pytest.MonkeyPatch, minor: int, machine: Machine) -> None:
    """From here on this is a machine with a GPU and a version of the frontend."""
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cudnn_plan, "is_here", lambda target: True)
    monkeypatch.setitem(sys.modules, "cudnn", stand_in(minor, machine))
    monkeypatch.setattr(cudnn_plan, "check_frontend", lambda: None)
    monkeypatch.setattr(cudnn_run, "HANDLES", Handles())


def fill(store: Store, target: Target) -> None:
    """Put a plan of GRAPH into a store, as one that was built for this machine."""
    backend, frontend = target.cudnn_versions
    assert backend is not None
    assert frontend is not None
    _, call = describe_problem(Request(GRAPH, target, Options()))
    key = cudnn_plan.plan_key(call, cudnn_plan.describe_own_gpu(), (backend, frontend))
    store.put(key, CudnnPlan(**TOLD, data=b"plan").stored)


def test_loading_a_plan_runs_nothing_and_takes_no_memory(machine: Machine) -> None:
    """So it works where memory is full, and leaves the current stream as it was."""
    machine.is_full = True
    engine = Engine(b"plan")
    for _ in range(2):
        engine({}, None, GPU)
    assert not machine.captures
    assert machine.loads == [b"plan"]
    assert [stream for _, stream in machine.runs] == [STREAM] * 2


def test_what_the_check_of_a_stored_plan_loaded_is_what_runs(
    machine: Machine, tmp_path: Path
) -> None:
    store, target = Store(tmp_path), target_with(FIRST_WITH_HANDLES)
    fill(store, target)
    plan = ag.compile(GRAPH, target=target, backends=("cudnn",), store=store)
    assert machine.loads == [b"plan"]
    plan.executable.run.execute({}, None, GPU)  # type: ignore[attr-defined]  # a Run
    assert len(machine.runs) == 1
    assert machine.loads == [b"plan"]


@needs_cudnn
def test_plans_built_ahead_are_hits_on_a_device_that_differs_in_what_cudnn_does_not_compare(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another of a node's GPUs: its place, name, clocks and memory are its own."""
    monkeypatch.undo()  # cuDNN's frontend is the true one, and there is no GPU
    (tmp_path / "graphs").write_text(str(GRAPH))
    line = ("cache", "build", str(tmp_path / "graphs"), "--target", "h200", "-o", str(tmp_path))
    built = run(*line, "--driver", "12.8")
    assert "cudnn forward, cudnn backward\n2 files" in built.output, built.output
    there = json.loads(machine.device) | OTHERS | {"driverVer": 12080}
    machine.device = json.dumps(there)
    become(monkeypatch, FIRST_WITH_HANDLES, machine)
    monkeypatch.setattr(cudnn_plan, "build_here", None)
    plan = ag.compile(GRAPH, backends=("cudnn",), target="h200", store=Store(tmp_path))
    assert plan.vjp.backend == "cudnn"
    assert len(machine.loads) == 2


@pytest.mark.parametrize("minor", MINORS)
def test_each_frontend_loads_and_runs_plans_or_is_refused_with_a_reason(
    minor: int, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, minor, machine)
    store, target = Store(tmp_path), target_with(minor)
    fill(store, target)
    if minor < FIRST_WITH_HANDLES:
        with pytest.raises(ag.NoBackendError, match=rf"1\.28, the first .* has 1\.{minor}\.0"):
            ag.compile(GRAPH, target=target, backends=("cudnn",), store=store)
        return
    plan = ag.compile(GRAPH, target=target, backends=("cudnn",), store=store)
    plan.executable.run.execute({}, None, GPU)  # type: ignore[attr-defined]  # a Run
    assert len(machine.runs) == 1
