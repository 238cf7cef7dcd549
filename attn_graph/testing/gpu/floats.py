"""Instructions on floating-point numbers: of 16 and 64 bits, approximations, and rounding.

PTX ISA 9.7.3 to 9.7.6 and 9.7.9. Numbers of 16 bits are computed in float32, which has more than
twice their bits, and rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

from attn_graph.testing.gpu.arithmetic import (
    F32,
    F64,
    NAN,
    U16,
    U32,
    flush,
    fuse,
    half,
    has_nan,
    largest,
    round_bfloat,
    smallest,
    stack,
    truncate,
    widen,
)
from attn_graph.testing.gpu.rules import Array, DType, values

Function = Callable[..., Array]
FLOATS = "f32 f64"


def with_flushing(function: Function) -> Function:
    """An instruction with .ftz: operands and results below 2^-126 are zeros."""
    return lambda *x: flush(function(*map(flush, x)))


def with_nan(function: Function) -> Function:
    """An instruction with .NaN: NaN if an operand is NaN."""
    return lambda *x: np.where(np.isnan(sum(x)) & np.any(np.isnan(x), 0), NAN, function(*x))


ROUNDED: dict[str, Function] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
APPROXIMATED: dict[str, Function] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda a: F32(1) / np.sqrt(a),
    "rcp": lambda a: F32(1) / a,
    "sin": np.sin,
    "cos": np.cos,
}
for name, function in ROUNDED.items():
    values(
        ("f32 <- f32 f32", ""),
        {f"{name}.ftz.f32 {name}.rn.ftz.f32": with_flushing(function)},
    )
    values(("f64 <- f64 f64", ""), {f"{name}.f64 {name}.rn.f64": function})
for name, function in APPROXIMATED.items():
    values(
        ("f32 <- f32", ""),
        {f"{name}.approx.f32": function, f"{name}.approx.ftz.f32": with_flushing(function)},
    )
values(("f32 <- f32", ""), {"sqrt.rn.f32": np.sqrt, "sqrt.rn.ftz.f32": with_flushing(np.sqrt)})
values(("f32 <- f32", ""), {"ex2.approx.f32": np.exp2, "abs.ftz.f32": with_flushing(np.abs)})
values(("f32 <- f32", ""), {"neg.ftz.f32": with_flushing(np.negative)})
values(
    ("f32 <- f32 f32", ""),
    {
        "div.approx.f32": operator.truediv,
        "div.full.ftz.f32 div.rn.ftz.f32 div.approx.ftz.f32": with_flushing(operator.truediv),
        "min.ftz.f32": with_flushing(smallest),
        "max.ftz.f32": with_flushing(largest),
    },
)
values(
    ("f32 <- f32 f32 f32?", ""),
    {"min.NaN.f32": with_nan(smallest), "max.NaN.f32": with_nan(largest)},
)
values(("f64 <- f64 f64 f64", ""), {"fma.rn.f64": lambda a, b, c: fuse_exactly(a, b, c)})
values(
    ("f64 <- f64 f64", ""), {"div.rn.f64": operator.truediv, "min.f64": np.fmin, "max.f64": np.fmax}
)
values(("f64 <- f64", ""), {"abs.f64": np.abs, "neg.f64": operator.neg, "sqrt.rn.f64": np.sqrt})


def fuse_exactly(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, rounded once: by fractions, one thread after another."""
    made = np.asarray(a * b + c, F64)
    for n, x in enumerate(zip(*np.broadcast_arrays(a, b, c), strict=True)):
        if np.isfinite((*x, made[n])).all() and made[n]:
            i, j, k = map(Fraction, map(float, x))
            made[n] = float(i * j + k)
    return made


# Comparisons; those with u are true for NaN


COMPARED: dict[str, Function] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def or_nan(compare: Function) -> Function:
    return lambda a, b: compare(a, b) | has_nan(a, b)


def compare_wide(compare: Function) -> Function:
    """A comparison of bfloat16."""
    return lambda a, b: compare(widen(a), widen(b))


UNEQUAL: dict[str, Function] = {
    "ne": lambda a, b: (a < b) | (a > b),
    "neu": operator.ne,
    "nan": has_nan,
    "num": lambda a, b: ~has_nan(a, b),
}
UNORDERED = {f"{name}u": or_nan(compare) for name, compare in COMPARED.items()}
values(("pred <- T T", "f16 f32"), {f"setp.{name}.T": x for name, x in UNORDERED.items()})
values(
    ("pred <- f64 f64", ""),
    {f"setp.{name}.f64": x for name, x in (COMPARED | UNEQUAL | UNORDERED).items()},
)
values(
    ("pred <- bf16 bf16", ""),
    {
        f"setp.{name}.bf16": compare_wide(x)
        for name, x in (COMPARED | UNEQUAL | UNORDERED).items()
        if name != "eq"
    },
)
values(("T <- T T pred", "f64 f16"), {"selp.T": lambda a, b, c: np.where(c, a, b)})


# Numbers of 16 bits, alone and in pairs


def round_float16(a: Array) -> Array:
    return a.astype(np.float16)


