"""Workspaces on the model of the CUDA runtime: no run's memory is ever another's.

A run writes a number of its own to its memory and later finds it there, whichever threads, streams
and captured graphs run meanwhile, and however far each stream has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import TypeVar, final

import pytest
import torch
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import attn_graph as ag
from attn_graph.machine.workspace import ALIGNMENT, Buffer, Scratch
from tests.support.cuda_model import DEVICE, CapturedGraph, Runtime, check, write
from tests.support.forking import forks, in_child

T = TypeVar("T")
Place = int | None  # a stream; None: the CPU
CPU = torch.device("cpu")
COUNT = 2  # threads
KERNELS = 4  # of a run: to each of its two buffers, one that writes and one that reads again
threads = st.integers(0, COUNT - 1)
streams = st.integers(0, 2)
places = st.none() | streams
sizes = st.sampled_from([1, 64, 65, 600, 1500])
numbers = count()


def scratch(size: int) -> Scratch:
    """Two buffers of so many bytes together."""
    halves = {"left": size // 2, "right": size - size // 2}
    return Scratch({side: Buffer((n,), torch.uint8) for side, n in halves.items()})


@final
@define(eq=False)
class Run:
    """A lease in use, and the number that its kernels write."""

    runtime: Runtime
    place: Place
    lease: ExitStack
    views: tuple[torch.Tensor, ...]
    number: int

    @classmethod
    def begin(cls, runtime: Runtime, workspace: ag.Workspace, place: Place, size: int) -> Run:
        lease, device = ExitStack(), CPU if place is None else DEVICE
        views = tuple(lease.enter_context(workspace.lease(scratch(size), device)).values())
        run = cls(runtime, place, lease, views, next(numbers) % 256)
        run.launch(write)
        return run

    def launch(self, kernel: Callable[[torch.Tensor, int], Callable[[], None]]) -> None:
        """On all of the memory; on the CPU at once."""
        for view in self.views:
            made = kernel(view, self.number)
            if self.place is None:
                made()
            else:
                self.runtime.launch(made)

    def end(self) -> None:
        self.launch(check)
        self.views = ()
        self.lease.close()


def step(runtime: Runtime, workspace: ag.Workspace, place: Place, needs: Sequence[int]) -> None:
    """Runs one after another, each with the next within it."""
    for n, size in enumerate(needs):
        run = Run.begin(runtime, workspace, place, size)
        for inner in needs[n + 1 : n + 2]:
            Run.begin(runtime, workspace, place, inner).end()
        run.end()


class WorkspaceMachine(RuleBasedStateMachine):
    """Threads, streams and the CPU on one workspace. In the model an arena is its size."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime()
        self.stack = ExitStack()
        self.stack.enter_context(self.runtime.installed())
        self.workspace = ag.Workspace()
        self.threads = [ThreadPoolExecutor(1) for _ in range(COUNT)]
        self.idle: dict[Place, list[int]] = {}
        self.runs: list[list[tuple[Run, int, list[int]]]] = [[] for _ in range(COUNT)]
        self.graphs: list[CapturedGraph] = []

    def on(self, thread: int, place: Place, call: Callable[[], T]) -> T:
        def there() -> T:
            with self.runtime.on(place or 0):
                return call()

        return self.threads[thread].submit(there).result()

    def taken(self, place: Place, need: int) -> tuple[int, list[int]]:
        """The size of the arena that a run takes, and where it goes afterwards."""
        idle = self.idle.setdefault(place, [])
        return max(idle.pop() if idle else 0, scratch(need).bytes), idle

    @rule(thread=threads, place=places, need=sizes)
    def begin(self, thread: int, place: Place, need: int) -> None:
        run = self.on(thread, place, lambda: Run.begin(self.runtime, self.workspace, place, need))
        self.runs[thread].append((run, *self.taken(place, need)))

    @rule(thread=threads)
    def end(self, thread: int) -> None:
        if self.runs[thread]:
            run, size, idle = self.runs[thread].pop()
            self.on(thread, run.place, run.end)
            idle.append(size)

    @rule(thread=threads)
    def release(self, thread: int) -> None:
        self.on(thread, None, self.workspace.release)
        for idle in self.idle.values():
            idle.clear()
        self.idle = {}

    @rule(thread=threads, stream=streams, needs=st.lists(sizes, min_size=1, max_size=3))
    def capture(self, thread: int, stream: int, needs: list[int]) -> None:
        if any(run.place == stream for runs in self.runs for run, _, _ in runs):
            return  # the stream is busy

        def capture() -> CapturedGraph:
            with self.runtime.capture(stream) as graph:
                step(self.runtime, self.workspace, stream, needs)
            return graph

        self.graphs.append(self.on(thread, stream, capture))

    @precondition(lambda self: self.graphs)
    @rule(thread=threads, stream=streams, which=st.integers(0, 99))
    def replay(self, thread: int, stream: int, which: int) -> None:
        graph = self.graphs[which % len(self.graphs)]
        self.on(thread, stream, lambda: self.runtime.replay(graph))

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        self.runtime.synchronize()
        del self.graphs[which % len(self.graphs)]

    @rule(thread=threads)
    def renew(self, thread: int) -> None:
        """The thread ends; another takes its place."""
        if not self.runs[thread]:
            self.threads[thread].shutdown()
            self.threads[thread] = ThreadPoolExecutor(1)

    @rule(stream=streams, kernels=st.integers(1, 9))
    def advance(self, stream: int, kernels: int) -> None:
        for _ in range(kernels):
            self.runtime.advance(stream)

    @invariant()
    def bytes_are_of_all_threads(self) -> None:
        runs = [run for each in self.runs for run in each]
        lists = {id(idle): idle for idle in (*self.idle.values(), *(idle for _, _, idle in runs))}
        due = sum(map(sum, lists.values())) + sum(size for _, size, _ in runs)
        assert self.workspace.bytes == due

    def teardown(self) -> None:
        try:
            for thread, runs in enumerate(self.runs):
                for _ in tuple(runs):
                    self.end(thread)
            self.runtime.synchronize()
            self.release(0)
            assert self.workspace.bytes == 0
            self.graphs.clear()
            assert self.runtime.held == 0
        finally:
            for each in self.threads:
                each.shutdown()
            self.stack.close()


