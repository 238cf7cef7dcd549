"""Runs FlashAttention 4's own tests on virtual GPUs: `make fa4-virtual FA4_TESTS=.../tests/cute`.

Writes their table into docs/reports/virtual.md. It takes half an hour of one core. Tests that were
right are not run again, until .fa4 is removed: what each gave is kept there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from docs.generate.pages import fill, table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reports" / "virtual.md"
KEPT = ROOT / ".fa4"
PART = "FlashAttention 4's own tests"
COMBINE = (
    "(test_flash_attn_combine and ([1- or [2- or [5- or [17-) and -3- and (-64- or -128-))"
    " or dynamic_splits or forwards_explicit"
    " or (test_flash_attn_combine_varlen and [cu_seqlens-2-32-64) or (virtual_batch and [2-32-64)"
)
SMALL = "test_flash_attn_combine or varlen_tensor_max"
CHOSEN: Mapping[str, Mapping[str, str]] = {  # by GPU, then file: an expression of pytest's -k
    "h100": {
        "test_flash_attn_fast.py": "(test_flash_attn_output and -1-m and (128-128- or 113-203-))"
        " or (test_flash_attn_output and -1-g and (128-128- or 113-203-))"
        f" or (test_flash_attn_varlen_output and [128-) or (({SMALL}) and not -256-)",
        "test_flash_attn_combine.py": COMBINE,
    },
    "b200": {
        "test_flash_attn_fast.py": "(test_flash_attn_output and 128-128-64)"
        " or (test_flash_attn_output and 113-203-128-True)"
        f" or (test_flash_attn_varlen_unpad_output and 128-64-True-mqa) or {SMALL}",
        "test_flash_attn_combine.py": COMBINE,
    },
}
EXCUSED = {  # words of an error, and whose limit it is
    "arrive.shared::cluster": "its backward for sm_100 with heads of 128 has programs in "
    "pairs, clusters of two, which the virtual GPU does not have",
    "Expected IntTuple, whose leaves are integers": "the package compares a longest length that is "
    "a tensor with a number of its DSL, and raises ValueError before it launches anything",
}
TEXT = """
Its tests, of the repository's `tests/cute`, ran with flash-attn-4 {version} by `make fa4-virtual`:
those of small sizes, {count} in all. Each compares its results with PyTorch's; what the virtual GPU
reports fails it too.

{table}

{excuses}
"""


def execute(tests: Path) -> None:
    """All chosen tests that have not been right yet."""
    KEPT.mkdir(exist_ok=True)
    for gpu, files in CHOSEN.items():
        for file, expression in files.items():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.fa4_own"]
            command += ["-c", os.devnull, "--rootdir", ".", "-k", expression, file]
            where = {"PYTHONPATH": str(ROOT), "VIRTUAL_GPU": gpu, "RESULTS": str(results(gpu))}
            subprocess.run(command, cwd=tests, env=os.environ | where, check=False)


def results(gpu: str) -> Path:
    return KEPT / f"{gpu}.jsonl"


def told_by(gpu: str) -> dict[str, str]:
    """What each test gave at last: nothing where it was right, else its error."""
    lines = results(gpu).read_text("utf-8").splitlines()
    each: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {x["test"]: x["said"] for x in each}


def excuse_of(said: str) -> str:
    """Whose limit an error is. Raises KeyError for one that nothing excuses."""
    return next((why for words, why in EXCUSED.items() if words in said), "") or EXCUSED[said]


def report() -> str:
    """The table, and the excused tests."""
    told = {gpu: told_by(gpu) for gpu in CHOSEN}
    names = sorted({test.partition("[")[0] for each in told.values() for test in each})
    rows: list[tuple[object, ...]] = []
    for name in names:
        each = [[x for t, x in told[gpu].items() if t.partition("[")[0] == name] for gpu in CHOSEN]
        rows.append((f"`{name}`", *(f"{x.count('')} of {len(x)}" if x else "-" for x in each)))
    every = [[*told[gpu].values()] for gpu in CHOSEN]
    rows.append(("all", *(f"{x.count('')} of {len(x)}" for x in every)))
    wrong = {(test, said) for each in told.values() for test, said in each.items() if said}
    excuses = sorted({f"- `{test}`: {excuse_of(said)}" for test, said in wrong})
    return TEXT.format(
        version=version("flash-attn-4"),
        count=sum(map(len, every)),
        table=table(("right", "sm_90", "sm_100"), rows),
        excuses="Excused, one by one:\n\n" + "\n".join(excuses) if excuses else "None is excused.",
    )


def kept_part(page: str) -> str:
    """The part of a page that this module writes."""
    found = re.search(rf"<!-- {re.escape(PART)} -->\n.*?<!-- end -->\n", page, re.DOTALL)
    return found[0] if found else f"<!-- {PART} -->\n<!-- end -->\n"


if __name__ == "__main__":
    execute(Path(sys.argv[1]))
    PAGE.write_text(fill(PAGE.read_text("utf-8"), {PART: report}), encoding="utf-8")
