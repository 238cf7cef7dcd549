"""Host time: what a call costs beside the computation, on tensors too small to compute with."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F

import attn_graph as ag
from benchmarks.timing import microseconds, save


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
    ]


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
