"""Plans in PyTorch's registry of flash kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry

import attn_graph as ag
from attn_graph.nn import flash
from attn_graph.testing.rule import allowance, distance


@pytest.fixture
def active() -> Iterator[None]:
    """Plans are PyTorch's flash kernel meanwhile."""
    flash.register_flash_attention()
    registry.activate_flash_attention_impl("attn_graph")
    try:
        yield
    finally:
        registry.restore_flash_attention_impl()


def pytorch_step(
    tensors: list[torch.Tensor], dtype: torch.dtype, do: torch.Tensor, causal: bool
) -> list[torch.Tensor]:
    """o, dq, dk and dv by PyTorch."""
    leaves: list[Any] = [x.detach().to(dtype).requires_grad_() for x in tensors]
    q, k, v = leaves
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    return [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]


@pytest.mark.parametrize("causal", [True, False])
def test_the_operators_compute_what_pytorch_does(causal: bool) -> None:
    g = torch.Generator().manual_seed(0)
    tensors: list[Any] = [torch.randn(2, 4, n, 8, generator=g) for n in (6, 7, 7)]
    do = torch.randn(2, 4, 6, 8, generator=g)
    ref, low = (pytorch_step(tensors, x, do, causal) for x in (torch.float64, torch.float32))
    q, k, v = tensors
    o, lse, *more = flash.forward_flash(q, k, v, 0.0, causal, scale=0.3)
    assert more[2:4] == [6, 7]
    rest: Any = *more[2:4], 0.0, causal, *more[4:6]
    gradients = flash.backward_flash(do, q, k, v, o, lse, None, None, *rest, scale=0.3)
    for x, due, near in zip((o, *gradients), ref, low, strict=True):
        assert distance(x, due) <= allowance(due, near, torch.float32)


def test_dropout_goes_back_by_the_numbers_that_went_forth() -> None:
    q = torch.randn(1, 2, 4, 8)
    torch.manual_seed(0)
    o, lse, _, _, M, N, seed, offset, _ = flash.forward_flash(q, q, q, 0.5)
    twice: Any = (q, q, q, o, lse, None, None, M, N, 0.5, False, seed, offset)
    first, second = (flash.backward_flash(torch.ones_like(o), *twice) for _ in range(2))
    assert torch.equal(first[0], second[0])
    torch.manual_seed(0)
    alone: Any = ag.nn.functional.attention(q, q, q, dropout=0.5)
    assert torch.equal(o, alone)
    torch.manual_seed(0)
    leaf = q.clone().requires_grad_()
    due: Any = ag.nn.functional.attention(leaf, q, q, dropout=0.5)  # which keeps its weights
    (dq,) = torch.autograd.grad(due.sum(), leaf)
    torch.testing.assert_close(first[0], dq)


def test_what_it_has_not_raises() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ag.GraphError, match="have no debug mask"):
        flash.forward_flash(q, q, q, 0.0, False, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_activating_says_what_to_do() -> None:
    flash.register_flash_attention()
    assert "attn_graph" in registry.list_flash_attention_impls()
    with pytest.raises(ag.PlanTargetError, match="replace_sdpa"):
        registry.activate_flash_attention_impl("attn_graph")
    assert registry.current_flash_attention_impl() is None


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_half_precision_is_computed_by_plans(
    causal: bool, request: pytest.FixtureRequest
) -> None:
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 64, 64, generator=g).cuda().bfloat16() for _ in range(3)]
    do = torch.randn(2, 4, 64, 64, generator=g).cuda().bfloat16()
    with registry.sdpa_kernel(registry.SDPBackend.MATH):
        ref = pytorch_step(tensors, torch.float64, do, causal)
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        low = pytorch_step(tensors, torch.bfloat16, do, causal)
        request.getfixturevalue("active")
        ag.clear_cache()
        result = pytorch_step(tensors, torch.bfloat16, do, causal)
    assert registry.current_flash_attention_impl() == "attn_graph"
    assert ag.cache_info().builds >= 2
    for n, (x, due, near) in enumerate(zip(result, ref, low, strict=True)):
        assert distance(x, due.cpu()) <= allowance(
            due.cpu(), near.cpu(), torch.bfloat16, gradient=n > 0
        )


@pytest.mark.gpu
def test_on_a_gpu_restoring_brings_pytorch_s_kernel_back(active: None) -> None:
    registry.restore_flash_attention_impl()
    ag.clear_cache()
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(x, x, x)
    assert not ag.cache_info().builds
