"""How much memory a long attention takes above its inputs and outputs: resident, at the peak."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import attn_graph as ag

LONG = (16384, 64)  # M and D
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile prints two lines


class Peak:
    """The largest resident size of this process while the block ran, in bytes."""

    def __enter__(self) -> Peak:
        self.start = self.most = resident_bytes()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Look once a millisecond, until the block ends."""
        while not self.stop.wait(0.001):
            self.most = max(self.most, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self.most = max(self.most, resident_bytes())
        self.stop.set()
        self.thread.join()

    @property
    def growth(self) -> int:
        """By how many bytes."""
        return self.most - self.start


def resident_bytes() -> int:
    """Bytes of this process that are in memory; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_bytes(job: Callable[[], object]) -> int:
    """The most that a call allocates at once through PyTorch, above the results that it returns."""
    activities = [ProfilerActivity.CPU]
    # acc_events: else torch 2.11 warns that events of earlier cycles, of which there are none, go.
    with profile(activities=activities, profile_memory=True, acc_events=True) as watched:
        results = job()
    profiler: Any = watched.profiler  # Any: PyTorch's stubs leave out bytes of an event
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes: list[int] = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes, initial=0)) - bytes_of(results)


def bytes_of(results: Any) -> int:  # Any: what a job returns
    """The bytes of a tensor, or of several."""
    tensors = results if isinstance(results, tuple) else (results,)
    return sum(x.numel() * x.itemsize for x in tensors)


def step(plan: ag.Plan, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Peak growth of a forward and backward, and the bytes of what they return."""
    q, k, v = (torch.randn(sizes, requires_grad=True) for _ in range(3))
    do = torch.randn(sizes)
    with Peak() as peak:
        o = plan(q, k, v)
        assert isinstance(o, torch.Tensor)
        results = (o, *torch.autograd.grad(o, (q, k, v), do))
    return peak.growth, bytes_of(results)


def compile_soft_cap(sizes: tuple[int, ...]) -> ag.Plan:
    """A plan of causal attention with a soft cap, which no fused kernel takes."""
    x = ag.TensorSpec(sizes, torch.float32)
    return ag.compile(ag.attention(x, x, x, mask=ag.Causal(), soft_cap=30.0), target="cpu")


def main(heads: str = "8") -> None:
    step(compile_soft_cap((1, 1, 64, 64)), (1, 1, 64, 64))  # threads, library buffers
    sizes = (1, int(heads), *LONG)
    plan, start = compile_soft_cap(sizes), time.perf_counter()
    growth, returned = step(plan, sizes)
    print(f"soft cap, causal, float32 {sizes}: {plan.memory()}")
    print(f"forward and backward in {time.perf_counter() - start:.1f} s")
    print(f"arena {ag.default_workspace().bytes} bytes")
    print(f"peak growth {(growth - returned) / 2**20:.1f} MiB above inputs and outputs")


if __name__ == "__main__":
    main(*sys.argv[1:])
