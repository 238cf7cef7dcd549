"""One-line faults, each put into a copy of the sources and caught by a test: `make mutants`.

tests/mutants.toml lists them. A fault that no test catches either names its reason, or the run
fails and says so. `python tests/mutants.py WORD ...` runs those whose file or text has a word.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Literal, final

from attrs import frozen

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
SOURCES = ("attn_graph", "kernels", "lowering", "tests", "docs", "examples", "benchmarks")
FILES = ("pyproject.toml", "README.md", "Makefile")
SECONDS = 600  # a fault that makes tests hang is caught
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
    tests: tuple[str, ...]
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


def run_tests(fault: Fault, root: Path) -> int:
    """pytest's exit code; 1 where it hangs."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if fault.interpreted else {})
    line = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", "not gpu", *fault.tests]
    try:
        done = subprocess.run(line, cwd=root, env=env, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def outcome_of(fault: Fault, root: Path) -> Outcome:
    with put_in(fault, root):
        code = run_tests(fault, root)
    if code == 1:
        return "caught"
    if code != 0:
        return "broken"  # no test was run
    return "explained" if fault.survives else "survived"


def run_all(faults: Sequence[Fault], jobs: int) -> list[tuple[Fault, Outcome]]:
    """Every fault's outcome, printed as it comes; each job has a copy of its own."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy_sources(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))

        def run(fault: Fault) -> tuple[Fault, Outcome]:
            root = copies.get()
            outcome = outcome_of(fault, root)
            copies.put(root)
            print(f"{outcome}: {fault}", flush=True)
            return fault, outcome

        return [*pool.map(run, faults)]


def main(*words: str) -> None:
    chosen = [f for f in read_faults() if not words or any(w in str(f) for w in words)]
    results = run_all(chosen, os.cpu_count() or 1)
    names: tuple[Outcome, ...] = ("caught", "explained", "survived", "broken")
    counts = {name: sum(outcome == name for _, outcome in results) for name in names}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    raise SystemExit(bool(counts["survived"] + counts["broken"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
