"""Faults put into compiled kernels one at a time: each is reported with the line of its PTX.

Sites at which a fault is not seen are equivalent: a barrier whose order another one gives already,
a guard that is true for all threads of this size, code that it does not reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import final

import pytest
import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.lowering.codegen.launches import load_kernel
from attn_graph.testing.gpu import Fault, virtual_gpu
from attn_graph.testing.gpu.device import LOADED
from attn_graph.testing.tensors import tensors_for
from tests.support.virtual_cases import attention, machine

MOST_SITES = 8
Replace = str | Callable[[re.Match[str]], str]


def fewer(group: int) -> Replace:
    return lambda m: m[0].replace(m[group], str(int(m[group]) // 2), 1)


def more(group: int) -> Replace:
    return lambda m: m[0][: m.start(group) - m.start()] + f"{int(m[group]) + 1};"


def other_stride(m: re.Match[str]) -> str:
    return f"{m[1]}, {int(m[2]) ^ (1 << 35)};"


EDITS: dict[str, tuple[str, Replace]] = {  # a line of the PTX, and another in its place
    "a barrier dropped": (r"\tbar\.sync.*", ""),
    "a wait for a phase dropped": (r"\tmbarrier\.try_wait\S* (\S+), \[.*", r"\tmov.pred \1, -1;"),
    "the other parity": (
        r"(\tmbarrier\.try_wait\S* \S+, \[\S+\]), (%r\d+);",
        r"\t{ .reg .b32 flip; xor.b32 flip, \2, 1;\n\1, flip; }",
    ),
    "expected bytes dropped": (r"\t@%p\d+ mbarrier\.arrive\.expect_tx.*", ""),
    "half the expected bytes": (r"\t@%p\d+ mbarrier\.arrive\.expect_tx.*, (\d+);", fewer(1)),
    "an mbarrier's init dropped": (r"\t@%p\d+ mbarrier\.init.*", ""),
    "an mbarrier of two arrivals": (r"(\t@%p\d+ mbarrier\.init.*), 1;", r"\1, 2;"),
    "a wait for products dropped": (r"\twgmma\.wait_group.*", ""),
    "a wait for one group of products less": (r"\twgmma\.wait_group\S* (\d+);", more(1)),
    "a commit of products dropped": (r"\twgmma\.commit.*", ""),
    "a fence of proxies dropped": (r"\tfence\.proxy.*", ""),
    "a wait for copies dropped": (r"\tcp\.async\.wait_group.*", ""),
    "a wait for one group of copies less": (r"\tcp\.async\.wait_group\s+(\d+);", more(1)),
    "a load without its guard": (r"\t@%p\d+ (ld\.global.*)", r"\t\1"),
    "a store without its guard": (r"\t@%p\d+ (st\.global.*)", r"\t\1"),
    "a store of two threads to one place": (
        r"(\t@%p\d+ st\.global\S+) \[ (%rd\d+) \+ 0 \](.*)",
        r"\t{ .reg .b64 lower; and.b64 lower, \2, -32;\n\1 [ lower ]\3 }",
    ),
    "a copy by every thread": (r"\t@%p\d+ (cp\.async\.bulk.*)", r"\t\1"),
    "a descriptor's stride": (
        r"(\t(?:or|add)\.[bs]64 \t%rd\d+, %rd\d+), (46116862\d+);",
        other_stride,
    ),
    "a wait for tensor memory dropped": (r"\ttcgen05\.wait.*", ""),
    "a commit of a tensor core dropped": (r"\t@%p\d+ tcgen05\.commit.*", ""),
    "tensor memory not given back": (r"\t@%p\d+ tcgen05\.dealloc.*", ""),
    "a row of a matrix far off": (r"(\tldmatrix.*)\[(%r\d+)(?:\+\d+)?\];", r"\1[\2+200000];"),
}
REPORTED = {  # at how many sites, of at most eight, it is reported
    (90, "a barrier dropped"): 2,
    (90, "a wait for a phase dropped"): 2,
    (90, "the other parity"): 2,
    (90, "expected bytes dropped"): 3,
    (90, "half the expected bytes"): 3,
    (90, "an mbarrier's init dropped"): 4,
    (90, "an mbarrier of two arrivals"): 3,
    (90, "a wait for products dropped"): 4,
    (90, "a wait for one group of products less"): 4,
    (90, "a commit of products dropped"): 4,
    (90, "a fence of proxies dropped"): 2,
    (90, "a load without its guard"): 8,
    (90, "a store without its guard"): 4,
    (90, "a store of two threads to one place"): 4,
    (90, "a copy by every thread"): 4,
    (90, "a descriptor's stride"): 8,
    (90, "a row of a matrix far off"): 4,
    (100, "a wait for a phase dropped"): 2,
    (100, "the other parity"): 2,
    (100, "an mbarrier's init dropped"): 4,
    (100, "a wait for tensor memory dropped"): 5,
    (100, "a commit of a tensor core dropped"): 4,
    (100, "tensor memory not given back"): 1,
    (100, "a store of two threads to one place"): 4,
    (80, "a barrier dropped"): 3,
    (80, "a wait for copies dropped"): 3,
    (80, "a wait for one group of copies less"): 3,
    (80, "a store without its guard"): 4,
    (80, "a store of two threads to one place"): 4,
    (80, "a row of a matrix far off"): 8,
}


@final
@frozen
class Attempt:
    """A forward pass on a virtual GPU, of which the PTX can be changed."""

    plan: ag.Plan
    tensors: tuple[torch.Tensor, ...]
    function: int
    text: str

    def faults(self, pattern: str, replace: Replace) -> Iterator[str]:
        """What is reported of each site where a line is another one."""
        lines = self.text.splitlines()
        sites = [n for n, line in enumerate(lines) if re.fullmatch(pattern, line)]
        for site in sites[:MOST_SITES]:
            changed = [*lines]
            changed[site] = re.sub(pattern, replace, lines[site])
            LOADED[self.function] = "\n".join(changed)
            try:
                self.plan(*self.tensors)
            except Fault as fault:
                yield str(fault)
            finally:
                LOADED[self.function] = self.text


@pytest.fixture(
    scope="module",
    params=[90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (80, 100))],
)
def attempt(request: pytest.FixtureRequest) -> Iterator[tuple[int, Attempt]]:
    graph = attention(M=130, N=200, H=1, stats=False)
    load_kernel("forward").device_caches.clear()  # it is loaded anew
    before = {*LOADED}
    with virtual_gpu(machine(request.param)) as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        tensors = tensors_for(graph, 0)
        plan(*tensors)
        (function,) = {*LOADED} - before
        yield request.param, Attempt(plan, tensors, function, LOADED[function])


@pytest.mark.parametrize("name", EDITS)
def test_a_fault_in_a_compiled_kernel_is_reported(attempt: tuple[int, Attempt], name: str) -> None:
    sm, tried = attempt
    reports = [*tried.faults(*EDITS[name])]
    assert len(reports) >= REPORTED.get((sm, name), 0)
    for report in reports:
        assert "PTX line" in report or "deadlock" in report or "it ends" in report, report


def test_many_faults_are_reported() -> None:
    assert sum(REPORTED.values()) >= 30
