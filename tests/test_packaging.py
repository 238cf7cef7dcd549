"""What is installed is what the project says: folders, versions, Pythons, and the demo's needs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attn_graph as ag
from tests.support.sources import HOMES, ROOT, load_file, source_files, what_make_runs

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


def named_in_makefile(variable: str) -> set[str]:
    """The files of tests that a variable of the Makefile names."""
    (line,) = re.findall(f"^{variable} := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {f"test_{name}" for name in re.findall(r"(\w+\.py)", line.replace("test_", ""))}


def test_make_test_interprets_every_test_that_triton_interprets() -> None:
    """Those that are skipped elsewhere, or are of another backend there."""
    form = re.compile(
        r'"triton".* if CPU\.interprets|not [\w.]+(\("cpu"\))?\.interprets|'
        r"\n(@|pytestmark = )interpreted\n"
    )
    tests = {path for path in ROOT.glob("tests/**/test_*.py") if form.search(path.read_text())}
    assert {path.name for path in tests} == named_in_makefile("INTERPRETED")


def test_make_test_runs_twice_what_is_another_test_where_triton_compiles() -> None:
    """Those that are skipped by the interpreter, or are of another backend elsewhere."""
    form = re.compile(
        r'skipif\(\s*CPU\.interprets|\n@compiled\n|"triton"\]? if CPU\.interprets else \S*"|'
        r'\("triton",\) if CPU\.interprets else \("'
    )
    interpreted = named_in_makefile("INTERPRETED")
    paths = [path for path in ROOT.glob("tests/**/test_*.py") if path.name in interpreted]
    other = {path.name for path in paths if form.search(path.read_text())}
    assert other == named_in_makefile("COMPILED")


def test_the_demo_installs_only_the_library_and_what_examples_need() -> None:
    """What make would run if nothing were installed."""
    commands = what_make_runs("-W", "pyproject.toml", "demo")
    (install,) = re.findall(r"pip install -c constraints.txt (-e.*)", commands)  # with its progress
    assert install == "-e '.' -e '.[examples]'"


def test_a_release_moves_every_fragment_into_the_changelog(tmp_path: Path) -> None:
    release = load_file(ROOT / "docs" / "generate" / "release.py")
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "attn_graph").mkdir()
    for name in ("CHANGELOG.md", *release.VERSIONS):
        shutil.copy(ROOT / name, tmp_path / name)
    fragments = {
        "0001-a.md": "### Added\n\n- One.\n  More.\n\n### Fixed\n\n- Two.\n",
        "0002-b.md": "### Added\n\n- Three.\n",
    }
    for name, text in fragments.items():
        (tmp_path / "changelog.d" / name).write_text(text)
    before = (tmp_path / "CHANGELOG.md").read_text()
    release.cut(tmp_path, "9.8.7", "2030-01-02")
    after = (tmp_path / "CHANGELOG.md").read_text()
    section = (
        "## 9.8.7 (2030-01-02)\n\n### Added\n\n- One.\n  More.\n- Three.\n\n### Fixed\n\n- Two.\n\n"
    )
    assert after == before.replace("## ", section + "## ", 1)
    assert not [*(tmp_path / "changelog.d").iterdir()]
    assert '\n__version__ = "9.8.7"\n' in (tmp_path / "attn_graph/__init__.py").read_text()
    assert 'version: 9.8.7\ndate-released: "2030-01-02"' in (tmp_path / "CITATION.cff").read_text()
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["version"] == "9.8.7"


def test_changes_since_the_release_are_listed_by_kind() -> None:
    for path in (ROOT / "changelog.d").glob("[0-9]*.md"):
        heads = re.findall("^#.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert heads, f"{path.name}: see changelog.d/README.md"
        assert set(heads) <= {f"### {kind}" for kind in ("Added", "Changed", "Fixed", "Removed")}


def test_lowering_is_not_a_top_level_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with pytest.raises(ImportError, match=r"attn_graph\.lowering"):
        __import__("lowering")


def run_at_root(code: str, *path: Path) -> str:
    """What a program prints that is run in the root of the checkout, with more folders to import
    from after it."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=own, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_kernels_at_the_root_looks_like_a_package_that_is_not_installed() -> None:
    output = run_at_root(
        "import kernels, sys\n"
        "assert not hasattr(kernels, '__version__') and not hasattr(kernels, '__file__')\n"
        "for code in ('from kernels import forward', 'import kernels.forward'):\n"
        "    try: exec(code)\n"
        "    except ImportError: continue\n"
        "    sys.exit(code)\n"
        "try: kernels.forward\n"
        "except AttributeError as error: assert 'import attn_graph.kernels' in str(error)\n"
        "print('all as it should be')"
    )
    assert output == "all as it should be\n"


@pytest.fixture
def other_kernels(tmp_path: Path) -> Path:
    """A folder with another package named kernels, as Hugging Face's is."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("from kernels.layer import use\n__version__ = '0.1'")
    (package / "layer.py").write_text("use = 'theirs'")
    return tmp_path


def test_kernels_at_the_root_gives_way_to_the_package_of_that_name(other_kernels: Path) -> None:
    printed = run_at_root(
        "import kernels, kernels.layer, attn_graph.kernels.forward\n"
        "print(kernels.use, kernels.__version__, kernels.layer.__file__)\n"
        "print(attn_graph.kernels.__file__)",
        other_kernels,
    )
    layer, ours = other_kernels / "kernels" / "layer.py", ROOT / "attn_graph/kernels/__init__.py"
    assert printed.splitlines() == [f"theirs 0.1 {layer}", str(ours)]


def test_two_checkouts_on_the_path_do_not_wait_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "attn_graph").mkdir()
    (tmp_path / "attn_graph" / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "kernels").symlink_to(ROOT / "kernels")
    run_at_root("import kernels; assert not hasattr(kernels, '__file__')", tmp_path)


def test_transformers_can_be_imported_at_the_root() -> None:
    pytest.importorskip("transformers", reason="needs transformers, the extra `transformers`")
    code = "from transformers.integrations import hub_kernels as x; print(x.is_kernels_available())"
    assert run_at_root(code) == "False\n"


@pytest.mark.parametrize("name", ["kernels", "lowering"])
def test_link_shows_the_folder_inside_the_package(name: str) -> None:
    link = ROOT / "attn_graph" / name
    assert link.is_symlink()
    assert link.resolve() == HOMES[f"attn_graph.{name}"]
