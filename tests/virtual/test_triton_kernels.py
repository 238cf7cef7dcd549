"""Kernels of Triton as anybody writes them: tuning, printing, caches, atomic operations."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attn_graph.testing.gpu import Fault, virtual_gpu
from tests.support.virtual_cases import GENERATIONS, machine

PROBES: Any = importlib.import_module("tests.support.triton_probes")  # it imports Triton
N = 128  # a number for each thread: fewer would be loaded by two warps, one of which is late
ROWS = torch.arange(5 * N, dtype=torch.int32).view(5, N)


def test_autotune_takes_its_first_configuration_and_says_so() -> None:
    x, out = torch.randn(100), torch.zeros(100)
    with virtual_gpu("h100") as device:
        PROBES.tuned[lambda given: (-(-100 // given["BLOCK"]),)](x, out, 100)
    assert torch.equal(out, x + 32)
    assert any("takes the first configuration" in note for note in device.notes)


@pytest.mark.parametrize("sm", GENERATIONS)
def test_kernels_print(sm: int, capsys: pytest.CaptureFixture[str]) -> None:
    with virtual_gpu(machine(sm)):
        PROBES.talking[(2,)](torch.tensor([1.5, -2.0] * 16), N=32, num_warps=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 64
    assert lines[33].split() == ["pid", "(1,", "0,", "0)", "idx", "(", "1)", "x:", "-2.000000"]


def test_an_assertion_of_a_kernel_that_fails_is_a_fault() -> None:
    with virtual_gpu("h100"), pytest.raises(Fault, match="an assertion fails in thread 4: x is"):
        PROBES.talking[(1,)](torch.tensor([0.0] * 4 + [7.0] * 28), N=32, num_warps=1, debug=True)


@pytest.mark.parametrize("sm", GENERATIONS)
def test_caches_change_no_result(sm: int) -> None:
    x, out = torch.randn(256), torch.zeros(256)
    with virtual_gpu(machine(sm)):
        PROBES.cached[(1,)](x, out, N=256)
    torch.testing.assert_close(out, 5 * x)


def test_programs_run_on_multiprocessors_that_the_gpu_has() -> None:
    out = torch.full((200,), -1, dtype=torch.int32)
    with virtual_gpu("h100") as device:
        PROBES.multiprocessor[(200,)](out)
    assert set(out.tolist()) == {*range(device.target.multiprocessors or 0)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 3])
def test_atomic_sums_of_programs_are_of_all(dtype: torch.dtype, seed: int | None) -> None:
    x, out = (ROWS % 7).to(dtype), torch.ones(N, dtype=dtype)
    with virtual_gpu("h100", seed=seed) as device:
        PROBES.add_rows[(5,)](x, out, N=N)
    assert torch.equal(out, x.sum(0).to(dtype) + 1)
    assert any("in any order" in note for note in device.notes) == dtype.is_floating_point


def test_atomic_extremes_are_of_all_programs() -> None:
    out = torch.tensor([999, -999, 0, 0], dtype=torch.int32)
    with virtual_gpu("h100", seed=1):
        PROBES.extremes_of[(5,)](ROWS, out, N=N)
    assert out.tolist() == [0, 5 * N - 1, 1023, 5 * N]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_lock_orders_programs(seed: int | None) -> None:
    out, lock = torch.zeros(N, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with virtual_gpu("h100", seed=seed):
        PROBES.add_in_turn[(5,)](ROWS, out, lock, N=N, LOCKED=True)
    assert torch.equal(out, ROWS.sum(0).int())


def test_programs_without_a_lock_are_a_fault() -> None:
    out, lock = torch.zeros(2, N, dtype=torch.int32)
    with virtual_gpu("h100"), pytest.raises(Fault, match=r"stored by program \(0, 0, 0\)"):
        PROBES.add_in_turn[(5,)](ROWS, out, lock, N=N, LOCKED=False)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_report_names_both_accesses_their_bytes_and_the_usual_edit(seed: int | None) -> None:
    with virtual_gpu("h100", seed=seed), pytest.raises(Fault) as caught:
        PROBES.add_next[(6,)](torch.zeros(7))
    first, here, before, usual = str(caught.value).splitlines()
    assert first.startswith("add_next, program (")
    assert first.count("triton_probes.py:") == 2
    assert "x_ptr[" in here
    assert "(bytes " in here
    assert "by warp 0" in here
    assert "before it, warp" in before
    assert "programs in PTX line" in before
    assert "usually: " in usual


@virtual_gpu("h100")
def test_a_virtual_gpu_decorates_tests() -> None:
    out = torch.zeros(N, dtype=torch.int32)
    PROBES.add_rows[(5,)](ROWS, out, N=N)
    assert torch.equal(out, ROWS.sum(0).int())
