"""Attention of sizes with names on CPUs: each size by the formula, near ones by one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.cpu import math as cpu
from attn_graph.lowering.cpu.ways import AttentionTiles, CpuCase
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for

MASKS = (None, ag.Window(70, 0, align="bottom_right"), ag.Prefix(50))
ROUNDS = st.sampled_from((torch.float32, torch.float64, torch.bfloat16))


@st.composite
def caches(draw: st.DrawFn) -> ag.Graph:
    """Few queries of each sequence and keys whose number has a name, of which flags hide some."""
    B, G, r, M, D = (draw(st.integers(1, most)) for most in (3, 2, 3, 2, 9))
    N, dtype, mask = ag.Dim("N", 4096), draw(ROUNDS), draw(st.sampled_from(MASKS))
    q, k = ag.TensorSpec((B, G * r, M, D), dtype), ag.TensorSpec((B, G, N, D), dtype)
    shapes = None, (B, 1, 1, N), (1, 1, 1, N), (B, G * r, M, N), (B, 1, 1, 1)
    shape = draw(st.sampled_from(shapes))
    keep = None if shape is None else ag.TensorSpec(shape, torch.bool)
    cap, sinks = draw(st.sampled_from((None, 0.5))), draw(st.booleans())
    return ag.attention(
        q, k, k, mask=mask, keep=keep, stats=draw(st.booleans()), soft_cap=cap,
        sinks=ag.TensorSpec((G * r,), torch.float32) if sinks else None,
    )  # fmt: skip


@given(
    graph=caches(), sizes=st.lists(st.integers(2, 200), min_size=2, max_size=4), seed=seeds,
    hides=st.sampled_from(("some", "all of an entry")),
)  # fmt: skip
def test_each_size_is_the_formula_whatever_came_before(
    graph: ag.Graph, sizes: list[int], seed: int, hides: str
) -> None:
    plan = ag.compile(graph, backends=("math",))
    for N in sizes:
        exact = plan.at(N=N).graph
        tensors = [*tensors_for(exact, seed)]
        flags = next((x for x in tensors if x.dtype == torch.bool), None)
        if hides == "all of an entry" and flags is not None:
            flags[0] = False
        check_outputs(plan, exact, tensors)


@pytest.mark.parametrize("sizes", [[2, 2], [5, 70, 129]])
@pytest.mark.parametrize("M", [1, 2])
def test_rows_of_a_group_whose_keys_are_all_hidden_are_0(M: int, sizes: list[int]) -> None:
    """Heads of a group are rows of one, and nothing but o is wanted."""
    N, mask = ag.Dim("N", 4096), ag.Window(70, 0, "bottom_right")
    for dtype in (torch.bfloat16, torch.float32):
        q, k = ag.TensorSpec((1, 2, M, 1), dtype), ag.TensorSpec((1, 1, N, 1), dtype)
        keep = ag.TensorSpec((1, 1, 1, N), torch.bool)
        plan = ag.compile(ag.attention(q, k, k, mask=mask, keep=keep), backends=("math",))
        for n in sizes:
            hidden = torch.zeros(1, 1, 1, n, dtype=torch.bool)
            keys = torch.ones(1, 1, n, 1, dtype=dtype)
            o = plan(torch.ones(1, 2, M, 1, dtype=dtype), keys, keys, hidden)
            assert isinstance(o, torch.Tensor)
            assert not o.any()


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
@pytest.mark.parametrize("r", [1, 2])
def test_one_query_reads_the_keys_that_its_mask_leaves(mask: ag.Mask, r: int) -> None:
    """In one run, of sizes with names and of numbers."""
    N = ag.Dim("N", 4096)
    q, k = (
        ag.TensorSpec((2, 2 * r, 1, 8), torch.float32),
        ag.TensorSpec((2, 2, N, 8), torch.float32),
    )
    plan = ag.compile(ag.attention(q, k, k, mask=mask), backends=("math",))
    for n in (40, 90, 100, 120):
        exact = plan.at(N=n).graph
        for each in (plan, plan.at(N=n)):
            check_outputs(each, exact, tensors_for(exact, n))


@pytest.mark.parametrize("kind", ["plain", "padded", "capped", "sinks"])
def test_near_numbers_of_keys_are_planned_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that grows by a token has one plan for 64 of them; so it has with padding."""
    planned: list[int] = []
    tile = cpu.tile_case

    def count(case: CpuCase) -> AttentionTiles:
        planned.append(case.problem.N)
        return tile(case)

    monkeypatch.setattr(cpu, "tile_case", count)
    q, N = ag.TensorSpec((2, 4, 1, 8), torch.float32), ag.Dim("N", 4096)
    k = ag.TensorSpec((2, 2, N, 8), torch.float32)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "padded": {"keep": ag.TensorSpec((2, 1, 1, N), torch.bool)},
        "capped": {"soft_cap": 0.5},
        "sinks": {"sinks": ag.TensorSpec((4,), torch.float32)},
    }
    plan = ag.compile(ag.attention(q, k, k, scale=0.37, **kinds[kind]), backends=("math",))
    planned.clear()
    for n in range(65, 129):
        flags, sinks = torch.arange(n).expand(2, 1, 1, n) >= 5, torch.randn(4)
        more = {"padded": [flags], "sinks": [sinks]}.get(kind, [])
        plan(torch.randn(2, 4, 1, 8), *torch.randn(2, 2, 2, n, 8), *more)
    assert planned == [128]
