"""A rank holds its half of the tensors and two hops, and nothing of [M,N]."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch

import attn_graph as ag
from attn_graph.mesh import ring
from attn_graph.mesh.exchange import Transfer, post
from attn_graph.mesh.layout import Method
from benchmarks.memory import peak_bytes
from tests.support.ranks import Crew

H, N, D = 2, 4096, 16
FEW = 2**20  # bytes of lse and its like, and of a kernel's own blocks; [H,N/2,N/4] is 16 MiB


def causal(method: Method) -> ag.types.Sharded:
    x = ag.TensorSpec((1, H, N, D), torch.float32)
    return ag.shard(ag.attention(x, x, x, mask=ag.Causal()), ag.Mesh(2), "zigzag", method=method)


def measure(rank: int, group: Any, sharded: ag.types.Sharded) -> tuple[int, int]:
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


def hold(rank: int, group: Any, sharded: ag.types.Sharded) -> list[int]:
    """The most bytes of messages that a rank holds at once, in each pass, as often as it posts."""
    plan = ag.compile(sharded, group=group, target="cpu")
    qkv = [torch.randn(spec.shape).requires_grad_() for spec in plan.specs.values()]
    messages: list[weakref.ref[torch.UntypedStorage]] = []
    held = [0]

    def watch(*args: Any) -> Transfer:
        transfer = post(*args)
        both = *transfer.incoming.values(), *transfer.outgoing.values()
        messages.extend(weakref.ref(x.untyped_storage()) for x in both)
        there = {x.data_ptr(): x.nbytes() for x in (m() for m in messages) if x is not None}
        held[-1] = max(held[-1], sum(there.values()))
        return transfer

    with patch.object(ring, "post", watch):
        o = plan(*qkv)
        assert isinstance(o, torch.Tensor)
        held.append(0)
        torch.autograd.grad(o, qkv, torch.ones_like(o))
    return held


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("mask", [None, ag.Window(40, 9)])
def test_a_rank_holds_as_many_messages_as_foreseen(
    crew: Crew, method: Method, mask: ag.Mask | None
) -> None:
    """Exactly as many forward; backward, gradients travel too."""
    x = ag.TensorSpec((1, 2, 64, 8), torch.float32)
    sharded = ag.shard(ag.attention(x, x, x, mask=mask), ag.Mesh(4), "contiguous", method=method)
    figures = ag.explain(sharded, target="cpu").ranks
    for (forward, backward), own in zip(crew.run(4, hold, sharded), figures, strict=True):
        assert forward == own.buffers
        assert backward <= 2 * own.buffers
