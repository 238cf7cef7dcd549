"""The CUDA runtime and PyTorch's allocator, played on a CPU: streams, captures, memory.

Kernels wait in their stream's queue until `advance` runs them, or in a captured graph until it is
replayed, and know memory by its address alone. The allocator is as PyTorch's: each stream has a
pool, and so has each capture; memory that no tensor holds any more goes back to its pool at once,
although kernels that write to it may still wait. A graph that is dropped gives its pool back.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, final
from unittest.mock import patch

import torch
from attrs import define, field, frozen

Kernel = Callable[[], None]
DEVICE = torch.device("cuda", 0)
SHARED = -1  # the pool of memory of no stream and no graph
GRAIN = 512  # bytes; the allocator rounds up to it


@final
@frozen
class Stream:
    cuda_stream: int


@final
@define(eq=False)
class CapturedGraph:
    """Kernels to replay, and the number of the pool that their memory is from.

    stream: where it was replayed last. One graph's replays never overlap.
    """

    pool: int
    kernels: list[Kernel] = field(factory=list)
    stream: int | None = None


@final
@define(eq=False)
class Runtime:
    """DEVICE, with streams 0, 1, ...; each thread is on stream 0 until it goes to another.

    most: bytes that tensors may hold. device: the current one.
    """

    most: int = 2**30
    device: int = 0

    queues: defaultdict[int, deque[Kernel]] = field(factory=lambda: defaultdict(deque))
    pools: defaultdict[int, list[bytearray]] = field(factory=lambda: defaultdict(list))
    captures: dict[int, CapturedGraph] = field(factory=dict)
    here: threading.local = field(factory=threading.local)
    held: int = 0  # bytes that tensors hold
    done: int = 0  # kernels that ran
    numbers: Iterator[int] = field(factory=lambda: count(1000))  # of pools of captures

    @property
    def stream(self) -> int:
        return getattr(self.here, "stream", 0)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Within this block the thread launches on the stream."""
        before, self.here.stream = self.stream, stream
        try:
            yield
        finally:
            self.here.stream = before

    def launch(self, kernel: Kernel) -> None:
        captured = self.captures.get(self.stream)
        (self.queues[self.stream] if captured is None else captured.kernels).append(kernel)

    @contextmanager
    def capture(self, stream: int) -> Iterator[CapturedGraph]:
        """What is launched on the stream goes into the graph, and memory comes from its pool."""
        graph = CapturedGraph(next(self.numbers))
        weakref.finalize(graph, self.give_up, graph.pool).atexit = False
        self.captures[stream] = graph
        try:
            with self.on(stream):
                yield graph
        finally:
            del self.captures[stream]

    def replay(self, graph: CapturedGraph) -> None:
        """Launch a graph's kernels on the thread's stream, after those of its last replay."""
        if graph.stream is not None and graph.stream != self.stream:
            self.finish(graph.stream)
        graph.stream = self.stream
        self.queues[self.stream].extend(graph.kernels)

    def advance(self, stream: int) -> None:
        """Run the stream's next kernel, if there is one."""
        if self.queues[stream]:
            self.queues[stream].popleft()()
            self.done += 1

    def finish(self, stream: int) -> None:
        while self.queues[stream]:
            self.advance(stream)

    def synchronize(self) -> None:
        for stream in tuple(self.queues):
            self.finish(stream)

    def empty(self, size: int) -> torch.Tensor:
        """Memory of the pool of the capture that the thread's stream is in, or of that stream."""
        captured = self.captures.get(self.stream)
        pool = self.stream if captured is None else captured.pool
        if not size:
            return torch.zeros(0, dtype=torch.uint8)
        block = self.block(pool, size)
        self.held += len(block)
        if self.held > self.most:
            self.free(pool, block)
            raise torch.OutOfMemoryError(f"{self.held} bytes are held, {size} more do not fit")
        view = memoryview(block)  # which the tensor's storage holds
        weakref.finalize(view, self.free, pool, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)[:size]

    def block(self, pool: int, size: int) -> bytearray:
        """A free block that is large enough, or a new one."""
        for free in (self.pools[pool], self.pools[SHARED]):
            for n, block in enumerate(free):
                if len(block) >= size:
                    return free.pop(n)
        return bytearray(-(-size // GRAIN) * GRAIN)

    def free(self, pool: int, block: bytearray) -> None:
        self.held -= len(block)
        self.pools[pool].append(block)

    def give_up(self, pool: int) -> None:
        self.pools[SHARED] += self.pools.pop(pool, [])

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """Within this block the device is the current one."""
        assert device.index is not None
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def is_capturing(self) -> bool:
        return self.device == DEVICE.index and self.stream in self.captures

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within this block PyTorch's functions ask the model."""
        real = torch.empty

        def empty(*sizes: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device == DEVICE:
                return self.empty(*sizes)
            return real(*sizes, device=device, **options)

        with (
            patch.object(torch, "empty", empty),
            patch.object(torch.cuda, "current_stream", lambda device: Stream(self.stream)),
            patch.object(torch.cuda, "current_device", lambda: self.device),
            patch.object(torch.cuda, "device", self.current),
            patch.object(torch.cuda, "is_current_stream_capturing", self.is_capturing),
        ):
            yield


def write(memory: torch.Tensor, tag: int) -> Kernel:
    """A kernel that fills memory with a number from 0 to 255."""
    address, size = memory.data_ptr(), memory.nbytes

    def kernel() -> None:
        ctypes.memset(address, tag, size)

    return kernel


def check(memory: torch.Tensor, tag: int) -> Kernel:
    """A kernel that fails where memory holds anything else."""
    address, size = memory.data_ptr(), memory.nbytes

    def kernel() -> None:
        assert set(ctypes.string_at(address, size)) <= {tag}, "another run wrote to this memory"

    return kernel
