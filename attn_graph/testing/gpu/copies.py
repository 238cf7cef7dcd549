"""Copies that run beside a program: cp.async of threads, and the copy engine. PTX ISA 9.7.9.25.

Both take effect as late as possible: at a wait of a thread, or when nobody can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.barriers import Barriers, MBarrier, places
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.maps import TensorMap
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.products import swizzle
from attn_graph.testing.gpu.program import SHARED, Program
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import Array, Arrays, action
from attn_graph.testing.gpu.shared import Shared
from attn_graph.testing.gpu.threads import WARP, Threads

PIECE = 16  # bytes: sizes and places of the copy engine are multiples of it
MAP_ALIGNED = 128  # bytes; where the copy engine writes


@final
@frozen(eq=False)
class ThreadCopies:
    """Copies of threads by one instruction that have not landed, with the group of each."""

    threads: Array
    groups: Array
    offsets: Array
    data: Array
    line: int

    def select(self, some: Array) -> ThreadCopies:
        threads, groups, offsets = self.threads[some], self.groups[some], self.offsets[some]
        return ThreadCopies(threads, groups, offsets, self.data[some], self.line)

    def land(self, memory: Array) -> None:
        size = self.data.shape[1]
        memory.reshape(-1, size)[self.offsets // size] = self.data


@final
@frozen(eq=False)
class TileCopy:
    """A copy of the copy engine that has not landed, in pieces: of 8 bytes if these have gaps."""

    mbarrier: MBarrier
    phase: int
    offsets: Array
    data: Array
    line: int

    def begin(self, m: Program, warp: int) -> None:
        """A warp begins it: all uses of its target must come before it."""
        shared, agents = m.part(Shared), np.array([self.mbarrier.agent])
        size, ledger = self.data.shape[1], shared.ledger
        cells = np.unique(shared.cells(self.offsets, size))[None]
        shared.forget(m, self.offsets, size)
        ledger.check_free(m, "a copy of the copy engine", np.array([warp]), cells, proxy=True)
        ledger.note_write(m, agents, np.array([self.mbarrier.time]), cells)
        m.part(Copies).tiles.append(self)

    def land(self, m: Program) -> None:
        """Write it, and signal the mbarrier. Raises Fault if its phase is over."""
        m.line = self.line
        if self.mbarrier.phase != self.phase:
            m.fault("a copy lands in a later phase of its mbarrier than that in which it began")
        size = self.data.shape[1]
        m.part(Shared).bytes.reshape(-1, size)[self.offsets // size] = self.data
        self.mbarrier.arrive(m, 0, -self.data.size)


@final
@frozen(eq=False)
class Tracking:
    """Arrivals of a warp at an mbarrier after its copies up to a group."""

    mbarrier: MBarrier
    warp: int
    group: int
    arrivals: int
    line: int

    def land(self, m: Program) -> None:
        m.line, agent = self.line, m.clocks.agent("copy", self.warp)
        done = np.full(m.launch.threads, -1, np.int32)
        done[self.warp * WARP : (self.warp + 1) * WARP] = self.group
        m.part(Copies).land_groups(m, done)
        known = self.mbarrier.seen[0]
        known[agent] = max(known[agent], self.group)
        self.mbarrier.arrive(m, self.arrivals)


@final
@define(eq=False)
class Copies:
    """Copies that have not landed. group: of each warp the number of its open group.

    A commit ends a group, and so does an mbarrier that waits for it. commits: of each warp the
    groups ended by commits, with their lanes.
    """

    group: Array
    threads: list[ThreadCopies] = field(factory=list[ThreadCopies])
    tiles: list[TileCopy | Tracking] = field(factory=list["TileCopy | Tracking"])
    commits: dict[int, list[tuple[int, Array]]] = field(factory=dict[int, list[tuple[int, Array]]])

    @classmethod
    def of(cls, m: Program) -> Copies:
        made = cls(np.ones(m.warps, np.int32))
        m.on_idle.append(made.advance)
        m.at_end.append(made.end)
        return made

    def advance(self, m: Program) -> bool:
        """Let one engine copy land, or those of a warp awaited by an mbarrier; True if any."""
        if not self.tiles:
            return False
        self.tiles.pop(m.random.randrange(len(self.tiles)) if m.random else 0).land(m)
        return True

    def last_done(self, warp: int, pending: int) -> Array:
        """Of each lane its last group but `pending`; -1: none."""
        done, left = np.full(WARP, -1, np.int32), np.full(WARP, pending + 1)
        for group, lanes in reversed(self.commits.get(warp, [])):
            left -= lanes
            done[lanes & (left == 0)] = group
            if (left <= 0).all():
                break
        return done

    def land_groups(self, m: Program, done: Array) -> None:
        """Let copies land up to a group of each thread."""
        waiting = list[ThreadCopies]()
        for copies in self.threads:
            over = copies.groups <= done[copies.threads]
            copies.select(over).land(m.part(Shared).bytes)
            if not over.all():
                waiting.append(copies.select(~over))
        self.threads = waiting

    def end(self, m: Program) -> None:
        """The program ends: report copies on their way."""
        for each in (*self.tiles, *self.threads):
            m.line, text = each.line, "it ends before a copy has landed"
            if isinstance(each, ThreadCopies):
                m.report(Omission.COPIES, text)
            else:
                m.fault(text)


@action(r"cp\.async\.c[ag]\.shared\.global", "<- @ @ # u32?")
def copy_async(
    m: Program, g: Threads, target: Array, source: Array, size: int, given: Array | None = None
) -> None:
    """Copy 4, 8 or 16 bytes: the first `given` of them, then zeros."""
    offsets = m.part(Shared).offsets(m, "cp.async", g.take(target), size)
    given = g.each(np.uint32(size) if given is None else given)
    if not offsets.size:
        return
    if (given > size).any():
        m.fault(f"cp.async of {given.max()} bytes to {size}")
    warps, at, data = g.owners, g.take(source), np.zeros((len(offsets), size), np.uint8)
    agents, groups = m.clocks.agent("copy", warps), m.part(Copies).group[warps]
    who = Access("cp.async of", warps, agents, groups)
    for count in np.unique(given[given > 0]).tolist():
        (some,) = np.nonzero(given == count)
        loaded = m.part(Memory).load(m, who.select(some), at[some], 1, count, size)
        data[some, :count] = loaded.T
    cells, ledger = m.part(Shared).cells(offsets, size), m.part(Shared).ledger
    m.part(Shared).forget(m, offsets, size)
    ledger.check_free(m, "cp.async", warps, cells)
    ledger.note_write(m, agents, groups, cells)
    m.part(Copies).threads.append(ThreadCopies(g.numbers, groups, offsets, data, m.line))


@action(r"cp\.async\.commit_group", "<-")
def commit_copies(m: Program, g: Threads) -> None:
    """The copies since the last commit become a group."""
    copies, flags = m.part(Copies), g.flags
    for warp in g.warps.tolist():
        made = int(copies.group[warp]), flags[g.lanes(warp)]
        copies.commits.setdefault(warp, []).append(made)
    copies.group[g.warps] += 1


@action(r"cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64", "<- @")
def arrive_after_copies(m: Program, g: Threads, address: Array) -> None:
    """Each thread arrives at an mbarrier as soon as its earlier copies have landed."""
    copies, lanes = m.part(Copies), g.owners
    offsets = np.array(places(m, g, address))
    for warp in g.warps.tolist():
        for offset in np.unique(offsets[lanes == warp]).tolist():
            mbarrier = m.part(Barriers).use(m, warp, offset)
            count = int((offsets[lanes == warp] == offset).sum())
            group = int(copies.group[warp])
            copies.tiles.append(Tracking(mbarrier, warp, group, count, m.line))
        copies.group[warp] += 1


@action(r"cp\.async\.wait_all", "<-")
def wait_for_all_copies(m: Program, g: Threads) -> None:
    """Wait until all copies of each thread have landed."""
    commit_copies(m, g)
    wait_for_copies(m, g, 0)


@action(r"cp\.async\.wait_group", "<- #")
def wait_for_copies(m: Program, g: Threads, pending: int) -> None:
    """Wait until only the last `pending` groups of each thread are on their way.

    The warp then knows the latest of these; bytes of its other lanes have not landed all the same.
    """
    copies, flags, done = m.part(Copies), g.flags, np.full(m.launch.threads, -1, np.int32)
    for warp in g.warps.tolist():
        lanes, agent = flags[g.lanes(warp)], m.clocks.agent("copy", warp)
        each = copies.last_done(warp, pending)[lanes]
        done[warp * WARP : (warp + 1) * WARP][lanes] = each
        m.clocks.known[warp, agent] = max(int(m.clocks.known[warp, agent]), int(each.max()))
    copies.land_groups(m, done)


TILE = r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(?:cta|cluster)\.global(?:\.tile)?"
HINT = r"(?:\.L2::cache_hint)?"  # of a cache: changes no result


@action(TILE + r"\.mbarrier::complete_tx::bytes" + HINT, "<- @ @map @ _?")
def copy_tile(
    m: Program, g: Threads, target: Array, tensor: Array, first: Arrays, barrier: Array
) -> None:
    """The copy engine fetches a box of a tensor, and signals its bytes to an mbarrier."""
    bars = m.part(Shared).offsets(m, "an mbarrier", g.take(barrier), 8)
    for k, warp in enumerate(g.owners.tolist()):
        tile = TensorMap.at(m, warp, int(g.take(tensor)[k]), len(first))
        corner = tuple(int(g.each(x)[k]) for x in first)
        mbarrier = m.part(Barriers).use(m, warp, int(bars[k]), proxy=True)
        if tile.nan:
            m.refuse("a tensor map with NaN outside of the tensor")
        data = tile.fetch(m, warp, mbarrier, corner).reshape(-1, 8 if tile.padded else PIECE)
        size, place = PIECE * len(data), g.take(target)[k : k + 1]
        start = m.part(Shared).offsets(m, "a copy", place, size, MAP_ALIGNED)
        offsets = swizzle(SHARED + start + PIECE * np.arange(len(data)), tile.span) - SHARED
        TileCopy(mbarrier, mbarrier.phase, offsets, data, m.line).begin(m, warp)


# Bulk copies and bulk sums: each reads shared memory until its thread has waited for its group.
# PTX ISA 9.7.9.25.4 and 9.7.9.25.5.


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
    "<- @ @ u32 @ _?",
)
def load_bytes(
    m: Program, g: Threads, target: Array, source: Array, size: Array, barrier: Array
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
    "<- @ @ u32 _?",
)
def store_bytes(
    m: Program, g: Threads, target: Array, source: Array, size: Array, add: str | None = None
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
    "<- @map @ _?",
)
def store_tile(m: Program, g: Threads, tensor: Array, first: Arrays, source: Array) -> None:
    """A box goes to a tensor; its part outside the tensor is dropped."""
    for warp, threads, (at, place, *corner) in stores(m, g, (source, tensor, *first), False):
        tile = TensorMap.at(m, warp, int(place), len(first))
        if tile.padded:
            m.fault("a bulk store by a tensor map with padding, which is for loads")
        corner = [int(x.astype(np.int64)) for x in corner]
        rows, size = int(np.prod(tile.box[1:])), tile.box[0] * tile.item
        plain = pieces(m, "a bulk store", at, rows * size, MAP_ALIGNED)
        offsets = swizzle(SHARED + plain, tile.span) - SHARED
        data = m.part(BulkGroups).read(m, warp, threads, offsets).reshape(rows, size)
        tile.store(m, m.part(BulkGroups).sending(m, warp, 1), (*corner,), data)
