"""The page on architecture says what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attn_graph.rings import RINGS, ring_of
from tests.support.sources import ROOT, tree_of
from tests.test_floors import MODULES, imports
from tests.test_rings import inward, running

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = (ROOT, ROOT / "attn_graph")  # where paths on the page begin
DOORS = 6
MOST_LINES = 9000  # of the core: who knows PyTorch reads it in an hour
MOST_LATER = 3  # imports of a file of the core that comes later


def rows(title: str) -> Iterator[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_door_is_defined_where_the_page_says() -> None:
    doors = [quoted(cell) for cell, *_ in rows("Six doors")]
    assert len(doors) == DOORS
    for path, name in doors:
        home = next(folder / path for folder in FOLDERS if (folder / path).is_file())
        assert name in {getattr(node, "name", "") for node in tree_of(home).body}, (path, name)


def core() -> Iterator[tuple[Path, list[str], set[str]]]:
    """Folders of the core, with their files in order and their shelves, as the page has them."""
    for folder, files, shelves in rows("Core"):
        named, _, _ = files.partition("; then `backend`")
        yield ROOT / "attn_graph" / quoted(folder)[0], quoted(named), {*quoted(shelves)}


def test_the_core_is_the_folders_that_the_page_shows() -> None:
    for folder, files, shelves in core():
        inside = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert {*files} - {"__init__"} <= inside, folder
        if folder.name not in ("attn_graph", "lowering"):  # where others stand too
            assert {*files} - {"__init__"} == inside, folder
            assert shelves == {path.parent.name for path in folder.glob("*/__init__.py")}, folder


def core_files() -> list[Path]:
    return [folder / f"{name}.py" for folder, files, _ in core() for name in files]


def test_the_core_reads_in_an_hour() -> None:
    shared = {ROOT / "attn_graph" / name / "__init__.py" for name in (".", "lowering")}
    files = {*core_files(), *(path.with_name("__init__.py") for path in core_files())} - shared
    assert 0 < sum(path.read_text("utf-8").count("\n") for path in files) <= MOST_LINES


def test_files_of_the_core_come_after_those_that_they_import() -> None:
    order = [path.resolve() for path in core_files()]
    later = [
        (module, other)
        for module, path in MODULES.items()
        for other in imports(running(tree_of(path)))
        if path.resolve() in order and MODULES[other].resolve() in order
        if order.index(MODULES[other].resolve()) > order.index(path.resolve())
    ]
    assert len(later) <= MOST_LATER, later


def test_the_rings_are_those_of_the_table_of_names() -> None:
    shown = {quoted(ring)[0]: tuple(quoted(parts)) for ring, parts, *_ in rows("Rings")}
    assert shown == {ring: tuple(parts) for ring, parts in RINGS.items()}


def test_the_rings_that_a_ring_imports_are_named() -> None:
    shown = {quoted(ring)[0]: {*quoted(others)} for ring, _, _, others in rows("Rings")}
    due: dict[str, set[str]] = {ring: set() for ring in RINGS}
    for ring, other in inward():
        due[ring].add(other)
    assert shown == due


def test_every_place_to_change_something_exists() -> None:
    for _, *cells in rows("Where to change what"):
        paths = [path for cell in cells for path in quoted(cell) if "/" in path or "." in path]
        assert paths
        for path in paths:
            assert any((folder / path).exists() for folder in FOLDERS), path


def test_a_missing_module_is_told_from_one_of_another_library() -> None:
    assert ring_of("attn_graph.testing.gpu.ptx") == "testing.gpu"
    assert ring_of("attn_graph.testing.rule") == "testing"
    assert ring_of("attn_graph.plan") == ring_of("mesh") == ring_of("attn_graph.meshes") == ""
