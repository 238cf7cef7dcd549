"""What each backend takes: its answers to graphs that differ in one feature each."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import backward, cotangent_specs
from attn_graph.lowering.cpu import math as torch_math
from attn_graph.lowering.cpu import sdpa as torch_sdpa
from attn_graph.lowering.cudnn import backend as cudnn_backend
from attn_graph.lowering.fa4 import backend as fa4
from attn_graph.lowering.request import Request
from attn_graph.lowering.torch_cuda import dense as torch_cuda
from attn_graph.lowering.torch_cuda import packed as torch_packed
from attn_graph.lowering.triton import backend as triton_flash
from attn_graph.spec import FLOATS
from docs.generate.pages import plain, table

CPU = evolve(ag.Target.of("cpu"), native=(), libraries=())  # the same words on every machine
CUDNN = (("nvidia-cudnn-frontend", "1.28.0"), ("nvidia-cudnn-cu13", "9.20.0.48"))
FLASH = ("flash-attn-4", "4.0.0b36")
GPU = evolve(ag.Target.of("h200"), libraries=(("triton", "3.7.1"), FLASH, *CUDNN))
B, H, S, D, PAGE = 2, 8, 512, 64, 16
RARE = (
    "float64",
    "v of another head size",
    "segments",
    "ALiBi",
    "largest scores",
    "q strided along D",
    "lengths of queries",
    "M = 0 or N = 0",
    "forward mode",
    "second derivatives",
    "causal, bottom right, M != N",
)  # rows of docs/support.md that README, which is short, leaves out
NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# Backend, target, and the dtype of all graphs but those that vary it.
COLUMNS = {
    "math": (torch_math.BACKEND, CPU, torch.float32),
    "torch_sdpa": (torch_sdpa.BACKEND, CPU, torch.float32),
    "triton": (triton_flash.BACKEND, GPU, torch.float32),
    "cudnn": (cudnn_backend.BACKEND, GPU, torch.float16),
    "fa4": (fa4.BACKEND, GPU, torch.float16),
    "torch_flash": (torch_packed.BACKEND, GPU, torch.float16),
    "torch_efficient": (torch_cuda.EFFICIENT, GPU, torch.float16),
    "torch_cudnn": (torch_cuda.CUDNN, GPU, torch.float16),
}


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ag.TensorSpec:
    """A dense tensor."""
    return ag.TensorSpec(shape, dtype)


def feature_graphs(dtype: torch.dtype) -> dict[str, ag.Graph]:
    """Graphs by their feature; all in this dtype, but for those whose feature is the dtype."""
    x, few = spec(B, H, S, D, dtype=dtype), spec(B, H, 128, D, dtype=dtype)
    groups, narrow = spec(B, 2, S, D, dtype=dtype), spec(B, H, S, 32, dtype=dtype)
    strided = ag.TensorSpec(x.shape, dtype, (H * S * D, S * D, 1, S))
    lengths, numbers = spec(B, dtype=torch.int64), spec(B, S, dtype=torch.int64)
    rows, pool = spec(B * S, H, D, dtype=dtype), spec(B * S // PAGE, PAGE, H, D, dtype=dtype)
    starts, table = (spec(*n, dtype=torch.int32) for n in ((B + 1,), (B, S // PAGE)))

    def make(**options: Any) -> ag.Graph:  # Any: options of `attention`
        return ag.attention(x, x, x, **options)

    return {
        **{NAMES[t]: ag.attention(*(spec(B, H, S, D, dtype=t),) * 3) for t in NAMES},
        "lse with a gradient": make(stats=True),
        "largest scores": make(stats=("max",)),
        "fewer heads in k and v": ag.attention(x, groups, groups),
        "v of another head size": ag.attention(x, x, narrow),
        "q strided along D": ag.attention(strided, x, x),
        "causal": make(mask=ag.Causal()),
        "causal, bottom right, M != N": ag.attention(few, x, x, mask=ag.Causal("bottom_right")),
        "window": make(mask=ag.Window(64)),
        "masks joined by &, | and ~": make(mask=ag.Causal() | ag.Prefix(16)),
        "boolean tensor": make(keep=spec(1, 1, S, S, dtype=torch.bool)),
        "lengths of keys": make(kv_lengths=lengths),
        "lengths of queries": make(q_lengths=lengths),
        "packed sequences": ag.attention(rows, rows, rows, q_starts=starts),
        "keys in pages": ag.attention(few, pool, pool, pages=table, kv_lengths=lengths),
        "segments": make(segments=(numbers, numbers)),
        "soft cap": make(soft_cap=30.0),
        "bias": make(bias=spec(1, H, S, S, dtype=dtype)),
        "ALiBi": make(alibi=True),
        "sinks": make(sinks=spec(H)),
        "dropout": make(dropout=0.1),
        "M = 0 or N = 0": ag.attention(spec(B, H, 0, D, dtype=dtype), x, x),
        "forward mode": ag.jvp(make()),
        "second derivatives": ag.jvp(ag.vjp(make())[1]),
    }


def ask_backend(graph: ag.Graph, backend: ag.extend.Backend, target: ag.Target) -> tuple[str, str]:
    """ "yes", "forward" or "no", and the first reason against what is not taken."""
    simple = simplify(graph)
    if against := backend.reasons(Request(simple, target, ag.extend.Options())):
        return "no", f"it {against[0]}"
    if simple.gradient_problems:
        return "yes", ""
    wants = [n for n, i in enumerate(simple.inputs) if i.spec.dtype in FLOATS]
    cotangents = cotangent_specs(simple, simple.differentiable_outputs)
    back = simplify(backward(simple, wants, cotangents))
    if against := backend.reasons(Request(back, target, ag.extend.Options())):
        return "forward", f"backward: it {against[0]}"
    return "yes", ""


@cache
def all_answers() -> dict[str, dict[str, tuple[str, str]]]:
    """The answers by graph and backend."""
    return {
        name: {
            column: ask_backend(feature_graphs(dtype)[name], backend, target)
            for column, (backend, target, dtype) in COLUMNS.items()
        }
        for name in feature_graphs(torch.float32)
    }


def compact() -> str:
    """yes, forward or no for each graph and backend."""
    rows = [
        (name, *(word for word, _ in cells.values()))
        for name, cells in all_answers().items()
        if name not in RARE
    ]
    return table(("graph", *COLUMNS), rows)


def numbered_table() -> str:
    """The same with a number at each refusal, and a list of the reasons by number."""
    reasons: dict[str, int] = {}

    def cell(word: str, reason: str) -> str:
        if not reason:
            return word
        number = reasons.setdefault(reason, len(reasons) + 1)
        return f"{word} [{number}](#reason-{number})"

    rows = [
        (name, *(cell(*each) for each in cells.values())) for name, cells in all_answers().items()
    ]
    listed = [f'{n}. <a id="reason-{n}"></a>{plain(text)}' for text, n in reasons.items()]
    return "\n".join([table(("graph", *COLUMNS), rows), "", *listed])
