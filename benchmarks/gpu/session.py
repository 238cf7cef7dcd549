"""Runs items one after another, each in a process of its own with a time limit of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import final

from attrs import frozen

from benchmarks.gpu.page import make_page
from benchmarks.gpu.results import (
    Outcome,
    Results,
    Row,
    State,
    describe_sources,
    open_results,
)
from benchmarks.gpu.wheels import ROOT, is_installed

LOG_LINES = 20  # of what a failed item printed last
INTERRUPTED = 130
RESULTS = ROOT / "benchmarks" / "results"
DEVICE = "benchmarks.gpu.device:Gpu"


@final
@frozen
class Item:
    """A thing to do. function: "module:function", called with the device and `emit`.

    estimate: seconds that it takes on an H200. limit: seconds after which it is ended. uses:
    packages without which a part of it is left out, so that it is not done.
    """

    name: str
    function: str
    estimate: float
    limit: float
    uses: tuple[str, ...] = ()

    @property
    def lacks(self) -> str:
        """What is to be said of packages that it uses and that are not installed; "" of none."""
        missing = [name for name in self.uses if not is_installed(name)]
        return f"without {', '.join(missing)}: not installed" if missing else ""


FLASH = ("flash-attn-4",)
CUDNN = ("nvidia-cudnn-frontend",)
BOTH = (*FLASH, *CUDNN)
ITEMS = (  # in order of worth
    Item("doctor", "benchmarks.gpu.checks:diagnose_machine", 15, 90),
    Item("smoke", "benchmarks.gpu.checks:try_first", 50, 150, BOTH),
    Item("self-checks", "benchmarks.gpu.checks:prove_kernels", 60, 240, FLASH),
    Item("tests: kernels", "benchmarks.gpu.checks:run_kernel_tests", 150, 480),
    Item("D 128", "benchmarks.gpu.tables:measure_wide", 100, 300, BOTH),
    Item("windows", "benchmarks.gpu.tables:measure_windows", 80, 240, BOTH),
    Item("host time", "benchmarks.gpu.calls:measure_host", 60, 180),
    Item("decode", "benchmarks.gpu.tables:measure_decode", 60, 180, BOTH),
    Item("Flex", "benchmarks.gpu.tables:measure_flex", 180, 360),
    Item("raw cuDNN", "benchmarks.gpu.tables:measure_raw", 40, 120, CUDNN),
    Item("tests: cuDNN", "benchmarks.gpu.checks:run_cudnn_tests", 60, 240, CUDNN),
    Item("tests: memory, streams", "benchmarks.gpu.checks:run_memory_tests", 60, 240),
    Item("tests: others", "benchmarks.gpu.checks:run_other_tests", 30, 120),
    Item("grouped heads", "benchmarks.gpu.tables:measure_groups", 60, 180, BOTH),
    Item("soft cap", "benchmarks.gpu.tables:measure_soft_cap", 60, 180, BOTH),
    Item("D 64", "benchmarks.gpu.tables:measure_narrow", 100, 300, BOTH),
    Item("tiles", "benchmarks.gpu.tables:measure_tiles", 150, 300),
    Item("graphs on two streams", "benchmarks.gpu.calls:measure_streams", 30, 90),
    Item("compute-sanitizer", "benchmarks.gpu.tools:sanitize", 60, 240),
    Item("ncu", "benchmarks.gpu.tools:profile", 30, 120),
    Item("tutorial", "benchmarks.gpu.tables:measure_tutorial", 60, 180),
)
MACHINE = Item("machine", "benchmarks.gpu.checks:describe_machine", 15, 90)


def run_session(arguments: argparse.Namespace, items: Sequence[Item] = ITEMS) -> int:
    """Run what the arguments name, and print the page. The exit code: 0 where all is done."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_interrupt)
    chosen = choose_items(arguments.items, items)
    print(list_items(items))
    if arguments.list:
        return 0
    device = arguments.device or DEVICE
    machine = ask_machine(device) | describe_sources(arguments.commit)
    path, results = open_results(machine, arguments.out or RESULTS, restart=arguments.restart)
    due = chosen if arguments.items else [*select_due(items, results)]
    code = 0
    try:
        results = run_items(due, results, path, device, arguments.minutes)
    except KeyboardInterrupt:
        results, code = Results.load(path), INTERRUPTED
        print("interrupted: the same command goes on from here")
    page = make_page(results, [item.name for item in items])
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    print(f"\n{page}\n{path}")
    return code or int(any(True for _ in select_due(items, results)))


