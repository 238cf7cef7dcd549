"""Controls: what each does, and how far it reaches. docs/torch-controls.md lists PyTorch's."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from attn_graph.extend import BACKENDS, Backend, Executable, RefusedError
from attn_graph.plan import building
from attn_graph.testing.tensors import tensors_for

CPU, H200, L40S = (ag.Target.of(name) for name in ("cpu", "h200", "l40s"))
X = ag.TensorSpec((2, 4, 16, 8), torch.float32)
HALF = ag.TensorSpec((2, 4, 16, 8), torch.float16)
PLAIN, WINDOW = ag.attention(X, X, X), ag.attention(X, X, X, mask=ag.Window(3))
matmul = torch.backends.cuda.matmul
onednn: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made when imported


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """No plan from before, and PyTorch's switches as they were, afterwards."""
    ag.clear_cache()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def chosen(
    graph: ag.Graph = PLAIN,
    target: ag.Target = CPU,
    **options: Any,  # Any: of `compile`
) -> str:
    return ag.compile(graph, target=target, **options).backend


def reasons(plan: ag.Plan, backend: str) -> str:
    return "\n".join(map(str, dict(plan.refusals).get(backend, ())))


def elsewhere(call: Callable[[], str]) -> str:
    """What a call gives in another thread."""
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(call()))
    other.start()
    other.join()
    return found[0]


# Who may run


def test_avoid_at_a_call_keeps_a_backend_from_running() -> None:
    assert chosen() == "torch_sdpa"
    plan = ag.compile(PLAIN, target=CPU, avoid=("torch_sdpa",))
    assert plan.backend == "math"
    assert "is not to run: avoid names it" in reasons(plan, "torch_sdpa")
    assert plan.vjp.backend == "math"
    assert chosen() == "torch_sdpa"


def test_avoid_reaches_its_block_and_its_context_alone() -> None:
    with ag.avoid("torch_sdpa"):
        assert chosen() == "math"
        assert elsewhere(chosen) == "torch_sdpa"
        assert chosen(backends=("torch_sdpa", "math")) == "torch_sdpa"
        with ag.avoid("math"), pytest.raises(ag.NoBackendError, match="avoid names it"):
            chosen()
        with ag.prefer("torch_sdpa", "math"):
            assert chosen() == "math"
        assert chosen() == "math"
    assert chosen() == "torch_sdpa"


def test_prefer_orders_and_forces_in_its_context_alone() -> None:
    with ag.prefer("math", "torch_sdpa"):
        assert chosen() == "math"
        assert elsewhere(chosen) == "torch_sdpa"
        assert chosen(avoid=("math",)) == "torch_sdpa"
    with ag.prefer("math"):
        assert chosen(backends=("torch_sdpa",)) == "torch_sdpa"
    assert chosen() == "torch_sdpa"


def test_a_record_can_be_avoided_and_an_unknown_name_cannot() -> None:
    (record,) = (b for b in BACKENDS if b.name == "torch_sdpa")
    assert chosen(avoid=(record,)) == "math"
    with pytest.raises(ag.GraphError, match="no backend is named 'flash'; there are cudnn"):
        chosen(avoid=("flash",))
    with pytest.raises(ag.GraphError, match="no backend is named 'flash'"), ag.avoid("flash"):
        pass


def test_sdpa_kernel_reaches_other_threads_and_ours_does_not() -> None:
    """The difference that contexts make."""
    with sdpa_kernel(SDPBackend.MATH):
        assert elsewhere(chosen) == "math"
    with ag.avoid("torch_sdpa"):
        assert elsewhere(chosen) == "torch_sdpa"


# Falling back


def test_a_fallback_is_ignored_told_or_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(WINDOW) == "math"
    with pytest.warns(ag.FallbackWarning, match="torch_sdpa can't: supports Causal") as told:
        assert chosen(WINDOW, on_fallback="warn") == "math"
    assert told[0].filename == __file__
    with pytest.raises(ag.NoBackendError, match='math` does, and on_fallback is "raise"') as caught:
        chosen(WINDOW, on_fallback="raise")
    assert {name for name, _ in caught.value.refusals} == {b.name for b in BACKENDS} - {"math"}


