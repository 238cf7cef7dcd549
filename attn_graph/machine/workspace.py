"""Scratch memory shared by all plans: as large as the largest need, not the sum of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, final
from weakref import ref

import torch
from attrs import define, field, frozen

from attn_graph.errors import GraphError, show
from attn_graph.machine.ambient import is_traced

ALIGNMENT = 64  # bytes: a cache line, and more than any vector instruction needs
MOST_LAYOUTS = 256  # layouts with views kept ready by an arena

Views = Mapping[Any, torch.Tensor]  # by name, or by number


@final
@frozen
class Buffer:
    """One temporary tensor of a plan: dense, contents undefined."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size, rounded up to ALIGNMENT."""
        return -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@final
@frozen(eq=False)
class Scratch:
    """All buffers of a plan by name, side by side. Compared by identity, not by layout."""

    buffers: Mapping[Any, Buffer] = field(factory=dict)

    @property
    def bytes(self) -> int:
        """The size of all buffers."""
        return sum(buffer.bytes for buffer in self.buffers.values())

    def views(self, memory: torch.Tensor) -> Views:
        """The buffers as tensors in this memory of bytes."""
        out, at = dict[Any, torch.Tensor](), 0
        with torch.inference_mode(False):  # else training could not write to them later
            for name, buffer in self.buffers.items():
                part = memory[at : at + prod(buffer.shape) * buffer.dtype.itemsize]
                out[name] = part.view(buffer.dtype).view(buffer.shape)
                at += buffer.bytes
        return out


@final
@define(eq=False)
class Arena:
    """Memory for one run at a time, and the views of it by layout.

    `with arena:` gives the buffers of `scratch`; when the block ends, the arena goes to `idle`.
    lent: the caller's memory from this arena's first byte on, which never grows; and `end`, the
    bytes of it in use.
    """

    device: torch.device
    memory: torch.Tensor = field(init=False)
    ready: dict[Scratch, Views] = field(init=False, factory=dict)
    scratch: Scratch = field(init=False, default=Scratch())
    idle: list[Arena] = field(init=False, factory=list)
    lent: bool = False
    start: int = field(init=False, default=0)
    end: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.memory = allocate(0, self.device)

    def __enter__(self) -> Views:
        return self.views(self.scratch)

    def __exit__(self, *raised: object) -> None:
        idle, self.idle = self.idle, []  # or the arena holds its own list and outlives it
        idle.append(self)

    def views(self, scratch: Scratch) -> Views:
        """The buffers as tensors in this memory; it grows if it is too small."""
        views = self.ready.get(scratch)
        if self.lent:
            self.end = self.start + scratch.bytes
        if views is None:
            self.make_room(scratch.bytes)
            views = self.ready[scratch] = scratch.views(self.memory)
        return views

    def make_room(self, need: int) -> None:
        """Grow to `need` bytes. The old memory is freed first: both never exist at once. Raises
        GraphError for memory of the caller's."""
        if self.lent and need > self.memory.numel():
            given, due = self.start + self.memory.numel(), self.start + need
            raise GraphError(
                f"the workspace's memory has {given:,} bytes, and the call needs {due:,}; pass "
                f"torch.empty({due}, dtype=torch.uint8), or leave memory= out"
            )
        if need > self.memory.numel():
            self.ready.clear()
            self.memory = allocate(0, self.device)
            self.memory = allocate(need, self.device)
        if len(self.ready) >= MOST_LAYOUTS:
            self.ready.clear()


def require_bytes(_: object, __: object, memory: torch.Tensor | None) -> None:
    """A validator of the caller's memory. Raises GraphError."""
    if memory is None:
        return
    if not isinstance(memory, torch.Tensor):
        raise GraphError(f"the workspace's memory is {show(memory)}, not a tensor")
    if memory.dtype != torch.uint8 or memory.ndim != 1 or not memory.is_contiguous():
        raise GraphError(
            f"the workspace's memory is {show(memory)} with strides {memory.stride()}; pass "
            "torch.empty(n, dtype=torch.uint8), without gaps"
        )


Stream = tuple[torch.device, int]  # a device and a stream on it; CPU: stream 0


