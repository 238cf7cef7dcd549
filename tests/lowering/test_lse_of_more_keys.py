"""Gradients by an lse that is of more keys than these: parts of attention are computed so."""

from __future__ import annotations

import pytest
import torch

import attn_graph as ag


def formula(
    x: list[torch.Tensor], o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    """dq, dk and dv as AttentionGrad has them, at scale 0.5."""
    q, k, v = x
    p = torch.exp(0.5 * q @ k.mT - lse[..., None])
    ds = p * (do @ v.mT + (dlse - (do * o).sum(-1))[..., None])
    return [0.5 * ds @ k, 0.5 * ds.mT @ q, p.mT @ do]


@pytest.mark.parametrize("backend", ["torch_sdpa", "math"])
@pytest.mark.parametrize("through_lse", [False, True])
@pytest.mark.parametrize("keys", [1, 5])
def test_the_lse_that_is_given_counts(backend: str, through_lse: bool, keys: int) -> None:
    random = torch.Generator().manual_seed(keys)
    x = [torch.randn(2, 3, n, 4, generator=random) for n in (6, keys, keys)]
    q, k, v = map(ag.TensorSpec.like, x)
    plan = ag.compile(ag.attention(q, k, v, stats=True), target="cpu", backends=(backend,))
    own, lse = plan.run(*x)[0]
    lse, o = lse + 1.5, own * 0.3
    do, dlse = torch.randn(o.shape, generator=random), torch.randn(lse.shape, generator=random)
    dlse = dlse if through_lse else torch.zeros_like(dlse)
    gradients = plan.pull((True,) * 3, (*x, o, lse), (do, dlse if through_lse else None))
    for gradient, due in zip(gradients, formula(x, o, lse, do, dlse), strict=True):
        torch.testing.assert_close(gradient, due)
