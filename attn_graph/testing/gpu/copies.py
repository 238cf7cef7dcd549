"""Copies that run beside a program: cp.async of threads, and the copy engine. PTX ISA 9.7.9.25.

Both take effect as late as possible: at a wait of a thread, or when nobody can go on.
"""

from __future__ import annotations

from typing import final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.barriers import Barriers, MBarrier, places
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.maps import TensorMap
from attn_graph.testing.gpu.matrices import swizzle
from attn_graph.testing.gpu.memory import Memory
from attn_graph.testing.gpu.program import SHARED, Program
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import Array, action
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
    """A copy of the copy engine that has not landed, in pieces."""

    mbarrier: MBarrier
    phase: int
    offsets: Array
    data: Array
    line: int

    def begin(self, m: Program, warp: int) -> None:
        """A warp begins it: all uses of its target must come before it."""
        shared, agents = m.part(Shared), np.array([self.mbarrier.agent])
        cells, ledger = np.unique(shared.cells(self.offsets, PIECE))[None], shared.ledger
        shared.forget(m, self.offsets, PIECE)
        ledger.check_free(m, "a copy of the copy engine", np.array([warp]), cells, proxy=True)
        ledger.note_write(m, agents, np.array([self.mbarrier.time]), cells)
        m.part(Copies).tiles.append(self)

    def land(self, m: Program) -> None:
        """Write it, and signal the mbarrier. Raises Fault if its phase is over."""
        m.line = self.line
        if self.mbarrier.phase != self.phase:
            m.fault("a copy lands in a later phase of its mbarrier than that in which it began")
        m.part(Shared).bytes.reshape(-1, PIECE)[self.offsets // PIECE] = self.data
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


@action(TILE + r"\.mbarrier::complete_tx::bytes" + HINT, "<- @ @map @ u64?")
def copy_tile(
    m: Program,
    g: Threads,
    target: Array,
    tensor: Array,
    first: tuple[Array, ...],
    barrier: Array,
    hint: Array | None = None,
) -> None:
    """The copy engine fetches a box of a tensor, and signals its bytes to an mbarrier."""
    bars = m.part(Shared).offsets(m, "an mbarrier", g.take(barrier), 8)
    for k, warp in enumerate(g.owners.tolist()):
        tile = TensorMap.at(m, warp, int(g.take(tensor)[k]))
        corner = tuple(int(g.each(x)[k]) for x in first)
        mbarrier = m.part(Barriers).use(m, warp, int(bars[k]), proxy=True)
        if len(corner) != len(tile.box):
            m.fault(f"{len(corner)} coordinates for a tensor map of {len(tile.box)} axes")
        if tile.nan:
            m.refuse("a tensor map with NaN outside of the tensor")
        data = tile.fetch(m, warp, mbarrier, corner).reshape(-1, PIECE)
        shared = m.part(Shared)
        start = shared.offsets(m, "a copy", g.take(target)[k : k + 1], data.size, MAP_ALIGNED)
        offsets = swizzle(SHARED + start + PIECE * np.arange(len(data)), tile.span) - SHARED
        TileCopy(mbarrier, mbarrier.phase, offsets, data, m.line).begin(m, warp)
