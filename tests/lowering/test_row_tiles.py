"""Products with a softmax between, on tiles of whole rows: by the accuracy rule, where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.builder import Builder
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.boxes import move_attention
from attn_graph.ir.transforms.moving import Box
from attn_graph.lowering.cpu import row_tiles, tile_grid
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.product_tiles import ProductTiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import (
    check_gradients,
    check_outputs,
    run_plan,
)
from attn_graph.testing.rule import expect_gradients
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans, prefer_way

NATIVE = evolve(Target.of("cpu"), native=("bf16",))
OTHER = evolve(NATIVE, native=())
INF = float("inf")


# Of a few numbers `low` may be right by luck; these tiles are for millions.
@pytest.fixture(scope="module", autouse=True)
def every_size_pays() -> Iterator[None]:
    """Small problems run on these tiles too, several tiles a side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_tiles, "LEAST_READ", 0)
        patch.setattr(tile_grid, "FEW_SCORES", 2**8)
        patch.setattr(tile_grid, "SCORES", 2**12)
        patch.setattr(tile_grid, "WHOLE_MASKED_ROWS", 32)
        prefer_way(patch, "rows")
        yield
    forget_plans()


def make_plan(graph: ag.Graph) -> ag.Plan:
    """A plan of `math` for a CPU that multiplies bfloat16 itself."""
    return ag.compile(graph, target=NATIVE, backends=("math",))


def tiles_of(graph: ag.Graph, target: Target = NATIVE) -> object:
    """How a graph of one attention is tiled."""
    plan = ag.compile(graph, target=target, backends=("math",))
    (tiles,) = plan_tiles(Request(plan.graph, target, ag.extend.Options()))
    return tiles


