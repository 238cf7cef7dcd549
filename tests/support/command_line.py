"""Commands as scripts call them."""

from __future__ import annotations

from types import ModuleType

from click.testing import CliRunner, Result

from attn_graph.cli.main import commands
from tests.support.sources import ROOT, load_file


def run(*line: str, stdin: str | None = None) -> Result:
    """A command as a script would call it; an exception is the test's."""
    result = CliRunner(env={"COLUMNS": "100"}).invoke(commands, line, input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def page() -> ModuleType:
    """docs/generate/command_line.py as a module."""
    return load_file(ROOT / "docs" / "generate" / "command_line.py")
