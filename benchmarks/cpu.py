"""attn_graph against `F.scaled_dot_product_attention` given the same job, on this CPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import field, frozen

import attn_graph as ag
from attn_graph.spec import NAMES
from benchmarks.timing import save, versus

Sizes = tuple[int, int, int, int]
SHAPES: tuple[Sizes, ...] = (
    (4, 12, 1024, 64),
    (1, 8, 4096, 64),
    (1, 8, 2048, 128),
    (8, 12, 256, 64),
)
Attend = Callable[..., torch.Tensor]


@frozen
class Job:
    """One comparison: our graph, the peer's function, the tensors; least: the goal of the ratio."""

    name: str
    graph: ag.Graph
    peer: Attend
    tensors: tuple[torch.Tensor, ...]
    least: float | None = None
    backward: bool = False
    named: dict[str, torch.Tensor] = field(factory=dict)


def qkv(sizes: Sizes, dtype: torch.dtype, E: int | None = None) -> tuple[torch.Tensor, ...]:
    """Random q, k and v; E: the head size of v, by default D."""
    torch.manual_seed(0)
    B, H, S, D = sizes
    return tuple(torch.randn(B, H, S, n, dtype=dtype) for n in (D, D, E or D))


def make_job(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    peer: Attend,
    least: float | None = None,
    backward: bool = False,
    named: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Job:
    """A job for tensors, with the options of `ag.attention`."""
    specs = [ag.TensorSpec.like(t) for t in tensors]
    return Job(name, ag.attention(*specs, **options), peer, tensors, least, backward, named or {})


def plain_jobs() -> Iterator[Job]:
    """What PyTorch's kernel takes as it is: ours must not be slower."""
    for sizes in SHAPES:
        for causal in (False, True):
            peer = partial(F.scaled_dot_product_attention, is_causal=causal)
            mask = ag.Causal() if causal else None
            name = f"float32 {'causal' if causal else 'full'} {sizes}"
            yield make_job(name, qkv(sizes, torch.float32), peer, 0.97, mask=mask)
            yield make_job(name, qkv(sizes, torch.float32), peer, 0.95, True, mask=mask)


def half_jobs() -> Iterator[Job]:
    """The same in float16 and bfloat16."""
    for dtype in (torch.float16, torch.bfloat16):
        for sizes in SHAPES:
            for causal in (False, True):
                peer = partial(F.scaled_dot_product_attention, is_causal=causal)
                mask = ag.Causal() if causal else None
                name = f"{str(dtype)[6:]} {'causal' if causal else 'full'} {sizes}"
                yield make_job(name, qkv(sizes, dtype), peer, mask=mask)
    for dtype in (torch.float16, torch.bfloat16):
        peer = partial(F.scaled_dot_product_attention, is_causal=True)
        tensors = qkv((1, 8, 1024, 128), dtype)
        name = f"{str(dtype)[6:]} causal (1, 8, 1024, 128)"
        least = 8 if NAMES[dtype] == "bf16" and "bf16" not in ag.Target.of("cpu").native else None
        yield make_job(name, tensors, peer, least, True, mask=ag.Causal())


def window_jobs() -> Iterator[Job]:
    """Masks that PyTorch takes only as a dense tensor."""
    tensors, sizes = qkv((1, 4, 4096, 64), torch.float32), "(1, 4, 4096, 64)"
    i, j = torch.arange(4096)[:, None], torch.arange(4096)
    for left, least in ((64, 12.0), (255, 7.5)):
        peer = partial(F.scaled_dot_product_attention, attn_mask=(j <= i) & (j >= i - left))
        mask, name = ag.Causal() & ag.Window(left), f"float32 causal & window {left} {sizes}"
        yield make_job(name, tensors, peer, least, mask=mask)
        yield make_job(name, tensors, peer, None, True, mask=mask)
    number = (torch.arange(4096) // 256)[None]
    peer = partial(F.scaled_dot_product_attention, attn_mask=number[0][:, None] == number[0])
    named = {"q_segments": number, "kv_segments": number}
    specs = (ag.TensorSpec.like(number), ag.TensorSpec.like(number))
    name = f"float32 segments of 256 {sizes}"
    yield make_job(name, tensors, peer, 6.0, False, named, segments=specs)
    yield make_job(name, tensors, peer, None, True, named, segments=specs)


def odd_jobs() -> Iterator[Job]:
    """What PyTorch's fused kernel does not take."""
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    q, k, v = qkv((4, 12, 1024, 128), torch.float32, E=64)
    name = "float32 causal D=128, E=64 (4, 12, 1024)"
    yield make_job(name, (q, k, v), causal, 2.6, mask=ag.Causal())
    yield make_job(name, (q, k, v), causal, None, True, mask=ag.Causal())
    q, k, v = qkv((4, 12, 1024, 64), torch.float32)
    name = "float32 causal, q strided along its last axis (4, 12, 1024, 64)"
    yield make_job(name, (q.mT.contiguous().mT, k, v), causal, 4.0, mask=ag.Causal())
    capped = partial(eager_soft_cap, cap=30.0)
    name = "float32 causal soft cap (4, 12, 1024, 64), peer: the eager formula"
    for backward in (False, True):
        yield make_job(name, (q, k, v), capped, 3.0, backward, mask=ag.Causal(), soft_cap=30.0)


def eager_soft_cap(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """Attention with SoftCap and Causal, written in plain PyTorch."""
    s = cap * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / cap)
    later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(later, -math.inf), -1) @ v


GROUPS = {"plain": plain_jobs, "half": half_jobs, "window": window_jobs, "odd": odd_jobs}


def measure_job(job: Job, runs: int) -> dict[str, Any]:
    """One row: times, the ratio, and the goal."""
    plan = ag.compile(job.graph)
    tensors = [t.detach().requires_grad_(job.backward) for t in job.tensors]
    do = torch.randn_like(job.peer(*job.tensors))

    def run(attend: Attend | ag.Plan, **named: torch.Tensor) -> object:
        o = attend(*tensors, **named)
        return torch.autograd.grad(o, tensors, do) if job.backward else o

    time = versus(partial(run, plan, **job.named), partial(run, job.peer), runs)
    return {
        "job": job.name,
        "pass": "forward+backward" if job.backward else "forward",
        "backend": plan.backend,
        "ms": round(time.ours * 1e3, 2),
        "peer ms": round(time.peer * 1e3, 2),
        "ratio": round(time.ratio, 3),
        "goal": job.least,
    }


def format_row(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    goal = f"  goal {row['goal']}" if row["goal"] else ""
    figures = f"{row['ratio']:7.2f}x {row['ms']:9.2f} ms  {row['backend']:10}"
    return f"{figures} {row['job']}, {row['pass']}{goal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", default=list(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/cpu-<date>.json"
    )
    options = parser.parse_args()
    rows = []
    for group in options.groups:
        for each in GROUPS[group]():
            rows.append(measure_job(each, options.runs))
            print(format_row(rows[-1]), flush=True)
    if options.save:
        print(save("cpu", rows))


if __name__ == "__main__":
    main()
