"""An H200, played on a CPU for `benchmarks.gpu`: it plans whole cases, and runs small ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from typing import Any, final

import torch
from attrs import evolve, field, frozen
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

import attn_graph as ag
from attn_graph.lowering.request import Options, Request
from attn_graph.lowering.triton import backend as triton
from attn_graph.measuring.self_check import Proof
from benchmarks.gpu.cases import Case
from benchmarks.gpu.device import Attend, Call, Device, Tensors

MOST = (1, 8, 32, 16)  # of B, H, M and D


@cache
def plan_whole(case: Case) -> tuple[tuple[str, ...], ...]:
    """How our kernels run a case as it is on an H200: launches of each pass, as `explain` says."""
    target = ag.Target.of("h200")
    plan = ag.compile(case.graph(), target=target, backends=("triton",))
    graphs = [plan.graph] + ([plan.vjp.graph] if case.backward else [])
    return tuple(triton.lower(Request(graph, target, Options())).launches() for graph in graphs)


def no_work() -> None:
    """A call that can be made on a GPU only."""


@final
@frozen
class Played(Device):
    """Every call is made once, and takes one millisecond more than the one before."""

    place: torch.device = field(factory=lambda: torch.device("cpu"))
    target: ag.Target = field(factory=lambda: ag.Target.of("h200"))
    rounds: int = 1
    replays: list[int] = field(factory=list[int])

    def fit(self, case: Case) -> Case:
        plan_whole(case)
        B, H, M, D = map(min, case.sizes, MOST)
        return evolve(
            case,
            sizes=(B, H, M, D),
            key_heads=case.key_heads and min(case.key_heads, H),
            keys=case.keys and MOST[2],
            window=case.window and MOST[2] // 4,
        )

    def compile(self, graph: ag.Graph, backend: str) -> ag.Plan:
        if backend == "cudnn" and "SoftCap" in str(graph):
            raise ag.NoBackendError(graph, ())
        return ag.compile(graph, target="cpu", backends=("math",))

    def check(self, graph: ag.Graph, backend: str, seconds: float) -> tuple[str, Proof]:
        return "played", Proof(shares=(0.5,))

    def lower(self, graph: ag.Graph, backend: str, variant: str | None) -> Call:
        triton.lower(Request(graph, self.target, evolve(Options(), variant=variant)))
        return no_work

    def milliseconds(self, calls: Mapping[str, Call], runs: int) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict(zip(calls, count(1.0), strict=False))

    def host_microseconds(self, call: Call) -> float:
        call()
        return 10.0

    def sdpa(self, kernel: SDPBackend) -> AbstractContextManager[Any]:
        return nullcontext()

    def flex(self) -> Attend:
        return flex_attention

    def frontend(self, graph: ag.Graph, tensors: Tensors) -> Call:
        assert len(tensors) == len(graph.inputs)
        return no_work

    def capture(self, step: Call) -> tuple[Call, Tensors]:
        results = step()
        return no_work, results

    def replay_together(self, replays: Sequence[Call]) -> None:
        for replay in replays:
            replay()
        self.replays.append(len(replays))
