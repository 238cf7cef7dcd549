"""Timing calls jobs as it says. How long they take is nobody's promise."""

from __future__ import annotations

import time

import pytest
import torch

from attn_graph.machine import timing
from attn_graph.machine.timing import LEAST_ROUNDS, MOST_ROUNDS, medians

WARM_UP = 2


@pytest.fixture(autouse=True)
def _one_call_makes_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SAMPLE", 0.0)


def test_jobs_take_turns_after_all_are_warm() -> None:
    said: list[str] = []
    found = medians({name: lambda name=name: said.append(name) for name in "ab"}, seconds=0)  # type: ignore[misc]  # name is bound now
    assert said == ["a", "a", "b", "b", *"ab" * LEAST_ROUNDS]
    assert [*found] == ["a", "b"]
    assert all(each > 0 for each in found.values())


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, LEAST_ROUNDS), (1e9, MOST_ROUNDS)])
def test_rounds_have_a_least_and_a_most(seconds: float, rounds: int) -> None:
    calls: list[int] = []
    medians({"job": lambda: calls.append(1)}, seconds=seconds)
    assert len(calls) == WARM_UP + rounds


def test_a_short_job_is_called_often_enough_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST_SAMPLE", 1e-3)
    calls: list[int] = []
    medians({"job": lambda: calls.append(1)}, seconds=0)
    assert len(calls) > WARM_UP + LEAST_ROUNDS


def test_the_median_is_of_a_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    assert medians({"job": lambda: None}, seconds=0) == {"job": 1.0}


def test_progress_is_told_in_words() -> None:
    told: list[str] = []
    medians({"job": lambda: None}, seconds=0, progress=told.append)
    assert told == ["job: warming up", *(f"job: run {n + 1}" for n in range(LEAST_ROUNDS))]


def test_without_jobs_there_is_nothing_to_tell() -> None:
    assert medians({}, seconds=1e9) == {}


def test_an_error_of_a_job_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        medians({"job": lambda: 1 // 0})


@pytest.mark.gpu
def test_a_gpu_tells_the_time_by_its_own_events() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(4096, 4096, device=device)
    found = medians({"small": lambda: x[:512] @ x, "large": lambda: x @ x}, device=device)
    assert 0 < found["small"] < found["large"]
