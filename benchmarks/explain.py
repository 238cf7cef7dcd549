"""Time to explain: every model of examples/models.py on four machines, none of them here."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from pathlib import Path
from typing import Any

import torch

import attn_graph as ag
from attn_graph.lowering.cpu import fused_tiles
from attn_graph.planner import cost, explanation, remedies
from benchmarks.timing import save, seconds

MODELS = Path(__file__).parents[1] / "examples" / "models.py"
ASKED = 100.0  # milliseconds
ROUNDS = 3  # the least of them is what the work takes; others share the machine
KNOWN = (  # what an explanation leaves for the next, of the same graph on another target say
    remedies.simplify_once,
    remedies.gradient_graph,
    remedies.single_edits,
    remedies.apply_edits,
    cost.count_pairs_once,
    explanation.count_tiles_once,
    fused_tiles.static_tiles,
)


def models() -> Any:
    """The example as a module, though its folder is no package."""
    spec = importlib.util.spec_from_file_location("examples_models", MODELS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(threads: int) -> list[dict[str, Any]]:
    """Milliseconds of each explanation, after one of another graph for the same target."""
    torch.set_num_threads(threads)
    table = models()
    x = ag.TensorSpec((1, 1, 8, 8), torch.float16)
    for target in table.TARGETS:
        ag.explain(ag.attention(x, x, x), target=target, store=False)
    return [
        {"job": f"{name}, {target}", "threads": threads} | times(graph, target)
        for name, graph in table.MODELS.items()
        for target in table.TARGETS
    ]


def times(graph: ag.Graph, target: str) -> dict[str, float]:
    """new: once, where nothing is known of the graph. least: of some such. again: once more."""
    told = [milliseconds(graph, target, forget=True) for _ in range(ROUNDS)]
    again = milliseconds(graph, target, forget=False)
    found = {"new_ms": told[0], "least_ms": min(told), "again_ms": again, "asked_ms": ASKED}
    return {name: round(value, 2) for name, value in found.items()}


def milliseconds(graph: ag.Graph, target: str, forget: bool) -> float:
    for known in KNOWN if forget else ():
        known.cache_clear()
    return 1e3 * seconds(lambda: ag.explain(graph, target=target, store=False))


def summary(found: list[dict[str, Any]]) -> str:
    """The median and the slowest."""
    told = [f"{found[0]['threads']} threads, {len(found)} explanations"]
    for key in ("new_ms", "least_ms", "again_ms"):
        most = max(found, key=lambda row: row[key])
        middle = statistics.median(row[key] for row in found)
        told.append(f"{key}: median {middle:.1f}, most {most[key]:.1f} ({most['job']})")
    return "; ".join(told)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--save", action="store_true", help="write benchmarks/results/explain-<date>.json"
    )
    options.add_argument("--all", action="store_true", help="print every explanation's time")
    given, most = options.parse_args(), torch.get_num_threads()
    both = [rows(threads) for threads in dict.fromkeys((most, 1))]
    for found in both:
        for row in found if given.all else ():
            print(
                f"{row['new_ms']:9.2f} {row['least_ms']:9.2f} {row['again_ms']:9.2f}  {row['job']}"
            )
        print(summary(found))
    if given.save:
        print(save("explain", [row for found in both for row in found]))


if __name__ == "__main__":
    main()
