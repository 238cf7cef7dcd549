"""Boolean masks that keep all places cost no more than none."""

from __future__ import annotations

import pytest
import torch

import attn_graph as ag
from attn_graph.lowering.cpu import all_kept
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.tensors import tensors_for

GRADIENTS = ("q", "k", "v")


def masked(mask: ag.Mask | None, keep: tuple[int, ...]) -> tuple[ag.Graph, ag.Graph]:
    """Two graphs that differ by a boolean mask of that shape."""
    q, k = (ag.TensorSpec((2, h, keep[-1], 16), torch.float32) for h in (4, 2))
    flags = ag.TensorSpec(keep, torch.bool)
    return ag.attention(q, k, k, mask=mask, keep=flags), ag.attention(q, k, k, mask=mask)


@pytest.mark.parametrize("keep", [(2, 1, 1, 24), (1, 1, 24, 24), (2, 4, 24, 24), (2, 1, 1, 192)])
@pytest.mark.parametrize("mask", [None, ag.Causal("top_left")], ids=str)
def test_what_keeps_all_gives_the_bits_of_no_mask(
    mask: ag.Mask | None, keep: tuple[int, ...]
) -> None:
    both = masked(mask, keep)
    q, k, v, flags = tensors_for(both[0], 1)
    do, all_true = torch.randn_like(q), torch.ones_like(flags)
    masked_plan, plain = (ag.compile(graph, backends=("math",)) for graph in both)
    with torch.no_grad():
        (made,), (due,) = run_plan(masked_plan, (q, k, v, all_true)), run_plan(plain, (q, k, v))
    assert torch.equal(made, due)
    grads = run_gradients(masked_plan, (q, k, v, all_true), [do])
    dues = run_gradients(plain, (q, k, v), [do])
    assert all(torch.equal(grads[name], dues[name]) for name in GRADIENTS)


def test_a_mask_of_repeated_flags_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where flags lie in the same memory, however many rows and heads share them."""
    seen: list[int] = []
    view = torch.Tensor.view

    def spy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        seen.append(x.numel())
        return view(x, dtype)

    monkeypatch.setattr(torch.Tensor, "view", spy)
    assert all_kept.keeps_all(torch.ones(2, 1, 1, 24, dtype=torch.bool).expand(2, 8, 64, 24))
    assert seen == [48]
    assert not all_kept.keeps_all(torch.ones(2, 1, 1, 0, dtype=torch.bool))


def test_sizes_by_name_look_too() -> None:
    N = ag.Dim("N", most=64)
    q, k = ag.TensorSpec((2, 4, 1, 16), torch.float32), ag.TensorSpec((2, 2, N, 16), torch.float32)
    graph = ag.attention(q, k, k, keep=ag.TensorSpec((2, 1, 1, N), torch.bool))
    plan = ag.compile(graph)
    for n in (9, 40):
        x, y, z = torch.randn(2, 4, 1, 16), torch.randn(2, 2, n, 16), torch.randn(2, 2, n, 16)
        for keep in (
            torch.ones(2, 1, 1, n, dtype=torch.bool),
            torch.arange(n).expand(2, 1, 1, n) > 3,
        ):
            (o,) = run_plan(plan, (x, y, z, keep))
            due = torch.nn.functional.scaled_dot_product_attention(
                x, y, z, attn_mask=keep, enable_gqa=True
            )
            torch.testing.assert_close(o, due)


def test_explain_says_what_runs_where_all_is_kept() -> None:
    graph, _ = masked(None, (2, 1, 1, 24))
    notes = " | ".join(ag.compile(graph).explain().notes)
    assert "where booleans keep all places, one call of PyTorch's fused CPU kernel" in notes
    limited = ag.compile(graph, max_workspace="1GiB")
    assert "keep all places" not in " | ".join(limited.explain().notes)
