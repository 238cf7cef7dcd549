"""Products of matrices: synchronous ones of a warp (mma), asynchronous ones of a group (wgmma).

PTX ISA 9.7.14 and 9.7.15. Sums are in float32; a tensor core's own rounding is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
from attrs import define

from attn_graph.testing.gpu.floats import FLOAT4, FLOAT8, widen
from attn_graph.testing.gpu.matrices import (
    Tile,
    left_fragment,
    places_of,
    right_fragment,
    spread_sums,
    sum_fragment,
)
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import DTYPES, Array, action
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import WARP, Threads

GROUP = 4  # warps
F32 = np.float32
SPANS = (16, 128, 64, 32)  # bytes swizzled together, by a descriptor's mode
ON_THEIR_WAY = 0x7FBADBAD  # in registers of a product before its wait


KINDS = r"(?:f16|bf16|tf32|e4m3|e5m2)"
BYTES = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "e2m1": 1}
# of an element, but e2m1: of two


@action(
    rf"mma\.sync\.aligned\.m16n8k(?:8|16|32)\.row\.col\.f32\.(?P<left>{KINDS})"
    rf"\.(?P<right>{KINDS})\.f32",
    "f32* <- b32* b32* f32*",
)
@action(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col(?:\.satfinite)?\.s32\.(?P<left>[us]8)"
    r"\.(?P<right>[us]8)\.s32",
    "s32* <- b32* b32* s32*",
)
def multiply_fragments(
    m: Program,
    g: Threads,
    a: tuple[Array, ...],
    b: tuple[Array, ...],
    c: tuple[Array, ...],
    left: str,
    right: str,
) -> Array:
    """D = A B + C: [16,k] [k,8] of each warp, k elements of 32 bytes; sums in 32 bits."""
    m.together(g)
    if (len(a), len(b), len(c)) != (4, 2, 4):
        m.refuse(f"a product of {len(a)}, {len(b)} and {len(c)} registers")
    first, second = left_fragment(elements(g.stack(a), left)), elements(g.stack(b), right)
    sums = first @ right_fragment(second) + sum_fragment(g.stack(c))
    return spread_sums(sums.astype(c[0].dtype))


def cut_to_tf32(x: Array) -> Array:
    """Numbers without the bits that TF32 lacks."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def elements(registers: Array, kind: str) -> Array:
    """The elements in registers [registers, threads, some], as factors."""
    bits = np.ascontiguousarray(registers).view(f"u{BYTES[kind]}")
    return as_factors(bits, kind).reshape(*registers.shape, -1)


