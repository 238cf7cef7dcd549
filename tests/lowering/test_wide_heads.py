"""Heads of more than 256 elements on Triton; those of q and k in pieces beyond 512."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.instruments.explanation import Explanation
from attn_graph.kernels.tilings import HELD, shared_memory
from attn_graph.lowering.triton.backend import REST
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.strategies import Shape, graphs, seeds, shapes
from attn_graph.testing.tensors import tensors_for
from tests.lowering.test_lowering import gradients_agree, planned

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SOME = -(-settings().max_examples // 5)  # each takes long
GPUS = ("h100", "h200", "b200", "a100", "rtx4090")
MASKS = (None, ag.Causal("bottom_right"), ag.Window(64, align="bottom_right") | ag.Prefix(8))
HEADS = ((512, 512), (320, 512), (HELD + REST, 512))


@st.composite
def wide(draw: st.DrawFn) -> Shape:
    """Sizes of a few tiles, with heads wider than 256."""
    D = draw(st.one_of(st.integers(257, HELD), st.integers(HELD + 1, HELD + REST)))
    E = draw(st.integers(1, HELD))
    return evolve(draw(shapes(most=40, heads=4)), D=D, E=E)


@given(graph=graphs(wide(), st.sampled_from(DTYPES)), seed=seeds)
@settings(max_examples=SOME)
def test_wide_heads_agree_with_the_formula(graph: ag.Graph, seed: int) -> None:
    plan = planned(graph, BACKEND)
    check_outputs(plan, graph, tensors_for(graph, seed))
    gradients_agree(plan, graph, seed)


def test_few_queries_of_pieces_agree_with_the_formula() -> None:
    q, k = (ag.TensorSpec((1, *n, HELD + 9), torch.half) for n in ((4, 1), (2, 32)))
    graph = ag.attention(q, k, HELD)
    plan = planned(graph, BACKEND)
    if CPU.interprets:
        assert "split_forward" in str(plan.explain())
    check_outputs(plan, graph, tensors_for(graph, 0))


def attention(D: int, E: int, M: int, mask: ag.Mask | None, dtype: torch.dtype) -> ag.Graph:
    sizes = (2, 8, M, D), (2, 2, 4096, D), (2, 2, 4096, E)
    q, k, v = (ag.TensorSpec(x, dtype) for x in sizes)
    return ag.attention(q, k, v, mask=mask, soft_cap=30.0)


def reasons_of_triton(explanation: Explanation) -> Sequence[ag.extend.Reason]:
    return next(x.reasons for x in explanation.refusals if x.backend == "triton")


@pytest.mark.parametrize("gpu", GPUS)
@given(
    heads=st.sampled_from(HEADS),
    M=st.sampled_from((1, 40, 4096)),
    mask=st.sampled_from(MASKS),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=SOME)
def test_no_wide_head_falls_to_math_whose_sibling_does_not(
    gpu: str, heads: tuple[int, int], M: int, mask: ag.Mask | None, dtype: torch.dtype
) -> None:
    """But gradients in float32 where the least tiles exceed the shared memory."""
    narrow, broad = (
        ag.explain(attention(*x, M, mask, dtype), target=gpu) for x in ((256, 256), heads)
    )
    assert "math" not in (narrow.backend, broad.backend)
    backward = broad.backward
    assert backward is not None
    if backward.backend == "math":
        assert dtype == torch.float32
        (reason,) = reasons_of_triton(backward)
        assert reason.key == "wide_gradient"
        assert str(shared_memory(ag.Target.of(gpu).sm)) in str(reason)


def test_heads_beyond_the_pieces_are_refused_with_both_limits() -> None:
    graph = attention(HELD + REST + 1, 16, 64, None, torch.half)
    (reason,) = reasons_of_triton(ag.explain(graph, target="h100"))
    assert (reason.key, reason.limit) == (
        "head_pieces", "supports head sizes up to 512, of q and k up to 576",
    )  # fmt: skip
