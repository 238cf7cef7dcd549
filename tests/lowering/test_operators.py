"""PyTorch's operators beside a kernel of another library: counted, the kernel left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.kernels import fused_cuda
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.run import Run
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND as FA4
from attn_graph.lowering.facts import facts_of
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.torch_cuda.packed import PackedFlashCall
from attn_graph.machine.target import VIRTUAL
from attn_graph.machine.workspace import Workspace
from tests.lowering.test_cudnn_packed import H200, gradient_of
from tests.lowering.test_fa4 import TARGETS

# Views and empty tensors launch nothing.
FREE = {"view", "select", "slice", "transpose", "unsqueeze", "t", "as_strided", "alias", "detach"}
FREE |= {"empty", "new_empty", "empty_strided", "empty_like"}
HALF, I32 = torch.bfloat16, torch.int32
STARTS = torch.tensor([0, 16, 32, 48], dtype=I32)


class Count(TorchDispatchMode):
    """How many operators run meanwhile that launch something, in `count`."""

    count: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        self.count += func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


def passes() -> tuple[Graph, Graph]:
    """Packed causal attention of sequences without gaps, and its gradient."""
    x = ag.TensorSpec((48, 4, 16), HALF)
    own: dict[str, Any] = {"q_starts": ag.TensorSpec.like(STARTS), "max_lengths": (16, 16)}
    forward = simplify(ag.attention(x, x, x, mask=ag.Causal(), stats=True, **own))
    return forward, gradient_of(forward, torch.zeros(x.shape, dtype=HALF))[0]


def count_operators(run: Any, graph: Graph) -> int:  # Any: a function of tensors
    rows, lse = torch.zeros(48, 4, 16, dtype=HALF), torch.zeros(4, 48)
    tensors = [{"q_starts": STARTS, "lse": lse}.get(i.name, rows) for i in graph.inputs]
    run(*tensors)  # numbers that it keeps are made once
    counted = Count()  # type: ignore[no-untyped-call]  # torch's own
    with counted:
        run(*tensors)
    return counted.count


def run_cudnn(graph: Graph) -> Any:  # Any: a function of tensors
    case, call = describe_problem(Request(graph, H200, Options()))
    return Run.of(case, call, graph, Workspace(), 128, lambda *_: None)


def run_fa4(graph: Graph) -> Any:  # Any: a function of tensors
    return FA4.lower(Request(graph, TARGETS[0], Options())).run


def run_flash(graph: Graph) -> Any:  # Any: a function of tensors
    lying = Lying.of(facts_of(graph))
    assert lying is not None
    call = PackedFlashCall(lying, graph)
    return call.backward if graph.is_gradient else call.forward


@pytest.mark.parametrize(
    ("make", "most"),
    [(run_cudnn, (15, 24)), (run_fa4, (9, 17)), (run_flash, (9, 12))],
    ids=["cudnn", "fa4", "torch_flash"],
)
def test_rows_of_no_sequence_are_looked_for_once(
    make: Any, most: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In packed tensors whose sequences lie alike, for all operands and results of a pass."""
    monkeypatch.setattr(fa4_run, "call_package", lambda *_: ())
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])
    made = torch.empty(48, 4, 16, dtype=HALF)
    monkeypatch.setattr(fused_cuda, "packed_forward", lambda *_: (made, torch.empty(4, 48)))
    monkeypatch.setattr(fused_cuda, "packed_backward", lambda *_: (made, made, made))
    VIRTUAL.update(TARGETS)
    try:
        assert [count_operators(make(graph), graph) for graph in passes()] == [*most]
    finally:
        VIRTUAL.difference_update(TARGETS)
