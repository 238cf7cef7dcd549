"""What frozen values remember of devices: each thing made once, and nothing of a capture's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.run import Run
from attn_graph.lowering.problem import sole
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.triton.calls import TritonRun
from attn_graph.lowering.triton.plan import Flash
from attn_graph.machine.device_memo import DeviceMemo
from tests.support.cuda_model import DEVICE, Runtime

X = ag.TensorSpec((2, 4, 128, 64), torch.float16)
LENGTHS = ag.TensorSpec((2,), torch.int32)
Source = Callable[[], torch.Tensor]  # of a tensor on DEVICE that a plan remembers


def tile_lists() -> Source:
    """Those of a mask that is not a strip."""
    graph = simplify(ag.attention(X, X, X, mask=ag.Causal() & (ag.Window(8) | ag.Prefix(4))))
    problem = sole(graph)
    assert problem is not None
    flash = Flash.plan(problem, ag.Target.of("h200"))
    call = TritonRun(flash, graph, Options())
    (name,) = flash.tables
    return lambda: call.table(name, DEVICE)


def lengths() -> Source:
    """The lengths of queries, which cuDNN reads beside those of keys."""
    graph = simplify(ag.attention(X, X, X, mask=ag.KeyLengths(), kv_lengths=LENGTHS))
    case, call = describe_problem(Request(graph, ag.Target.of("h200"), Options()))
    run = Run.of(case, call, graph, ag.Workspace(), 0, lambda *given: None)
    return lambda: run.full("M", DEVICE)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A model of the CUDA runtime, to which tensors of the host are copied."""
    runtime, to = Runtime(), torch.Tensor.to

    def copied(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if given != (DEVICE,):
            return to(x, *given, **named)
        return runtime.empty(x.nbytes).view(x.dtype).view(x.shape).copy_(x)

    monkeypatch.setattr(torch.Tensor, "to", copied)
    with runtime.installed():
        yield runtime


@pytest.mark.parametrize("source", [tile_lists, lengths])
def test_no_tensor_of_a_captured_graph_is_remembered(
    source: Callable[[], Source], runtime: Runtime
) -> None:
    """Its memory is the graph's; a plan that was not called before says so, and can be later."""
    tensor = source()
    refused = pytest.raises(ag.PlanTargetError, match="call the plan once before the capture")
    with runtime.capture(1), refused:
        tensor()
    once = tensor()
    with runtime.capture(1):
        assert tensor() is once


def test_threads_that_make_a_thing_twice_share_the_first() -> None:
    memo: DeviceMemo[str] = DeviceMemo()
    assert memo.get(0, lambda: memo.get(0, lambda: "first") + "second") == "first"
    assert memo.get(0, lambda: "third") == "first"
    assert memo.get(1, lambda: "another device's") == "another device's"
