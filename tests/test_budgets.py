"""Code stays small enough to read, and says so where it steps outside the rules."""

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.sources import HOMES, ROOT, tree_of

P90, LONGEST, LONGEST_KERNEL = 25, 80, 150  # lines of a function
LONGEST_FILE = 800
CALLED_ONCE, IMPORTING = 0.213, 0.079  # shares of functions and of lines: they may only fall
MEMORIES = 35
FOLDERS = (*HOMES.values(), ROOT / "examples")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted(folder.rglob("*.py"))
    if path.resolve().is_relative_to(folder)
]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    """Every function of every file, nested ones too."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                yield path, node


def length(function: Function) -> int:
    """Lines of the body, the docstring not counted."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    before = first.end_lineno if documented else first.lineno - 1
    assert before is not None
    assert function.end_lineno is not None
    return function.end_lineno - before


def limit(path: Path) -> int:
    """How long a function of the file may be."""
    return LONGEST_KERNEL if path.is_relative_to(HOMES["attn_graph.kernels"]) else LONGEST


def where(path: Path, line: int) -> str:
    """`file:line`, as editors like it."""
    return f"{path.relative_to(ROOT)}:{line}"


def test_most_functions_fit_in_the_head() -> None:
    lengths = sorted(length(function) for _, function in functions())
    assert lengths[int(len(lengths) * 0.9)] <= P90


def test_no_function_is_too_long() -> None:
    wrong = [
        f"{where(path, function.lineno)} {function.name}: {lines} lines, most {limit(path)}"
        for path, function in functions()
        if (lines := length(function)) > limit(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    wrong = [
        f"{path.relative_to(ROOT)}: {count} lines, most {LONGEST_FILE}"
        for path, count in lines.items()
        if count > LONGEST_FILE
    ]
    assert not wrong, "\n".join(wrong)


def own_trees() -> Iterator[ast.Module]:
    """The library's own files: examples are for readers."""
    yield from (tree_of(path) for path in FILES if not path.is_relative_to(ROOT / "examples"))


def test_few_functions_have_one_caller() -> None:
    """Counted by name: functions whose name is defined once and stands in one other place."""
    named, defined = Counter[str](), Counter[str]()
    for node in (node for tree in own_trees() for node in ast.walk(tree)):
        if isinstance(node, Function):
            defined[node.name] += 1
        elif isinstance(node, ast.Name | ast.Attribute):
            named[node.id if isinstance(node, ast.Name) else node.attr] += 1
    once = [name for name, count in defined.items() if count == named[name] == 1]
    assert len(once) <= CALLED_ONCE * defined.total()


def test_few_lines_are_imports() -> None:
    lines = importing = 0
    for tree in own_trees():
        lines += max((node.end_lineno or 0 for node in tree.body), default=0)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                importing += (node.end_lineno or 0) - node.lineno + 1
    assert importing <= IMPORTING * lines


def catches_everything(node: ast.ExceptHandler) -> bool:
    """Whether `node` is `except:`, `except Exception` or wider, alone or in a tuple."""
    if node.type is None:
        return True
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(isinstance(k, ast.Name) and k.id in ("Exception", "BaseException") for k in kinds)


def test_nothing_catches_every_exception() -> None:
    wrong = [
        f"{where(path, node.lineno)} catches everything: name what can happen, let bugs crash"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    ]
    assert not wrong, "\n".join(wrong)


def public(body: list[ast.stmt]) -> Iterator[Function]:
    """Functions and methods that others may call: no leading underscore, but operators."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body)
        elif isinstance(node, Function):
            operator = node.name.startswith("__") and node.name.endswith("__")
            if operator or not node.name.startswith("_"):
                yield node


def anys(function: Function) -> set[int]:
    """Lines of the signature of `function` on which an `Any` stands."""
    nodes = [*ast.walk(function.args), *(ast.walk(function.returns) if function.returns else ())]
    return {
        node.lineno
        for node in nodes
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
    }


@cache
def commented(path: Path) -> set[int]:
    """Numbers of the lines that carry a comment."""
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def test_any_in_a_public_signature_says_why() -> None:
    wrong = [
        f"{where(path, line)} {function.name} takes or gives Any: say why on that line"
        for path in FILES
        for function in public(tree_of(path).body)
        for line in sorted(anys(function) - commented(path))
    ]
    assert not wrong, "\n".join(wrong)


def is_memory(node: ast.AST) -> bool:
    """Whether a decorator, or a function that is called, remembers what another function gives."""
    function = node.func if isinstance(node, ast.Call) else node
    return isinstance(function, ast.Name) and function.id in ("remember", "cache", "lru_cache")


def test_few_answers_are_remembered_beside_the_values_they_are_about() -> None:
    """A question about a value at hand is a cached property of it, or asked by `once`."""
    nodes = [node for tree in own_trees() for node in ast.walk(tree)]
    decorated = [x for node in nodes if isinstance(node, Function) for x in node.decorator_list]
    called = [node.func for node in nodes if isinstance(node, ast.Call) and node.args]
    wrapped = [x for x in called if isinstance(x, ast.Call) or ast.unparse(x) == "remember"]
    assert sum(map(is_memory, [*decorated, *wrapped])) <= MEMORIES
