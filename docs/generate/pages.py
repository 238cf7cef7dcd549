"""Pages with generated parts: each stands between `<!-- name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
Parts = Mapping[str, Callable[[], str]]


def fill(text: str, parts: Parts) -> str:
    """The text with each of these parts replaced."""
    for name, make in parts.items():
        text = replace(text, name, make())
    return text


def replace(text: str, name: str, new: str) -> str:
    """The text with one part replaced. Raises ValueError where the text has no such part."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?\n?(<!-- end -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}{new}\n{m[2]}", text, flags=re.DOTALL)
    if not count:
        raise ValueError(f"the page has no part <!-- {name} -->")
    return text


def plain(text: str) -> str:
    """Text that Markdown shows as it is: `f16[2, 3](strides=...)` is not a link."""
    return text.replace("](", "]\\(")


def row(*cells: object) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    return "\n".join([row(*head), row(*("---",) * len(head)), *(row(*cells) for cells in rows)])
