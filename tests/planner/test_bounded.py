"""Planning reads a bounded part of a graph, whatever its sizes: calls and bytes are counted."""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.machine.target import Target
from attn_graph.masks import Mask
from attn_graph.masks.joins import MOST_LEAVES
from attn_graph.masks.places import Place
from tests.support.equipped import equip

MOST_CALLS = 400_000  # of functions, for an explanation of both passes with its fixes
MOST_BYTES = 64 * 2**20  # held by Python at any time; tensors are counted apart
MOST_ELEMENTS = 2**22  # of a tensor made meanwhile
LONG, MANY = 10**12, 2**32
HALF = torch.bfloat16
TARGETS = [evolve(equip("cpu"), native=(), interprets=False), *map(equip, ("a100", "h200"))]

leaves = st.sampled_from(
    [
        ag.Causal("top_left"),
        ag.Causal("bottom_right"),
        ag.Window(100, 0, "top_left"),
        ag.Window(3, 5, "bottom_right"),
        ag.Prefix(7),
        ag.Formula("i // 64 == j // 64"),
        ag.Formula("abs(i - j) % 3 == 0"),
        ag.Formula("h <= j"),
        ag.KeyLengths(),
    ]
)
masks = st.recursive(
    leaves,
    lambda some: st.one_of(
        st.builds(lambda a, b: a & b, some, some),
        st.builds(lambda a, b: a | b, some, some),
        st.builds(lambda a: ~a, some),
    ),
    max_leaves=4,
)


@st.composite
def large_graphs(draw: st.DrawFn) -> ag.Graph:
    """Attention with a size beyond all memory, on either side, in the batch or in the heads."""
    B, H, M, N = draw(
        st.sampled_from(
            [
                (1, 2, LONG, LONG),
                (1, 2, 5, LONG),
                (2, 2, LONG, 7),
                (1, MANY, 3, 40),
                (MANY, 2, 9, 9),
            ]
        )
    )
    q, k = (ag.TensorSpec((B, H, n, 64), HALF) for n in (M, N))
    mask = draw(st.none() | masks)
    more: dict[str, Any] = {}  # Any: as declared by `attention`
    if mask is not None and "kv_lengths" in mask.needs:
        more["kv_lengths"] = ag.TensorSpec((B,), torch.int32)
    slopes = draw(st.sampled_from([None, True, ag.TensorSpec((H,), torch.float32)]))
    if slopes is True and H == MANY:
        slopes = None
    return ag.attention(
        q, k, k, mask=mask, alibi=slopes, align="bottom_right",
        soft_cap=draw(st.sampled_from([None, 30.0])), **more,
    )  # fmt: skip


def count_calls(run: object) -> int:
    """How many Python functions a call of `run` calls."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(note)
    try:
        run()  # type: ignore[operator]  # a function
    finally:
        sys.setprofile(None)
    return calls


class Elements(torch.overrides.TorchFunctionMode):
    """The elements of the largest tensor that a function of PyTorch's makes."""

    most = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.most = max(self.most, made.untyped_storage().nbytes() // max(1, made.itemsize))
        return made


@pytest.mark.parametrize("target", TARGETS, ids=str)
@given(graph=large_graphs())
@settings(settings.get_profile("few"))
def test_an_explanation_is_bounded_whatever_the_sizes(target: Target, graph: ag.Graph) -> None:
    tracemalloc.start()
    try:
        with Elements() as elements:
            calls = count_calls(lambda: str(ag.explain(graph, target=target)))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert elements.most <= MOST_ELEMENTS
    assert calls <= MOST_CALLS
    assert most <= MOST_BYTES


def test_joins_of_too_many_leaves_and_slopes_of_too_many_heads_are_refused_in_words() -> None:
    mask: Mask = ag.Window(3)
    while len(str(mask).split("Window")) <= MOST_LEAVES // 3:
        mask = (mask & ag.Causal()) | mask
    with pytest.raises(ag.GraphError, match=f"leaves, and {MOST_LEAVES} is the most"):
        _ = mask | mask | mask | mask
    x = ag.TensorSpec((1, MANY, 4, 64), HALF)
    with pytest.raises(ag.GraphError, match=r"1024 is the most without slopes of your own, \[H\]"):
        ag.attention(x, x, x, alibi=True)


@final
@frozen
class Parity(Mask):
    """Keys of an even distance: by a square, which ranges of places do not follow."""

    def keep(self, at: Place) -> Any:  # Any: as of Mask
        return (at.i - at.j).square() % 2 == 0


def test_a_mask_that_only_planning_can_list_is_refused_where_tiles_are_many() -> None:
    few, many = (ag.TensorSpec((1, 1, n, 64), HALF) for n in (2**10, 2**20))
    for x, refuses in ((few, False), (many, True)):
        graph = ag.attention(x, x, x, mask=Parity())
        found = ag.explain(graph, target=TARGETS[2], backends=("triton", "math"), gradients=())
        keys = [reason.key for each in found.refusals for reason in each.reasons]
        assert keys == ["table"] * refuses
