"""How a mask is tiled: one answer for sizes that are near each other, right for each."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.cpu import fused_tiles
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.planned_tiles import FEW_ROUNDED, choose_way, list_ways, round_sizes
from attn_graph.lowering.cpu.schedule import estimate_seconds
from attn_graph.lowering.problem import Problem, sole
from attn_graph.masks.places import Block, Keys, Place
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for

MASKS = {
    "window": ag.Causal() & ag.Window(100),
    "window or prefix": ag.Window(70, 20) | ag.Prefix(90),
    "all but a window": ag.Causal() & ~ag.Window(200, -9),
    "two windows": ag.Window(40, 0) | (ag.Window(300, -250)),
}


def masked(M: int, N: int, mask: ag.Mask, heads: int = 1) -> ag.Graph:
    """Attention of small heads under a mask."""
    q, k = (ag.TensorSpec((1, heads, n, 8), torch.float32) for n in (M, N))
    return ag.attention(q, k, k, mask=mask.aligned("bottom_right"))


def problem_of(graph: ag.Graph) -> Problem:
    """The attention that a graph is."""
    problem = sole(simplify(graph))
    assert problem is not None
    return problem


@given(M=st.integers(1, 10**6), more=st.integers(-9, 10**6))
@example(M=600, more=-5)
@example(M=511, more=0)
def test_sizes_round_up_by_an_eighth_at_most(M: int, more: int) -> None:
    problem = problem_of(masked(M, max(1, M + more), ag.Window(2, 1)))
    rounded = round_sizes(problem)
    assert problem.M <= rounded.M < problem.M * 9 / 8
    assert rounded.N - rounded.M == problem.N - problem.M
    assert round_sizes(rounded) == rounded
    if problem.M < FEW_ROUNDED or problem.N < problem.M:
        assert rounded is problem


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", [(513, 513), (700, 733), (600, 577), (1000, 1000)])
def test_tiles_of_an_answer_for_other_sizes_are_right(
    sizes: tuple[int, int], mask: ag.Mask
) -> None:
    graph = masked(*sizes, mask)
    plan, tensors = ag.compile(graph, backends=("math",)), tensors_for(graph, 1)
    assert FusedTiles.plan(problem_of(graph)).static is not None
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_windows_are_added_whatever_their_number_at_a_time(
    mask: ag.Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_tiles, "MOST_SHARED", 0)
    monkeypatch.setattr(fused_tiles, "LEAST_TASKS", 3)
    graph = masked(811, 811, mask)
    check_gradients(ag.compile(graph, backends=("math",)), graph, tensors_for(graph, 1), 1)


@final
@frozen
class UpTo(ag.Mask):
    """Query i sees the keys below ends[i]."""

    ends: tuple[int, ...]

    def keep(self, at: Place) -> Any:
        return at.j < (self.ends[at.i] if isinstance(at.i, int) else torch.tensor(self.ends)[at.i])

    def span(self, block: Block) -> Keys:
        return Keys.between(0, max(self.ends[i] for i in block.rows))

    def surely(self, block: Block) -> Keys:
        return Keys.between(0, min(self.ends[i] for i in block.rows))


def test_a_mask_of_a_user_is_asked_about_queries_that_there_are() -> None:
    graph = masked(700, 700, UpTo(tuple(range(1, 701))))
    check_outputs(ag.compile(graph, backends=("math",)), graph, tensors_for(graph, 1))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("M", [520, 777, 1500, 3001])
def test_an_answer_for_other_sizes_costs_a_tenth_more_at_most(M: int, mask: ag.Mask) -> None:
    problem = problem_of(masked(M, M, mask, heads=8))
    costs = []
    for asked in (problem, round_sizes(problem)):
        way = choose_way(asked, "")
        assert way is not None
        tiles = list_ways(problem, "")[way[0]](way[1])
        assert tiles is not None
        costs.append(estimate_seconds(problem, tiles))
    assert costs[0] <= costs[1] <= 1.1 * costs[0]
