"""README's generated parts are what the code says today."""

from __future__ import annotations

from tests.sources import ROOT, loaded


def test_the_generated_parts_are_up_to_date() -> None:
    readme = loaded(ROOT / "docs" / "readme.py")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == readme.filled(text), "run `.venv/bin/python docs/readme.py`, and read the diff"
