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
    numbers_in,
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


@triton.jit
def bytes_as_numbers(x_ptr, out_ptr, SIZE: tl.constexpr):
    """out [SIZE]: bytes x of float8_e4m3fn in out's dtype."""
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, numbers_in(tl.load(x_ptr + at), out_ptr.dtype.element_ty))


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


@triton.autotune([triton.Config({"BLOCK": n}) for n in (32, 64)], key=["N"])
@triton.jit
def tuned(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """out [N] = x + BLOCK."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < N) + BLOCK, mask=at < N)


@triton.jit
def talking(x_ptr, N: tl.constexpr):
    """Prints x [N], and asserts that it is below 3."""
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_print("x", x)
    tl.device_assert(x < 3, "x is large")


@triton.jit
def cached(x_ptr, out_ptr, N: tl.constexpr):
    """out [N] = 5 x, each part of it loaded in another way."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, cache_modifier=".ca") + tl.load(x_ptr + at, cache_modifier=".cg")
    x += tl.load(x_ptr + at, eviction_policy="evict_first") + tl.load(x_ptr + at, volatile=True)
    x += tl.load(x_ptr + at, eviction_policy="evict_last")
    tl.store(out_ptr + at, x, cache_modifier=".wt")


@triton.jit
def multiprocessor(out_ptr):
    """out [programs]: where each program runs."""
    number = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, True, 1)
    tl.store(out_ptr + tl.program_id(0), number)


@triton.jit
def add_rows(x_ptr, out_ptr, N: tl.constexpr):
    """out [N] += each row of x [programs,N], in any order."""
    at = tl.arange(0, N)
    tl.atomic_add(out_ptr + at, tl.load(x_ptr + tl.program_id(0) * N + at))


@triton.jit
def add_in_turn(x_ptr, out_ptr, lock_ptr, N: tl.constexpr, LOCKED: tl.constexpr):
    """out [N] += each row of x [programs,N], one program at a time."""
    at = tl.arange(0, N)
    x = tl.load(x_ptr + tl.program_id(0) * N + at)
    if LOCKED:
        while tl.atomic_cas(lock_ptr, 0, 1) == 1:
            pass
    tl.store(out_ptr + at, tl.load(out_ptr + at) + x)
    tl.debug_barrier()
    if LOCKED:
        tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def extremes_of(x_ptr, out_ptr, N: tl.constexpr):
    """out [4]: the least and largest number of x [programs,N], the bits of all, and how many."""
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.atomic_min(out_ptr, tl.min(x))
    tl.atomic_max(out_ptr + 1, tl.max(x))
    tl.atomic_or(out_ptr + 2, tl.reduce(x, 0, either))
    tl.atomic_add(out_ptr + 3, N)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def add_next(x_ptr):
    """x [programs + 1]: each number plus the next one, in place."""
    at = x_ptr + tl.program_id(0)
    tl.store(at, tl.load(at) + tl.load(at + 1))


@triton.jit
def copy_by_descriptors(x_ptr, out_ptr, M, R: tl.constexpr, N: tl.constexpr):
    """Twice the rows, by descriptors that each program makes."""
    x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [R, N])
    out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [R, N])
    row = tl.program_id(0) * R
    out.store([row, 0], x.load([row, 0]) * 2)


@triton.jit
def copy_by_table(table_ptr, N: tl.constexpr):
    """One tensor to another, both by the addresses in a table."""
    x = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    out = tl.load(table_ptr + 1).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


@triton.jit
def copy_early(x_ptr, out_ptr, N: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    tl.store(out_ptr + tl.arange(0, N), tl.load(x_ptr + tl.arange(0, N)))
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def multiply_turned(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    """out = a b^T, all [N,N]."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at).T))


@triton.jit
def count_numbers(x_ptr, out_ptr, N: tl.constexpr, B: tl.constexpr):
    """How often each number below B is in x."""
    counts = tl.histogram(tl.load(x_ptr + tl.arange(0, N)), B)
    tl.store(out_ptr + tl.arange(0, B), counts)


@triton.jit
def multiply_scaled(
    a_ptr,
    a_scales_ptr,
    b_ptr,
    b_scales_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    A_KIND: tl.constexpr,
    B_KIND: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """out [128,N] = a [128,K] b [N,K]^T, of A and B numbers a byte, VECTOR of them by one scale."""
    i, j, k = tl.arange(0, 128)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K // VECTOR)
    a = tl.load(a_ptr + i * (K // A) + tl.arange(0, K // A)[None, :])
    b = tl.load(b_ptr + j * (K // B) + tl.arange(0, K // B)[None, :])
    a_scales = tl.load(a_scales_ptr + i * (K // VECTOR) + k[None, :])
    b_scales = tl.load(b_scales_ptr + j * (K // VECTOR) + k[None, :])
    out = tl.dot_scaled(a, a_scales, A_KIND, b.T, b_scales, B_KIND)
    tl.store(out_ptr + i * N + tl.arange(0, N)[None, :], out)


@triton.jit
def multiply_padded(
    a_ptr,
    a_scales_ptr,
    b,
    b_scales_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    MAKES: tl.constexpr,
):
    """As above, of 8 and of 4 bits; b by a descriptor, or by a pointer for which it makes one."""
    i, j, k = tl.arange(0, 128)[:, None], tl.arange(0, N)[:, None], tl.arange(0, K // 32)[None, :]
    if MAKES:
        b = tl.make_tensor_descriptor(b, [N, K // 2], [K // 2, 1], [N, K // 2])
    right = b.load([0, 0])
    left = tl.load(a_ptr + i * K + tl.arange(0, K)[None, :])
    a_scales = tl.load(a_scales_ptr + i * (K // 32) + k)
    b_scales = tl.load(b_scales_ptr + j * (K // 32) + k)
    out = tl.dot_scaled(left, a_scales, "e4m3", right.T, b_scales, "e2m1")
    tl.store(out_ptr + i * N + tl.arange(0, N)[None, :], out)
