"""One attention by two processes against one: `python -m benchmarks.mesh`, on an idle machine.

Each process has one thread and a core of its own. The runs take turns; a row says seconds of a
training step's attention, forward and backward, by two processes and by one, the ratio, and the
seconds of each process's own core, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from attrs import frozen
from torch import distributed, multiprocessing

import attn_graph as ag

GOAL = 1.6  # times as fast as one process, on causal 4096
RANKS = 2
SHAPE = (1, 8, 4096, 64)
MASKS = {"causal": ag.Causal(), "window": ag.Causal() & ag.Window(511)}
WAYS: tuple[tuple[str, str], ...] = (("zigzag", "ring"), ("zigzag", "gather"), ("zigzag", "heads"))


@frozen
class Row:
    """Medians of one way: wall seconds of two processes and of one, and CPU seconds of each."""

    name: str
    together: float
    alone: float
    own: tuple[float, ...]
    single: float

    def __str__(self) -> str:
        own = ", ".join(f"{1e3 * seconds:.0f}" for seconds in self.own)
        return (
            f"{self.name:24}{1e3 * self.together:8.0f} ms  one {1e3 * self.alone:6.0f} ms  "
            f"{self.alone / self.together:.2f}x   CPU ms: ranks {own}; one {1e3 * self.single:.0f}"
        )


def step(
    plan: Callable[..., object], tensors: list[torch.Tensor], end: Callable[[], object] = bool
) -> None:
    """Forward and backward, then `end`."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = plan(*leaves)
    assert isinstance(o, torch.Tensor)
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    end()


def clock(job: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, own = time.perf_counter(), time.process_time()
    job()
    return time.perf_counter() - wall, time.process_time() - own


def measure(name: str, mask: ag.Mask, placement: str, method: str, runs: int) -> Row:
    """One row; every rank calls it."""
    rank = distributed.get_rank()
    spec = ag.TensorSpec(SHAPE, torch.float32)
    graph = ag.attention(spec, spec, spec, mask=mask)
    sharded = ag.shard(graph, ag.Mesh(RANKS), placement, method=method)  # type: ignore[arg-type]  # of WAYS
    plan, whole = ag.compile(sharded, target="cpu"), ag.compile(graph, target="cpu")
    tensors = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    shards = [sharded.split(x, n)[rank] for n, x in zip("qkv", tensors, strict=True)]
    together, alone = [], []
    for run in range(runs + 1):
        distributed.barrier()
        times = clock(lambda: step(plan, shards, distributed.barrier))
        single = clock(lambda: step(whole, tensors)) if rank == 0 else (0.0, 0.0)
        if run:  # the first warms up
            together.append(times)
            alone.append(single)
    own = torch.tensor([statistics.median(cpu for _, cpu in together)])
    each = [torch.empty(1) for _ in range(RANKS)]
    distributed.all_gather(each, own)
    walls, (wall, cpu) = [x for x, _ in together], map(statistics.median, zip(*alone, strict=True))
    return Row(name, statistics.median(walls), wall, tuple(float(x) for x in each), cpu)


def rows(runs: int) -> Iterator[Row]:
    """All rows."""
    for name, mask in MASKS.items():
        for placement, method in WAYS:
            yield measure(f"{name}, {placement}, {method}", mask, placement, method, runs)


def work(rank: int, path: str, runs: int) -> None:
    """One process; the first prints."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    distributed.init_process_group("gloo", f"file://{path}", rank=rank, world_size=RANKS)
    for row in rows(runs):
        if rank == 0:
            print(row, flush=True)
            if row.name == "causal, zigzag, ring":
                print(f"{'':24}goal {GOAL}x: {'met' if row.alone / row.together >= GOAL else 'no'}")
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        runs, spawn = parser.parse_args().runs, multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=work, args=(n, path, runs)) for n in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