def square(*sizes: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> ag.Graph:
    """Attention of q, k and v of these sizes."""
    x = ag.TensorSpec(sizes, dtype)
    return ag.attention(x, x, x, **options)  # type: ignore[arg-type]


MASKS = [None, ag.Causal(), ag.Window(40), ag.Causal() & ag.Window(20), ag.Prefix(9) | ag.Causal()]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("M", [20, 130])  # as runs of heads, and as tiles
def test_every_layout_of_bare_attention_is_within_the_rule(
    mask: ag.Mask | None, layout: str, G: int, M: int
) -> None:
    sizes = {"q": (2, 4, M, 16), "k": (2, G, 150, 16), "v": (2, G, 150, 24)}
    specs = {n: ag.TensorSpec(x, torch.bfloat16, layout=layout) for n, x in sizes.items()}
    q, k, v = specs.values()
    graph = ag.attention(q, k, v, mask=None if mask is None else mask.aligned("bottom_right"))
    tiles, tensors = tiles_of(graph), tensors_for(graph, 1)
    assert isinstance(tiles, RowTiles)
    check_outputs(make_plan(graph), graph, tensors)
    check_gradients(make_plan(graph), graph, tensors, 1)


@pytest.mark.parametrize("scale", [None, 1.0, -0.3, 0.0, 1e-50])
@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("M", [1, 3])
def test_few_queries_are_one_run_of_any_scale_and_give_the_same_bits(
    scale: float | None, G: int, M: int
) -> None:
    """A scale may be 0 in float32."""
    sizes = (2, 4, M, 16), (2, G, 96, 16), (2, G, 96, 24)
    q, k, v = (ag.TensorSpec(x, torch.bfloat16) for x in sizes)
    graph = ag.attention(q, k, v, scale=scale)
    plan, tensors, tiles = make_plan(graph), tensors_for(graph, 1), tiles_of(graph)
    assert isinstance(tiles, RowTiles)
    assert tiles.runs == 1
    assert ("rows of one: q is" in str(plan.explain())) == (G < 4)
    check_outputs(plan, graph, tensors)
    assert torch.equal(plan.infer(*tensors)[0][0], plan.run(*tensors)[0][0])


def test_statistics_that_are_returned_are_of_scores_that_were_not_rounded() -> None:
    options: dict[str, Any] = {"stats": ("max",), "soft_cap": 30.0, "mask": ag.Causal()}
    graph = square(2, 6, 58, 4, **options)
    tensors = tensors_for(graph, 0)
    _, *rounded = run_plan(make_plan(graph), tensors)
    wide = make_plan(square(2, 6, 58, 4, dtype=torch.float32, **options))
    _, *dues = run_plan(wide, [x.float() for x in tensors])
    for x, due in zip(rounded, dues, strict=True):
        torch.testing.assert_close(x, due, rtol=0, atol=1e-4)


def test_an_lse_that_is_returned_is_of_scores_that_were_not_rounded() -> None:
    graph = square(1, 4, 128, 16, stats=True)
    assert not isinstance(tiles_of(graph), RowTiles)
    lse = make_plan(graph)(*tensors_for(graph, 1))[1]
    due = make_plan(square(1, 4, 128, 16, stats=True, dtype=torch.float32))(
        *(x.float() for x in tensors_for(graph, 1))
    )[1]
    torch.testing.assert_close(lse, due, rtol=0, atol=1e-4)


def test_half_precision_is_multiplied_where_the_cpu_does_it() -> None:
    graph = square(1, 4, 128, 16)
    assert isinstance(tiles_of(graph), RowTiles)
    assert not isinstance(tiles_of(graph, OTHER), RowTiles)
    capped = tiles_of(square(1, 4, 128, 16, soft_cap=30.0))
    assert isinstance(capped, ProductTiles)
    assert capped.factors == torch.bfloat16
    wide = tiles_of(square(1, 4, 128, 16, soft_cap=30.0, dtype=torch.float16))
    assert isinstance(wide, ProductTiles)
    assert wide.factors == torch.float32


def test_a_row_that_sees_no_key_under_a_sink_of_minus_infinity_has_gradients_of_zero() -> None:
    x, sinks = ag.TensorSpec((1, 2, 16, 8), torch.bfloat16), ag.TensorSpec((2,), torch.bfloat16)
    lengths = ag.TensorSpec((1,), torch.int32)
    graph = ag.attention(x, x, x, sinks=sinks, mask=ag.KeyLengths(), kv_lengths=lengths)
    q, k, v, *_ = tensors_for(graph, 1)
    named = {"kv_lengths": torch.zeros(1, dtype=torch.int32), "sinks": torch.tensor([-INF, 1.0])}
    named["sinks"] = named["sinks"].bfloat16()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = make_plan(graph)(*leaves, **named)
    assert isinstance(o, torch.Tensor)
    for gradient in torch.autograd.grad(o.square().sum() + o.sum(), leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("mask", [None, ag.Causal()], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_the_keys_have_their_share_of_the_gradient(
    mask: ag.Mask | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    """o and lse are of all keys, so the weights of a part make up less than 1."""
    whole = square(1, 4, 128, 16, mask=mask, soft_cap=soft_cap, dtype=dtype, stats=True)
    tensors = q, k, v = tensors_for(whole, 1)[:3]
    do = torch.randn(q.shape).to(dtype)
    o, lse = run_plan(make_plan(whole), tensors)
    (eqn,) = simplify(whole).eqns
    made: dict[str, list[torch.Tensor]] = {"dq": [], "dk": [], "dv": []}
    for keys in (range(48), range(48, 128)):
        box = Box(range(1), range(4), range(128), keys, (1, 4, 128, 128))
        b = Builder()
        pieces = q, *(x[:, :, keys.start : keys.stop].contiguous() for x in (k, v))
        values = [b.input(n, ag.TensorSpec.like(x)) for n, x in zip("qkv", pieces, strict=True)]
        part = b.build(*b.emit(move_attention(eqn, box).node, *values))
        _, backward = ag.vjp(part, cotangents=("o",))
        gradients = run_plan(make_plan(backward), (*pieces, o, lse, do))
        for each, gradient in zip(made.values(), gradients, strict=True):
            each.append(gradient)
    dues = expect_gradients(whole, tensors, [do, None])
    dues["q"].check(torch.stack(made["dq"]).float().sum(0).to(dtype))
    for name in "kv":
        dues[name].check(torch.cat(made[f"d{name}"], 2))
