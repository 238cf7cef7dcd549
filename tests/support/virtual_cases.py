"""Attentions that virtual GPUs execute: masks, modifiers and layouts, 1 to 4 tiles with tails."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.gpu import VirtualGpu
from attn_graph.testing.tensors import tensors_for

GENERATIONS = (80, 90, 100, 120)  # compute capabilities
I32 = torch.int32
CAUSAL = ag.Causal(align="bottom_right")
WIDE = ag.Formula("i * 1000000000 >= j * 1000000000")  # beyond 32 bits
WINDOW = CAUSAL & ag.Window(40, align="bottom_right")


def spec(*shape: int, dtype: torch.dtype = torch.float16, gap: int = 0, swap: bool = False) -> Any:
    """A tensor [B,H,L,D]; gap: unused elements behind each row; swap: heads within positions."""
    _, H, L, D = shape
    row = D + gap
    strides = (H * L * row, row, H * row, 1) if swap else (H * L * row, L * row, row, 1)
    return ag.TensorSpec(shape, dtype, strides)


def attention(
    M: int = 100,
    N: int | None = None,
    D: int = 64,
    H: int = 2,
    G: int | None = None,
    E: int | None = None,
    dtype: torch.dtype = torch.float16,
    lay: dict[str, Any] | None = None,
    **options: Any,
) -> ag.Graph:
    """One attention of a batch entry; lse is a result too."""
    lay = lay or {}
    q = spec(1, H, M, D, dtype=dtype, **lay)
    k = spec(1, G or H, N or M, D, dtype=dtype, **lay)
    v = spec(1, G or H, N or M, E or D, dtype=dtype, **lay)
    return ag.attention(q, k, v, **{"stats": True, **options})


def lengths(*shape: int) -> ag.TensorSpec:
    return ag.TensorSpec(shape, I32)


CASES: dict[str, Callable[[], ag.Graph]] = {
    "full": lambda: attention(M=130, N=200),
    "causal, groups": lambda: attention(M=130, H=4, G=2, mask=CAUSAL),
    "one query of 64": lambda: attention(M=64, N=64, H=1),
    "one key": lambda: attention(M=3, N=1),
    "window": lambda: attention(M=100, N=200, mask=WINDOW),
    "prefix": lambda: attention(M=150, mask=CAUSAL | ag.Prefix(20)),
    "segments": lambda: attention(
        M=130, mask=ag.SameSegment() & CAUSAL, segments=(lengths(1, 130), lengths(1, 130))
    ),
    "lengths": lambda: attention(M=70, N=200, kv_lengths=lengths(1)),
    "boolean mask": lambda: attention(M=70, N=90, keep=ag.TensorSpec((1, 1, 70, 90), torch.bool)),
    "tables": lambda: attention(
        M=130,
        N=200,
        mask=ag.KeepBlocks(48, 32) & CAUSAL,
        keep_blocks=ag.TensorSpec((1, 2, 3, 7), torch.bool),
    ),
    "soft cap": lambda: attention(M=70, mask=CAUSAL, soft_cap=5.0),
    "bias": lambda: attention(M=70, N=90, bias=ag.TensorSpec((1, 2, 70, 90), torch.float16)),
    "bias of keys": lambda: attention(
        M=130, N=90, mask=CAUSAL, bias=ag.TensorSpec((1, 2, 1, 90), torch.float16)
    ),
    "slopes": lambda: attention(M=70, alibi=ag.TensorSpec((2,), torch.float32)),
    "alibi": lambda: attention(M=130, alibi=True, mask=CAUSAL),
    "relative bias": lambda: attention(
        M=130,
        modifiers=(ag.RelativeBias(37, "top_left"),),
        table=ag.TensorSpec((2, 37), torch.float32),
    ),
    "places": lambda: attention(
        M=70,
        modifiers=(ag.RelativeBias(9, places=True),),
        table=ag.TensorSpec((2, 9), torch.float16),
        places=ag.TensorSpec((70, 70), torch.int64),
    ),
    "dropout": lambda: attention(M=70, N=90, dropout=0.3),
    "sinks": lambda: attention(M=70, sinks=ag.TensorSpec((2,), torch.float32), mask=WIDE),
    "bf16": lambda: attention(M=130, dtype=torch.bfloat16, mask=CAUSAL),
    "f32": lambda: attention(M=70, N=90, dtype=torch.float32, mask=CAUSAL),
    "f32, groups": lambda: attention(M=70, H=4, G=2, dtype=torch.float32, mask=CAUSAL),
    "head dim 128": lambda: attention(M=130, D=128, H=1, mask=CAUSAL),
    "head dim 80 and 40": lambda: attention(M=70, D=80, E=40),
    "head dim 5": lambda: attention(M=70, D=5, dtype=torch.float32),
    "wide heads": lambda: attention(M=20, D=576, E=512, H=1, mask=CAUSAL),
    "values in keys": lambda: ag.attention(spec(1, 20, 1, 576), spec(1, 1, 70, 576), 512),
    "gaps": lambda: attention(M=130, lay={"gap": 8}),
    "odd gaps": lambda: attention(M=130, lay={"gap": 3}),
    "heads within positions": lambda: attention(M=130, lay={"swap": True}, mask=CAUSAL),
    "one query": lambda: attention(M=1, N=300, H=4, G=2, stats=False),
    "few queries": lambda: attention(M=5, N=300, H=4, G=2, mask=CAUSAL, stats=False),
}


SHOWN: dict[str, set[str]] = {  # cases that every generation executes, and kernels they show
    "full": {"forward", "delta", "query_gradient", "key_gradient"},
    "dropout": {"sum_weights"},
    "f32, groups": {"sum_parts"},
    "segments": {"extremes", "list_tiles"},
    "one query": {"split_forward", "merge_parts"},
    "bias": {"collect_places"},
    "slopes": {"collect_lines"},
    "pages, chunks of prompts": {"sum_pages"},
    "tangents, window": {"forward"},
    "tangents of gradients, slopes": {"query_gradient", "key_gradient"},
}


def by_turns(names: Iterable[str], without: Collection[tuple[int, str]]) -> list[Any]:
    """Each name on each generation, but those that the default tests run.

    `make slow` runs each name on one of them, the next name on the next; `make virtual` and
    `make deep` run all.
    """
    return [
        pytest.param(sm, name, marks=() if number % len(GENERATIONS) == turn else pytest.mark.deep)
        for number, name in enumerate(names)
        for turn, sm in enumerate(GENERATIONS)
        if (sm, name) not in without
    ]


def check_shown(device: VirtualGpu, case: str) -> None:
    """Raise AssertionError unless a GPU has executed what a case shows."""
    assert device.programs
    missing = SHOWN.get(case, set()) - {*device.kernels}
    assert not missing, f"{case} executed {dict(device.kernels)}, and not {missing}"


@final
@frozen
class Outcome:
    """What came of a case. refusal: why the plan is not Triton's."""

    programs: int = 0
    refusal: str = ""


