"""What masks and modifiers allocate while they are asked, against PyTorch's allocator."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given

import attn_graph as ag
from attn_graph.ir.modifiers import change_
from attn_graph.ir.passes import simplify
from attn_graph.lowering.codegen.device_code import Tracer
from attn_graph.lowering.cpu.asking import Extent, ask_mask, ask_modifier, depends
from attn_graph.lowering.problem import sole
from attn_graph.masks.places import Block, Place
from attn_graph.testing.strategies import graphs
from tests.machine.test_memory import BOTTOM, WINDOW, allocated

FLAGS = ag.TensorSpec((2, 1, 1, 48), torch.bool)
POSITIONS = ag.TensorSpec((2, 64), torch.int64), ag.TensorSpec((2, 48), torch.int64)
ASKED: dict[str, dict[str, Any]] = {
    "band": {"mask": WINDOW},
    "moved band": {"mask": WINDOW, "kv_lengths": ag.TensorSpec((2,), torch.int64)},
    "booleans": {"keep": FLAGS, "kv_lengths": ag.TensorSpec((2,), torch.int64)},
    "segments": {"segments": POSITIONS, "mask": WINDOW | ag.Prefix(3)},
    "not": {"mask": ~(ag.Prefix(3) | BOTTOM)},
}


@pytest.mark.parametrize("name", ASKED)
def test_asking_takes_what_the_axes_of_each_leaf_make(name: str) -> None:
    q, k = (ag.TensorSpec((2, 1, n, 8), torch.float32) for n in (64, 48))
    problem = sole(ag.compile(ag.attention(q, k, k, align="bottom_right", **ASKED[name])).graph)
    assert problem is not None
    mask, specs = problem.node.mask, problem.by_role.mask
    assert mask is not None
    asked = ask_mask(mask, specs, Extent(*problem.sizes))
    data = {n: torch.ones(x.shape, dtype=x.dtype) for n, x in specs.items()}
    at = Place.of(Block(range(2), range(1), range(64), 1, 64, 48, data), range(48))
    keep, held, most = allocated(lambda: mask.keep(at))
    assert isinstance(keep, torch.Tensor)
    assert held == asked.made == prod(keep.shape)
    numbers = 2 * torch.int64.itemsize  # a bound, of each batch entry where lengths move it
    assert most - numbers <= asked.most <= 1.25 * most


SLOPES = ag.TensorSpec((3,), torch.float32)
TABLE = ag.TensorSpec((3, 9), torch.float32)
STEPS: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": True},
    "slopes": {"alibi": SLOPES},
    "moved alibi": {"alibi": SLOPES, "kv_lengths": ag.TensorSpec((2,), torch.int64)},
    "bias": {"bias": ag.TensorSpec((2, 1, 64, 48), torch.float32)},
    "narrow bias": {"bias": ag.TensorSpec((2, 1, 64, 48), torch.bfloat16)},
    "soft cap": {"soft_cap": 3.0},
    "table": {"modifiers": (ag.RelativeBias(9, "top_left"),), "table": TABLE},
    "moved table": {
        "modifiers": (ag.RelativeBias(9, "bottom_right", ("kv_lengths",)),),
        "table": TABLE,
        "kv_lengths": ag.TensorSpec((2,), torch.int64),
    },
    "table of places": {
        "modifiers": (ag.RelativeBias(9, places=True),),
        "table": TABLE,
        "places": ag.TensorSpec((64, 48), torch.int64),
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_is_said_beside_its_scores(name: str) -> None:
    dtype = torch.bfloat16 if name == "narrow bias" else torch.float32
    q, k = (ag.TensorSpec((2, 3, n, 8), dtype) for n in (64, 48))
    graph = ag.compile(ag.attention(q, k, k, align="bottom_right", **STEPS[name])).graph
    problem = sole(graph)
    assert problem is not None
    (step,), (specs,) = problem.node.modifiers, problem.by_role.modifiers
    told = ask_modifier(step, specs, Extent(*problem.sizes), torch.float32.itemsize)
    data = {n: torch.ones(x.shape, dtype=x.dtype) for n, x in specs.items()}
    at = Place.of(Block(range(2), range(3), range(64), 3, 64, 48, data), range(48))
    s = torch.ones(problem.sizes)
    _, _, most = allocated(lambda: change_(step, s, at))
    assert most <= told + 1024  # positions of a row, with lengths added
    assert told <= 1.25 * most


@given(graphs())
def test_data_of_entries_and_heads_are_of_their_axes(graph: ag.Graph) -> None:
    """Booleans that differ between them have no other axes than tracing says."""
    problem = sole(simplify(graph))
    assume(problem is not None and problem.node.mask is not None and not problem.is_empty)
    assert problem is not None
    assert problem.node.mask is not None
    b, h, i, j = map(range, problem.sizes)
    data = {n: torch.zeros(x.shape, dtype=x.dtype) for n, x in problem.by_role.mask.items()}
    at = Place.of(Block(b, h, i, len(h), len(i), len(j), data), j)
    keep = torch.as_tensor(problem.node.mask.keep(at))
    shape = (1,) * (4 - keep.ndim) + tuple(keep.shape)
    assert {axis for axis, n in zip("bh", shape, strict=False) if n > 1} <= {*depends(problem)}


@pytest.mark.parametrize("mask", [None, ag.Causal(), WINDOW, ~ag.Causal() & ag.Window(9, 9)])
def test_a_mask_of_distances_alone_is_not_traced(
    mask: ag.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = ag.TensorSpec((2, 3, 64, 8), torch.float32)
    problem = sole(simplify(ag.attention(x, x, x, mask=mask)))
    assert problem is not None

    def never(*_: object) -> Tracer:
        raise AssertionError(mask)

    monkeypatch.setattr(Tracer, "of", never)
    assert depends(problem) == ""
