"""Times jobs in turns, on a machine with other users."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import TypeVar

import torch

Job = Callable[[], object]
Progress = Callable[[str], None]
Time = Callable[[], float]  # seconds, once they are known
Result = TypeVar("Result")
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
LEAST_SAMPLE = 1e-3  # seconds; shorter jobs are called several times a sample


def samples(
    jobs: Mapping[str, Job],
    *,
    seconds: float = 0.5,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, float]]:
    """The name of a job and the seconds of one call, for each job in each of several rounds.

    Each job is called twice before, to warm up. Rounds go on until `seconds`, of all jobs together,
    have passed: at least 3, at most 50. device: the jobs' device; a CUDA device is timed by its own
    events. progress: called with a text of the current step. Caches are warm: a job may find its
    last reads in them.
    """
    tell, calls = progress or ignore_progress, {}
    for name, job in jobs.items():
        tell(f"{name}: warming up")
        calls[name] = calls_per_sample(job, device)
    start = time.perf_counter()
    for n in range(MOST_ROUNDS if jobs else 0):
        if n >= LEAST_ROUNDS and time.perf_counter() - start >= seconds:
            break
        for name, job in jobs.items():
            tell(f"{name}: run {n + 1}")
            yield name, sample(job, calls[name], device)


def add_medians(
    figures: dict[str, float],
    jobs: Mapping[str, Job],
    *,
    seconds: float = 0.5,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> None:
    """Add the median seconds of each job to the figures: after an interrupt too, of the samples
    until then. Arguments as in `samples`."""
    taken: dict[str, list[float]] = {}
    try:
        for name, each in samples(jobs, seconds=seconds, device=device, progress=progress):
            taken.setdefault(name, []).append(each)
    finally:
        figures.update({name: median(each) for name, each in taken.items()})


def ignore_progress(_: str) -> None:
    """The progress of those who want none."""


def calls_per_sample(job: Job, device: torch.device | None) -> int:
    """The number of calls in a sample, by the second call's time: the first may build."""
    job()
    once = sample(job, 1, device)
    return max(1, math.ceil(LEAST_SAMPLE / max(once, 1e-7)))


def sample(job: Job, calls: int, device: torch.device | None) -> float:
    """Mean seconds of some calls in a row."""

    def call_all() -> None:
        for _ in range(calls):
            job()

    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    _, seconds = run_timed(call_all, device)
    assert seconds is not None  # nothing is tuned while a CUDA graph is captured
    return seconds() / calls


def run_timed(job: Callable[[], Result], device: torch.device | None) -> tuple[Result, Time | None]:
    """The result of a job and its seconds: on a GPU by events of its stream, before and after.

    None for the seconds while a CUDA graph is captured.
    """
    if device is None or device.type != "cuda":
        start = time.perf_counter()
        result = job()
        seconds = time.perf_counter() - start
        return result, lambda: seconds
    if torch.cuda.is_current_stream_capturing():
        return job(), None
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        first.record()
        result = job()
        last.record()

    def wait() -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return result, wait
