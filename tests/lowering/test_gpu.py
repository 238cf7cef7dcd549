"""On a real GPU: every backend that takes a graph agrees with the formula, trains and replays."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from attn_graph.extend import BACKENDS, Store
from attn_graph.testing import formula, rule
from attn_graph.testing.agreement import check_gradients, check_outputs, run_plan
from attn_graph.testing.strategies import graphs, seeds, shapes
from attn_graph.testing.tangents import expect_tangents
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.lowering.test_tangents import draw_moves, only_derived, subset

pytestmark = pytest.mark.gpu
NAMES = ("triton", "math")
HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
SIZES = (40, 90, 150, 200)  # of M and N at most: other examples each, for processes beside others


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds)
@settings(max_examples=10)
def test_results_and_gradients_agree_with_the_formula(
    backend: str, dtype: torch.dtype, most: int, data: st.DataObject, seed: int
) -> None:
    graph = data.draw(graphs(shapes(most=most, heads=6), st.just(dtype)))
    try:
        plan = ag.compile(graph, backends=(backend,))
        tensors = tensors_for(graph, seed, "cuda")
        check_outputs(plan, graph, tensors)
        check_gradients(plan, graph, tensors, seed)
    except ag.NoBackendError:
        reject()


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), seed=seeds)
@settings(max_examples=10)
def test_tangents_of_the_kernel_agree_with_the_formula(
    dtype: torch.dtype, most: int, data: st.DataObject, seed: int
) -> None:
    graph = data.draw(graphs(shapes(most=most, heads=6), st.just(dtype)))
    attention, names = only_derived(graph), subset(graph, seed)
    moves = draw_moves(graph, names, seed)
    try:
        plan = ag.compile(ag.jvp(attention, names), backends=("triton",))
    except ag.NoBackendError:
        reject()
    given_tangents = (x.cuda() for x in moves.values())
    results = run_plan(plan, (*tensors_for(graph, seed, "cuda"), *given_tangents))
    dues = expect_tangents(attention, tensors_for(graph, seed), moves)
    for x, due in zip(results[2:], dues, strict=True):
        due.check(x.cpu())


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
    rule.expect_outputs(graph, tensors)[0].check(output)
    poisoned = formula.poison_blind_rows(graph, tensors, cotangents, 1)
    found = torch.autograd.grad(output, (q, k, v), poisoned)
    dues = rule.expect_gradients(graph, tensors, cotangents)
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
        outputs = run_plan(ag.compile(one, backends=(backend,)), leaves)
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
        outputs = run_plan(plan, leaves)
        ones = [torch.ones_like(o) for o in outputs]
        runs.append((*outputs, *torch.autograd.grad(outputs, leaves[:3], ones)))
    for one in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], one, strict=True))


@pytest.mark.parametrize("backend", ["cudnn", "torch_flash", *NAMES])
def test_saved_tensors_and_cotangents_of_any_layout_give_the_gradients(backend: str) -> None:
    """Packed projections, offloaded; cotangents broadcast, turned, negated, off 16 bytes."""
    qkv = torch.randn(2, 128, 3, 4, 64, device="cuda", dtype=torch.float16)
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in qkv.unbind(2)]
    specs = map(ag.TensorSpec.like, leaves)
    plan = ag.compile(ag.attention(*specs, mask=ag.Causal()), backends=(backend,))
    do = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16)
    for hooks in (nullcontext, save_on_cpu):
        for cotangent in (
            do,
            do[:1, :1, :1, :1].expand(do.shape),
            do.mT.contiguous().mT,
            torch._neg_view(do),  # pyright: ignore[reportPrivateImportUsage]  # no public name
            torch.cat((do.new_zeros(1), do.flatten()))[1:].view(do.shape),
        ):
            with hooks():
                (o,) = run_plan(plan, leaves)
            found = torch.autograd.grad(o, leaves, cotangent)
            given = (cotangent.resolve_neg().contiguous(),)
            dues = rule.expect_gradients(plan.graph, [t.detach() for t in leaves], given)
            for name, gradient in zip("qkv", found, strict=True):
                dues[name].check(gradient)
    assert {pull.plan.backend for pull in plan.memo.pulls.values()} == {backend}


def train(backend: str, dtype: torch.dtype, count: int, workspace: ag.Workspace) -> list[float]:
    """The losses of so many steps."""
    torch.manual_seed(0)
    q, k, v, target = torch.randn(4, 1, 4, 256, 64, device="cuda").unbind()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    optimizer = torch.optim.Adam(leaves, lr=1e-3)
    x = ag.TensorSpec(q.shape, dtype)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan, losses = ag.compile(graph, backends=(backend,), workspace=workspace), []
    for _ in range(count):
        (o,) = run_plan(plan, [t.to(dtype) for t in leaves])
        loss = (o - target).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("backend", "dtype", "near"), [("triton", torch.float32, 1e-3), ("cudnn", torch.bfloat16, 1e-2)]
)
def test_a_thousand_steps_of_training_end_where_math_ends(
    backend: str, dtype: torch.dtype, near: float
) -> None:
    """In one arena."""
    workspace = ag.Workspace()
    first = train(backend, dtype, 2, workspace)
    held = workspace.bytes
    losses = train(backend, dtype, 1000, workspace)
    assert workspace.bytes == held
    assert losses[:2] == pytest.approx(first, rel=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    due = train("math", dtype, 1000, ag.Workspace())[-1]
    assert losses[-1] == pytest.approx(due, rel=near)


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_over_two_to_the_31_elements(backend: str) -> None:
    """The last batch entry begins past 2^31 elements, in o and in dq as in q."""
    B, M, N, D = 34, 2**19, 64, 128  # 2.28e9 elements of half precision
    free, _ = torch.cuda.mem_get_info()
    need = 12 * B * M * D  # q, o, do and dq, and dq in float32 as cuDNN sums it
    if free < 1.1 * need:
        pytest.skip(f"needs {need} bytes of GPU memory, {free} are free")
    q = torch.zeros(B, 1, M, D, dtype=torch.float16, device="cuda")
    q[-1].normal_()
    k = torch.randn(B, 1, N, D, device="cuda").half()
    do = torch.zeros_like(q)
    do[-1].normal_()
    leaves = [t.requires_grad_() for t in (q, k, k.clone())]
    specs = [ag.TensorSpec.like(t) for t in leaves]
    (o,) = run_plan(ag.compile(ag.attention(*specs), backends=(backend,)), leaves)
    found = torch.autograd.grad(o, leaves, do)
    last = [t.detach()[-1:] for t in leaves]
    small = ag.attention(*map(ag.TensorSpec.like, last))
    rule.expect_outputs(small, last)[0].check(o[-1:])
    dues = rule.expect_gradients(small, last, (do[-1:],))
    for name, gradient in zip("qkv", found, strict=True):
        dues[name].check(gradient[-1:])


def test_the_fastest_is_measured(tmp_path: Path) -> None:
    """All backends and their variants, some of whose tiles may not fit: those are passed over."""
    x = ag.TensorSpec((1, 4, 1024, 128), torch.bfloat16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    plan = ag.compile(graph, tune=True, store=Store(tmp_path))
    for each in (plan, plan.vjp):
        assert each.cause.startswith("it was the fastest when measured here: ")
        assert "triton, half the keys" in each.cause
    check_outputs(plan, graph, tensors_for(graph, 0, "cuda"))


def equal_gpus() -> list[str]:
    """This machine's GPUs of the current one's kind."""
    here = ag.Target.here()
    names = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    equal = [name for name in names if ag.Target.here(name) == here]
    if len(equal) < 2:
        pytest.skip(f"needs two GPUs of a kind, and there is one {here.name}")
    return equal


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_equal_gpus_share_a_plan_whichever_is_current(backend: str) -> None:
    """Forward and backward; kernels, handles and workspaces are those of the tensors' GPU."""
    names = equal_gpus()
    x = ag.TensorSpec((2, 4, 192, 64), torch.float16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    try:
        plan = ag.compile(graph, backends=(backend,), precision="tf32")
    except ag.NoBackendError as error:
        pytest.skip(str(error))
    for name in (*names, names[0]):
        tensors = tensors_for(graph, 0, name)
        leaves = [t.clone().requires_grad_() for t in tensors]
        current = torch.cuda.current_device()
        (o,) = run_plan(plan, leaves)
        (do,) = cotangents_for(plan.graph, 0, name)
        gradients = torch.autograd.grad(o, leaves, do)
        assert torch.cuda.current_device() == current
        assert {t.device for t in (o, *gradients)} == {torch.device(name)}
        rule.expect_outputs(graph, tensors)[0].check(o)
        dues = rule.expect_gradients(graph, tensors, (do,))
        for i, gradient in zip(graph.inputs, gradients, strict=True):
            dues[i.name].check(gradient)
        with torch.cuda.device(name):
            assert ag.compile(graph, backends=(backend,), precision="tf32") is plan


def test_another_kind_of_gpu_is_planned_for_apart() -> None:
    here = ag.Target.here()
    others = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    others = [name for name in others if ag.Target.here(name) != here]
    if not others:
        pytest.skip(f"needs GPUs of two kinds, and there are only {here.name}")
    x = ag.TensorSpec((2, 4, 192, 64), torch.float16)
    graph = ag.attention(x, x, x, mask=ag.Causal())
    tensors = tensors_for(graph, 0, others[0])
    with pytest.raises(ag.PlanTargetError, match=f"target=Target.here\\('{others[0]}'\\)"):
        ag.compile(graph)(*tensors)
    plan = ag.compile(graph, target=ag.Target.here(others[0]))
    (o,) = run_plan(plan, tensors)
    rule.expect_outputs(graph, tensors)[0].check(o)


OURS = {  # by PyTorch's choice
    SDPBackend.CUDNN_ATTENTION: {"cudnn", "torch_cudnn"},
    SDPBackend.FLASH_ATTENTION: {"torch_flash"},
    SDPBackend.EFFICIENT_ATTENTION: {"torch_efficient"},
    SDPBackend.MATH: {"math"},
}


@pytest.mark.parametrize("kernels", [*permutations(OURS, 2), *permutations(OURS, 3)], ids=str)
def test_in_an_order_that_sdpa_kernel_sets_runs_what_pytorch_runs(
    kernels: tuple[SDPBackend, ...],
) -> None:
    """Of a graph that every one of its kernels takes; its own order is as if it were not said."""
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda").half().unbind()
    x = ag.TensorSpec.like(q)
    graph = ag.attention(x, x, x)
    with sdpa_kernel([*kernels], set_priority=True):
        plan = ag.compile(graph)
        theirs = torch._fused_sdp_choice(q, k, v)  # pyright: ignore[reportPrivateImportUsage]  # no public name
    if any("in the order that sdpa_kernel set" in note for note in plan.executable.notes):
        (ours,) = (OURS[kernel] for kernel in kernels if kernel.value == theirs)
        assert plan.backend in ours
    allowed = set[str]().union(*(OURS[kernel] for kernel in kernels))
    assert plan.backend in allowed | {"triton"}
    rule.expect_outputs(graph, (q, k, v))[0].check(run_plan(plan, (q, k, v))[0])


@pytest.mark.parametrize("backend", ["triton", "math", "cudnn", "torch_efficient"])
def test_a_bias_of_over_two_to_the_32_elements(backend: str) -> None:
    """Who takes it reads its last rows where they lie: they agree with themselves alone."""
    M, few, D = 2**16 + 64, 64, 64
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * 2 * M * M:
        pytest.skip(f"needs {3 * 2 * M * M} bytes of GPU memory, {free} are free")
    x, bias = ag.TensorSpec((1, 1, M, D), torch.float16), ag.TensorSpec((1, 1, M, M), torch.float16)
    graph = ag.attention(x, x, x, bias=bias)
    try:
        plan = ag.compile(graph, backends=(backend,))
    except ag.NoBackendError as error:
        pytest.skip(str(error))
    q, k, v = torch.randn(3, 1, 1, M, D, device="cuda").half().unbind()
    b = torch.empty(1, 1, M, M, dtype=torch.float16, device="cuda").normal_()
    (o,) = run_plan(plan, (q, k, v, b))
    last = (q[:, :, -few:], k, v, b[:, :, -few:])
    small = ag.attention(*map(ag.TensorSpec.like, last[:3]), bias=ag.TensorSpec.like(last[3]))
    rule.expect_outputs(small, last)[0].check(o[:, :, -few:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trained", [False, True])
def test_the_largest_scores_of_long_rows_are_those_of_the_formula(
    dtype: torch.dtype, trained: bool
) -> None:
    """With and without lse beside them, which a call after which no gradient follows leaves out."""
    x = ag.TensorSpec((2, 4, 1000, 64), dtype)
    graph = ag.attention(x, x, x, mask=ag.Causal() & ag.Window(300), scale=0.3, stats=("max",))
    plan = ag.compile(graph)
    assert plan.backend == "triton"
    check_outputs(plan, graph, [t.requires_grad_(trained) for t in tensors_for(graph, 1, "cuda")])
