"""Imports point down: a module may import the floors below its own, never one above."""

import ast
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter

from tests.support.sources import source_files, tree_of

BACKENDS = ("cpu", "triton", "cudnn", "fa4", "torch_cuda")  # packages of lowering, walled off
FLOORS = (  # top first; a name, or `package.*` for the package and all its modules
    ("attn_graph.__main__",),
    ("attn_graph.cli.*", "attn_graph.testing.*"),
    ("attn_graph",),
    ("attn_graph.extend", "attn_graph.nn", "attn_graph.types"),
    ("attn_graph.integrations.*",),
    ("attn_graph.layers.*",),
    ("attn_graph.nn.?*",),
    ("attn_graph.mesh.*",),
    ("attn_graph.compiler",),
    ("attn_graph.plan.*",),
    (
        *("attn_graph.planner.*", "attn_graph.measuring.*", "attn_graph.instruments"),
        *(f"attn_graph.instruments.{x}" for x in ("explain", "explanation", "remedies")),
        "attn_graph.instruments.pictures",
    ),
    tuple(f"attn_graph.lowering.{backend}.*" for backend in BACKENDS),
    ("attn_graph.lowering.codegen.*", "attn_graph.lowering.libraries.*"),
    ("attn_graph.lowering.parts",),
    ("attn_graph.lowering.lying",),
    (
        *("attn_graph.lowering", "attn_graph.lowering.folding", "attn_graph.lowering.processes"),
        *("attn_graph.lowering.small_graphs", "attn_graph.lowering.through_lse"),
    ),
    ("attn_graph.lowering.reasons", "attn_graph.lowering.steps"),
    (
        *("attn_graph.lowering.backend", "attn_graph.lowering.limits"),
        *("attn_graph.lowering.rates", "attn_graph.lowering.shares"),
    ),
    ("attn_graph.lowering.request",),
    ("attn_graph.lowering.problem",),
    ("attn_graph.ir.*",),
    ("attn_graph.sparsity.*",),
    ("attn_graph.masks.*",),
    ("attn_graph.rings",),
    ("attn_graph.machine.*", "attn_graph.kernels.*"),
    ("attn_graph.printing.misfits",),
    ("attn_graph.spec",),
    ("attn_graph.spec.dims",),
    (
        *(f"attn_graph.printing.{x}" for x in ("html", "text", "words")),
        *("attn_graph.printing", "attn_graph.errors"),
    ),
)
MODULES = source_files("*.py")
# They only hand out what other modules define.
FACE = ("attn_graph.extend", "attn_graph.nn", "attn_graph.types")
SHELVED = (
    "attn_graph.ir",
    "attn_graph.plan",
    "attn_graph.planner",
)  # a folder within one is a shelf of this room


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


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Our modules that these statements import."""
    named: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= inner if inner <= MODULES.keys() else inner | {node.module}
    return named & MODULES.keys()


@cache
def loads() -> dict[str, set[str]]:
    """What each module imports when it is loaded."""
    return {name: imports(statements(tree_of(path).body)) for name, path in MODULES.items()}


@cache
def all_imports() -> dict[str, set[str]]:
    """The same, and what its functions import."""
    return {name: imports(ast.walk(tree_of(path))) for name, path in MODULES.items()}


FLOOR = {module: height for module in MODULES if (height := floor(module)) is not None}


def test_every_module_is_on_a_floor() -> None:
    homeless = sorted(MODULES.keys() - FLOOR.keys())
    assert not homeless, f"on no floor: {', '.join(homeless)}; give each one in FLOORS"


def test_imports_point_down() -> None:
    wrong = [
        f"{module} (floor {FLOOR[module]}) imports {other} (floor {FLOOR[other]})"
        for module in FLOOR
        for other in sorted(all_imports()[module] & FLOOR.keys())
        if FLOOR[other] > FLOOR[module]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_in_a_circle() -> None:
    order = TopologicalSorter(loads()).static_order()  # a CycleError names the circle
    assert set(order) == MODULES.keys()


def room(module: str) -> str:
    """The package folder that a module lies in; a module at the top is a room by itself."""
    path = MODULES[module]
    folder = module if path.name == "__init__.py" else module.rpartition(".")[0]
    if module == "attn_graph.__main__":
        return "attn_graph.cli"
    if module in FACE:
        return "attn_graph"
    shelved = [name for name in SHELVED if folder.startswith(f"{name}.")]
    return module if folder == "attn_graph" else (shelved or [folder])[0]


def arrows() -> dict[str, set[str]]:
    """Room -> the other rooms that it imports from, when it is loaded or when it is called."""
    rooms: dict[str, set[str]] = {room(module): set() for module in MODULES}
    for module, others in all_imports().items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    return rooms


def test_no_circle_crosses_a_room() -> None:
    order = TopologicalSorter(arrows()).static_order()  # a CycleError names the circle
    assert set(order) == arrows().keys()


def backend_of(module: str) -> str | None:
    """The backend that a module belongs to; None: several share it."""
    parts = module.split(".")
    return next((b for b in BACKENDS if parts[1:3] == ["lowering", b]), None)


def imports_of_backends() -> Iterator[tuple[str, str]]:
    """Every import of a backend's module by another module of lowering."""
    for module, named in all_imports().items():
        if module.startswith("attn_graph.lowering."):
            yield from ((module, other) for other in sorted(named) if backend_of(other))


def test_no_backend_imports_another() -> None:
    pairs = [(a, b) for a, b in imports_of_backends() if backend_of(a)]
    across = [f"{a} imports {b}" for a, b in pairs if backend_of(a) != backend_of(b)]
    assert pairs
    assert not across, "\n".join(across)


def test_what_backends_share_imports_none_of_them() -> None:
    inward = [f"{a} imports {b}" for a, b in imports_of_backends() if not backend_of(a)]
    assert not inward, "\n".join(inward)
