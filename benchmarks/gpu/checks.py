"""What is true of a machine before figures are: who it is, its health, and the tests on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import final
from warnings import WarningMessage

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.cli.diagnosis import Surroundings, diagnose
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import training_gradient
from attn_graph.lowering.backend import RefusedError
from attn_graph.measuring.device_test import tensors_of
from benchmarks.gpu import cases
from benchmarks.gpu.child import Emit
from benchmarks.gpu.device import REFUSALS, Device
from benchmarks.gpu.results import Row, describe_driver
from benchmarks.gpu.wheels import ROOT

TESTS = ROOT / "tests"
MARK = "pytest.mark.gpu"
KERNELS, SEQUENCES, CUDNN, MEMORY = (
    TESTS / "lowering" / f"test_gpu{name}.py" for name in ("", "_sequences", "_cudnn", "_memory")
)
WORKERS = min(14, os.cpu_count() or 1)  # processes that compile kernels beside each other
PROVEN = 4  # self-checks beside each other
PATIENCE = 60.0  # seconds that a self-check may take
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
    diagnosis = diagnose(Surroundings.here(), ag.extend.default_store())
    emit({"doctor": diagnosis.to_dict()})
    if diagnosis.problems:
        raise SystemExit("\n".join(diagnosis.problems))


def try_first(device: Device, emit: Emit) -> None:
    """Both passes of one graph by triton, cudnn and fa4, by the accuracy rule. Exits with
    failures."""
    graph = simplify(device.fit(cases.smoke_case()).graph())
    failures = []
    for backend in ("triton", "cudnn", "fa4"):
        for title, each in (("forward", graph), ("backward", training_gradient(graph, None))):
            outcome = try_plan(device, each, backend)
            emit({"backend": backend, "pass": title, "outcome": outcome})
            failures += [] if outcome.startswith("ok") else [f"{backend}, {title}: {outcome}"]
    if failures:
        raise SystemExit("\n".join(failures))


def try_plan(device: Device, graph: ag.Graph, backend: str) -> str:
    """What came of a graph on a backend: "ok: ...", "WRONG: ...", or why it refuses."""
    try:
        plan = device.compile(graph, backend)
    except REFUSALS as error:
        return str(error)
    return str(plan.verify(*(x.to(device.place) for x in tensors_of(graph))))


@final
@frozen
class Reports:
    """A plugin of pytest's that emits a row for each test as it ends, and for each warning."""

    emit: Emit

    def pytest_warning_recorded(self, warning_message: WarningMessage, nodeid: str) -> None:
        """A row: a warning of this machine's libraries fails no test here."""
        self.emit({"test": nodeid, "warning": str(warning_message.message)[:300]})

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
    """Self-checks of graphs with masks and modifiers, some at a time. Exits with those that
    fail."""
    jobs = [
        (title, each)
        for case in cases.checked_cases()
        for graph in (case.graph(),)
        for title, each in ((case.title, graph), (f"{case.title}, backward", ag.vjp(graph)[1]))
    ]
    failures = []
    with ThreadPoolExecutor(PROVEN) as pool:
        outcomes = pool.map(lambda job: prove(device, job[1]), jobs)
        for (title, _), (outcome, fails) in zip(jobs, outcomes, strict=True):
            emit({"job": title} | outcome)
            failures += [f"{title}: {outcome['outcome']}"] if fails else []
    if failures:
        raise SystemExit("\n".join(failures))


def prove(device: Device, graph: ag.Graph) -> tuple[Row, bool]:
    """What came of a self-check of `fa4`, or why it refuses the graph, and whether it failed."""
    try:
        variant, proof = device.check(graph, "fa4", PATIENCE)
    except RefusedError as error:
        return {"outcome": f"refused: {error}"}, False
    return {"variant": variant, "outcome": str(proof)}, bool(proof.failure)


def run_tests(emit: Emit, files: Sequence[Path], *, workers: int = 1) -> None:
    """Run the tests of these files that need a GPU. Exits with pytest's code if one fails."""
    arguments = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", *map(str, files)]
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
