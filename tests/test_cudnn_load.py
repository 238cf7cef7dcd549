"""How cuDNN's plans are loaded on the machine's own GPU, and by which versions of its frontend."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.backend import Options
from attn_graph.lowering import cudnn_plan, cudnn_run
from attn_graph.lowering.cudnn_backend import described_for, versions
from attn_graph.lowering.cudnn_offline import description
from attn_graph.lowering.cudnn_plan import Built
from attn_graph.lowering.cudnn_run import Engine, Handles
from attn_graph.passes import simplify
from attn_graph.store import Store
from attn_graph.target import Target
from tests.cudnn_frontend import FIRST_WITH_HANDLES, MINORS, Machine, stand_in

X = ag.TensorSpec((2, 8, 1024, 128), torch.bfloat16)
GRAPH = simplify(ag.attention(X, X, X, mask=ag.Causal()))
GPU = torch.device("cuda", 0)
STREAM = 7
TOLD = {"plans": ["eng2"], "engine": "eng2", "knobs": [], "notes": [], "workspace": 0, "seconds": 0}


def target_with(minor: int) -> Target:
    libraries = (("nvidia-cudnn-frontend", f"1.{minor}.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
    return evolve(Target.of("h200"), libraries=libraries)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An H200 with the frontend 1.28."""
    found = Machine(description(Target.of("h200")))
    install(monkeypatch, FIRST_WITH_HANDLES, found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cudnn_plan, "is_here", lambda target: True)
    return found


def install(monkeypatch: pytest.MonkeyPatch, minor: int, machine: Machine) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", stand_in(minor, machine))
    monkeypatch.setattr(cudnn_plan, "check_frontend", lambda: None)
    monkeypatch.setattr(cudnn_run, "HANDLES", Handles())


def fill(store: Store, target: Target) -> None:
    """Put a plan of GRAPH into a store, as one that was built for this machine."""
    backend, frontend = versions(target)
    assert backend is not None
    assert frontend is not None
    _, _, call = described_for(GRAPH, target, Options())
    key = cudnn_plan.key_of(call, cudnn_plan.present(), (backend, frontend))
    store.put(key, Built.of(TOLD, b"plan").packed)


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
    run = plan.executable.run.__self__  # type: ignore[attr-defined]  # a method
    run.execute({}, None, GPU)
    assert len(machine.runs) == 1
    assert machine.loads == [b"plan"]


@pytest.mark.parametrize("minor", MINORS)
def test_each_frontend_loads_and_runs_plans_or_is_refused_with_a_reason(
    minor: int, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, minor, machine)
    store, target = Store(tmp_path), target_with(minor)
    fill(store, target)
    if minor < FIRST_WITH_HANDLES:
        with pytest.raises(ag.NoBackendError, match=rf"1\.28, the first .* has 1\.{minor}\.0"):
            ag.compile(GRAPH, target=target, backends=("cudnn",), store=store)
        return
    plan = ag.compile(GRAPH, target=target, backends=("cudnn",), store=store)
    plan.executable.run.__self__.execute({}, None, GPU)  # type: ignore[attr-defined]  # a method
    assert len(machine.runs) == 1
