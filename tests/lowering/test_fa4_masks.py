"""FlashAttention 4's masks: functions of places, bands of its own, and lists of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.codegen.launches import Launch
from attn_graph.lowering.fa4 import run as fa4_run
from attn_graph.lowering.fa4.backend import BACKEND
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.fa4.lists import FULL, MIXED, TileLists, classify, make_lists
from attn_graph.lowering.request import Options, Request
from attn_graph.masks.places import Place
from attn_graph.testing import strategies as drawn
from tests.lowering.test_fa4 import (
    H200,
    JOINED,
    WITH_TRITON,
    keys_of,
    make,
    spec,
)
from tests.support.kernels import lying_of, problem_of


@given(st.data(), st.booleans(), st.sampled_from(((128, 128), (256, 128), (128, 80))))
def test_lists_are_the_mask_by_tiles(
    data: st.DataObject, backward: bool, tile: tuple[int, int]
) -> None:
    M, N = (data.draw(st.integers(1, 700)) for _ in "MN")
    mask = data.draw(drawn.masks(drawn.Shape(1, 1, 1, M, N, 8, 8), "top_left"))
    if not mask.needs:
        check_lists(mask, M, N, tile, backward)


@pytest.mark.parametrize("backward", [False, True])
def test_lists_of_full_edges_and_of_empty_tiles_are_the_mask_by_tiles(backward: bool) -> None:
    mask = ag.Causal("top_left") | ag.Prefix(500) & ~ag.Prefix(130)
    check_lists(mask, 300, 500, (128, 128), backward)


def check_lists(mask: ag.Mask, M: int, N: int, tile: tuple[int, int], backward: bool) -> None:
    """Compare lists with the mask at every place."""
    q, k = spec(1, 1, M, 8), spec(1, 1, N, 8)
    graph = simplify(ag.attention(q, k, k, mask=mask, align="top_left"))
    if problem_of(graph).node.mask is None:
        return
    problem = problem_of(graph)
    kinds = classify(problem, tile, exact=True)
    i, j = torch.arange(M)[:, None], torch.arange(N)
    resolved = problem.node.mask
    assert resolved is not None
    kept = torch.as_tensor(resolved.keep(Place(0, 0, i, j, 1, M, N))).expand(M, N)
    for x, line in enumerate(kept.split(tile[0])):
        for y, each in enumerate(line.split(tile[1], 1)):
            whole = each.shape == tile and bool(each.all())
            assert kinds[x, y] == (FULL if whole else MIXED if each.any() else 0)
    if backward:
        graph = ag.vjp(graph)[1]
        problem = problem_of(graph)
    found = make_lists(problem, tile, exact=True)
    if found is None:
        return
    for kind, (count, numbers) in zip(
        (MIXED, FULL), (found.tensors[:2], found.tensors[2:]), strict=True
    ):
        lines = kinds.T if backward else kinds
        assert numbers.stride(-1) == 1
        for line, n, each in zip(lines, count[0, 0], numbers[0, 0], strict=True):
            assert each[: int(n)].tolist() == (line == kind).nonzero().flatten().tolist()


def test_lists_of_masks_that_read_tensors_hold_for_whatever_these_are() -> None:
    graph = make(segments=(spec(2, 300, dtype=torch.int64),) * 2, mask=ag.Causal())
    lists = Fa4Call.of(lying_of(graph), 90, admits=lambda _: False).lists
    assert isinstance(lists, TileLists)
    assert lists.empty == 3
    assert not lists.tensors[2].any()  # none is sure to be full


def documents(length: int) -> ag.Graph:
    """Causal attention within segments."""
    numbers = spec(2, length, dtype=torch.int32)
    return make(length, length, segments=(numbers, numbers), mask=ag.Causal())


def test_tiles_that_data_decide_are_listed_by_each_call_where_that_may_repay() -> None:
    """Without Triton, or where kernels without lists take less than the launches, planning lists
    those that are empty whatever the data."""
    for length, target, shown in (
        (4096, WITH_TRITON, "each call lists tiles of 128 x 128 by the mask's tensors"),
        (300, WITH_TRITON, "33 % are empty"),
        (4096, H200, "48 % are empty"),
    ):
        for graph in (documents(length), simplify(ag.vjp(documents(length))[1])):
            made = BACKEND.foreseen(Request(graph, target, Options()))
            assert shown in "\n".join(made.notes)
            assert bool(made.workspace) == ("each call" in shown)


def test_lists_that_do_not_fit_the_workspace_are_not_made() -> None:
    graph = documents(4096)
    need = BACKEND.foreseen(Request(graph, WITH_TRITON, Options())).workspace
    assert need is not None
    for most, room in ((need, need), (need - 1, 0)):
        assert (
            BACKEND.foreseen(Request(graph, WITH_TRITON, Options(max_workspace=most))).workspace
            == room
        )
        assert not keys_of(graph, WITH_TRITON, Options(max_workspace=most))


def test_self_checks_of_listed_tiles_list_tiles_though_their_graphs_are_small() -> None:
    test = BACKEND.device_test(Request(documents(4096), WITH_TRITON, Options()))
    assert test is not None
    for graph in test.graphs:
        made = BACKEND.foreseen(Request(graph, WITH_TRITON, Options(variant=test.way)))
        assert any("each call lists" in note for note in made.notes)
        again = BACKEND.device_test(Request(graph, WITH_TRITON, Options(variant=test.way)))
        assert again is not None
        assert again.variant == test.variant


def test_a_call_that_lists_tiles_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no element of a tensor, and gives the package lists of the workspace."""
    launched, given = [], []
    monkeypatch.setattr(Launch, "__call__", lambda self, tensors: launched.append(self.kernel))
    monkeypatch.setattr(fa4_run, "call_package", lambda *x: given.append(x[3]))
    monkeypatch.setattr("attn_graph.machine.target.VIRTUAL", {WITH_TRITON})
    graph = documents(1024)
    workspace = ag.Workspace()
    made = BACKEND.lower(Request(graph, WITH_TRITON, Options(variant="lists", workspace=workspace)))
    tensors = [torch.zeros(x.spec.shape, dtype=x.spec.dtype) for x in graph.inputs]
    made.infer(*tensors)
    assert launched == ["extremes", "extremes", "list_tiles"]
    assert [x.shape for x in given[0]] == [(2, 1, 8), (2, 1, 8, 8)] * 2
    assert workspace.bytes == made.workspace > 0
    with NoReads():  # type: ignore[no-untyped-call]
        made.infer(*tensors)


