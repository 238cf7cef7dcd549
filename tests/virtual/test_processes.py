"""Programs of a launch in several processes: they leave and report what they do in one."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.testing.gpu import Fault, Omission, apart, virtual_gpu
from attn_graph.testing.gpu.regions import Unset
from attn_graph.testing.tensors import tensors_for
from tests.support.ptx_programs import run_ptx
from tests.support.virtual_cases import attention

PROBES: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
PROGRAMS = 5
few = settings(max_examples=max(4, settings().max_examples // 6))
GO = """
 mov.u32 %r1, %ctaid.x; mul.wide.u32 %d8, %r1, 4; setp.eq.b32 %p1, %r0, 0;
 add.s64 %d9, %d2, %d8; ld.global.u32 %r2, [%d9]; mul.wide.u32 %d10, %r2, 4;
 add.s64 %d11, %d3, %d8; ld.global.u32 %r3, [%d11]; mul.wide.u32 %d12, %r3, 4;
 add.s64 %d13, %d0, %d10; add.s64 %d14, %d0, %d12;
"""  # %d13: the place of x that a program reads, %d14: that it stores to
MOVE = "@%p1 ld.global.u32 %r4, [%d13]; add.s32 %r4, %r4, 1; @%p1 st.global.u32 [%d14], %r4;"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch in several processes: whether what these did was kept."""
    kept, run = list[bool](), apart.run_shares

    def run_and_note(*given: Any) -> bool:
        kept.append(run(*given))
        return kept[-1]

    monkeypatch.setattr(apart, "run_shares", run_and_note)
    return kept


def outcome(
    body: str, reads: list[int], writes: list[int], processes: int, seed: int | None = None
) -> tuple[list[int], str | set[str]]:
    """What programs leave in a tensor; and the notes, or the fault."""
    x = torch.arange(PROGRAMS + 3, dtype=torch.int32)
    given = {"x": x, "out": torch.zeros(PROGRAMS, dtype=torch.int32)}
    given |= {"reads": torch.tensor(reads).int(), "writes": torch.tensor(writes).int()}
    options: Any = {"programs": PROGRAMS, "processes": processes, "seed": seed}
    try:
        notes = run_ptx(GO + body, given, **options)
    except Fault as fault:
        return [], re.sub("0x[0-9a-f]+", "an address", str(fault))
    return x.tolist(), notes


places = st.lists(st.integers(0, PROGRAMS + 3), min_size=PROGRAMS, max_size=PROGRAMS)


@few
@given(reads=places, writes=places, processes=st.integers(2, 6), seed=st.none() | st.just(1))
def test_processes_report_what_one_process_reports(
    reads: list[int], writes: list[int], processes: int, seed: int | None
) -> None:
    """Places beyond the last element, and those of several programs, among them."""
    one, many = (outcome(MOVE, reads, writes, n, seed) for n in (1, processes))
    assert one == many


def test_programs_that_touch_places_of_their_own_share_processes(shared: list[bool]) -> None:
    own = [*range(PROGRAMS)]
    given = {"x": torch.arange(8).int(), "out": torch.zeros(PROGRAMS).int()}
    given |= {"reads": torch.tensor(own).int(), "writes": torch.tensor(own).int()}
    run_ptx(GO + MOVE, given, programs=PROGRAMS, processes=2)
    assert given["x"].tolist() == [1, 2, 3, 4, 5, 5, 6, 7]
    assert shared == [True]


def test_what_another_process_stored_counts_as_written() -> None:
    unset, x = Unset(), torch.empty(8, dtype=torch.int32)
    unset.add(x)
    own = torch.arange(PROGRAMS).int()
    given = {"x": x, "out": torch.zeros(PROGRAMS).int(), "reads": own, "writes": own}
    store, load = ("@%p1 st.global.u32 [%d14], %r1;", "@%p1 ld.global.u32 %r4, [%d13];")
    run_ptx(GO + store, given, programs=PROGRAMS, processes=2, unset=unset)
    run_ptx(GO + load, given, programs=PROGRAMS, processes=2, unset=unset)
    given["reads"] = own + 1
    with pytest.raises(Fault, match="to which nothing was written"):
        run_ptx(GO + load, given, programs=PROGRAMS, processes=2, unset=unset)


def test_atomic_sums_run_in_one_process(shared: list[bool]) -> None:
    x, out = torch.arange(5 * 128, dtype=torch.int32).view(5, 128), torch.zeros(128).int()
    with virtual_gpu("h100", processes=3):
        PROBES.add_rows[(5,)](x, out, N=128)
    assert torch.equal(out, x.sum(0).int())
    assert not shared


def test_equal_stores_of_programs_are_noted_from_processes_too() -> None:
    given = {"x": torch.zeros(8).int(), "out": torch.zeros(PROGRAMS).int()}
    given |= {"reads": torch.zeros(PROGRAMS).int(), "writes": torch.zeros(PROGRAMS).int()}
    omits = frozenset({Omission.EQUAL_STORES})
    body = GO + "@%p1 st.global.u32 [%d14], 7;"
    notes = run_ptx(body, given, programs=PROGRAMS, processes=2, omits=omits)
    assert any("several programs store equal bytes" in note for note in notes)


def test_an_attention_in_processes_has_the_same_bits(shared: list[bool]) -> None:
    graph = attention(M=130, N=70, H=2, stats=False)
    made = []
    for processes in (1, 3):
        with virtual_gpu("h100", processes=processes) as device:
            plan = ag.compile(graph, target=device.target, backends=("triton",))
            o = plan(*tensors_for(graph, 0))
            assert isinstance(o, torch.Tensor)
            made.append((o.tolist(), device.notes, device.kernels))
    assert made[0] == made[1]
    assert shared == [True]
