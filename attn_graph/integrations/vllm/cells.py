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
    """k and v [n,P,G,D], views of a cache [n,G,P,2D] in any memory order: K, then V in each row.
    Where a head's rows lie beside each other, all of K is before all of V: CPUs read these at once.
    """
    if kv_cache_dtype in FLOAT8:
        cache = cache.view(FLOAT8[kv_cache_dtype])
    D = cache.shape[-1] // 2
    if cache.stride(2) == cache.shape[-1]:
        k, v = cache.flatten(2).unflatten(2, (2, cache.shape[2], D)).unbind(2)
    else:
        k, v = cache.split(D, -1)
    return k.transpose(1, 2), v.transpose(1, 2)


def find_cells(slots: Tensor, page: int) -> Cells:
    """The places of tokens. slots [T]: page * P + row; -1 skips a token: it goes to page 0, and
    vLLM gives this page to no sequence. Reads nothing on the host."""
    slots = slots.clamp(min=0)
    return slots.div(page, rounding_mode="floor"), slots.remainder(page)
