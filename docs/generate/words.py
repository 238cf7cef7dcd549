"""The words of other libraries as a table, from the one that messages read."""

from __future__ import annotations

from attn_graph.printing.words import LIBRARIES, use
from docs.generate.pages import table


def words() -> str:
    """A row for each word of each library."""
    rows: list[tuple[object, ...]] = [
        (library, f"`{name}`", use(text).replace("*", "\\*"))
        for library, known in LIBRARIES.items()
        for name, text in known.items()
    ]
    return table(("library", "there", "here"), rows)
