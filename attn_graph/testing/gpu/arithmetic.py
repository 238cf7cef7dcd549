"""Instructions whose results depend on their operands alone.

Operands and results are arrays with one element for each thread. Sections of the PTX ISA: 9.7.1 to
9.7.4 arithmetic, 9.7.6 comparison, 9.7.8 logic and shifts, 9.7.9 conversion. Approximations of a
GPU are correctly rounded here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch

from attn_graph.testing.gpu.program import PARAMETERS
from attn_graph.testing.gpu.rules import Array, DType, values

UNSIGNED, SIGNED, BITS = "u16 u32 u64", "s16 s32 s64", "b16 b32 b64"
WHOLE = f"{UNSIGNED} {SIGNED}"
TWICE = "u16/u32 s16/s32 u32/u64 s32/s64"  # types, and those of twice as many bits
HALF = "f16 bf16"
LEAST_NORMAL = np.float32(2.0**-126)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # as instructions of PTX make it
F32, F64, U16, U32 = np.float32, np.float64, np.uint16, np.uint32
I32, I64, U64 = np.int32, np.int64, np.uint64


def widen_bytes(numbers: Array) -> Array:
    """The bits of numbers in float16, with PTX's for NaN."""
    return np.where(np.isnan(numbers), U16(0x7FFF), numbers.view(U16))


FLOAT8 = {  # each number of 8 bits in float16, by its bits
    name: widen_bytes(torch.arange(256, dtype=torch.uint8).view(kind).half().numpy())
    for name, kind in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
}


def divide(a: Array, b: Array) -> Array:
    """a / b, rounded towards zero. For b = 0 it is undefined; here all bits are set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    down = a // safe
    up = (a % safe != 0) & ((a < 0) != (b < 0))
    ones = a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max
    quotient: Array = np.where(b == 0, ones, down + up).astype(a.dtype)
    return quotient


def add_halves(a: Array, b: Array) -> Array:
    """a + b, the lower 16 bits and the upper ones by themselves."""
    low, high = a & U32(0xFFFF), a >> U32(16)
    return (low + b & U32(0xFFFF)) | (high + (b >> U32(16)) << U32(16))


def multiply_wide(a: Array, b: Array) -> Array:
    """a * b, with twice as many bits."""
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.itemsize}")


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of a * b."""
    wide = multiply_wide(a, b)
    high: Array = np.right_shift(wide, wide.dtype.type(8 * a.itemsize)).astype(a.dtype)
    return high


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
values(("T <- T", f"{SIGNED} f32"), {"abs.T": np.abs, "neg.T": operator.neg})
values(
    ("T <- T T", "s32"),
    {
        "min.relu.T": lambda a, b: np.maximum(np.minimum(a, b), I32(0)),
        "max.relu.T": lambda a, b: np.maximum(np.maximum(a, b), I32(0)),
    },
)


# Floating-point numbers


def fuse(a: Array, b: Array, c: Array) -> Array:
    """a * b + c. It is rounded to float64 first, which changes one result in about 2^29."""
    return (a.astype(F64) * b + c).astype(F32)


def add_down(a: Array, b: Array) -> Array:
    """a + b, rounded towards minus infinity, by a sum that float64 may not hold exactly."""
    a, b = a.astype(F64), b.astype(F64)
    total = a + b
    more = total - a
    rest = (a - (total - more)) + (b - more)  # the rounding error of float64 (Knuth)
    near = total.astype(F32)
    above = np.isfinite(total) & ((near > total) | ((near == total) & (rest < 0)))
    return np.where(above, np.nextafter(near, F32(-np.inf)), near)


def flush(a: Array) -> Array:
    """Numbers below 2^-126 as zeros with their sign."""
    small = np.abs(a) < LEAST_NORMAL
    return np.where(small, a * F32(0), a) if small.any() else a


def extreme(choose: Callable[..., Array], zeros: Callable[..., Array]) -> Callable[..., Array]:
    """The smallest or largest number, by a function of NumPy's; +0 is larger than -0.

    zeros: of their bits. NaN has the bits of PTX.
    """

    def chosen(a: Array, *others: Array) -> Array:
        for b in others:
            both, first, a = (a == 0) & (b == 0), a, choose(a, b)
            if both.any():
                a = np.where(both, zeros(first.view(U32), b.view(U32)).view(F32), a)
        missing = np.isnan(a)
        return np.where(missing, NAN, a) if missing.any() else a

    return chosen


smallest, largest = extreme(np.fmin, operator.or_), extreme(np.fmax, operator.and_)


