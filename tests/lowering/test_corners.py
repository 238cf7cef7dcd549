"""What hides keys along the diagonal, and small corners as parts: what they are, and give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels import fused_cpu
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.problem import Problem, sole
from attn_graph.testing.agreement import as_leaves, check_gradients, check_outputs, run_plan
from attn_graph.testing.tensors import tensors_for

CPU = ag.Target.of("cpu")
PLAIN = evolve(CPU, native=(), interprets=False)
CAUSAL = ag.Causal("top_left")
flash = fused_cpu.flash
SIZES = (4, 12, 512, 64)


def causal(
    sizes: tuple[int, int, int, int] = SIZES, N: int | None = None, G: int | None = None,
    dtype: torch.dtype = torch.float32, layout: str = "bhsd", mask: ag.Mask | None = CAUSAL,
    **options: Any,
) -> ag.Graph:  # fmt: skip
    """Attention of sizes B, H, M, D under a causal mask."""
    B, H, M, D = sizes
    q = ag.TensorSpec(sizes, dtype, layout=layout)
    k = ag.TensorSpec((B, G or H, N or M, D), dtype, layout=layout)
    return ag.attention(q, k, k, mask=mask, **options)


def problem_of(graph: ag.Graph) -> Problem:
    """The attention that a graph is."""
    problem = sole(simplify(graph))
    assert problem is not None
    return problem


def test_what_hides_keys_far_apart_is_held_apart() -> None:
    mask = ag.Window(20, 0) | ag.Window(900, -880)
    tiles = FusedTiles.plan(problem_of(causal((4, 12, 1000, 64), mask=mask)))
    assert tiles.common is None
    assert tiles.holds


@settings(max_examples=settings().max_examples // 2)  # each takes half a second
@given(
    M=st.integers(130, 400),
    more=st.integers(-90, 90),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    mask=st.sampled_from((CAUSAL & ag.Window(70), ag.Causal(), ag.Window(150, 20))),
    layout=st.sampled_from(("bhsd", "bshd", "sbhd")),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    stats=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_hides_keys_along_the_diagonal_agrees_with_the_formula(
    M: int, more: int, heads: tuple[int, int], mask: ag.Mask, layout: str, dtype: torch.dtype,
    stats: bool, seed: int,
) -> None:  # fmt: skip
    H, G = heads
    aligned = mask.aligned("bottom_right")
    graph = causal((2, H, M, 4), M + more, G, dtype, layout, aligned, stats=stats)
    plan, tensors = ag.compile(graph, target=PLAIN, backends=("math",)), tensors_for(graph, seed)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed)


def after_keys(M: int, N: int, **options: Any) -> ag.Graph:
    """Few queries, at the last of the keys."""
    return causal((2, 4, M, 8), N, mask=ag.Causal("bottom_right"), **options)


@pytest.mark.parametrize(
    ("graph", "calls"),
    [
        (after_keys(4, 512), 1),
        (after_keys(64, 256), 1),
        (after_keys(64, 257), 2),  # too many numbers to hold for it
        (after_keys(4, 512, scale=-1.0), 1),  # whole rows of the mask
        (after_keys(8, 512, layout="bshd"), 1),
    ],
)
def test_a_small_corner_is_one_call_with_the_keys_before_it(graph: ag.Graph, calls: int) -> None:
    for each in ag.vjp(graph):
        tiles = FusedTiles.plan(problem_of(each))
        assert tiles.summary().startswith(f"{calls} call")
        assert tiles.holds


def test_keys_that_are_copied_in_parts_keep_the_corner_apart() -> None:
    tiles = FusedTiles.plan(problem_of(causal((8, 32, 4, 64), 512, 32, torch.float16,
        mask=ag.Causal("bottom_right"))))  # fmt: skip
    assert tiles.static is not None
    assert {part.kind for tile in tiles.static for part in tile.parts} == {"full", "causal"}


@given(
    M=st.integers(2, 9), before=st.integers(1, 60), heads=st.sampled_from([(1, 1), (4, 2)]),
    layout=st.sampled_from(("bhsd", "sbhd")), stats=st.booleans(), seed=st.integers(0, 9),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
)  # fmt: skip
def test_small_corners_agree_with_the_formula(
    M: int, before: int, heads: tuple[int, int], layout: str, stats: bool, seed: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    H, G = heads
    mask = ag.Causal("bottom_right")
    graph = causal((2, H, M, 4), M + before, G, dtype, layout, mask, stats=stats)
    plan = ag.compile(graph, target=PLAIN, backends=("math",))
    tensors = tensors_for(graph, seed)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed)


@pytest.mark.parametrize("mask", [CAUSAL, ag.Causal() & ag.Window(70), ag.Causal() | ag.Prefix(9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_lie_as_their_inputs_do(mask: ag.Mask, dtype: torch.dtype) -> None:
    graph = causal((2, 3, 400, 8), layout="bshd", dtype=dtype, mask=mask)
    plan, leaves = ag.compile(graph, target=PLAIN), as_leaves(tensors_for(graph, 1))
    (o,) = run_plan(plan, leaves)
    grads = torch.autograd.grad(o, leaves, torch.randn_like(o))
    assert [x.stride() for x in grads] == [x.stride() for x in leaves]
