"""Values as Python text; reading it makes equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


def show_value(value: object) -> str:
    """The text of a field's value: numbers, strings, tuples and values of attrs classes."""
    match value:
        case tuple():
            inner = ", ".join(map(show_value, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case _ if not attrs.has(type(value)):
            return repr(value)
        case _:
            prints_itself = type(value).__str__ is not object.__str__
            return str(value) if prints_itself else show_call(value)


def show_call(value: Any) -> str:  # Any: of an attrs class
    """The call that makes a value of an attrs class, for example `Window(left=64)`."""
    return f"{type(value).__name__}({', '.join(show_fields(value))})"


def show_fields(value: Any) -> list[str]:  # Any: of an attrs class
    """`name=text` for each argument without its default value."""
    return [
        f"{field.name}={show_value(getattr(value, field.name))}"
        for field in attrs.fields(type(value))
        if field.default is attrs.NOTHING or getattr(value, field.name) != field.default
    ]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells in columns, two spaces apart; nothing behind the last cell of a line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
