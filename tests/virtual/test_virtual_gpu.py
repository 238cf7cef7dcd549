"""A virtual GPU as users have it: a context, a target, and errors that name the line."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.machine.imports import load_modules
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.gpu import Fault, UnknownInstructionError, virtual_gpu
from attn_graph.testing.gpu.device import load_driver, load_launcher, omissions_of
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.regions import Unset
from attn_graph.testing.tensors import tensors_for
from tests.support.ptx_programs import run_ptx
from tests.support.sources import ROOT
from tests.support.virtual_cases import attention, lay_aligned

SCRIPT = """
import torch
import attn_graph as ag
from attn_graph.testing.gpu import virtual_gpu
q, k, v = (torch.randn(1, 2, 70, 64, dtype=torch.float16, requires_grad=True) for _ in "qkv")
with virtual_gpu("h100") as device:
    graph = ag.attention(*map(ag.TensorSpec.like, (q, k, v)), mask=ag.Causal())
    plan = ag.compile(graph, target=device.target, backends=("triton",))
    plan(q, k, v).sum().backward()
print(plan.backend, device.programs > 0, all(x.grad.isfinite().all() for x in (q, k, v)))
"""


def test_a_script_runs_both_passes_of_a_plan() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "triton True True\n"), done.stderr


def test_plans_take_tensors_of_the_cpu_within_the_block_alone() -> None:
    x = torch.randn(1, 1, 16, 16, dtype=torch.float16)
    graph = ag.attention(*[ag.TensorSpec.like(x)] * 3)
    with virtual_gpu("a100") as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        plan.check_tensors((x, x, x))
    with pytest.raises(ag.PlanTargetError, match="a100"):
        plan.check_tensors((x, x, x))


def test_the_gpu_of_the_block_is_the_default_and_only_what_it_runs_a_candidate() -> None:
    """Whatever is planned before for the GPU that it stands for, and whatever is in the store."""
    x = torch.randn(1, 1, 16, 16, dtype=torch.float16)
    graph = ag.attention(*[ag.TensorSpec.like(x)] * 3)
    before = ag.compile(graph, target="h100", backends=("triton", "math"))
    with virtual_gpu("h100") as device:
        plan = ag.compile(graph)
        assert plan.target == device.target
        assert plan is not before
        assert plan.backend == "triton"
        for name in ("cudnn", "torch_flash", "torch_efficient", "torch_cudnn"):
            reasons = [str(r) for r in dict(plan.refusals)[name]]
            assert "runs on a real GPU, and h100 (cuda sm_90) is emulated by the CPU" in reasons
        assert ag.explain(graph).target == device.target
    assert ag.compile(graph).target == ag.Target.here()


def test_a_plan_called_after_the_block_says_that_its_gpu_is_gone() -> None:
    """However often it was called within, forward and backward, with named sizes too."""
    q, k, v = (torch.randn(1, 1, 16, 16, dtype=torch.float16, requires_grad=True) for _ in "qkv")
    named = ag.TensorSpec((1, 1, ag.Dim("M", 64), 16), torch.float16)
    graphs = [ag.attention(*[spec] * 3) for spec in (ag.TensorSpec.like(q), named)]
    with virtual_gpu("h100"):
        plans = [ag.compile(graph, backends=("triton",)) for graph in graphs]
        pending: list[torch.Tensor] = []
        for plan in plans:
            for _ in range(3):
                o = plan(q, k, v)
                assert isinstance(o, torch.Tensor)
                pending.append(o)
                torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    for plan in plans:
        with pytest.raises(ag.PlanTargetError, match="the plan is for h100"):
            plan(q, k, v)
    with pytest.raises(ag.PlanTargetError, match="the plan is for h100"):
        pending[0].sum().backward()


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_triton_looks_for_a_kernel_once_for_where_tensors_begin(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of 16 bytes, and the copy engine, need tensors that begin at multiples of 16 bytes."""
    graph = attention(M=20, H=1, stats=False)
    aligned = tuple(map(lay_aligned, tensors_for(graph, 0)))
    moved = tuple(torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for x in aligned)
    for x, y in zip(moved, aligned, strict=True):
        x.copy_(y)
    jit, looked = load_modules("triton.runtime.jit").JITFunction, list[str]()
    run = jit.run

    def look(self: Any, *arguments: object, **options: object) -> object:  # Any: Triton's
        looked.append(self.__name__)
        return run(self, *arguments, **options)

    monkeypatch.setattr(jit, "run", look)
    with virtual_gpu(gpu) as device:
        plan = ag.compile(graph, target=device.target, backends=("triton",))
        for tensors, count in ((aligned, 1), (aligned, 1), (moved, 2), (moved, 2), (aligned, 2)):
            check_outputs(plan, graph, tensors)
            assert looked == ["forward"] * count


def test_a_parameter_has_an_address_of_32_bits_too() -> None:
    """Among the parameters, from where a generic one is made: Triton 3.9 writes it so."""
    for move in ("mov.b32 %r1, x; cvt.u64.u32 %d8, %r1;", "mov.b64 %d8, x;"):
        body = f"{move} cvta.param.u64 %d8, %d8; prefetch.tensormap [%d8];"
        assert run_ptx(body, {"x": torch.zeros(8)}) == set()


def test_the_driver_refuses_attributes_of_newer_ones() -> None:
    """Triton 3.8 asks for shared memory as such drivers take it, and else as older ones do."""
    kernel = ctypes.create_string_buffer(4096)
    with virtual_gpu("a100"):
        assert load_driver().cuFuncSetAttribute(kernel, 8, 1024) == 0  # bytes of shared memory
        assert load_driver().cuFuncSetAttribute(kernel, 17, 3)


