"""The page on architecture says what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attn_graph.rings import RINGS, ring_of
from tests.support.sources import ROOT, tree_of
from tests.test_rings import inward

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = (ROOT, ROOT / "attn_graph")  # where paths on the page begin
DOORS = 6
MOST_LINES = 9000  # of the core: who knows PyTorch reads it in an hour


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


def core() -> dict[Path, tuple[set[str], set[str]]]:
    """Folder of the core -> the names of its files and of its shelves, as the page has them."""
    return {
        ROOT / "attn_graph" / quoted(folder)[0]: ({*quoted(files)}, {*quoted(shelves)})
        for folder, files, shelves in rows("Core")
    }


def test_the_core_is_the_folders_that_the_page_shows() -> None:
    for folder, (files, shelves) in core().items():
        if folder == ROOT / "attn_graph":
            assert files <= {path.stem for path in folder.glob("*.py")}
        else:
            inside = {path.stem for path in folder.glob("*.py")}
            assert files - {"__init__"} == inside - {"__init__"}, folder
            assert shelves == {path.parent.name for path in folder.glob("*/__init__.py")}, folder


def test_the_core_reads_in_an_hour() -> None:
    lines = [
        line
        for folder, (files, _) in core().items()
        for name in {*files, *([] if folder == ROOT / "attn_graph" else ["__init__"])}
        for line in (folder / f"{name}.py").read_text(encoding="utf-8").splitlines()
    ]
    assert 0 < len(lines) <= MOST_LINES


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
