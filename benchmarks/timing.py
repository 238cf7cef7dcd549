"""Timing that stays right on a shared machine: interleaved runs, medians of ratios."""

from __future__ import annotations

import json
import math
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import attn_graph as ag

Job = Callable[[], object]
RESULTS = Path(__file__).parent / "results"
SHORTEST, ENOUGH = 2e-3, 0.05  # seconds
SLOW = 4


@frozen
class Timing:
    """Median seconds of our job and of the peer's; a ratio over 1 means that ours is faster."""

    ours: float
    peer: float
    ratio: float  # the median of each pair's ratio, so that drift cancels
    least_ratio: float  # of the fastest runs, which others on the machine disturbed least


def versus(ours: Job, peer: Job, runs: int = 9) -> Timing:
    """Time two jobs in turn, after a warm-up of both."""
    ours()
    peer()
    pairs = [(seconds(ours), seconds(peer)) for _ in range(runs)]
    mine, theirs = (statistics.median(x) for x in zip(*pairs, strict=True))
    least = [min(x) for x in zip(*pairs, strict=True)]
    return Timing(mine, theirs, statistics.median(p / o for o, p in pairs), least[1] / least[0])


def seconds_in_turn(
    jobs: Mapping[str, Job], runs: int = 9, fill: float = 0.0
) -> dict[str, list[float]]:
    """Seconds of a call in each run, by name; the jobs take turns, after a warm-up of all.

    The first job is what the others are compared with. There are so many runs, or more until its
    own fill so many seconds: a turn of a short job differs from the next by more than two jobs that
    are compared.
    A run repeats a job until SHORTEST is full, by the faster of its first two calls, the first of
    which may prepare others. A job is called once before its turn: else its caches would be those
    of its neighbour, and after a job of large tensors it would pay for the pages that this freed.
    A job that takes more than ENOUGH, and SLOW times as long as the first one, has no calls but
    the first two. The order changes from run to run.
    """
    first = {name: min(seconds(job), seconds(job)) for name, job in jobs.items()}
    own = next(iter(first.values()))
    most = max(ENOUGH, SLOW * own)
    counts = {name: int(SHORTEST / time) + 1 for name, time in first.items() if time < most}
    times: dict[str, list[float]] = {name: [] for name in counts}
    order, turn = random.Random(0), max(SHORTEST, own)
    for _ in range(max(runs, math.ceil(fill / turn))):
        for name in order.sample(sorted(counts), len(counts)):
            jobs[name]()
            times[name].append(seconds(partial(repeat, jobs[name], counts[name])) / counts[name])
    return {name: times.get(name, [first[name]]) for name in jobs}


def repeat(job: Job, count: int) -> None:
    """Call a job so many times."""
    for _ in range(count):
        job()


def seconds(job: Job) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def microseconds_in_turn(
    jobs: Mapping[str, Job], calls: int = 100, rounds: int = 200
) -> dict[str, float]:
    """The time of this thread in a call of each job, by name.

    All take turns, so that what slows the machine down slows all; of the rounds the tenth
    percentile counts, which others on the machine disturbed little.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            job()
            start = time.thread_time()
            for _ in range(calls):
                job()
            times[name].append(time.thread_time() - start)
    return {n: sorted(x)[rounds // 10] / calls * 1e6 for n, x in times.items()}


def microseconds(job: Job, calls: int = 2000, rounds: int = 15) -> float:
    """The mean time of a call in the fastest of some rounds, the least disturbed one."""
    job()

    def mean() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            job()
        return (time.perf_counter() - start) / calls * 1e6

    return min(mean() for _ in range(rounds))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": name_cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "native": list(ag.Target.of("cpu").native),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "libraries": dict(ag.Target.of("cpu").libraries),
        "attn_graph": ag.__version__,
        "commit": commit(),
    }


def name_cpu() -> str:
    """The CPU, with its family, which a virtual machine's name may leave out: of one name are CPUs
    that multiply at different rates."""
    pairs = (x.partition(":") for x in reversed(cpu_lines()))
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    name = facts.get("model name", platform.processor())
    if "cpu family" not in facts:
        return name
    return f"{name}, family {facts['cpu family']}, model {facts['model']}"


def cpu_lines() -> list[str]:
    """What Linux says of the CPUs."""
    info = Path("/proc/cpuinfo")
    return info.read_text().splitlines() if info.exists() else []


def commit() -> str:
    """The commit of the checkout, short."""
    process = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    return process.stdout.strip()


def save(name: str, rows: Sequence[dict[str, Any]], **more: object) -> Path:
    """Write rows with the machine beside them, and what else says where they are from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{date.today().isoformat()}.json"
    path.write_text(json.dumps({"machine": machine() | more, "rows": rows}, indent=1) + "\n")
    return path
