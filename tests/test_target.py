"""Targets: the table of devices, and the machine that is here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph import target as module
from attn_graph.devices import devices
from attn_graph.lowering.offline import SHARED
from tests.sources import ROOT

NAMES = ("a100", "h100", "h200", "b200", "b300", "l40s", "rtx4090")


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
    with pytest.raises(ag.GraphError, match="'h20' is not known; known are cpu, a100, h100, h200"):
        ag.Target.of("h20")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that PyTorch tells of."""
    told = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        total_memory=150_109_945_856,
        L2_cache_size=62_914_560,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: told)
    module.machine.cache_clear()
    yield told
    module.machine.cache_clear()


def test_this_machine_is_what_pytorch_tells_with_the_tables_rates(here: SimpleNamespace) -> None:
    target, known = ag.Target.here(), devices()["h200"]
    assert (target.name, target.sm, target.memory) == ("NVIDIA H200", 90, here.total_memory)
    assert (target.bandwidth, target.peaks, target.l2) == (known.bandwidth, known.peaks, known.l2)
    assert (target.multiprocessors, target.shared_memory) == (132, 232448)


def test_a_product_that_the_table_lacks_has_no_rates(here: SimpleNamespace) -> None:
    here.name = "NVIDIA H200 NVL"
    target = ag.Target.here()
    assert (target.bandwidth, target.peaks) == (None, ())
    assert target.memory == here.total_memory


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
    libraries = dict(module.installed.__wrapped__())
    assert libraries == found | ({"cudnn": told} if told else {})


def test_a_cudnn_that_pip_installed_is_told_as_pip_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"nvidia-cudnn-cu13": "9.20.0.48"}
    monkeypatch.setattr(module, "version_of", found.get)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert dict(module.installed.__wrapped__()) == found


def test_a_cudnn_that_pytorch_does_not_load_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(module, "version_of", lambda name: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert module.installed.__wrapped__() == ()
    assert "cuDNN version incompatibility" in caplog.text


@pytest.mark.gpu
def test_the_gpu_here_is_told() -> None:
    target = ag.Target.here()
    assert target.kind == "cuda"
    assert target.memory == torch.cuda.get_device_properties().total_memory
    assert target.shared_memory is not None


def test_importing_the_library_does_not_read_the_table() -> None:
    code = "import attn_graph, attn_graph.devices as d; print(d.devices.cache_info().currsize)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"
