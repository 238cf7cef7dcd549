"""Single instructions of a virtual GPU, on drawn operands, against exact arithmetic."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attn_graph.testing.gpu import instructions
from attn_graph.testing.gpu.floats import FLOAT8
from attn_graph.testing.gpu.program import PARAMETERS
from attn_graph.testing.gpu.rules import DTYPES, VALUES
from tests.support.ptx_programs import run_ptx

LANES = 32
few = settings(  # each example is 32 lanes; one that fails is not made smaller
    max_examples=max(4, settings().max_examples // 6), phases=(Phase.explicit, Phase.generate)
)
NAN = float("nan")
Exact = Callable[..., Any]  # of whole numbers, or of floating-point numbers
assert instructions


def shift(a: int, b: int) -> int:
    return a >> b if b < 128 else (-1 if a < 0 else 0)


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field_of(a: int, start: int, count: int) -> int:
    return a >> (start & 255) & ((1 << min(count & 255, 32)) - 1)


def replace_field(a: int, b: int, start: int, count: int) -> int:
    field = ((1 << min(count & 255, 32)) - 1) << (start & 255)
    return b & ~field | a << (start & 255) & field


def signed_field(a: int, start: int, count: int, size: int = 32) -> int:
    """Bits that lie behind the last one are copies of the sign."""
    count = min(count & 255, size)
    bits = a >> min(start & 255, size - 1) & ((1 << count) - 1)
    return bits - (1 << count) if count and bits >> (count - 1) else bits


def sum_of_halves(a: int, b: int) -> int:
    return (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16


def bytes_by(a: int, b: int, c: int) -> int:
    known = (a | b << 32).to_bytes(8, "little")
    picks = [c >> 4 * n & 15 for n in range(4)]
    chosen = [(known[p & 7] if p < 8 else 255 * (known[p & 7] >> 7)) for p in picks]
    return int.from_bytes(bytes(chosen), "little")


def bits_by(a: int, b: int, c: int, table: int) -> int:
    rows = ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1 for n in range(32))
    return sum((table >> row & 1) << n for n, row in enumerate(rows))


WHOLE: dict[str, Exact] = {
    "bfi": replace_field,
    "lop3": bits_by,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "mul.wide": lambda a, b: a * b,
    "mul.hi": lambda a, b: a * b >> 32,
    "mad.lo": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: a * b + c,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
    "abs": abs,
    "neg": lambda a: -a,
    "min": min,
    "max": max,
    "min.relu": lambda a, b: max(min(a, b), 0),
    "max.relu": lambda a, b: max(a, b, 0),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "popc": lambda a: f"{a:b}".count("1"),
    "shl": lambda a, b: a << b if b < 64 else 0,
    "shr": shift,
    "prmt": bytes_by,
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: a != b,
    "setp.lt": lambda a, b: a < b,
    "setp.le": lambda a, b: a <= b,
    "setp.gt": lambda a, b: a > b,
    "setp.ge": lambda a, b: a >= b,
    "selp": lambda a, b, c: a if c else b,
    "cvta.param": lambda a: a + PARAMETERS,
    "cvta.local": lambda a: a,
    "cvta.global": lambda a: a,
    "shf.l.wrap": lambda a, b, c: (a | b << 32) << (c & 31) >> 32,
    "shf.r.wrap": lambda a, b, c: (a | b << 32) >> (c & 31),
    "shf.l.clamp": lambda a, b, c: (a | b << 32) << min(c, 32) >> 32,
    "shf.r.clamp": lambda a, b, c: (a | b << 32) >> min(c, 32),
    "cvt": lambda a: a,
    "copysign": lambda a, b: a & 2**31 | b & 2**31 - 1,
}


SIZED: dict[str, Exact] = {  # by the whole name: their results depend on the number of bits
    "clz.b32": lambda a: 32 - a.bit_length(),
    "clz.b64": lambda a: 64 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "brev.b64": lambda a: int(f"{a:064b}"[::-1], 2),
    "bfe.u32": lambda a, start, count: field_of(a, start, count),
    "bfe.u64": lambda a, start, count: a >> (start & 255) & ((1 << min(count & 255, 64)) - 1),
    "bfe.s32": signed_field,
    "bfe.s64": partial(signed_field, size=64),
    **dict.fromkeys(("add.s16x2", "add.u16x2"), sum_of_halves),
    **dict.fromkeys(("mul.hi.u16", "mul.hi.s16"), lambda a, b: a * b >> 16),
    "mul.hi.u64": lambda a, b: a * b >> 64,
    "mul.hi.s64": lambda a, b: a * b >> 64,
}


def nearest(x: float | Fraction) -> float:
    """A number in float32, rounded to nearest even; exactly so where it is a fraction."""
    if not isinstance(x, Fraction):
        return torch.tensor(x, dtype=torch.float64).float().item()
    close = torch.tensor(float(x), dtype=torch.float64).float()
    around = [close, *(torch.nextafter(close, torch.tensor(to)) for to in (math.inf, -math.inf))]
    finite = [c.item() for c in around if c.isfinite()]
    return min(finite, key=lambda c: (abs(Fraction(c) - x), bits_of(c, "f32") & 1))


def exactly(formula: Exact) -> Exact:
    """A formula by exact arithmetic where all operands and the result are finite."""

    def rounded(*given: float) -> float:
        plain = formula(*given)
        if math.isfinite(plain) and abs(plain) < 1e38:
            return nearest(formula(*map(Fraction, given))) or plain
        return nearest(plain)

    return rounded


def towards(way: str, formula: Exact) -> Exact:
    """A formula by exact arithmetic, rounded down (rm), up (rp) or towards zero (rz)."""
    goal = {"rm": -math.inf, "rp": math.inf, "rz": 0.0}[way]

    def rounded(*given: float) -> float:
        plain = float(formula(*given))
        if not math.isfinite(plain):
            return plain
        exact = formula(*map(Fraction, given))
        near = nearest(exact)
        if near != exact and (near < exact) == (exact < goal):
            return float(torch.nextafter(torch.tensor(near), torch.tensor(goal)))
        return near if exact else plain

    return rounded


def ordered(*given: float) -> bool:
    return not any(map(math.isnan, given))


def extreme(choose: Exact) -> Exact:
    """The smallest or largest number but NaN."""
    return lambda *given: choose((x for x in given if x == x), default=NAN)


def in_float64(formula: Callable[..., torch.Tensor]) -> Exact:
    return lambda *given: formula(*(torch.tensor(x, dtype=torch.float64) for x in given)).item()


def fused(a: float, b: float, c: float) -> float:
    """a * b + c, rounded once."""
    if not all(map(math.isfinite, (a, b, c, a * b))):
        return a * b + c
    try:
        return float(Fraction(a) * Fraction(b) + Fraction(c)) or a * b + c
    except OverflowError:
        return a * b + c


DOUBLE: dict[str, Exact] = {  # in float64
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fused,
    "div": in_float64(torch.div),
    "sqrt": in_float64(torch.sqrt),
}
WHOLE_NUMBERS: dict[str, Exact] = {
    "rni": round,
    "rmi": math.floor,
    "rpi": math.ceil,
    "rzi": math.trunc,
}


def to_whole(opcode: str, x: float) -> float:
    """A number rounded to a whole one; of a whole type the nearest in its range, and 0 for NaN."""
    kind = VALUES[opcode].results[0]
    rounded = WHOLE_NUMBERS[opcode.split(".")[1]](x) if math.isfinite(x) else x
    if kind in FORMS:
        return rounded
    bits = int(kind[1:])
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    return 0 if x != x else min(max(rounded, least), most)


def nearest_tf32(a: float) -> float:
    """The nearest number with 10 bits after the first, the larger one of two; its sign."""
    if not math.isfinite(a):
        return a
    step = Fraction(2) ** (max(math.frexp(a)[1], -125) - 11)
    near = math.floor(abs(Fraction(a)) / step + Fraction(1, 2)) * step
    return math.copysign(math.inf if near >= 2**128 else float(near), a)


FLOATING: dict[str, Exact] = {
    "cvt.sat": lambda a: 0.0 if a != a else min(max(a, 0.0), 1.0),
    "min.NaN": lambda *given: min(given) if ordered(*given) else NAN,
    "max.NaN": lambda *given: max(given) if ordered(*given) else NAN,
    "setp.equ": lambda a, b: not ordered(a, b) or a == b,
    "setp.ltu": lambda a, b: not ordered(a, b) or a < b,
    "setp.leu": lambda a, b: not ordered(a, b) or a <= b,
    "setp.gtu": lambda a, b: not ordered(a, b) or a > b,
    "setp.geu": lambda a, b: not ordered(a, b) or a >= b,
    "add": exactly(lambda a, b: a + b),
    **{f"add.{way}": towards(way, lambda a, b: a + b) for way in ("rm", "rp", "rz")},
    **{f"mul.{way}": towards(way, lambda a, b: a * b) for way in ("rm", "rp", "rz")},
    **{f"fma.{way}": towards(way, lambda a, b, c: a * b + c) for way in ("rm", "rp", "rz")},
    "sub": exactly(lambda a, b: a - b),
    "mul": exactly(lambda a, b: a * b),
    "fma": exactly(lambda a, b, c: a * b + c),
    "abs": abs,
    "neg": lambda a: -a,
    "min": extreme(min),
    "max": extreme(max),
    "selp": lambda a, b, c: a if c else b,
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: ordered(a, b) and a != b,
    "setp.neu": lambda a, b: a != b,
    "setp.lt": lambda a, b: a < b,
    "setp.le": lambda a, b: a <= b,
    "setp.gt": lambda a, b: a > b,
    "setp.ge": lambda a, b: a >= b,
    "setp.nan": lambda a, b: not ordered(a, b),
    "setp.num": ordered,
    "cvt": lambda a: a,
    "cvt.rna.tf32": nearest_tf32,
}
TORCH: dict[str, Callable[..., torch.Tensor]] = {  # of float64, to two units in the last place
    "div": torch.div,
    "rcp": torch.reciprocal,
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
}
NEAR = {"f32": 2.0**-21, "f16": 2.0**-10, "bf16": 2.0**-7}  # of the result: approximations
FORMS = {"f16": "e", "f32": "f", "f64": "d"}
ROUNDING = {"rn", "full", "approx", "ftz", "rzi"}
EIGHTS = {"cvt.rn.satfinite.e4m3x2.f32": "e4m3", "cvt.rn.satfinite.e5m2x2.f32": "e5m2"}


def eight_bits(x: float, kind: str) -> int:
    """The bits of the nearest number of 8 bits, the even one of two, never an infinity."""
    if x != x:
        return 0x7F
    table = {n: value_of(int(bits), "f16") for n, bits in enumerate(FLOAT8[kind][:128])}
    finite = {n: y for n, y in table.items() if math.isfinite(y)}
    near = min(finite, key=lambda n: (abs(finite[n] - abs(x)) if math.isfinite(x) else -n, n & 1))
    return near | (128 if math.copysign(1, x) < 0 else 0)


HALVES = ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32")


def value_of(bits: int, kind: str) -> Any:  # Any: a whole or a floating-point number, or a truth
    """What bits mean."""
    size = DTYPES[kind].itemsize
    if kind == "pred":
        return bool(bits & 1)
    bits &= (1 << 8 * size) - 1
    if kind == "bf16":
        return value_of(bits << 16, "f32")
    if kind in FORMS:
        return struct.unpack(FORMS[kind], bits.to_bytes(size, "little"))[0]
    return bits - (1 << 8 * size) if kind[0] == "s" and bits >> (8 * size - 1) else bits


def bits_of(value: Any, kind: str) -> int:  # Any: as above
    """The bits of a value, the lowest ones if it has more."""
    size = DTYPES[kind].itemsize
    if kind == "pred":
        return int(value) & 1
    if kind == "bf16":
        return bits_of(torch.tensor(value).bfloat16().float().item(), "f32") >> 16
    if kind == "f16":
        value = torch.tensor(value, dtype=torch.float64).half().item()
    if kind in FORMS:
        return int.from_bytes(struct.pack(FORMS[kind], value), "little")
    return int(value) & ((1 << 8 * size) - 1)


SPECIAL = {  # bits that a random number hardly has: zeros, infinities, NaN, subnormals, extremes
    "f32": (0, 2**31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF, 0x3F800000),
    "f16": (0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 1, 0x83FF, 0x3C00),
    "bf16": (0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 1, 0x3F80),
}


def operands(kind: str) -> st.SearchStrategy[int]:
    """The bits of an operand."""
    size = 8 * DTYPES[kind].itemsize
    near = st.integers(-40, 40).map(lambda n: n & ((1 << size) - 1))
    numbers = (
        st.floats(-100, 100, width=32).map(lambda x: bits_of(x, kind)) if kind in FORMS else near
    )
    known = st.sampled_from(SPECIAL[kind]) if kind in SPECIAL else near
    return st.one_of(st.integers(0, (1 << size) - 1), numbers, known)


def draw_rows(data: st.DataObject, kinds: tuple[str, ...]) -> list[list[int]]:
    """Operands for all lanes: some drawn one by one, and their combinations."""
    drawn = [data.draw(st.lists(operands(x.rstrip("?")), min_size=6, max_size=6)) for x in kinds]
    pick = data.draw(st.randoms(use_true_random=False))
    return [[pick.choice(column) for column in drawn] for _ in range(LANES)]


def lanes_of(opcode: str, rows: list[list[int]]) -> list[int]:
    """The bits of an instruction's result in each lane, by executing it."""
    rule = VALUES[opcode]
    given = [kind.rstrip("?") for kind in rule.operands][: len(rows[0])]
    columns = torch.tensor([[x - (x >> 63 << 64) for x in row] for row in rows]).T.contiguous()
    out = torch.zeros(LANES, dtype=torch.int64)
    lines = [" mul.wide.u32 %d8, %r0, 8;", " add.s64 %d9, %d0, %d8;", " add.s64 %d10, %d1, %d8;"]
    names = []
    for n, kind in enumerate(given):
        lines.append(f" ld.global.b64 %d{16 + n}, [%d9+{8 * LANES * n}];")
        lines.append(narrow(kind, n))
        names.append(register(kind, n))
    lines.append(f" {opcode} {', '.join([register(rule.results[0], 8), *names])};")
    lines.append(widen(rule.results[0]))
    lines.append(" st.global.b64 [%d10], %d30;")
    run_ptx("\n".join(lines), {"given": columns, "out": out})
    return [x & (2**64 - 1) for x in out.tolist()]


