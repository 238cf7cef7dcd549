"""Lengths that vary: what planning them costs is counted, bounded, and said once."""

from __future__ import annotations

import gc
import logging
import random
import sys

import pytest
import torch

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.plan.cache import cache
from attn_graph.planner.forms import builds
from attn_graph.planner.forms.builds import MANY, MOST_KINDS, BuildLog


def graph(M: int, N: int, **options: object) -> ag.Graph:
    q, k = (ag.TensorSpec((1, 2, n, 8), torch.float32) for n in (M, N))
    return ag.attention(q, k, k, **options)  # type: ignore[arg-type]  # options of attention


def lengths(count: int) -> list[tuple[int, int]]:
    numbers = random.Random(0)
    return [(numbers.randrange(1, 4096), numbers.randrange(1, 4096)) for _ in range(count)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    ag.clear_cache()
    monkeypatch.setattr(builds, "COSTLY", 0.0)  # seconds


@pytest.mark.parametrize(
    ("backend", "target"), [("math", "cpu"), ("torch_sdpa", "cpu"), ("triton", "h200")]
)
def test_the_hint_comes_once_and_names_what_varies(
    backend: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    dtype = torch.bfloat16 if target == "h200" else torch.float32
    with caplog.at_level(logging.WARNING, "attn_graph"):
        for n in range(1, 3 * MANY):
            q, k = ag.TensorSpec((1, 2, 8 * n, 64), dtype), ag.TensorSpec((1, 2, 64, 64), dtype)
            ag.compile(ag.attention(q, k, k), target=target, backends=(backend,), store=False)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"{MANY} plans were built in ")
    assert " s that differ only in q [1, 2, *, 64]. " in text
    assert "k [" not in text


def test_it_names_all_that_varies(caplog: pytest.LogCaptureFixture) -> None:
    for n in range(1, MANY + 1):
        ag.compile(graph(n, 2 * n), target="cpu")
    assert "differ only in q [1, 2, *, 8], k [1, 2, *, 8], v [1, 2, *, 8]. " in caplog.text
    ag.clear_cache()
    caplog.clear()
    for n in range(1, MANY + 1):
        ag.compile(graph(4, 4, soft_cap=float(n)), target="cpu")
    assert "differ only in the numbers of attention. " in caplog.text
    ag.clear_cache()
    caplog.clear()
    for n in range(1, MANY + 1):
        x = ag.TensorSpec((1, 2, 4, 8), torch.float32, (64 * n, 32 * n, 8, 1))
        ag.compile(ag.attention(x, x, x), target="cpu")
    assert "differ only in the strides of q, the strides of k, the strides of v. " in caplog.text


def test_functions_of_tensors_are_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    k = torch.randn(1, 2, 4, 8)
    for n in range(1, 2 * MANY):
        attention(torch.randn(1, 2, n, 8), k, k)
    assert len(caplog.records) == 1


def test_few_plans_and_many_kinds_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for n in range(1, MANY):
        ag.compile(graph(n, n), target="cpu")
        ag.compile(graph(n, n), target="cpu")
    assert not caplog.records
    assert len(cache.builds.kinds) <= MOST_KINDS


def test_many_plans_that_took_no_time_say_nothing_until_they_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builds, "COSTLY", 10.0)
    log = BuildLog()
    for n in range(1, 2 * MANY):
        log.add(graph(n, n), 0.07)
    assert not caplog.records
    assert [len(each.last) for each in log.kinds.values()] == [MANY]
    for n in range(20):
        log.add(graph(n + 1, n + 1), 0.07)
    (record,) = caplog.records
    assert record.getMessage().startswith("143 plans were built in 10.0 s that differ only in q ")


def test_the_cache_says_what_building_cost() -> None:
    assert ag.cache_info().seconds_each == 0
    for M, N in lengths(20):
        ag.compile(graph(M, N), target="cpu")
    info = ag.cache_info()
    assert info.builds == 20
    assert info.seconds_each * 20 == pytest.approx(info.seconds)
    assert info.seconds > 0


def test_a_loop_over_lengths_holds_no_more_than_the_caches_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def live() -> int:
        gc.collect()
        return sum(type(x) is ag.Plan for x in gc.get_objects())

    before = live()
    for part in (cache.plans, cache.calls):  # a 64th of each
        monkeypatch.setattr(part, "capacity", part.capacity // 64)
    counts = []
    for n, (M, N) in enumerate(lengths(80)):
        ag.compile(graph(M, N, mask=ag.Causal("top_left")), target="cpu", backends=("math",))
        if n in (39, 79):
            counts.append(live() - before)
    assert counts[0] == counts[1] <= 16
    assert len(cache.looks) == 0


def unbounded_sizes() -> dict[str, int]:
    """How many results each function of the package holds that forgets none."""
    functions = {
        f"{f.__module__}.{f.__qualname__}": f
        for name, module in [*sys.modules.items()]
        if name.startswith("attn_graph")
        for f in vars(module).values()
        if hasattr(f, "cache_parameters") and f.cache_parameters()["maxsize"] is None
    }
    return {name: f.cache_info().currsize for name, f in functions.items()}


@pytest.mark.parametrize(
    ("backend", "target"), [("math", "cpu"), ("torch_sdpa", "cpu"), ("triton", "h200")]
)
def test_what_is_never_forgotten_does_not_grow_with_lengths(backend: str, target: str) -> None:
    """Each kernel that some length needs is met among the first ones."""

    def compile_for(M: int, N: int) -> None:
        q, k = (ag.TensorSpec((1, 2, n, 64), torch.float32) for n in (M, N))
        causal = ag.attention(q, k, k, mask=ag.Causal("top_left"))
        ag.compile(causal, target=target, backends=(backend,), store=False)

    for M, N in lengths(40):
        compile_for(M, N)
    before = unbounded_sizes()
    assert before
    for M, N in lengths(40):
        compile_for(M + 1, N + 1)
    assert unbounded_sizes() == before
