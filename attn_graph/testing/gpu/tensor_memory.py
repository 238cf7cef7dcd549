"""Tensor memory, and the tensor cores that work in it. PTX ISA 9.7.16.

It has 128 lanes of 512 columns of 32 bits; an address is a lane in its upper half, and a column.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.barriers import Barriers, MBarrier
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.ledger import Ledger
from attn_graph.testing.gpu.products import BYTES, as_factors, load_tile, one_value, tile_at
from attn_graph.testing.gpu.program import Program
from attn_graph.testing.gpu.rules import Array, action, any_of
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import WARP, Threads

LANES, COLUMNS = 128, 512
QUARTER = 32  # lanes accessible to a warp
# What an instruction's kind and the number in its descriptor make of an operand.
KINDS = {("f16", 0): "f16", ("f16", 1): "bf16", ("tf32", 2): "tf32"}
for mixed in ("f8f6f4", "mxf8f6f4"):
    KINDS |= {(mixed, 0): "e4m3", (mixed, 1): "e5m2", (mixed, 5): "b4x16_p64"}
KINDS |= {("mxf4", 1): "e2m1", ("mxf4nvf4", 1): "e2m1"}
EXPONENTS = np.r_[np.exp2(np.arange(-127, 128)), np.nan].astype(np.float32)  # ue8m0, by its bits
UNSET = 0x7FBADBAD  # in unwritten columns: NaN


@final
@frozen(eq=False)
class Commit:
    """An arrival at an mbarrier after products up to a time, and what these have seen."""

    mbarrier: MBarrier
    time: int
    line: int
    seen: Array


@final
@define(eq=False)
class TensorMemory:
    """The tensor memory of a program.

    taken: the allocated columns. blocks: how many begin at a column. loads, stores: the time of
    each warp's. time: of products. commits: those that have not arrived at their mbarrier. before:
    what the products of each warp have seen.
    """

    ledger: Ledger
    loads: Array
    stores: Array
    data: Array = field(factory=lambda: np.full(LANES * COLUMNS, UNSET, np.uint32))
    taken: Array = field(factory=lambda: np.zeros(COLUMNS, bool))
    blocks: dict[int, int] = field(factory=dict[int, int])
    relinquished: bool = False
    time: int = 1
    commits: list[Commit] = field(factory=list["Commit"])
    before: dict[int, Array] = field(factory=dict[int, Array])

    @classmethod
    def of(cls, m: Program) -> TensorMemory:
        clocks, ones = m.clocks, np.ones(m.warps, np.int32)
        readers = np.r_[clocks.agents("load"), clocks.tensor]
        ledger = Ledger(clocks, LANES * COLUMNS, readers, "tensor memory", 0)
        made = cls(ledger, ones, ones.copy())
        m.on_idle.append(made.advance)
        m.at_end.append(made.end)
        return made

    def advance(self, m: Program) -> bool:
        """Let one commit arrive at its mbarrier; True if there is one."""
        if not self.commits:
            return False
        commit = self.commits.pop(0)
        m.line, mbarrier = commit.line, commit.mbarrier
        np.maximum(mbarrier.seen, commit.seen, out=mbarrier.seen)
        mbarrier.seen[0, m.clocks.tensor] = commit.time
        mbarrier.arrive(m, 1)
        return True

    def end(self, m: Program) -> None:
        """The program ends. Raises Fault unless all columns are given back.

        Reports commits that nobody waits for.
        """
        if self.blocks:
            m.fault(f"it ends with {sum(self.blocks.values())} columns of tensor memory")
        if self.commits:
            m.report(Omission.COMMITS, "it ends before a commit of products arrives")

    def cells(self, m: Program, rows: Array, columns: Array) -> Array:
        """Cells of lanes and columns. Raises Fault for missing ones."""
        if rows.max() >= LANES or columns.max() >= COLUMNS or not self.taken[columns].all():
            taken = f"of which columns {sorted(self.blocks.items())} are allocated (first, number)"
            m.fault(f"lane {rows.max()}, column {columns.max()} of tensor memory, {taken}")
        return rows * COLUMNS + columns

    def cells_of_warp(
        self, m: Program, warp: int, addresses: Array, count: int, split: int | None = None
    ) -> Array:
        """Cells of each thread of a warp, [count, threads]: a lane each, or 16 lanes twice.

        The second time is `split` columns on.
        """
        lane, column = int(addresses[0]) >> 16, int(addresses[0]) & 0xFFFF
        if lane // QUARTER != warp % 4 or any_of(addresses != addresses[0]):
            m.fault(f"warp {warp} has no access to lane {lane} of tensor memory, or names several")
        thread, n = np.arange(WARP), np.arange(count)[:, None]
        if split is None:
            return self.cells(m, lane + thread + 0 * n, column + n + 0 * thread)
        return self.cells(m, lane + thread % 16 + 0 * n, column + n + thread // 16 * split)


T5 = r"tcgen05\."
ONE = r"\.cta_group::1"


@action(T5 + "alloc" + ONE + r"\.sync\.aligned\.shared::cta\.b32", "<- @ u32")
def allocate(m: Program, g: Threads, target: Array, number: Array) -> None:
    """Allocate columns of tensor memory, and store the address of the first."""
    tensor = m.part(TensorMemory)
    for warp in m.together(g).tolist():
        columns = one_value(m, g, number, g.lanes(warp))
        if columns not in (32, 64, 128, 256, 512) or tensor.relinquished:
            m.fault(f"tcgen05.alloc of {columns} columns, or after the permit is relinquished")
        tried = range(0, COLUMNS - columns + 1, QUARTER)
        free = [n for n in tried if not tensor.taken[n : n + columns].any()]
        if not free:
            m.refuse(f"tcgen05.alloc that waits for {columns} free columns")
        tensor.taken[free[0] : free[0] + columns], tensor.blocks[free[0]] = True, columns
        offsets = m.part(Shared).offsets(m, "tcgen05.alloc", target[g.lanes(warp)][:1], 4)
        data = np.array([[free[0]]], np.uint32).view(np.uint8)
        m.part(Shared).ledger.inits.add(m.line)
        m.part(Shared).store(m, "tcgen05.alloc", np.array([warp]), offsets, data)


@action(T5 + "dealloc" + ONE + r"\.sync\.aligned\.b32", "<- u32 u32")
def deallocate(m: Program, g: Threads, address: Array, number: Array) -> None:
    """Give columns back."""
    tensor = m.part(TensorMemory)
    for warp in m.together(g).tolist():
        columns, first = (one_value(m, g, x, g.lanes(warp)) for x in (number, address))
        if tensor.blocks.pop(first, 0) != columns:
            m.fault(f"columns {first} on, {columns} of tensor memory, are given back but not taken")
        tensor.taken[first : first + columns] = False
        cells = np.arange(LANES * COLUMNS).reshape(LANES, COLUMNS)[:, first : first + columns]
        tensor.ledger.check_free(m, "tcgen05.dealloc", np.array([warp]), cells.reshape(1, -1))


@action(T5 + "relinquish_alloc_permit" + ONE + r"\.sync\.aligned", "<-")
def relinquish(m: Program, g: Threads) -> None:
    """No more columns will be allocated."""
    m.together(g)
    m.part(TensorMemory).relinquished = True


@action(T5 + r"fence::(?:before|after)_thread_sync", "<-")
def fence_tensor(m: Program, g: Threads) -> None:
    """Extends a barrier's order to other instructions; nothing more is needed here."""


