"""The newest saved figures of benchmarks: of cpu.py as bars too, of models.py, derivatives.py."""

from __future__ import annotations

import json
import re
from statistics import geometric_mean
from typing import Any

from benchmarks.cpu_runtimes import RUNTIMES
from docs.generate.pages import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
HEAD = ("job", "pass", "ours, ms", "PyTorch, ms", "times faster")
MODELS_HEAD = ("layer or model", "pass", "beside", "ours, ms", "its, ms", "times faster")
DERIVATIVES_HEAD = (
    *("job", "beside", "ours, ms", "its, ms", "times faster"),
    *("ours, MiB", "its, MiB"),
)
BEST = "Each is beside the fastest of several ways to do the job, which is named."
BEST_HEAD = ("job", "pass", "threads", "ours, ms", "the fastest", "its, ms", "times faster")
DATE = "-".join(("[0-9]" * 4, "[0-9]" * 2, "[0-9]" * 2))  # of a file's name; more is another's
SAME = 0.1  # a ratio within this of 1 is neither gain nor loss
# README's chart: the benchmark's jobs by the names that readers know, in groups.
CHART = {
    "No mask, or causal": {
        "float32": "float32 full",
        "float32, causal": "float32 causal",
        "bfloat16, causal": "bfloat16 causal",
        "float16, causal": "float16 causal",
    },
    "Masks, float32": {
        "sliding window of 256": "float32 causal & window 255",
        "packed documents, causal": "float32 causal in documents of 40 to 700",
        "padded keys": "float32 key lengths of 128",
        "boolean mask": "float32 random mask",
        "prefix LM": "float32 causal | prefix 300",
    },
    "Modifiers, float32": {
        "soft cap, causal": "float32 causal soft cap",
        "ALiBi, causal": "float32 causal ALiBi",
    },
    "One new token": {
        "float32, 1,024 keys": "float32 decode, 12 heads, 1024 keys",
        "bfloat16, 8,192 keys": "bfloat16 decode, 32 heads over 8, 8192 keys",
        "float16, one head of keys": "float16 decode, 32 heads over 1, 2048 keys",
    },
}


def newest(benchmark: str = "cpu") -> tuple[str, Any]:  # Any: JSON
    """The file's name and what it holds."""
    path = sorted(RESULTS.glob(f"{benchmark}-{DATE}.json"))[-1]
    return path.name, json.loads(path.read_text(encoding="utf-8"))


def where(benchmark: str = "cpu") -> str:
    """The machine and versions of the figures."""
    name, saved = newest(benchmark)
    at = saved["machine"]
    counts = sorted({row.get("threads", at["threads"]) for row in saved["rows"]})
    threads = f"{' and '.join(map(str, counts))} thread{'s' * (counts != [1])}"
    machine = f"{at['cpu']} ({at['capability']}), {threads}, Python {at['python']}"
    clock = at.get("clock", "time")
    more = {"transformers": at["transformers"]} if "transformers" in at else {}
    libraries = {"torch": at["libraries"]["torch"]} | at.get("runtimes", {}) | more
    versions = ", ".join(f"{library} {version}" for library, version in libraries.items())
    of = "Measured" if clock == "time" else f"{clock} measured"
    return f"{of} on {machine}, {versions}; `benchmarks/results/{name}`."


def all_rows() -> str:
    """Every row, with its machine; where rows name a peer, beside that one, else SDPA."""
    saved = newest()[1]["rows"]
    if any("peer" in row for row in saved):
        return f"{where()} {BEST}\n\n{table(BEST_HEAD, [*map(beside_best, saved)])}"
    rows: list[tuple[object, ...]] = [
        (row["job"], row["pass"], *(f"{row[x]:.1f}" for x in ("ms", "peer ms")), ratio(row))
        for row in saved
    ]
    return f"{where()}\n\n{table(HEAD, rows)}"


def beside_best(row: Any) -> tuple[object, ...]:  # Any: JSON
    """A row of the table that names the peer."""
    ours, its = (f"{row[x]:.{decimals(row[x])}f}" for x in ("ms", "peer ms"))
    return row["job"], row["pass"], row["threads"], ours, row["peer"], its, ratio(row)


def decimals(ms: float) -> int:
    """How many a time in milliseconds is written with: short ones down to the microsecond."""
    return 3 if ms < 1 else 1


def layer_rows() -> str:
    """The attention of layers."""
    return rows_beside("layers")


def model_rows() -> str:
    """Whole models."""
    return rows_beside("models")


def rows_beside(benchmark: str) -> str:
    """Layers or models beside each peer, with the machine; without peers that refuse a model."""
    rows: list[tuple[object, ...]] = [
        (
            row["job"],
            row["pass"],
            row["peer"],
            *(f"{row[x]:.1f}" for x in ("ms", "peer ms")),
            ratio(row),
        )
        for row in newest(benchmark)[1]["rows"]
        if "refused" not in row
    ]
    return f"{where(benchmark)}\n\n{table(MODELS_HEAD, rows)}"


def derivative_rows() -> str:
    """Forward mode and double backward, with the machine; and the memory of long ones."""
    saved = newest("derivatives")[1]["rows"]
    timed = [row for row in saved if "ratio" in row]
    rows: list[tuple[object, ...]] = [
        (
            row["job"],
            row["peer"],
            *(f"{row[x]:.0f}" for x in ("ms", "peer ms")),
            ratio(row),
            *(f"{row[x]:.0f}" for x in ("MiB", "peer MiB")),
        )
        for row in timed
    ]
    long = "; ".join(f"{r['job']}: {r['resident MiB']:.0f} MiB" for r in saved if r not in timed)
    grown = f"How much a process grows beside inputs and outputs: {long}."
    return f"{where('derivatives')}\n\n{table(DERIVATIVES_HEAD, rows)}\n\n{grown}"


def ratio(row: Any) -> str:  # Any: JSON
    """How many times faster, in two decimals."""
    return f"{row['ratio']:.2f}"


def beside_torch(row: Any) -> float:  # Any: JSON
    """How many times as fast as the fastest way in PyTorch."""
    ratios = [x for name, x in row.get("ratios", {}).items() if name not in RUNTIMES]
    fastest: float = min(ratios, default=row["ratio"])
    return fastest


def common_jobs() -> list[tuple[str, dict[str, float]]]:
    """The jobs of CHART, each with every pass, under the names of their groups."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in newest()[1]["rows"]:
        job = re.sub(r",? \([\d, ]+\)|, peer: .*", "", row["job"])
        ratios.setdefault(job, {}).setdefault(row["pass"], []).append(beside_torch(row))
    rows: list[tuple[str, dict[str, float]]] = []
    for group, jobs in CHART.items():
        rows.append((group, {}))
        for label, job in jobs.items():
            rows.append((label, {name: over_shapes(each) for name, each in ratios[job].items()}))
    return rows


def over_shapes(ratios: list[float]) -> float:
    """The geometric mean; the worst shape where one is slower than PyTorch, so that none hides."""
    worst = min(ratios)
    return worst if worst < 1 - SAME else geometric_mean(ratios)
