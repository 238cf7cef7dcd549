"""Bulk copies and bulk sums between shared and global memory. PTX ISA 9.7.9.25.4, 9.7.9.25.5.

A store, or sum, reads shared memory until its thread has waited for its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.barriers import Barriers
from attn_graph.testing.gpu.copies import HINT, MAP_ALIGNED, PIECE, TileCopy
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.maps import TensorMap
from attn_graph.testing.gpu.matrices import swizzle
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.program import SHARED, Program
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import Array, action
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import Threads


@final
@define(eq=False)
class BulkGroups:
    """Groups of bulk stores, by warp. group: the number of the open one. owners: storing threads.

    begun: the last group with a store. waited: the last group waited for.
    """

    group: Array
    begun: Array
    waited: Array
    owners: dict[int, frozenset[int]] = field(factory=dict[int, frozenset[int]])

    @classmethod
    def of(cls, m: Program) -> BulkGroups:
        zeros = np.zeros(m.warps, np.int32)
        made = cls(zeros + 1, zeros, zeros.copy())
        m.at_end.append(made.end)
        return made

    def end(self, m: Program) -> None:
        """The program ends: report shared memory that is still to be read."""
        if (self.begun > self.waited).any():
            m.report(Omission.BULK_STORES, "it ends before the wait for a bulk store")

    def storing(self, g: Threads) -> Array:
        threads = {*g.numbers.tolist()}
        return np.array([w for w, own in self.owners.items() if own <= threads], np.intp)

    def read(self, m: Program, warp: int, threads: frozenset[int], offsets: Array) -> Array:
        """Threads begin a store. Gives the pieces of shared memory to read, [pieces, bytes]."""
        if self.owners.setdefault(warp, threads) != threads:
            m.refuse("now these, now other threads of a warp begin bulk stores")
        shared, one = m.part(Shared), np.array([warp])
        cells = np.unique(shared.cells(offsets, PIECE))[None]
        shared.ledger.check_seen(m, "a bulk store's read", one, cells, proxy=True)
        agents = m.clocks.agent("bulk", one)
        shared.ledger.note_read(m, agents, self.group[one], cells)
        self.begun[warp] = self.group[warp]
        data: Array = shared.bytes.reshape(-1, PIECE)[offsets // PIECE]
        return data

    def sending(self, m: Program, warp: int, count: int, add: bool = False) -> Access:
        """The open group of a warp writes to `count` places of global memory."""
        agent, text = m.clocks.agent("sent", warp), "a sum to" if add else "a store to"
        warps, agents, times = (np.full(count, n) for n in (warp, agent, self.group[warp]))
        return Access(text, warps, agents, times, stores=True, proxy=True)


@action(r"cp\.async\.bulk\.commit_group", "<-")
def commit_stores(m: Program, g: Threads) -> None:
    """The bulk stores of a thread since its last commit become a group."""
    groups = m.part(BulkGroups)
    groups.group[groups.storing(g)] += 1


@action(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?", "<- #")
def wait_for_stores(m: Program, g: Threads, pending: int, read: str | None) -> None:
    """Wait until only the last `pending` groups are on their way; `read`: in shared memory."""
    groups, known = m.part(BulkGroups), m.clocks.known
    for warp in groups.storing(g).tolist():
        done = int(groups.group[warp]) - 1 - pending
        groups.waited[warp] = max(int(groups.waited[warp]), done)
        for kind in ("bulk",) if read else ("bulk", "sent"):
            agent = m.clocks.agent(kind, warp)
            known[warp, agent] = max(int(known[warp, agent]), done)


@action(
    r"cp\.async\.bulk\.shared::(?:cta|cluster)\.global\.mbarrier::complete_tx::bytes" + HINT,
    "<- @ @ u32 @ u64?",
)
def load_bytes(
    m: Program,
    g: Threads,
    target: Array,
    source: Array,
    size: Array,
    barrier: Array,
    hint: Array | None = None,
) -> None:
    """The copy engine fetches contiguous bytes, and signals an mbarrier."""
    given = [g.each(x) for x in (target, source, size, barrier)]
    for warp, to, at, count, bar in zip(g.owners.tolist(), *given, strict=True):
        offsets = pieces(m, "a bulk copy", to, int(count), PIECE)
        (place,) = m.part(Shared).offsets(m, "an mbarrier", np.array([bar]), 8).tolist()
        mbarrier = m.part(Barriers).use(m, warp, place, proxy=True)
        places = at + np.arange(0, int(count), PIECE, dtype=np.uint64)
        words = m.part(Memory).load(m, mbarrier.fetching(warp, len(places)), places, 8, PIECE // 8)
        data = np.ascontiguousarray(words.T).view(np.uint8)
        TileCopy(mbarrier, mbarrier.phase, offsets, data, m.line).begin(m, warp)


def pieces(m: Program, text: str, address: Array, size: int, align: int) -> Array:
    """Offsets of the pieces of `size` bytes of shared memory. Raises Fault if misaligned."""
    if size <= 0 or size % PIECE:
        m.fault(f"{text} of {size} bytes, which is not a multiple of {PIECE}")
    start = m.part(Shared).offsets(m, text, np.array([address]), size, align)
    return np.asarray(start + np.arange(0, size, PIECE))


@action(
    r"cp\.(?:async|reduce\.async)\.bulk\.global\.shared::cta\.bulk_group(?P<add>\.add\.f32)?"
    + HINT,
    "<- @ @ u32 u64?",
)
def store_bytes(
    m: Program,
    g: Threads,
    target: Array,
    source: Array,
    size: Array,
    hint: Array | None = None,
    add: str | None = None,
) -> None:
    """Contiguous bytes go to global memory, or are added there."""
    for warp, threads, (to, at, count) in stores(m, g, (target, source, size), bool(add)):
        offsets = pieces(m, "a bulk store", at, int(count), PIECE)
        data = m.part(BulkGroups).read(m, warp, threads, offsets)
        places = to + np.arange(0, int(count), PIECE, dtype=np.uint64)
        words = np.ascontiguousarray(data.view(np.float32 if add else np.uint64).T)
        write = m.part(Memory).add if add else m.part(Memory).store
        write(m, m.part(BulkGroups).sending(m, warp, len(places), bool(add)), places, words)


def stores(
    m: Program, g: Threads, operands: Sequence[Array], add: bool
) -> Iterator[tuple[int, frozenset[int], Any]]:  # Any: numbers of NumPy's
    """Each warp, its storing threads, and their operands. All may store equal bytes."""
    taken = np.array([g.each(x).astype(np.uint64) for x in operands])
    threads, warps = g.numbers, g.owners
    for warp in g.warps.tolist():
        own = warps == warp
        if own.sum() > 1 and (add or (taken[:, own] != taken[:, own][:, :1]).any()):
            m.refuse("threads of a warp begin several bulk stores")
        yield warp, frozenset(threads[own].tolist()), taken[:, own][:, 0]


@action(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta(?:\.tile)?\.bulk_group" + HINT,
    "<- @map @ u64?",
)
def store_tile(
    m: Program,
    g: Threads,
    tensor: Array,
    first: tuple[Array, ...],
    source: Array,
    hint: Array | None = None,
) -> None:
    """A box goes to a tensor; its part outside the tensor is dropped."""
    for warp, threads, (at, place, *corner) in stores(m, g, (source, tensor, *first), False):
        tile = TensorMap.at(m, warp, int(place))
        corner = [int(x.astype(np.int64)) for x in corner]
        if len(corner) != len(tile.box):
            m.fault(f"{len(corner)} coordinates for a tensor map of {len(tile.box)} axes")
        rows, size = int(np.prod(tile.box[1:])), tile.box[0] * tile.item
        plain = pieces(m, "a bulk store", at, rows * size, MAP_ALIGNED)
        offsets = swizzle(SHARED + plain, tile.span) - SHARED
        data = m.part(BulkGroups).read(m, warp, threads, offsets).reshape(rows, size)
        tile.store(m, m.part(BulkGroups).sending(m, warp, 1), (*corner,), data)
