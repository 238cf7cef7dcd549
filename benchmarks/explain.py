"""How long `explain` takes: each model of examples/models.py on its four machines."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import torch

import attn_graph as ag
from attn_graph.lowering import problem, shares
from benchmarks.timing import save, seconds

MODELS = Path(__file__).parents[1] / "examples" / "models.py"
GOAL = 100.0  # milliseconds
ROUNDS = 3  # the least of them counts, since others share the machine
CACHES: tuple[Any, ...] = (  # lru caches that an explanation fills for the next one
    problem.facts_of,
    shares.count_pairs_once,
)


def load_models() -> Any:
    """The example as a module, though its folder is not a package."""
    spec = importlib.util.spec_from_file_location("examples_models", MODELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_rows(threads: int) -> list[dict[str, Any]]:
    """Milliseconds of each explanation, after one of another graph for the same target."""
    torch.set_num_threads(threads)
    table = load_models()
    x = ag.TensorSpec((1, 1, 8, 8), torch.float16)
    for target in table.TARGETS:
        ag.explain(ag.attention(x, x, x), target=target, store=False)
    return [
        {"job": f"{name}, {target}", "threads": threads} | times(graph, target)
        for name, graph in table.MODELS.items()
        for target in table.TARGETS
    ]


def times(graph: ag.Graph, target: str) -> dict[str, float]:
    """new: the first time, with empty caches. least: of ROUNDS such. again: with full caches."""
    first = [milliseconds(graph, target, forget=True) for _ in range(ROUNDS)]
    again = milliseconds(graph, target, forget=False)
    figures = {"new_ms": first[0], "least_ms": min(first), "again_ms": again, "goal_ms": GOAL}
    return {name: round(value, 2) for name, value in figures.items()}


def milliseconds(graph: ag.Graph, target: str, forget: bool) -> float:
    """How long an explanation takes. forget: empty the caches first."""
    for cache in CACHES if forget else ():
        cache.cache_clear()
    return 1e3 * seconds(lambda: ag.explain(graph, target=target, store=False))


def summary(rows: list[dict[str, Any]]) -> str:
    """The median and the slowest."""
    parts = [f"{rows[0]['threads']} threads, {len(rows)} explanations"]
    for key in ("new_ms", "least_ms", "again_ms"):
        most = max(rows, key=lambda row: row[key])
        middle = statistics.median(row[key] for row in rows)
        parts.append(f"{key}: median {middle:.1f}, most {most[key]:.1f} ({most['job']})")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/explain-<date>.json"
    )
    parser.add_argument("--all", action="store_true", help="print every explanation's time")
    options, most = parser.parse_args(), torch.get_num_threads()
    runs = [measure_rows(threads) for threads in dict.fromkeys((most, 1))]
    for rows in runs:
        for row in rows if options.all else ():
            print(
                f"{row['new_ms']:9.2f} {row['least_ms']:9.2f} {row['again_ms']:9.2f}  {row['job']}"
            )
        print(summary(rows))
    if options.save:
        print(save("explain", [row for rows in runs for row in rows]))


if __name__ == "__main__":
    main()
