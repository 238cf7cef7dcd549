"""Pieces of HTML for notebooks: elements, tables, bars, and pictures of tiles.

All text in a piece is escaped. Colours are half transparent or those of the page, so one form suits
light and dark pages; nothing is loaded from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import final

MIXED, FULL = "#6ea8e0", "#2f6fb8"  # a tile with some places kept, and one with all
WIDTH = 256  # pixels of a picture
STYLE = """
.attn-graph { line-height: 1.45; max-width: 64rem; }
.attn-graph pre { background: rgba(128,128,128,.12); border-radius: 4px; font-size: 12px;
  line-height: 1.45; margin: .5em 0; overflow-wrap: anywhere; padding: .6em .8em;
  white-space: pre-wrap; }
.attn-graph table { border: 0; border-collapse: collapse; font-size: 13px; margin: .5em 0;
  width: 100%; }
.attn-graph tr { background: none; }
.attn-graph th, .attn-graph td { border: 0; border-bottom: 1px solid rgba(128,128,128,.3);
  padding: .3em .9em .3em 0; text-align: left; vertical-align: top; white-space: normal; }
.attn-graph th { font-weight: 600; white-space: nowrap; }
.attn-graph th:first-child { width: 11em; }
.attn-graph .number { font-variant-numeric: tabular-nums; text-align: right;
  white-space: nowrap; }
.attn-graph h4 { margin: .9em 0 .2em; }
.attn-graph p { margin: .4em 0; }
.attn-graph ul { margin: .2em 0; padding-left: 1.2em; }
.attn-graph .bar { background: #2f6fb8; border-radius: 2px; display: inline-block; height: .8em; }
.attn-graph figure { margin: .6em 0; }
.attn-graph figcaption { font-size: 12px; opacity: .8; }
.attn-graph svg { display: block; margin-bottom: .3em; max-width: 100%;
  outline: 1px solid rgba(128,128,128,.5); }
"""


@final
class Html(str):
    """Text in HTML: it is not escaped again."""


def element(name: str, *inner: object, **attributes: object) -> Html:
    """`<name attribute="...">inner</name>`; everything except Html is escaped.

    The attribute `class` is written `class_`, and a hyphen in a name `_`.
    """
    listed = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    content = "".join(x if isinstance(x, Html) else escape(str(x)) for x in inner)
    return Html(f"<{name}{''.join(listed)}>{content}</{name}>")


def page(*parts: object) -> str:
    """The parts one after another, with their common style."""
    style = element("style", Html(STYLE))
    return element("div", style, *parts, class_="attn-graph")


def code(value: object) -> Html:
    """A value as it prints, in the letters of code."""
    return element("pre", value)


def bullets(lines: Iterable[object]) -> Html:
    items = [element("li", line) for line in lines]
    return element("ul", *items) if items else Html()


def table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> Html:
    """A table; the first cell of each row names it. Cells with a `Number` are aligned right."""
    lines = [element("tr", *(cell("th", x) for x in head))] if head else []
    for name, *cells in rows:
        lines.append(element("tr", cell("th", name), *(cell("td", x) for x in cells)))
    return element("table", *lines)


def verdict(text: object, lines: Iterable[object] = ()) -> Html:
    """The words about a backend: a clause, and a list under it."""
    return Html(escape(str(text)) + bullets(lines))


@final
class Number(str):
    """Text of a figure: tables put it on the right."""


def cell(name: str, value: object) -> Html:
    return element(name, value, **({"class_": "number"} if isinstance(value, Number) else {}))


def bar(share: float) -> Html:
    """A bar as long as a share from 0 to 1."""
    return element("span", class_="bar", style=f"width:{160 * share:.0f}px")


def tile_picture(
    kinds: Sequence[Sequence[int]], caption: str, colours: Sequence[str] = (MIXED, FULL)
) -> Html:
    """Tiles in lines from the top, 0: empty, n: of the n-th colour, as SVG; below it a caption."""
    lines, columns = len(kinds), len(kinds[0]) if kinds else 0
    if not lines or not columns:
        return element("p", caption)
    height = max(16, min(2 * WIDTH, round(WIDTH * lines / columns)))
    paths = [
        element("path", fill=colour, d="".join(draw_runs(kinds, kind)))
        for kind, colour in enumerate(colours, 1)
    ]
    drawing = element(
        "svg",
        element("title", caption),
        *paths,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {columns} {lines}",
        width=WIDTH,
        height=height,
        preserveAspectRatio="none",
        shape_rendering="crispEdges",
        role="img",
    )
    return element("figure", drawing, element("figcaption", caption))


def draw_runs(kinds: Sequence[Sequence[int]], kind: int) -> Iterator[str]:
    """SVG's commands for one rectangle a run of neighbouring tiles of one kind."""
    for y, line in enumerate(kinds):
        x = 0
        for each, run in groupby(line):
            length = len(list(run))
            if each == kind:
                yield f"M{x} {y}h{length}v1h-{length}z"
            x += length