@action(T5 + r"ld\.sync\.aligned\.(?:32x32b|16x32bx2)\.x(?P<count>\d+)\.b32", "b32* <- @ #?")
def load_tensor(
    m: Program, g: Threads, address: Array, split: int | None = None, *, count: str
) -> Array:
    """d = columns of the lanes of each warp; the registers are set after its wait."""
    tensor = m.part(TensorMemory)
    loaded = np.zeros((int(count), g.count), np.uint32)
    for warp in m.together(g).tolist():
        threads = g.lanes(warp)
        cells = tensor.cells_of_warp(m, warp, address[threads], int(count), split)
        one, flat = np.array([warp]), cells.reshape(1, -1)
        tensor.ledger.check_seen(m, "tcgen05.ld", one, flat, may_be_unset=True)
        agents = m.clocks.agent("load", one)
        tensor.ledger.note_read(m, agents, tensor.loads[one], flat)
        loaded[:, threads] = tensor.data[cells]
    return loaded


@action(T5 + r"st\.sync\.aligned\.32x32b\.x\d+\.b32", "<- @ b32*")
@action(T5 + r"st\.sync\.aligned\.16x32bx2\.x\d+\.b32", "<- @ # b32*")
def store_tensor(m: Program, g: Threads, address: Array, *given: Any) -> None:  # Any: see below
    """Set columns of the lanes of each warp; or of 16 lanes, and others `split` columns on."""
    *splits, values = given  # at most one number, and the columns
    tensor, rows = m.part(TensorMemory), g.stack(values)
    for warp in m.together(g).tolist():
        threads = g.lanes(warp)
        cells = tensor.cells_of_warp(m, warp, address[threads], len(rows), *splits)
        one, flat = np.array([warp]), cells.reshape(1, -1)
        agents = m.clocks.agent("store", one)
        tensor.ledger.check_free(m, "tcgen05.st", one, flat, own=int(agents[0]))
        tensor.ledger.note_write(m, agents, tensor.stores[one], flat)
        tensor.data[cells] = rows[:, threads]


