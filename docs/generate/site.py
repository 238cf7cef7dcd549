"""A hook of MkDocs: what Python-Markdown leaves of GitHub's way to write tables."""

from __future__ import annotations

import re

CELL = re.compile(r"<t[dh].*?</t[dh]>", re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    r"""Cells of tables without the \ before each |, which Python-Markdown shows in code."""
    return CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)