def register(kind: str, n: int) -> str:
    letter = {"pred": "%p", 1: "%h", 2: "%h", 4: "%r", 8: "%d"}
    key = kind if kind == "pred" else DTYPES[kind].itemsize
    return f"{letter[key]}{n + (16 if key == 8 else 1)}"


def narrow(kind: str, n: int) -> str:
    """An instruction that takes an operand from its 64 bits."""
    if kind == "pred":
        return f" and.b64 %d31, %d{16 + n}, 1; setp.ne.b64 {register(kind, n)}, %d31, 0;"
    size = DTYPES[kind].itemsize
    if size == 8:
        return ""
    part = f" cvt.u32.u64 %r{100 + n}, %d{16 + n};"
    target = register(kind, n)
    return (
        f"{part} mov.b32 {target}, %r{100 + n};"
        if size == 4
        else (f"{part} cvt.u16.u32 {target}, %r{100 + n};")
    )


def widen(kind: str) -> str:
    """An instruction that makes 64 bits of a result."""
    result = register(kind, 8)
    if kind == "pred":
        return f" selp.b64 %d30, 1, 0, {result};"
    size = DTYPES[kind].itemsize
    return (
        f" mov.b64 %d30, {result};"
        if size == 8
        else f" cvt.u64.u{max(16, 8 * size)} %d30, {result};"
    )