@pytest.mark.parametrize(("triton", "late"), [("3.6.0", False), ("3.8.0", False), ("3.9.0", True)])
def test_reads_before_a_wait_for_tensor_memory_are_known_of_newer_versions(
    triton: str, late: bool
) -> None:
    assert omissions_of(triton) == (frozenset({Omission.TENSOR_LOADS}) if late else frozenset())


def test_triton_finds_all_functions_of_its_own_driver() -> None:
    with virtual_gpu("a100"):
        found = load_modules("triton.runtime").driver.active.utils
        assert vars(found).keys() == vars(load_launcher()).keys()


def test_one_virtual_gpu_of_a_kind_is_in_use_at_a_time() -> None:
    with (
        virtual_gpu("a100"),
        pytest.raises(RuntimeError, match="another virtual GPU"),
        virtual_gpu("a100"),
    ):
        pass


FAULTS = {  # statements, and what is wrong with them
    "a load of bytes of x that belong to no element": "ld.global.b32 %r1, [%d0+4];",
    "a store to 8 bytes of global memory at no multiple of 8": "st.global.b64 [%d0+4], %d0;",
    "which is in no tensor": "ld.global.b32 %r1, [%d0+4096];",
    "to which nothing was written": "ld.shared.b32 %r1, [global_smem];",
    "of 4096 bytes of shared memory": "st.shared.b32 [global_smem+4096], %r0;",
    "cp.async of": "mov.b32 %r1, global_smem; cp.async.ca.shared.global [%r1], [%d0+4], 4;",
    "no mbarrier is at byte 0": "mov.b32 %r1, global_smem; mbarrier.inval.shared.b64 [%r1];",
    "it ends before a copy has landed": (
        "setp.eq.b32 %p1, %r0, 0; mov.b32 %r1, global_smem;"
        "@%p1 cp.async.ca.shared.global [%r1], [%d0], 4; cp.async.commit_group;"
    ),
    "deadlock: warp 0 waits at barrier 0 of 64 threads": "bar.sync 0, 64;",
    "is executed by a part of it": "setp.lt.u32 %p1, %r0, 5; @%p1 bar.sync 0;",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_names_the_line(text: str) -> None:
    x = torch.zeros(8)[::2]
    with pytest.raises(Fault, match=text) as caught:
        run_ptx(FAULTS[text], {"x": x})
    assert "deadlock" in text or "it ends" in text or "PTX line" in str(caught.value)


RACES = {  # what two warps do, and what is wrong; %p1: the first one
    "a store of other bytes by two threads at once": "st.shared.b32 [global_smem], %r0;",
    "a load of bytes of x is not ordered after the store by warp 0": (
        "@%p2 st.global.b32 [%d0], %r0; @!%p1 ld.global.b32 %r1, [%d0];"
    ),
    "a load of shared memory, bytes 0 to 3 is not ordered after the write by warp 0": (
        "@%p2 st.shared.b32 [global_smem], %r0; @!%p1 ld.shared.b32 %r1, [global_smem];"
    ),
    "is not ordered after the read by warp 0": (
        "@%p2 st.shared.b32 [global_smem], %r0; bar.sync 0;"
        "@%p1 ld.shared.b32 %r1, [global_smem]; @%p3 st.shared.b32 [global_smem], %r0;"
    ),
}
SIDES = """setp.lt.u32 %p1, %r0, 32; setp.eq.b32 %p2, %r0, 0; setp.eq.b32 %p3, %r0, 32;
"""


@pytest.mark.parametrize("text", RACES)
def test_two_warps_may_not_touch_the_same_bytes_unordered(text: str) -> None:
    with pytest.raises(Fault, match=text):
        run_ptx(SIDES + RACES[text], {"x": torch.zeros(8)}, threads=64)


def test_two_programs_may_not_store_to_the_same_bytes() -> None:
    body = f"{SIDES} mov.u32 %r1, %ctaid.x; @%p2 st.global.b32 [%d0], %r1;"
    with pytest.raises(Fault, match=r"stored by program \(0, 0, 0\) in PTX line \d+ \[PTX line"):
        run_ptx(body, {"x": torch.zeros(8)}, programs=2)


def test_new_memory_is_not_read_before_it_is_written() -> None:
    x, unset = torch.empty(8), Unset()
    unset.add(x)
    run_ptx("st.global.b32 [%d0], 7; ld.global.b32 %r1, [%d0];", {"x": x}, unset=unset)
    with pytest.raises(Fault, match="to which nothing was written"):
        run_ptx("ld.global.b32 %r1, [%d0+4];", {"x": x}, unset=unset)


UNKNOWN = {  # an instruction, a modifier, a number of operands
    "sqrt.rm.f32": "sqrt.rm.f32 %r1, %r0;",
    "add.sat.s32": "add.sat.s32 %r1, %r0, %r0;",
    "4 operands": "add.s32 %r1, %r0, %r0, %r0;",
    "mma.sync.aligned.m16n8k4": "mma.sync.aligned.m16n8k4.row.col.f32.tf32 {%r1}, {%r2}, {%r3};",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_instruction_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(UnknownInstructionError, match=r"PTX line \d+") as caught:
        run_ptx(UNKNOWN[text], {"x": torch.zeros(8)})
    assert text in str(caught.value)
