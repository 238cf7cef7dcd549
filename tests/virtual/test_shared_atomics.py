"""Atomic operations on shared memory, and the barrier of a cluster that has one program."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_graph.testing.gpu import Fault, UnknownInstructionError, virtual_gpu
from tests.support.ptx_bodies import HERE
from tests.support.ptx_programs import run_ptx
from tests.support.virtual_cases import GENERATIONS, machine

PROBES: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
WORD = 0xFFFFFFFF
CHANGES: dict[str, Callable[[int, int], int]] = {  # of a place, by the number of a thread
    "add.u32": lambda old, n: (old + n) & WORD,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda old, n: old & n,
    "or.b32": lambda old, n: old | n,
    "xor.b32": lambda old, n: old ^ n,
    "exch.b32": lambda old, n: n,
    "inc.u32": lambda old, n: 0 if old >= n else old + 1,
    "dec.u32": lambda old, n: n if old == 0 or old > n else old - 1,
}
SET = "and.b32 %r4, %r0, 3; mad.lo.s32 %r5, %r4, 4, %r1; @%p2 st.shared.b32 [%r3], %r0; bar.sync 0;"
READ = "@%p2 ld.shared.b32 %r6, [%r3]; @%p2 st.global.b32 [%d9], %r6;"  # by the first warp


def run(body: str, seed: int | None = None) -> tuple[list[int], set[str]]:
    """What a program of two warps leaves in a tensor of 64 numbers; and the notes."""
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    notes = run_ptx(HERE + body, {"x": x, "out": out}, threads=64, seed=seed)
    return [n & WORD for n in out.tolist()], notes


@pytest.mark.parametrize("change", CHANGES)
@given(seed=st.none() | st.integers(0, 99))
def test_threads_change_a_place_of_shared_memory_in_some_order(
    change: str, seed: int | None
) -> None:
    at_once = f"atom.shared.{change} %r7, [%r5], %r0;"
    seen, _ = run(f"{SET} {at_once} bar.sync 0; st.global.b32 [%d9], %r7;", seed)
    left, _ = run(f"{SET} {at_once} bar.sync 0; {READ}", seed)
    for place in range(4):  # each finds what another one left, but for the first and the last
        threads = range(place, 64, 4)
        made = [place, *(CHANGES[change](seen[n], n) for n in threads)]
        assert sorted(made) == sorted([*(seen[n] for n in threads), left[place]])


def test_a_seed_draws_the_order_of_threads() -> None:
    body = f"{SET} atom.shared.add.u32 %r7, [%r5], 1; bar.sync 0; st.global.b32 [%d9], %r7;"
    seen = {tuple(run(body, seed)[0]) for seed in (None, 1, 2)}
    assert len(seen) == 3
    assert all(sorted(x[place::4]) == [*range(place, place + 16)] for x in seen for place in (0, 3))


def test_a_place_is_exchanged_if_it_holds_what_a_thread_names() -> None:
    body = f"{SET} atom.shared.cas.b32 %r7, [%r5], 2, 77; bar.sync 0; {READ}"
    assert run(body)[0][:5] == [0, 1, 77, 3, 4]


ADD = "red.shared.add.u32 [%r5], 1;"
FAULTS = {  # statements of two warps, and what is said of them
    f"{ADD} {READ}": "a load of shared memory, bytes 0 to 3 is not ordered after the atomic",
    f"{ADD} @%p2 st.shared.b32 [%r3], 5;": "is not ordered after the atomic operation by warp 1",
    f"@%p2 ld.shared.b32 %r6, [%r3]; {ADD}": "is not ordered after the read by warp 0",
    f"@%p2 st.shared.b32 [%r3], 5; {ADD}": "is not ordered after the write by warp 0",
    "red.shared.add.u32 [%r5+200], 1;": "to which nothing was written",
    "red.shared.add.u32 [%r5+2], 1;": "at no multiple of 4",
}


@pytest.mark.parametrize("body", FAULTS)
def test_other_accesses_are_ordered_with_atomic_operations(body: str) -> None:
    with pytest.raises(Fault, match=FAULTS[body]):
        run(f"{SET} {body}")


def test_a_barrier_orders_atomic_operations_with_others() -> None:
    again = f"bar.sync 0; @%p2 st.shared.b32 [%r3], %r0; bar.sync 0; {READ}"
    assert run(f"{SET} {ADD} {ADD} {again}")[0][:32] == [*range(32)]


@pytest.mark.parametrize(("kind", "told"), [("u32", False), ("f32", True)])
def test_floats_added_in_any_order_are_noted(kind: str, told: bool) -> None:
    _, notes = run(f"{SET} red.shared.add.{kind} [%r5], 0; bar.sync 0;")
    assert any("floats are added to shared memory in any order" in x for x in notes) == told


def test_warps_that_wait_for_each_other_by_atomic_operations_are_a_limit() -> None:
    with pytest.raises(UnknownInstructionError, match="by which warps wait for each other"):
        run(f"{SET} atom.acquire.cta.shared.add.u32 %r7, [%r5], 0;")


@pytest.mark.parametrize("sm", GENERATIONS)
def test_a_histogram_of_triton_counts(sm: int) -> None:
    x, out = torch.randint(0, 16, (512,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with virtual_gpu(machine(sm)):
        PROBES.count_numbers[(1,)](x, out, N=512, B=16)
    assert torch.equal(out, x.bincount(minlength=16).int())


# The barrier of a cluster

STORE = "@%p2 st.shared.b32 [%r3], %r0;"  # by the first warp
LOAD = "and.b32 %r4, %r0, 31; mad.lo.s32 %r5, %r4, 4, %r1; ld.shared.b32 %r6, [%r5];"
ARRIVE, WAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_barrier_of_a_cluster_orders_all_warps_each_time(seed: int | None) -> None:
    once = f"{ARRIVE} {WAIT}"
    body = f"{STORE} {once} {LOAD} {once} @!%p2 st.shared.b32 [%r5], %r0; {once} {LOAD}"
    assert run(f"{body} st.global.b32 [%d9], %r6;", seed)[0] == [*range(32, 64)] * 2


def test_a_warp_that_has_ended_is_not_awaited_in_the_cluster() -> None:
    body = f"@!%p2 ret;\n {ARRIVE} {WAIT} st.global.b32 [%d9], %r0;"
    assert run(body)[0] == [*range(32), *[0] * 32]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"{STORE} barrier.cluster.arrive.relaxed.aligned; {WAIT} {LOAD}", "is not ordered after"),
        (f"{STORE} {ARRIVE} {LOAD} {WAIT}", "is not ordered after the write by warp 0"),
        (WAIT, "barrier.cluster.wait without the other"),
        (f"{ARRIVE} {ARRIVE}", "barrier.cluster.arrive without the other"),
        (f"@%p2 bra low;\n {ARRIVE} {WAIT}\nlow:\n bar.sync 0;", "deadlock"),
    ],
)
def test_a_wrong_use_of_the_barrier_of_a_cluster_is_a_fault(body: str, text: str) -> None:
    with pytest.raises(Fault, match=text):
        run(body)