class NoReads(TorchDispatchMode):
    """Refuses to read an element on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", [None, ag.Causal("bottom_right"), ag.Window(9, 2, "bottom_right")])
def test_bands_by_the_bottom_right_corner_are_the_packages_own(mask: ag.Mask | None) -> None:
    call = Fa4Call.of(lying_of(make(200, 300, mask=mask)), 90)
    assert call.native is not None
    assert call.lists is None
    assert "keep" not in call.code.texts


@pytest.mark.parametrize("names", [("kv_lengths",), ("q_lengths", "kv_lengths")])
def test_lengths_are_the_packages_own_beside_bands_by_their_corner(names: tuple[str, ...]) -> None:
    ends: dict[str, Any] = {name: spec(2, dtype=torch.int32) for name in names}
    for mask in (None, ag.Causal("bottom_right"), ag.Window(9, 2, "bottom_right")):
        call = Fa4Call.of(lying_of(make(200, 300, mask=mask, **ends)), 90)
        assert call.ends == names
        assert "keep" not in call.code.texts
    others: tuple[ag.Mask, ...] = ag.Causal("top_left"), ag.Causal("bottom_right") | ag.Prefix(4)
    for other in others:
        call = Fa4Call.of(lying_of(make(200, 300, mask=other, **ends)), 90)
        assert not call.ends
        assert "keep" in call.code.texts
    sinks = spec(4, dtype=torch.float32)  # which a query past its length sees, but to the package
    call = Fa4Call.of(lying_of(make(200, 300, sinks=sinks, **ends)), 90)
    assert call.ends == (() if "q_lengths" in ends else names)


def test_a_causal_mask_by_the_top_left_corner_is_a_function() -> None:
    call = Fa4Call.of(lying_of(make(200, 300, mask=ag.Causal("top_left"))), 90)
    assert call.native is None
    assert "keep" in call.code.texts


def test_a_function_never_stands_beside_a_mask_of_the_packages_own() -> None:
    """The forward drops it, the backward applies both."""
    for mask in (JOINED, ag.Causal(), ag.Window(3), ~ag.Causal(), ag.Prefix(4)):
        plain = Fa4Call.of(lying_of(make(mask=mask)), 90).plain(True)
        own = {name for name, x in plain["options"].items() if x is not None}
        assert ("keep" in plain["texts"]) != bool(own - {"softmax_scale"})