TestWorkspaceStates = WorkspaceMachine.TestCase


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    model = Runtime()
    with model.installed():
        yield model


@pytest.fixture
def workspace() -> ag.Workspace:
    return ag.Workspace()


def in_thread(call: Callable[[], T]) -> T:
    """The result of a call by a thread that ends then."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def capture(runtime: Runtime, workspace: ag.Workspace, stream: int, *needs: int) -> CapturedGraph:
    with runtime.capture(stream) as graph:
        step(runtime, workspace, stream, needs)
    return graph


def test_graphs_captured_by_one_thread_may_be_replayed_at_once(
    runtime: Runtime, workspace: ag.Workspace
) -> None:
    step(runtime, workspace, 1, [640])  # warms up
    graphs = [capture(runtime, workspace, 1, 640) for _ in range(2)]
    runtime.synchronize()
    for stream, graph in enumerate(graphs):
        with runtime.on(stream):
            runtime.replay(graph)
    for _ in range(4):
        for stream in range(2):
            runtime.advance(stream)
    assert runtime.done == 3 * KERNELS  # each of which read what its own run wrote


def test_buffers_begin_on_cache_lines(workspace: ag.Workspace) -> None:
    dtypes = {torch.uint8: 3, torch.float32: 5, torch.float64: 2}
    buffers = {dtype: Buffer((n,), dtype) for dtype, n in dtypes.items()}
    with workspace.lease(Scratch(buffers), CPU) as views:
        assert [views[dtype].shape for dtype in dtypes] == [(n,) for n in dtypes.values()]
        first, *others = (view.data_ptr() for view in views.values())
        assert [(at - first) % ALIGNMENT for at in others] == [0, 0]


def test_a_capture_on_another_than_the_current_device_is_seen(
    runtime: Runtime, workspace: ag.Workspace
) -> None:
    with runtime.current(torch.device("cuda", 1)):
        capture(runtime, workspace, 1, 640)
    assert workspace.bytes == 0


def test_memory_of_a_dispatch_mode_is_not_kept(workspace: ag.Workspace) -> None:
    with FakeTensorMode(), workspace.lease(scratch(640), CPU) as fakes:
        assert isinstance(fakes["left"], FakeTensor)
    assert workspace.bytes == 0
    with workspace.lease(scratch(640), CPU) as views:
        assert not isinstance(views["left"], FakeTensor)


def test_release_within_a_run_frees_what_no_run_uses(
    runtime: Runtime, workspace: ag.Workspace
) -> None:
    outer = Run.begin(runtime, workspace, 0, 640)
    Run.begin(runtime, workspace, 0, 1280).end()
    workspace.release()
    assert workspace.bytes == 640
    outer.end()
    runtime.synchronize()
    assert workspace.bytes == runtime.held == 0


def test_to_grow_takes_no_more_than_the_larger_need(
    runtime: Runtime, workspace: ag.Workspace
) -> None:
    runtime.most = 2048
    step(runtime, workspace, 0, [1024])
    step(runtime, workspace, 0, [2048])
    runtime.synchronize()
    assert workspace.bytes == 2048


def test_a_run_for_which_memory_is_full_leaves_the_workspace_usable(
    runtime: Runtime, workspace: ag.Workspace
) -> None:
    runtime.most = 2048
    outer = Run.begin(runtime, workspace, 0, 1024)
    with pytest.raises(torch.OutOfMemoryError):
        step(runtime, workspace, 0, [2048])
    outer.end()
    assert workspace.bytes == 1024
    step(runtime, workspace, 0, [2048])
    runtime.synchronize()
    assert workspace.bytes == 2048


@forks
def test_a_fork_while_another_thread_runs_leaves_the_workspace_usable() -> None:
    workspace = ag.Workspace()
    begun, end = threading.Event(), threading.Event()

    def run() -> None:
        with workspace.lease(scratch(640), CPU):
            begun.set()
            end.wait()

    def child() -> bool:
        with workspace.lease(scratch(1280), CPU) as views:
            views["left"].fill_(7)
        workspace.release()
        return bool((views["left"] == 7).all())

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run)
        begun.wait()
        try:
            assert in_child(child)
        finally:
            end.set()
        result.result()
    assert workspace.bytes == 640
