"""PyTorch's kernels for GPUs: what is refused, what is mended, and on a GPU that both are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.passes import simplify
from attn_graph.kernels import fused_cuda
from attn_graph.lowering.problem import has_flash_order, is_readable
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.torch_cuda import packed
from attn_graph.machine.torch_switches import Switches
from attn_graph.spec import dense_strides, memory_order
from attn_graph.testing import formula, rule
from attn_graph.testing.strategies import seeds, specs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.torch_kernels import PLAYED

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
H200 = evolve(ag.Target.of("h200"), libraries=(("nvidia-cudnn-cu13", "9.20.0.48"),))
NAMES = ("torch_flash", "torch_efficient", "torch_cudnn")
LAYOUTS = ("bhsd", "bshd", "sbhd")
CAN_USE = {
    "torch_flash": can_use_flash_attention,
    "torch_efficient": can_use_efficient_attention,
    "torch_cudnn": can_use_cudnn_attention,
}


def spec(*shape: int, dtype: torch.dtype = F16, layout: str | None = None) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype, layout=layout)


def aligned(graph: ag.Graph, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Tensors of the graph that begin on 16 bytes, odd strides of axes of size 1 and all."""
    found = []
    for t in tensors_for(graph, seed, device):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        found.append(t.new_zeros(last + 1).as_strided(t.shape, t.stride()).copy_(t))
    return tuple(found)


