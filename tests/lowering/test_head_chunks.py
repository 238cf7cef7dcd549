"""The fused kernel on a chunk of heads after another: the same results, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.vjp import backward
from attn_graph.lowering.cpu import head_chunks
from attn_graph.lowering.cpu.head_chunks import MOST_COPIED, ChunkedTiles
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_gradients, check_outputs, run_gradients, run_plan
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans

CPU = evolve(Target.of("cpu"), native=())  # which multiplies float32 alone
CAUSAL = ag.Causal("bottom_right")
MASKS = (None, CAUSAL, ag.Window(9), ag.Window(4, -2), CAUSAL | ag.Prefix(5))
FEW = 2**12  # bytes: less than small problems copy


@pytest.fixture(scope="module", autouse=True)
def chunks_are_small() -> Iterator[None]:
    """Small problems are cut into chunks too."""
    with bounded(FEW):
        yield


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """Another bound for what is copied, for plans that are made inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_chunks, "MOST_COPIED", most)
        forget_plans()
        yield
    forget_plans()


@st.composite
def chunked_graphs(draw: st.DrawFn) -> ag.Graph:
    """Half precision, any counts of heads and batch entries, any layout and mask of ours."""
    B, G, r, D, E = (draw(st.integers(1, n)) for n in (4, 4, 3, 24, 24))
    M, N = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from((torch.float16, torch.bfloat16)))
    shapes = (B, G * r, M, D), (B, G, N, D), (B, G, N, E)
    layouts = st.sampled_from(("bhsd", "bshd"))
    q, k, v = (ag.TensorSpec(shape, dtype, layout=draw(layouts)) for shape in shapes)
    mask = draw(st.sampled_from(MASKS))
    mask = None if mask is None else mask.aligned("bottom_right")
    return ag.attention(q, k, v, mask=mask, stats=draw(st.booleans()))


def make_plan(graph: ag.Graph) -> ag.Plan:
    """A plan of `math`."""
    return ag.compile(graph, target=CPU, backends=("math",))


@given(graph=chunked_graphs(), seed=seeds)
def test_results_are_within_the_rule(graph: ag.Graph, seed: int) -> None:
    check_outputs(make_plan(graph), graph, tensors_for(graph, seed))


@given(graph=chunked_graphs(), seed=seeds)
def test_gradients_are_within_the_rule(graph: ag.Graph, seed: int) -> None:
    check_gradients(make_plan(graph), graph, tensors_for(graph, seed), seed)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [(4, 3, 3), (1, 6, 3), (2, 4, 1)], ids=str)
def test_chunks_give_the_same_and_outputs_lie_alike(
    mask: ag.Mask | None, sizes: tuple[int, int, int]
) -> None:
    B, H, G = sizes
    q, kv = (ag.TensorSpec((B, heads, 70, 16), torch.float16) for heads in (H, G))
    graph = ag.attention(q, kv, kv, mask=mask, stats=True)
    with bounded(MOST_COPIED):
        whole = all_results(graph, chunked=False)
    chunked = all_results(graph, chunked=True)
    torch.testing.assert_close(whole, chunked)  # the kernel gives other bits at other addresses
    assert [x.stride() for x in whole[:2]] == [x.stride() for x in chunked[:2]]


def all_results(graph: ag.Graph, *, chunked: bool) -> list[torch.Tensor]:
    """o, lse and the gradients of q, k and v."""
    plan, tensors = make_plan(graph), tensors_for(graph, 1)
    assert ("chunks of" in str(plan.explain())) == chunked
    do = torch.ones_like(tensors[0])
    grads = run_gradients(plan, tensors, [do, None])
    return [*run_plan(plan, tensors), *(grads[name] for name in "qkv")]


@pytest.mark.parametrize("sizes", [(4, 12, 1024, 64), (1, 8, 4096, 64), (8, 12, 256, 64)], ids=str)
def test_copies_are_bounded(sizes: tuple[int, int, int, int]) -> None:
    x = ag.TensorSpec(sizes, torch.float16)
    graph = simplify(ag.attention(x, x, x, mask=ag.Causal()))
    with bounded(MOST_COPIED):
        for each in (graph, simplify(backward(graph, (0, 1, 2), (x,)))):
            (tiles,) = plan_tiles(each, CPU, ag.extend.Options())
            assert isinstance(tiles, ChunkedTiles)
            assert FEW < tiles.scratch.bytes <= MOST_COPIED


def test_heads_that_are_not_alike_stay_together() -> None:
    x, lengths = ag.TensorSpec((4, 12, 1024, 64), torch.float16), ag.TensorSpec((4,), torch.int32)
    for graph in (
        ag.attention(x, x, x, alibi=True),
        ag.attention(x, x, x, kv_lengths=lengths),
        ag.attention(x, x, x, keep=ag.TensorSpec((1, 1, 1024, 1024), torch.bool)),
    ):
        (tiles,) = plan_tiles(simplify(graph), CPU, ag.extend.Options())
        assert not isinstance(tiles, ChunkedTiles)
