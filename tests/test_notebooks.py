"""Every notebook runs from top to bottom in a kernel of its own, as the site runs and shows it."""

from __future__ import annotations

import re

import jupytext
import nbclient
import pytest

from tests.support.sources import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SECONDS = 120  # of one cell, in which a kernel that hangs is stopped


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str) -> None:
    notebook = jupytext.read(FOLDER / f"{name}.py")
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute(cwd=FOLDER)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert any(cell.outputs for cell in cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_text_that_begins_with_its_title(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert re.match(r"# %% \[markdown\]\n# # \w", text)


def test_the_site_shows_every_notebook_and_there_are_no_others() -> None:
    shown = re.findall(r"notebooks/(\w+)\.py", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(shown) == NAMES
    assert not [*(ROOT / "docs").rglob("*.ipynb")]
