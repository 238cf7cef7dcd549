"""What tests that change how CPUs plan need."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from attrs import evolve

import attn_graph as ag
from attn_graph.kernels import row_sums
from attn_graph.lowering.cpu import (
    fused_tiles,
    row_core,
    row_tiles,
    run_mask,
    schedule,
    tile_grid,
    ways,
)
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.rates import CpuRates

SMALL_LIMITS: dict[ModuleType, dict[str, int]] = {
    row_sums: {"PIECE_OF_ONE": 16, "PIECE": 8, "MOST_INDEXED": 128},
    row_core: {"LEAST_SUMMED": 0, "LONG_NUMBERS": 0, "MOST_CAST": 64, "LEAST_KEYS": 3},
    row_tiles: {"LEAST_READ": 0},
    run_mask: {"LEAST_CUT": 0},
    tile_grid: {"FEW_SCORES": 2**8, "SCORES": 2**12, "WHOLE_MASKED_ROWS": 32},
    schedule: {"MOST_SHARED": 1, "LEAST_TASKS": 1, "LEAST_FULL": 8},
    fused_tiles: {"MOST_PACKED": 2**10, "LEAST_KEYS": 16, "JOINED": 2**12},
}


def forget_plans() -> None:
    """Graphs that come again are planned again, by the limits of then."""
    ag.clear_cache()
    facts_of.cache_clear()
    row_sums.list_rows.cache_clear()


def shrink_limits(patch: pytest.MonkeyPatch) -> None:
    """Small problems are computed as large ones are: in several tiles, runs, parts and pieces."""
    for module, limits in SMALL_LIMITS.items():
        for name, limit in limits.items():
            patch.setattr(module, name, limit)
    forget_plans()


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
