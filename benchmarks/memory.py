"""How much memory a long attention takes above its inputs and outputs: resident, at the peak."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

import attn_graph as ag

SIZES = (1, 8, 16384, 64)


class Peak:
    """The largest resident size of this process while the block ran, in bytes."""

    def __enter__(self) -> Peak:
        self.start = self.most = resident()
        self.done = threading.Event()
        self.watch = threading.Thread(target=self.look)
        self.watch.start()
        return self

    def look(self) -> None:
        while not self.done.wait(0.001):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self.most = max(self.most, resident())
        self.done.set()
        self.watch.join()

    @property
    def growth(self) -> int:
        return self.most - self.start


def resident() -> int:
    """Bytes of this process that are in memory. Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def step(plan: ag.Plan, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Peak growth of a forward and backward, and the bytes of what they return."""
    q, k, v = (torch.randn(sizes, requires_grad=True) for _ in range(3))
    do = torch.randn(sizes)
    with Peak() as peak:
        o = plan(q, k, v)
        assert isinstance(o, torch.Tensor)
        found = (o, *torch.autograd.grad(o, (q, k, v), do))
    return peak.growth, sum(x.numel() * x.itemsize for x in found)


def capped(sizes: tuple[int, ...]) -> ag.Plan:
    x = ag.TensorSpec(sizes, torch.float32)
    return ag.compile(ag.attention(x, x, x, mask=ag.Causal(), soft_cap=30.0), target="cpu")


def main() -> None:
    step(capped((1, 1, 64, 64)), (1, 1, 64, 64))  # threads, library buffers
    plan, start = capped(SIZES), time.perf_counter()
    growth, returned = step(plan, SIZES)
    print(f"soft cap, causal, float32 {SIZES}: {plan.memory()}")
    print(f"forward and backward in {time.perf_counter() - start:.1f} s")
    print(f"arena {ag.default_workspace().bytes} bytes")
    print(f"peak growth {(growth - returned) / 2**20:.1f} MiB above inputs and outputs")


if __name__ == "__main__":
    main()
