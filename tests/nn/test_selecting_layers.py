"""Layers that select blocks of keys, as MoBA and NSA do, beside their dense formulas."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_graph as ag
from attn_graph.nn.functional import attention

B, H, G, S, D, SIZE, MOST = 2, 4, 2, 200, 16, 32, 3
BLOCKS = -(-S // SIZE)


def select(q: Tensor, k: Tensor) -> Tensor:
    """Each block of queries selects its own block of keys and the best before it: [B,G,X,MOST].

    By the mean keys of blocks; heads of a group select together.
    """
    padded = torch.nn.functional.pad(k, (0, 0, 0, BLOCKS * SIZE - S)).unflatten(2, (BLOCKS, SIZE))
    asked = torch.nn.functional.pad(q, (0, 0, 0, BLOCKS * SIZE - S)).unflatten(2, (BLOCKS, SIZE))
    scores = asked.unflatten(1, (G, H // G)).sum((2, 4)) @ padded.mean(3).mT
    own = torch.eye(BLOCKS, dtype=torch.bool)
    later = torch.ones(BLOCKS, BLOCKS, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf).masked_fill(own, torch.inf)
    selected: Tensor = scores.topk(MOST).indices
    return selected


def select_table(q: Tensor, k: Tensor) -> Tensor:
    counts = torch.arange(1, BLOCKS + 1).clamp(max=MOST).expand(B, G, BLOCKS)
    table = ag.select_blocks(select(q, k), BLOCKS, counts)
    return table.repeat_interleave(H // G, 1)


def dense(table: Tensor) -> Tensor:
    """The table at each place, with the causal mask."""
    full = table.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :S, :S]
    return full & torch.ones(S, S, dtype=torch.bool).tril()


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, H, S, D), (B, G, S, D), (B, G, S, D)
    return [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]


def check(o: Tensor, due: Tensor, inputs: list[Tensor]) -> None:
    """Assert that results and gradients are the dense formula's."""
    do = torch.randn_like(o)
    torch.testing.assert_close(o, due)
    pairs = zip(*(torch.autograd.grad(x, inputs, do) for x in (o, due)), strict=True)
    for made, wanted in pairs:
        torch.testing.assert_close(made, wanted)


def test_a_layer_of_moba_is_its_dense_formula() -> None:
    q, k, v = inputs = operands()
    table = select_table(q, k)
    assert table.sum(-1).max() == MOST
    mask = ag.Causal() & ag.KeepBlocks(SIZE, SIZE)
    o = attention(q, k, v, mask=mask, keep_blocks=table)
    assert isinstance(o, Tensor)
    check(o, sdpa(q, k, v, dense(table), enable_gqa=True), inputs)


def test_a_layer_of_nsa_is_its_dense_formula() -> None:
    """Three branches with gates: mean keys of earlier blocks, selected blocks, and a window."""
    q, k, v = inputs = operands()
    table, gates = select_table(q, k), torch.rand(3, B, H, S, 1, dtype=torch.float64)
    whole = S // SIZE * SIZE
    means, values = (x[:, :, :whole].unflatten(2, (-1, SIZE)).mean(3) for x in (k, v))
    i, j = torch.arange(S)[:, None], torch.arange(S)
    ended = (torch.arange(whole // SIZE) + 1) * SIZE <= i
    compressed = ag.Formula(f"(j + 1) * {SIZE} <= i")
    near = (j <= i) & (j >= i - 15)
    selected = ag.Causal() & ag.KeepBlocks(SIZE, SIZE)
    branches = [
        attention(q, means, values, mask=compressed),
        attention(q, k, v, mask=selected, keep_blocks=table),
        attention(q, k, v, mask=ag.Causal() & ag.Window(15)),
    ]
    dues = [
        sdpa(q, means, values, ended, enable_gqa=True).nan_to_num(),
        sdpa(q, k, v, dense(table), enable_gqa=True),
        sdpa(q, k, v, near, enable_gqa=True),
    ]
    o = torch.stack([x for x in branches if isinstance(x, Tensor)]).mul(gates).sum(0)
    check(o, torch.stack(dues).mul(gates).sum(0), inputs)