def widen(a: Array) -> Array:
    """Halves in float32: float16, or the bits of bfloat16."""
    return a.astype(F32) if a.dtype.kind == "f" else (a.astype(U32) << U32(16)).view(F32)


def in_pairs(combine: Callable[..., Array]) -> Callable[..., Array]:
    """An instruction on the two numbers in float32 that each operand of 64 bits holds."""

    def both(*operands: Array) -> Array:
        pairs = (np.ascontiguousarray(x).view(F32).reshape(-1, 2) for x in operands)
        return np.ascontiguousarray(combine(*pairs)).view(U64).reshape(-1)

    return both


values(
    ("f32 <- f32 f32", ""),
    {
        "add.f32 add.rn.f32": operator.add,
        "sub.f32 sub.rn.f32": operator.sub,
        "mul.f32 mul.rn.f32": operator.mul,
        "div.full.f32 div.rn.f32": operator.truediv,
        "add.rm.f32": add_down,
    },
)
values(
    ("f32 <- f32 f32 f32", ""),
    {
        "fma.rn.f32": fuse,
        "fma.rn.ftz.f32": lambda a, b, c: flush(fuse(flush(a), flush(b), flush(c))),
    },
)
values(("f32 <- f32 f32 f32?", ""), {"min.f32": smallest, "max.f32": largest})
values(
    ("f32 <- f32", ""),
    {
        "rcp.rn.f32": lambda a: F32(1) / a,
        "rcp.approx.ftz.f32": lambda a: flush(F32(1) / flush(a)),
        "ex2.approx.ftz.f32": lambda a: flush(np.exp2(flush(a))),
        "lg2.approx.f32": np.log2,
        "lg2.approx.ftz.f32": lambda a: np.log2(flush(a)),
        "tanh.approx.f32": np.tanh,
    },
)
values(
    ("f32x2 <- f32x2 f32x2", ""),
    {
        "add.f32x2 add.rn.f32x2": in_pairs(operator.add),
        "sub.f32x2 sub.rn.f32x2": in_pairs(operator.sub),
        "mul.f32x2 mul.rn.f32x2": in_pairs(operator.mul),
        "add.rm.f32x2": in_pairs(add_down),
    },
)
values(("f32x2 <- f32x2 f32x2 f32x2", ""), {"fma.rn.f32x2": in_pairs(fuse)})
values(("f32 <- T T f32", HALF), {"fma.rn.f32.T": lambda a, b, c: fuse(widen(a), widen(b), c)})
values(("f32 <- T f32", HALF), {"add.f32.T add.rn.f32.T": lambda a, b: widen(a) + b})


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
    first = np.minimum(start & U32(255), U32(31)).astype(I64)
    wide = a.astype(I64) >> first
    room = I64(64) - np.minimum(count & U32(255), U32(32)).astype(I64)
    bits = (wide << np.minimum(room, I64(63))) >> np.minimum(room, I64(63))
    return np.where(room == 64, I64(0), bits).astype(I32)


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


values(
    ("T <- T T", f"{BITS} pred"),
    {"and.T": operator.and_, "or.T": operator.or_, "xor.T": operator.xor},
)
values(("T <- T", f"{BITS} pred"), {"not.T": operator.invert})
values(("u32 <- b32", ""), {"popc.b32": lambda a: np.bitwise_count(a).astype(U32)})
values(("T <- T u32", BITS), {"shl.T": shift_left})
values(("T <- T u32", f"{WHOLE} {BITS}"), {"shr.T": shift_right})
values(("T <- T u32 u32", "u32 u64"), {"bfe.T": extract})
values(("T <- T u32 u32", "s32"), {"bfe.T": extract_signed})
values(("b32 <- b32 b32", ""), {"add.s16x2 add.u16x2": add_halves})
values(("b32 <- b32 b32 u32 u32", ""), {"bfi.b32": insert})
values(("b32 <- b32 b32 b32", ""), {"prmt.b32": permute_bytes})
values(("b32 <- b32 b32 b32 b32", ""), {"lop3.b32": look_up_bits})
values(
    ("b32 <- b32 b32", ""),
    {"copysign.f32": lambda a, b: (a & U32(0x80000000)) | (b & U32(0x7FFFFFFF))},
)


# Comparisons: false for NaN, but for neu and nan


def has_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def in_halves(compare: Callable[..., Array], kind: DType) -> Callable[..., tuple[Array, Array]]:
    """A comparison of the lower halves of 32 bits, and of the upper ones."""

    def both(a: Array, b: Array) -> tuple[Array, Array]:
        low, high = (compare(*(half(x, at).view(kind) for x in (a, b))) for at in (0, 16))
        return low, high

    return both