def heads(opcode: str) -> tuple[str, str]:
    """The name of an instruction without rounding and types, and its last type."""
    words = opcode.split(".")
    kept = [w for w in words if w not in ROUNDING and w not in DTYPES]
    return ".".join(kept), words[-1]


def flushed(opcode: str, x: Any) -> Any:  # Any: as above
    """With .ftz, a number below 2^-126 as a zero with its sign."""
    return math.copysign(0, x) if "ftz" in opcode and abs(x) < 2.0**-126 else x


def due_of(opcode: str, row: list[int]) -> int | None:
    """The bits of the exact result; None: not known exactly."""
    rule = VALUES[opcode]
    name, _ = heads(opcode)
    values = [value_of(x, kind.rstrip("?")) for x, kind in zip(row, rule.operands, strict=False)]
    if opcode in (*SIZED, *EIGHTS, *HALVES):
        return due_by_name(opcode, values)
    values = [flushed(opcode, x) for x in values]
    floating = any(kind.rstrip("?") in (*FORMS, "bf16") for kind in rule.operands)
    if "f64" in rule.operands and name in DOUBLE:
        return bits_of(DOUBLE[name](*values), "f64")
    exact = (FLOATING if floating else WHOLE).get(name)
    if opcode.split(".")[1] in WHOLE_NUMBERS:
        exact = partial(to_whole, opcode)
    if exact is None or "f32x2" in opcode:
        return None
    result = exact(*values)
    if rule.results[0] == "f32" and not floating:
        result = nearest(Fraction(result))
    result = flushed(opcode, result)
    if opcode == "cvt.rn.f32.f64":
        result = nearest(result)
    if rule.results[0] == "s8":  # its sign fills a register of 16 bits
        return bits_of(value_of(bits_of(result, "s8"), "s8"), "s16")
    return bits_of(result, rule.results[0])


