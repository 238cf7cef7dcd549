"""Host time: what a call costs beside the computation, on tensors too small to compute with."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F

import attn_graph as ag
from attn_graph.kernels.tiles import Tiling
from attn_graph.lowering.problem import sole
from attn_graph.lowering.triton_tiles import static_lists
from attn_graph.passes import simplify
from benchmarks.timing import microseconds, save, seconds


def rows() -> list[dict[str, Any]]:
    """Microseconds of each call, with what is asked of it."""
    q, k, v = (torch.randn(1, 1, 1, 64) for _ in range(3))
    spec = ag.TensorSpec.like(q)
    graph = ag.attention(spec, spec, spec)
    plan = ag.compile(graph)
    q2, k2, v2 = (t.clone().requires_grad_() for t in (q, k, v))
    sdpa = microseconds(lambda: F.scaled_dot_product_attention(q, k, v))
    sdpa_grad = microseconds(lambda: F.scaled_dot_product_attention(q2, k2, v2))
    stats = ag.compile(ag.attention(spec, spec, spec, stats=True))
    return [
        row("F.scaled_dot_product_attention", sdpa),
        row("plan(q, k, v)", microseconds(lambda: plan(q, k, v)), sdpa + 3),
        row("plan(q, k, v) with lse", microseconds(lambda: stats(q, k, v))),
        row("F.scaled_dot_product_attention, requires_grad", sdpa_grad),
        row("plan(q, k, v), requires_grad", microseconds(lambda: plan(q2, k2, v2)), sdpa_grad + 15),
        row("compile(graph), cached", microseconds(lambda: ag.compile(graph)), 2),
        row("import attn_graph, beyond torch (ms)", import_milliseconds(), 150),
        row("compile(graph), a new length, triton on an H200", new_length("triton"), 300),
        row("compile(graph), a new length, every backend asked", new_length()),
        row("tile lists of a mask, 64k x 64k (ms)", list_milliseconds(), 50),
    ]


def new_length(*backends: str) -> float:
    """Microseconds to plan a causal graph of another length for an H200; the median."""
    target, among, times = ag.Target.of("h200"), backends or None, []
    for n in range(1, 300):
        spec = ag.TensorSpec((2, 8, 8 * n + len(backends), 64), torch.bfloat16)
        graph = ag.attention(spec, spec, spec, mask=ag.Causal())
        times.append(seconds(lambda graph=graph: ag.compile(graph, target=target, backends=among)))  # type: ignore[misc]  # bound now
    return statistics.median(times) * 1e6


def list_milliseconds() -> float:
    """The longest of the lists by queries and by keys, of a mask that is no strip."""
    spec = ag.TensorSpec((1, 1, 65536, 128), torch.bfloat16)
    mask = ag.Causal() & (ag.Window(256) | ag.Prefix(64))
    problem = sole(simplify(ag.attention(spec, spec, spec, mask=mask)))
    assert problem is not None
    tile = Tiling(128, 64, 8, 3)
    static_lists(problem, tile, by_keys=False)
    return 1e3 * max(
        seconds(lambda by=by: static_lists(problem, tile, by))  # type: ignore[misc]  # bound now
        for by in (False, True)
    )


def row(name: str, found: float, most: float | None = None) -> dict[str, Any]:
    return {"job": name, "us": round(found, 2), "asked": most and round(most, 2)}


def import_milliseconds(runs: int = 5) -> float:
    """The least time that `import attn_graph` takes where torch is imported already."""
    code = "import torch, time; a = time.perf_counter(); import attn_graph"
    code += "; print(time.perf_counter() - a)"
    told = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(runs)
    ]
    return min(float(x.stdout) for x in told) * 1e3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--save", action="store_true", help="write benchmarks/results/host-<date>.json"
    )
    given, found = options.parse_args(), rows()
    for each in found:
        print(
            f"{each['us']:9.2f}  {each['job']}"
            + (f"  asked {each['asked']}" if each["asked"] else "")
        )
    if given.save:
        print(save("host", found))


if __name__ == "__main__":
    main()
