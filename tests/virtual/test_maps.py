"""Tensor maps that kernels make, jumps that choose among labels, and memory that kernels keep."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attn_graph.testing.gpu import Fault, virtual_gpu
from tests.support.ptx_programs import run_ptx
from tests.support.virtual_cases import machine

PROBES: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
MAP, SMEM = "[%d2]", "[%r5]"  # in global memory, and in shared memory
FIELD = "@%p1 tensormap.replace.tile.{0}.shared::cta.b1024.b{1} [%r5], {2};"
FIELDS = (  # of a matrix of 8 rows of 4 numbers in float32
    ("global_address", 64, "%d0"),
    ("rank", 32, "1"),
    *(("box_dim", 32, x) for x in ("0, 4", "1, 8")),
    *(("global_dim", 32, x) for x in ("0, 4", "1, 8")),
    ("global_stride", 64, "0, 16"),
    *(("element_stride", 32, x) for x in ("0, 1", "1, 1")),
    *((name, 32, "0") for name in ("interleave_layout", "swizzle_mode", "fill_mode")),
    ("elemtype", 32, "7"),
)
START = (
    "setp.eq.b32 %p1, %r0, 0; mov.b32 %r1, global_smem; add.s32 %r4, %r1, 1024;"
    "add.s32 %r5, %r1, 2048; mad.lo.s32 %r6, %r0, 4, %r5; mov.b32 %r7, 0; st.shared.b32 [%r6], %r7;"
    "@%p1 mbarrier.init.shared::cta.b64 [%r4], 1; bar.warp.sync -1;"
)
PUBLISH = (
    "bar.warp.sync -1; tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
    ".sync.aligned [%d2], [%r5], 128;"
)
FENCE = "fence.proxy.tensormap::generic.acquire.gpu [%d2], 128; fence.proxy.async.shared::cta;"
COPY = (
    "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 128;"
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1],"
    "[%d2, {%r7, %r7}], [%r4]; mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;"
    "mad.lo.s32 %r8, %r0, 4, %r1; ld.shared.b32 %r9, [%r8];"
    "mul.wide.u32 %d4, %r0, 4; add.s64 %d5, %d1, %d4; st.global.b32 [%d5], %r9;"
)


PADDED = (  # of 128 numbers of 4 bits, the next 8 bytes of shared memory left free after 8
    *(("box_dim", 32, x) for x in ("0, 128", "1, 1")),
    *(("global_dim", 32, x) for x in ("0, 256", "1, 1")),
    ("global_stride", 64, "0, 128"),
    ("elemtype", 32, "14"),
)
KEPT = (
    "mad.lo.s32 %r8, %r0, 4, %r1; mov.b32 %r9, 0f40E00000; st.shared.b32 [%r8], %r9;"
    "fence.proxy.async.shared::cta; bar.warp.sync -1;"
)
STORE = (
    "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {%r7, %r7}], [%r1];"
    "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"
)


def copy(
    fields: tuple[tuple[str, int, str], ...] = FIELDS, fence: str = FENCE, body: str = COPY
) -> torch.Tensor:
    """What a warp reads of a matrix by a map that it made."""
    x, out = torch.arange(32.0).view(8, 4), torch.zeros(32)
    room = torch.zeros(256, dtype=torch.uint8)
    made = room[-room.data_ptr() % 128 :][:128]
    set_fields = "".join(FIELD.format(*each) for each in fields)
    run_ptx(START + set_fields + PUBLISH + fence + body, {"x": x, "out": out, "made": made})
    return out


def test_a_map_made_by_a_kernel_is_used_as_one_of_the_host() -> None:
    assert torch.equal(copy(), torch.arange(32.0))


def test_a_map_of_4_bits_leaves_8_of_16_bytes_as_they_are() -> None:
    out = copy((*FIELDS[:2], *PADDED), FENCE, KEPT + COPY.replace("128;", "64;"))
    assert out.view(-1, 4)[:, 2:].eq(7).all()
    assert torch.equal(out.view(-1, 4)[:, :2], torch.arange(16.0).view(-1, 2))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (COPY.replace("{%r7, %r7}", "{%r30, %r7}"), "begins at element 64, not a multiple of 128"),
        (STORE, "a tensor map with padding, which is for loads"),
    ],
)
def test_a_map_of_4_bits_is_for_loads_of_128_numbers(body: str, text: str) -> None:
    with pytest.raises(Fault, match=text):
        copy((*FIELDS[:2], *PADDED), FENCE, "mov.b32 %r30, 64;" + body)


def test_a_map_used_without_a_fence_after_its_change_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"without fence\.proxy\.tensormap"):
        copy(fence="fence.proxy.async.shared::cta;")


def test_a_map_without_an_element_type_is_a_fault() -> None:
    with pytest.raises(Fault, match="no tensor map is at"):
        copy(FIELDS[:-1])


def test_a_copy_over_an_mbarrier_that_counts_is_a_fault() -> None:
    with pytest.raises(Fault, match="a store to the mbarrier at byte 1024, which is in use"):
        run_ptx(
            f"{START} add.s32 %r10, %r1, 1152; @%p1 mbarrier.init.shared::cta.b64 [%r10], 1;"
            "fence.proxy.async.shared::cta; bar.warp.sync -1;"
            "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;"
            "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 16;"
            "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%d0],"
            "16, [%r10];",
            {"x": torch.zeros(8, 4)},
        )


JUMP = (
    "and.b32 %r2, %r0, 3; mul.wide.u32 %d4, %r0, 4; add.s64 %d5, %d0, %d4; mov.b32 %r3, 7;\n"
    "$T: .branchtargets $A, $B, $C{last};\n brx.idx %r2, $T;\n"
    "$A: mov.b32 %r3, 1; bra $E;\n $B: mov.b32 %r3, 2; bra $E;\n $C: mov.b32 %r3, 3;\n"
    "$E: st.global.b32 [%d5], %r3;"
)


def test_a_jump_chooses_among_labels() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    run_ptx(JUMP.format(last=", $E"), {"out": out})
    assert out.tolist() == [1, 2, 3, 7] * 8


def test_a_jump_behind_the_last_label_is_a_fault() -> None:
    with pytest.raises(Fault, match="a jump to a label behind the last of 3"):
        run_ptx(JUMP.format(last=""), {"out": torch.zeros(32, dtype=torch.int32)})


@pytest.mark.parametrize("sm", [90, 100])
def test_descriptors_made_within_a_kernel_need_no_allocator(sm: int) -> None:
    x, out = torch.randn(40, 64), torch.zeros(40, 64)
    with virtual_gpu(machine(sm)):
        PROBES.copy_by_descriptors[(3,)](x, out, 40, R=16, N=64)
    assert torch.equal(out, 2 * x)


def test_addresses_in_a_tensor_reach_what_the_gpu_is_given() -> None:
    x, out = torch.randn(64), torch.zeros(64)
    table = torch.tensor([x.data_ptr(), out.data_ptr()])
    with virtual_gpu("h100") as device:
        with pytest.raises(Fault, match="which is in no tensor"):
            PROBES.copy_by_table[(1,)](table, N=64)
        device.reachable += [x, out]
        PROBES.copy_by_table[(1,)](table, N=64)
    assert torch.equal(out, x)


def test_early_launches_follow_each_other() -> None:
    x, out = torch.randn(64), torch.zeros(64)
    with virtual_gpu("h100"):
        PROBES.copy_early[(1,)](x, out, N=64, launch_pdl=True)
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("sm", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_products_of_8_bits_are_those_of_their_numbers(sm: int, dtype: torch.dtype) -> None:
    a, b, out = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype), torch.zeros(64, 64)
    with virtual_gpu(machine(sm)):
        PROBES.multiply_turned[(1,)](a, b, out, N=64)
    torch.testing.assert_close(out, a.float() @ b.float().mT, rtol=1e-3, atol=1e-3)


def test_launchers_divide_by_registers_and_name_no_device() -> None:
    from triton.runtime import driver

    with virtual_gpu("h100") as device:
        active: Any = driver.active
        properties = active.utils.get_device_properties(None)
        kernel = PROBES.copy_early.warmup(torch.zeros(64), torch.zeros(64), N=64, grid=(1,))
        kernel._init_handles()
        assert 24 <= kernel.n_regs <= 256
    assert properties["multiprocessor_count"] == device.target.multiprocessors
