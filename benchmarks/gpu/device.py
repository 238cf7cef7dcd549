"""The device that items run on: all that they ask of CUDA, so that a rehearsal can play it."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import torch
from attrs import evolve, field, frozen
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.request import Options, Request
from attn_graph.measuring.self_check import Proof, find_check
from attn_graph.measuring.tuning import examples
from attn_graph.planner.choose import BACKENDS
from benchmarks.gpu.cases import Case

Call = Callable[[], Any]  # Any: tensors, or nothing
Attend = Callable[..., Any]  # of q, k and v
Tensors = Sequence[torch.Tensor]
T = TypeVar("T")
COLD_BYTES = 2**29  # zeroing them empties the L2 cache, and gives the host some 100 us of lead
WARM_UPS = 3
REFUSALS = (RefusedError, RuntimeError)  # of a way that cannot do a job
BEHIND = {"fa4": ("triton",)}  # who runs the backward that a backend refuses


class Device(ABC):
    """What items ask of a device. place: where tensors lie. target: what plans are made for.

    rounds: of 100 calls each, that host times are taken from.
    """

    place: torch.device
    target: ag.Target
    rounds: int

    @abstractmethod
    def fit(self, case: Case) -> Case:
        """The case as it runs here: a stand-in may plan the case and run a smaller one."""

    @abstractmethod
    def compile(self, graph: ag.Graph, backend: str) -> ag.Plan:
        """A plan by one backend, of which the backward may be another's. Raises NoBackendError, or
        RefusedError where a self-check fails."""

    @abstractmethod
    def check(self, graph: ag.Graph, backend: str, seconds: float) -> tuple[str, Proof]:
        """The self-check of a backend for a graph, within so many seconds: its variant, and what
        came of it. Raises RefusedError where the backend refuses."""

    @abstractmethod
    def lower(self, graph: ag.Graph, backend: str, variant: str | None) -> Call:
        """A call of a graph on tensors of its own, by a variant. Raises RefusedError."""

    @abstractmethod
    def milliseconds(self, calls: Mapping[str, Call], runs: int) -> dict[str, float]:
        """The median device time of each call; the calls take turns."""

    @abstractmethod
    def host_microseconds(self, call: Call) -> float:
        """How long a call keeps the host."""

    @abstractmethod
    def sdpa(self, kernel: SDPBackend) -> AbstractContextManager[Any]:
        """A context in which PyTorch's function runs by one of its kernels."""

    @abstractmethod
    def flex(self) -> Attend:
        """FlexAttention, compiled anew."""

    @abstractmethod
    def frontend(self, graph: ag.Graph, tensors: Tensors) -> Call:
        """A call of cuDNN's frontend alone."""

    @abstractmethod
    def capture(self, step: Call) -> tuple[Call, Tensors]:
        """A replay of a step as a CUDA graph, and the tensors that hold its results."""

    @abstractmethod
    def replay_together(self, replays: Sequence[Call]) -> None:
        """Replay each on a stream of its own, all at the same time."""


@final
@frozen
class Gpu(Device):
    """The current GPU of this machine."""

    place: torch.device = field(factory=lambda: torch.device("cuda", torch.cuda.current_device()))
    target: ag.Target = field(factory=ag.Target.here)
    rounds: int = 20
    streams: dict[int, torch.cuda.Stream] = field(factory=dict[int, torch.cuda.Stream])

    def fit(self, case: Case) -> Case:
        return case

    def compile(self, graph: ag.Graph, backend: str) -> ag.Plan:
        plan = ag.compile(graph, backends=(backend, *BEHIND.get(backend, ())))
        if plan.backend != backend:
            raise RefusedError(*(dict(plan.refusals)[backend]))
        return plan

    def check(self, graph: ag.Graph, backend: str, seconds: float) -> tuple[str, Proof]:
        (chosen,) = (b for b in BACKENDS if b.name == backend)
        simple = simplify(graph)
        if against := chosen.reasons(Request(simple, self.target, Options())):
            raise RefusedError(*against)
        needed = find_check(chosen, Request(simple, self.target, Options()))
        assert needed is not None  # it is of a backend that has them
        return needed.test.variant, evolve(
            needed, test=evolve(needed.test, seconds=seconds)
        ).prove()

    def lower(self, graph: ag.Graph, backend: str, variant: str | None) -> Call:
        (chosen,) = (b for b in BACKENDS if b.name == backend)
        executable = chosen.lower(Request(graph, self.target, evolve(Options(), variant=variant)))
        tensors = examples(graph, self.place)
        return lambda: executable.run(*tensors)

    def milliseconds(self, calls: Mapping[str, Call], runs: int) -> dict[str, float]:
        for call in calls.values():
            for _ in range(WARM_UPS):
                call()
        cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=self.place)
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
        for _ in range(runs):
            for name, call in calls.items():
                cold.zero_()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                stop.record()
                events[name].append((start, stop))
        torch.cuda.synchronize()
        return {n: statistics.median(a.elapsed_time(b) for a, b in x) for n, x in events.items()}

    def host_microseconds(self, call: Call, count: int = 200) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds / count * 1e6

    def sdpa(self, kernel: SDPBackend) -> AbstractContextManager[Any]:
        return sdpa_kernel(kernel)

    def flex(self) -> Attend:
        torch._dynamo.reset()  # else the ninth case would not be compiled
        return torch.compile(flex_attention, dynamic=False)

    def frontend(self, graph: ag.Graph, tensors: Tensors) -> Call:
        from benchmarks.gpu.frontend import frontend_call

        return frontend_call(graph, self.target, tensors)

    def capture(self, step: Call) -> tuple[Call, Tensors]:
        graph, results = capture_step(step)
        return graph.replay, results

    def replay_together(self, replays: Sequence[Call]) -> None:
        main = torch.cuda.current_stream()
        for n, replay in enumerate(replays):
            stream = self.streams.setdefault(n, torch.cuda.Stream())
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                replay()
        for n in range(len(replays)):
            main.wait_stream(self.streams[n])


def capture_step(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A step as a CUDA graph, and the tensors that hold its results after each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which fills the tensors
    with torch.cuda.stream(side):
        step()  # warms up: all is compiled or loaded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = step()
    torch.cuda.synchronize()
    return graph, results
