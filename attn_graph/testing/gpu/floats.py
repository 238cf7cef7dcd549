"""Instructions on floating-point numbers. PTX ISA 9.7.3 to 9.7.6 and 9.7.9.

Approximations of a GPU are correctly rounded here. Numbers of 16 bits are computed in float32,
which has more than twice their bits, and rounded once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

import numpy as np
import torch

from attn_graph.testing.gpu.arithmetic import COMPARED, U16, U32, convert, in_pairs
from attn_graph.testing.gpu.rules import DTYPES, Array, DType, any_of, values

Function = Callable[..., Array]
HALF, FLOATS = "f16 bf16", "f32 f64"
LEAST_NORMAL = np.float32(2.0**-126)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # as instructions of PTX make it
F32, F64 = np.float32, np.float64


EIGHTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FLOAT8 = {  # each number of 8 bits in float16, by its bits, with PTX's for NaN
    name: np.where(np.isnan(x), U16(0x7FFF), x.view(U16))
    for name, kind in EIGHTS.items()
    for x in (torch.arange(256, dtype=torch.uint8).view(kind).half().numpy(),)
}
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)  # e2m1, by its bits
FLOAT4 = np.r_[FLOAT4, -FLOAT4]


def fuse(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once. A sum in float64 halfway between two numbers of float32, or below
    2^-126, is made odd if the exact one differs: both then round alike."""
    product = a.astype(F64) * b  # exact
    total = product + c
    halfway = total.view(np.int64) & 0x1FFFFFFF == 0x10000000
    if any_of(halfway | (np.abs(total) < LEAST_NORMAL)):
        rest = rest_of(product, c, total)
        even = total.view(np.int64) & 1 == 0
        odd = np.nextafter(total, np.copysign(np.inf, rest))
        total = np.where(np.isfinite(total) & (rest != 0) & even, odd, total)
    return total.astype(F32)


def rest_of(a: Array, b: Array, total: Array) -> Array:
    """What rounding left out of the sum a + b (Knuth)."""
    more = total - a
    rest: Array = (a - (total - more)) + (b - more)
    return rest


def add_towards(a: Array, b: Array, way: str) -> Array:
    """a + b, rounded down (rm), up (rp) or towards zero (rz), if float64 holds the sum or not."""
    a, b = a.astype(F64), b.astype(F64)
    total = a + b
    near, rest = total.astype(F32), rest_of(a, b, total)
    above, below = ((f(near, total) | (near == total) & f(0, rest)) for f in (np.greater, np.less))
    goal = {"rm": -np.inf, "rp": np.inf, "rz": 0}[way]
    wrong = {"rm": above, "rp": below, "rz": np.where(total > 0, above, below)}[way]
    return np.where(np.isfinite(total) & wrong, np.nextafter(near, F32(goal)), near)


def flush(a: Array) -> Array:
    """Numbers below 2^-126 as zeros with their sign."""
    small = np.abs(a) < LEAST_NORMAL
    return np.where(small, a * F32(0), a) if any_of(small) else a


def extreme(choose: Function, zeros: Function) -> Function:
    """The smallest or largest number, by a function of NumPy's; +0 is larger than -0.

    zeros: of their bits. NaN has the bits of PTX.
    """

    def chosen(a: Array, *others: Array) -> Array:
        for b in others:
            both, first, a = (a == 0) & (b == 0), a, choose(a, b)
            if any_of(both):
                a = np.where(both, zeros(first.view(U32), b.view(U32)).view(F32), a)
        missing = np.isnan(a)
        return np.where(missing, NAN, a) if any_of(missing) else a

    return chosen


smallest, largest = extreme(np.fmin, operator.or_), extreme(np.fmax, operator.and_)


def widen(a: Array) -> Array:
    """Halves in float32: float16, or the bits of bfloat16."""
    return a.astype(F32) if a.dtype.kind == "f" else (a.astype(U32) << U32(16)).view(F32)


def with_flushing(function: Function) -> Function:
    """An instruction with .ftz: operands and results below 2^-126 are zeros."""
    return lambda *x: flush(function(*map(flush, x)))


def with_nan(function: Function) -> Function:
    """An instruction with .NaN: NaN if an operand is NaN."""
    return lambda *x: np.where(np.isnan(sum(x)) & np.any(np.isnan(x), 0), NAN, function(*x))


def fuse_exactly(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64, rounded once: by fractions, one thread after another."""
    made = np.asarray(a * b + c, F64)
    for n, x in enumerate(zip(*np.broadcast_arrays(a, b, c), strict=True)):
        if np.isfinite((*x, made[n])).all() and made[n]:
            i, j, k = map(Fraction, map(float, x))
            made[n] = float(i * j + k)
    return made


def round_float16(a: Array) -> Array:
    return a.astype(np.float16)


def round_bfloat(a: Array) -> Array:
    """The bits of a number in bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(a).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)  # 1 if it is odd
    return np.where(np.isnan(a), U16(0x7FFF), rounded).astype(U16)


