"""Instructions whose results depend on their operands alone.

Operands and results are arrays with one element for each thread. Sections of the PTX ISA: 9.7.1 to
9.7.4 arithmetic, 9.7.6 comparison, 9.7.8 logic and shifts, 9.7.9 conversion.
"""

from __future__ import annotations

import numpy as np

from attn_graph.testing.gpu.program import PARAMETERS
from attn_graph.testing.gpu.rules import Array, DType, value

UNSIGNED, SIGNED, BITS = "u16 u32 u64", "s16 s32 s64", "b16 b32 b64"
WHOLE = f"{UNSIGNED} {SIGNED}"
WIDER = {"T": "u16 s16 u32 s32", "W": "u32 s32 u64 s64"}
LEAST_NORMAL = np.float32(2.0**-126)
F32, F64, U16, U32 = np.float32, np.float64, np.uint16, np.uint32


@value("add.T", T=WHOLE)
def add(a: Array, b: Array) -> Array:
    """d = a + b, modulo 2^n."""
    return a + b


@value("sub.T", T=WHOLE)
def subtract(a: Array, b: Array) -> Array:
    """d = a - b, modulo 2^n."""
    return a - b


@value("mul.lo.T", T=WHOLE)
def multiply(a: Array, b: Array) -> Array:
    """d = a * b, modulo 2^n."""
    return a * b


@value("mul.wide.T", "W <- T T", **WIDER)
def multiply_wide(a: Array, b: Array) -> Array:
    """d = a * b, with twice as many bits."""
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.itemsize}")


@value("mul.hi.T", T="u32 s32")
def multiply_high(a: Array, b: Array) -> Array:
    """d = a * b >> 32."""
    wide = np.multiply(a, b, dtype=f"{a.dtype.kind}8")
    high: Array = np.right_shift(wide, wide.dtype.type(32)).astype(a.dtype)
    return high


@value("mad.lo.T", T=WHOLE)
def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, modulo 2^n."""
    return a * b + c


@value("mad.wide.T", "W <- T T W", **WIDER)
def multiply_add_wide(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, the product with twice as many bits."""
    return multiply_wide(a, b) + c


@value("div.T", T=WHOLE)
def divide(a: Array, b: Array) -> Array:
    """d = a / b, rounded towards zero. For b = 0 it is undefined; here all bits are set."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    down = a // safe
    up = (a % safe != 0) & ((a < 0) != (b < 0))
    ones = a.dtype.type(-1) if a.dtype.kind == "i" else np.iinfo(a.dtype).max
    quotient: Array = np.where(b == 0, ones, down + up).astype(a.dtype)
    return quotient


@value("rem.T", T=WHOLE)
def remainder(a: Array, b: Array) -> Array:
    """d = a - b * (a / b)."""
    rest: Array = a - b * divide(a, b)
    return rest


@value("abs.T", T=f"{SIGNED} f32")
def absolute(a: Array) -> Array:
    """d = |a|."""
    return np.abs(a)


@value("neg.T", T=f"{SIGNED} f32")
def negate(a: Array) -> Array:
    """d = -a."""
    return -a


@value("min.T", T=WHOLE)
def minimum(a: Array, b: Array) -> Array:
    """d = the smaller one."""
    return np.minimum(a, b)


@value("max.T", T=WHOLE)
def maximum(a: Array, b: Array) -> Array:
    """d = the larger one."""
    return np.maximum(a, b)


@value("min.relu.s32", "s32 <- s32 s32")
def minimum_relu(a: Array, b: Array) -> Array:
    """d = the smaller one, or 0 if it is negative."""
    return np.maximum(np.minimum(a, b), np.int32(0))


@value("max.relu.s32", "s32 <- s32 s32")
def maximum_relu(a: Array, b: Array) -> Array:
    """d = the larger one, or 0 if it is negative."""
    return np.maximum(np.maximum(a, b), np.int32(0))


@value("add.f32 add.rn.f32", "f32 <- f32 f32")
def add_float(a: Array, b: Array) -> Array:
    """d = a + b, rounded to nearest even."""
    return a + b


@value("sub.f32 sub.rn.f32", "f32 <- f32 f32")
def subtract_float(a: Array, b: Array) -> Array:
    """d = a - b, rounded to nearest even."""
    return a - b


@value("mul.f32 mul.rn.f32", "f32 <- f32 f32")
def multiply_float(a: Array, b: Array) -> Array:
    """d = a * b, rounded to nearest even."""
    return a * b


@value("fma.rn.f32", "f32 <- f32 f32 f32")
def fuse(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c. It is rounded to float64 first, which changes one result in about 2^29."""
    return (a.astype(F64) * b + c).astype(F32)


