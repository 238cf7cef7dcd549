"""Targets: the table of devices, and the machine that is here."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.kernels.tilings import SHARED
from attn_graph.machine import target as module
from attn_graph.machine.gpus import devices
from tests.support.gpus import box, placed

NAMES = (
    *("a100", "h100", "h200", "b200", "b300", "l40s", "rtx4090"),
    *("rtx5090", "rtxpro6000", "l4", "a10g", "h20", "gh200", "gb200", "gb300", "gb10"),
)


def test_the_table_holds_the_devices_that_are_promised() -> None:
    assert tuple(devices()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_devices_numbers_fit_each_other(name: str) -> None:
    device = devices()[name]
    wires = 2 * device.memory_clock_khz * 1e3 * device.bus_bits / 8  # two bits a clock and wire
    assert device.bandwidth == pytest.approx(wires, rel=0.03)  # data sheets round
    rates = dict(device.peaks)
    assert rates["f16"] == rates["bf16"] >= rates["tf32"] >= rates["f32"]
    cores = device.multiprocessors * (64 if device.sm == 80 else 128)
    assert rates["f32"] == pytest.approx(2 * cores * device.clock_khz * 1e3, rel=0.03)
    assert device.shared_memory == SHARED[device.sm]
    assert device.shared_memory_per_sm == device.shared_memory + 1024  # the system's share


@pytest.mark.parametrize("name", NAMES)
def test_a_target_tells_what_the_table_holds(name: str) -> None:
    target, device = ag.Target.of(name), devices()[name]
    assert (target.kind, target.sm, target.memory) == ("cuda", device.sm, device.memory)
    assert target.peak("bf16") == dict(device.peaks)["bf16"]
    assert target.peak("f64") is None
    assert target == ag.Target.of(name)
    assert hash(target) == hash(ag.Target.of(name))
    assert evolve(target, bandwidth=1e12) != target


def test_a_cpu_tells_no_rates() -> None:
    target = ag.Target.of("cpu")
    assert (target.bandwidth, target.memory, target.peaks) == (None, None, ())


def test_an_unknown_target_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ag.GraphError, match="'h300' is not known; known are cpu, cuda, a100, h100, h200"
    ):
        ag.Target.of("h300")


def test_this_machine_is_what_pytorch_tells_with_the_tables_rates() -> None:
    with box("h200") as here:
        target, known = ag.Target.here(), devices()["h200"]
    assert (target.name, target.sm, target.memory) == ("NVIDIA H200", 90, here.gpus[0].total_memory)
    assert (target.bandwidth, target.peaks, target.l2) == (known.bandwidth, known.peaks, known.l2)
    assert (target.multiprocessors, target.shared_memory) == (132, 232448)


def test_a_product_that_the_table_lacks_has_no_rates() -> None:
    with box("h200") as here:
        here.gpus[0].name = "NVIDIA H200 NVL"
        target = ag.Target.here()
    assert (target.bandwidth, target.peaks) == (None, ())
    assert target.memory == here.gpus[0].total_memory


# Several GPUs in one machine


X = ag.TensorSpec((1, 2, 64, 16), torch.float16)
GRAPH = ag.attention(X, X, X)


def noting(indices: list[int]) -> ag.extend.Backend:
    """A backend that notes which GPU is current while it lowers, and gives q back."""

    def lower(*_: object) -> ag.extend.Executable:
        indices.append(torch.cuda.current_device())
        return ag.extend.Executable(lambda *tensors: (tensors[:1], ()))

    return ag.extend.Backend("noting", lambda *_: (), lower)


def test_here_is_the_current_gpu_or_the_one_that_is_said() -> None:
    with box("h200", "a100") as here:
        first, second = (ag.Target.here(f"cuda:{n}") for n in range(2))
        assert (first.name, second.name) == ("NVIDIA H200", devices()["a100"].product)
        assert ag.Target.here() == ag.Target.here("cuda") == first
        here.current = 1
        assert ag.Target.here() == ag.Target.here(torch.device("cuda")) == second
        assert ag.Target.here("cpu") == ag.Target.of("cpu")
        assert (str(first.device), str(second.device)) == ("cuda:0", "cuda:1")
        assert ag.Target.of("b200").device is None


@pytest.mark.parametrize("device", ["cuda:2", "mps", "xpu:0"])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(device: str) -> None:
    with (
        box("h200", "a100"),
        pytest.raises(ag.GraphError, match=f"'{device}' is not here; here are cuda:0, cuda:1, cpu"),
    ):
        ag.Target.here(device)


def test_without_a_gpu_there_is_the_cpu() -> None:
    with box():
        assert ag.Target.here() == ag.Target.of("cpu")
        assert ag.Target.here().device == torch.device("cpu")


def test_a_plan_is_for_the_gpu_that_is_current_when_it_is_asked_for() -> None:
    with box("h200", "a100", "h200") as here:
        plans = []
        for here.current in range(3):
            plans.append(ag.compile(GRAPH, backends=("triton",)))
        first, second, third = plans
        assert second.target == ag.Target.here("cuda:1")
        assert first is third, "equal GPUs share their plans"
        assert ag.compile(GRAPH, target=second.target, backends=("triton",)) is second


def test_tensors_on_another_kind_of_gpu_are_refused_with_the_way_out() -> None:
    with box("h200", "a100", "h200"):
        backends = (noting([]),)
        plan = ag.compile(GRAPH, backends=backends)
        for device in ("cuda:0", "cuda:2", "cuda:0"):
            q, k, v = (placed(X, device) for _ in "qkv")
            assert plan(q, k, v) is q
            with pytest.raises(
                ag.PlanTargetError,
                match=r"for NVIDIA H200 .*, and cuda:1 is .*A100.*target=Target.here\('cuda:1'\)",
            ):
                plan(*(placed(X, "cuda:1") for _ in "qkv"))
        other = ag.compile(GRAPH, target=ag.Target.here("cuda:1"), backends=backends)
        q, k, v = (placed(X, "cuda:1") for _ in "qkv")
        assert other(q, k, v) is q
        with pytest.raises(ag.PlanMismatchError, match="on one device, got q on cuda:0, k on cuda"):
            plan(placed(X, "cuda:0"), *(placed(X, "cuda:2") for _ in "kv"))
        with pytest.raises(ag.PlanMismatchError, match="a tensor on cuda, got one on cpu"):
            plan(*(torch.zeros(X.shape, dtype=X.dtype) for _ in "qkv"))


def test_planning_is_done_with_the_targets_gpu_current() -> None:
    with box("h200", "a100", "h200") as here:
        indices: list[int] = []
        backend = noting(indices)
        for here.current in (0, 1, 2):
            for name in ("cuda:1", "cuda:2"):
                target = ag.Target.here(name)
                ag.clear_cache()
                ag.compile(GRAPH, target=target, backends=(backend,))
                ag.explain(GRAPH, target=target, backends=(backend,), gradients=())
        assert indices == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2]
        assert here.current == 2
        ag.compile(GRAPH, target="b200", backends=(backend,))
        assert indices[-1] == 2


def test_steps_by_definition_compute_where_their_operands_lie() -> None:
    """Not on whichever GPU is current: the gradient of an input without use is made of nothing."""

    def weights(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        return ag.scores(q, k).mask(ag.Causal()).softmax()[0]

    plan = ag.compile(ag.graph(weights, q=X, k=X, v=X), target="h200", backends=("math",)).vjp
    tensors = [
        torch.empty(i.spec.shape, dtype=i.spec.dtype, device="meta") for i in plan.graph.inputs
    ]
    gradients, _ = plan.executable.run(*tensors)
    assert [g.device.type for g in gradients] == ["meta"] * 3


SYSTEMS = (  # what PyTorch says of the cuDNN that it loads, and its version
    (92000, "9.20.0"),
    (91002, "9.10.2"),
    (8907, "8.9.7"),
    (None, None),
)


@pytest.mark.parametrize(("number", "told"), SYSTEMS)
def test_a_cudnn_that_pip_did_not_install_is_told(
    number: int | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a system, conda or a container: it has no metadata that Python knows of."""
    found = {"torch": "2.13.0", "nvidia-cudnn-frontend": "1.28.0"}
    monkeypatch.setattr(module, "version_of", found.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    libraries = dict(module.installed_libraries.__wrapped__())
    assert libraries == found | ({"cudnn": told} if told else {})


def test_a_cudnn_that_pip_installed_is_told_as_pip_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"nvidia-cudnn-cu13": "9.20.0.48"}
    monkeypatch.setattr(module, "version_of", found.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert dict(module.installed_libraries.__wrapped__()) == found


def test_a_cudnn_that_pytorch_does_not_load_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(module, "version_of", lambda name: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert module.installed_libraries.__wrapped__() == ()
    assert "cuDNN version incompatibility" in caplog.text


@pytest.mark.gpu
def test_the_gpu_here_is_told() -> None:
    target = ag.Target.here()
    assert target.kind == "cuda"
    assert target.memory == torch.cuda.get_device_properties().total_memory
    assert target.shared_memory is not None