NARROW: dict[str, Function] = {"f16": round_float16, "bf16": round_bfloat}


def in_float32(function: Function, kind: str) -> Function:
    return lambda *x: NARROW[kind](function(*map(widen, x)))


def in_pairs_of(function: Function, kind: str) -> Function:
    """An instruction on two numbers of 16 bits side by side."""
    dtype = np.dtype("f2" if kind == "f16" else "u2")

    def both(*operands: Array) -> Array:
        parts = (
            NARROW[kind](function(*(widen(half(x, at).view(dtype)) for x in operands))).view(U16)
            for at in (16, 0)
        )
        return stack(*parts)

    return both


TWO: dict[str, Function] = {
    "add": operator.add,
    "add.rn": operator.add,
    "sub": operator.sub,
    "sub.rn": operator.sub,
    "mul": operator.mul,
    "mul.rn": operator.mul,
    "min": smallest,
    "max": largest,
    "min.NaN": with_nan(smallest),
    "max.NaN": with_nan(largest),
}
ONE: dict[str, Function] = {"abs": np.abs, "neg": np.negative}
for kind in NARROW:
    for count, table in ((3, {"fma.rn": fuse}), (2, TWO), (1, ONE)):
        for name, function in table.items():
            values(
                (f"{kind} <-" + f" {kind}" * count, ""),
                {f"{name}.{kind}": in_float32(function, kind)},
            )
            values(
                ("b32 <-" + " b32" * count, ""),
                {f"{name}.{kind}x2": in_pairs_of(function, kind)},
            )
    values(
        (f"{kind} <- {kind}", ""),
        {
            f"ex2.approx.{kind} ex2.approx.ftz.{kind}": in_float32(np.exp2, kind),
            f"tanh.approx.{kind}": in_float32(np.tanh, kind),
        },
    )


# Conversions and rounding to whole numbers


def to_whole(round_: Function) -> Callable[[Array, DType], Array]:
    return lambda a, to: truncate(round_(a), to)


ROUNDINGS: dict[str, Function] = {
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
    "rzi": np.trunc,
}
for name, function in ROUNDINGS.items():
    values(("T <- T", FLOATS), {f"cvt.{name}.T.T": function})
    values(("f32 <- f32", ""), {f"cvt.{name}.ftz.f32.f32": with_flushing(function)})
    wholes = "f32/s64 f32/u64 f64/s32 f64/u32 f64/s64 f64/u64 f32/s16 f32/u16 f32/s8 f32/u8"
    known = "" if name == "rzi" else "f32/s32 f32/u32 "
    values(("W <- T to", known + wholes), {f"cvt.{name}.W.T": to_whole(function)})
values(("f64 <- f32", ""), {"cvt.f64.f32": lambda a: a.astype(F64)})
values(("f32 <- f64", ""), {"cvt.rn.f32.f64": lambda a: a.astype(F32)})
values(
    ("W <- T to", "s32/f64 u32/f64 s64/f64 u64/f64 u16/f32 u8/f32 u16/f16 s32/f16 u32/f16"),
    {"cvt.rn.W.T": lambda a, to: a.astype(to)},
)
values(
    ("bf16 <- T", "s16 s32 s8 u8 u16 u32"), {"cvt.rn.bf16.T": lambda a: round_bfloat(a.astype(F32))}
)
values(("f16 <- bf16", ""), {"cvt.rn.f16.bf16": lambda a: round_float16(widen(a))})
values(("f32 <- f32", ""), {"cvt.sat.f32.f32": lambda a: np.nan_to_num(a).clip(0, 1).astype(F32)})


def narrow_float8(kind: torch.dtype) -> Function:
    """Two numbers in 8 bits, the first above; beyond the range the largest, with its sign."""
    most = torch.finfo(kind).max

    def both(a: Array, b: Array) -> Array:
        high, low = map(narrow, (a, b))
        return high << U16(8) | low

    def narrow(a: Array) -> Array:
        x = torch.from_numpy(np.array(a)).clamp(-most, most).to(kind).view(torch.uint8)
        return np.where(np.isnan(a), U16(0x7F), x.numpy().astype(U16))

    return both


values(
    ("b16 <- f32 f32", ""),
    {
        "cvt.rn.satfinite.e4m3x2.f32": narrow_float8(torch.float8_e4m3fn),
        "cvt.rn.satfinite.e5m2x2.f32": narrow_float8(torch.float8_e5m2),
    },
)


# Bits, beside those of arithmetic


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


def multiply_high_wide(a: Array, b: Array) -> Array:
    """a * b >> 64."""
    exact = a.astype(object) * b.astype(object)
    return np.array([x >> 64 for x in exact], a.dtype)


values(("u32 <- T", "b32 b64"), {"clz.T": count_zeros})
values(("T <- T", "b32 b64"), {"brev.T": reverse_bits})
values(("u32 <- b64", ""), {"popc.b64": lambda a: np.bitwise_count(a).astype(U32)})
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
values(("T <- T T", "u64 s64"), {"mul.hi.T": multiply_high_wide})
