"""The hardware's tanh, which half precision takes under a soft cap, is within the rule.

Triton's interpreter computes the precise one. Here it gets the largest error that the hardware may
make, docs/semantics.md: "Accuracy".
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

import attn_graph as ag
from attn_graph.lowering.codegen.device_code import Tracer, compile_text
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.kernels import CPU, interpreted, problem_of

HALF = (torch.float16, torch.bfloat16)


def capped(dtype: torch.dtype, cap: float) -> ag.Graph:
    """A causal attention whose scores are soft capped."""
    x = ag.TensorSpec((1, 1, 40, 16), dtype)
    return ag.attention(x, x, x, mask=ag.Causal(), scale=1.0, soft_cap=cap, stats=True)


@pytest.fixture
def rough_tanh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels compute tanh with the hardware's error, in every dtype."""
    probes = importlib.import_module("tests.support.triton_probes")
    monkeypatch.setattr("attn_graph.kernels.functions.tanh", probes.rough_tanh)
    compile_text.cache_clear()
    yield
    compile_text.cache_clear()


def check(graph: ag.Graph) -> None:
    """Compare results and gradients with the formula."""
    plan, tensors = ag.compile(graph, target=CPU, backends=("triton",)), tensors_for(graph, 3)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 3)


@interpreted
@pytest.mark.usefixtures("rough_tanh")
@pytest.mark.parametrize("cap", [0.5, 20.0])
@pytest.mark.parametrize("dtype", HALF)
def test_its_error_is_within_the_rule_in_half_precision(dtype: torch.dtype, cap: float) -> None:
    check(capped(dtype, cap))


@interpreted
@pytest.mark.usefixtures("rough_tanh")
def test_its_error_is_too_large_for_float32() -> None:
    with pytest.raises(AssertionError):
        check(capped(torch.float32, 2.0))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_only_half_precision_takes_it(dtype: torch.dtype) -> None:
    for graph in ag.vjp(capped(dtype, 20.0), ["q"]):
        problem = problem_of(graph)
        change = Tracer.of(problem).trace().change
        assert ("= fast_tanh(" in change) == (dtype in HALF)
        assert ("= tanh(" in change) == (dtype not in HALF)
