"""The core runs without its rings: it imports none, and a build may leave out each of them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from attn_graph.rings import BACKENDS, HOMES, RINGS, ring_of
from tests.support.sources import ROOT, tree_of
from tests.test_floors import MODULES, imports

MOST_LOADED = 90  # modules of ours, by `import attn_graph`
QUICK = ("instruments", "layers", "measuring", "triton")  # one of each kind; others take as long
PAGES = ("README.md", "docs/tutorial.md")
CORE = "cpu"  # the ring that runs what no other backend does


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that may run: not those for annotations alone."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.If) or ast.unparse(child.test) != "TYPE_CHECKING":
            yield child
            yield from running(child)


def inward() -> dict[tuple[str, str], str]:
    """Every import of a ring's module from outside of it: ring or "", other ring -> an example."""
    return {
        (ring_of(module), ring_of(other)): f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imports(running(tree_of(path)))
        if ring_of(other) and ring_of(other) != ring_of(module)
    }


def test_the_core_imports_no_ring() -> None:
    pairs = inward()
    assert pairs  # between rings there are some
    wrong = [text for (ring, _), text in pairs.items() if not ring]
    assert not wrong, "\n".join(wrong)


def test_every_module_of_a_ring_and_every_name_exists() -> None:
    for ring, parts in RINGS.items():
        for part in parts:
            assert f"attn_graph.{part}" in MODULES, (ring, part)
    homes = {*HOMES.items(), *((name, module) for module, name in BACKENDS.values())}
    for name, home in homes:
        defined = {
            getattr(target, "id", None) or getattr(node, "name", None)
            for node in tree_of(MODULES[f"attn_graph.{home}"]).body
            for target in (getattr(node, "targets", None) or [getattr(node, "target", node)])
        }
        assert name in defined, f"{home} defines no {name}"


def test_importing_the_library_loads_few_of_its_modules() -> None:
    code = "import sys, attn_graph; print(*(m for m in sys.modules if m[:10] == 'attn_graph'))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = done.stdout.split()
    assert len(loaded) <= MOST_LOADED
    assert not [*filter(ring_of, loaded)]


# Runs pages as printed, a statement at a time, where one ring is missing. A statement may raise the
# error of that ring; then those that need its names are left out. Any other error is one.
# Then it looks up every name of the ring, and compiles for its backends.
RUNNING = """
import ast, re, sys
from pathlib import Path

# An editable install would find in the checkout what is missing here.
sys.meta_path[:] = [x for x in sys.meta_path if not x.__module__.startswith("__editable__")]

import attn_graph as ag
from attn_graph import rings

ring, *pages = sys.argv[1:]
said = f"this build of attn_graph has no {ring}, and "

def names(node, kind):
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)} | {
        alias.asname or alias.name
        for x in ast.walk(node) if kind is ast.Store and isinstance(x, (ast.Import, ast.ImportFrom))
        for alias in x.names
    }

def attempt(run):
    try:
        run()
    except ModuleNotFoundError as error:
        if not str(error).startswith(said):
            raise
        return False
    return True

ran = left = 0
for page in pages:
    space, lost = {"__name__": "page"}, set()
    for block in re.findall(r"```python\\n(.*?)```", Path(page).read_text(), re.DOTALL):
        for node in ast.parse(block).body:
            code = compile(ast.Module([node], []), page, "exec")
            if names(node, ast.Load) & lost or not attempt(lambda: exec(code, space)):
                lost |= names(node, ast.Store)
                left += 1
            else:
                ran += 1
counts = ran, left
ours = [name for name, home in rings.HOMES.items() if rings.ring_of("attn_graph." + home) == ring]
for name in ours:
    assert not attempt(lambda: rings.find(name)), name
    for face in (ag, ag.nn, ag.types):
        if name in face.__all__:
            assert not attempt(lambda: getattr(face, name)), name
x = ag.TensorSpec((1, 1, 4, 8), ag.nn.functional.torch.float32)
graph = ag.attention(x, x, x)
for name, (home, _) in rings.BACKENDS.items():
    if rings.ring_of("attn_graph." + home) == ring:
        assert not attempt(lambda: ag.compile(graph, backends=(name,))), name
        assert name not in {b.name for b in ag.extend.BACKENDS}
print(rings.__file__)
print(*counts)
"""


def leave_out(ring: str, home: Path) -> None:
    """Copy the package without a ring."""
    copytree(ROOT / "attn_graph", home / "attn_graph")
    for part in RINGS[ring]:
        path = home.joinpath("attn_graph", *part.split("."))
        if path.is_dir():
            rmtree(path)
        else:
            path.with_suffix(".py").unlink()


def run_without(ring: str, home: Path, *pages: str) -> tuple[int, int]:
    """How many statements of these pages run without a ring, and how many are left out."""
    leave_out(ring, home)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNING, ring, *(str(ROOT / p) for p in pages)],
        cwd=home, env={**os.environ, "PYTHONPATH": str(home)}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert not done.stderr
    *_, place, counts = done.stdout.splitlines()
    assert Path(place).is_relative_to(home)
    ran, left = map(int, counts.split())
    return ran, left


@pytest.mark.parametrize(
    ("ring", "pages"),
    [
        *((ring, PAGES[:1]) for ring in QUICK),
        *(pytest.param(ring, PAGES, marks=pytest.mark.slow) for ring in RINGS if ring != CORE),
    ],
)
def test_a_ring_comes_off(ring: str, pages: tuple[str, ...], tmp_path: Path) -> None:
    ran, left = run_without(ring, tmp_path, *pages)
    assert left <= ran // 4
