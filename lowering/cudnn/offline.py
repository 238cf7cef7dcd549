"""Plans of cuDNN for GPUs absent from the machine: in a process with a stand-in driver."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from attrs import evolve, frozen

from attn_graph.errors import Reason
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.cudnn import builder as cudnn_builder
from attn_graph.lowering.processes import run_apart
from attn_graph.lowering.reasons import dead_planner
from attn_graph.machine.gpus import Device, devices
from attn_graph.machine.target import Target, Version

COMPILERS = ("cc", "gcc", "clang")
OVERLAID = ("sm", "multiprocessors", "shared_memory", "memory", "l2")  # fields of Target too
DRIVER = 13000  # CUDA 13.0, for targets without a driver version
PATIENCE = 60  # seconds per call; building a plan takes one or two
SOURCE = Path(__file__).with_name("stand_in.c")


@final
@frozen
class Answer:
    """cuDNN's answer to one call.

    report: the answer of builder.py: cuDNN's report on its plan, or the stage and message of its
    refusal. plan: as cuDNN reads it back; empty without one.
    """

    report: dict[str, Any]  # Any: JSON
    plan: bytes

    @property
    def refusal(self) -> str | None:
        """The stage and message of cuDNN's refusal; None without one."""
        stage = self.report.get("stage")
        return stage and f"{stage}: {self.report['message']}"


def ask_cudnn(
    calls: Sequence[dict[str, Any]],  # Any: JSON, as `CudnnCall.plain` gives it
    device: str,
    sm: int,
    *,
    build: bool = True,
    plan: str | None = None,
    python: str = sys.executable,
) -> tuple[tuple[Version, Version], list[Answer]]:
    """The versions of cuDNN and its frontend, and cuDNN's answer to each call for a device.

    device: its description, as `describe_target` writes it. plan: see `build_graph`. python: an
    interpreter with cuDNN. Raises RefusedError if the stand-in driver can't be built, and if the
    process fails or takes too long.
    """
    common = {"device": device, "sm": sm, "build": build, "plan": plan}
    requests = [{"call": call, **common} for call in calls]
    with TemporaryDirectory() as folder:
        Path(folder, "requests.json").write_text(json.dumps(requests))
        program = (python, "-P", cudnn_builder.__file__, driver_library(folder), folder)
        failure, _ = run_apart(program, seconds=PATIENCE * (1 + len(calls)))
        answers = Path(folder, "answers.jsonl")  # missing if the process fails at once
        lines = answers.read_text().splitlines() if answers.exists() else []
        reports = [json.loads(line) for line in lines]
        if failure or len(reports) != 1 + len(calls):
            at = f", at call {len(reports)} of {len(calls)}" if len(calls) > 1 else ""
            raise RefusedError(dead_planner((failure or "ended without an answer") + at))
        paths = [Path(folder, f"{n}.plan") for n in range(len(calls))]
        plans = [path.read_bytes() if path.exists() else b"" for path in paths]
    return parse_versions(reports[0]), [
        Answer(*each) for each in zip(reports[1:], plans, strict=True)
    ]


def parse_versions(numbers: dict[str, Any]) -> tuple[Version, Version]:  # Any: JSON
    """The versions of cuDNN and of its frontend, from `builder.library_versions`."""
    n = numbers["backend"]
    major, minor, patch = map(int, numbers["frontend"].split(".")[:3])
    return (n // 10000, n // 100 % 100, n % 100), (major, minor, patch)


def check_frontend() -> None:
    """Raises RefusedError if cuDNN's frontend is not installed in this process."""
    if find_spec("cudnn") is None:
        actual = "which is not installed here; pip install 'attn-graph[offline]'"
        limit = "plans through nvidia-cudnn-frontend"
        raise RefusedError(Reason("planning_frontend", limit, actual, "{limit}, {actual}"))


def driver_library(folder: str) -> str:
    """The path of a stand-in driver, built in a folder; "-" if there is a real driver."""
    return "-" if has_driver() else compile_stand_in(Path(folder))


def compiler() -> str | None:
    """The path of a C compiler to build the stand-in, if there is one."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def compile_stand_in(folder: Path, source: Path = SOURCE, *options: str) -> str:
    """Build a stand-in, in some hundredths of a second; its path. Raises RefusedError."""
    program = compiler()
    if program is None:
        limit = "plans without a GPU through a stand-in for its driver, which needs a C compiler"
        actual = f"none of {', '.join(COMPILERS)} is on the path"
        raise RefusedError(Reason("c_compiler", limit, actual))
    name = "libcuda.so.1"
    library = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name))
    process = subprocess.run(
        (program, *library, *options, str(source)), capture_output=True, text=True, check=False
    )
    if process.returncode:
        actual = f"which {program} can't build: {process.stderr}"
        limit = "needs a stand-in driver"
        raise RefusedError(Reason("stand_in", limit, actual, "{limit}, {actual}"))
    return str(folder / name)


def describe_target(target: Target) -> str:
    """A target as cuDNN describes devices, in JSON. Raises RefusedError for an unknown GPU."""
    device = devices().get(target.name)
    if device is None:
        limit = f"plans for GPUs that are not there from {', '.join(devices())}"
        raise RefusedError(Reason("absent_gpu", limit, f"not for {target}"))
    fields = {name: getattr(target, name) for name in OVERLAID}
    own = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(device_properties(evolve(device, **own), target.driver or DRIVER))


def device_properties(device: Device, driver: int) -> dict[str, Any]:  # Any: JSON
    """A device as cuDNN describes it. Literal numbers here are equal on all GPUs.

    driver: the version of CUDA of its driver, 13000 for 13.0.
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
