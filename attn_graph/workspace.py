"""One arena for all plans: as large as the largest need, not the sum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import final

import torch
from attrs import define, field, frozen

from attn_graph.ambient import is_traced

ALIGNMENT = 64  # bytes: a cache line, and more than any vector instruction needs
MOST_LAYOUTS = 256  # layouts whose views an arena keeps ready


@final
@frozen
class Buffer:
    """One tensor that a plan needs while it runs: dense, contents undefined."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@final
@frozen(cache_hash=True)
class Scratch:
    """All buffers of a plan, side by side."""

    buffers: tuple[Buffer, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The buffers as tensors in this memory of bytes."""
        out, at = [], 0
        for buffer in self.buffers:
            part = memory[at : at + prod(buffer.shape) * buffer.dtype.itemsize]
            out.append(part.view(buffer.dtype).view(buffer.shape))
            at += buffer.bytes
        return tuple(out)


@final
@define(eq=False)
class Arena:
    """The memory of one device and stream, or of one thread, with the views made of it so far."""

    device: torch.device
    memory: torch.Tensor
    ready: dict[Scratch, tuple[torch.Tensor, ...]] = field(factory=dict)
    captured: list[torch.Tensor] = field(factory=list)  # memory that CUDA graphs write to

    def views(self, scratch: Scratch) -> tuple[torch.Tensor, ...]:
        if scratch not in self.ready:
            with torch.inference_mode(False):  # else training could not write to it later
                self.make_room(scratch.bytes)
                self.ready[scratch] = scratch.views(self.memory)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.keep()
        return self.ready[scratch]

    def keep(self) -> None:
        """Never give up the memory of now: a CUDA graph writes to it at every replay."""
        if not any(self.memory is kept for kept in self.captured):
            self.captured.append(self.memory)

    def make_room(self, need: int) -> None:
        if need > self.memory.numel():
            self.memory = torch.empty(need, dtype=torch.uint8, device=self.device)
            self.ready.clear()
        if len(self.ready) >= MOST_LAYOUTS:
            self.ready.clear()


Place = tuple[torch.device, int]  # a device and a stream on it; CPU: stream 0


class Stacks(threading.local):
    """Each thread's arenas by place, and how many of them are in use.

    A plan that runs inside another's run takes the next arena, so it can't disturb the outer one.
    """

    def __init__(self) -> None:
        self.arenas: dict[Place, list[Arena]] = {}
        self.depth: dict[Place, int] = {}


@final
@define(eq=False)
class Workspace:
    """Memory that plans share. It grows to the largest need and is given back by `release`, which
    CUDA graphs that were captured before must not outlive.

    Each thread has its own arenas, and on a GPU each stream, so plans that run at the same time
    never meet in one. A plan holds nothing in it between calls. By default all plans share
    `default_workspace()`; make your own and pass it to `compile` to keep apart.
    """

    stacks: Stacks = field(factory=Stacks, init=False, repr=False)

    def __reduce__(self) -> tuple[Callable[[], Workspace], tuple[()]]:
        """Pickled it is another: the default one where it arrives, or a new one."""
        return (default_workspace if self is DEFAULT else Workspace), ()

    @property
    def bytes(self) -> int:
        """How much the calling thread's arenas hold."""
        return sum(a.memory.numel() for stack in self.stacks.arenas.values() for a in stack)

    def release(self) -> None:
        """Give the calling thread's memory back."""
        self.stacks.arenas.clear()

    @contextmanager
    def lease(self, scratch: Scratch, device: torch.device) -> Iterator[Sequence[torch.Tensor]]:
        """The scratch's buffers, the caller's alone until the block ends.

        Under a dispatch mode or a trace they are new memory, which nobody keeps.
        """
        if is_traced():
            yield scratch.views(torch.empty(scratch.bytes, dtype=torch.uint8, device=device))
            return
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        place = (device, stream)
        stack = self.stacks.arenas.setdefault(place, [])
        depth = self.stacks.depth.get(place, 0)
        if depth == len(stack):
            stack.append(Arena(device, torch.empty(0, dtype=torch.uint8, device=device)))
        self.stacks.depth[place] = depth + 1
        try:
            yield stack[depth].views(scratch)
        finally:
            self.stacks.depth[place] = depth


DEFAULT = Workspace()


def default_workspace() -> Workspace:
    """The workspace of every plan that was not given another."""
    return DEFAULT
