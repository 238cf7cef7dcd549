"""README's generated parts are what the code says today."""

from __future__ import annotations

import importlib.util

from tests.sources import ROOT


def test_the_generated_parts_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "docs" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == readme.filled(text), "run `.venv/bin/python docs/readme.py`, and read the diff"
