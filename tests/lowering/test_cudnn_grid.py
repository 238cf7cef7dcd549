"""The table of limits and cuDNN agree on every graph of the grid, asked without a GPU.

`--cudnn-python` names a Python with another cuDNN than the one that is installed here, and with
`--every-plan` all plans are built that are else built in part.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.libraries.cudnn_limits import LIMITS
from tests.support.cudnn_entries import STRIDES, Entry, Sizes
from tests.support.cudnn_grid import drawn, grid
from tests.support.cudnn_questions import GPUS, Question, answers, questions, versions
from tests.support.sources import ROOT, load_file

LEAST = 400  # graphs in the grid
PARTS = 2  # of the support check at one place
BUILDS = 4  # parts of what is built
SHARE = 9  # one plan of so many is built, unless every one is; odd, since passes take turns
KNOWN = ((9, 20, 0), (1, 28, 0))  # backend and frontend

planning = pytest.mark.skipif(find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--cudnn-python"))


@pytest.fixture
def share(request: pytest.FixtureRequest) -> int:
    return 1 if request.config.getoption("--every-plan") else SHARE


@planning
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("sm", GPUS)
def test_the_table_takes_what_cudnn_takes(sm: int, part: int, python: str) -> None:
    """Neither a false yes nor a false no, up to cuDNN's own support check."""
    given = [q for q in questions(sm, versions(python)) if q.ours != "not asked"][part::PARTS]
    told = [q.disagreement(a) for q, a in answers(given, build=False, python=python)]
    wrong = [*filter(None, told)]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(told)} disagree", *wrong])


@planning
@pytest.mark.slow
@pytest.mark.parametrize("part", range(BUILDS))
def test_plans_are_built_with_the_workspace_that_is_told(
    part: int, python: str, share: int
) -> None:
    """What the table takes is built for Hopper, and backwards need the bytes that we tell."""
    taken = [q for q in questions(90, versions(python)) if q.ours == "yes"][::share][part::BUILDS]
    found = [*answers(taken, build=True, python=python)]
    wrong = [text for q, a in found if (text := q.disagreement(a) or q.other_workspace(a))]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(found)} are wrong", *wrong])


APART: dict[str, Callable[[int, int, int, int], Sizes]] = {  # strides around the limit
    "8 more": lambda B, H, S, D: (H * S * D + 8, S * D, D, 1),
    "8 less": lambda B, H, S, D: (H * S * D - 8, S * D, D, 1),
    "rows with gaps": lambda B, H, S, D: (H * S * D, S * D, 2 * D, 1),
    "heads apart": lambda B, H, S, D: (H * S * D, S * D + 64, D, 1),
    "entries within": lambda B, H, S, D: (3 * D, 3 * B * S * D, 3 * B * D, 1),
    "half as far": lambda B, H, S, D: (H * S * D // 2, D, 4 * H * D, 1),
}


BESIDE_PACKED_KEYS = [
    (name, B, M, D) for name in APART for B, M, D in ((4, 512, 64), (1, 104, 128))
]
REFUSED = {("8 more", 4), ("heads apart", 1), ("entries within", 1), ("half as far", 1)}


@pytest.fixture
def beside_packed_keys(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Backwards of padded queries on sm_120."""
    given = []
    for name, B, M, D in BESIDE_PACKED_KEYS:
        monkeypatch.setitem(STRIDES, name, APART[name])
        entry = Entry(B=B, M=M, D=D, layout=name, k_layout="bshd", do_layout="bshd", packed="k")
        given.append(Question(f"{name}, {B}", Case(entry.problems[1], 120, *KNOWN)))
    return given


def test_padded_queries_beside_packed_keys_lie_together(beside_packed_keys: list[Question]) -> None:
    """Entries begin no further apart than each has elements; one reaches no further."""
    refused = {q.name for q in beside_packed_keys if q.against}
    assert refused == {f"{name}, {B}" for name, B in REFUSED}
    rules = {rule.name for q in beside_packed_keys for rule, _ in q.against}
    assert rules == {"packed_keys_entries"}


@planning
@pytest.mark.slow
def test_cudnn_takes_padded_queries_beside_packed_keys_where_the_table_does(
    beside_packed_keys: list[Question], python: str
) -> None:
    told = [*answers(beside_packed_keys, build=False, python=python)]
    assert not [*filter(None, (q.disagreement(a) for q, a in told))]


def test_the_grid_is_large_and_always_the_same() -> None:
    assert len(grid()) >= LEAST
    assert drawn() == drawn()


def test_each_limit_is_alone_in_refusing_something_of_the_grid() -> None:
    """Then cuDNN's answer to that tells whether the limit is right."""
    alone, places = set[str](), [questions(sm, KNOWN) for sm in GPUS]
    for question in (q for place in places for q in place):
        refusing = {rule.name for rule, _ in question.against}
        alone |= refusing if len(refusing) == 1 else set()
    held = {rule for place in places for n in (0, 1) for rule in LIMITS.at(place[n].case.place)}
    asked = {rule.name for rule in held if rule.says != "unasked"}
    assert asked - alone == {
        "architecture",  # no GPU of the table is below it
        "bias_dtype",  # no graph has such a bias
        "page_size",  # beside `pages_absent`: the grid declares no pool finite
        "statistics_rows",  # beside `statistics` at this version
    }


def test_where_cudnn_dies_the_error_tells_the_question(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(
        """#!/bin/sh
        echo '{"frontend": "1.28.0", "backend": 92000}' > $4/answers.jsonl
        echo '{"seconds": 1}' >> $4/answers.jsonl
        exit 3
        """
    )
    script.chmod(0o755)
    given = [q for q in questions(90, KNOWN) if q.ours == "yes"][:3]
    with pytest.raises(RuntimeError) as error:
        list(answers(given, build=False, python=str(script)))
    assert f"It was asked: {given[1]}" in str(error.value)


def test_the_page_tells_the_limits_of_today() -> None:
    page = report()
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.replace(text, "limits", page.limits_table()), (
        "run `.venv/bin/python -m docs.generate.cudnn`, and read the diff"
    )
    assert f"\n{len(grid())} graphs, " in text, "run `make cudnn-report`, and read the diff"


def report() -> ModuleType:
    """docs/generate/cudnn.py."""
    return load_file(ROOT / "docs" / "generate" / "cudnn.py")