@st.composite
def near(draw: st.DrawFn, backend: str) -> ag.Graph:
    """Graphs that the backend takes, or nearly: causal or biased, grouped, lse or not."""
    B, G, r = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 1, 2)))
    M, N = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    efficient = backend == "torch_efficient"
    dtype = draw(st.sampled_from((F16, BF16, F32) if efficient else (F16, BF16)))
    D = draw(st.sampled_from((8, 16)))
    E = draw(st.sampled_from((8, 16))) if efficient or backend == "torch_cudnn" else D
    r, N = (1, N) if efficient else (r, draw(st.sampled_from((M, N))))
    sizes = (B, G * r, M, D), (B, G, N, D), (B, G, N, E)
    q, k, v = (spec(*n, dtype=dtype, layout=draw(st.sampled_from(LAYOUTS))) for n in sizes)
    bias = None
    if efficient and draw(st.booleans()):
        whole = draw(st.booleans())
        wide = -(-N // 8) * 8
        B, H, M = (B, G * r, M) if whole else draw(st.sampled_from(((B, 1, M), (1, G, 1))))
        bias = ag.TensorSpec((B, H, M, N), dtype, (H * M * wide, M * wide, wide, 1))
    return ag.attention(
        q, k, v,
        mask=None if bias else draw(st.sampled_from((None, ag.Causal("top_left")))),
        bias=bias,
        scale=draw(st.sampled_from((None, 0.3))),
        stats=draw(st.booleans()),
    )  # fmt: skip


def plan_of(graph: ag.Graph, *names: str, **options: Any) -> ag.Plan:  # Any: of `compile`
    return ag.compile(graph, target=H200, backends=names or NAMES, **options)


def ran(plan: ag.Plan, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The outputs and what is saved, whatever the tensors' device."""
    return [list(found) for found in plan.executable.run(*tensors)]


def pulled(
    plan: ag.Plan, tensors: Sequence[torch.Tensor], saved: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor], needs: Sequence[bool] = (True,) * 4,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradient of each input that needs one."""
    wants = [i for i, _ in enumerate(tensors) if needs[i]]
    backward = plan.backward(wants, [ag.TensorSpec.like(c) for c in cotangents])
    found, _ = ran(backward, (*tensors, *saved, *cotangents))
    named = [plan.graph.inputs[i].name for i in wants]
    return dict(zip(named, found, strict=True))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cuda, "aten", PLAYED)
    monkeypatch.setattr(fused_cuda, "has_column", lambda: True)


@pytest.mark.usefixtures("played")
@given(data=st.data(), backend=st.sampled_from(NAMES), seed=seeds)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_by_the_kernels_contracts_results_and_gradients_agree_with_the_formula(
    data: st.DataObject, backend: str, seed: int
) -> None:
    """What is around the kernels: they are played, with their padding and their habits."""
    graph = data.draw(near(backend))
    try:
        plan = plan_of(graph, backend, precision="tf32")
    except ag.NoBackendError:
        reject()
    tensors = aligned(graph, seed)
    outputs, saved = ran(plan, tensors)
    for found, due in zip(outputs, rule.expect_outputs(graph, tensors), strict=True):
        due.check(found)
    for found, i in zip(outputs, plan.graph.outputs, strict=True):
        assert ag.TensorSpec.like(found) == result_spec(plan.graph, i)
    cotangents = cotangents_for(plan.graph, seed)
    needs = [True, True, True, data.draw(st.booleans())]
    try:
        poisoned = formula.poison_blind_rows(graph, tensors, cotangents, seed)
        gradients = pulled(plan, tensors, saved, poisoned, needs)
    except ag.NoBackendError:
        reject()
    for name, due in rule.expect_gradients(graph, tensors, cotangents).items():
        if name in gradients:
            due.check(gradients[name])


@pytest.mark.usefixtures("played")
def test_a_row_that_sees_nothing_is_zero_and_its_gradients_too() -> None:
    """By a bias of -inf, which leaves the kernel's lse at 0."""
    x = spec(1, 2, 40, 8, dtype=F32)
    graph = ag.attention(x, x, x, bias=spec(1, 2, 40, 40, dtype=F32), stats=True)
    plan = plan_of(graph, "torch_efficient", precision="tf32")
    q, k, v, bias = (torch.randn(i.spec.shape) for i in graph.inputs)
    bias[:, :, [0, 33]] = -torch.inf
    (o, lse), saved = ran(plan, (q, k, v, bias))
    assert (o[:, :, [0, 33]] == 0).all()
    assert (lse[:, :, [0, 33]] == -torch.inf).all()
    wants = [True, True, True, False]
    do, dlse = torch.ones_like(o), torch.ones_like(lse)
    do[:, :, [0, 33]], dlse[:, :, [0, 33]] = torch.nan, torch.inf
    found = pulled(plan, (q, k, v, bias), saved, (do, dlse), wants)
    assert (found["q"][:, :, [0, 33]] == 0).all()
    assert all(g.isfinite().all() for g in found.values())
    assert all((g != 0).any() for g in found.values())


def test_a_copy_of_do_is_made_where_a_bias_may_hide_rows_and_is_told() -> None:
    x = spec(2, 4, 32, 64, layout="bshd")
    biased, bare = (
        plan_of(chain(x, x, x, **more), "torch_efficient")
        for more in ({"bias": spec(2, 4, 32, 32)}, {})
    )
    told = [str(plan.vjp.explain()) for plan in (biased, bare)]
    assert ["with 0 in rows that see nothing" in text for text in told] == [True, False]


@given(q=st.tuples(*[st.integers(1, 6)] * 4).flatmap(lambda shape: specs(shape, F32)))
@example(q=ag.TensorSpec((2, 4, 6, 1), F32, strides=(2, 1, 2, 0)))
def test_o_has_the_memory_order_of_q_where_that_is_said(q: ag.TensorSpec) -> None:
    """By what PyTorch says of both kernels, and by the CPU's where it reads q where it lies."""
    due = ag.TensorSpec(q.shape, F32, dense_strides(q.shape, memory_order(q)))
    aten, devices = torch.ops.aten, ["meta"] + ["cpu"] * is_readable(q, like=True)
    for device in devices if has_flash_order(q) else ():
        x = torch.empty_strided(q.shape, q.strides, device=device)
        k = torch.zeros(q.shape, device=device)
        results = [aten._scaled_dot_product_flash_attention_for_cpu(x, k, k)]
        if device == "meta":
            results += [aten._scaled_dot_product_flash_attention(x.half(), k.half(), k.half())]
        for o, *_ in results:
            assert ag.TensorSpec.like(o).strides == due.strides


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("stats", [True, False])
def test_this_torch_takes_what_the_kernels_are_called_with(backend: str, stats: bool) -> None:
    """Names, order and kinds of the arguments, and shapes: by its functions for meta tensors."""
    q, k = spec(2, 4, 40, 16, layout="bshd"), spec(2, 4, 40, 16)
    graph = ag.attention(q, k, k, mask=ag.Causal(), stats=stats)
    plan = plan_of(graph, backend)
    tensors = [
        torch.empty_strided(i.spec.shape, i.spec.strides, dtype=F16, device="meta")
        for i in graph.inputs
    ]
    outputs, (o, lse) = ran(plan, tensors)
    assert (o.dtype, lse.dtype, lse.shape) == (F16, F32, (2, 4, 40))
    for found, i in zip(outputs, plan.graph.outputs, strict=True):
        assert ag.TensorSpec.like(found) == result_spec(plan.graph, i)
    gradients = pulled(plan, tensors, (o, lse), [torch.empty_like(o)]) if not stats else {}
    assert {n: tuple(g.shape) for n, g in gradients.items()} == (
        {} if stats else dict.fromkeys("qkv", (2, 4, 40, 16))
    )


X = spec(2, 4, 32, 64)
SQUARE = (X, X, X)
X_BIAS = spec(2, 4, 32, 32)
LONG = spec(2, 4, 64, 64)
Case = tuple[str, ag.Graph, dict[str, Any], str]


def chain(*given: ag.TensorSpec, **options: Any) -> ag.Graph:  # Any: options of `attention`
    return ag.attention(*(given or SQUARE), **options)


def wide(size: int) -> tuple[ag.TensorSpec, ...]:
    return (spec(2, 4, 32, size),) * 3


def strided(*strides: int) -> ag.TensorSpec:
    return ag.TensorSpec((2, 4, 32, 64), F16, strides)


def biased(*shape: int, dtype: torch.dtype = F16) -> ag.Graph:
    return chain(bias=spec(*shape, dtype=dtype))


def long(size: int, rows: int) -> ag.Graph:
    """One head of so many queries and keys, with a bias of so many rows."""
    return chain(*(spec(1, 1, size, 64),) * 3, bias=spec(1, 1, rows, size))


GROUPED = chain(X, spec(2, 2, 32, 64), spec(2, 2, 32, 64))
FORWARD: tuple[Case, ...] = (
    ("torch_flash", chain(*(spec(2, 4, 32, 64, dtype=F32),) * 3), {}, "bf16, and .* in f32"),
    ("torch_flash", chain(*wide(264)), {}, "up to 256, and q has D = 264"),
    ("torch_flash", chain(*wide(60)), {}, "multiples of 8, and q has D = 60"),
    ("torch_flash", chain(X, X, spec(2, 4, 32, 32)), {}, "D = 64, v has E = 32"),
    ("torch_flash", chain(X, LONG, LONG, mask=ag.Causal("top_left")), {}, "M = 32, N = 64"),
    ("torch_flash", biased(2, 4, 32, 32), {}, "does not support Bias, nor any other modifier"),
    ("torch_flash", chain(dropout=0.5), {}, "no dropout, and the rate is 0.5"),
    ("torch_flash", chain(sinks=spec(4, dtype=F32)), {}, "no sinks"),
    ("torch_flash", chain(mask=ag.Window(3)), {}, "the mask is Window"),
    *(
        (name, chain(kv_lengths=spec(2, dtype=torch.int32)), {}, "the mask is KeyLengths")
        for name in ("torch_flash", "torch_efficient", "torch_cudnn")
    ),
    ("torch_flash", chain(scale=-1.0), {}, "scale above 0, and it is -1.0"),
    ("torch_flash", chain(strided(8192, 2048, 1, 32), X, X), {}, "stride 1 .* and q is"),
    ("torch_flash", chain(X, strided(8448, 2112, 66, 1), X), {}, "16 bytes .* rows of k"),
    ("torch_flash", chain(*(spec(65536, 1, 2, 8),) * 3), {}, "65535 .* B = 65536"),
    ("torch_flash", chain(*(spec(2, 4, 0, 64),) * 3), {}, "at least 1, and .* M = 0"),
    ("torch_efficient", GROUPED, {}, "G = 2, H = 4"),
    ("torch_efficient", biased(2, 4, 32, 32, dtype=F32), {}, "dtype f16, and it is f32"),
    ("torch_efficient", biased(2, 4, 32, 1), {}, "every key, N = 32"),
    (
        "torch_efficient",
        chain(X, spec(2, 4, 30, 64), spec(2, 4, 30, 64), bias=spec(2, 4, 32, 30)),
        {},
        "rows of bias",
    ),
    ("torch_efficient", biased(2, 4, 32, 32), {"precision": "tf32"}, ""),
    (
        "torch_efficient",
        long(2**16 + 8, rows=2**16 + 8),
        {},
        r"beyond 4294967296 elements of a head \(pytorch#187227\), and .* needs 4296015936",
    ),
    ("torch_efficient", long(2**16, rows=2**16), {}, ""),
    ("torch_efficient", long(2**16 + 8, rows=1), {}, ""),
    ("torch_efficient", chain(*(spec(2, 4, 32, 64, dtype=F32),) * 3), {}, 'precision is "ieee"'),
    (
        "torch_efficient",
        chain(*(spec(2, 4, 32, 6, dtype=F32),) * 3),
        {"precision": "tf32"},
        "multiples of 4, and q has D = 6",
    ),
    ("torch_cudnn", chain(*wide(136)), {}, "up to 128, and q has D = 136"),
    ("torch_cudnn", GROUPED, {}, "pytorch#193893"),
    ("torch_cudnn", chain(), {"deterministic": True}, "not deterministic"),
    (
        "torch_cudnn",
        chain(X, spec(2, 4, 1, 64), spec(2, 4, 1, 64)),
        {},
        "two keys at least, .* N = 1",
    ),
)
BACKWARD: tuple[Case, ...] = (
    ("torch_flash", chain(), {"deterministic": True}, "use_deterministic_algorithms"),
    ("torch_efficient", chain(), {"deterministic": True}, "use_deterministic_algorithms"),
    ("torch_efficient", biased(1, 4, 32, 32), {}, r"shape \[2, 4, 32, 32\], and it is"),
    (
        "torch_efficient",
        chain(bias=X_BIAS, stats=True),
        {},
        "bias through lse, and the graph has",
    ),
    ("torch_cudnn", chain(stats=True), {}, "gradient through lse"),
)


@pytest.mark.parametrize(("backend", "graph", "options", "words"), FORWARD)
def test_each_limit_is_told_with_what_was_found(
    backend: str, graph: ag.Graph, options: dict[str, Any], words: str
) -> None:
    if not words:
        assert plan_of(graph, backend, **options).backend == backend
        return
    with pytest.raises(ag.NoBackendError, match=words):
        plan_of(graph, backend, **options)


@pytest.mark.parametrize(("backend", "graph", "options", "words"), BACKWARD)
def test_each_limit_of_gradients_is_told_too(
    backend: str, graph: ag.Graph, options: dict[str, Any], words: str
) -> None:
    plan = plan_of(graph, backend, **options)
    with pytest.raises(ag.NoBackendError, match=words):
        _ = plan.vjp


def test_what_an_architecture_cannot_do_is_told() -> None:
    old, ada = evolve(H200, sm=75), evolve(H200, sm=89)
    for name in NAMES:
        with pytest.raises(ag.NoBackendError, match="sm_80 to sm_121, and the target has sm_75"):
            ag.compile(chain(), target=old, backends=(name,))
        with pytest.raises(ag.NoBackendError, match="needs an NVIDIA GPU, and the target is cpu"):
            ag.compile(chain(), target="cpu", backends=(name,))
    plan = ag.compile(chain(*wide(208)), target=ada, backends=("torch_flash",))
    with pytest.raises(ag.NoBackendError, match="from 193 to 224 on sm_89, and D = 208"):
        _ = plan.vjp


def test_an_old_cudnn_is_told() -> None:
    old = evolve(H200, libraries=(("nvidia-cudnn-cu12", "9.15.0.57"),))
    with pytest.raises(ag.NoBackendError, match=r"from cuDNN 9.15.1 on: 9.15.0, M = 32, N = 32"):
        ag.compile(chain(), target=old, backends=("torch_cudnn",))


def test_copies_are_told_and_counted() -> None:
    plan = plan_of(chain(), "torch_efficient")
    assert "o f16[2, 4, 32, 64] is copied" in str(plan.explain())
    assert "do f16[2, 4, 32, 64] is copied" in str(plan.explain())
    x = spec(2, 4, 32, 64, layout="bshd")
    dense = plan_of(chain(x, x, x), "torch_efficient")
    assert "lie in another order" not in str(dense.explain())
    more = plan.memory().temporary_forward - dense.memory().temporary_forward
    assert more == 2 * 4 * 32 * 64 * 2


@pytest.mark.parametrize("backend", ["torch_flash", "torch_efficient"])
def test_gaps_between_rows_of_o_are_told_where_the_gradient_copies_it(backend: str) -> None:
    x = spec(2, 4, 32, 64, layout="bshd")
    wide = ag.TensorSpec(x.shape, F16, (32 * 4 * 72, 72, 4 * 72, 1))
    dense, apart = (plan_of(ag.lay_out(chain(x, x, x), {"o": o}), backend).vjp for o in (x, wide))
    told = [f"{name} {wide} is copied: the kernel's rows have no gaps" for name in ("o", "do")]
    assert [note for note in apart.executable.notes if "no gaps" in note] == told
    more = apart.executable.temporary - dense.executable.temporary
    assert more == 2 * 2 * 4 * 32 * 64 * 2


@pytest.mark.usefixtures("played")
def test_an_address_between_16_bytes_is_refused_when_called() -> None:
    """Specs say nothing of addresses, and the kernels would fault or read astray."""
    room = torch.randn(2 * 4 * 32 * 64 + 1).half()
    q, k = room[1:].view(X.shape), room[:-1].view(X.shape)
    with pytest.raises(ag.PlanMismatchError, match=r"q: expected an address .* multiple of 16"):
        ran(plan_of(chain(), "torch_flash"), (q, k, k))


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("backend", NAMES)
def test_a_cotangent_between_16_bytes_is_copied(backend: str) -> None:
    graph = chain()
    plan = plan_of(graph, backend)
    q, k, v, do = torch.randn(4, *X.shape).half().unbind()
    _, saved = ran(plan, (q, k, v))
    room = torch.empty(do.numel() + 1).half()
    astray = room[1:].view(do.shape).copy_(do)
    due = pulled(plan, (q, k, v), saved, (do,))
    found = pulled(plan, (q, k, v), saved, (astray,))
    assert all(torch.equal(found[name], due[name]) for name in "qkv")
    told = "do is copied, 32 KiB, where it begins off 16 bytes"
    assert told in str(plan.vjp.explain())


class Handle:
    """Of a flash kernel that was never activated."""

    def remove(self) -> None:
        """There is nothing to take back."""


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="of newer PyTorch"
)
def test_another_flash_kernel_in_its_place_is_told() -> None:
    torch.nn.attention.register_flash_attention_impl("test", register_fn=Handle)
    torch.nn.attention.activate_flash_attention_impl("test")
    try:
        with pytest.raises(ag.NoBackendError, match="'test' is activated in its place"):
            plan_of(chain(), "torch_flash")
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert plan_of(chain(), "torch_flash").backend == "torch_flash"


@pytest.mark.parametrize(
    ("impl", "name", "widths", "keys"),
    [
        ("FA3", "h200", (128, 128), set()),
        ("FA3", "b200", (128, 128), {"architecture_range"}),
        ("FA4", "h200", (256, 256), set()),
        ("FA4", "b200", (128, 128), set()),
        ("FA4", "b200", (192, 192), {"head_pair"}),
        ("FA4", "a100", (64, 64), {"architecture_range"}),
        ("attn_graph", "h200", (64, 64), {"flash_impl"}),
    ],
)
def test_flash_attention_3_and_4_have_limits_of_their_own(
    impl: str, name: str, widths: tuple[int, int], keys: set[str]
) -> None:
    """As torch.nn.attention.activate_flash_attention_impl puts them in place of PyTorch's own."""
    q, v = (spec(2, 4, 64, width) for width in widths)
    graph = simplify(ag.attention(q, q, v, mask=ag.Causal()))
    options = Options(switches=Switches(flash_impl=impl))
    assert {
        r.key for r in packed.BACKEND.reasons(Request(graph, ag.Target.of(name), options))
    } == keys
    rows, starts = spec(64, 4, 64), spec(3, dtype=torch.int32)
    ragged = simplify(ag.attention(rows, rows, rows, q_starts=starts))
    against = packed.BACKEND.reasons(Request(ragged, ag.Target.of("h200"), options))
    assert "flash_impl" in {r.key for r in against}


def params(tensors: Sequence[torch.Tensor], graph: ag.Graph) -> SDPAParams:
    """A graph of `near` as PyTorch asks about it."""
    q, k, v, *bias = tensors
    causal = "mask=" in str(graph)
    return SDPAParams(q, k, v, bias[0] if bias else None, 0.0, causal, q.shape[1] != k.shape[1])


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="of builds of PyTorch without CUDA")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_cuda_pytorch_itself_answers_no_to_everything(device: str) -> None:
    """So its verdicts can be compared with ours on a GPU alone: the tests below."""
    tensors = [torch.empty(i.shape, dtype=F16, device=device) for i in SQUARE]
    assert not any(can(params(tensors, chain())) for can in CAN_USE.values())


