"""Matrix products on tiles: sizes of tiles, and the steps that kernels take together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.kernels import products
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.product_tiles import ProductTiles
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.testing.tensors import tensors_for

INF = float("inf")
LIMIT = 32 * 2**20  # bytes above inputs and outputs


def compile_on_cpu(graph: ag.Graph) -> ag.Plan:
    """A plan of `math`."""
    return ag.compile(graph, backends=("math",), target=Target.of("cpu"))


def tiles_of(graph: ag.Graph) -> ProductTiles:
    """How a graph of one attention is tiled."""
    (tiles,) = plan_tiles(
        Request(compile_on_cpu(graph).graph, Target.of("cpu"), ag.extend.Options())
    )
    assert isinstance(tiles, ProductTiles)
    return tiles


def square(*sizes: int, **options: Any) -> ag.Graph:
    """Attention of q, k and v of these sizes."""
    x = ag.TensorSpec(sizes, torch.float32)
    return ag.attention(x, x, x, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_is_that_of_the_difference_and_zero_where_nothing_is_seen(dtype: torch.dtype) -> None:
    s = torch.linspace(-200, 3, 4000, dtype=dtype).reshape(2, 4, 500)
    s[0, 1], s[0, 2, ::2] = -INF, -INF
    top = s.amax(-1, keepdim=True)
    due = torch.exp(s.double() - top.double()).nan_to_num(0.0)
    products.exp_(s, top)
    assert torch.equal(s[0, 1], torch.zeros_like(s[0, 1]))
    tiny = torch.finfo(dtype).tiny
    # the exponent, up to 300, is rounded twice: so many times eps is what exp makes of it
    assert ((s - due).abs() <= 300 * torch.finfo(dtype).eps * due + tiny).all()


def test_a_window_takes_scores_for_the_keys_in_reach() -> None:
    tiles = tiles_of(square(1, 4, 4096, 16, mask=ag.Causal() & ag.Window(255), soft_cap=30.0))
    assert tiles.reach < 255 + 2 * tiles.rows
    assert tiles.buffers["s"].shape == (4 * tiles.rows * tiles.reach,)


def test_without_a_mask_a_small_head_is_one_tile() -> None:
    bias = ag.TensorSpec((1, 16, 197, 197), torch.float32)
    graph = square(8, 16, 197, 64, bias=bias, dropout=0.1)
    assert tiles_of(graph).rows == 197


@pytest.mark.parametrize("mask", [None, ag.Causal(), ag.Causal() & ag.Window(255)], ids=str)
@pytest.mark.parametrize("options", [{"soft_cap": 30.0}, {"dropout": 0.1}], ids=str)
@pytest.mark.parametrize("sizes", [(8, 16, 197, 64), (2, 8, 2048, 64), (64, 4, 64, 32)], ids=str)
def test_scratch_of_a_call_stays_below_the_limit(
    sizes: tuple[int, ...], options: dict[str, Any], mask: ag.Mask | None
) -> None:
    need = compile_on_cpu(square(*sizes, mask=mask, **options)).memory()
    assert need.workspace_forward + need.temporary_forward <= LIMIT
    assert need.workspace_backward + need.temporary_backward <= LIMIT


@pytest.mark.parametrize("cap", [1e9, 1e18, 1e25, 1e36])
def test_a_cap_far_above_the_scores_changes_nothing(cap: float) -> None:
    plain, capped = (square(1, 2, 70, 8, mask=ag.Causal(), **x) for x in ({}, {"soft_cap": cap}))
    tensors = [x.requires_grad_() for x in tensors_for(plain, 1)]
    results = []
    for graph in (plain, capped):
        o = compile_on_cpu(graph)(*tensors)
        assert isinstance(o, torch.Tensor)
        results.append((o, *torch.autograd.grad(o.square().sum(), tensors)))
    for x, due in zip(*reversed(results), strict=True):
        torch.testing.assert_close(x, due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        ((1, 2, 32, 32), "torch_sdpa", "torch_sdpa"),
        ((1, 4, 96, 64), "math", "math"),
        ((4, 8, 256, 64), "math", "math"),
    ],
)
def test_the_size_of_a_pass_decides_who_multiplies_bfloat16(
    sizes: tuple[int, ...], forward: str, backward: str
) -> None:
    x = ag.TensorSpec(sizes, torch.bfloat16)
    said = ag.explain(ag.attention(x, x, x), target=evolve(Target.of("cpu"), native=("bf16",)))
    assert said.backward is not None
    assert (said.backend, said.backward.backend) == (forward, backward)


@pytest.mark.parametrize(
    ("sizes", "keys", "backend"),
    [
        ((1, 4, 64, 32), 64, "torch_sdpa"),
        ((16, 4, 64, 32), 64, "math"),  # or many heads short rows
        ((16, 4, 256, 32), 256, "torch_sdpa"),
        ((1, 16, 1, 128), 256, "torch_sdpa"),
        ((1, 16, 1, 128), 1024, "math"),  # one query reads long keys
        ((1, 16, 1, 64), 8192, "math"),  # or 32 MiB of them
        ((1, 16, 64, 128), 8192, "torch_sdpa"),
    ],
)
def test_the_sizes_of_float32_decide_who_multiplies(
    sizes: tuple[int, ...], keys: int, backend: str
) -> None:
    B, H, _, D = sizes
    q, k = ag.TensorSpec(sizes, torch.float32), ag.TensorSpec((B, H, keys, D), torch.float32)
    said = ag.explain(ag.attention(q, k, k), target=Target.of("cpu"))
    assert said.backend == backend
