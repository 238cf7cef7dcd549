"""Our kernels as GPUs get them, executed: both passes, held to the formula by the accuracy rule."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.kernels.tilings import Pass
from attn_graph.lowering.triton.divisions import Division
from attn_graph.lowering.triton.plan import FlashBuilder
from attn_graph.testing.gpu import virtual_gpu
from attn_graph.testing.strategies import seeds, simple_graphs
from tests.support.virtual_cases import (
    CASES,
    CAUSAL,
    GENERATIONS,
    attention,
    by_turns,
    check_shown,
    execute,
    machine,
    plan_on,
    shorten_note,
)

Golden = Callable[[object], None]
QUICK = (  # a share for the default tests
    *((80, name) for name in ("boolean mask", "one query", "odd gaps", "wide heads")),
    *((90, name) for name in ("causal, groups", "segments", "f32, groups", "one key")),
    (100, "one query of 64"),
    (120, "window"),
)


@pytest.mark.parametrize(("sm", "name"), QUICK)
def test_a_kernel_gives_what_the_formula_says(sm: int, name: str) -> None:
    with virtual_gpu(machine(sm)) as device:
        execute(device, CASES[name]())
    check_shown(device, name)


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "name"), by_turns(CASES, QUICK))
def test_every_kernel_gives_what_the_formula_says(sm: int, name: str) -> None:
    with virtual_gpu(machine(sm), seed=1) as device:
        outcome = execute(device, CASES[name]())
    assert not outcome.refusal
    check_shown(device, name)


@pytest.mark.slow
@pytest.mark.parametrize("triton", [version("triton")])
def test_what_kernels_leave_out_is_known(triton: str, golden: Golden) -> None:
    """What the PTX ISA asks for and this version of Triton does not write: see the report."""
    found = set[str]()
    for sm in (90, 100):
        for name in ("bf16", "segments", "soft cap"):
            with virtual_gpu(machine(sm)) as device:
                execute(device, CASES[name]())
            found |= {f"sm_{sm} {shorten_note(note)}" for note in device.notes}
    golden("\n".join(sorted(found)))


@pytest.mark.slow
@given(sm=st.sampled_from(GENERATIONS), graph=simple_graphs(), seed=seeds)
@settings(max_examples=max(4, settings().max_examples // 3))  # each compiles and is executed
def test_drawn_graphs_give_what_the_formula_says(sm: int, graph: ag.Graph, seed: int) -> None:
    with virtual_gpu(machine(sm), seed=seed) as device:
        outcome = execute(device, graph, seed)
    if outcome.refusal:
        reject()
    assert outcome.programs


@pytest.mark.parametrize(("sm", "size"), [(80, 5), pytest.param(90, 64, marks=pytest.mark.slow)])
def test_warps_that_join_parts_agree_on_every_bit(
    sm: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several warps hold the sum of a row, of products that a fused multiplication does not round:
    where their order differed, the last bit was that of the warp that stored last."""
    usual = FlashBuilder.divide

    def in_parts(self: FlashBuilder, pass_: Pass, *given: Any, **named: Any) -> Division:
        own = usual(self, pass_, *given, **named)
        return evolve(own, parts=3) if pass_ == "forward" else own

    monkeypatch.setattr(FlashBuilder, "divide", in_parts)
    ag.clear_cache()
    graph = attention(M=70, N=200, D=size, dtype=torch.float32, mask=CAUSAL)
    with virtual_gpu(machine(sm)) as device:
        plan = plan_on(device, graph, "triton")
        assert "merge_parts: " in str(plan if isinstance(plan, str) else plan.explain())
        assert execute(device, graph).programs
    ag.clear_cache()
