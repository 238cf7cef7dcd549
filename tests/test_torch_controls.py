"""docs/torch-controls.md names every control of the installed PyTorch, and none that is gone."""

from __future__ import annotations

import re
from inspect import signature

import pytest
import torch

import attn_graph as ag
from tests.sources import ROOT
from tests.torch_names import listed

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
pytestmark = pytest.mark.skipif(OLD, reason="the page lists the controls of torch 2.13 and newer")
PAGE = (ROOT / "docs" / "torch-controls.md").read_text(encoding="utf-8")
LISTED = listed()


def written() -> dict[str, list[str]]:
    """The names in the first column of each section's table, by the section's title."""
    found: dict[str, list[str]] = {}
    for section in PAGE.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
        found[title.strip("`")] = [n for cell in cells for n in re.findall(r"`(\w+)`", cell)]
    return found


def test_every_module_has_a_section() -> None:
    assert written().keys() == LISTED.keys()


@pytest.mark.parametrize("module", sorted(LISTED))
def test_every_name_is_there_once_and_none_that_is_gone(module: str) -> None:
    names = written()[module]
    assert sorted(names) == sorted(set(names)), "named twice"
    new, gone = LISTED[module] - set(names), set(names) - LISTED[module]
    assert not new, f"new in PyTorch: say in docs/torch-controls.md what {new} are here"
    assert not gone, f"gone from PyTorch: take {gone} out of docs/torch-controls.md"


def test_a_name_that_is_new_or_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(torch.backends.cuda, "enable_new_sdp", lambda on: None, raising=False)
    torch.backends.cuda.enable_new_sdp.__module__ = "torch.backends.cuda"  # type: ignore[attr-defined]  # just set
    monkeypatch.delattr(torch.backends.openmp, "is_available")
    now = listed()
    assert now["torch.backends.cuda"] - LISTED["torch.backends.cuda"] == {"enable_new_sdp"}
    assert LISTED["torch.backends.openmp"] - now["torch.backends.openmp"] == {"is_available"}


def test_every_backend_and_option_that_it_names_exists() -> None:
    named = set(re.findall(r"`(torch_\w+|cudnn|triton|math)`", PAGE.split("\n## ")[0]))
    names = {backend.name for backend in ag.BACKENDS}
    assert named <= names
    for option in ("avoid", "backends", "deterministic", "on_fallback", "precision"):
        assert option in signature(ag.compile).parameters
        assert f"{option}=" in PAGE
