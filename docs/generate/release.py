"""`python -m docs.generate.release 0.2.0 2026-12-01`: move changelog.d under a version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docs.generate.pages import ROOT

KINDS = ("Added", "Changed", "Fixed", "Removed")
VERSIONS = {  # in each file the version's line, and the date's
    "attn_graph/__init__.py": (r'^__version__ = ".*"$', '__version__ = "{version}"'),
    "pyproject.toml": (r'^version = ".*"$', 'version = "{version}"'),
    "CITATION.cff": (
        r'^version: .*\ndate-released: ".*"$',
        'version: {version}\ndate-released: "{date}"',
    ),
}


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """The lists of all fragments by kind, oldest first."""
    lists = dict[str, list[str]]()
    for path in sorted(folder.glob("[0-9]*.md")):
        _, *parts = re.split(r"^### (\w+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for kind, text in zip(parts[::2], parts[1::2], strict=True):
            lists.setdefault(kind, []).append(text.strip())
    return {kind: lists[kind] for kind in KINDS if kind in lists}


def release_text(lists: dict[str, list[str]], version: str, date: str) -> str:
    """The section of a release."""
    parts = [f"### {kind}\n\n" + "\n".join(items) for kind, items in lists.items()]
    return "\n\n".join([f"## {version} ({date})", *parts])


def cut(root: Path, version: str, date: str) -> None:
    """Write the changelog and the versions, and delete the fragments."""
    folder, log = root / "changelog.d", root / "CHANGELOG.md"
    head, mark, older = log.read_text(encoding="utf-8").partition("\n## ")
    section = release_text(read_fragments(folder), version, date)
    log.write_text(f"{head}\n{section}\n{mark}{older}", encoding="utf-8")
    for name, (form, line) in VERSIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        new = re.sub(form, line.format(version=version, date=date), text, flags=re.MULTILINE)
        (root / name).write_text(new, encoding="utf-8")
    for path in folder.glob("[0-9]*.md"):
        path.unlink()


if __name__ == "__main__":
    cut(ROOT, *sys.argv[1:])
