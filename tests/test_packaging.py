"""The installed package is exactly the three source folders."""

import sys
import tomllib

import pytest

from tests.support.sources import HOMES, ROOT, source_files


def test_every_source_folder_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert source_files("__init__.py").keys() == set(project["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("name", ["kernels", "lowering"])
def test_folder_is_not_a_top_level_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with pytest.raises(ImportError, match=f"attn_graph.{name}"):
        __import__(name)


@pytest.mark.parametrize("name", ["kernels", "lowering"])
def test_link_shows_the_folder_inside_the_package(name: str) -> None:
    link = ROOT / "attn_graph" / name
    assert link.is_symlink()
    assert link.resolve() == HOMES[f"attn_graph.{name}"]
