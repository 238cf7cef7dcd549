"""Attention on tensors of the CPU, in every form, runs on the virtual GPU of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nested import nested_tensor_from_jagged

import attn_graph as ag
from attn_graph.machine.target import default_target
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.testing.gpu import virtual_gpu
from attn_graph.testing.rule import expect_gradients, expect_outputs
from tests.support.tracing import traces

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta|prototype|PyTorch API of nested|is_fx_tracing|script_method)"
)
Tensor = torch.Tensor
M, D = 16, 16


def by_function(x: Tensor) -> Any:  # Any: one tensor, without statistics
    return attention(x, x, x)


def into_room(x: Tensor) -> Any:  # Any: as above
    return attention(x, x, x, out=torch.zeros_like(x))


def like_torch(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x)


def replaced(x: Tensor) -> Tensor:
    with ag.replace_sdpa():
        return F.scaled_dot_product_attention(x, x, x)


def by_module(x: Tensor) -> Any:  # Any: of a module
    return ag.nn.Attention()(x, x, x)


def packed(x: Tensor) -> Any:  # Any: as of `by_function`
    rows, starts = x[0].transpose(0, 1), torch.tensor([0, M], dtype=torch.int32)
    o: Any = attention(rows, rows, rows, q_starts=starts)
    return o.transpose(0, 1)[None]


def jagged(x: Tensor) -> Any:  # Any: of a nested tensor
    rows = nested_tensor_from_jagged(x[0].transpose(0, 1), torch.tensor([0, M])).transpose(1, 2)
    o: Any = attention(rows, rows, rows)
    return o.values()[None]


def mapped(x: Tensor) -> Any:  # Any: of torch.func
    return torch.func.vmap(by_function)(x[None])[0]


def compiled(x: Tensor) -> Any:  # Any: as of `by_function`
    return torch.compile(by_function, backend="aot_eager")(x)


def compiled_by_inductor(x: Tensor) -> Any:  # Any: as above
    return torch.compile(by_function)(x)


def compiled_plan(x: Tensor) -> Any:  # Any: as above
    plan = ag.compile(graph_of(x))
    return torch.compile(lambda x: plan(x, x, x), backend="aot_eager")(x)


Form = Callable[[Tensor], Any]  # Any: as of `by_function`
FORMS: tuple[Form, ...] = (
    *(by_function, into_room, like_torch, replaced, by_module, packed, jagged, mapped),
)
COMPILED: tuple[Form, ...] = (compiled, compiled_plan, compiled_by_inductor)


def draw() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, M, D, generator=random).half()


def graph_of(x: Tensor) -> ag.Graph:
    return ag.attention(*[ag.TensorSpec.like(x)] * 3)


def check_form(form: Form) -> None:
    x = draw()
    (expected,) = expect_outputs(graph_of(x), (x, x, x))
    with virtual_gpu("h100") as device:
        for _ in range(2):
            expected.check(form(x))
            assert device.programs > 0
            device.kernels.clear()
    expected.check(form(x))
    assert device.programs == 0  # on the CPU again


@pytest.mark.parametrize("form", FORMS)
def test_a_call_within_the_block_runs_on_its_gpu_and_after_it_on_the_cpu(form: Form) -> None:
    check_form(form)


@traces
@pytest.mark.parametrize("form", COMPILED)
def test_compiled_code_within_the_block_runs_on_its_gpu(form: Form) -> None:
    torch.compiler.reset()
    check_form(form)


@traces
def test_code_compiled_before_the_block_runs_on_its_gpu_too() -> None:
    torch.compiler.reset()
    call = torch.compile(by_function, backend="aot_eager")
    call(draw())
    check_form(call)


@traces
def test_a_plan_in_code_compiled_within_the_block_ends_with_it() -> None:
    torch.compiler.reset()
    x = draw()
    with virtual_gpu("h100"):
        plan = ag.compile(graph_of(x))
        call = torch.compile(lambda x: plan(x, x, x), backend="aot_eager")
        call(x)
    with pytest.raises(ag.PlanTargetError, match="the plan is for h100, but the tensors are on"):
        call(x)


def by_autograd(q: Tensor, x: Tensor) -> Tensor:
    q = q.detach().requires_grad_()
    o: Any = attention(q, x, x)
    o.sum().backward()
    assert q.grad is not None
    return q.grad


def by_func_grad(q: Tensor, x: Tensor) -> Any:  # Any: of torch.func
    def loss(q: Tensor) -> Tensor:
        o: Any = attention(q, x, x)
        return cast(Tensor, o.sum())

    return torch.func.grad(loss)(q)


def test_tensors_without_memory_are_made_within_the_block() -> None:
    """Inductor makes some when it is first used."""
    with virtual_gpu("h100"), FakeTensorMode():
        assert torch.empty(3, 4).shape == (3, 4)


@pytest.mark.parametrize("way", [by_autograd, by_func_grad])
def test_gradients_of_calls_run_on_the_gpu_of_the_block(way: Callable[..., Tensor]) -> None:
    x = draw()
    with virtual_gpu("h100") as device:
        made = way(x, x)
        assert len(device.kernels) > 1  # those of the backward too
    expect_gradients(graph_of(x), (x, x, x), (torch.ones_like(x),))["q"].check(made)


def test_a_graph_that_no_kernel_takes_runs_by_math_within_the_block() -> None:
    x = draw().double()
    with virtual_gpu("h100") as device:
        made, plan = by_function(x), ag.compile(graph_of(x))
        assert (plan.target, plan.backend, device.programs) == (device.target, "math", 0)
    expect_outputs(graph_of(x), (x, x, x))[0].check(made)


def test_a_switch_of_gpu_products_counts_within_the_block() -> None:
    """In float32 TF32 makes another plan, as on a GPU."""
    x = draw().float()
    with virtual_gpu("h100"):
        exact = by_function(x)
        with tf32():
            rounded = by_function(x)
        assert not torch.equal(rounded, exact)
        assert torch.equal(by_function(x), exact)


@contextmanager
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_the_target_of_tensors_of_the_cpu_is_the_gpu_of_the_block() -> None:
    cpu = torch.device("cpu")
    assert default_target(cpu) == ag.Target.of("cpu")
    with virtual_gpu("h100") as device:
        assert default_target(cpu) == default_target() == device.target
        assert ag.Target.here("cpu") == ag.Target.of("cpu")
        with pytest.raises(ag.GraphError, match="is not here"):
            default_target(torch.device("cuda"))
    assert default_target() == ag.Target.here()