@final
@define(eq=False)
class Products:
    """Products of warp groups on their way.

    Each warp computes its own 16 rows. group: the number of each warp's open group; done: the last
    group it has waited for. row: of each register of products. By row: registers, their contents;
    results, their future contents; sums, factors: of each warp the group that sets it, or reads it;
    fenced: True if set before the last wgmma.fence.
    """

    group: Array
    done: Array
    row: Mapping[int, int]
    registers: Array
    results: Array
    sums: Array
    factors: Array
    fenced: Array
    is_busy: bool = False

    @classmethod
    def of(cls, m: Program) -> Products:
        row = m.launch.code.row
        zeros = np.zeros((len(row), m.warps), np.int32)
        made = cls(
            group=np.ones(m.warps, np.int32),
            done=np.zeros(m.warps, np.int32),
            row=row,
            registers=m.watched,
            results=np.zeros(m.watched.shape, np.float32),
            sums=zeros,
            factors=zeros.copy(),
            fenced=zeros.astype(bool),
        )
        m.at_end.append(made.end)
        return made

    def check_fence(self, m: Program, rows: Array, warps: Array) -> None:
        """Note registers set after the last wgmma.fence."""
        at = np.ix_(rows, warps)
        if (~self.fenced[at] & (self.sums[at] == 0)).any():
            m.note("no wgmma.fence after a register of a product is set; ptxas adds one (C7519)")

    def so_far(self, rows: Array, span: slice, warps: Array) -> Array:
        """The sums to add to: registers, or results of earlier products, [rows, threads]."""
        pending = np.repeat(self.sums[np.ix_(rows, warps)] > 0, WARP, axis=1)
        return np.where(pending, self.results[rows, span], self.registers[rows, span].view(F32))

    def begin(self, rows: Array, factors: Array, sums: Array, span: slice, warps: Array) -> None:
        """Warps begin a product: its registers will hold sums [rows, threads]."""
        self.results[rows, span], self.registers[rows, span] = sums, ON_THEIR_WAY
        self.sums[np.ix_(rows, warps)] = self.group[warps]
        self.factors[np.ix_(factors, warps)] = self.group[warps]
        self.is_busy = True

    def finish(self, m: Program, warp: int, done: int) -> None:
        """A warp has waited for its groups up to `done`: their registers are set."""
        self.done[warp] = max(done, int(self.done[warp]))
        m.clocks.known[warp, m.clocks.agent("product", warp)] = self.done[warp]
        span, groups = slice(warp * WARP, (warp + 1) * WARP), self.sums[:, warp]
        over = np.flatnonzero((groups > 0) & (groups <= self.done[warp]))
        self.registers[over, span] = self.results[over, span].view(np.uint32)
        groups[over] = 0
        self.is_busy = bool((self.sums > 0).any() or (self.factors > self.done).any())

    def end(self, m: Program) -> None:
        """The program ends. Raises Fault if products are on their way."""
        if (self.done < self.group - 1).any():
            m.fault("it ends before the wait for its products")


@action("register.read", "<- #")
def read_register(m: Program, g: Threads, register: int) -> None:
    """Before a register is read. Raises Fault if a product on its way sets it."""
    x, warps = m.part(Products), g.warp_index
    if x.is_busy and (x.sums[x.row[register], warps] > x.done[warps]).any():
        m.fault(f"{m.name_of(register)} is read before the wait for the product that sets it")


@action("register.write", "<- #")
def write_register(m: Program, g: Threads, register: int) -> None:
    """Before a register is set. Raises Fault if a product on its way sets or reads it."""
    x, warps = m.part(Products), g.warp_index
    row = x.row[register]
    x.fenced[row, warps] = False
    for use, users in (("sets", x.sums), ("reads", x.factors)) if x.is_busy else ():
        if (users[row, warps] > x.done[warps]).any():
            name = m.name_of(register)
            m.fault(f"{name} is set before the wait for a product that {use} it")


@action(r"wgmma\.fence\.sync\.aligned", "<-")
def fence_products(m: Program, g: Threads) -> None:
    """Later products come after earlier writes of their registers."""
    m.part(Products).fenced[:, m.together(g)] = True


@action(r"wgmma\.commit_group\.sync\.aligned", "<-")
def commit_products(m: Program, g: Threads) -> None:
    """The products since the last commit become a group."""
    m.part(Products).group[m.together(g)] += 1


@action(r"wgmma\.wait_group\.sync\.aligned", "<- #")
def wait_for_products(m: Program, g: Threads, pending: int) -> None:
    """Wait until only the last `pending` groups are on their way."""
    for warp in m.together(g).tolist():
        m.part(Products).finish(m, warp, int(m.part(Products).group[warp]) - 1 - pending)


