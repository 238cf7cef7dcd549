"""Small kernels and masks that only tests need."""

from __future__ import annotations

from typing import Any, final

import torch
import triton
import triton.language as tl
from attrs import frozen

import attn_graph as ag
from attn_graph.ir.modifiers import Modifier
from attn_graph.kernels.common import (
    dropout_keeps_tile,
    key_tiles,
    place_program,
    query_tiles,
    round_to,
)
from attn_graph.kernels.functions import tanh
from attn_graph.masks import Data


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
def places(out_ptr, blocks, H, TOGETHER, LAST_FIRST: tl.constexpr):
    """The block, h and b of each program; out [programs,3]."""
    place = place_program(blocks, H, TOGETHER, LAST_FIRST)
    for n in tl.static_range(3):
        tl.store(out_ptr + tl.program_id(0) * 3 + n, place[n])


@triton.jit
def dropout_bits(
    out_ptr,
    seed_ptr,
    offset_ptr,
    b,
    h,
    H,
    first_row,
    first_key,
    threshold,
    origin,
    BLOCK: tl.constexpr,
):
    """out [BLOCK,BLOCK]: which places of a tile are kept."""
    z = dropout_keeps_tile(
        seed_ptr, offset_ptr, b, h, H, first_row, first_key, threshold, origin, BLOCK, BLOCK
    )
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + at, z.to(tl.int8))


@triton.jit
def rounded(x_ptr, out_ptr, SIZE: tl.constexpr):
    """out [SIZE] float32: x in bfloat16, as the interpreter has it."""
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, round_to(tl.load(x_ptr + at), tl.bfloat16, True))


@final
@frozen
class Branching(ag.Mask):
    """Decides with `if`, as no symbol can."""

    def keep(self, at: ag.extend.Place) -> Any:
        return at.j <= at.i if bool((at.j >= 0).all()) else at.j == 0


@final
@frozen
class Calling(ag.Mask):
    """Calls a function of torch."""

    def keep(self, at: ag.extend.Place) -> Any:
        return torch.where(at.j <= at.i, True, False)


@final
@frozen
class Striped(ag.Mask):
    """False where (i - j) // 3 is a multiple of 3, negative ones too."""

    def keep(self, at: ag.extend.Place) -> Any:
        return (at.i - at.j) // 3 % 3 != 0


@final
@frozen
class Sloped(Modifier):
    """s + weight[h] * j, by two contributions: a modifier of one's own, with a gradient."""

    additive = True
    names = ("s",)

    @property
    def needs(self) -> dict[str, Data]:
        return {"weight": Data("h", (torch.float32,))}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("weight",)

    def change(self, s: Any, at: ag.extend.Place) -> Any:
        return s.add_(at.load("weight", at.h) * at.j)

    def collect(self, totals: Any, ds: Any, at: ag.extend.Place) -> None:
        share = at.reading(totals).load("weight", at.h)
        half = (ds * at.j).sum((2, 3))[..., None, None] * 0.5
        share += half.sum_to_size(share.shape)
        share += half.sum_to_size(share.shape)


@final
@frozen
class Steep(Modifier):
    """-exp(88 - 20 s): its derivative is too large for float32 at 0, which is the score of keys
    that are not there."""

    hides = False

    def change(self, s: Any, at: ag.extend.Place) -> Any:
        return -(88.0 - 20.0 * s).exp()

    def back(self, ds: Any, s: Any, at: ag.extend.Place) -> Any:
        return ds * (s * -20.0)


@triton.jit
def rough_tanh(x):
    """tanh with the largest error that `fast_tanh` may have, 2^-11 of it, up or down by a bit of x
    that is as good as drawn."""
    up = ((x.to(tl.int32, bitcast=True) * 40503) >> 9) & 1
    return tanh(x) * (1 + tl.where(up == 1, 1.0, -1.0) * 0.00048828125)


@triton.jit
def store_one(out_ptr):
    """Every program stores 1 to one place."""
    tl.store(out_ptr, 1.0)
