"""Joins softmaxes over disjoint sets of keys, exactly, by their lse."""

from __future__ import annotations

import torch

from attn_graph.spec import INF

MERGED = 4  # vectors as long as lse made by joining, beside one of booleans


def merge_(o: torch.Tensor, lse: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> None:
    """Join, in o [...,E] and lse [...], the results of one query over two disjoint sets of keys.

    lse = log(exp(lse1) + exp(lse2)); o = o1 exp(lse1 - lse) + o2 exp(lse2 - lse). A part without
    keys has lse = -inf and weighs nothing.
    """
    both = torch.logaddexp(lse, lse2)
    finite = both.masked_fill(both == -INF, 0.0)
    o.mul_(torch.exp(lse - finite)[..., None])
    o.addcmul_(o2, torch.exp(lse2 - finite)[..., None])
    lse.copy_(both)


def sink_(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Join, in o [B,H,M,E] and lse [B,H,M], sinks [H]: weight without a value."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    finite = both.masked_fill(both == -INF, 0.0)
    o.mul_(torch.exp(lse - finite)[..., None])
    lse.copy_(both)