@action(
    rf"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?:8|16|32)\.f32\.(?P<kind>{KINDS})"
    rf"\.(?P<other>{KINDS})",
    "<- & & u64 pred # # #? #?",
)
def multiply_tiles(
    m: Program,
    g: Threads,
    d: tuple[int, ...],
    a: tuple[int, ...] | Array,
    b: Array,
    add: Array,
    *flags: int,
    n: str,
    kind: str,
    other: str,
) -> None:
    """D = A B + D, or A B: [64,k] [k,n] of four warps, asynchronous until they wait; k elements of
    32 bytes.

    A is in registers, or in shared memory like B; the flags negate A and B, and turn those of 16
    bits.
    """
    signs, turns, x = flags[:2], flags[2:], m.part(Products)
    if len(turns) != (BYTES[kind] == 2) * (2 - isinstance(a, tuple)) or len(d) != int(n) // 2:
        m.refuse("a product of other operands")
    every, rows = m.together(g), np.array([x.row[k] for k in d])
    factors = np.array([x.row[k] for k in a] if isinstance(a, tuple) else [], np.intp)
    x.check_fence(m, np.r_[rows, factors], every)
    for warps in np.split(every, np.flatnonzero(np.diff(every // GROUP)) + 1):
        span = slice(warps[0] * WARP, (warps[-1] + 1) * WARP)
        lanes = slice(span.start - g.span.start, span.stop - g.span.start)
        turned, tile = any(turns[-1:]), one_value(m, g, b, lanes)
        right = read_operand(m, warps, tile, int(n), other, turned)
        if isinstance(a, tuple):
            left = left_fragment(elements(x.registers[factors, span], kind))
        else:
            tile = one_value(m, g, a, lanes)
            left = read_operand(m, warps, tile, 64, kind, any(turns[:1]), parts=GROUP)
            left = left.reshape(GROUP, 16, -1)[warps % GROUP]
        sums = signs[0] * signs[1] * (left @ right.T)
        if one_value(m, g, add, lanes):
            sums = sums + sum_fragment(x.so_far(rows, span, warps))
        x.begin(rows, factors, spread_sums(sums), span, warps)


def one_value(m: Program, g: Threads, values: Array, lanes: slice) -> int:
    each = np.broadcast_to(values, g.count)[lanes]
    if (each != each[0]).any():
        m.fault("lanes of a warp group have different operands of a product")
    return int(each[0])


def read_operand(
    m: Program,
    warps: Array,
    descriptor: int,
    rows: int,
    kind: str,
    turned: bool,
    parts: int = 1,
) -> Array:
    """An operand [rows, k] in shared memory, by its descriptor. Each warp reads all, or its part.

    Bits 0 to 13: the start, 16 to 29: lead, 32 to 45: stride, in units of 16 bytes; 62 and 63: the
    mode of swizzling.
    """
    if descriptor >> 49 & 7:
        m.refuse("a matrix descriptor with a base offset")
    start, lead, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span, size = SPANS[descriptor >> 62 & 3], BYTES[kind]
    tile = Tile(start, lead, stride, span, rows, turned, size)
    agents = m.clocks.agent("product", warps)
    return load_tile(m, warps, agents, m.part(Products).group[warps], tile, kind, parts)


def load_tile(
    m: Program, warps: Array, agents: Array, times: Array, tile: Tile, kind: str, parts: int = 1
) -> Array:
    """An operand in shared memory [rows, k], read by agents on behalf of warps."""
    offsets, cells = places_of(tile, m.part(Shared).grain, parts)
    m.part(Shared).check_range(m, "an operand", int(offsets.min()), int(offsets.max()) + tile.size)
    own, ledger = cells[warps % parts], m.part(Shared).ledger
    ledger.check_seen(m, "a product's read", warps, own, proxy=True)
    ledger.note_read(m, agents, times, own)
    return as_factors(m.part(Shared).words(tile.size)[offsets // tile.size], kind)


def as_factors(bits: Array, kind: str) -> Array:
    """Elements of an operand as float32 factors."""
    if kind == "e2m1":
        return FLOAT4[np.stack([bits & 15, bits >> 4], -1)].reshape(len(bits), -1)
    if kind in FLOAT8:
        return FLOAT8[kind][bits].view(np.float16).astype(F32)
    if kind in ("s8", "u8"):
        return bits.view("i1" if kind == "s8" else "u1").astype(np.int32)
    return cut_to_tf32(bits) if kind == "tf32" else widen(bits.view(DTYPES[kind]))
