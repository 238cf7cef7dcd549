"""Values that begin each key, as in absorbed MLA: to the bit what values of their own give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.triton.programs import reads_v_in_k
from attn_graph.planner.forms.views import core_of
from attn_graph.testing.agreement import check_gradients, check_outputs, run_gradients, run_plan
from attn_graph.testing.strategies import mask_options, score_options, seeds, shapes, specs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.lowering.test_lowering import planned
from tests.support.quantised import kinds, scale_spec

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
SPEC = ag.TensorSpec
SOME = -(-settings().max_examples // 3)
HALF = (torch.half, torch.bfloat16)
Pair = tuple[ag.Graph, ag.Graph]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """An attention whose values begin its keys, and the same with values of their own."""
    size, kind = draw(shapes(most=40, heads=4)), draw(st.sampled_from((torch.float32, torch.half)))
    size = evolve(size, D=draw(st.sampled_from((size.D, 20, 40, 70))))
    size = evolve(size, E=draw(st.integers(1, size.D)))
    q, k = draw(specs(size.q, kind)), draw(specs(size.k, kind))
    options = draw(mask_options(size)) | draw(score_options(size, kind))
    options["stats"] = draw(st.booleans())
    v = SPEC(size.v, kind, k.strides)
    return ag.attention(q, k, size.E, **options), ag.attention(q, k, v, **options)


def check_pair(pair: Pair, tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Equal results; and dk has the dv of values of their own in it."""
    graph, apart = pair
    assert ag.parse(str(graph)) == graph
    size = apart.inputs[2].spec.shape[-1]
    beside = (*tensors[:2], tensors[1][..., :size], *tensors[2:])
    plan, other = planned(graph, BACKEND), planned(apart, BACKEND)
    pairs = zip(run_plan(plan, tensors), run_plan(other, beside), strict=True)
    for a, b in pairs:
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    cotangents = cotangents_for(plan.graph, seed)
    ours, theirs = (
        run_gradients(x, given, cotangents) for x, given in ((plan, tensors), (other, beside))
    )
    dk, dv = theirs.pop("k"), theirs.pop("v")
    theirs["k"] = dk + F.pad(dv, (0, dk.shape[-1] - size))
    for name, due in theirs.items():
        assert torch.equal(ours[name].nan_to_num(), due.nan_to_num()), name


@given(pair=pairs(), seed=seeds)
@settings(max_examples=SOME)
def test_values_in_keys_are_values_beside_them(pair: Pair, seed: int) -> None:
    check_pair(pair, tensors_for(pair[0], seed), seed)


@pytest.mark.parametrize("paged", [False, True])
def test_so_they_are_in_packed_rows_and_in_pages(paged: bool) -> None:
    """And kernels read them once, in whatever layout."""
    I32, starts, table = torch.int32, [0, 3, 8], [[2, 0], [3, 1]]
    q = SPEC((8, 4, 20), torch.half)
    k = SPEC((4, 16, 2, 20) if paged else (50, 2, 20), torch.half)
    more: dict[str, Any] = {
        "q_starts": SPEC((3,), I32),
        "mask": ag.Causal("bottom_right"),
        "stats": True,
    }
    where = {"pages": SPEC((2, 2), I32)} if paged else {"kv_starts": SPEC((3,), I32)}
    more |= where
    given = [torch.tensor(x, dtype=I32) for x in (starts, table if paged else [0, 17, 50])]
    graph = ag.attention(q, k, 18, **more)
    v = SPEC((*k.shape[:-1], 18), torch.half, k.strides)
    tensors = [torch.randn(x.shape).half() for x in (q, k)]
    check_pair((graph, ag.attention(q, k, v, **more)), (*tensors, *given), 0)
    lying = facts_of(core_of(simplify(graph))).once(Lying.of)
    assert lying is not None
    assert reads_v_in_k(lying.problem)


@st.composite
def quantised_pairs(draw: st.DrawFn) -> Pair:
    """The same of keys in 8 bits, with scales of the tensor, of heads or of rows."""
    size, dtype = draw(shapes(most=40, heads=4)), draw(st.sampled_from(HALF))
    size = evolve(size, E=draw(st.integers(1, size.D)))
    kind, seed = draw(kinds), draw(st.integers(0, 2**8 - 1))
    k, scale = draw(specs(size.k, kind)), scale_spec(size.k, seed)
    options = draw(mask_options(size)) | draw(score_options(size, dtype))
    options |= {"stats": draw(st.booleans()), "k_scale": scale}
    q, v = SPEC(size.q, dtype), SPEC(size.v, kind, k.strides)
    return (
        ag.attention(q, k, size.E, **options),
        ag.attention(q, k, v, **options, v_scale=scale),
    )


@given(pair=quantised_pairs(), seed=seeds)
@settings(max_examples=SOME)
def test_values_in_quantised_keys_have_the_scales_of_keys(pair: Pair, seed: int) -> None:
    graph, apart = pair
    assert ag.parse(str(graph)) == graph
    tensors = tensors_for(graph, seed)
    given = {i.name: x for i, x in zip(graph.inputs, tensors, strict=True)}
    given |= {"v": given["k"][..., : apart.inputs[2].spec.shape[-1]], "v_scale": given["k_scale"]}
    beside = [given[i.name] for i in apart.inputs]
    plan, other = planned(graph, BACKEND), planned(apart, BACKEND)
    for a, b in zip(run_plan(plan, tensors), run_plan(other, beside), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"v_scale": (1, 1, 1, 1)}, "k_scale, v_scale are given; .* pass a tensor for v"),
        ({"k_scale": (1, 1, 1, 4)}, "has scales of columns, .* pass a scale of rows"),
        ({"q_scale": (1, 1, 1, 1)}, "q_scale, k_scale are given"),
        ({"k_scale": None}, "k is quantised; pass k_scale= in torch.float32"),
    ],
)
def test_other_scales_of_values_in_keys_are_refused(more: dict[str, Any], text: str) -> None:
    scales = {"k_scale": (1, 1, 1, 1)} | more
    q, k = SPEC((1, 2, 3, 24), torch.half), SPEC((1, 2, 3, 24), torch.int8)
    given: dict[str, Any] = {n: SPEC(x, torch.float32) for n, x in scales.items() if x}
    with pytest.raises(ag.GraphError, match=text):
        ag.attention(q, k, 16, **given)


@pytest.mark.parametrize("size", [0, 25])
def test_values_beyond_a_key_are_refused(size: int) -> None:
    x = SPEC((1, 2, 3, 24), torch.half)
    with pytest.raises(ag.GraphError, match=f"v is {size}, .* keys have 24"):
        ag.attention(x, x, size)


def test_the_cost_counts_keys_that_have_the_values_once() -> None:
    q, k = (SPEC((1, h, n, 576), torch.half) for h, n in ((128, 1), (1, 8192)))
    once = ag.compile(ag.attention(q, k, 512), target="h100").cost().forward
    twice = (
        ag.compile(ag.attention(q, k, SPEC((1, 1, 8192, 512), torch.half)), target="h100")
        .cost()
        .forward
    )
    assert twice.bytes - once.bytes == 2 * 8192 * 512
