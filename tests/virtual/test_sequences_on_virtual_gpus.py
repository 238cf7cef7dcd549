"""Packed sequences, keys in pages, and tangents, by compiled kernels on virtual GPUs."""

from __future__ import annotations

from functools import partial

import pytest

import attn_graph as ag
from attn_graph.lowering.codegen.launches import HOMES
from attn_graph.spec import FLOATS
from attn_graph.testing.gpu import VirtualGpu, virtual_gpu
from tests.lowering.test_gpu_sequences import (
    FREED,
    PACKED,
    PAGED,
    Sizes,
    check_freed,
    freed_case,
    packed_case,
    paged_case,
)
from tests.lowering.test_tangents import check_gradient_tangents, check_tangents
from tests.support import ragged
from tests.support.virtual_cases import CASES, SHOWN, by_turns, check_shown, machine

SIZES = Sizes((70, 1, 0), (71, 9, 40), ((3, 35), (0, 2), (0, 0)), (2, 1), 64)
STEPS = Sizes((1, 0, 5, 1), (300, 9, 131, 40), ((3, 2), (0, 2), (40, 0), (0, 0)), (8, 2), 64)
MIXED = Sizes((1, 70, 0, 5, 1), (131, 300, 9, 40, 77), ((0, 0),) * 5, (8, 2), 64)
STEPPED = ("causal", "sinks, gaps", "soft cap, alibi", "listed", "packed chunks", "a row a page")
PUSHED = ("causal, groups", "window", "soft cap", "alibi", "bf16", "f32", "segments")
TWICE = ("causal, groups", "soft cap", "f32", "segments", "dropout", "bias", "slopes")
QUICK = {(80, "packed, gaps"), (90, "pages, packed chunks"), (90, "tangents, window")}
QUICK |= {(sm, f"{kind}, packed chunks") for sm in (80, 90, 100) for kind in ("steps", "mixed")}


def plan_on(device: VirtualGpu, graph: ag.Graph) -> ag.Plan:
    """Triton's plan."""
    ag.default_workspace().release()
    return ag.compile(graph, target=device.target, backends=("triton",))


def run_packed(device: VirtualGpu, name: str) -> None:
    case = packed_case(name, SIZES, stats=True)
    plan = plan_on(device, case.graph)
    ragged.check_case(case, plan, "cpu")
    ragged.check_gradients(case, plan, 7, "cpu")


def run_paged(device: VirtualGpu, name: str) -> None:
    case = paged_case(name, SIZES)
    plan = plan_on(device, case.graph)
    ragged.check_case(case, plan, "cpu")
    ragged.check_gradients(case, plan, 7, "cpu")


def run_steps(device: VirtualGpu, name: str) -> None:
    """Few packed queries of each sequence: programs share the keys of a head."""
    if name in PAGED:
        paged = paged_case(name, STEPS)
        ragged.check_case(paged, plan_on(device, paged.graph), "cpu")
    else:
        packed = packed_case(name, STEPS, stats=True)
        ragged.check_case(packed, plan_on(device, packed.graph), "cpu")
    assert {"split_forward", "merge_parts"} <= {*device.kernels}


def run_mixed(device: VirtualGpu, name: str) -> None:
    """One packed query of some sequences, and many of another: two kinds of programs."""
    case = paged_case(name, MIXED)
    plan = plan_on(device, case.graph)
    ragged.check_case(case, plan, "cpu")
    assert {"split_forward", "merge_parts", "forward"} <= {*device.kernels}


def run_freed(device: VirtualGpu, name: str) -> None:
    case = freed_case(name, SIZES)
    check_freed(case, plan_on(device, case.graph), "cpu")


def run_tangents(device: VirtualGpu, name: str) -> None:
    check_tangents(partial(plan_on, device), CASES[name](), ("q", "k", "v"), 3)


def run_gradient_tangents(device: VirtualGpu, name: str) -> None:
    graph = CASES[name]()
    names = [x.name for x in graph.inputs if x.spec.dtype in FLOATS]
    check_gradient_tangents(partial(plan_on, device), graph, names, names, 3, False)


BODIES = {
    **{f"packed, {name}": (run_packed, name) for name in PACKED},
    **{f"pages, {name}": (run_paged, name) for name in PAGED},
    **{f"steps, {name}": (run_steps, name) for name in (*PACKED, *PAGED) if name in STEPPED},
    **{f"mixed, {name}": (run_mixed, name) for name, (_, packed, *_) in PAGED.items() if packed},
    **{f"tangents, {name}": (run_tangents, name) for name in PUSHED},
    **{f"tangents of gradients, {name}": (run_gradient_tangents, name) for name in TWICE},
}


def test_every_kernel_is_shown_by_a_case() -> None:
    assert set().union(*SHOWN.values()) == {*HOMES}
    assert {*SHOWN} <= {*CASES, *BODIES}


@pytest.mark.parametrize(("sm", "name"), sorted(QUICK))
def test_a_kernel_of_sequences_gives_what_the_formula_says(sm: int, name: str) -> None:
    run, case = BODIES[name]
    with virtual_gpu(machine(sm)) as device:
        run(device, case)
    check_shown(device, name)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("name", FREED)
def test_compiled_kernels_read_no_freed_pages(sm: int, name: str) -> None:
    with virtual_gpu(machine(sm)) as device:
        run_freed(device, name)
        assert device.programs


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "name"), by_turns(BODIES, QUICK))
def test_every_kernel_of_sequences_gives_what_the_formula_says(sm: int, name: str) -> None:
    run, case = BODIES[name]
    with virtual_gpu(machine(sm), seed=2) as device:
        run(device, case)
    check_shown(device, name)