@action(T5 + r"wait::(?P<way>ld|st)\.sync\.aligned", "<-")
def wait_for_tensor(m: Program, g: Threads, way: str) -> None:
    """Wait for all loads, or all stores, of the warp."""
    tensor, warps = m.part(TensorMemory), m.together(g)
    kind, times = ("load", tensor.loads) if way == "ld" else ("store", tensor.stores)
    m.clocks.known[warps, m.clocks.agent(kind, warps)] = times[warps]
    times[warps] += 1


MMA = T5 + "mma" + ONE + r"\.kind::(?P<kind>f16|tf32|f8f6f4)"


@action(MMA, "<- @ & u64 u32 pred")
@action(MMA + r"\.collector::a::discard", "<- @ & u64 u32 b32* pred")
def multiply_in_tensor_memory(
    m: Program,
    g: Threads,
    d: Array,
    a: tuple[Array] | Array,
    b: Array,
    description: Array,
    *given: Any,  # Any: see below
    kind: str,
) -> None:
    """D = A B + D, or A B: [rows,k] [k,n], in which k elements have 32 bytes.

    D is in tensor memory; A is there or, like B, in shared memory. Products of a program follow
    each other; a commit signals their end.
    """
    *left_out, add = given  # a mask of unchanged lanes of D, if any; and the flag of a sum
    kept = np.stack([g.each(x) for masks in left_out for x in masks] or [g.each(np.uint32(0))] * 4)
    start = a[0] if isinstance(a, tuple) else a
    numbers = [g.each(x).tolist() for x in (d, start, b, description, add)]
    for n, (warp, *each) in enumerate(zip(g.owners.tolist(), *numbers, strict=True)):
        at, left_at, right_at, described, adds = map(int, each)
        changed = kept[:, n].repeat(QUARTER) >> np.tile(np.arange(QUARTER), 4) & 1 == 0
        if described >> 4 & 3 != 1:
            m.refuse(f"the instruction descriptor {described:#x}")
        product = Product.of(m, kind, described)
        right = read_tile(m, warp, right_at, product.right)
        if isinstance(a, tuple):
            words = read_words(m, warp, block_of(m, left_at, product.left.rows, 8))
            left = as_factors(words.view(f"u{product.left.size}"), product.left.kind)
        else:
            left = read_tile(m, warp, left_at, product.left)
        cells, sums = block_of(m, at, *product.shape), left @ right.T
        rows = changed[cells[:, 0] // COLUMNS]
        multiply_once(m, warp, cells[rows], sums[rows], bool(adds))


@action(T5 + "cp" + ONE + r"\.warpx4\.32x128b", "<- @ u64")
def copy_scales(m: Program, g: Threads, target: Array, source: Array) -> None:
    """Copy 32 rows of 16 bytes from shared memory to the lanes of each warp, behind products."""
    given = zip(g.owners.tolist(), g.each(target).tolist(), g.each(source).tolist(), strict=True)
    for warp, at, descriptor in given:
        rows = read_tile(m, warp, descriptor, Factor("u8", QUARTER, False))[:, :16]
        words = np.ascontiguousarray(rows.astype(np.uint8)).view(np.uint32)
        write_cells(m, warp, "tcgen05.cp", block_of(m, at, LANES, 4), np.tile(words, (4, 1)))


SCALED = T5 + "mma" + ONE + r"\.kind::(?P<kind>mxf8f6f4|mxf4|mxf4nvf4)\.block_scale"


@action(SCALED + r"\.scale_vec::(?P<many>[124])X", "<- @ & u64 u32 @ @ pred")
def multiply_scaled(
    m: Program, g: Threads, d: Array, *operands: Array, kind: str, many: str
) -> None:
    """D = A B + D, or A B, with one of `many` scales for elements side by side along k.

    Scales are in tensor memory: of row r in lane r % 32, column r / 32, one in each byte.
    """
    numbers = [g.each(x).tolist() for x in (d, *operands)]
    for warp, *each in zip(g.owners.tolist(), *numbers, strict=True):
        at, left_at, right_at, bits, left_scales, right_scales, adds = map(int, each)
        product = Product.of(m, kind, bits)
        if bits >> 31 or product.left.rows != LANES:
            m.refuse(f"the instruction descriptor {bits:#x}")
        left, right = (
            scale(m, warp, read_tile(m, warp, start, factor), scales, bits >> first & 3, bits, many)
            for start, factor, scales, first in (
                (left_at, product.left, left_scales, 29),
                (right_at, product.right, right_scales, 4),
            )
        )
        multiply_once(m, warp, block_of(m, at, *product.shape), left @ right.T, bool(adds))


def scale(
    m: Program, warp: int, items: Array, address: int, first: int, bits: int, many: str
) -> Array:
    """Elements [rows, k] by scales: `many` along k, the bytes of a word from `first` on."""
    lane, row = address >> 16, np.arange(len(items))
    lanes = lane + np.arange(0, LANES, QUARTER)[:, None] + row % QUARTER
    columns = (address & 0xFFFF) + row // QUARTER + 0 * lanes
    copies = read_words(m, warp, m.part(TensorMemory).cells(m, lanes, columns))
    if first % int(many) or (copies != copies[0]).any():
        m.fault(f"{many} scales from byte {first} on, or others in other quarters of the lanes")
    parts = copies[0][:, None].view(np.uint8)
    chosen = parts[:, first : first + int(many)]
    scales = EXPONENTS[chosen] if bits >> 23 & 1 else as_factors(chosen, "e4m3")
    return np.asarray(items * scales.repeat(items.shape[1] // int(many), axis=1))


@final
@frozen
class Factor:
    """An operand: its kind, its rows, and the flag that these are contiguous in shared memory."""

    kind: str
    rows: int
    turned: bool

    @property
    def size(self) -> int:
        return BYTES[self.kind]


@final
@frozen
class Product:
    """A decoded instruction descriptor."""

    left: Factor
    right: Factor

    @classmethod
    def of(cls, m: Program, kind: str, bits: int) -> Product:
        """Raises UnknownInstructionError for combinations that the virtual GPU does not have."""
        kinds = [KINDS.get((kind, bits >> at & 7)) for at in (7, 10)]
        columns, rows = (bits >> 17 & 63) * 8, (bits >> 24 & 31) * 16
        left, right = kinds
        if bits & 0x600F or not (left and right) or rows not in (64, 128):
            m.refuse(f"the instruction descriptor {bits:#x}")
        turned = [bool(bits >> at & 1) for at in (15, 16)]
        return cls(Factor(str(left), rows, turned[0]), Factor(str(right), columns, turned[1]))

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.rows, self.right.rows


def read_words(m: Program, warp: int, cells: Array) -> Array:
    """Words of tensor memory, read by a product."""
    tensor, core = m.part(TensorMemory), m.clocks.tensor
    flat = cells.reshape(1, -1)
    tensor.ledger.check_seen(m, "tcgen05.mma", np.array([warp]), flat, own=core)
    tensor.ledger.note_read(m, np.array([core]), np.array([tensor.time]), flat)
    return np.ascontiguousarray(tensor.data[cells])


def multiply_once(m: Program, warp: int, cells: Array, sums: Array, adds: bool) -> None:
    """Store one product, begun by a thread of a warp, or add it to the sums there."""
    tensor, core = m.part(TensorMemory), m.clocks.tensor
    if adds:
        flat = cells.reshape(1, -1)
        tensor.ledger.check_seen(m, "tcgen05.mma", np.array([warp]), flat, own=core)
        sums = sums + tensor.data[cells].view(np.float32)
    write_cells(m, warp, "tcgen05.mma", cells, sums.astype(np.float32).view(np.uint32))


def write_cells(m: Program, warp: int, text: str, cells: Array, words: Array) -> None:
    """A tensor core writes words, on behalf of a thread of a warp."""
    tensor, core, flat = m.part(TensorMemory), m.clocks.tensor, cells.reshape(1, -1)
    m.clocks.tell(warp, tensor.before.setdefault(warp, m.clocks.nothing))
    tensor.ledger.check_free(m, text, np.array([warp]), flat, own=core)
    tensor.ledger.note_write(m, np.array([core]), np.array([tensor.time]), flat)
    tensor.data[cells] = words


def block_of(m: Program, address: int, rows: int, columns: int) -> Array:
    """Cells [rows, columns] of a matrix; 64 rows lie in 16 lanes of each quarter."""
    lane, n = address >> 16, np.arange(rows)
    lanes = n if rows == LANES else n // 16 * QUARTER + n % 16 + lane
    at = (address & 0xFFFF) + np.arange(columns)
    return m.part(TensorMemory).cells(m, lanes[:, None] + 0 * at, at + 0 * lanes[:, None])


def read_tile(m: Program, warp: int, descriptor: int, factor: Factor) -> Array:
    """An operand [rows, k] in shared memory, by its descriptor."""
    agents, times = np.array([m.clocks.tensor]), np.array([m.part(TensorMemory).time])
    tile = tile_at(m, descriptor, factor.rows, factor.kind, factor.turned)
    return load_tile(m, np.array([warp]), agents, times, tile, factor.kind)


COMMIT = r"\.mbarrier::arrive::one(?P<space>\.shared::(?:cta|cluster))?\.b64"


@action(T5 + "commit" + ONE + COMMIT, "<- @")
def commit_tensor(m: Program, g: Threads, address: Array, space: str | None) -> None:
    """An mbarrier counts an arrival after all products up to now."""
    tensor = m.part(TensorMemory)
    if space is None:
        m.note("a commit of products takes an address of shared memory for a generic one")
    offsets = m.part(Shared).offsets(m, "an mbarrier", g.take(address), 8)
    for warp, offset in zip(g.owners.tolist(), offsets.tolist(), strict=True):
        mbarrier = m.part(Barriers).use(m, warp, offset, proxy=True)
        before = tensor.before.get(warp, m.clocks.nothing).copy()
        tensor.commits.append(Commit(mbarrier, tensor.time, m.line, before))
        tensor.time += 1
