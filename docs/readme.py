"""Writes the parts of README.md that come from the code: `python docs/readme.py`.

Each part stands between `<!-- name -->` and `<!-- end -->`. A test fails while they differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

import attn_graph as ag

ROOT = Path(__file__).parent.parent
CPU = evolve(ag.Target.of("cpu"), native=(), libraries=())  # the same words on every machine
GPU = evolve(ag.Target.of("h200"), libraries=(("triton", ""),))
B, H, S, D = 2, 8, 512, 64
X = ag.TensorSpec((B, H, S, D), torch.float32)
EXAMPLE = """\
import torch, attn_graph as ag

x = ag.TensorSpec((2, 8, 512, 64), torch.float32)  # [batch, heads, positions, head size]
mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))  # 64 positions back, and the first four
graph = ag.attention(x, x, x, mask=mask, stats=True)  # an immutable value: ==, hash, print, parse
plan = ag.compile(graph)  # validated, chosen, lowered, cached

q, k, v = torch.randn(3, 2, 8, 512, 64, requires_grad=True).unbind()
o, lse = plan(q, k, v)  # differentiable, lse as well as o
print(graph)
"""


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype)


def typed(dtype: torch.dtype) -> ag.Graph:
    return ag.attention(*(spec(B, H, S, D, dtype=dtype),) * 3)


def with_options(**options: Any) -> ag.Graph:  # Any: options of `attention`
    return ag.attention(X, X, X, **options)


LENGTHS, NUMBERS = spec(B, dtype=torch.int64), spec(B, S, dtype=torch.int64)
FEATURES: dict[str, ag.Graph] = {
    "float32, no mask": with_options(),
    "float64": typed(torch.float64),
    "float16": typed(torch.float16),
    "bfloat16": typed(torch.bfloat16),
    "lse as a second output": with_options(stats=True),
    "grouped heads, H = r G": ag.attention(X, spec(B, 2, S, D), spec(B, 2, S, D)),
    "head sizes D != E": ag.attention(X, X, spec(B, H, S, 32)),
    "q strided along its last axis": ag.attention(
        ag.TensorSpec(X.shape, X.dtype, (H * S * D, S * D, 1, S)), X, X
    ),
    "causal": with_options(mask=ag.Causal()),
    "causal, bottom right, M != N": ag.attention(
        spec(B, H, 128, D), X, X, mask=ag.Causal("bottom_right")
    ),
    "window": with_options(mask=ag.Window(64)),
    "prefix, and any join by & | ~": with_options(mask=ag.Causal() | ag.Prefix(16)),
    "boolean tensor": with_options(keep=spec(1, 1, S, S, dtype=torch.bool)),
    "lengths": with_options(kv_lengths=LENGTHS, q_lengths=LENGTHS),
    "segments": with_options(segments=(NUMBERS, NUMBERS)),
    "soft cap": with_options(soft_cap=30.0),
    "bias": with_options(bias=spec(1, H, S, S)),
    "ALiBi": with_options(alibi=True),
    "sinks": with_options(sinks=spec(H)),
    "dropout": with_options(dropout=0.1),
    "no query, or no key": ag.attention(spec(B, H, 0, D), X, X),
}


COLUMNS = (("torch_sdpa", ", CPU", CPU), ("triton", ", GPU", GPU), ("math", "", CPU))
KERNELS = tuple((f"torch_{name}", ", GPU", GPU) for name in ("flash", "efficient", "cudnn"))
Columns = tuple[tuple[str, str, ag.Target], ...]

Y = spec(B, H, S, D, dtype=torch.float16)
FEW = spec(B, 2, S, D, dtype=torch.float16)
HALVES: dict[str, ag.Graph] = {
    "float16 or bfloat16, no mask": ag.attention(Y, Y, Y),
    "float32": FEATURES["float32, no mask"],
    "causal": ag.attention(Y, Y, Y, mask=ag.Causal()),
    "lse as a second output": ag.attention(Y, Y, Y, stats=True),
    "grouped heads, H = r G": ag.attention(Y, FEW, FEW),
    "head sizes D != E": ag.attention(Y, Y, spec(B, H, S, 32, dtype=torch.float16)),
    "bias [B,H,M,N]": ag.attention(Y, Y, Y, bias=spec(B, H, S, S, dtype=torch.float16)),
    "bias [1,H,M,N]": ag.attention(Y, Y, Y, bias=spec(1, H, S, S, dtype=torch.float16)),
    "dropout": ag.attention(Y, Y, Y, dropout=0.1),
}


def support() -> str:
    """What each backend takes: forward, backward, or its first reason against."""
    return table(FEATURES, COLUMNS)


def kernels() -> str:
    """The same of PyTorch's kernels for GPUs."""
    return table(HALVES, KERNELS)


def table(graphs: dict[str, ag.Graph], columns: Columns) -> str:
    titles = (f"`{backend}`{where}" for backend, where, _ in columns)
    rows = [f"| graph | {' | '.join(titles)} |", "|---" * (1 + len(columns)) + "|"]
    for name, graph in graphs.items():
        cells = (name, *(verdict(graph, backend, target) for backend, _, target in columns))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def verdict(graph: ag.Graph, backend: str, target: ag.Target) -> str:
    try:
        plan = ag.compile(graph, target=target, backends=(backend,))
    except ag.NoBackendError as error:
        return f"no: it {dict(error.refusals)[backend][0]}"
    try:
        return "yes" if plan.vjp else "forward"
    except ag.NoBackendError as error:
        return f"forward; not backward: it {dict(error.refusals)[backend][0]}"


def example() -> str:
    """The example and what it prints, by running it."""
    printed: list[str] = []
    exec(EXAMPLE, {"print": lambda x: printed.append(str(x))})  # the README's own code
    return f"```python\n{EXAMPLE}```\n```\n" + "\n".join(printed) + "\n```"


def explained() -> str:
    mask = ag.Causal() & (ag.Window(64) | ag.Prefix(4))
    plan = ag.compile(with_options(mask=mask, stats=True), target=CPU)
    return f"```\n{plan.explain()}\n```"


def measured() -> str:
    """The newest saved figures of benchmarks/cpu.py, with their machine."""
    path = sorted((ROOT / "benchmarks" / "results").glob("cpu-*.json"))[-1]
    saved = json.loads(path.read_text())
    at = saved["machine"]
    told = f"{at['cpu']} ({at['capability']}), {at['threads']} threads, "
    told += f"Python {at['python']}, torch {at['libraries']['torch']}"
    rows = ["| job | pass | ours, ms | PyTorch, ms | times faster |", "|---|---|---|---|---|"]
    for row in saved["rows"]:
        figures = f"{row['ms']:.1f} | {row['peer ms']:.1f} | {row['ratio']:.2f}"
        rows.append(f"| {row['job']} | {row['pass']} | {figures} |")
    return f"Measured on {told}; `benchmarks/results/{path.name}`.\n\n" + "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "example": example,
    "explain": explained,
    "support": support,
    "kernels": kernels,
    "measured": measured,
}


def filled(text: str) -> str:
    """README's text with every generated part made anew."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(pattern, lambda m, make=make: m[1] + make() + m[2], text, flags=re.DOTALL)  # type: ignore[misc]  # make is bound now
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))
