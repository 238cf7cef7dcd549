"""Packed sequences, keys in pages, and tangents, by compiled kernels on virtual GPUs."""

from __future__ import annotations

import pytest

import attn_graph as ag
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.tangents import expect_tangents
from attn_graph.testing.tensors import tensors_for
from tests.lowering import test_packed, test_paged
from tests.lowering.test_gpu_sequences import PACKED, PAGED, Sizes, packed_case, paged_case
from tests.lowering.test_tangents import draw_moves, only_derived
from tests.support.virtual_cases import CASES, machine

SIZES = Sizes((70, 1, 0), (71, 9, 40), ((3, 35), (0, 2), (0, 0)), (2, 1), 64)
GENERATIONS = (80, 90, 100, 120)
PUSHED = ("causal, groups", "window", "soft cap", "alibi", "bf16", "f32", "segments")
QUICK = {(80, "packed, gaps"), (90, "pages, packed chunks"), (90, "tangents, window")}


def plan_on(device: VirtualGpu, graph: ag.Graph) -> ag.Plan:
    """Triton's plan."""
    ag.default_workspace().release()
    return ag.compile(graph, target=device.target, backends=("triton",))


def run_packed(device: VirtualGpu, name: str) -> None:
    case = packed_case(name, SIZES, stats=True)
    plan = plan_on(device, case.packed)
    test_packed.check_case(plan, case, "cpu")
    test_packed.check_gradients(plan, case, 7, "cpu")


def run_paged(device: VirtualGpu, name: str) -> None:
    case = paged_case(name, SIZES)
    plan = plan_on(device, case.graph)
    test_paged.check_case(case, plan, "cpu")
    test_paged.check_gradients(case, plan, 7, "cpu")


def run_tangents(device: VirtualGpu, name: str) -> None:
    attention = only_derived(CASES[name]())
    tensors = tensors_for(attention, 3)
    moves = draw_moves(attention, ("q", "k", "v"), 3)
    plan = plan_on(device, ag.jvp(attention, ["q", "k", "v"]))
    results = run_plan(plan, (*tensors, *moves.values()))
    for x, due in zip(results, expect_outputs(attention, tensors), strict=False):
        due.check(x)
    for x, due in zip(results[2:], expect_tangents(attention, tensors, moves), strict=True):
        due.check(x)


BODIES = {
    **{f"packed, {name}": (run_packed, name) for name in PACKED},
    **{f"pages, {name}": (run_paged, name) for name in PAGED},
    **{f"tangents, {name}": (run_tangents, name) for name in PUSHED},
}


@pytest.mark.parametrize(("sm", "name"), sorted(QUICK))
def test_a_kernel_of_sequences_gives_what_the_formula_says(sm: int, name: str) -> None:
    run, case = BODIES[name]
    with virtual_gpu(machine(sm)) as device:
        run(device, case)
    assert device.programs


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("sm", GENERATIONS)
def test_every_kernel_of_sequences_gives_what_the_formula_says(sm: int, name: str) -> None:
    if (sm, name) in QUICK:
        pytest.skip("is among the default tests")
    run, case = BODIES[name]
    with virtual_gpu(machine(sm), seed=2) as device:
        run(device, case)
    assert device.programs
