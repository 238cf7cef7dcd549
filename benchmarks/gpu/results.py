"""The file of figures: written anew after each item, so that an interruption loses one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from shutil import which
from typing import Any, Literal, final

from attrs import asdict, evolve, field, frozen

from benchmarks.gpu.wheels import ROOT

Row = dict[str, Any]  # Any: figures and words
State = Literal["done", "failed", "timed out", "interrupted"]
SOURCES = ("attn_graph", "kernels", "lowering", "benchmarks", "tests")
IDENTITY = ("gpu", "libraries", "driver", "sources")  # what must be the same to go on


@final
@frozen
class Outcome:
    """What came of an item. error: why it is not done, with the last lines that it printed."""

    state: State
    seconds: float
    error: str = ""
    rows: tuple[Row, ...] = ()


@final
@frozen
class Results:
    """All outcomes until now, by item, and the machine and sources that they are of."""

    machine: Row
    outcomes: Mapping[str, Outcome] = field(factory=dict[str, Outcome])

    def add(self, name: str, outcome: Outcome) -> Results:
        """With one more outcome, or another one in its place: of two that are not done, the one
        with more rows keeps them."""
        before = self.outcomes.get(name)
        if before and outcome.state != "done" and len(before.rows) > len(outcome.rows):
            outcome = evolve(outcome, rows=before.rows)
        return evolve(self, outcomes={**self.outcomes, name: outcome})

    def save(self, path: Path) -> None:
        """Write the file, or leave it as it was: a reader never sees half of it."""
        items = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        text = json.dumps({"machine": self.machine, "items": items}, indent=1, allow_nan=False)
        beside = path.with_suffix(".partial")
        beside.write_text(f"{text}\n", encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """What `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        items = data["items"].items()
        outcomes = {name: Outcome(**x | {"rows": tuple(x["rows"])}) for name, x in items}
        return cls(data["machine"], outcomes)


def open_results(machine: Row, folder: Path, *, restart: bool) -> tuple[Path, Results]:
    """Where figures of this machine go, and those of an earlier run of the same sources.

    The newest file of the GPU is continued. Exits where it is of other sources or versions.
    """
    gpu = re.sub(r"\W+", "-", str(machine["gpu"]).lower())
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{gpu}-{date.today().isoformat()}.json"
    old = sorted(folder.glob(f"{gpu}-????-??-??.json"))
    if restart or not old:
        return new, Results(machine)
    results = Results.load(old[-1])
    if others := [x for x in IDENTITY if results.machine[x] != machine[x]]:
        lines = [f"  {x}: {results.machine[x]} there, {machine[x]} now" for x in others]
        raise SystemExit(
            "\n".join((f"{old[-1]} is of another run: --restart, or --out elsewhere", *lines))
        )
    return old[-1], results


def describe_sources(commit: str | None) -> Row:
    """The commit, and a digest of the sources, for machines without git."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in SOURCES for p in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return {"commit": commit or ask_git() or "unknown", "sources": digest.hexdigest()[:12]}


def ask_git() -> str:
    """The commit of the checkout, and whether it was changed since; "" without git."""
    return output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")


def describe_driver() -> str:
    """What NVIDIA's driver says of itself and of the GPU's limits; "unknown" without its tool."""
    fields = "driver_version,power.limit,clocks.max.sm,clocks.max.memory"
    return output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader") or "unknown"


def output_of(program: str, *arguments: str) -> str:
    """What a program prints; "" where it is not installed, or fails."""
    if which(program) is None:
        return ""
    process = subprocess.run((program, *arguments), capture_output=True, text=True, check=False)
    return "" if process.returncode else process.stdout.strip()
