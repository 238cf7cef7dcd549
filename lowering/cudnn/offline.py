"""cuDNN asked about GPUs that are not there: in a process of its own, beside a stand-in driver."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from attrs import evolve, frozen

from attn_graph.backend import RefusedError
from attn_graph.errors import Reason
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.cudnn.case import Version
from attn_graph.machine.gpus import Device, devices
from attn_graph.machine.target import Target

COMPILERS = ("cc", "gcc", "clang")
OVERLAID = ("sm", "multiprocessors", "shared_memory", "memory", "l2")  # fields of Target's as well
DRIVER = 13000  # CUDA 13.0, where a target does not say what its driver knows
PATIENCE = 60  # seconds a call; a plan takes one or two
SOURCE = Path(__file__).with_name("stand_in.c")


@final
@frozen
class Answer:
    """What cuDNN said to one call: what it told of the plan it built, or where it stopped."""

    told: dict[str, Any]  # Any: JSON
    plan: bytes

    @property
    def refusal(self) -> str | None:
        """The stage at which cuDNN took it no further, and its words; None if it took it."""
        stage = self.told.get("stage")
        return stage and f"{stage}: {self.told['said']}"


def ask_cudnn(
    calls: Sequence[dict[str, Any]],  # Any: JSON, as `Call.plain` gives it
    device: str,
    sm: int,
    *,
    build: bool = True,
    plan: str | None = None,
    python: str = sys.executable,
) -> tuple[tuple[Version, Version], list[Answer]]:
    """cuDNN's version and its frontend's, and its answer to each call for a device.

    device: its description, as `description` writes it. plan: see `cudnn_builder.planned`.
    python: what runs cuDNN. Raises RefusedError where no such process can be had, RuntimeError
    where it dies.
    """
    asks = {"device": device, "sm": sm, "build": build, "plan": plan}
    requests = [{"call": call, **asks} for call in calls]
    with TemporaryDirectory() as folder:
        Path(folder, "requests.json").write_text(json.dumps(requests))
        program = (python, "-P", cudnn_builder.__file__, driver(folder), folder)
        done = subprocess.run(
            program,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE * (1 + len(calls)),
        )
        told = [json.loads(line) for line in lines(Path(folder, "answers.jsonl"))]
        if done.returncode or len(told) != 1 + len(calls):
            raise RuntimeError(
                f"cuDNN's planner stopped with {done.returncode} at call {len(told)} of "
                f"{len(calls)}: {done.stderr[-2000:]}"
            )
        plans = [read_contents(Path(folder, f"{n}.plan")) for n in range(len(calls))]
    return parse_versions(told[0]), [Answer(*each) for each in zip(told[1:], plans, strict=True)]


def parse_versions(told: dict[str, Any]) -> tuple[Version, Version]:  # Any: JSON
    """Of cuDNN, which tells 92000 for 9.20.0, and of its frontend."""
    n = told["backend"]
    major, minor, patch = map(int, told["frontend"].split(".")[:3])
    return (n // 10000, n // 100 % 100, n % 100), (major, minor, patch)


def read_contents(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def lines(path: Path) -> Iterator[str]:
    if path.exists():
        yield from path.read_text().splitlines()


def check_frontend() -> None:
    """Raises RefusedError where cuDNN's frontend can't be imported, whatever the target says."""
    if find_spec("cudnn") is None:
        actual = "which is not installed here; pip install 'attn-graph[offline]'"
        limit = "plans through nvidia-cudnn-frontend"
        raise RefusedError(Reason("planning_frontend", limit, actual, "{limit}, {actual}"))


def driver(folder: str) -> str:
    """The library that stands in for the GPU's driver, built in a folder; "-" for a real one."""
    return "-" if has_driver() else compile_stand_in(Path(folder))


def compiler() -> str | None:
    """The C compiler that builds the stand-in, if there is one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def has_driver() -> bool:
    """Whether the real driver is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def compile_stand_in(folder: Path) -> str:
    """Build it; that takes some hundredths of a second. Raises RefusedError where it can't be."""
    program = compiler()
    if program is None:
        limit = "plans without a GPU through a stand-in for its driver, which needs a C compiler"
        actual = f"none of {', '.join(COMPILERS)} is on the path"
        raise RefusedError(Reason("c_compiler", limit, actual))
    name = "libcuda.so.1"
    options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name))
    done = subprocess.run(
        (program, *options, str(SOURCE)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        actual = f"which {program} can't build: {done.stderr}"
        limit = "needs a stand-in driver"
        raise RefusedError(Reason("stand_in", limit, actual, "{limit}, {actual}"))
    return str(folder / name)


def description(target: Target) -> str:
    """A target as cuDNN reads of devices, in JSON. Raises RefusedError for one without a table."""
    device = devices().get(target.name)
    if device is None:
        limit = f"plans for GPUs that are not there from {', '.join(devices())}"
        raise RefusedError(Reason("absent_gpu", limit, f"not for {target}"))
    told = {name: getattr(target, name) for name in OVERLAID}
    own = {name: value for name, value in told.items() if value is not None}
    return json.dumps(properties(evolve(device, **own), target.driver or DRIVER))


def properties(device: Device, driver: int) -> dict[str, Any]:  # Any: JSON
    """All that cuDNN asks of a device; what is no field of ours is the same for all of them.

    driver: the version of CUDA that it knows, 13000 for 13.0.
    """
    return {
        "deviceName": device.product,
        "deviceVer": device.sm * 10,
        "driverVer": driver,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "warpSize": 32,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": device.threads_per_sm,
        "maxCtasPerSM": device.programs_per_sm,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": device.shared_memory,
        "reservedSharedMemoryPerBlock": 1024,
        "oversizedSharedMemoryPerBlock": 0,
        "multiProcessorCount": device.multiprocessors,
        "smCountOrigin": 0,
        "smClockRateKHz": device.clock_khz,
        "memClockRateKHz": device.memory_clock_khz,
        "memoryBusWidth": device.bus_bits,
        "l2CacheSize": device.l2,
        "totalGlobalMem": device.memory,
    }
