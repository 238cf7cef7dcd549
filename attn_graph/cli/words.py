"""How commands speak: errors in their own words, tables, JSON, and files to write."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from attn_graph.errors import GraphError

P = ParamSpec("P")
CODES = (
    "Exit codes: 0, all is well; 1, the answer is no: no backend takes the graph, files are "
    "damaged, doctor found something broken, a library for it is not installed; 2, wrong usage; "
    "130, interrupted; 141, nobody reads the answer."
)
INTERRUPTED, UNREAD = 128 + 2, 128 + 13  # as shells tell of SIGINT and SIGPIPE
PIPED = 100  # columns, where nobody says how wide what reads is
PICTURES = (".png", ".svg", ".pdf")
SAID_AT = re.compile(r" \(at [^()]*:\d+\)$")  # the line of a program, which is click's here

as_json = click.option("--json", "plain", is_flag=True, help="As JSON, for programs.")


def example(*lines: str) -> str:
    """The end of a --help, as it is written here."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


def answering(run: Callable[P, None]) -> Callable[P, None]:
    """A command for which what a GraphError says is wrong usage, in the error's own words."""

    @wraps(run)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except GraphError as error:
            problems = (SAID_AT.sub("", problem) for problem in error.problems)
            raise click.UsageError(str(GraphError(*problems))) from error

    return told


def no(answer: bool = True) -> None:
    """Exit with the code that says so, if the answer is no."""
    if answer:
        raise click.exceptions.Exit(1)


def show_text(*parts: RenderableType, wraps: bool = True) -> None:
    """Print, to a terminal in colours. wraps: at the terminal's width, or where the text says."""
    print(printed_text(*parts, wraps=wraps), flush=True)


def printed_text(*parts: RenderableType, wraps: bool = True) -> str:
    """What `show_text` prints."""
    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else PIPED, highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=not wraps)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())  # tables end in spaces


def show_json(told: object) -> None:
    click.echo(json.dumps(told, indent=2))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], numbers: Sequence[str] = ()
) -> Table:
    """A table, whose columns of numbers stand at the right. Nothing is cut off."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def picture_path(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    """A path to draw to, seen to be possible before anything takes long."""
    if value is not None and value.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{value} ends in none of {', '.join(PICTURES)}")
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.parent}")
    return value


def draw_to(path: Path, draw: Callable[[], None]) -> None:
    """Draw to a path and say so. Without matplotlib the answer is no, and what to install."""
    try:
        draw()
    except (ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"written to {path}", err=True)


out = click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), callback=picture_path,
    help="Draw to this file, a PNG, SVG or PDF by its name.",
)  # fmt: skip
