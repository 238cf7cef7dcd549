"""The page of choices says what the planner chooses, and each choice has the least price."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.catalogue import (
    GPUS,
    PAGE,
    Row,
    cells,
    choose_all,
    count_phases,
    rows,
    write_page,
)
from docs.generate.pages import row as line_of

ROWS = tuple(rows())
SAMPLE = ROWS[::29]


def check_row(row: Row) -> None:
    """The page has the row, and each of its choices the least price of all that can run it."""
    chosen = choose_all(row.graph)
    assert line_of(*cells(row.name, chosen)) in PAGE.read_text(encoding="utf-8").splitlines()
    for choice in chosen.values():
        if choice.prices:
            assert choice.prices[choice.backend] == min(choice.prices.values())


def test_the_catalogue_has_three_hundred_graphs_with_a_name_each() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 300


@pytest.mark.parametrize("row", SAMPLE, ids=[row.name for row in SAMPLE])
def test_the_page_says_who_has_the_least_price(row: Row) -> None:
    check_row(row)


@pytest.mark.slow
def test_all_rows_of_the_page_say_who_has_the_least_price() -> None:
    for row in ROWS:
        check_row(row)


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page()


@pytest.mark.parametrize("gpu", GPUS)
def test_who_runs_how_many_graphs_of_each_phase(gpu: str, golden: Callable[[object], None]) -> None:
    golden(count_phases(gpu))
