"""Output of commands: text, tables, JSON, errors, and pictures in files."""

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
    "Exit codes: 0, all is well; 1, the answer is no: no backend supports the graph, a model "
    "does not fit, files are damaged, doctor found something broken, a library for it is not "
    "installed; 2, wrong usage; 3, the answer is not known: the target's memory is not; 130, "
    "interrupted; 141, nobody reads the answer."
)
UNKNOWN = 3
INTERRUPTED, UNREAD = 128 + 2, 128 + 13  # as shells report SIGINT and SIGPIPE
PIPED = 100  # columns, where the width is not known
PICTURES = (".png", ".svg", ".pdf")
ALIGN = re.compile(r'\balign="(\w+)"')  # the argument that is the flag --align
LINE = re.compile(r" \(at [^()]*:\d+\)$")  # of the calling program, which is click here

as_json = click.option("--json", "plain", is_flag=True, help="As JSON, for programs.")


def epilog(*lines: str, codes: bool = True) -> str:
    """The end of a --help: the exit codes, and lines of an example, with their line breaks."""
    text = "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])
    return f"{CODES}\n\n{text}" if codes else text


def as_usage_errors(run: Callable[P, None]) -> Callable[P, None]:
    """A command with each GraphError reported as wrong usage, by the error's own text."""

    @wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except GraphError as error:
            problems = (ALIGN.sub(r"--align \1", LINE.sub("", x)) for x in error.problems)
            raise click.UsageError(str(GraphError(*problems))) from error

    return command


def exit_no_if(answer_is_no: bool, is_unknown: bool = False) -> None:
    """Exit with 1 if the answer is no, else with 3 if it is not known."""
    if answer_is_no or is_unknown:
        raise click.exceptions.Exit(1 if answer_is_no else UNKNOWN)


def show_text(*parts: RenderableType, wraps: bool = True) -> None:
    """Print, in colours on a terminal. wraps: at its width, or only at line breaks of the text."""
    print(render_text(*parts, wraps=wraps), flush=True)


def render_text(*parts: RenderableType, wraps: bool = True) -> str:
    """The output of `show_text`."""
    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else PIPED, highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=not wraps)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())  # tables end in spaces


def show_json(answer: object) -> None:
    """Print an answer as JSON."""
    click.echo(json.dumps(answer, indent=2))


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], numbers: Sequence[str] = ()
) -> Table:
    """A table. numbers: names of right-aligned columns. Nothing is cut off."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def picture_path(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    """A path to draw to. Raises BadParameter, before any work, if drawing there is impossible."""
    if value is not None and value.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{value} ends in none of {', '.join(PICTURES)}")
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"the folder {value.parent} does not exist")
    return value


def draw_to(path: Path, draw: Callable[[], None]) -> None:
    """Draw to a path and report it. Raises ClickException without matplotlib, or write access."""
    try:
        draw()
    except (ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"written to {path}", err=True)


out = click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), callback=picture_path,
    help="Draw to this file, a PNG, SVG or PDF by its name.",
)  # fmt: skip