def round_tf32(a: Array) -> Array:
    """A number with the 10 bits of a tf32, rounded to nearest, and away from zero in the middle."""
    bits = np.ascontiguousarray(a).view(U32)
    return np.where(np.isnan(a), NAN, (bits + U32(0x1000) & U32(0xFFFFE000)).view(F32))


NARROW: dict[str, Function] = {"f16": round_float16, "bf16": round_bfloat}


def in_float32(function: Function, kind: str) -> Function:
    return lambda *x: NARROW[kind](function(*map(widen, x)))


def halves_of(a: Array, kind: str) -> Array:
    """The two numbers of 16 bits in 32, the lower one first, in float32."""
    pair = np.stack([np.atleast_1d(x).astype(U16) for x in (a, a >> U32(16))])
    return widen(pair.view(DTYPES[kind]))


def stack(low: Array, high: Array, kind: str) -> Array:
    """Two numbers in float32, as ones of 16 bits side by side."""
    bits = (NARROW[kind](x).view(U16) for x in (low, high))
    return next(bits) | next(bits).astype(U32) << U32(16)


def in_halves(function: Function, kind: str) -> Function:
    """An instruction on two numbers of 16 bits side by side."""

    def both(*operands: Array) -> Array:
        low, high = function(*(halves_of(x, kind) for x in operands))
        return stack(low, high, kind)

    return both


def define(
    kind: str,
    count: int,
    functions: Mapping[str, Function],
    change: Callable[[Function], Function] = lambda x: x,
    held: str = "",
) -> None:
    """Instructions on `count` numbers of a kind, by names without it; held: by what they are."""
    held = held or kind
    named = {
        " ".join(f"{name}.{kind}" for name in names.split()): change(function)
        for names, function in functions.items()
    }
    values((f"{held} <-" + f" {held}" * count, ""), named)


ROUNDED: dict[str, Function] = {
    "add add.rn": operator.add,
    "sub sub.rn": operator.sub,
    "mul mul.rn": operator.mul,
}
SIGNS: dict[str, Function] = {"abs": np.abs, "neg": np.negative}
TOWARDS = {way: partial(add_towards, way=way) for way in ("rm", "rp", "rz")}
SUMS: dict[str, Function] = {f"add.{way}": add for way, add in TOWARDS.items()}
FUSED: dict[str, Function] = {"fma.rn": fuse}
NAMED_NAN: dict[str, Function] = {"min.NaN": with_nan(smallest), "max.NaN": with_nan(largest)}
EXTREMES: dict[str, Function] = {"min": smallest, "max": largest}
SINGLE: dict[int, dict[str, Function]] = {  # in float32, by the number of operands
    1: {
        "sqrt.approx sqrt.rn": np.sqrt,
        "rsqrt.approx": lambda a: F32(1) / np.sqrt(a),
        "rcp.approx rcp.rn": lambda a: F32(1) / a,
        "sin.approx": np.sin,
        "cos.approx": np.cos,
        "ex2.approx": np.exp2,
        "lg2.approx": np.log2,
        **SIGNS,
    },
    2: {**ROUNDED, **SUMS, "div.full div.rn div.approx": operator.truediv},
    3: {**FUSED},
}
for way, add in TOWARDS.items():
    SINGLE[2][f"mul.{way}"] = lambda a, b, add=add: add(a.astype(F64) * b, np.full(a.shape, -0.0))
    SINGLE[3][f"fma.{way}"] = lambda a, b, c, add=add: add(a.astype(F64) * b, c)
for count, table in SINGLE.items():
    define("f32", count, table)
    define("ftz.f32", count, table, with_flushing, "f32")
define("f32", 1, {"tanh.approx": np.tanh})
FLUSHED = {f"{name}.ftz": with_flushing(x) for name, x in EXTREMES.items()}
values(
    ("f32 <- f32 f32 f32?", ""),
    {f"{n}.f32": x for n, x in (EXTREMES | NAMED_NAN | FLUSHED).items()},
)
for count, table in ((2, ROUNDED | SUMS), (3, FUSED)):
    define("f32x2", count, table, partial(in_pairs, part="f4", whole="u8"))
define("f64", 1, {**SIGNS, "sqrt.rn": np.sqrt})
define("f64", 2, {**ROUNDED, "div.rn": operator.truediv, "min": np.fmin, "max": np.fmax})
define("f64", 3, {"fma.rn": fuse_exactly})
HALVES = {1: SIGNS, 2: ROUNDED | EXTREMES | NAMED_NAN, 3: FUSED}
for kind in NARROW:
    for count, table in HALVES.items():
        define(kind, count, table, partial(in_float32, kind=kind))
        define(f"{kind}x2", count, table, partial(in_halves, kind=kind), "b32")
    once: dict[str, Function] = {"ex2.approx ex2.approx.ftz": np.exp2, "tanh.approx": np.tanh}
    define(kind, 1, once, partial(in_float32, kind=kind))
