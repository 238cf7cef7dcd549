"""What the virtual GPU does not do is said to be that, not a fault of the kernel; and what it does
for parts of warps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_graph.testing.gpu import Fault, Omission, UnknownInstructionError
from tests.support.ptx_bodies import COPY, HERE, SUM
from tests.support.ptx_programs import run_ptx

LIMITS = {  # statements, and what is said of them
    "the register %clock": "mov.u32 %r2, %clock;",
    "threads of a warp begin several bulk stores": (
        "st.shared.b32 [%r3], %r0; fence.proxy.async; bar.sync 0;"
        f"{SUM} [%d1], [%r1], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    ),
    "come to an instruction later": (
        "@%p4 bra low;\n bra high;\nlow:\n shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;\n bra on;\n"
        "high:\n shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;\non:\n"
    ),
    "waits for 512 free columns": (
        "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;"
        "@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+4], 512;"
    ),
    "the name nobody": "mov.b32 %r2, nobody;",
}
LOW = "and.b32 %r20, %r0, 31; setp.lt.u32 %p4, %r20, 16; "


def run(body: str, out: torch.Tensor) -> set[str]:
    x = torch.arange(128, dtype=torch.int32)
    return run_ptx(HERE + LOW + body, {"x": x, "out": out}, threads=64)


@pytest.mark.parametrize("text", LIMITS)
def test_a_limit_of_the_virtual_gpu_is_no_fault(text: str) -> None:
    with pytest.raises(
        UnknownInstructionError, match="which the virtual GPU does not do"
    ) as caught:
        run(LIMITS[text], torch.zeros(128, dtype=torch.int32))
    assert text in str(caught.value)
    assert "PTX line" in str(caught.value)


PARTS: dict[
    str, tuple[str, Callable[[int], int]]
] = {  # statements that leave a number of each thread in %r6, and what it is
    "a shuffle of half a warp": (
        "mov.b32 %r6, 77; @%p4 shfl.sync.bfly.b32 %r6, %r0, 1, 31, 65535;",
        lambda n: n ^ 1 if n % 32 < 16 else 77,
    ),
    "a shuffle from 33 lanes on": (
        "shfl.sync.idx.b32 %r6, %r0, 37, 31, -1;",
        lambda n: n // 32 * 32 + 5,
    ),
    "a shuffle that says if it is within reach": (
        "shfl.sync.down.b32 %r6|%p5, %r0, 4, 31, -1; selp.b32 %r6, 1, 0, %p5;",
        lambda n: int(n % 32 < 28),
    ),
    "sums of two halves": (
        "mov.b32 %r5, -65536; selp.b32 %r5, 65535, %r5, %p4; mov.b32 %r4, 1;"
        "redux.sync.add.s32 %r6, %r4, %r5;",
        lambda n: 16,
    ),
    "a vote of half a warp": (
        "mov.b32 %r6, 5; setp.eq.b32 %p5, %r20, 20;"
        "@%p4 vote.sync.any.pred %p6, %p5, 65535; @%p4 selp.b32 %r6, 1, 0, %p6;",
        lambda n: 0 if n % 32 < 16 else 5,
    ),
    "half of the bytes of a copy": (
        f"{COPY} [%r3], [%d8], 4, 1; cp.async.wait_all; ld.shared.b32 %r6, [%r3];",
        lambda n: n & 255,
    ),
    "lanes that wait for two mbarriers": (
        "@%p1 mbarrier.init.shared::cta.b64 [%r1+512], 64;"
        "@%p1 mbarrier.init.shared::cta.b64 [%r1+520], 64; bar.sync 0;"
        "mbarrier.arrive.shared::cta.b64 _, [%r1+512];"
        "mbarrier.arrive.shared::cta.b64 _, [%r1+520];"
        "selp.b32 %r5, 512, 520, %p4; add.s32 %r5, %r5, %r1;"
        "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r5], 0; selp.b32 %r6, 1, 0, %p5;",
        lambda n: 1,
    ),
    "a barrier that one warp skips": ("mov.b32 %r6, 3; @%p2 bar.sync 1, 32;", lambda n: 3),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_warp_does_what_its_lanes_do(name: str) -> None:
    body, due = PARTS[name]
    out = torch.zeros(128, dtype=torch.int32)
    assert not run(f"{body} st.global.b32 [%d9], %r6;", out)
    assert out[:64].tolist() == [due(n) for n in range(64)]


ARITHMETIC = {  # an instruction on two numbers, by their bits, and those of the result
    "max.f32": (0, 0x80000000, 0),
    "min.f32": (0, 0x80000000, 0x80000000),
    "max.ftz.f32": (0x80000000, 0, 0),
    "add.f32": (0x80000000, 0, 0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_zero_has_the_sign_that_the_isa_says(name: str) -> None:
    a, b, due = ARITHMETIC[name]
    out = torch.zeros(128, dtype=torch.int32)
    run(f"mov.b32 %r4, {a}; mov.b32 %r5, {b}; {name} %r6, %r4, %r5; st.global.b32 [%d9], %r6;", out)
    assert int(out[0]) & 0xFFFFFFFF == due


NAN = 0x7FC12345


@pytest.mark.parametrize(
    ("body", "due"),
    [
        ("max.f32 %r6, %r4, %r4;", 0x7FFFFFFF),
        ("min.f32 %r6, %r4, %r4;", 0x7FFFFFFF),
        ("mov.b16 %h1, 0x7fff; cvt.rn.f16x2.e4m3x2 %r6, %h1;", 0x7FFF7FFF),
        ("mov.b32 %r5, 1; rcp.approx.ftz.f32 %r6, %r5;", 0x7F800000),
        ("mov.b32 %r5, 0x7f7fffff; rcp.approx.ftz.f32 %r6, %r5;", 0),
    ],
)
def test_a_result_has_the_bits_that_the_isa_says(body: str, due: int) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    run(f"mov.b32 %r4, {NAN}; {body} st.global.b32 [%d9], %r6;", out)
    assert int(out[0]) & 0xFFFFFFFF == due


OWN = "cp.async.ca.shared.global [%r1], [%d3], 4; cp.async.commit_group;"
FILLED = (  # each lane stores its number, to which place some then copy another
    "mov.b32 %r5, global_smem; mad.lo.s32 %r1, %r0, 4, %r5; mul.wide.u32 %d2, %r0, 4;"
    "add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2; st.shared.b32 [%r1], %r0;"
    "setp.lt.u32 %p1, %r0, 16;"
)


def test_lanes_of_a_warp_commit_and_wait_for_their_own_copies() -> None:
    x, out = torch.arange(100, 132, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run_ptx(
        f"{FILLED} @!%p1 bra $L; {OWN} cp.async.wait_group 0; $L:"
        "ld.shared.b32 %r3, [%r1]; st.global.b32 [%d4], %r3;",
        {"x": x, "out": out},
    )
    assert out.tolist() == [*range(100, 116), *range(16, 32)]


def test_a_wait_lets_the_last_groups_of_each_lane_go_on() -> None:
    x, out = torch.arange(100, 132, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    omits = frozenset({Omission.COPIES})
    run_ptx(  # the lower half has one group more, which is the one that may be on its way
        f"{FILLED} {OWN} @!%p1 bra $L; cp.async.commit_group; $L: cp.async.wait_group 1;"
        "ld.shared.b32 %r3, [%r1]; st.global.b32 [%d4], %r3;",
        {"x": x, "out": out},
        omits=omits,
    )
    assert out.tolist() == [*range(100, 116), *range(16, 32)]


WAIT = (  # a barrier whose first phase is over, and a wait for a phase of a parity
    "setp.eq.b32 %p1, %r0, 0; mov.b32 %r1, global_smem; bar.warp.sync -1;"
    "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.warp.sync -1;"
    "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1]; bar.warp.sync -1;"
    "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity};"
)


def test_a_wait_reads_the_lowest_bit_of_a_parity_and_says_so() -> None:
    notes = run_ptx(WAIT.format(parity=-2), {"x": torch.zeros(8)})
    assert any("neither 0 nor 1" in note for note in notes)
    with pytest.raises(Fault, match="deadlock"):
        run_ptx(WAIT.format(parity=-1), {"x": torch.zeros(8)})
