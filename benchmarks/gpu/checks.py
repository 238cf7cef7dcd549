"""What is true of a machine before figures are: who it is, its health, and the tests on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.cli.diagnosis import Surroundings, diagnose
from benchmarks.gpu import cases
from benchmarks.gpu.child import Emit
from benchmarks.gpu.device import Device
from benchmarks.gpu.results import describe_driver
from benchmarks.gpu.wheels import ROOT

TESTS = ROOT / "tests"
MARK = "pytest.mark.gpu"
KERNELS, SEQUENCES, CUDNN, MEMORY = (
    TESTS / "lowering" / f"test_gpu{name}.py" for name in ("", "_sequences", "_cudnn", "_memory")
)
WORKERS = min(8, os.cpu_count() or 1)  # processes that compile kernels beside each other
LINES = 3  # of a failure: the last ones


def describe_machine(device: Device, emit: Emit) -> None:
    """The GPU, the driver and all versions."""
    emit(
        {
            "gpu": device.target.name,
            "driver": describe_driver(),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "libraries": dict(device.target.libraries),
            "attn_graph": ag.__version__,
        }
    )


def diagnose_machine(device: Device, emit: Emit) -> None:
    """What `attn-graph doctor` says. Exits with what is broken."""
    diagnosis = diagnose(Surroundings.here(), ag.default_store())
    emit({"doctor": diagnosis.to_dict()})
    if diagnosis.problems:
        raise SystemExit("\n".join(diagnosis.problems))


@final
@frozen
class Reports:
    """A plugin of pytest's that emits a row for each test as it ends."""

    emit: Emit

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A row when a test ran, or when it did not come to that."""
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome}
            self.emit(row | {"s": round(report.duration, 2)} | describe_failure(report))


def describe_failure(report: pytest.TestReport) -> dict[str, str]:
    """The last lines of what went wrong, or why it was skipped; nothing of a test that passed."""
    if report.outcome == "passed":
        return {}
    return {"text": "\n".join(report.longreprtext.splitlines()[-LINES:])}


def prove_kernels(device: Device, emit: Emit) -> None:
    """Self-checks of kernels that no test can run. Exits with those that fail."""
    failures = []
    for case in cases.checked_cases():
        graph = case.graph()
        for title, each in ((case.title, graph), (f"{case.title}, backward", ag.vjp(graph)[1])):
            variant, proof = device.check(each, "gluon")
            emit({"job": title, "variant": variant, "outcome": str(proof)})
            failures += [f"{title}: {proof}"] if proof.failure else []
    if failures:
        raise SystemExit("\n".join(failures))


def run_tests(emit: Emit, files: Sequence[Path], *, workers: int = 1) -> None:
    """Run the tests of these files that need a GPU. Exits with pytest's code if one fails."""
    arguments = ["-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, files)]
    if workers > 1 and find_spec("xdist"):
        arguments += ["-n", str(workers)]
    if code := pytest.main(arguments, plugins=[Reports(emit)]):
        raise SystemExit(int(code))


def run_kernel_tests(device: Device, emit: Emit) -> None:
    """All of our kernels against the formula."""
    run_tests(emit, [KERNELS, SEQUENCES], workers=WORKERS)


def run_cudnn_tests(device: Device, emit: Emit) -> None:
    """cuDNN against the formula."""
    run_tests(emit, [CUDNN])


def run_memory_tests(device: Device, emit: Emit) -> None:
    """Streams, captured graphs and full memory: one after another, since they fill it."""
    run_tests(emit, [MEMORY])


def run_other_tests(device: Device, emit: Emit) -> None:
    """All other tests that are marked gpu."""
    run_tests(emit, [*other_files()])


def other_files() -> Iterator[Path]:
    """Files of tests that name the mark, but for those that other items run."""
    named = KERNELS, SEQUENCES, CUDNN, MEMORY
    for path in sorted(TESTS.rglob("test_*.py")):
        if path not in named and MARK in path.read_text(encoding="utf-8"):
            yield path
