"""NVIDIA's own programs, where they are installed: compute-sanitizer and Nsight Compute's ncu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu import cases
from benchmarks.gpu.child import Emit
from benchmarks.gpu.device import Device
from benchmarks.gpu.tables import make_tensors
from benchmarks.gpu.wheels import ROOT

GPU = "benchmarks.gpu.device:Gpu"
LINES = 60  # of a report: the last ones, which hold its summary
FAULTY = 9  # compute-sanitizer's exit code where it finds something


def sanitize(device: Device, emit: Emit) -> None:
    """One forward and backward under memcheck, then under racecheck. Exits with what they find."""
    found = [
        tool
        for tool in ("memcheck", "racecheck")
        if run_under(
            ("compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAULTY)),
            "benchmarks.gpu.tools:train_once",
            emit,
        )
    ]
    if found:
        raise SystemExit(f"compute-sanitizer finds faults by {' and '.join(found)}")


def profile(device: Device, emit: Emit) -> None:
    """The counters of one forward, as ncu reports them. Exits where ncu fails."""
    ncu = ("ncu", "--set", "detailed", "--clock-control", "none", "--kernel-name", "forward")
    if run_under(ncu, "benchmarks.gpu.tools:attend_once", emit):
        raise SystemExit("ncu failed; the item's row has its last lines")


def run_under(program: Sequence[str], item: str, emit: Emit) -> int:
    """Do an item in a process under a program, with a row of what that prints; its exit code.

    A program that is not installed gives a row that says so, and 0.
    """
    name, *_ = program
    if which(name) is None:
        emit({"program": name, "outcome": "not installed"})
        return 0
    with TemporaryDirectory() as folder:
        rows = str(Path(folder, "rows"))
        process = subprocess.run(
            (*program, sys.executable, "-m", "benchmarks.gpu.child", item, rows, GPU),
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    last = (process.stdout + process.stderr).splitlines()[-LINES:]
    emit({"program": " ".join(program), "exit code": process.returncode, "report": "\n".join(last)})
    return process.returncode


def attend_once(device: Device, emit: Emit) -> None:
    """One forward of Triton's kernel."""
    case = device.fit(cases.smoke_case())
    plan = device.compile(case.graph(), "triton")
    plan(*(x.detach() for x in make_tensors(device, case)))
    emit({"job": case.title, "pass": "forward"})


def train_once(device: Device, emit: Emit) -> None:
    """One forward and backward of Triton's kernels."""
    case = device.fit(cases.smoke_case())
    tensors = make_tensors(device, case)
    o = device.compile(case.graph(), "triton")(*tensors)
    assert isinstance(o, torch.Tensor)
    torch.autograd.grad(o, tensors, torch.ones_like(o))
    emit({"job": case.title, "pass": "forward and backward"})
