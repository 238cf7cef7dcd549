"""How many examples properties draw, and that random ones can be drawn again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import EXAMPLES
from tests.support.memory import MOST, memory_problem, peak_memory
from tests.support.sources import ROOT

PROPERTY = """
from hypothesis import given, strategies as st

@given(x=st.integers())
def test_that_says_what_it_draws(x):
    print("drawn", x)
"""


def test_the_deep_profile_is_random_and_ten_times_as_many() -> None:
    deep = settings.get_profile("deep")
    assert not deep.derandomize
    assert deep.max_examples == 10 * EXAMPLES


def test_every_number_of_examples_follows_the_profile() -> None:
    """But those on GPUs, where `make deep` does not run."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: say it in settings().max_examples"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if not path.name.startswith("test_gpu")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"max_examples=\d+[,)]", line)
    ]
    assert not wrong, "\n".join(wrong)


def drawn(folder: Path, *options: str) -> tuple[str, list[str]]:
    """The seed that a deep run prints, and what it draws."""
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", *options, str(folder)],
        cwd=ROOT, env={**os.environ, "HYPOTHESIS_PROFILE": "deep"},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    seed = re.search(r"make deep SEED=(\d+) ", told)
    assert seed is not None, told
    return seed[1], re.findall(r"drawn (-?\d+)", told)


@pytest.mark.slow
def test_a_deep_run_is_repeated_by_its_seed(tmp_path: Path) -> None:
    (tmp_path / "test_property.py").write_text(PROPERTY)
    seed, first = drawn(tmp_path)
    assert len(first) >= 100
    assert drawn(tmp_path, f"--hypothesis-seed={seed}") == (seed, first)


def test_a_test_fails_that_takes_more_memory_than_it_may() -> None:
    held = 2**30, 3 * MOST  # by earlier tests
    assert not memory_problem(held, (2**30 + MOST, 3 * MOST))
    assert not memory_problem(held, held)
    assert f"{held[0]} of its process; most is {MOST}" in memory_problem(
        held, (2**30 + MOST + 1, 3 * MOST)
    )
    assert f"{held[1]} of its children" in memory_problem(held, (2**30, 4 * MOST + 1))
    assert peak_memory()[0] > 0
