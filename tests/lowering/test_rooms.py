"""Kernels of Triton write results into the caller's tensors; interpreted."""

from __future__ import annotations

import pytest
import torch

import attn_graph as ag
from attn_graph.testing.tensors import tensors_for
from tests.test_outputs import check_written

CPU = ag.Target.of("cpu")
pytestmark = pytest.mark.skipif(
    not CPU.interprets, reason="needs TRITON_INTERPRET=1 before Python starts, as in `make test`"
)
ROWS = ag.TensorSpec((2, 4, 20, 16), torch.float32)
SHARED = ag.TensorSpec((2, 2, 20, 16), torch.float32)
NAMED = ag.TensorSpec((ag.Dim("B", most=4), 4, ag.Dim("M", most=64), 16), torch.float32)
WRITTEN = (
    ag.attention(ROWS, SHARED, SHARED, mask=ag.Causal(), stats=("lse", "max")),
    ag.attention(ROWS, ROWS, ROWS, soft_cap=2.0),
    ag.vjp(ag.attention(ROWS, SHARED, SHARED, mask=ag.Causal()))[1],
)


@pytest.mark.parametrize("graph", WRITTEN)
def test_kernels_write_into_the_callers_tensors_and_nowhere_around(
    graph: ag.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ag.compile(graph, target=CPU, backends=("triton",))
    check_written(plan, tensors_for(graph, 2), 5)
    tensors = tensors_for(graph, 2)
    due = plan(*tensors)
    monkeypatch.setattr(torch, "empty_strided", forbid)
    plan(*tensors, out=due)


def test_kernels_of_any_sizes_write_into_the_callers_tensors() -> None:
    plan = ag.compile(ag.attention(NAMED, NAMED, NAMED), target=CPU, backends=("triton",))
    for B, M in ((1, 3), (2, 5)):
        check_written(plan, tensors_for(plan.at(B=B, M=M).graph, M), 1)


def forbid(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("a result is allocated")
