"""What comes between steps of a program: writes, interrupts, and the flags of Python."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.testing.strategies import graphs
from tests.support.sources import ROOT

CPU = ag.Target.of("cpu")
OWN = str(Path(ag.__file__).parent)
X = ag.TensorSpec((2, 2, 40, 8), torch.float32)
LENGTHS = ag.TensorSpec((2,), torch.int32)
PLAIN = ag.attention(X, X, X)
CAPPED = ag.attention(
    X,
    X,
    X,
    mask=ag.Causal(),
    soft_cap=3.0,
    kv_lengths=LENGTHS,
    bias=ag.TensorSpec((1, 2, 40, 40), torch.float32),
)
Named = dict[str, torch.Tensor]


def tensors_of(graph: ag.Graph) -> Named:
    """A leaf for each input that trains, and lengths."""
    random = torch.Generator().manual_seed(0)
    return {
        i.name: torch.randn(i.spec.shape, generator=random).requires_grad_()
        if i.spec.dtype.is_floating_point
        else torch.tensor([40, 7], dtype=torch.int32)
        for i in graph.inputs
    }


def train(plan: ag.Plan, tensors: Named) -> list[torch.Tensor]:
    """The output and all gradients."""
    o: Any = plan(**tensors)
    leaves = [x for x in tensors.values() if x.requires_grad]
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("graph", "name"),
    [(g, n) for g in (PLAIN, CAPPED) for n in (*(i.name for i in g.inputs), "o")],
)
def test_a_write_between_the_passes_is_an_error_of_pytorch(graph: ag.Graph, name: str) -> None:
    """Whichever tensor the backward reads: it never computes with other numbers."""
    tensors = tensors_of(graph)
    o: Any = ag.compile(graph, target=CPU)(**tensors)
    with torch.no_grad():
        ({**tensors, "o": o}[name]).mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def interrupt_at(line: int) -> Callable[..., Any]:  # Any: a function for `sys.settrace`
    """A trace that raises KeyboardInterrupt at the n-th line of ours."""
    left = [line]

    def trace(frame: FrameType, event: str, _: object) -> Any:  # Any: itself
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        left[0] -= event == "line"
        if left[0] < 0:
            raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("builds", [False, True])
@given(line=st.integers(0, 2**14))
@settings(max_examples=max(1, settings().max_examples // 2))
def test_an_interrupt_anywhere_leaves_the_next_call_right(builds: bool, line: int) -> None:
    """Within a build, a call, a lease of the workspace, and a backward."""
    due, tensors = train(ag.compile(CAPPED, target=CPU), tensors_of(CAPPED)), tensors_of(CAPPED)
    if builds:
        ag.clear_cache()
    before = sys.gettrace()
    sys.settrace(interrupt_at(line if builds else line // 32))
    try:
        train(ag.compile(CAPPED, target=CPU), tensors)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    again = train(ag.compile(CAPPED, target=CPU), tensors)
    assert all(map(torch.equal, again, due))


PROGRAM = """
import torch
import attn_graph as ag
x, ids = ag.TensorSpec((2, 4, 64, 16), torch.bfloat16), ag.TensorSpec((2, 64), torch.int64)
mask = (ag.Causal() | ag.Prefix(3)) & ~ag.Window(4) & ag.SameSegment()
sinks = ag.TensorSpec((4,), torch.float32)
graph = ag.attention(x, x, x, mask=mask, soft_cap=2.0, segments=(ids, ids), sinks=sinks)
print(ag.explain(graph, target="h200"))
print(ag.compile(graph, target="cpu").text)
"""


def test_plans_are_the_same_for_every_seed_of_hashes_and_without_assertions() -> None:
    other = subprocess.run(
        [sys.executable, "-O", "-P", "-c", PROGRAM],
        cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "37"},
    )  # fmt: skip
    with redirect_stdout(StringIO()) as own:
        exec(PROGRAM, {})
    assert other.stdout == own.getvalue()


@settings(max_examples=max(1, settings().max_examples // 2))
@given(graph=graphs(), share=st.floats(0, 1.5), bytes=st.integers(0, 2**12))
def test_no_plan_takes_more_workspace_than_it_may(
    graph: ag.Graph, share: float, bytes: int
) -> None:
    free = ag.compile(graph, target=CPU)
    most, told, why = int(share * free.memory().workspace_forward) + bytes, None, ""
    try:
        told = ag.compile(graph, target=CPU, max_workspace=most).memory()
    except ag.NoBackendError as error:  # of the graph, or of its gradient
        why = str(error)
    assert f"{most:,} bytes" in why if told is None else told.workspace_forward <= most


@pytest.mark.parametrize("graph", [PLAIN, CAPPED])
def test_steps_of_training_leave_no_tensor_behind(graph: ag.Graph) -> None:
    plan, tensors = ag.compile(graph, target=CPU), tensors_of(graph)

    def count(steps: int) -> int:
        for _ in range(steps):
            train(plan, tensors)
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    before = count(5)
    assert count(45) <= before
