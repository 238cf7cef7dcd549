"""Timing calls jobs as it says. How long they take is nobody's promise."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from attn_graph.measuring import timing
from attn_graph.measuring.timing import LEAST_ROUNDS, MOST_ROUNDS, samples

WARM_UP = 2


@pytest.fixture(autouse=True)
def _one_call_makes_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SAMPLE", 0.0)


def test_jobs_take_turns_after_all_are_warm() -> None:
    said: list[str] = []
    jobs = {name: lambda name=name: said.append(name) for name in "ab"}
    taken = [*samples(jobs, seconds=0)]
    assert said == ["a", "a", "b", "b", *"ab" * LEAST_ROUNDS]
    assert [name for name, _ in taken] == [*"ab" * LEAST_ROUNDS]
    assert all(seconds > 0 for _, seconds in taken)


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LEAST_ROUNDS), (1e9, MOST_ROUNDS)])
def test_rounds_have_a_least_and_a_most(seconds: float, rounds: int) -> None:
    calls: list[int] = []
    taken = [*samples({"job": lambda: calls.append(1)}, seconds=seconds)]
    assert len(taken) == rounds
    assert len(calls) == WARM_UP + rounds


def test_a_short_job_is_called_often_enough_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SAMPLE", 1e-3)
    calls: list[int] = []
    taken = [*samples({"job": lambda: calls.append(1)}, seconds=0)]
    assert len(taken) == LEAST_ROUNDS
    assert len(calls) > WARM_UP + LEAST_ROUNDS


def test_a_sample_is_of_a_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    assert [*samples({"job": lambda: None}, seconds=0)] == [("job", 1.0)] * LEAST_ROUNDS


def test_progress_is_told_in_words() -> None:
    told: list[str] = []
    assert [*samples({"job": lambda: None}, seconds=0, progress=told.append)]
    assert told == ["job: warming up", *(f"job: run {n + 1}" for n in range(LEAST_ROUNDS))]


def test_without_jobs_there_is_nothing_to_tell() -> None:
    assert not [*samples({}, seconds=1e9)]


def test_an_error_of_a_job_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        next(samples({"job": lambda: 1 // 0}))


@pytest.mark.gpu
def test_a_gpu_tells_the_time_by_its_own_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(4096, 4096, device=device)
    jobs = {"small": lambda: x[:512] @ x, "large": lambda: x @ x}
    taken = [*samples(jobs, device=device)]
    small, large = (statistics.median(s for n, s in taken if n == name) for name in jobs)
    assert 0 < small < large