@value("fma.rn.ftz.f32", "f32 <- f32 f32 f32")
def fuse_flushing(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, with numbers below 2^-126 as 0."""
    return flush(fuse(flush(a), flush(b), flush(c)))


@value("fma.rn.f32.f16", "f32 <- f16 f16 f32")
def fuse_halves(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, with factors in float16."""
    return fuse(a, b, c)


@value("fma.rn.f32.bf16", "f32 <- bf16 bf16 f32")
def fuse_bfloats(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, with factors in bfloat16."""
    return fuse(widen_bfloat(a), widen_bfloat(b), c)


@value("add.f32.f16 add.rn.f32.f16", "f32 <- f16 f32")
def add_half(a: Array, b: Array) -> Array:
    """d = a + b, with a in float16."""
    return a.astype(F32) + b


@value("add.f32.bf16 add.rn.f32.bf16", "f32 <- bf16 f32")
def add_bfloat(a: Array, b: Array) -> Array:
    """d = a + b, with a in bfloat16."""
    return widen_bfloat(a) + b


@value("div.full.f32 div.rn.f32", "f32 <- f32 f32")
def divide_float(a: Array, b: Array) -> Array:
    """d = a / b. `full` may be off by two units in the last place on a GPU; here it is exact."""
    return a / b


@value("rcp.rn.f32 rcp.approx.ftz.f32", "f32 <- f32")
def reciprocal(a: Array) -> Array:
    """d = 1 / a; `approx` is exact here."""
    return F32(1) / a


@value("min.f32", "f32 <- f32 f32 f32?")
def minimum_float(a: Array, *others: Array) -> Array:
    """d = the smallest one; NaN counts only if all are NaN."""
    for b in others:
        a = np.fmin(a, b)
    return a


@value("max.f32", "f32 <- f32 f32 f32?")
def maximum_float(a: Array, *others: Array) -> Array:
    """d = the largest one; NaN counts only if all are NaN."""
    for b in others:
        a = np.fmax(a, b)
    return a


@value("ex2.approx.ftz.f32", "f32 <- f32")
def power_of_two(a: Array) -> Array:
    """d = 2^a, correctly rounded here; results below 2^-126 are 0."""
    return flush(np.exp2(flush(a)))


@value("lg2.approx.f32", "f32 <- f32")
def logarithm(a: Array) -> Array:
    """d = log2(a), correctly rounded here."""
    return np.log2(a)


@value("lg2.approx.ftz.f32", "f32 <- f32")
def logarithm_flushing(a: Array) -> Array:
    """d = log2(a), with numbers below 2^-126 as 0."""
    return np.log2(flush(a))


@value("tanh.approx.f32", "f32 <- f32")
def hyperbolic_tangent(a: Array) -> Array:
    """d = tanh(a), correctly rounded here."""
    return np.tanh(a)


@value("copysign.f32", "b32 <- b32 b32")
def copy_sign(a: Array, b: Array) -> Array:
    """d = |b| with the sign of a."""
    return (a & U32(0x80000000)) | (b & U32(0x7FFFFFFF))


@value("add.f32x2 add.rn.f32x2", "f32x2 <- f32x2 f32x2")
def add_pairs(a: Array, b: Array) -> Array:
    """d = a + b, for two numbers in each."""
    return join(parts(a) + parts(b))


@value("sub.f32x2 sub.rn.f32x2", "f32x2 <- f32x2 f32x2")
def subtract_pairs(a: Array, b: Array) -> Array:
    """d = a - b, for two numbers in each."""
    return join(parts(a) - parts(b))


@value("mul.f32x2 mul.rn.f32x2", "f32x2 <- f32x2 f32x2")
def multiply_pairs(a: Array, b: Array) -> Array:
    """d = a * b, for two numbers in each."""
    return join(parts(a) * parts(b))


@value("fma.rn.f32x2", "f32x2 <- f32x2 f32x2 f32x2")
def fuse_pairs(a: Array, b: Array, c: Array) -> Array:
    """d = a * b + c, for two numbers in each."""
    return join(fuse(parts(a), parts(b), parts(c)))


@value("and.T", T=f"{BITS} pred")
def both(a: Array, b: Array) -> Array:
    """d = a & b."""
    return a & b


@value("or.T", T=f"{BITS} pred")
def either(a: Array, b: Array) -> Array:
    """d = a | b."""
    return a | b


@value("xor.T", T=f"{BITS} pred")
def exclusive(a: Array, b: Array) -> Array:
    """d = a ^ b."""
    return a ^ b


@value("not.T", T=f"{BITS} pred")
def invert(a: Array) -> Array:
    """d = ~a."""
    return ~a


@value("popc.b32", "u32 <- b32")
def count_ones(a: Array) -> Array:
    """d = how many bits of a are 1."""
    return np.bitwise_count(a).astype(U32)


@value("shl.T", "T <- T u32", T=BITS)
def shift_left(a: Array, b: Array) -> Array:
    """d = a << b; 0 if b is at least the number of bits."""
    bits = 8 * a.itemsize
    moved: Array = np.left_shift(a, (b & U32(bits - 1)).astype(a.dtype))
    return np.where(b < bits, moved, a.dtype.type(0))


@value("shr.T", "T <- T u32", T=f"{WHOLE} {BITS}")
def shift_right(a: Array, b: Array) -> Array:
    """d = a >> b, filled with the sign bit. A large b shifts all bits out."""
    last = U32(8 * a.itemsize - 1)
    moved: Array = np.right_shift(a, np.minimum(b, last).astype(a.dtype))
    return moved if a.dtype.kind == "i" else np.where(b <= last, moved, a.dtype.type(0))


@value("setp.eq.T", "pred <- T T", T=f"{WHOLE} {BITS} f16 f32")
def equal(a: Array, b: Array) -> Array:
    """d = a == b; false for NaN."""
    return np.equal(a, b)


@value("setp.eq.bf16", "pred <- bf16 bf16")
def equal_bfloat(a: Array, b: Array) -> Array:
    """d = a == b; false for NaN."""
    return np.equal(widen_bfloat(a), widen_bfloat(b))


@value("setp.eq.f16x2", "pred|pred <- b32 b32")
def equal_halves(a: Array, b: Array) -> tuple[Array, Array]:
    """d, e = a == b, for the lower halves in float16, and for the upper ones."""
    low, high = (np.equal(*(half_of(x, at).view(np.float16) for x in (a, b))) for at in (0, 16))
    return low, high


@value("setp.eq.bf16x2", "pred|pred <- b32 b32")
def equal_bfloats(a: Array, b: Array) -> tuple[Array, Array]:
    """d, e = a == b, for the lower halves in bfloat16, and for the upper ones."""
    low, high = (equal_bfloat(half_of(a, at), half_of(b, at)) for at in (0, 16))
    return low, high


def half_of(a: Array, at: int) -> Array:
    half: Array = (a >> U32(at)).astype(U16)
    return half


@value("setp.ne.T", "pred <- T T", T=f"{WHOLE} {BITS}")
def unequal(a: Array, b: Array) -> Array:
    """d = a != b."""
    return np.not_equal(a, b)


@value("setp.lt.T", "pred <- T T", T=f"{WHOLE} f16 f32")
def less(a: Array, b: Array) -> Array:
    """d = a < b; false for NaN."""
    return a < b


@value("setp.le.T", "pred <- T T", T=f"{WHOLE} f16 f32")
def at_most(a: Array, b: Array) -> Array:
    """d = a <= b; false for NaN."""
    return a <= b


@value("setp.gt.T", "pred <- T T", T=f"{WHOLE} f16 f32")
def greater(a: Array, b: Array) -> Array:
    """d = a > b; false for NaN."""
    return a > b


@value("setp.ge.T", "pred <- T T", T=f"{WHOLE} f16 f32")
def at_least(a: Array, b: Array) -> Array:
    """d = a >= b; false for NaN."""
    return a >= b


@value("setp.ne.T", "pred <- T T", T="f16 f32")
def unequal_ordered(a: Array, b: Array) -> Array:
    """d = a != b; false for NaN."""
    return (a < b) | (a > b)


@value("setp.neu.T", "pred <- T T", T="f16 f32")
def unequal_unordered(a: Array, b: Array) -> Array:
    """d = a != b; true for NaN."""
    return np.not_equal(a, b)


@value("setp.nan.T", "pred <- T T", T="f16 f32")
def has_nan(a: Array, b: Array) -> Array:
    """d: one of them is NaN."""
    return np.isnan(a) | np.isnan(b)


@value("setp.num.T", "pred <- T T", T="f16 f32")
def has_no_nan(a: Array, b: Array) -> Array:
    """d: none of them is NaN."""
    return ~has_nan(a, b)


@value("selp.T", "T <- T T pred", T=f"{WHOLE} {BITS} f32")
def select(a: Array, b: Array, c: Array) -> Array:
    """d = a where c, else b."""
    return np.where(c, a, b)


@value("cvta.param.u64", "u64 <- u64")
def generic_address(a: Array) -> Array:
    """d = the generic address of a parameter."""
    return a + np.uint64(PARAMETERS)


@value("cvt.D.S", "D <- S", D="u16 u16 u32 u32 u32 u64 u64 u64", S="u32 u8 u16 u64 u8 u32 u16 u8")
@value("cvt.D.S", "D <- S", D="s64 s32 s32 s16 s16 s64 u64 s32", S="s32 s64 s16 s32 s8 s16 s32 s8")
@value("cvt.D.S", "D <- S", D="s8", S="s32")
@value("cvt.rn.D.S", "D <- S", D="f32 f32 f32 f32 f32 f32 f16", S="s32 u32 s64 u64 s8 s16 s16")
def convert(a: Array, to: DType) -> Array:
    """d = a in another type: its lowest bits, or extended by zeros or its sign, or rounded."""
    return a.astype(to)


@value("cvt.rzi.D.S", "D <- S", D="s32 u32", S="f32 f32")
def truncate(a: Array, to: DType) -> Array:
    """d = a towards zero, within the range of the type; NaN becomes 0."""
    limits = np.iinfo(to)
    return np.nan_to_num(np.trunc(a).astype(F64)).clip(limits.min, limits.max).astype(to)


@value("cvt.f32.f16", "f32 <- f16")
def widen_half(a: Array) -> Array:
    """d = a in float32."""
    return a.astype(F32)


@value("cvt.f32.bf16", "f32 <- bf16")
def widen_bfloat(a: Array) -> Array:
    """d = a in float32, with the bits of bfloat16 first."""
    return (a.astype(U32) << U32(16)).view(F32)


@value("cvt.rn.f16.f32", "f16 <- f32")
def round_half(a: Array) -> Array:
    """d = a in float16, rounded to nearest even."""
    return a.astype(np.float16)


@value("cvt.rn.bf16.f32", "bf16 <- f32")
def round_bfloat(a: Array) -> Array:
    """d = a in bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(a).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)  # 1 if it is odd
    return np.where(np.isnan(a), U16(0x7FFF), rounded).astype(U16)


@value("cvt.rn.f16x2.f32", "b32 <- f32 f32")
def round_halves(a: Array, b: Array) -> Array:
    """d = a and b in float16, side by side; b has the lower bits."""
    return stack(round_half(a).view(U16), round_half(b).view(U16))


@value("cvt.rn.bf16x2.f32", "b32 <- f32 f32")
def round_bfloats(a: Array, b: Array) -> Array:
    """d = a and b in bfloat16, side by side; b has the lower bits."""
    return stack(round_bfloat(a), round_bfloat(b))


def stack(high: Array, low: Array) -> Array:
    """16 bits and 16 bits as 32."""
    return (high.astype(U32) << U32(16)) | low


def flush(a: Array) -> Array:
    """Numbers below 2^-126 as zeros with their sign."""
    return np.where(np.abs(a) < LEAST_NORMAL, a * F32(0), a)


def parts(a: Array) -> Array:
    """64 bits as two numbers in float32, [threads, 2]."""
    return np.ascontiguousarray(a).view(F32).reshape(-1, 2)


def join(a: Array) -> Array:
    """Two numbers in float32 as 64 bits."""
    return np.ascontiguousarray(a).view(np.uint64).reshape(-1)
