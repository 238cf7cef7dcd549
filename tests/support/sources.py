"""Where the library's source lies: one place, for the tests that read it."""

import ast
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
HOMES = {
    "attn_graph": ROOT / "attn_graph",
    "attn_graph.kernels": ROOT / "kernels",
    "attn_graph.lowering": ROOT / "lowering",
}


def source_files(pattern: str) -> dict[str, Path]:
    """Module name -> file, for the files under HOMES whose name matches `pattern`."""
    return {
        ".".join([package, *path.relative_to(home).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for package, home in HOMES.items()
        for path in sorted(home.rglob(pattern))
        if path.resolve().is_relative_to(home)  # a symlinked folder counts once, at its home
    }


@cache  # three files read them all, and only the tests that do wait for it
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def load_file(path: Path) -> ModuleType:
    """A file outside of all packages, as a module; it may import others from the root."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for what attrs asks of it
    with patch.object(sys, "path", [str(ROOT), *sys.path]):
        spec.loader.exec_module(module)
    return module


def what_make_runs(*words: str) -> str:
    """The commands that make would run in a shell of its own, whichever make runs this test."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "INSTALL")
    own = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=own, capture_output=True, text=True, check=True
    ).stdout