def agree(got: int, due: int, kind: str) -> bool:
    """Equal bits; any NaN for NaN, and either zero for a zero. kind: of halves, `f16x2`."""
    if kind.endswith("16x2"):
        return all(agree(got >> n & 0xFFFF, due >> n & 0xFFFF, kind[:-2]) for n in (0, 16))
    if got == due or kind not in (*FORMS, "bf16"):
        return got == due
    a, b = value_of(got, kind), value_of(due, kind)
    return bool(a == b) or (a != a and b != b)


@pytest.mark.parametrize(
    "opcode", [x for x in sorted(VALUES) if x in SIZED or not x.endswith("x2")]
)
@given(data=st.data())
@few
def test_an_instruction_gives_the_exact_result(opcode: str, data: st.DataObject) -> None:
    """Or, where a GPU approximates, one within two units in the last place of float64's."""
    rows = draw_rows(data, VALUES[opcode].operands)
    for given_, got in zip(rows, lanes_of(opcode, rows), strict=True):
        due = due_of(opcode, given_)
        if due is None:
            due = approximate(opcode, given_, got)
        kind = opcode.split(".")[2] if opcode in HALVES else VALUES[opcode].results[0]
        assert agree(got, due, kind), (given_, hex(got), hex(due))


def test_a_sum_of_products_is_rounded_once() -> None:
    rows = [
        [0x42AD58D2, 0x40A00000, 0xB32],  # halfway between two numbers, but for a subnormal one
        [0x4B800001, 0x40400000, 0x80000001],  # a little below halfway
        [0x00800001, 0x3F000000, 0x00000001],  # a subnormal result
        [0x00800001, 0x3F000000, 0x80000000],
    ] * (LANES // 4)
    for row, got in zip(rows, lanes_of("fma.rn.f32", rows), strict=True):
        a, b, c = (Fraction(value_of(x, "f32")) for x in row)
        assert got == bits_of(nearest(a * b + c), "f32")


def due_by_name(opcode: str, values: list[Any]) -> int:  # Any: as above
    """The bits of the exact result of an instruction that has a formula of its own."""
    if opcode in SIZED:
        return bits_of(SIZED[opcode](*values), VALUES[opcode].results[0])
    if opcode in EIGHTS:
        high, low = (eight_bits(x, EIGHTS[opcode]) for x in values)
        return high << 8 | low
    kind = "f16" if "bf" not in opcode else "bf16"
    return bits_of(values[0], kind) << 16 | bits_of(values[1], kind)


def approximate(opcode: str, row: list[int], got: int) -> int:
    """The result itself if it is near float64's, else float64's."""
    name, _ = heads(opcode)
    given_ = [value_of(x, kind) for x, kind in zip(row, VALUES[opcode].operands, strict=True)]
    if "ftz" in opcode:
        given_ = [math.copysign(0, x) if abs(x) < 2.0**-126 else x for x in given_]
    exact = TORCH[name](*(torch.tensor(x, dtype=torch.float64) for x in given_)).item()
    if "ftz" in opcode and abs(exact) < 2.0**-126:
        exact = math.copysign(0, exact)
    kind = VALUES[opcode].results[0]
    due, result = value_of(bits_of(exact, kind), kind), value_of(got, kind)
    near = abs(result - due) <= NEAR[kind] * abs(exact) + 2.0**-125 * ("ftz" in opcode) + 2.0**-148
    return got if near else bits_of(exact, kind)


@pytest.mark.parametrize("name", ["add", "add.rm", "sub", "mul", "fma.rn"])
@given(data=st.data())
@few
def test_an_instruction_of_pairs_is_two_instructions(name: str, data: st.DataObject) -> None:
    rows = draw_rows(data, VALUES[f"{name}.f32x2"].operands)
    wide = lanes_of(f"{name}.f32x2", rows)
    for part in (0, 32):
        halves = [[x >> part & 2**32 - 1 for x in row] for row in rows]
        for a, b in zip(wide, lanes_of(f"{name}.f32", halves), strict=True):
            assert agree(a >> part & 2**32 - 1, b, "f32")


def test_a_sum_that_float64_rounds_up_is_rounded_down() -> None:
    row = [bits_of(1.0, "f32"), bits_of(-(2.0**-149), "f32")]
    assert {*lanes_of("add.rm.f32", [row] * LANES)} == {bits_of(1 - 2.0**-24, "f32")}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@given(data=st.data())
@few
def test_halves_are_compared_one_by_one(kind: str, data: st.DataObject) -> None:
    rows = draw_rows(data, (kind,) * 4)
    wide = torch.tensor([[a | b << 16, c | d << 16] for a, b, c, d in rows])
    out = torch.zeros(2, LANES, dtype=torch.int64)
    run_ptx(
        "mul.wide.u32 %d8, %r0, 16; add.s64 %d9, %d0, %d8; ld.global.b64 %d10, [%d9];"
        "ld.global.b64 %d11, [%d9+8]; cvt.u32.u64 %r1, %d10; cvt.u32.u64 %r2, %d11;"
        f"setp.eq.{kind}x2 %p1|%p2, %r1, %r2; selp.b64 %d12, 1, 0, %p1; selp.b64 %d13, 1, 0, %p2;"
        "mul.wide.u32 %d8, %r0, 8; add.s64 %d9, %d1, %d8; st.global.b64 [%d9], %d12;"
        f"st.global.b64 [%d9+{8 * LANES}], %d13;",
        {"given": wide, "out": out},
    )
    values = [[value_of(x, kind) for x in row] for row in rows]
    assert out.bool().tolist() == [
        [a == c for a, _, c, _ in values],
        [b == d for _, b, _, d in values],
    ]


@pytest.mark.parametrize("name", ["sub", "mul.rn"])
@given(data=st.data())
@few
def test_bfloats_side_by_side_are_computed_one_by_one(name: str, data: st.DataObject) -> None:
    rows = draw_rows(data, ("bf16",) * 4)
    pairs = [[a | b << 16, c | d << 16] for a, b, c, d in rows]
    for row, got in zip(rows, lanes_of(f"{name}.bf16x2", pairs), strict=True):
        a, b, c, d = (value_of(x, "bf16") for x in row)
        low, high = (
            bits_of(FLOATING[name.removesuffix(".rn")](*x), "bf16") for x in ((a, c), (b, d))
        )
        assert agree(got, low | high << 16, "bf16x2"), (row, hex(got))
