"""Triton's kernels on quantised keys: wherever they take a graph, they take it quantised."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.testing.agreement import (
    check_outputs,
    run_plan,
)
from tests.support.kernels import CPU, interpreted
from tests.support.quantised import (
    same_numbers,
)

pytestmark = interpreted
TRITON = ("triton",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bytes_of_float8_are_converted_exactly(dtype: torch.dtype) -> None:
    probes: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
    x, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=dtype)
    probes.bytes_as_numbers[(1,)](x, out, SIZE=256)
    assert same_numbers(out, x)


def test_quantised_queries_lie_in_any_order() -> None:
    x = torch.randn(2, 5, 4, 16).transpose(1, 2).to(torch.float8_e5m2)  # [B,H,M,D] as [B,M,H,D]
    scale = torch.full((1, 1, 1, 1), 0.5)
    given = {"q": x, "k": x, "v": x, "q_scale": scale, "k_scale": scale, "v_scale": scale}
    specs: dict[str, Any] = {name: ag.TensorSpec.like(t) for name, t in given.items()}
    graph = ag.attention(**specs)
    check_outputs(ag.compile(graph, target=CPU, backends=TRITON), graph, tuple(given.values()))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [-0.75, 0.0, 1e-30, 30.0])
def test_the_scale_of_a_head_has_any_sign_and_size(
    size: float, dtype: torch.dtype, rows: int
) -> None:
    """And so has each row of q: none is in float16 what it is not in bfloat16."""
    graph, tensors = one_scale(size, dtype, rows)
    plan = ag.compile(graph, target=CPU, backends=TRITON)
    check_outputs(plan, graph, [tensors[i.name] for i in graph.inputs])


@pytest.mark.parametrize("rows", [1, 40])
def test_a_row_that_sees_nothing_sees_no_scale(rows: int) -> None:
    spec = ag.TensorSpec((2, 1, rows, 70), torch.bool)
    graph, tensors = one_scale(torch.nan, torch.bfloat16, rows, keep=spec)
    plan = ag.compile(graph, target=CPU, backends=TRITON)
    tensors |= {"keep": torch.zeros(spec.shape, dtype=torch.bool)}
    tensors |= {"v_scale": tensors["v_scale"] * torch.nan}
    o, lse = run_plan(plan, [tensors[i.name] for i in graph.inputs])
    assert o.eq(0).all()
    assert lse.eq(-torch.inf).all()


def one_scale(
    size: float, dtype: torch.dtype, rows: int, **options: Any
) -> tuple[ag.Graph, dict[str, torch.Tensor]]:
    """Attention with one scale of k for all keys of a head, and one of v; and its tensors. Rows of
    q have sizes from 2^-20 to 2^20, in bfloat16 and float32."""
    random = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, rows, 16, generator=random)
    if dtype != torch.float16:
        q *= torch.exp2(torch.randint(-20, 21, (2, 4, rows, 1), generator=random))
    k, v = (torch.randn(2, 2, 70, 16, generator=random).to(torch.float8_e4m3fn) for _ in "kv")
    tensors = {"q": q.to(dtype), "k": k, "v": v}
    tensors |= {"k_scale": torch.full((1, 2, 1, 1), size), "v_scale": torch.full((2, 1, 1, 1), 0.3)}
    tensors["kv_lengths"] = torch.tensor([70, 33], dtype=torch.int32)
    given: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in tensors.items()}
    return ag.attention(**given, **options, stats=True), tensors
