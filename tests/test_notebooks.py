"""Every notebook is shown by the site, which runs it from top to bottom: `make docs`."""

from __future__ import annotations

import re
import runpy

import pytest
import torch

from tests.support.sources import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_text_that_begins_with_its_title(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert re.match(r"# %% \[markdown\]\n# # \w", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = runpy.run_path(str(FOLDER / f"{name}.py"))
    tensors = [x for x in made.values() if isinstance(x, torch.Tensor)]
    assert tensors
    assert all(x.is_cpu and x.isfinite().all() for x in tensors)


def test_the_site_shows_every_notebook_and_there_are_no_others() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r"notebooks/(\w+)\.py", site)) == NAMES
    assert "execute: true" in site
    assert "allow_errors: false" in site
    assert not [*(ROOT / "docs").rglob("*.ipynb")]
