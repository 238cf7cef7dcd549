"""Memory of a long attention, measured from outside."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.sources import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_attention_stays_within_a_few_tiles() -> None:
    """16384 x 16384 scores of 8 heads would be 8 GiB; 200 MiB are allowed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.search(r"peak growth ([-\d.]+) MiB", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 200, done.stdout
