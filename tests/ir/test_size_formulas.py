"""Formulas of sizes: what a function computes and decides by some is right for others too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_graph.spec.formulas import (
    Recording,
    SizeBounds,
    capacity,
    decide,
    defer,
    highest,
    is_one,
    lowest,
)

Number = Any  # an integer, or a formula
FUNCTIONS: dict[str, Callable[[Number, Number], Number]] = {
    "blocks": lambda m, n: -(-m // 128) * 8 * n,
    "sums": lambda m, n: (3 - m + 0) * (n - 1) - n * 1 + 7,
    "remainders": lambda m, n: (m * 64) % 16 + n % 16 - (m - m),
    "halves": lambda m, n: m * 64 // 32 + n // 1 + (m + n) // highest(1, n),
    "ends": lambda m, n: highest(-m, lowest(n - m, n), 5) + lowest(m, 10**6) - highest(m, -3),
    "branches": lambda m, n: m if m <= n else n + 1 if n == 1 else n * (2 if m != 7 else 3),
    "order": lambda m, n: sum(i * x for i, x in enumerate(sorted((m, n, 40, m * n)))),
    "bits": lambda m, n: (1 << (m - 1).bit_length()) + bool(n - 1) + 100 // n,
    "indices": lambda m, n: sum(range(m)) + n,
    "floats": lambda m, n: int(m * 0.5 + n / 4 + 1.0 / n),
    "deferred": lambda m, n: defer(lambda x: x[0] ** 2 + x[1], (m, n + 1)) + 1,
    "decided": lambda m, n: decide(lambda x: x[0] % 3, (m,)) * n,
}
sizes = st.tuples(st.integers(1, 60), st.integers(1, 300))


def record(
    function: Callable[[Number, Number], Number], given: tuple[int, int]
) -> tuple[Callable[..., Number], Number]:
    """What was recorded of a function in some sizes, and what it gave."""
    recording = Recording()
    bounds = SizeBounds(1, 60), SizeBounds(1, 300)
    result = function(*map(recording.add_size, given, bounds))
    return recording.compile(result), getattr(result, "value", result)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(first=sizes, others=st.lists(sizes, max_size=8))
def test_what_is_recorded_is_what_the_function_gives(
    name: str, first: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    plan, result = record(FUNCTIONS[name], first)
    assert result == plan(*first) == FUNCTIONS[name](*first)
    assert all(plan(*x) in (None, FUNCTIONS[name](*x)) for x in others)


@pytest.mark.parametrize("name", ["blocks", "sums", "remainders", "halves", "ends", "deferred"])
@given(first=sizes, other=sizes)
def test_arithmetic_decides_nothing(
    name: str, first: tuple[int, int], other: tuple[int, int]
) -> None:
    plan, _ = record(FUNCTIONS[name], first)
    assert plan(*other) is not None


def test_what_bounds_decide_is_not_recorded() -> None:
    recording = Recording()
    n: Number = recording.add_size(64, SizeBounds(16, 4096, 16))
    assert n > 0
    assert n
    assert n % 16 == 0
    assert not n * 2 + 1 < 33
    assert not is_one(n)
    assert capacity(n * 2) == 8192
    assert not recording.lines or all(name for name, _ in recording.lines)
    assert n >= 64
    assert n > 63  # known by now
    assert [text for name, text in recording.lines if not name] == [f"({n} >= 64)"]
