"""Products of matrices: synchronous ones of a warp (mma), asynchronous ones of a group (wgmma).

And places of elements: fragments in registers, and tiles in shared memory. PTX ISA 9.7.14,
9.7.15.5 (layouts and descriptors of wgmma), 9.7.16.4 (those of tcgen05). Sums are in float32; a
tensor core's own rounding is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import final

import numpy as np
from attrs import define, frozen

from attn_graph.testing.gpu.floats import FLOAT4, FLOAT8, widen
from attn_graph.testing.gpu.program import SHARED, Program
from attn_graph.testing.gpu.rules import DTYPES, Array, Arrays, action, any_of
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import WARP, Threads

GROUP = 4  # warps
F32 = np.float32
SPANS = (16, 32, 64, 128)  # bytes swizzled together, by a tensor map's mode; 16: none
SWIZZLED = {0: 16, 2: 128, 4: 64, 6: 32}  # the same, by a descriptor's
ON_THEIR_WAY = 0x7FBADBAD  # in registers of a product before its wait


KINDS = r"(?:f16|bf16|tf32|e4m3|e5m2)"
BYTES = {"tf32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
BYTES |= {"e2m1": 1, "b4x16_p64": 1}  # of an element, but here of two, also with gaps between them


def swizzle(addresses: Array, span: int) -> Array:
    """Addresses of the bytes of a tile: bits 4 to 6 are changed by bits 7 to 9."""
    moved = addresses >> 7 & (span // 16 - 1)
    return np.asarray(addresses ^ moved << 4)


@final
@frozen
class Tile:
    """An operand [rows, k] in shared memory; k elements of `size` bytes have 32 bytes.

    It lies in cores of 8 rows of `span` bytes. Not turned, k is contiguous, and cores are `stride`
    bytes apart along the rows; without swizzling, `lead` bytes along k. Turned, rows are
    contiguous, and cores are `lead` bytes apart along these, `stride` along k. gaps: of each 16
    bytes along k the last 8 are unused.
    """

    start: int
    lead: int
    stride: int
    span: int
    rows: int
    turned: bool
    size: int = 2
    gaps: bool = False

    @property
    def addresses(self) -> Array:
        i, j = np.ogrid[: self.rows, : 32 // self.size]
        j = j[:, j[0] % 16 < 8] if self.gaps else j
        lead, stride, span = self.lead, self.stride, self.span
        if not self.turned:
            j = j * self.size
            along = j // 16 * lead + j % 16 if span == 16 else j
            at = i // 8 * stride + i % 8 * span + along
        elif span == 16:
            at = i // 8 * stride + j // 8 * lead + j % 8 * 16 + i % 8 * 2
        else:
            at = i // (span // 2) * lead + j // 8 * stride + j % 8 * span + i % (span // 2) * 2
        return swizzle(self.start + at.astype(np.int64), span)


@lru_cache(maxsize=4096)
def places_of(tile: Tile, grain: int, parts: int) -> tuple[Array, Array]:
    """Offsets of elements, and the cells of each part; smaller parts repeat cells."""
    offsets = tile.addresses - SHARED
    cells = [np.unique(part // grain) for part in np.split(offsets, parts)]
    most = max(map(len, cells))
    return offsets, np.stack([np.pad(each, (0, most - len(each)), "edge") for each in cells])


# Fragments: 32-bit registers [register, 32 w] of w warps to matrices [w, rows, columns]. In each
# quad of lanes a lane has two elements side by side; eight quads have eight rows.


def left_fragment(items: Array) -> Array:
    """A [16, 8 n], from [4, 32 w, n]: registers are rows 0 and 8, then the second half of k."""
    n = items.shape[-1]
    x = items.reshape(2, 2, -1, 8, 4, n)  # half of k, rows 8, warp, row, quad, item
    return x.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 8 * n)


def right_fragment(items: Array) -> Array:
    """B [8 n, 8], from [2, 32 w, n]: registers are the halves of k."""
    n = items.shape[-1]
    x = items.reshape(2, -1, 8, 4, n)  # half of k, warp, column, quad, item
    return x.transpose(1, 0, 3, 4, 2).reshape(-1, 8 * n, 8)


def sum_fragment(numbers: Array) -> Array:
    """C [16, n], from [n / 2, 32 w]: pairs of columns, rows 0 and 8, then eight columns on."""
    x = numbers.reshape(-1, 2, 2, numbers.shape[1] // 32, 8, 4)  # columns 8, rows 8, pair, w, row
    return x.transpose(3, 1, 4, 0, 5, 2).reshape(x.shape[3], 16, -1)


def spread_sums(sums: Array) -> Array:
    """[n / 2, 32 w] from C [w, 16, n], the inverse of sum_fragment."""
    x = sums.reshape(len(sums), 2, 8, -1, 4, 2)
    return x.transpose(3, 1, 5, 0, 2, 4).reshape(-1, 32 * len(sums))


# Products of a warp


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
    m: Program, g: Threads, a: Arrays, b: Arrays, c: Arrays, left: str, right: str
) -> Array:
    """D = A B + C: [16,k] [k,8] of each warp, k elements of 32 bytes; sums in 32 bits."""
    m.together(g)
    if (len(a), len(b), len(c)) != (4, 2, 4):
        m.refuse(f"a product of {len(a)}, {len(b)} and {len(c)} registers")
    first, second = left_fragment(elements(g.stack(a), left)), elements(g.stack(b), right)
    sums = first @ right_fragment(second) + sum_fragment(g.stack(c))
    return spread_sums(sums.astype(c[0].dtype))


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
        results = np.zeros(m.watched.shape, np.float32)
        group, done = np.ones(m.warps, np.int32), np.zeros(m.warps, np.int32)
        made = cls(group, done, row, m.watched, results, zeros, zeros.copy(), zeros.astype(bool))
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
    if x.is_busy and any_of(x.sums[x.row[register], warps] > x.done[warps]):
        m.fault(f"{m.name_of(register)} is read before the wait for the product that sets it")


@action("register.write", "<- #")
def write_register(m: Program, g: Threads, register: int) -> None:
    """Before a register is set. Raises Fault if a product on its way sets or reads it."""
    x, warps = m.part(Products), g.warp_index
    row = x.row[register]
    x.fenced[row, warps] = False
    for use, users in (("sets", x.sums), ("reads", x.factors)) if x.is_busy else ():
        if any_of(users[row, warps] > x.done[warps]):
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
    if any_of(each != each[0]):
        m.fault("lanes have different operands of an instruction of the whole warp or warp group")
    return int(each[0])


def read_operand(
    m: Program, warps: Array, descriptor: int, rows: int, kind: str, turned: bool, parts: int = 1
) -> Array:
    """An operand [rows, k] in shared memory, by its descriptor. Each warp reads it, or a part."""
    agents, times = m.clocks.agent("product", warps), m.part(Products).group[warps]
    tile = tile_at(m, descriptor, rows, kind, turned)
    return load_tile(m, warps, agents, times, tile, kind, parts)


def tile_at(m: Program, descriptor: int, rows: int, kind: str, turned: bool) -> Tile:
    """The place of an operand.

    Bits 0 to 13 of its descriptor: the start, 16 to 29: lead, 32 to 45: stride, in units of 16
    bytes; 49 to 51: an offset of swizzling; 61 to 63: its mode.
    """
    start, lead, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    span, size = SWIZZLED.get(descriptor >> 61 & 7, 0), BYTES[kind]
    if not span or (span > 16 and descriptor >> 49 & 7) or (turned and size != 2):
        m.refuse(f"the matrix descriptor {descriptor:#x}")
    return Tile(start, lead, stride, span, rows, turned, size, kind == "b4x16_p64")


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
    if kind in ("e2m1", "b4x16_p64"):
        return FLOAT4[np.stack([bits & 15, bits >> 4], -1)].reshape(len(bits), -1)
    if kind in FLOAT8:
        return FLOAT8[kind][bits].view(np.float16).astype(F32)
    if kind in ("s8", "u8"):
        return bits.view("i1" if kind == "s8" else "u1").astype(np.int32)
    if kind == "tf32":  # without the bits that it lacks
        return (bits.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)
    return widen(bits.view(DTYPES[kind]))