@pytest.mark.parametrize("fallback", ["warn", "raise"])
def test_math_that_others_could_stand_in_for_is_no_fallback(fallback: ag.types.Fallback) -> None:
    """Nor where it is preferred, nor where it is all that was asked."""
    half = ag.attention(HALF, HALF, HALF)
    options: dict[str, Any] = {"on_fallback": fallback, "target": evolve(CPU, native=())}
    assert chosen(half, **options) == "math"
    assert chosen(WINDOW, backends=("math",), **options) == "math"
    assert chosen(PLAIN, **options) == "torch_sdpa"
    with ag.prefer("math", "torch_sdpa"):
        assert chosen(PLAIN, **options) == "math"


def test_a_fallback_of_the_gradient_alone_is_told_when_it_is_planned() -> None:
    bias = ag.TensorSpec((1, 4, 16, 16), torch.float32)
    plan = ag.compile(ag.attention(X, X, X, bias=bias), target=CPU, on_fallback="raise")
    assert plan.backend == "torch_sdpa"
    with pytest.raises(ag.NoBackendError, match="that of bias is wanted"):
        _ = plan.vjp


def test_what_refuses_only_while_it_is_lowered_makes_a_fallback_too() -> None:
    def lower(*_: object) -> Executable:
        raise RefusedError("tried, and could not")

    late = Backend("late", lambda *_: (), lower)
    with pytest.warns(ag.FallbackWarning, match="late can't: tried") as told:
        assert chosen(backends=(late, "math"), on_fallback="warn") == "math"
    assert len(told) == 1
    with pytest.raises(ag.NoBackendError, match="tried, and could not"):
        chosen(backends=(late, "math"), on_fallback="raise")


def test_who_leaves_math_out_never_falls_back() -> None:
    with pytest.raises(ag.NoBackendError, match="allowed, torch_sdpa, supports this graph; math d"):
        chosen(WINDOW, backends=("torch_sdpa",))
    with ag.avoid("math"), pytest.raises(ag.NoBackendError, match=r"to avoid, math, .*; math does"):
        chosen(WINDOW)


def test_an_error_shows_the_fixes_of_the_explanation_and_searches_them_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ag.TensorSpec((2, 4, ag.Dim("N", most=16), 8), torch.float32)
    sized = ag.attention(rows, rows, rows, mask=ag.Window(3))
    cases = (WINDOW, ("torch_sdpa", "cudnn")), (PLAIN, ("cudnn",)), (sized, ("torch_sdpa",))
    for graph, backends in cases:
        with pytest.raises(ag.NoBackendError) as caught:
            chosen(graph, backends=backends)
        told = ag.explain(graph, target=CPU, backends=backends, gradients=()).refusals
        assert [*map(str, caught.value.explained)] == [*map(str, told)]
        fixed = [each.smallest and each.smallest.graph for each in caught.value.explained]
        assert fixed == [each.smallest and each.smallest.graph for each in told]
        assert all(str(each) in str(caught.value) for each in told)
        again = pickle.loads(pickle.dumps(caught.value))
        assert again.refusals == caught.value.refusals
    searches: list[object] = []

    def search(*given: object) -> tuple[()]:
        searches.append(given)
        return ()

    monkeypatch.setattr(building, "find_fixes", search)
    with pytest.raises(ag.NoBackendError) as caught:
        chosen(WINDOW, backends=("torch_sdpa",))
    assert not searches
    assert "torch_sdpa can't" in str(caught.value)
    assert len(searches) == 1


def test_what_means_nothing_is_refused_with_what_does() -> None:
    with pytest.raises(ag.GraphError, match=r"on_fallback 'panic' is not known.*'ignore', 'warn'"):
        chosen(on_fallback="panic")
    with pytest.raises(ag.GraphError, match=r"precision 'fp16' is not known.*'ieee', 'tf32'"):
        chosen(precision="fp16")


# Determinism