def execute(device: VirtualGpu, graph: ag.Graph, seed: int = 0, backend: str = "triton") -> Outcome:
    """Both passes of a graph on a virtual GPU. Raises AssertionError, Fault for one."""
    plan = plan_on(device, graph, backend)
    if isinstance(plan, str):
        return Outcome(refusal=plan)
    ag.default_workspace().release()  # scratch is new, and so nothing is written there
    before, tensors = device.programs, inputs_for(graph, backend, seed)
    check_outputs(plan, graph, tensors)
    if graph.has_gradient:
        check_gradients(plan, graph, tensors, seed)
    return Outcome(device.programs - before)


def plan_on(device: VirtualGpu, graph: ag.Graph, backend: str) -> ag.Plan | str:
    """A backend's plan, or why there is none. A gradient that `fa4` does not take is Triton's."""
    try:
        plan = ag.compile(graph, target=device.target, backends=(*{backend: 0, "triton": 1},))
    except ag.NoBackendError as error:
        return str(error)
    return plan if plan.backend == backend else str(plan.refusals)


def inputs_for(graph: ag.Graph, backend: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Tensors for a graph, where `backend` takes them: those of `fa4` on 16 bytes."""
    tensors = tensors_for(graph, seed)
    return tuple(map(lay_aligned, tensors)) if backend == "fa4" else tensors


def lay_aligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers and strides, from a multiple of 64 bytes on, NaN around and in gaps."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    nothing = torch.nan if x.is_floating_point() else 0
    room = torch.full((last + 65,), nothing, dtype=x.dtype)
    return room.as_strided(x.shape, x.stride(), 64 // x.itemsize).copy_(x)


def shorten_note(note: str) -> str:
    """A note of a virtual GPU without places, which move with every change of a kernel."""
    return re.sub(r" in PTX line \d+(, \d+)*| at byte \d+| \[PTX line .*", "", note)


def machine(sm: int) -> ag.Target:
    """A GPU of a compute capability."""
    names = {80: "a100", 89: "l40s", 90: "h100", 100: "b200"}
    return ag.Target.of(names[sm]) if sm in names else evolve(ag.Target.of("l40s"), sm=sm)
