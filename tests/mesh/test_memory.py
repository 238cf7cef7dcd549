"""A rank holds its half of the tensors and two hops, and nothing of [M,N]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.mesh.layout import Method
from benchmarks.memory import peak_bytes
from tests.support.ranks import Crew, start_crew

H, N, D = 2, 4096, 16
FEW = 2**20  # bytes of lse and its like, and of a kernel's own blocks; [H,N/2,N/4] is 16 MiB


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with start_crew(2, tmp_path_factory.mktemp("ranks")) as crew:
        yield crew


def causal(method: Method) -> ag.Sharded:
    x = ag.TensorSpec((1, H, N, D), torch.float32)
    return ag.shard(ag.attention(x, x, x, mask=ag.Causal()), ag.Mesh(2), "zigzag", method=method)


def measure(rank: int, group: Any, sharded: ag.Sharded) -> tuple[int, int]:
    """The most that a rank allocates at once, above its results, in each pass."""
    plan = ag.compile(sharded, group=group, target="cpu")
    qkv = [torch.randn(spec.shape).requires_grad_() for spec in plan.specs.values()]
    o = plan(*qkv)
    assert isinstance(o, torch.Tensor)
    do = torch.ones_like(o)
    torch.autograd.grad(o, qkv, do)  # workspaces are there now
    forward = peak_bytes(lambda: plan(*(x.detach() for x in qkv)))
    o = plan(*qkv)
    assert isinstance(o, torch.Tensor)
    backward = peak_bytes(lambda: torch.autograd.grad(o, qkv, do))
    return forward, backward


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_rank_holds_half_and_two_hops(crew: Crew, method: Method) -> None:
    """Forward: o in two dtypes; backward: the gradients, and a copy of one with those of a box.

    Messages under way are those that are told: of keys and, in the backward, as many of gradients.
    """
    sharded = causal(method)
    hops = max(rank.buffers for rank in ag.explain(sharded, target="cpu").ranks)
    half = H * N // 2 * D * 4
    for forward, backward in crew.run(2, measure, sharded):
        assert forward <= hops + 2 * half + FEW
        assert backward <= 2 * hops + 4 * half + FEW
