"""docs/torch-controls.md names every control of the installed PyTorch, and none that is gone."""

from __future__ import annotations

import re
from inspect import signature

import pytest
import torch

import attn_graph as ag
from attn_graph.extend import BACKENDS
from tests.support.sources import ROOT
from tests.support.torch_names import listed

Version = tuple[int, ...]
VERSION: Version = tuple(map(int, torch.__version__.split(".")[:2]))
PAGE = (ROOT / "docs" / "torch-controls.md").read_text(encoding="utf-8")
LISTED = listed()


def names_in(text: str, version: Version) -> list[str]:
    """The names in a text, but for those that say that a version has them not yet."""
    found = re.findall(r"`([\w.]+)`(?: \(from (\d+)\.(\d+)\))?", text)
    return [name for name, *since in found if tuple(map(int, filter(None, since))) <= version]


def written(version: Version) -> dict[str, list[str]]:
    """The names in the first column of each section's table, by the section's title."""
    found: dict[str, list[str]] = {}
    for section in PAGE.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        cells = " ".join(line.split("|")[1] for line in lines if line.startswith("| `"))
        found |= {name: names_in(cells, version) for name in names_in(title, version)}
    return found


def test_every_module_has_a_section() -> None:
    assert written(VERSION).keys() == LISTED.keys()


@pytest.mark.parametrize("module", sorted(LISTED))
def test_every_name_is_there_once_and_none_that_is_gone(module: str) -> None:
    names = written(VERSION)[module]
    assert sorted(names) == sorted(set(names)), "named twice"
    new, gone = LISTED[module] - set(names), set(names) - LISTED[module]
    assert not new, f"new in PyTorch: say in docs/torch-controls.md what {new} are here"
    assert not gone, f"gone from PyTorch: take {gone} out of docs/torch-controls.md"


def test_versions_have_the_names_that_came_with_them_or_before() -> None:
    old, now, new = (written((2, minor)) for minor in (11, 13, 15))
    assert now.keys() - old.keys() == {"torch.backends.python_native"}
    assert "blas_workspace_size" in {*now["torch.backends.cuda"]} - {*old["torch.backends.cuda"]}
    matmul = "torch.backends.cuda.matmul"
    assert {*new[matmul]} - {*now[matmul]} == {"prefer_cublaslt_grouped_gemm"}
    native = "torch.backends.python_native"
    assert {*new[native]} - {*now[native]} == {"helion", "flydsl"}


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
    names = {backend.name for backend in BACKENDS}
    assert named <= names
    for option in ("avoid", "backends", "deterministic", "on_fallback", "precision"):
        assert option in signature(ag.compile).parameters
        assert f"{option}=" in PAGE
