"""Instructions on bits of words. PTX ISA 9.7.1 bfe, bfi, 9.7.8 lop3, 9.7.9 prmt."""

from __future__ import annotations

import numpy as np

from attn_graph.testing.gpu.arithmetic import U32, shift_left, shift_right
from attn_graph.testing.gpu.rules import Array, value


@value("bfe.u32", "u32 <- u32 u32 u32")
def extract(a: Array, start: Array, count: Array) -> Array:
    """d = `count` bits of a from bit `start` on; bits after the last one are 0."""
    start, count = start & U32(255), count & U32(255)
    return shift_right(a, start) & (shift_left(np.ones_like(a), count) - U32(1))


@value("bfe.s32", "s32 <- s32 u32 u32")
def extract_signed(a: Array, start: Array, count: Array) -> Array:
    """d = `count` bits of a from bit `start` on, extended by the sign bit."""
    first = np.minimum(start & U32(255), U32(31)).astype(np.int64)
    wide = a.astype(np.int64) >> first
    room = np.int64(64) - np.minimum(count & U32(255), U32(32)).astype(np.int64)
    bits = (wide << np.minimum(room, np.int64(63))) >> np.minimum(room, np.int64(63))
    return np.where(room == 64, np.int64(0), bits).astype(np.int32)


@value("bfi.b32", "b32 <- b32 b32 u32 u32")
def insert(a: Array, b: Array, start: Array, count: Array) -> Array:
    """d = b, with the first `count` bits of a in place of those from bit `start` on."""
    start, count = start & U32(255), count & U32(255)
    field = shift_left(shift_left(np.ones_like(a), count) - U32(1), start)
    return (b & ~field) | (shift_left(a, start) & field)


@value("prmt.b32", "b32 <- b32 b32 b32")
def permute_bytes(a: Array, b: Array, c: Array) -> Array:
    """Each byte of d is one of the eight of a and b, by four bits of c; bit 3: only its sign."""
    whole = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(a)
    for n in range(4):
        pick = (c >> U32(4 * n)) & U32(15)
        byte = (whole >> ((pick & U32(7)).astype(np.uint64) * np.uint64(8))).astype(U32) & U32(255)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        out = out | (np.where(pick & U32(8), sign, byte) << U32(8 * n))
    return out


@value("lop3.b32", "b32 <- b32 b32 b32 b32")
def look_up_bits(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Each bit of d is the bit of a table of eight, by those of a, b and c, a's the highest."""
    out = np.zeros_like(a | b | c)
    for n in range(8):
        bits = [x if n >> at & 1 else ~x for x, at in ((a, 2), (b, 1), (c, 0))]
        out = out | np.where(table >> U32(n) & U32(1), bits[0] & bits[1] & bits[2], U32(0))
    return out
