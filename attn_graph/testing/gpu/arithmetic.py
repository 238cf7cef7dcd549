"""Instructions on whole numbers and bits, whose results depend on their operands alone.

Operands and results are arrays with one element for each thread. Sections of the PTX ISA: 9.7.1
arithmetic, 9.7.6 comparison, 9.7.8 logic and shifts, 9.7.9 conversion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from attn_graph.testing.gpu.program import PARAMETERS
from attn_graph.testing.gpu.rules import Array, DType, values

UNSIGNED, SIGNED, BITS = "u16 u32 u64", "s16 s32 s64", "b16 b32 b64"
WHOLE = f"{UNSIGNED} {SIGNED}"
TWICE = "u16/u32 s16/s32 u32/u64 s32/s64"  # types, and those of twice as many bits
U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
COMPARED: dict[str, Callable[..., Array]] = {
    name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")
}


def divide(a: Array, b: Array) -> Array:
    """a / b, rounded towards zero. For b = 0 it is undefined; here all bits are set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    down = a // safe
    up = (a % safe != 0) & ((a < 0) != (b < 0))
    ones = a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max
    quotient: Array = np.where(b == 0, ones, down + up).astype(a.dtype)
    return quotient


def multiply_wide(a: Array, b: Array) -> Array:
    """a * b, with twice as many bits."""
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.itemsize}")


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a * b."""
    wide = multiply_wide(a, b)
    high: Array = np.right_shift(wide, wide.dtype.type(8 * a.itemsize)).astype(a.dtype)
    return high


def multiply_high_wide(a: Array, b: Array) -> Array:
    """a * b >> 64."""
    exact = a.astype(object) * b.astype(object)
    return np.array([x >> 64 for x in exact], a.dtype)


def in_pairs(combine: Callable[..., Array], part: str, whole: str) -> Callable[..., Array]:
    """An instruction on the two numbers in each operand, side by side."""

    def both(*operands: Array) -> Array:
        pairs = (np.ascontiguousarray(x).view(part).reshape(-1, 2) for x in operands)
        return np.ascontiguousarray(combine(*pairs)).view(whole).reshape(-1)

    return both


values(
    ("T <- T T", WHOLE),
    {
        "add.T": operator.add,
        "sub.T": operator.sub,
        "mul.lo.T": operator.mul,
        "div.T": divide,
        "rem.T": lambda a, b: a - b * divide(a, b),
        "min.T": np.minimum,
        "max.T": np.maximum,
    },
)
values(("T <- T T T", WHOLE), {"mad.lo.T": lambda a, b, c: a * b + c})
values(("W <- T T", TWICE), {"mul.wide.T": multiply_wide})
values(("W <- T T W", TWICE), {"mad.wide.T": lambda a, b, c: multiply_wide(a, b) + c})
values(("T <- T T", "u16 s16 u32 s32"), {"mul.hi.T": multiply_high})
values(("T <- T T", "u64 s64"), {"mul.hi.T": multiply_high_wide})
values(("b32 <- b32 b32", ""), {"add.s16x2 add.u16x2": in_pairs(operator.add, "u2", "u4")})
values(("T <- T", SIGNED), {"abs.T": np.abs, "neg.T": operator.neg})
values(
    ("T <- T T", "s32"),
    {
        "min.relu.T": lambda a, b: np.maximum(np.minimum(a, b), I32(0)),
        "max.relu.T": lambda a, b: np.maximum(np.maximum(a, b), I32(0)),
    },
)


# Bits


def shift_left(a: Array, b: Array) -> Array:
    """a << b; 0 if b is at least the number of bits."""
    bits = 8 * a.itemsize
    moved: Array = np.left_shift(a, (b & U32(bits - 1)).astype(a.dtype))
    return np.where(b < bits, moved, a.dtype.type(0))


def shift_right(a: Array, b: Array) -> Array:
    """a >> b, filled with the sign bit. A large b shifts all bits out."""
    last = U32(8 * a.itemsize - 1)
    moved: Array = np.right_shift(a, np.minimum(b, last).astype(a.dtype))
    return moved if a.dtype.kind == "i" else np.where(b <= last, moved, a.dtype.type(0))


def extract(a: Array, start: Array, count: Array) -> Array:
    """`count` bits of a from bit `start` on; bits after the last one are 0."""
    start, count = start & U32(255), count & U32(255)
    bits: Array = shift_left(np.ones_like(a), count) - a.dtype.type(1)
    return shift_right(a, start) & bits


def extract_signed(a: Array, start: Array, count: Array) -> Array:
    """`count` bits of a from bit `start` on, extended by the sign bit."""
    bits = 8 * a.itemsize
    first = np.minimum(start & U32(255), U32(bits - 1)).astype(I64)
    room = I64(64) - np.minimum(count & U32(255), U32(bits)).astype(I64)
    moved = a.astype(I64) >> first << np.minimum(room, I64(63)) >> np.minimum(room, I64(63))
    return np.where(room == 64, I64(0), moved).astype(a.dtype)


def insert(a: Array, b: Array, start: Array, count: Array) -> Array:
    """b, with the first `count` bits of a in place of those from bit `start` on."""
    start, count = start & U32(255), count & U32(255)
    field = shift_left(shift_left(np.ones_like(a), count) - U32(1), start)
    return (b & ~field) | (shift_left(a, start) & field)


def permute_bytes(a: Array, b: Array, c: Array) -> Array:
    """Each byte is one of the eight of a and b, by four bits of c; bit 3: only its sign."""
    whole = a.astype(U64) | (b.astype(U64) << U64(32))
    out = np.zeros_like(a)
    for n in range(4):
        pick = (c >> U32(4 * n)) & U32(15)
        byte = (whole >> ((pick & U32(7)).astype(U64) * U64(8))).astype(U32) & U32(255)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        out = out | (np.where(pick & U32(8), sign, byte) << U32(8 * n))
    return out


def look_up_bits(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Each bit is the bit of a table of eight, by those of a, b and c, a's the highest."""
    out = np.zeros_like(a | b | c)
    for n in range(8):
        bits = [x if n >> at & 1 else ~x for x, at in ((a, 2), (b, 1), (c, 0))]
        out = out | np.where(table >> U32(n) & U32(1), bits[0] & bits[1] & bits[2], U32(0))
    return out


