"""What kernels leave out at their end: a fault, unless their launch says that they do."""

from __future__ import annotations

import importlib

import pytest
import torch

from attn_graph.testing.gpu import Fault, virtual_gpu
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.regions import Unset
from tests.support.ptx_programs import run_ptx

FIRST = "setp.eq.b32 %p1, %r0, 0; mov.b32 %r1, global_smem;"
INIT = f"{FIRST} @%p1 mbarrier.init.shared::cta.b64 [%r1], 2; bar.warp.sync -1;"
TENSOR = (
    "mov.b32 %r1, global_smem;"
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; bar.warp.sync -1;"
    "ld.shared.b32 %r2, [%r1];"
)
GIVE_BACK = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;"
PROGRAMS: dict[Omission, tuple[str, str]] = {  # statements, and what is said of them
    Omission.ARRIVALS: (
        f"{INIT} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];",
        "it ends while the mbarrier at byte 0 expects 1 arrivals",
    ),
    Omission.COMMITS: (
        f"{INIT} fence.proxy.async.shared::cta;"
        "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
        "it ends before a commit of products arrives",
    ),
    Omission.COPIES: (
        "mad.lo.s32 %r1, %r0, 4, global_smem; cp.async.ca.shared.global [%r1], [%d0], 4;",
        "it ends before a copy has landed",
    ),
    Omission.BULK_STORES: (
        f"{FIRST} @%p1 st.shared.v4.b32 [%r1], {{%r0, %r0, %r0, %r0}};"
        "fence.proxy.async.shared::cta;"
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;"
        "@%p1 cp.async.bulk.commit_group;",
        "it ends before the wait for a bulk store",
    ),
    Omission.TENSOR_LOADS: (
        f"{TENSOR} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r3}}, [%r2]; {GIVE_BACK}",
        "tcgen05.ld without tcgen05.wait::ld before its registers are used",
    ),
    Omission.EQUAL_STORES: (
        f"{FIRST} @%p1 st.global.b32 [%d0], 7;",
        "several programs store equal bytes to x",
    ),
    Omission.UNEQUAL_STORES: (
        "st.global.b32 [%d0], %r0;",
        "a store of other bytes by two threads at once to x",
    ),
    Omission.UNWRITTEN_LOADS: (
        "ld.global.b32 %r1, [%d0];",
        "a load of bytes of x to which nothing was written",
    ),
}


def run(omission: Omission, *omits: Omission) -> set[str]:
    """The notes of its program, in a launch that is known to leave these out."""
    programs = 2 if omission is Omission.EQUAL_STORES else 1
    body, x, unset = PROGRAMS[omission][0], torch.zeros(8), Unset()
    if omission is Omission.UNWRITTEN_LOADS:
        unset.add(x)
    return run_ptx(body, {"x": x}, programs=programs, unset=unset, omits=frozenset(omits))


def test_every_omission_has_a_program() -> None:
    assert set(PROGRAMS) == set(Omission)


@pytest.mark.parametrize("omission", Omission)
def test_an_omission_is_a_fault(omission: Omission) -> None:
    others = {*Omission} - {omission}
    for omits in ((), others):
        with pytest.raises(Fault, match=PROGRAMS[omission][1]):
            run(omission, *omits)


@pytest.mark.parametrize("omission", Omission)
def test_an_omission_is_a_note_where_the_launch_says_so(omission: Omission) -> None:
    assert any(PROGRAMS[omission][1] in note for note in run(omission, omission))


def test_unwritten_bytes_of_shared_memory_are_a_note_where_the_launch_says_so() -> None:
    body, text = "mov.b32 %r1, global_smem; ld.shared.b32 %r2, [%r1];", "a load of shared memory"
    with pytest.raises(Fault, match=text):
        run_ptx(body, {"x": torch.zeros(8)})
    omits = frozenset({Omission.UNWRITTEN_LOADS})
    assert any(text in note for note in run_ptx(body, {"x": torch.zeros(8)}, omits=omits))


def test_stores_of_other_bytes_are_a_fault_all_the_same() -> None:
    body = f"{FIRST} mov.u32 %r2, %ctaid.x; @%p1 st.global.b32 [%d0], %r2;"
    with pytest.raises(Fault, match=r"stored by program \(0, 0, 0\)"):
        run_ptx(body, {"x": torch.zeros(8)}, programs=2, omits=frozenset(Omission))


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_launches_of_triton_leave_nothing_out(name: str) -> None:
    probes = importlib.import_module("tests.support.triton_probes")  # it imports Triton
    with virtual_gpu(name), pytest.raises(Fault, match="equal bytes"):
        probes.store_one[(2,)](torch.zeros(8))
