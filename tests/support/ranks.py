"""Processes that stay, one a rank, to which tests give many things to compute together."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import multiprocessing

TIMEOUT = timedelta(seconds=60)  # of a group: no test waits longer for a rank that is gone
# Where there is fork, a server imports what all need once, and each process begins as its copy.
FORKS = "forkserver" in multiprocessing.get_all_start_methods()
CONTEXT: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
if FORKS:
    CONTEXT.set_forkserver_preload(["attn_graph.testing", "tests.support.ranks"])


@frozen(eq=False)
class Crew:
    """Processes of one group, and of the smaller groups of its first ranks."""

    processes: list[Any]
    pipes: list[Connection]

    def run(self, ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """What `work(rank, group, *args)` gives in each of the first ranks."""
        for pipe in self.pipes[:ranks]:
            pipe.send_bytes(pickle.dumps((ranks, work, args)))
        answers = [pickle.loads(pipe.recv_bytes()) for pipe in self.pipes[:ranks]]
        faults = [f"rank {n}: {fault}" for n, (fault, _) in enumerate(answers) if fault]
        assert not faults, "\n".join(faults)
        return [result for _, result in answers]


def serve(rank: int, size: int, path: str, pipe: Connection) -> None:
    """One process: it joins the groups and works until nothing more comes."""
    torch.set_num_threads(1)
    init = f"file://{path}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=TIMEOUT)
    groups = {n: dist.new_group(range(n), timeout=TIMEOUT) for n in range(1, size + 1)}
    while task := pipe.recv_bytes():
        ranks, work, args = pickle.loads(task)
        answer: tuple[str | None, Any]
        try:
            answer = None, work(rank, groups[ranks], *args)
        except Exception:  # whatever it is, the test that gave the work says it
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


@contextmanager
def start_crew(size: int, folder: Path) -> Iterator[Crew]:
    """Processes for the ranks of a group, which end with this context."""
    processes, pipes = [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe()
        args = rank, size, str(folder / "store"), theirs
        processes.append(CONTEXT.Process(target=serve, args=args, daemon=True))
        pipes.append(ours)
        processes[-1].start()
        theirs.close()
    try:
        yield Crew(processes, pipes)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            if process.is_alive():
                pipe.send_bytes(b"")
            process.join(TIMEOUT.seconds)


@contextmanager
def count_bytes() -> Iterator[list[int]]:
    """[sent, received]: bytes that go through PyTorch's batches of messages within this block."""
    counts, plain = [0, 0], dist.batch_isend_irecv

    def count(batch: list[Any]) -> Any:
        for op in batch:
            counts[op.op is not dist.isend] += op.tensor.nbytes
        return plain(batch)

    dist.batch_isend_irecv = count  # type: ignore[assignment]  # named otherwise
    try:
        yield counts
    finally:
        dist.batch_isend_irecv = plain
