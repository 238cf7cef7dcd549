"""Bulk copies, stores and sums, by programs written by hand. PTX ISA 9.7.9.25.4 and 9.7.9.25.5."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_graph.testing.gpu import Fault
from attn_graph.testing.strategies import seeds
from tests.support.ptx_programs import run_ptx

few = settings(max_examples=settings().max_examples // 3)
LANES = 32
FIRST = "setp.eq.b32 %p1, %r0, 0; mov.b32 %r1, global_smem; mul.wide.u32 %d7, %r0, 4;"
FILL = (  # shared memory with 32 numbers of the first tensor
    f"{FIRST} add.s64 %d8, %d0, %d7; ld.global.b32 %r2, [%d8];"
    "mad.lo.s32 %r3, %r0, 4, %r1; st.shared.b32 [%r3], %r2;"
)
FENCE = "fence.proxy.async.shared::cta; bar.warp.sync -1;"
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], {size};"
ADD = "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], {size};"
COMMIT = "@%p1 cp.async.bulk.commit_group;"
WAIT = "@%p1 cp.async.bulk.wait_group.read 0; bar.warp.sync -1;"
END = f"{COMMIT} {WAIT}"
sizes = st.integers(1, LANES // 4).map(lambda n: 16 * n)


def numbers(seed: int) -> torch.Tensor:
    """Numbers of which sums are exact."""
    return torch.randint(-99, 99, (LANES,), generator=torch.Generator().manual_seed(seed)).float()


@given(seed=seeds, size=sizes)
@few
def test_a_bulk_store_writes_bytes_that_lie_side_by_side(seed: int, size: int) -> None:
    x, out = numbers(seed), torch.zeros(LANES)
    run_ptx(FILL + FENCE + STORE.format(size=size) + END, {"x": x, "out": out})
    assert torch.equal(out, x.where(torch.arange(LANES) < size // 4, torch.zeros(())))


@given(seed=seeds, size=sizes, programs=st.integers(1, 3))
@few
def test_a_bulk_sum_of_several_programs_is_of_all(seed: int, size: int, programs: int) -> None:
    x, out = numbers(seed), numbers(seed + 1)
    due = out + programs * x.where(torch.arange(LANES) < size // 4, torch.zeros(()))
    run_ptx(FILL + FENCE + ADD.format(size=size) + END, {"x": x, "out": out}, programs=programs)
    assert torch.equal(out, due)


@given(seed=seeds, size=sizes)
@few
def test_a_bulk_copy_lets_an_mbarrier_know(seed: int, size: int) -> None:
    x, out = numbers(seed), torch.zeros(LANES)
    run_ptx(
        f"{FIRST} add.s32 %r4, %r1, 512; @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;"
        f"fence.proxy.async.shared::cta; bar.warp.sync -1; add.s64 %d9, %d1, %d7;"
        f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {size};"
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f" [%r1], [%d0], {size}, [%r4];"
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;"
        f"mul.lo.s32 %r5, %r0, 4; setp.lt.s32 %p3, %r5, {size}; add.s32 %r3, %r1, %r5;"
        "@%p3 ld.shared.b32 %r2, [%r3]; @%p3 st.global.b32 [%d9], %r2;",
        {"x": x, "out": out},
    )
    assert torch.equal(out, x.where(torch.arange(LANES) < size // 4, torch.zeros(())))


ONE = STORE.format(size=16)
FAULTS = {  # statements, and what is wrong with them
    "a bulk store's read of shared memory, bytes 0 to 3 has no fence.proxy.async": (
        f"{FILL} bar.warp.sync -1; {ONE} {END}"
    ),
    "is not ordered after the read by a bulk store of warp 0": (
        f"{FILL} {FENCE} {ONE} {COMMIT} st.shared.b32 [%r3], %r2; {WAIT}"
    ),
    "of 8 bytes, which is not a multiple of 16": f"{FILL} {FENCE} {STORE.format(size=8)} {END}",
    "bytes of out that belong to no element": (
        f"{FILL} {FENCE} add.s64 %d1, %d1, 112; {STORE.format(size=32)} {END}"
    ),
    "a store to bytes of out is not ordered after the store of other bytes by a bulk store": (
        f"{FILL} {FENCE} {ADD.format(size=16)} {END} st.global.b32 [%d1], %r2;"
    ),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_bulk_store_that_a_gpu_does_not_define_is_a_fault(text: str) -> None:
    tensors = {"x": numbers(0), "out": torch.zeros(LANES + 4)[:LANES]}
    with pytest.raises(Fault, match=text):
        run_ptx(FAULTS[text], tensors)
