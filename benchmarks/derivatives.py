"""Forward mode and double backward of attention, beside PyTorch's math path, on this CPU.

PyTorch's fused kernels have neither, so that its way is the formula, with all scores in memory.
`ratio` says how many times as fast ours is, the median over runs in turn in one process; memory is
the most that a call allocates above its inputs and outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_graph as ag
from benchmarks.memory import Peak, bytes_of, peak_bytes
from benchmarks.timing import save, versus

Sizes = tuple[int, int, int, int]
Tensors = tuple[torch.Tensor, ...]
Attend = Callable[..., torch.Tensor]  # o, of q, k and v
Call = Callable[[], Tensors]
Row = dict[str, Any]
PUSHED: Sizes = (1, 8, 2048, 64)
PULLED: Sizes = (1, 8, 4096, 64)
LONG: Sizes = (1, 8, 16384, 64)
MOST_LONG = 250  # MiB above inputs and outputs
OWN, MATH = "our forward", "SDPA's math path"


@frozen
class Job:
    """A derivative by ours and by peers. goals: how many times as fast as each peer."""

    name: str
    sizes: Sizes
    ours: Call
    peers: Mapping[str, Call]
    goals: Mapping[str, float]
    least_memory: float | None = None  # of the peer's over ours, where there is a goal


def plan_causal(sizes: Sizes, soft_cap: float | None = None) -> Attend:
    """Causal attention in float32, planned."""
    x = ag.TensorSpec(sizes, torch.float32)
    graph = ag.attention(x, x, x, mask=ag.Causal(), soft_cap=soft_cap)
    return partial(run, ag.compile(graph, target="cpu"))


def attend_by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """SDPA without its fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def draw(sizes: Sizes, count: int) -> list[torch.Tensor]:
    """Random tensors, the same each time."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(sizes, generator=random) for _ in range(count)]


def push(attend: Attend, point: Tensors, tangents: Tensors) -> Tensors:
    """o and its tangent, by torch.func.jvp."""
    o, to, *_ = torch.func.jvp(attend, point, tangents)
    return o, to


def pull_twice(attend: Attend, point: Tensors, do: torch.Tensor, along: Tensors) -> Tensors:
    """The gradients of q, k and v, and then those of their products with `along`, by all four."""
    gradients = torch.autograd.grad(attend(*point), point, do, create_graph=True)
    return torch.autograd.grad(gradients, (*point, do), along)


def make_push(sizes: Sizes) -> Job:
    """Tangents of q, k and v at once: six products of matrices where the forward has two."""
    q, k, v, *tangents = draw(sizes, 6)
    plan, given = plan_causal(sizes), tuple(tangents)
    peers: dict[str, Call] = {
        OWN: lambda: (plan(q, k, v),),
        MATH: partial(push, attend_by_math, (q, k, v), given),
    }
    ours = partial(push, plan, (q, k, v), given)
    return Job("jvp", sizes, ours, peers, {OWN: 1 / 5, MATH: 2})


def make_double_backward(sizes: Sizes, soft_cap: float | None = None) -> Job:
    """A step whose loss is of gradients: forward, backward, and the backward of both."""
    *leaves, a, b, c = draw(sizes, 7)
    *point, do = (x.requires_grad_() for x in leaves)
    plan = plan_causal(sizes, soft_cap)
    ours, theirs = (
        partial(pull_twice, attend, tuple(point), do, (a, b, c))
        for attend in (plan, attend_by_math)
    )
    return Job("double backward", sizes, ours, {MATH: theirs}, {MATH: 2}, least_memory=10)


def run(plan: ag.Plan, *tensors: torch.Tensor) -> torch.Tensor:
    """The only output of a plan."""
    o = plan(*tensors)
    assert isinstance(o, torch.Tensor)
    return o


def measure_job(job: Job, runs: int) -> Iterator[Row]:
    """A row for each peer, after a comparison of what they give."""
    near = 1e-4  # of sums of `sizes[2]` terms in float32
    memory = mebibytes(job.ours)
    for peer, theirs in job.peers.items():
        if peer != OWN:
            torch.testing.assert_close(job.ours(), theirs(), rtol=near, atol=near)
        time, its = versus(job.ours, theirs, runs), mebibytes(theirs)
        yield {
            "job": f"{job.name} {job.sizes}",
            "peer": peer,
            "ms": round(time.ours * 1e3, 1),
            "peer ms": round(time.peer * 1e3, 1),
            "ratio": round(time.ratio, 2),
            "ratio of the fastest": round(time.least_ratio, 2),
            "goal": job.goals[peer],
            "MiB": memory,
            "peer MiB": its,
            "reached": time.ratio >= job.goals[peer] and its >= (job.least_memory or 0) * memory,
        }


def mebibytes(call: Call) -> float:
    """The most memory of a call above its inputs and outputs, the arena that it makes included."""
    ag.default_workspace().release()
    return round(peak_bytes(call) / 2**20, 1)


def measure_long(sizes: Sizes) -> Iterator[Row]:
    """How much the resident size grows above inputs and outputs, with a soft cap.

    To be called first: later, memory that other calls gave back would be used again.
    """
    q, k, v, *tangents = draw(sizes, 6)
    capped = plan_causal(sizes, soft_cap=30.0)
    for name, call in (
        ("jvp", partial(push, capped, (q, k, v), tuple(tangents))),
        ("double backward", make_double_backward(sizes, soft_cap=30.0).ours),
    ):
        ag.default_workspace().release()
        with Peak() as peak:
            results = call()
        growth = (peak.growth - bytes_of(results)) / 2**20
        yield {
            "job": f"{name} {sizes}, soft cap",
            "resident MiB": round(growth, 1),
            "goal": MOST_LONG,
            "reached": growth < MOST_LONG,
        }


def measure_all(runs: int) -> Iterator[Row]:
    """Every row."""
    plan_causal((1, 1, 64, 64))(*draw((1, 1, 64, 64), 3))  # threads, library buffers
    yield from measure_long(LONG)
    for job in (make_push(PUSHED), make_double_backward(PULLED)):
        yield from measure_job(job, runs)


def format_row(row: Row) -> str:
    """A row as a line of text."""
    missed = "" if row["reached"] else ", missed"
    if "resident MiB" in row:
        return f"{row['job']}: {row['resident MiB']} MiB resident, goal {row['goal']}{missed}"
    times = f"{row['ratio']:6.2f}x {row['ms']:9.1f} ms {row['peer ms']:9.1f} ms"
    memory = f"{row['MiB']} MiB ({row['peer MiB']})"
    return f"{times}  {row['job']} beside {row['peer']}  {memory}  goal {row['goal']:.2g}{missed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/derivatives-<date>.json"
    )
    options, rows = parser.parse_args(), []
    for row in measure_all(options.runs):
        rows.append(row)
        print(format_row(row), flush=True)
    if options.save:
        print(save("derivatives", rows))


if __name__ == "__main__":
    main()
