"""Instructions of whole warps, by their definition: shuffles, matrices, products, divergence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attn_graph.testing.strategies import seeds
from tests.support.ptx_programs import run_ptx

LANES = 32
few = settings(max_examples=settings().max_examples // 3, phases=(Phase.explicit, Phase.generate))


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Halves of which products and sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).half()


def addresses(*registers: str) -> str:
    """`%d8` and on: where a thread's 4 bytes are in each tensor."""
    return "mul.wide.u32 %d7, %r0, 4;" + "".join(
        f" add.s64 %d{8 + n}, {base}, %d7;" for n, base in enumerate(registers)
    )


SOURCES = {  # of a lane, by b
    "bfly": lambda lane, b: lane ^ b,
    "idx": lambda lane, b: b,
    "up": lambda lane, b: lane - b if lane >= b else lane,
    "down": lambda lane, b: lane + b if lane + b < LANES else lane,
}


@pytest.mark.parametrize("way", SOURCES)
@given(b=st.integers(0, 31), seed=seeds)
@few
def test_a_shuffle_takes_from_the_lane_that_it_names(way: str, b: int, seed: int) -> None:
    x = torch.randint(
        -(2**31), 2**31, (LANES,), generator=torch.Generator().manual_seed(seed)
    ).int()
    out, limit = torch.zeros(LANES, dtype=torch.int32), 0 if way == "up" else 31
    run_ptx(
        f"{addresses('%d0', '%d1')} ld.global.b32 %r1, [%d8];"
        f"shfl.sync.{way}.b32 %r2, %r1, {b}, {limit}, -1; st.global.b32 [%d9], %r2;",
        {"x": x, "out": out},
    )
    assert out.tolist() == [x[SOURCES[way](lane, b)].item() for lane in range(LANES)]


@pytest.mark.parametrize("way", ["add", "min", "max", "and", "or", "xor"])
@given(x=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=LANES, max_size=LANES))
@few
def test_a_reduction_is_of_all_lanes(way: str, x: list[int]) -> None:
    out = torch.zeros(LANES, dtype=torch.int32)
    kind = "s32" if way in ("add", "min", "max") else "b32"
    run_ptx(
        f"{addresses('%d0', '%d1')} ld.global.b32 %r1, [%d8];"
        f"redux.sync.{way}.{kind} %r2, %r1, -1; st.global.b32 [%d9], %r2;",
        {"x": torch.tensor(x, dtype=torch.int32), "out": out},
    )
    due = x[0]
    for n in x[1:]:
        due = {"add": due + n, "min": min(due, n), "max": max(due, n)}.get(
            way, {"and": due & n, "or": due | n}.get(way, due ^ n)
        )
    assert out.tolist() == [(due + 2**31) % 2**32 - 2**31] * LANES


@pytest.mark.parametrize(("way", "due"), [("min", -3.0), ("max", 40.0)])
def test_a_reduction_of_numbers_passes_over_nan(way: str, due: float) -> None:
    x, out = torch.arange(LANES).float(), torch.zeros(LANES)
    x[3], x[4], x[5] = -3, float("nan"), 40
    run_ptx(
        f"{addresses('%d0', '%d1')} ld.global.b32 %r1, [%d8];"
        f"redux.sync.{way}.f32 %r2, %r1, -1; st.global.b32 [%d9], %r2;",
        {"x": x, "out": out},
    )
    assert out.tolist() == [due] * LANES


@pytest.mark.parametrize("turned", ["", ".trans"])
@given(seed=seeds)
@few
def test_ldmatrix_gives_a_lane_two_numbers_of_a_row(turned: str, seed: int) -> None:
    """Lane l has elements 2 (l mod 4) and the next of row l / 4, of each of four matrices."""
    x, out = numbers(4, 8, 8, seed=seed), torch.zeros(4, LANES, 2, dtype=torch.half)
    copy = "".join(
        f"ld.global.b32 %r1, [%d8+{128 * n}]; st.shared.b32 [%r3+{128 * n}], %r1;" for n in range(4)
    )
    run_ptx(
        f"{addresses('%d0', '%d1')} mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r0, 4, %r2; {copy}"
        "bar.warp.sync -1; mad.lo.s32 %r4, %r0, 16, %r2;"
        f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r4];"
        + "".join(f"st.global.b32 [%d9+{128 * n}], %r{5 + n};" for n in range(4)),
        {"x": x, "out": out},
    )
    rows = x.transpose(1, 2) if turned else x
    assert torch.equal(out, rows.reshape(4, LANES, 2))