def half(a: Array, at: int) -> Array:
    """The 16 bits from bit `at` on."""
    return (a >> U32(at)).astype(U16)


def equal_halves(a: Array, b: Array) -> Array:
    return np.equal(widen(a), widen(b))


values(("pred <- T T", f"{WHOLE} {BITS} f32"), {"setp.eq.T": operator.eq})
values(("pred <- T T", HALF), {"setp.eq.T": equal_halves})
values(("pred|pred <- b32 b32", ""), {"setp.eq.f16x2": in_halves(equal_halves, np.dtype("f2"))})
values(("pred|pred <- b32 b32", ""), {"setp.eq.bf16x2": in_halves(equal_halves, np.dtype("u2"))})
values(("pred <- T T", f"{WHOLE} {BITS}"), {"setp.ne.T": operator.ne})
values(
    ("pred <- T T", f"{WHOLE} f16 f32"),
    {
        "setp.lt.T": operator.lt,
        "setp.le.T": operator.le,
        "setp.gt.T": operator.gt,
        "setp.ge.T": operator.ge,
    },
)
values(
    ("pred <- T T", "f16 f32"),
    {
        "setp.ne.T": lambda a, b: (a < b) | (a > b),
        "setp.neu.T": operator.ne,
        "setp.nan.T": has_nan,
        "setp.num.T": lambda a, b: ~has_nan(a, b),
    },
)
values(
    ("T <- T T pred", f"{WHOLE} {BITS} f32"),
    {"selp.T": lambda a, b, c: np.where(c, a, b)},
)


# Conversions


def convert(a: Array, to: DType) -> Array:
    """The lowest bits; or extended by zeros or its sign; or rounded to nearest even."""
    return a.astype(to)


def truncate(a: Array, to: DType) -> Array:
    """Towards zero, within the range of the type; NaN becomes 0."""
    limits, whole = np.iinfo(to), np.where(np.isnan(a), 0, np.trunc(a.astype(F64)))
    inside = whole.clip(limits.min, np.nextafter(F64(2.0) ** (limits.max.bit_length()), F64(0)))
    most = whole >= F64(limits.max)  # of 64 bits, float64 has none
    return np.where(most, to.type(limits.max), inside.astype(to))


def round_bfloat(a: Array) -> Array:
    """A number in bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(a).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)  # 1 if it is odd
    return np.where(np.isnan(a), U16(0x7FFF), rounded).astype(U16)


def round_half(a: Array) -> Array:
    """The bits of a number in float16, rounded to nearest even."""
    return a.astype(np.float16).view(U16)


def stack(high: Array, low: Array) -> Array:
    """16 bits and 16 bits as 32."""
    return (high.astype(U32) << U32(16)) | low


def widen_float8(table: Array) -> Callable[[Array], Array]:
    """Both numbers of 8 bits in float16, which holds them exactly."""
    return lambda a: stack(table[a >> U16(8)], table[a & U16(255)])


values(
    ("W <- T to", "u32/u16 u8/u16 u16/u32 u64/u32 u8/u32 u32/u64 u16/u64 u8/u64"),
    {"cvt.W.T": convert},
)
values(
    ("W <- T to", "s32/s64 s64/s32 s16/s32 s32/s16 s8/s16 s16/s64 s32/u64 s8/s32 s32/s8"),
    {"cvt.W.T": convert},
)
values(
    ("W <- T to", "s32/f32 u32/f32 s64/f32 u64/f32 s8/f32 s16/f32 s16/f16 f32/f16"),
    {"cvt.rn.W.T": convert},
)
values(("W <- f32 to", "f32/s32 f32/u32"), {"cvt.rzi.W.T": truncate})
values(("f32 <- T", HALF), {"cvt.f32.T": widen})
values(("bf16 <- f32", ""), {"cvt.rn.bf16.f32": round_bfloat})
values(("bf16 <- f16", ""), {"cvt.bf16.f16": lambda a: round_bfloat(widen(a))})
values(
    ("b32 <- f32 f32", ""),
    {
        "cvt.rn.f16x2.f32": lambda a, b: stack(round_half(a), round_half(b)),
        "cvt.rn.bf16x2.f32": lambda a, b: stack(round_bfloat(a), round_bfloat(b)),
    },
)
values(
    ("b32 <- b16", ""),
    {
        "cvt.rn.f16x2.e4m3x2": widen_float8(FLOAT8["e4m3"]),
        "cvt.rn.f16x2.e5m2x2": widen_float8(FLOAT8["e5m2"]),
    },
)
values(("u64 <- u64", ""), {"cvta.param.u64": lambda a: a + U64(PARAMETERS)})
