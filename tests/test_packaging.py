"""What is installed is what the project says: folders, versions, Pythons, and the demo's needs."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

import attn_graph as ag
from tests.support.sources import HOMES, ROOT, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_source_folder_is_declared() -> None:
    assert source_files("__init__.py").keys() == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("pyproject.toml", r'^version = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
        ("CHANGELOG.md", r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$"),
    ],
)
def test_every_file_names_the_same_version(name: str, form: str) -> None:
    newest, *_ = re.findall(form, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert newest == ag.__version__


def test_ci_runs_every_python_that_the_project_names() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r'"(3\.\d+)"', workflow))) == sorted(named)


def test_the_demo_installs_only_the_library_and_what_examples_need() -> None:
    """What make would run if nothing were installed."""
    program = ["make", "-n", "-W", "pyproject.toml", "demo"]
    own = {name: x for name, x in os.environ.items() if name not in ("MAKEFLAGS", "INSTALL")}
    commands = subprocess.run(
        program, cwd=ROOT, env=own, capture_output=True, text=True, check=True
    ).stdout
    (install,) = re.findall(r"pip install -q -c constraints.txt (-e.*)", commands)
    assert install == "-e '.' -e '.[examples]'"


def test_changes_since_the_release_are_listed_by_kind() -> None:
    for path in (ROOT / "changelog.d").glob("[0-9]*.md"):
        heads = re.findall("^#.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert heads, f"{path.name}: see changelog.d/README.md"
        assert set(heads) <= {f"### {kind}" for kind in ("Added", "Changed", "Fixed", "Removed")}


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