@final
@define(eq=False)
class Workspace:
    """Memory shared by plans. It grows to the largest need; `release` frees it.

    Each device has its arenas, and on a GPU each stream, for any calling thread: work on a stream
    runs in the order of its launches, so forward and backward of all plans share one arena there.
    Concurrent runs (of other threads, or one within another) take one each. A plan holds nothing in
    it between calls. While a CUDA graph is captured, memory comes from the graph's own pool instead
    and lives as long as the graph, so graphs may be replayed at once, and `release` does them no
    harm. By default all plans share `default_workspace()`; make your own and pass it to `compile`
    to keep apart.

    memory: the caller's bytes, a tensor [n] of uint8, in place of all this: as many as
    `plan.memory()` gives for the workspace. It never grows, and serves captures too; one thread
    and one stream at a time use it. Raises GraphError for other tensors; so do calls with too few
    bytes.
    """

    memory: torch.Tensor | None = field(default=None, kw_only=True, validator=require_bytes)

    # No locks: a fork could leave them held. Runs share these only by `append`, `pop`, `clear`,
    # `copy` and `setdefault`, each atomic, without the interpreter's lock too.
    idle: dict[Stream, list[Arena]] = field(factory=dict, init=False, repr=False)
    arenas: list[ref[Arena]] = field(factory=list, init=False, repr=False)  # also the ones in use
    levels: list[Arena] = field(factory=list, init=False, repr=False)  # in the caller's memory

    def __reduce__(self) -> tuple[Callable[[], Workspace], tuple[()]]:
        """Unpickle as another one: the default one for the default one, else a new one."""
        return (default_workspace if self is DEFAULT else Workspace), ()

    @property
    def bytes(self) -> int:
        """The size of all arenas: of every thread, device and stream, in use or not.

        Memory of captured CUDA graphs is not counted; it is the graphs' own.
        """
        if self.memory is not None:
            return self.memory.numel()
        alive = (arena() for arena in tuple(self.arenas))
        return sum(arena.memory.numel() for arena in alive if arena is not None)

    def release(self) -> None:
        """Free all memory but the caller's, whichever thread allocated it.

        Runs in progress are not disturbed: their memory is freed when the last of them ends.
        """
        if self.memory is not None:
            return
        released, self.idle = self.idle, {}
        for arenas in released.copy().values():
            arenas.clear()  # and not the dict alone: runs in progress hold these lists

    def lease(self, scratch: Scratch, device: torch.device) -> AbstractContextManager[Views]:
        """A context with the buffers of a plan, reserved until it ends."""
        arena, idle = self.take(device)
        arena.scratch, arena.idle = scratch, idle
        return arena

    def take(self, device: torch.device) -> tuple[Arena, list[Arena]]:
        """An arena, reserved until it is appended to the list beside it.

        Under a dispatch mode, a trace or a capture it is new memory, kept by the captured CUDA
        graph alone.
        """
        if is_traced():
            return Arena(device), []
        if self.memory is not None:
            return self.take_lent(self.memory, device)
        stream = 0
        if device.type == "cuda":
            if is_capturing(device):
                return Arena(device), []
            stream = torch.cuda.current_stream(device).cuda_stream
        idle = self.idle.setdefault((device, stream), [])
        try:
            return idle.pop(), idle
        except IndexError:
            arena = Arena(device)  # counted by `bytes` for as long as it exists
            self.arenas.append(ref(arena, self.arenas.remove))
            return arena, idle

    def take_lent(self, memory: torch.Tensor, device: torch.device) -> tuple[Arena, list[Arena]]:
        """An arena in the caller's memory, behind those of the runs around this one."""
        if memory.device != device:
            raise GraphError(
                f"the workspace's memory is on {memory.device}, and the call's tensors on {device}"
            )
        idle = self.idle.setdefault((device, 0), [])
        busy = len(self.levels) - len(idle)
        if not idle:
            self.levels.append(Arena(device, lent=True))
            idle.append(self.levels[-1])
        start = self.levels[busy - 1].end if busy else -memory.data_ptr() % ALIGNMENT
        arena = idle.pop()
        if start != arena.start or not arena.memory.numel():
            arena.ready.clear()
            arena.memory, arena.start = memory[start:], start
        return arena, idle


def is_capturing(device: torch.device) -> bool:
    """True if a CUDA graph is being captured on the device's current stream."""
    elsewhere = torch.cuda.current_device() != device.index
    with torch.cuda.device(device) if elsewhere else nullcontext():
        return torch.cuda.is_current_stream_capturing()


def allocate(count: int, device: torch.device) -> torch.Tensor:
    """`count` bytes as uint8: training can write to them even if inference allocates them."""
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.uint8, device=device)


DEFAULT = Workspace()


def default_workspace() -> Workspace:
    """The workspace of every plan without one of its own."""
    return DEFAULT
