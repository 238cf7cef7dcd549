"""What tests that change how CPUs plan need."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attrs import evolve

import attn_graph as ag
from attn_graph.lowering.cpu import ways
from attn_graph.lowering.cpu.math import tile_equations
from attn_graph.lowering.rates import CpuRates


def forget_plans() -> None:
    """Graphs that come again are planned again, by the limits of then."""
    ag.clear_cache()
    tile_equations.cache_clear()


def prefer_way(patch: pytest.MonkeyPatch, name: str) -> None:
    """Every problem runs this way on CPUs, unless the way refuses it."""
    free = [evolve(way, seconds=lambda _: 0.0) if way.name == name else way for way in ways.WAYS]
    patch.setattr(ways, "WAYS", tuple(free))
    forget_plans()


@contextmanager
def one_way(name: str) -> Iterator[None]:
    """Plans made meanwhile run this way, so graphs with and without sizes give the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        prefer_way(patch, name)
        yield
    forget_plans()


def prefer_kept_weights(patch: pytest.MonkeyPatch) -> None:
    """Every forward keeps its weights that can, in no more memory than its operands take."""
    patch.setattr(ways, "kept_seconds", lambda _: 0.0)
    forget_plans()


@pytest.fixture(autouse=True)
def new_plans() -> Iterator[None]:
    """No plan outlives the prices that it was made by."""
    yield
    forget_plans()


def force_kernel(patch: pytest.MonkeyPatch, rates: CpuRates) -> None:
    """The fused kernel runs, at these prices."""
    patch.setattr(ways, "cpu_rates", lambda _: rates)
    prefer_way(patch, "kernel")
