"""Small kernels and masks that only tests need."""

from __future__ import annotations

from typing import Any, final

import torch
import triton
import triton.language as tl
from attrs import frozen

import attn_graph as ag
from attn_graph.kernels.masks import dropped, key_tiles, query_tiles


@triton.jit
def closed_form(
    out_ptr, lines, M, N, data, numbers,
    STRIP: tl.constexpr, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """The four bounds of each batch entry and block of queries, or of keys; out [B,lines,4]."""
    pid = tl.program_id(0)
    b, line = pid // lines, pid % lines
    if BY_KEYS:
        bounds = query_tiles(line, b, M, N, data, numbers, STRIP, BLOCK, BLOCK)
    else:
        bounds = key_tiles(line, b, M, N, data, numbers, STRIP, BLOCK, BLOCK)
    for n in tl.static_range(4):
        tl.store(out_ptr + pid * 4 + n, bounds[n])


@triton.jit
def dropout_bits(
    out_ptr, seed_ptr, offset_ptr, b, h, H, first_row, first_key, threshold, BLOCK: tl.constexpr
):
    """out [BLOCK,BLOCK]: which places of a tile are kept."""
    z = dropped(seed_ptr, offset_ptr, b, h, H, first_row, first_key, threshold, BLOCK, BLOCK)
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, z.to(tl.int8))


@final
@frozen
class Branching(ag.Mask):
    """Decides with `if`, as only single integers could."""

    def keep(self, at: ag.Place) -> Any:
        return at.j == 0 if at.i < 4 else at.j <= at.i


@final
@frozen
class Calling(ag.Mask):
    """Calls a function of torch."""

    def keep(self, at: ag.Place) -> Any:
        return torch.where(at.j <= at.i, True, False)