values(("f32 <- T T f32", HALF), {"fma.rn.f32.T": lambda a, b, c: fuse(widen(a), widen(b), c)})
values(("f32 <- T f32", HALF), {"add.f32.T add.rn.f32.T": lambda a, b: widen(a) + b})


# Comparisons: false for NaN, but for neu, nan, and those with u


def has_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


COMPARISONS: dict[str, Function] = {
    **COMPARED,
    **{
        f"{name}u": lambda a, b, compare=compare: compare(a, b) | has_nan(a, b)
        for name, compare in COMPARED.items()
    },
    "ne": lambda a, b: (a < b) | (a > b),
    "neu": operator.ne,
    "nan": has_nan,
    "num": lambda a, b: ~has_nan(a, b),
}
values(("pred <- T T", FLOATS), {f"setp.{name}.T": x for name, x in COMPARISONS.items()})
values(
    ("pred <- T T", HALF),
    {f"setp.{n}.T": lambda a, b, x=x: x(widen(a), widen(b)) for n, x in COMPARISONS.items()},
)
for kind in NARROW:
    values(
        ("pred|pred <- b32 b32", ""),
        {f"setp.eq.{kind}x2": lambda *x, kind=kind: operator.eq(*(halves_of(a, kind) for a in x))},
    )


# Conversions and rounding to whole numbers


def truncate(a: Array, to: DType) -> Array:
    """Towards zero, within the range of the type; NaN becomes 0."""
    limits, whole = np.iinfo(to), np.where(np.isnan(a), 0, np.trunc(a.astype(F64)))
    inside = whole.clip(limits.min, np.nextafter(F64(2.0) ** (limits.max.bit_length()), F64(0)))
    most = whole >= F64(limits.max)  # of 64 bits, float64 has none
    return np.where(most, to.type(limits.max), inside.astype(to))


def to_whole(round_: Function) -> Callable[[Array, DType], Array]:
    return lambda a, to: truncate(round_(a), to)


def widen_float8(table: Array) -> Callable[[Array], Array]:
    """Both numbers of 8 bits in float16, which holds them exactly."""
    return lambda a: table[a >> U16(8)].astype(U32) << U32(16) | table[a & U16(255)]


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


ROUNDINGS: dict[str, Function] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
WHOLES = "f64/s32 f64/u32 f64/s64 f64/u64 " + " ".join(
    f"f32/{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)
)
for name, function in ROUNDINGS.items():
    values(("T <- T", FLOATS), {f"cvt.{name}.T.T": function})
    values(("f32 <- f32", ""), {f"cvt.{name}.ftz.f32.f32": with_flushing(function)})
    values(("W <- T to", WHOLES), {f"cvt.{name}.W.T": to_whole(function)})
NEAREST = "s8/f32 u8/f32 s16/f32 u16/f32 s32/f32 u32/f32 s64/f32 u64/f32 f64/f32 f32/f16 "
NEAREST += "s32/f64 u32/f64 s64/f64 u64/f64 s16/f16 u16/f16 s32/f16 u32/f16"
values(("W <- T to", NEAREST), {"cvt.rn.W.T": convert})
values(("W <- T to", "f32/f64"), {"cvt.W.T": convert})
values(("f32 <- T", HALF), {"cvt.f32.T": widen})
values(("bf16 <- f32", ""), {"cvt.rn.bf16.f32": round_bfloat})
values(("bf16 <- f16", ""), {"cvt.bf16.f16": lambda a: round_bfloat(widen(a))})
values(
    ("bf16 <- T", "s16 s32 s8 u8 u16 u32"), {"cvt.rn.bf16.T": lambda a: round_bfloat(a.astype(F32))}
)
values(("f32 <- f32", ""), {"cvt.rna.tf32.f32": round_tf32})
values(("f16 <- bf16", ""), {"cvt.rn.f16.bf16": lambda a: round_float16(widen(a))})
SATURATED: dict[str, Function] = {"cvt.sat": lambda a: np.nan_to_num(a).clip(0, 1).astype(F32)}
define("f32.f32", 1, SATURATED, held="f32")
define("f32.f32", 1, {"cvt.ftz.sat": with_flushing(SATURATED["cvt.sat"])}, held="f32")
for kind in NARROW:
    packed = {f"cvt.rn.{kind}x2.f32": lambda a, b, kind=kind: stack(b, a, kind)}
    values(("b32 <- f32 f32", ""), packed)
for kind, numbers in FLOAT8.items():
    values(("b32 <- b16", ""), {f"cvt.rn.f16x2.{kind}x2": widen_float8(numbers)})
    values(("b16 <- f32 f32", ""), {f"cvt.rn.satfinite.{kind}x2.f32": narrow_float8(EIGHTS[kind])})