@given(data=st.data(), seed=seeds)
def test_what_the_cpu_kernel_takes_pytorch_gives_it_too(data: st.DataObject, seed: int) -> None:
    """There PyTorch tells its choice without a GPU: no reason of ours, and it is flash."""
    graph = data.draw(near("torch_flash"))
    try:
        ag.compile(graph, target="cpu", backends=("torch_sdpa",))
    except ag.NoBackendError:
        reject()
    q, k, v = tensors_for(graph, seed)
    asked = params((q, k, v), graph)
    choice = torch.ops.aten._fused_sdp_choice.default(
        q, k, v, None, 0.0, asked.is_causal, enable_gqa=asked.enable_gqa
    )
    assert choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds)
def test_on_a_gpu_results_and_gradients_agree_and_pytorch_says_yes(
    backend: str, data: st.DataObject, seed: int
) -> None:
    graph = data.draw(near(backend))
    try:
        plan = ag.compile(graph, backends=(backend,), precision="tf32")
        tensors = aligned(graph, seed, "cuda")
        assert CAN_USE[backend](params(tensors, graph), True)
        leaves = [t.detach().requires_grad_() for t in tensors]
        found = plan(*leaves)
        outputs = found if isinstance(found, tuple) else (found,)
        cotangents = cotangents_for(plan.graph, seed, "cuda")
        poisoned = formula.poison_blind_rows(graph, tensors, cotangents, seed)
        gradients = torch.autograd.grad(outputs, leaves, poisoned, allow_unused=True)
    except ag.NoBackendError:
        reject()
    for output, due in zip(outputs, rule.expect_outputs(graph, tensors), strict=True):
        due.check(output)
    named = dict(zip((i.name for i in graph.inputs), gradients, strict=True))
    for name, due in rule.expect_gradients(graph, tensors, cotangents).items():
        gradient = named[name]
        if gradient is not None:
            due.check(gradient)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NAMES)
def test_on_a_gpu_memory_is_not_more_than_told(backend: str) -> None:
    x = spec(2, 8, 1000, 64)
    plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal()), backends=(backend,))
    tensors = [torch.randn(x.shape, device="cuda").half().requires_grad_() for _ in "qkv"]
    plan(*tensors)  # libraries allocate for themselves the first time
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = plan(*tensors)
    assert isinstance(found, torch.Tensor)
    memory = plan.memory()
    most = memory.outputs + memory.saved + memory.temporary_forward
    assert torch.cuda.max_memory_allocated() - before <= most + 2**12
