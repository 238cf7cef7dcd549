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
from attn_graph.lowering import cudnn_backend, torch_cuda, torch_math, torch_sdpa, triton_flash
from attn_graph.passes import simplify
from attn_graph.spec import FLOATS
from attn_graph.vjp import backward, result_spec

ROOT = Path(__file__).parent.parent
CPU = evolve(ag.Target.of("cpu"), native=(), libraries=())  # the same words on every machine
CUDNN = (("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
GPU = evolve(ag.Target.of("h200"), libraries=(("triton", ""), *CUDNN))
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


def with_options(**options: Any) -> ag.Graph:  # Any: options of `attention`
    return ag.attention(X, X, X, **options)


def features(dtype: torch.dtype) -> dict[str, ag.Graph]:
    """Graphs by what is special about them, in a dtype where that is not the dtype."""
    x, few = spec(B, H, S, D, dtype=dtype), spec(B, H, 128, D, dtype=dtype)
    groups, narrow = spec(B, 2, S, D, dtype=dtype), spec(B, H, S, 32, dtype=dtype)
    strided = ag.TensorSpec(x.shape, dtype, (H * S * D, S * D, 1, S))
    lengths, numbers = spec(B, dtype=torch.int64), spec(B, S, dtype=torch.int64)

    def made(**options: Any) -> ag.Graph:  # Any: options of `attention`
        return ag.attention(x, x, x, **options)

    return {
        **{NAMES[t]: ag.attention(*(spec(B, H, S, D, dtype=t),) * 3) for t in NAMES},
        "lse as a second output": made(stats=True),
        "grouped heads, H = r G": ag.attention(x, groups, groups),
        "head sizes D != E": ag.attention(x, x, narrow),
        "q strided along its last axis": ag.attention(strided, x, x),
        "causal": made(mask=ag.Causal()),
        "causal, bottom right, M != N": ag.attention(few, x, x, mask=ag.Causal("bottom_right")),
        "window": made(mask=ag.Window(64)),
        "prefix, and any join by & | ~": made(mask=ag.Causal() | ag.Prefix(16)),
        "boolean tensor": made(keep=spec(1, 1, S, S, dtype=torch.bool)),
        "lengths of keys": made(kv_lengths=lengths),
        "lengths of queries": made(q_lengths=lengths),
        "segments": made(segments=(numbers, numbers)),
        "soft cap": made(soft_cap=30.0),
        "bias": made(bias=spec(1, H, S, S, dtype=dtype)),
        "ALiBi": made(alibi=True),
        "sinks": made(sinks=spec(H)),
        "dropout": made(dropout=0.1),
        "no query, or no key": ag.attention(spec(B, H, 0, D, dtype=dtype), x, x),
    }


NAMES = {
    torch.float32: "float32, no mask",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# Who is asked: backend, target, and the dtype of graphs whose dtype is not the question.
ASKED = {
    "`torch_sdpa`, CPU": (torch_sdpa.BACKEND, CPU, torch.float32),
    "`cudnn`, H200": (cudnn_backend.BACKEND, GPU, torch.float16),
    "`triton`, GPU": (triton_flash.BACKEND, GPU, torch.float32),
    "`math`": (torch_math.BACKEND, CPU, torch.float32),
}


KERNELS = {
    f"`{backend.name}`, GPU": (backend, GPU, torch.float16)
    for backend in (torch_cuda.FLASH, torch_cuda.EFFICIENT, torch_cuda.CUDNN)
}


def support() -> str:
    """What each backend takes: forward, backward, or its first reason against."""
    return table(ASKED)


def kernels() -> str:
    """The same of PyTorch's kernels for GPUs."""
    return table(KERNELS)


def table(asked: dict[str, tuple[ag.Backend, ag.Target, torch.dtype]]) -> str:
    columns = [
        [verdict(graph, backend, target) for graph in features(dtype).values()]
        for backend, target, dtype in asked.values()
    ]
    rows = [("graph", *asked), ("---",) * (1 + len(asked))]
    rows += zip(features(torch.float32), *columns, strict=True)
    return "\n".join("| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in rows)


def verdict(graph: ag.Graph, backend: ag.Backend, target: ag.Target) -> str:
    simple = simplify(graph)
    if against := [*backend.why_not(simple, target, ag.Options())]:
        return f"no: it {against[0]}"
    wants = [n for n, i in enumerate(simple.inputs) if i.spec.dtype in FLOATS]
    cotangents = [result_spec(simple, i) for i in simple.outputs]
    back = simplify(backward(simple, wants, cotangents))
    if against := [*backend.why_not(back, target, ag.Options())]:
        return f"forward; not backward: it {against[0]}"
    return "yes"


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
