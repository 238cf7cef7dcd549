"""The page that a session ends with, in Markdown: predicted beside measured, then every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, fsum, log
from typing import Any

from benchmarks.gpu.results import Outcome, Results, Row

PREDICTED = ("ms", "predicted ms")  # what a row has that is compared
NEVER = "not run yet"


def make_page(results: Results, names: Sequence[str]) -> str:
    """All of it. names: the items in their order, also those that did not run."""
    outcomes = {name: results.outcomes[name] for name in names if name in results.outcomes}
    outcomes |= results.outcomes  # and those of items that are no more
    parts = [
        f"# {results.machine['gpu']}",
        write_machine(results.machine),
        "## Items",
        write_items(names, outcomes),
        "## Predicted and measured",
        write_predictions(outcomes),
        *(part for name, outcome in outcomes.items() for part in write_item(name, outcome)),
    ]
    return "\n\n".join(parts) + "\n"


def write_machine(machine: Row) -> str:
    """What the figures were measured on, a line for each fact."""
    facts = {k: v for k, v in machine.items() if k not in ("gpu", "libraries")}
    facts |= machine.get("libraries", {})
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def write_items(names: Sequence[str], outcomes: Mapping[str, Outcome]) -> str:
    """What came of each item."""
    never = [(name, NEVER, "", "") for name in names if name not in outcomes]
    ran = [(name, x.state, f"{x.seconds:.0f}", len(x.rows)) for name, x in outcomes.items()]
    return write_table(("item", "state", "s", "rows"), [*ran, *never])


def write_predictions(outcomes: Mapping[str, Outcome]) -> str:
    """Each row that was predicted, and the geometric mean of measured over predicted."""
    rows = [row for x in outcomes.values() for row in x.rows if all(row.get(k) for k in PREDICTED)]
    if not rows:
        return "Nothing that was predicted has been measured."
    ratios = [row["ms"] / row["predicted ms"] for row in rows]
    lines = [
        (row["job"], row["pass"], row["by"], *(f"{row[k]:.4g}" for k in PREDICTED), f"{ratio:.2f}")
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    mean = exp(fsum(map(log, ratios)) / len(ratios))
    table = write_table(("job", "pass", "by", *PREDICTED, "measured / predicted"), lines)
    return (
        f"Measured over predicted: {mean:.2f}, the geometric mean of {len(rows)} rows.\n\n{table}"
    )


def write_item(name: str, outcome: Outcome) -> Iterator[str]:
    """The rows of an item, by which columns they have, and what went wrong."""
    yield f"## {name}"
    if outcome.error:
        yield f"{outcome.state}:\n\n```text\n{outcome.error}\n```"
    shapes: dict[tuple[str, ...], list[Row]] = {}
    for row in outcome.rows:
        shapes.setdefault((*row,), []).append(row)
    for columns, rows in shapes.items():
        yield write_table(columns, [[row[c] for c in columns] for row in rows])


def write_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:  # Any: figures, words
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(write_cell, line))} |" for line in lines)


def write_cell(value: object) -> str:
    """A value on one line, without the table's own sign."""
    return " ".join(str(value).replace("|", "\\|").split())
