"""The table of limits and cuDNN agree on every graph of the grid, asked without a GPU.

`--cudnn-python` names a Python with another cuDNN than the one that is installed here, and with
`--every-plan` all plans are built that are else built in part.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from attn_graph.lowering.libraries.cudnn_limits import LIMITS
from tests.support.cudnn_grid import drawn, grid
from tests.support.cudnn_questions import GPUS, answers, questions, versions
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
