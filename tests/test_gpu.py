"""On a real GPU: every backend that takes a graph agrees with the formula, trains and replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import attn_graph as ag
from tests import plain
from tests.capture import replayed
from tests.strategies import cotangents_for, graphs, seeds, shapes, tensors_for

pytestmark = pytest.mark.gpu
NAMES = ("triton", "math")
HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)


def outputs_of(plan: ag.Plan, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found = plan(*tensors)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds)
@settings(max_examples=40)
def test_results_and_gradients_agree_with_the_formula(
    backend: str, dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    graph = data.draw(graphs(shapes(most=200, heads=6), st.just(dtype)))
    try:
        plan = ag.compile(graph, backends=(backend,))
        tensors = tensors_for(graph, seed, "cuda")
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = outputs_of(plan, leaves)
        for output, due in zip(outputs, plain.expected(graph, tensors), strict=True):
            due.check(output)
        cotangents = cotangents_for(plan.graph, seed, "cuda")
        named = zip(plan.graph.inputs, leaves, strict=True)
        wanted = {i.name: t for i, t in named if t.requires_grad}
        poisoned = plain.poisoned(graph, tensors, cotangents, seed)
        found = torch.autograd.grad(outputs, [*wanted.values()], poisoned, allow_unused=True)
    except ag.NoBackendError:
        reject()
    gradients = dict(zip(wanted, found, strict=True))
    for name, due in plain.expected_gradients(graph, tensors, cotangents).items():
        gradient = gradients.get(name)
        if gradient is not None:
            due.check(gradient)


@pytest.mark.parametrize("backend", ["triton", "math", "cudnn", "torch_efficient"])
@pytest.mark.parametrize("kind", ["lengths", "bias"])
def test_cotangents_count_nothing_in_rows_that_see_nothing(backend: str, kind: str) -> None:
    """A whole batch entry sees nothing, and by the bias some queries of another."""
    x = ag.TensorSpec((3, 4, 128, 64), torch.float16)
    bias, lengths = torch.zeros(3, 1, 128, 128), torch.tensor([128, 0, 70], dtype=torch.int32)
    bias[1], bias[2, :, 5:70] = -torch.inf, -torch.inf
    data = lengths if kind == "lengths" else bias.half().expand(3, 4, 128, 128).contiguous()
    name = "kv_lengths" if kind == "lengths" else "bias"
    spec = ag.TensorSpec.like(data)
    graph = ag.attention(
        *(x, x, x),
        kv_lengths=spec if kind == "lengths" else None,
        bias=spec if kind == "bias" else None,
    )
    try:
        plan = ag.compile(graph, backends=(backend,))
    except ag.NoBackendError as error:
        pytest.skip(str(error))
    q, k, v = (t.detach().requires_grad_() for t in tensors_for(graph, 1, "cuda")[:3])
    output = plan(q, k, v, **{name: data.cuda()})
    assert isinstance(output, torch.Tensor)
    tensors, cotangents = (q, k, v, data), cotangents_for(graph, 1, "cuda")
    plain.expected(graph, tensors)[0].check(output)
    poisoned = plain.poisoned(graph, tensors, cotangents, 1)
    found = torch.autograd.grad(output, (q, k, v), poisoned)
    dues = plain.expected_gradients(graph, tensors, cotangents)
    for role, gradient in zip("qkv", found, strict=True):
        dues[role].check(gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences_agree_with_math(dtype: torch.dtype, size: int, window: int | None) -> None:
    """Every tile of the table, many of them a program, against the blocked math backend."""
    q = ag.TensorSpec((2, 4, 1500, size), dtype, layout="bshd")
    k = ag.TensorSpec((2, 2, 2100, size), dtype, layout="bshd")
    mask = ag.Causal() if window is None else ag.Causal() & ag.Window(window)
    graph = ag.attention(q, k, k, mask=mask, align="bottom_right", stats=True)
    exact = [ag.TensorSpec(x.shape, torch.float32, x.strides) for x in (q, k, k)]
    wide = ag.attention(*exact, mask=mask, align="bottom_right", stats=True)
    tensors = tensors_for(graph, 1, "cuda")
    cotangents = cotangents_for(graph, 1, "cuda")
    results = []
    for one, backend in ((graph, "triton"), (wide, "math")):
        leaves = [
            torch.empty_strided(i.spec.shape, i.spec.strides, dtype=i.spec.dtype, device="cuda")
            .copy_(t)
            .requires_grad_()
            for i, t in zip(one.inputs, tensors, strict=True)
        ]
        outputs = outputs_of(ag.compile(one, backends=(backend,)), leaves)
        given = [d.to(o.dtype) for d, o in zip(cotangents, outputs, strict=True)]
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, given)))
    most = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype]
    for a, b in zip(*results, strict=True):
        assert ((a.float() - b.float()).abs().max() / b.abs().max()) < most


def test_the_same_bits_every_run() -> None:
    x = ag.TensorSpec((2, 8, 1024, 64), torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal(), dropout=0.1, stats=True)
    plan = ag.compile(graph, deterministic=True)
    tensors = tensors_for(graph, 0, "cuda")
    runs = []
    for _ in range(3):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = outputs_of(plan, leaves)
        ones = [torch.ones_like(o) for o in outputs]
        runs.append((*outputs, *torch.autograd.grad(outputs, leaves[:3], ones)))
    for one in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], one, strict=True))


def test_captured_and_replayed() -> None:
    """Forward and backward in one CUDA graph, replayed with other tensors in the same places."""
    x = ag.TensorSpec((2, 8, 512, 64), torch.float16)
    graph = ag.attention(x, x, x, mask=ag.Causal() | ag.Prefix(64))
    plan = ag.compile(graph, backends=("triton",))
    leaves = [torch.randn(2, 8, 512, 64, device="cuda").half().requires_grad_() for _ in "qkv"]
    do = torch.randn(2, 8, 512, 64, device="cuda").half()

    def step() -> tuple[torch.Tensor, ...]:
        (o,) = outputs_of(plan, leaves)
        return (o, *torch.autograd.grad(o, leaves, do))

    results = replayed(step, leaves)
    for a, b in zip(results, step(), strict=True):
        assert torch.equal(a, b)


def test_a_thousand_steps_of_training_end_where_math_ends() -> None:
    losses = []
    for backend in NAMES:
        torch.manual_seed(0)
        q, k, v, target = torch.randn(4, 1, 4, 256, 64, device="cuda").unbind()
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        optimizer = torch.optim.Adam(leaves, lr=1e-3)
        x = ag.TensorSpec.like(q)
        plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal()), backends=(backend,))
        found = []
        for _ in range(1000):
            loss = (outputs_of(plan, leaves)[0] - target).square().mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    ours, math = losses
    assert ours[-1] < 0.8 * ours[0]
    assert abs(ours[-1] - math[-1]) < 1e-3 * math[-1]


def test_over_two_to_the_31_elements() -> None:
    """Heads that begin past 2^31 elements are found: the last one agrees with itself alone."""
    B, S, D = 34, 2**19, 128  # 2.28e9 elements of half precision
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * B * S * D:
        pytest.skip(f"needs {3 * B * S * D} bytes of GPU memory, {free} are free")
    x = torch.zeros(B, 1, S, D, dtype=torch.float16, device="cuda")
    x[-1].normal_()
    k = torch.randn(B, 1, 64, D, device="cuda").half()
    spec, few = ag.TensorSpec.like(x), ag.TensorSpec.like(k)
    (o,) = outputs_of(ag.compile(ag.attention(spec, few, few), backends=("triton",)), (x, k, k))
    one, last = x[-1:].clone(), k[-1:].clone()
    small = ag.attention(
        ag.TensorSpec.like(one), ag.TensorSpec.like(last), ag.TensorSpec.like(last)
    )
    (alone,) = outputs_of(ag.compile(small, backends=("triton",)), (one, last, last))
    assert torch.equal(o[-1:], alone)


def test_the_fastest_is_measured(tmp_path: Path) -> None:
    """All backends and their variants, some of whose tiles may not fit: those are passed over."""
    x = ag.TensorSpec((1, 4, 1024, 128), torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan = ag.compile(graph, tune=True, store=ag.Store(tmp_path))
    for each in (plan, plan.vjp):
        assert each.cause.startswith("it was the fastest when measured here: ")
        assert "triton, half the keys" in each.cause
    tensors = tensors_for(graph, 0, "cuda")
    for output, due in zip(outputs_of(plan, tensors), plain.expected(graph, tensors), strict=True):
        due.check(output)
