"""Names in PyTorch's profilers, and counts of PyTorch's counter of flops."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.autograd import profiler

import attn_graph as ag
from attn_graph.nn.functional import attention
from tests.support.tracing import traces

SPEC = ag.TensorSpec((2, 4, 16, 8), torch.float32)
PLAN: Any = ag.compile(ag.attention(SPEC, SPEC, SPEC, mask=ag.Causal()), target="cpu")
ACTIVITIES = [torch.profiler.ProfilerActivity.CPU]  # with acc_events: without, torch 2.11 warns


def tensors() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 16, 8).requires_grad_() for _ in range(3)]


def step(form: str) -> None:
    """Forward and backward."""
    if form == "plan":
        PLAN(*tensors()).sum().backward()
    else:
        o = attention(*tensors(), mask=ag.Causal())
        assert isinstance(o, torch.Tensor)
        o.sum().backward()


@pytest.mark.parametrize("form", ["plan", "function"])
def test_profiles_name_backend_and_pass(form: str) -> None:
    with torch.profiler.profile(activities=ACTIVITIES, acc_events=True) as profile:
        step(form)
    names = [event.key for event in profile.key_averages()]
    backends = PLAN.backend, PLAN.vjp.backend
    for name in (f"attn_graph.{backends[0]} forward", f"attn_graph.{backends[1]} backward"):
        assert names.count(name) == 1


def test_what_autograd_records_is_named_by_who_runs_it() -> None:
    """Here weights are kept: another backend runs that than a call without gradient."""
    x = ag.TensorSpec((1, 16, 197, 64), torch.float32)
    plan = ag.compile(ag.attention(x, x, x, bias=ag.TensorSpec((1, 1, 1, 197), torch.float32)))
    *own, bias = [torch.randn(i.spec.shape) for i in plan.graph.inputs]
    assert (plan.backend, plan.recorded.backend) == ("torch_sdpa", "math")
    for trains, backend in ((False, "torch_sdpa"), (True, "math")):
        q, k, v = (each.requires_grad_(trains) for each in own)
        with torch.profiler.profile(activities=ACTIVITIES, acc_events=True) as profile:
            plan(q, k, v, bias)
        names = [event.key for event in profile.key_averages()]
        assert [x for x in names if x.startswith("attn_graph.")] == [
            f"attn_graph.{backend} forward"
        ]


@traces
def test_compiled_code_is_named_too() -> None:
    compiled = torch.compile(lambda q: PLAN(q, q, q), fullgraph=True, backend="aot_eager")
    q = torch.randn(2, 4, 16, 8)
    compiled(q)
    with torch.profiler.profile(activities=ACTIVITIES, acc_events=True) as profile:
        compiled(q)
    assert f"attn_graph.{PLAN.backend} forward" in [e.key for e in profile.key_averages()]


def test_nothing_is_named_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[object] = []
    monkeypatch.setattr(profiler, "record_function", names.append)
    step("plan")
    step("function")
    assert not names


def test_nvtx_shows_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """emit_nvtx sets the same switch, and pushes each `record_function` as a range."""
    names: list[str] = []

    class Record(profiler.record_function):
        def __init__(self, name: str) -> None:
            names.append(name)
            super().__init__(name)

    monkeypatch.setattr(profiler, "record_function", Record)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    step("plan")
    assert names == [
        f"attn_graph.{PLAN.backend} forward",
        f"attn_graph.{PLAN.vjp.backend} backward",
    ]


def counted(run: Any) -> dict[str, int]:
    """Flops by operator."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    return {str(op): n for op, n in counts.items()}


def both_passes(attend: Any, **options: Any) -> None:
    attend(*tensors(), **options).sum().backward()


FORWARD, BACKWARD = "attn_graph.attention", "attn_graph.attention_backward"


def test_counts_without_a_mask_are_those_of_pytorch_s_formula() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = 2, 4, 16, 8
    assert counted(lambda: both_passes(attention)) == {
        FORWARD: sdpa_flop_count(shape, shape, shape),
        BACKWARD: sdpa_backward_flop_count(shape, shape, shape, shape),
    }


def test_counts_are_what_the_mask_leaves() -> None:
    cost = PLAN.cost()
    for run in (lambda: both_passes(PLAN), lambda: both_passes(attention, mask=ag.Causal())):
        assert counted(run) == {FORWARD: cost.forward.flops, BACKWARD: cost.backward.flops}
    with torch.inference_mode():
        assert counted(lambda: PLAN(*tensors())) == {FORWARD: cost.forward.flops}


def test_only_the_gradients_that_are_wanted_are_counted() -> None:
    q, k, v = tensors()
    cost = PLAN.cost()
    counts = counted(lambda: PLAN(q, k.detach(), v.detach()).sum().backward())
    assert 0 < counts[BACKWARD] < cost.backward.flops


CODE = """
import sys, torch, attn_graph as ag
assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
x = ag.TensorSpec((1, 1, 4, 8), torch.float32)
plan = ag.compile(ag.attention(x, x, x), target="cpu")
q = torch.randn(1, 1, 4, 8)
with FlopCounterMode(display=False) as counter:
    plan(q, q, q)
print(counter.get_total_flops() == plan.cost().forward.flops)
"""


@pytest.mark.slow
def test_a_counter_that_opens_before_the_first_call_counts_it() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
