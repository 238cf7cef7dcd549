"""One-line faults, each put into a copy of the sources and caught by a test: `make mutants`.

tests/mutants.toml lists them. A fault that no test catches either names its reason, or the run
fails and says so. First all the tests run without a fault: those that fail by themselves catch
nothing. `python tests/mutants.py WORD ...` runs those whose file or text has a word.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn, final

import pytest
from attrs import frozen

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
SOURCES = ("attn_graph", "kernels", "lowering", "tests", "docs", "examples", "benchmarks")
FILES = ("pyproject.toml", "README.md", "Makefile")
SECONDS = 600  # of a fault's tests, which need some seconds
PROCESSES = multiprocessing.get_context("forkserver")  # which import PyTorch once for all
PROCESSES.set_forkserver_preload(["torch._functorch.pyfunctorch", "hypothesis.strategies"])
ENVIRONMENT = {  # of all processes
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "HYPOTHESIS_PROFILE": "unshrunk",
}
RAN = 100  # what exit codes of pytest begin from: 1 is also that of a process that fails by itself
Tests = tuple[str, ...]  # by pytest's node ids
LOG = "pytest.log"  # in a copy
# broken: no test ran, or not to its end, so that nothing is known.
Outcome = Literal["caught", "survived", "explained", "broken"]


@final
@frozen
class Fault:
    """A line changed, and the tests that are to see it.

    survives: why no test can, where the changed line means the same. interpreted: whether Triton's
    kernels are to be interpreted.
    """

    file: str
    old: str
    new: str
    tests: Tests
    interpreted: bool = False
    survives: str = ""

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"


def read_faults() -> list[Fault]:
    faults = tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**each, "tests": tuple(each["tests"])}) for each in faults]


def copy_sources(to: Path) -> None:
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)
    compileall.compile_dir(to, quiet=2)  # a file that is changed later is compiled anew


@contextmanager
def put_in(fault: Fault, root: Path) -> Iterator[None]:
    """The fault, in a copy, until the block ends."""
    path = root / fault.file
    before = path.read_bytes()
    fault.apply(root)
    try:
        yield
    finally:
        path.write_bytes(before)


def run_pytest(tests: Sequence[str], interpreted: bool, root: Path, log: Path) -> NoReturn:
    """Run tests in a copy, what they print going to a file, and exit as pytest does."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ |= {"PYTHONPATH": str(root), "TRITON_INTERPRET": str(int(interpreted))}
    options = [
        "-x",
        "-q",
        "-n0",
        "-m",
        "not gpu",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    sys.exit(RAN + pytest.main([*options, *tests]))


def run_tests(
    tests: Sequence[str], interpreted: bool, root: Path, seconds: float | None = None
) -> int | None:
    """pytest's exit code from RAN on, or below 0 where it crashes; None where it takes longer."""
    process = PROCESSES.Process(target=run_pytest, args=(tests, interpreted, root, root / LOG))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def check_without_faults(faults: Sequence[Fault], root: Path) -> None:
    """Raise RuntimeError for tests that fail, or that are not there, where nothing is wrong."""
    for interpreted in (False, True):
        some = [fault for fault in faults if fault.interpreted == interpreted]
        tests = sorted({test for fault in some for test in fault.tests})
        if tests and run_tests(tests, interpreted, root) != RAN:
            log = (root / LOG).read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the tests fail without any fault:\n{log}")


def outcome_of(fault: Fault, root: Path) -> Outcome:
    with put_in(fault, root):
        code = run_tests(fault.tests, fault.interpreted, root, SECONDS)
    if code == RAN:
        return "explained" if fault.survives else "survived"
    return "caught" if code is not None and (code < 0 or code == RAN + 1) else "broken"


def run_all(faults: Sequence[Fault], jobs: int) -> list[tuple[Fault, Outcome]]:
    """Every fault's outcome, printed as it comes; each job has a copy of its own."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy_sources(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))
        check_without_faults(faults, Path(folder) / "0")

        def run(fault: Fault) -> tuple[Fault, Outcome]:
            root = copies.get()
            try:
                outcome = outcome_of(fault, root)
            finally:
                copies.put(root)
            print(f"{outcome}: {fault}", flush=True)
            return fault, outcome

        return [*pool.map(run, faults)]


def main(*words: str) -> None:
    os.environ |= ENVIRONMENT
    chosen = [f for f in read_faults() if not words or any(w in str(f) for w in words)]
    results = run_all(chosen, os.cpu_count() or 1)
    names: tuple[Outcome, ...] = ("caught", "explained", "survived", "broken")
    counts = {name: sum(outcome == name for _, outcome in results) for name in names}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    raise SystemExit(bool(counts["survived"] + counts["broken"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