def test_use_deterministic_algorithms_is_deterministic_true() -> None:
    graph = ag.attention(HALF, HALF, HALF)
    free = ag.compile(graph, target=H200, backends=("torch_flash", "math"))
    torch.use_deterministic_algorithms(True)
    held = ag.compile(graph, target=H200, backends=("torch_flash", "math"))
    assert (free.vjp.backend, held.vjp.backend) == ("torch_flash", "math")
    assert "deterministic, as torch.use_deterministic_algorithms asks" in str(held.explain())
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert ag.compile(graph, target=H200, backends=("torch_flash", "math")).vjp.backend == "math"
    torch.use_deterministic_algorithms(False)
    assert ag.compile(graph, target=H200, backends=("torch_flash", "math")) is free
    assert free.vjp.backend == "torch_flash"  # planned now, and by what was said then


# Precision of float32


def precision_of(plan: ag.Plan) -> str:
    run: Any = getattr(plan.executable.run, "__self__", None)
    inner: Any = getattr(run, "executable", plan.executable)  # of what lays its results
    return str(inner.run.__self__.flash.precision)


@contextmanager
def through(name: str) -> Iterator[None]:
    """TF32 on, by one of PyTorch's ways to say so."""
    if name == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        setattr(matmul, name, {"allow_tf32": True, "fp32_precision": "tf32"}[name])
    try:
        yield
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")


WAYS = ("set_float32_matmul_precision", "allow_tf32", "fp32_precision")


def test_precision_lowers_to_tensor_cores_in_triton() -> None:
    exact = ag.compile(PLAIN, target=H200, backends=("triton",))
    fast = ag.compile(PLAIN, target=H200, backends=("triton",), precision="tf32")
    assert (precision_of(exact), precision_of(fast)) == ("ieee", "tf32")
    assert (precision_of(exact.vjp), precision_of(fast.vjp)) == ("ieee", "tf32")
    assert 'may round their inputs: precision="tf32"' in str(fast.explain())
    assert "TF32" not in str(exact.explain())
    assert any("mma" in note for note in fast.executable.inspect())


def test_tf32_permits_and_does_not_command() -> None:
    """Other dtypes, CPUs, and tiles that do not fit compute as they do without."""
    narrow = ag.attention(HALF, HALF, HALF)
    half = ag.compile(narrow, target=H200, backends=("triton",), precision="tf32")
    assert precision_of(half) == "ieee"
    wide = ag.TensorSpec((1, 1, 64, 256), torch.float32)
    graph = ag.attention(wide, wide, wide)
    tight = ag.compile(graph, target=L40S, backends=("triton",), precision="tf32")
    assert precision_of(tight) == "ieee"
    assert "would not fit this GPU's shared memory" in "\n".join(tight.executable.notes)
    roomy = ag.compile(graph, target=H200, backends=("triton",), precision="tf32")
    assert precision_of(roomy) == "tf32"
    a, b = (ag.compile(PLAIN, target=CPU, precision=p) for p in ("ieee", "tf32"))
    tensors = tensors_for(PLAIN, 0)
    x, y = a(*tensors), b(*tensors)
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(x, y)


@pytest.mark.parametrize("way", WAYS)
def test_the_switch_of_pytorch_holds_where_nobody_says_a_precision(way: str) -> None:
    before = ag.compile(PLAIN, target=H200, backends=("triton",))
    with through(way):
        plan = ag.compile(PLAIN, target=H200, backends=("triton",))
        assert precision_of(plan) == "tf32"
        assert "torch.backends.cuda.matmul.fp32_precision lets them round" in str(plan.explain())
        assert (
            precision_of(ag.compile(PLAIN, target=H200, backends=("triton",), precision="ieee"))
            == "ieee"
        )
    assert ag.compile(PLAIN, target=H200, backends=("triton",)) is before


def test_math_refuses_to_promise_float32_while_pytorch_rounds() -> None:
    with through("allow_tf32"):
        with pytest.raises(ag.NoBackendError, match="lets them round"):
            ag.compile(PLAIN, target=H200, backends=("math",), precision="ieee")
        assert chosen(PLAIN, target=H200, backends=("math",)) == "math"
        half = ag.attention(HALF, HALF, HALF)
        assert chosen(half, target=H200, backends=("math",), precision="ieee") == "math"
        assert chosen(PLAIN, backends=("math",), precision="ieee") == "math"


