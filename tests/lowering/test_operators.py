"""PyTorch's operators beside a kernel: counted, the kernel left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.kernels import fused_cuda
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.lowering.cudnn.backend import describe_problem
from attn_graph.lowering.cudnn.run import Run, run_notes, temporary_bytes
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND as FA4
from attn_graph.lowering.libraries.fa4_masks import native_mask
from attn_graph.lowering.lying import DECLARED, Lying, rows_outside
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.torch_cuda.packed import BACKEND as FLASH
from attn_graph.lowering.torch_cuda.packed import PackedFlashRun
from attn_graph.lowering.triton.backend import BACKEND as TRITON
from attn_graph.machine.target import VIRTUAL
from attn_graph.machine.workspace import Workspace
from tests.lowering.test_cudnn_packed import H200, gradient_of
from tests.lowering.test_fa4 import TARGETS

# Views and empty tensors launch nothing.
FREE = {"view", "select", "slice", "transpose", "unsqueeze", "t", "as_strided", "alias", "detach"}
FREE |= {"permute", "unbind"}
FREE |= {"empty", "new_empty", "empty_strided", "empty_like"}
HALF, I32 = torch.bfloat16, torch.int32
STARTS = torch.tensor([0, 16, 32, 48], dtype=I32)


class Count(TorchDispatchMode):
    """How many operators run meanwhile that launch something, in `count`."""

    count: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        self.count += func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


SPEC = ag.TensorSpec.like(STARTS)
ROWS = ag.TensorSpec((48, 4, 16), HALF)
LAYOUTS: dict[str, dict[str, Any]] = {  # options of a graph without gaps
    "some rows may be of no sequence": {},
    "all rows are in sequences": {"all_rows": True},
    "all rows are, and lse is a result": {"all_rows": True, "stats": True},
    "all rows are, under a window": {"all_rows": True, "mask": ag.Window(3, 2)},
    "all rows are, all keys are seen": {"all_rows": True, "mask": None},
    "all rows and all keys are, which may be none": {"all_rows": True, "kv_starts": SPEC},
}


def passes(**options: Any) -> tuple[Graph, Graph]:
    """Packed attention of sequences without gaps, causal if nothing else is said, and its
    gradient."""
    own: dict[str, Any] = {"mask": ag.Causal(), "q_starts": SPEC, "max_lengths": (16, 16)}
    own |= {"align": "bottom_right"} if "kv_starts" in options else {}
    forward = simplify(ag.attention(ROWS, ROWS, ROWS, **own | options))
    return forward, gradient_of(forward, torch.zeros(ROWS.shape, dtype=HALF))[0]


def count_operators(run: Any, graph: Graph, lse: torch.Tensor) -> int:  # Any: as below
    rows, starts = torch.zeros(48, 4, 16, dtype=HALF), (STARTS, STARTS.clone())
    known = {"q_starts": starts[0], "kv_starts": starts[1], "lse": lse}
    tensors = [known.get(i.name, rows) for i in graph.inputs]
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
    call = PackedFlashRun(lying, graph)
    return call.backward if graph.is_gradient else call.forward


def run_triton(graph: Graph) -> Any:  # Any: a function of tensors
    return TRITON.lower(Request(graph, TARGETS[0], Options())).run


MAKERS = {"cudnn": run_cudnn, "fa4": run_fa4, "torch_flash": run_flash, "triton": run_triton}
USUAL = {"cudnn": (2, 2), "fa4": (0, 0), "torch_flash": (0, 0), "triton": (1, 1)}  # of each pass
COUNTS = dict.fromkeys(LAYOUTS, USUAL) | {
    "some rows may be of no sequence": {
        **USUAL,
        "cudnn": (8, 12),
        "fa4": (6, 9),
        "torch_flash": (6, 9),
    },
    "all rows are, and lse is a result": {**USUAL, "cudnn": (3, 2)},  # cuDNN writes it [T,H]
    "all rows and all keys are, which may be none": {
        "cudnn": (8, 10),
        "fa4": (2, 3),
        "torch_flash": (1, 3),
        "triton": (2, 2),
    },
}


@pytest.fixture
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fa4_run, "call_package", lambda *_: ())
    monkeypatch.setattr(fa4_run, "find_misplaced", lambda _: [])
    made = torch.empty(48, 4, 16, dtype=HALF)
    monkeypatch.setattr(fused_cuda, "packed_forward", lambda *_: (made, torch.empty(4, 48)))
    monkeypatch.setattr(fused_cuda, "packed_backward", lambda *_: (made, made, made))
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    VIRTUAL.update(TARGETS)
    try:
        yield
    finally:
        VIRTUAL.difference_update(TARGETS)


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", MAKERS)
def test_operators_beside_a_kernel_on_packed_tensors_are_counted(backend: str, layout: str) -> None:
    """Of sequences with equal lengths of queries and keys at most 2 and 4, once all rows are
    declared to be in sequences, and one more for an lse that is given back."""
    forward, gradient = passes(**LAYOUTS[layout])
    lse = torch.empty(48, 4).T if backend == "cudnn" else torch.empty(4, 48)  # as it saves it
    counts = [count_operators(MAKERS[backend](x), x, lse) for x in (forward, gradient)]
    assert counts == [*COUNTS[layout][backend]]


@pytest.mark.usefixtures("_without_kernels")
@pytest.mark.parametrize("backend", ["cudnn", "fa4", "torch_flash"])
def test_nothing_is_copied_or_marked_where_all_rows_are_in_sequences(backend: str) -> None:
    """Nor is a copy told, or memory counted for one."""
    needs = {}
    for all_rows in (False, True):
        for graph in passes(all_rows=all_rows):
            needs[all_rows, graph.is_gradient] = explain_needs(backend, graph)
    rows = ROWS.type.bytes
    for goes_back, copies in ((False, 1), (True, 3)):
        notes, temporary = needs[False, goes_back]
        fewer, less = needs[True, goes_back]
        told = [x for x in notes if "with 0 in rows" in x]
        assert len(told) == (int(goes_back) if backend == "torch_flash" else copies + goes_back)
        assert not [x for x in fewer if "with 0 in rows" in x]
        assert less < temporary
        assert less <= temporary - (0 if backend == "torch_flash" else copies * rows)
        assert [*map(DECLARED.__eq__, notes)].count(True) == 1
        assert DECLARED not in fewer


def explain_needs(backend: str, graph: Graph) -> tuple[Sequence[str], int]:
    """What is told of a call, and the bytes that it allocates."""
    if backend == "cudnn":
        case, call = describe_problem(Request(graph, H200, Options()))
        return [*run_notes(case, call, graph)], temporary_bytes(case, call, graph)
    lower = FA4.lower if backend == "fa4" else FLASH.lower
    lowered = lower(Request(graph, TARGETS[0], Options()))
    return lowered.notes, lowered.temporary


def test_a_causal_mask_is_the_kernel_s_own_where_queries_and_keys_have_equal_lengths() -> None:
    """From either corner: a mask as a function would visit every tile."""
    for align in ("top_left", "bottom_right"):
        for gaps in ({}, {"q_lengths": ag.TensorSpec((3,), I32)}):
            lying = Lying.for_libraries(facts_of(passes(align=align, **gaps)[0]))
            assert lying is not None
            mask = native_mask(lying)
            assert mask is not None
            assert mask.right == 0


@given(lengths=st.lists(st.integers(0, 4)), before=st.integers(0, 3), T=st.integers(1, 20))
def test_rows_before_the_first_sequence_and_past_the_last_are_marked(
    lengths: list[int], before: int, T: int
) -> None:
    starts = torch.tensor([*accumulate(lengths, initial=before)], dtype=I32)
    marked = rows_outside(starts, None, T).tolist()
    assert marked == [not starts[0] <= row < starts[-1] for row in range(T)]
