"""The cache of a layer as vLLM lays it out: its keys and values, and the places of new ones."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}  # by vLLM's names
Cells = tuple[Tensor, Tensor]  # of each new token its page, and its row there


def split_cache(cache: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """k and v [n,P,G,D], views of a cache [n,G,P,2D] in any memory order: K, then V in each row."""
    pools = cache.transpose(1, 2)
    if kv_cache_dtype in FLOAT8:
        pools = pools.view(FLOAT8[kv_cache_dtype])
    k, v = pools.split(pools.shape[-1] // 2, -1)
    return k, v


def find_cells(slots: Tensor, page: int) -> Cells:
    """The places of tokens. slots [T]: page * P + row; -1 skips a token: it goes to page 0, and
    vLLM gives this page to no sequence. Reads nothing on the host."""
    slots = slots.clamp(min=0)
    return slots.div(page, rounding_mode="floor"), slots.remainder(page)