@pytest.mark.parametrize("backend", ["torch_sdpa", "math"])
def test_on_cpus_the_switch_is_that_of_their_own_products(backend: str) -> None:
    before = ag.compile(PLAIN, target=CPU, backends=(backend,))
    onednn.fp32_precision = "bf16"
    try:
        plan = ag.compile(PLAIN, target=CPU, backends=(backend,))
        assert "torch.backends.mkldnn.matmul.fp32_precision lets them round" in str(plan.explain())
        with pytest.raises(ag.NoBackendError, match=r'precision is "ieee": torch.backends.mkldnn'):
            chosen(backends=(backend,), precision="ieee")
        assert precision_of(ag.compile(PLAIN, target=H200, backends=("triton",))) == "ieee"
        if backend == "math":
            with pytest.raises(ag.PlanTargetError, match="lets them round"):
                before(*tensors_for(PLAIN, 0))
    finally:
        onednn.fp32_precision = "ieee"
    assert ag.compile(PLAIN, target=CPU, backends=(backend,)) is before


def test_math_planned_for_float32_does_not_run_under_tf32() -> None:
    """PyTorch's products follow the switch when they run, whatever was planned."""
    plan = ag.compile(PLAIN, target=H200, backends=("math",))
    with (
        through("allow_tf32"),
        pytest.raises(ag.PlanTargetError, match="lets them round; set it back"),
    ):
        plan.executable.run(*tensors_for(PLAIN, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_on_a_gpu_tf32_is_as_near_as_tf32_is(size: int) -> None:
    x = ag.TensorSpec((2, 4, 300, size), torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal(), stats=True)
    tensors = [t.requires_grad_() for t in tensors_for(graph, 0, "cuda")]
    results = []
    for precision in ("ieee", "tf32"):
        plan = ag.compile(graph, backends=("triton",), precision=precision)
        outputs = plan(*tensors)
        assert isinstance(outputs, tuple)
        ones = [torch.ones_like(o) for o in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, tensors, ones)))
    for exact, fast in zip(*results, strict=True):
        assert 0 < (exact - fast).abs().max() < 32 * 2.0**-11 * exact.abs().max()


# The key


@contextmanager
def switched(set_: Callable[[bool], None], on: bool) -> Iterator[None]:
    set_(on)
    try:
        yield
    finally:
        set_(not on)


cuda = torch.backends.cuda
ALL = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BLOCKS: tuple[Callable[[], AbstractContextManager[object]], ...] = (
    lambda: switched(torch.use_deterministic_algorithms, True),
    lambda: switched(cuda.enable_flash_sdp, False),
    lambda: switched(cuda.enable_mem_efficient_sdp, False),
    lambda: switched(cuda.enable_cudnn_sdp, False),
    lambda: switched(cuda.enable_math_sdp, False),
    lambda: torch.backends.cudnn.flags(enabled=False),
    lambda: sdpa_kernel([*reversed(ALL)], set_priority=True),
    lambda: through("allow_tf32"),
    lambda: ag.avoid("cudnn"),
    lambda: ag.prefer("math"),
)


def test_everything_that_bears_on_a_plan_is_part_of_its_key() -> None:
    plain = ag.compile(PLAIN, target=CPU)
    plans = [plain]
    for block in BLOCKS:
        with block():
            plans.append(ag.compile(PLAIN, target=CPU))
    options: tuple[dict[str, Any], ...] = (
        *({"on_fallback": "warn"}, {"precision": "tf32"}, {"deterministic": True}),
        *({"backends": ("torch_sdpa",)}, {"max_workspace": "1GiB"}, {"workspace": ag.Workspace()}),
    )
    plans += [ag.compile(PLAIN, target=CPU, **each) for each in options]
    plans.append(ag.compile(PLAIN, target="a100"))
    assert len({id(plan) for plan in plans}) == len(plans)
    assert ag.compile(PLAIN, target=CPU, avoid=("cudnn",)) in plans
    assert ag.compile(PLAIN, target=CPU) is plain
