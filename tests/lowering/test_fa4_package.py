"""FlashAttention 4 as it is installed: its own refusals beside our table, and what it compiles."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.vjp import backward, cotangent_specs, main_outputs
from attn_graph.lowering.fa4.backend import BACKEND
from attn_graph.lowering.fa4.call import Fa4Call
from attn_graph.lowering.libraries.fa4_limits import LIMITS, Fa4Case
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.request import Options, Request
from tests.support.fa4_questions import HAS_PACKAGE, WITHOUT, ask_package

pytestmark = pytest.mark.skipif(not HAS_PACKAGE, reason=WITHOUT)

GPUS = {sm: evolve(ag.Target.of(name), sm=sm)
        for sm, name in ((80, "a100"), (90, "h200"), (100, "b200"), (120, "rtx4090"))}  # fmt: skip
WIDTHS = ((4, 4), (8, 8), (12, 64), (64, 64), (72, 40), (96, 96), (128, 64), (128, 128), (136, 136),
          (192, 128), (192, 192), (256, 128), (256, 256), (264, 264))  # fmt: skip
MASKS = (None, ag.Causal("bottom_right"), ag.Window(64, 8, "bottom_right"),
         ag.Causal("top_left") & (ag.Window(64, 0, "top_left") | ag.Prefix(4)))  # fmt: skip


def draw_case(draw: random.Random, sm: int) -> Fa4Case:
    """A case of the grid."""
    D, E = draw.choice(WIDTHS)
    H, G = draw.choice(((2, 2), (4, 2), (4, 1)))
    dtype = draw.choice((torch.float16, torch.bfloat16, torch.bfloat16, torch.float32))
    M, N = draw.choice(((1, 300), (200, 300), (300, 300), (513, 300)))
    shapes: tuple[tuple[int, ...], ...] = (2, H, M, D), (2, G, N, D), (2, G, N, E)
    starts: dict[str, Any] = {}
    if draw.random() < 0.3:
        starts = {f"{x}_starts": ag.TensorSpec((3,), torch.int32) for x in ("q", "kv")}
        starts["max_lengths"] = (M, N)
        shapes = (2 * M, H, D), (2 * N, G, D), (2 * N, G, E)
    q, k, v = (ag.TensorSpec(shape, dtype) for shape in shapes)
    sinks = ag.TensorSpec((H,), torch.float32) if draw.random() < 0.2 else None
    soft_cap = 30.0 if draw.random() < 0.2 else None
    mask = draw.choice(MASKS)
    names = draw.choice(((), (), ("kv_lengths",), ("q_lengths", "kv_lengths")))
    ends: dict[str, Any] = {name: ag.TensorSpec((2,), torch.int32) for name in names}
    own: dict[str, Any] = {"mask": mask, "sinks": sinks, "soft_cap": soft_cap, "stats": True}
    graph = ag.attention(q, k, v, **own, **ends, **starts)
    graph = simplify(graph)
    if draw.random() < 0.5:
        given = main_outputs(graph) if draw.random() < 0.7 else graph.differentiable_outputs
        inputs = [n for n, x in enumerate(graph.inputs) if x.spec.dtype.is_floating_point]
        graph = simplify(backward(graph, inputs, cotangent_specs(graph, given)))
    lying = facts_of(graph).once(Lying.for_libraries)
    assert lying is not None
    return Fa4Case(lying, sm, draw.random() < 0.2)


def call_of(case: Fa4Case) -> Fa4Call:
    """The call that would be made of it."""
    return Fa4Call.of(case.lying, case.sm, case.deterministic)


@pytest.mark.parametrize(
    "sm", [pytest.param(sm, marks=() if sm == 90 else pytest.mark.slow) for sm in GPUS]
)
def test_the_table_says_what_the_package_says(sm: int, tmp_path: Path) -> None:
    draw = random.Random(sm)
    cases = [draw_case(draw, sm) for _ in range(160)]
    asked, against = [], []
    for case in cases:
        rules = [
            limit for limit in LIMITS.at(case.place) if limit.reasons(limit.violations(case), case)
        ]
        if not any(rule.says == "unasked" for rule in rules):
            asked.append(case)
            against.append([rule.name for rule in rules])
    calls = [call_of(case).plain(True) for case in asked]
    said = ask_package(calls, GPUS[sm], tmp_path)
    assert len(said) == len(calls)
    told = [
        f"{'false yes' if text else 'false no'}: {text or keys}: {case.problem}"
        for case, keys, text in zip(asked, against, said, strict=True)
        if bool(text) != bool(keys)
    ]
    assert not told, "\n".join(told[:5])
    assert any(against)
    assert not all(against)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 100])
def test_kernels_are_compiled_ahead_and_found_again(
    sm: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes of a mask function with lists, a soft cap and ALiBi, of grouped heads."""
    target = evolve(GPUS[sm], libraries=(("flash-attn-4", "4.0.0b36"),))
    options = Options(store=ag.extend.Store(tmp_path / "store"))
    q, k = (
        ag.TensorSpec((2, 4, 1000, 64), torch.bfloat16),
        ag.TensorSpec((2, 2, 1000, 64), torch.bfloat16),
    )
    forward = ag.attention(q, k, k, mask=MASKS[3], soft_cap=30.0, alibi=True)
    graphs = [simplify(forward), simplify(ag.vjp(forward)[1])]
    made = [BACKEND.lower(Request(graph, target, options)) for graph in graphs]
    told = [x.inspect() for x in made]
    assert [len(x) for x in told] == [1, 3]
    assert all("def keep(" in x.text() and ".entry" in x.text() for x in made)
    assert len([*(tmp_path / "store" / "fa4").rglob("*.o")]) == 4

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a second process compiled")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert [BACKEND.lower(Request(graph, target, options)).inspect() for graph in graphs] == told
