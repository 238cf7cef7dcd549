"""Imports point down: a module may import the floors below its own, never one above."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.sources import found

FLOORS = (  # top first; a name, or `package.*` for the package and all its modules
    ("attn_graph.__main__",),
    ("attn_graph.cli.*", "attn_graph.testing.*"),
    ("attn_graph",),
    ("attn_graph.compiler",),
    ("attn_graph.autograd",),
    ("attn_graph.plan",),
    ("attn_graph.planner.*",),
    ("attn_graph.lowering.torch_cuda",),
    ("attn_graph.lowering.cpu.*", "attn_graph.lowering.triton.*", "attn_graph.lowering.cudnn.*"),
    ("attn_graph.lowering", "attn_graph.lowering.problem", "attn_graph.lowering.reasons"),
    ("attn_graph.backend",),
    ("attn_graph.ir.*",),
    ("attn_graph.masks.*",),
    ("attn_graph.machine.*", "attn_graph.kernels.*"),
    ("attn_graph.spec",),
    ("attn_graph.printing", "attn_graph.errors"),
)
MODULES = found("*.py")


def floor(module: str) -> int | None:
    """How high `module` stands, the ground being 0; None if it's on no floor."""
    for height, names in enumerate(reversed(FLOORS)):
        if any(fnmatch(module, name) or fnmatch(f"{module}.", name) for name in names):
            return height
    return None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, not those inside its functions."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from statements(getattr(node, inner, []))


def imports(path: Path) -> set[str]:
    """Our modules that `path` imports when it is imported itself.

    What a function imports when it is called is free: printing looks up, optional libraries wait.
    """
    named: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= inner if inner <= MODULES.keys() else inner | {node.module}
    return named & MODULES.keys()


IMPORTS = {module: imports(path) for module, path in MODULES.items()}
FLOOR = {module: height for module in MODULES if (height := floor(module)) is not None}


def test_every_module_is_on_a_floor() -> None:
    homeless = sorted(MODULES.keys() - FLOOR.keys())
    assert not homeless, f"on no floor: {', '.join(homeless)}; give each one in FLOORS"


def test_imports_point_down() -> None:
    wrong = [
        f"{module} (floor {FLOOR[module]}) imports {other} (floor {FLOOR[other]})"
        for module in FLOOR
        for other in sorted(IMPORTS[module] & FLOOR.keys())
        if FLOOR[other] > FLOOR[module]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_in_a_circle() -> None:
    order = TopologicalSorter(IMPORTS).static_order()  # a CycleError names the circle
    assert set(order) == MODULES.keys()