@given(seed=seeds)
@few
def test_stmatrix_is_the_reverse_of_ldmatrix(seed: int) -> None:
    x, out = numbers(LANES, 2, seed=seed), torch.zeros(LANES, 2, dtype=torch.half)
    run_ptx(
        f"{addresses('%d0', '%d1')} ld.global.b32 %r1, [%d8]; mov.b32 %r2, global_smem;"
        "and.b32 %r5, %r0, 7; mad.lo.s32 %r3, %r5, 16, %r2;"
        "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r3], {%r1}; bar.warp.sync -1;"
        "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r4}, [%r3]; st.global.b32 [%d9], %r4;",
        {"x": x, "out": out},
    )
    assert torch.equal(out, x)


@given(seed=seeds)
@few
def test_mma_multiplies_fragments_as_the_isa_draws_them(seed: int) -> None:
    """A [16,16]: row l / 4 and 8 more, columns 2 (l mod 4) and 8 more; B [16,8], C [16,8] alike."""
    a, b, c = numbers(16, 16, seed=seed), numbers(16, 8, seed=seed + 1), torch.zeros(16, 8)
    rows, pairs = torch.arange(LANES) // 4, 2 * (torch.arange(LANES) % 4)
    two = pairs[:, None] + torch.arange(2)
    left = torch.stack([a[rows[:, None] + r, two + k] for k in (0, 8) for r in (0, 8)])
    right = torch.stack([b[two + k, rows[:, None]] for k in (0, 8)])
    out = torch.zeros(4, LANES)
    loads = "".join(f"ld.global.b32 %r{1 + n}, [%d8+{128 * n}];" for n in range(4))
    loads += "".join(f"ld.global.b32 %r{5 + n}, [%d9+{128 * n}];" for n in range(2))
    run_ptx(
        f"{addresses('%d0', '%d1', '%d2')} {loads} mov.b32 %r9, 0f3F800000;"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r10, %r11, %r12, %r13},"
        " {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r9, %r9, %r9, %r9};"
        + "".join(f"st.global.b32 [%d10+{128 * n}], %r{10 + n};" for n in range(4)),
        {"a": left.contiguous(), "b": right.contiguous(), "out": out},
    )
    for r in (0, 8):
        c[rows[:, None] + r, two] = out[r // 4 : r // 4 + 2].T
    assert torch.equal(c, a.float() @ b.float() + 1)


@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_a_guarded_instruction_leaves_the_registers_of_other_lanes(guard: str) -> None:
    out = torch.zeros(LANES, dtype=torch.int32)
    run_ptx(
        f"{addresses('%d0')} setp.lt.u32 %p1, %r0, 5; mov.b32 %r1, 7; {guard}mov.b32 %r1, 9;"
        "st.global.b32 [%d8], %r1;",
        {"out": out},
    )
    assert out.tolist() == [9 if not guard or n < 5 else 7 for n in range(LANES)]


def test_lanes_that_part_meet_again() -> None:
    """Each lane runs a loop as often as its number says."""
    out = torch.zeros(LANES, dtype=torch.int32)
    run_ptx(
        f"{addresses('%d0')} mov.b32 %r1, 0; mov.b32 %r2, 0;\nagain:\n setp.ge.u32 %p1, %r2, %r0;\n"
        " @%p1 bra done;\n add.s32 %r1, %r1, 3;\n add.s32 %r2, %r2, 1;\n bra again;\ndone:\n"
        " bar.sync 0;\n st.global.b32 [%d8], %r1;",
        {"out": out},
    )
    assert out.tolist() == [3 * n for n in range(LANES)]