def count_zeros(a: Array) -> Array:
    """Zeros before the first one from above."""
    found, bits = np.full(a.shape, 8 * a.itemsize, U32), 8 * a.itemsize
    for n in range(bits):
        found = np.where(a >> a.dtype.type(n) & a.dtype.type(1) != 0, U32(bits - 1 - n), found)
    return found


def reverse_bits(a: Array) -> Array:
    out, bits = np.zeros_like(a), 8 * a.itemsize
    for n in range(bits):
        out |= (a >> a.dtype.type(n) & a.dtype.type(1)) << a.dtype.type(bits - 1 - n)
    return out


def funnel(a: Array, b: Array, by: Array, left: bool, wrap: bool) -> Array:
    """The upper 32 bits of b and a, shifted left; or the lower ones, shifted right."""
    whole = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    count = (by & U32(31) if wrap else np.minimum(by, U32(32))).astype(np.uint64)
    moved = (whole << count) >> np.uint64(32) if left else whole >> count
    return np.asarray(moved.astype(U32))


values(
    ("T <- T T", f"{BITS} pred"),
    {"and.T": operator.and_, "or.T": operator.or_, "xor.T": operator.xor},
)
values(("T <- T", f"{BITS} pred"), {"not.T": operator.invert})
values(
    ("u32 <- T", "b32 b64"),
    {"popc.T": lambda a: np.bitwise_count(a).astype(U32), "clz.T": count_zeros},
)
values(("T <- T", "b32 b64"), {"brev.T": reverse_bits})
values(("T <- T u32", BITS), {"shl.T": shift_left})
values(("T <- T u32", f"{WHOLE} {BITS}"), {"shr.T": shift_right})
values(("T <- T u32 u32", "u32 u64"), {"bfe.T": extract})
values(("T <- T u32 u32", "s32 s64"), {"bfe.T": extract_signed})
values(("b32 <- b32 b32 u32 u32", ""), {"bfi.b32": insert})
values(("b32 <- b32 b32 b32", ""), {"prmt.b32": permute_bytes})
values(("b32 <- b32 b32 b32 b32", ""), {"lop3.b32": look_up_bits})
values(
    ("b32 <- b32 b32", ""),
    {"copysign.f32": lambda a, b: (a & U32(0x80000000)) | (b & U32(0x7FFFFFFF))},
)
values(
    ("b32 <- b32 b32 u32", ""),
    {
        f"shf.{way}.{mode}.b32": lambda a, b, c, left=way == "l", wrap=mode == "wrap": funnel(
            a, b, c, left, wrap
        )
        for way in "lr"
        for mode in ("wrap", "clamp")
    },
)


# Comparison and conversion


def convert(a: Array, to: DType) -> Array:
    """The lowest bits; or extended by zeros or its sign; or rounded to nearest even."""
    return a.astype(to)


values(("pred <- T T", WHOLE), {f"setp.{name}.T": x for name, x in COMPARED.items()})
values(("pred <- T T", BITS), {"setp.eq.T": operator.eq})
values(("pred <- T T", f"{WHOLE} {BITS}"), {"setp.ne.T": operator.ne})
values(
    ("T <- T T pred", f"{WHOLE} {BITS} f16 f32 f64"), {"selp.T": lambda a, b, c: np.where(c, a, b)}
)
CONVERTED = "u32/u16 u8/u16 u16/u32 u64/u32 u8/u32 u32/u64 u16/u64 u8/u64 u64/u16 "
CONVERTED += "s32/s64 s64/s32 s16/s32 s32/s16 s8/s16 s16/s64 s32/u64 s8/s32 s32/s8 s64/s8"
values(("W <- T to", CONVERTED), {"cvt.W.T": convert})
values(("u64 <- u64", ""), {"cvta.param.u64": lambda a: a + U64(PARAMETERS)})
