"""Quantised keys, by compiled kernels on virtual GPUs: with the conversions of each generation."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.gpu import virtual_gpu
from attn_graph.testing.tensors import tensors_for
from tests.support.quantised import quantise_graph, same_numbers
from tests.support.virtual_cases import machine

EACH, ONE = 0, 15  # seeds of `quantise_graph`: scales of each key, or one for the tensor
PAIRS, LINES = 1 << 8, 6 << 8  # of two columns; of one column of two keys


@pytest.mark.parametrize(
    ("sm", "kind", "dtype", "rows", "scales"),
    [
        (80, torch.float8_e4m3fn, torch.bfloat16, 1, ONE),
        (80, torch.float8_e4m3fn, torch.float16, 70, EACH),
        (90, torch.float8_e5m2, torch.float16, 1, EACH),
        (80, torch.int8, torch.bfloat16, 1, EACH),
        (80, torch.int8, torch.bfloat16, 1, ONE),
        (90, torch.float8_e4m3fn, torch.bfloat16, 1, ONE),
        (100, torch.float8_e5m2, torch.bfloat16, 1, ONE),
        (100, torch.float8_e5m2, torch.bfloat16, 70, EACH),
        (80, torch.int8, torch.bfloat16, 1, LINES),
        (80, torch.uint8, torch.float16, 1, ONE),
        (90, torch.uint8, torch.bfloat16, 70, PAIRS),
        (90, torch.float8_e4m3fn, torch.bfloat16, 70, PAIRS),
        pytest.param(90, torch.int8, torch.float16, 70, ONE, marks=pytest.mark.slow),
        pytest.param(120, torch.int8, torch.bfloat16, 70, EACH, marks=pytest.mark.slow),
        pytest.param(80, torch.int8, torch.float16, 70, EACH, marks=pytest.mark.slow),
        pytest.param(80, torch.float8_e5m2, torch.bfloat16, 1, EACH, marks=pytest.mark.slow),
        pytest.param(90, torch.float8_e4m3fn, torch.bfloat16, 70, EACH, marks=pytest.mark.slow),
    ],
)
def test_a_kernel_reads_quantised_keys(
    sm: int, kind: torch.dtype, dtype: torch.dtype, rows: int, scales: int
) -> None:
    q, k = (ag.TensorSpec(x, dtype) for x in ((2, 4, rows, 64), (2, 2, 150, 64)))
    lengths = ag.TensorSpec((2,), torch.int32)
    graph = quantise_graph(ag.attention(q, k, k, kv_lengths=lengths, stats=True), kind, scales)
    with virtual_gpu(machine(sm)) as device:
        ag.default_workspace().release()
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        tensors = tensors_for(graph, 1)
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, 1)


@pytest.mark.parametrize(
    ("sm", "kind", "rows"),
    [
        (80, torch.int8, 1),
        (90, torch.float8_e4m3fn, 1),
        (100, torch.float8_e4m3fn, 1),
        pytest.param(80, torch.float8_e4m3fn, 1, marks=pytest.mark.slow),
        pytest.param(90, torch.float8_e4m3fn, 70, marks=pytest.mark.slow),
    ],
)
def test_a_kernel_reads_values_within_quantised_keys(sm: int, kind: torch.dtype, rows: int) -> None:
    """The cache of MLA in 8 bits: in pages, one scale for the pool or one for each row."""
    q, pool = ag.TensorSpec((1, 20, 1, 576), torch.bfloat16), ag.TensorSpec((5, 16, 1, 576), kind)
    one = (1, 1, 1, 1) if rows == 1 else (5, 16, 1, 1)
    graph = ag.attention(
        q, pool, 512, k_scale=ag.TensorSpec(one, torch.float32), stats=True,
        pages=ag.TensorSpec((1, 5), torch.int32), kv_lengths=ag.TensorSpec((1,), torch.int32),
    )  # fmt: skip
    with virtual_gpu(machine(sm)) as device:
        ag.default_workspace().release()
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        given = {i.name: x for i, x in zip(graph.inputs, tensors_for(graph, 1), strict=True)}
        given |= {"pages": torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32)}
        given |= {"kv_lengths": torch.tensor([70], dtype=torch.int32)}
        assert plan.verify(**given).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gpus_without_instructions_for_float8_convert_it_exactly(dtype: torch.dtype) -> None:
    probes: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
    x, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=dtype)
    with virtual_gpu(machine(80)):
        probes.bytes_as_numbers[(1,)](x, out, SIZE=256, num_warps=2)
    assert same_numbers(out, x)