def raise_interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM, which `timeout` and schedulers send, and SIGHUP of a lost connection end it as
    Ctrl-C does."""
    raise KeyboardInterrupt


def choose_items(names: Sequence[str], items: Sequence[Item]) -> list[Item]:
    """Items by name. Exits for a name that there is not."""
    known = {item.name: item for item in items}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no item is called {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names]


def list_items(items: Sequence[Item]) -> str:
    """A line for each item, and the sum."""
    lines = [
        f"{item.name:24} about {item.estimate:4.0f} s, at most {item.limit:4.0f} s"
        for item in items
    ]
    total = sum(item.estimate for item in items) / 60
    return "\n".join((*lines, f"about {total:.0f} minutes on an H200, all together"))


def select_due(items: Sequence[Item], results: Results) -> Iterator[Item]:
    """What is not done: first what never ran to its end, then what did not end well."""
    states = {name: outcome.state for name, outcome in results.outcomes.items()}
    open_ = (None, "interrupted")
    yield from (item for item in items if states.get(item.name) in open_)
    yield from (item for item in items if states.get(item.name) not in (*open_, "done"))


def ask_machine(device: str) -> Row:
    """What the machine is, by a process of its own. Exits where that fails."""
    outcome = run_item(MACHINE, device, MACHINE.limit)
    if outcome.state != "done":
        raise SystemExit(f"no GPU to measure on: {outcome.error}")
    return outcome.rows[0]


def run_items(
    items: Sequence[Item], results: Results, path: Path, device: str, minutes: float | None
) -> Results:
    """Run items and write the file after each one."""
    end = time.monotonic() + (60 * minutes if minutes else float("inf"))
    results.save(path)
    for item in items:
        left = end - time.monotonic()
        if item.estimate > left:
            print(f"{item.name}: left for another run, {left:.0f} s remain of this one")
            continue
        print(f"{item.name}: about {item.estimate:.0f} s ...", flush=True)
        outcome = run_item(item, device, min(item.limit, left))
        results = results.add(item.name, outcome)
        results.save(path)
        if outcome.state == "interrupted":
            raise KeyboardInterrupt
        print(f"{item.name}: {outcome.state} in {outcome.seconds:.0f} s, {len(outcome.rows)} rows")
        if outcome.error:
            print(outcome.error)
    return results


def run_item(item: Item, device: str, limit: float) -> Outcome:
    """One item in a process of its own, which is ended at the limit and on an interrupt. The rows
    that it wrote until then are kept."""
    with TemporaryDirectory() as folder:
        log, rows = Path(folder, "log"), Path(folder, "rows")
        rows.touch()
        program = (sys.executable, "-m", "benchmarks.gpu.child", item.function, str(rows), device)
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                program, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            cut: State | None = None
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                cut = "timed out"
            except KeyboardInterrupt:
                cut = "interrupted"
            finally:
                end_group(process)
        seconds = round(time.monotonic() - start, 1)
        own = Ended(cut, process.returncode, seconds, limit)
        return judge(item, own, *read_rows(rows), log)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: what hangs on a GPU does not hear less."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # none of them is left
        return
    finally:
        process.wait()


@final
@frozen
class Ended:
    """How a process ended. cut: why it was ended from here; None: by itself, with a code."""

    cut: State | None
    code: int
    seconds: float
    limit: float

    @property
    def problem(self) -> str:
        """What is to be said of it; "" if it ended well."""
        if self.cut == "timed out":
            return f"ended after {self.limit:.0f} s"
        if self.cut is not None:
            return f"interrupted after {self.seconds:.0f} s"
        if not self.code:
            return ""
        return f"killed by signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


def judge(item: Item, ended: Ended, rows: list[Row], garbage: list[str], log: Path) -> Outcome:
    """The outcome of an item whose process ended."""
    problems = [ended.problem] if ended.problem else []
    if garbage:
        problems.append(f"{len(garbage)} lines are not rows, such as {garbage[0]!r}")
    if not problems and not rows:
        problems.append("it gave no row")
    if item.lacks:
        problems.append(item.lacks)
    state: State = ended.cut or ("failed" if problems else "done")
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    error = "\n".join(("; ".join(problems), *last)) if problems else ""
    return Outcome(state, ended.seconds, error, tuple(rows))


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and the lines that are none."""
    rows: list[Row] = []
    garbage = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line, parse_constant=refuse_constant)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            garbage.append(line)
    return rows, garbage


def refuse_constant(name: str) -> None:
    """Infinity and NaN are not JSON, though Python reads them."""
    raise ValueError(f"{name} is not a figure")
