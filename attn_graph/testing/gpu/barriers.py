"""Barriers of a program, mbarriers, and fences. PTX ISA 9.7.13.

A waiting warp is held back until its event has happened; nothing spins.
"""

from __future__ import annotations

from typing import final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.clocks import MOST_MBARRIERS
from attn_graph.testing.gpu.faults import Omission
from attn_graph.testing.gpu.program import POISON, Program
from attn_graph.testing.gpu.ptx import REGISTERS
from attn_graph.testing.gpu.regions import Access
from attn_graph.testing.gpu.rules import Array, action
from attn_graph.testing.gpu.shared import MBARRIER, Shared
from attn_graph.testing.gpu.threads import WARP, Threads

EACH = range(24, 257, 8)  # of a thread, as setmaxnreg sets them
MOST_BARRIERS, MOST_ARRIVALS = 16, 2**20 - 1  # of a program; at an mbarrier
ZEROS = np.zeros((1, MBARRIER), np.uint8)  # the bytes of an mbarrier


@final
@define(eq=False)
class Barrier:
    """The warps that arrived at a barrier. held: the waiting ones."""

    threads: int
    line: int
    seen: Array
    arrived: int = 0
    held: list[int] = field(factory=list[int])


@final
@define(eq=False)
class MBarrier:
    """An mbarrier. agent: copies that arrive at it. passed: phases of earlier ones at this place.

    seen: by the threads that have arrived. done: in completed phases.
    announced: True once copies may use it, after fence.mbarrier_init.
    """

    offset: int
    count: int
    agent: int
    passed: int
    seen: Array
    pending: int = field(init=False)
    bytes: int = 0
    phase: int = 0
    announced: bool = False
    done: Array = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pending, self.done = self.count, self.seen.copy()

    @property
    def time(self) -> int:
        """The time of writes counted by this phase."""
        return self.passed + self.phase + 1

    def fetching(self, warp: int, count: int) -> Access:
        """A copy that a warp begins, and this phase counts, of `count` places."""
        warps, agents, times = (np.full(count, n) for n in (warp, self.agent, self.time))
        return Access("a copy of", warps, agents, times, proxy=True)

    @property
    def is_idle(self) -> bool:
        """True if nobody has arrived in this phase."""
        return self.pending == self.count and not self.bytes

    def arrive(self, m: Program, arrivals: int, more_bytes: int = 0) -> None:
        """Count arrivals, and expected bytes, negative for arrived ones. Raises Fault."""
        self.pending -= arrivals
        self.bytes += more_bytes
        if self.pending < 0:
            where = f"at byte {self.offset}"
            m.fault(f"the mbarrier {where} counts {self.count} arrivals, not one more")
        if self.pending or self.bytes:
            return
        np.maximum(self.done, self.seen, out=self.done)
        self.done[0, self.agent] = self.time
        self.phase, self.pending = self.phase + 1, self.count
        sleeping = m.part(Barriers).sleeping
        for waiter in [x for x in sleeping if x[0] is self]:
            sleeping.remove(waiter)
            m.release(*waiter[1:])


@final
@define(eq=False)
class Barriers:
    """The barriers of a program, by number, and its mbarriers, by offset.

    sleeping: threads of a warp that wait for the phase of an mbarrier.
    """

    named: dict[int, Barrier] = field(factory=dict[int, Barrier])
    agents: dict[int, int] = field(factory=dict[int, int])
    phases: dict[int, int] = field(factory=dict[int, int])
    sleeping: list[tuple[MBarrier, int, Array]] = field(factory=list[tuple[MBarrier, int, Array]])

    @classmethod
    def of(cls, m: Program) -> Barriers:
        made = cls()
        m.at_end.append(made.end)
        return made

    def arrive(self, m: Program, warp: int, number: int, threads: int, waits: bool) -> None:
        """A warp arrives at a barrier; the last one releases all."""
        if number >= MOST_BARRIERS or not threads or threads % WARP:
            m.fault(
                f"barrier {number} of {threads} threads: there are barriers 0 to "
                f"{MOST_BARRIERS - 1}, for multiples of {WARP} threads"
            )
        barrier = self.named.setdefault(number, Barrier(threads, m.line, m.clocks.nothing))
        if barrier.threads != threads:
            known = f"{barrier.threads} in PTX line {barrier.line}"
            m.fault(f"barrier {number} is for {threads} threads here, and for {known}")
        m.clocks.tell(warp, barrier.seen)
        barrier.arrived += WARP
        if waits:
            barrier.held.append(warp)
            m.hold(warp, f"waits at barrier {number} of {threads} threads")
        if barrier.arrived == threads:
            for other in barrier.held:
                m.clocks.learn(other, barrier.seen)
                m.release(other)
            del self.named[number]

    def use(self, m: Program, warp: int, offset: int, proxy: bool = False) -> MBarrier:
        """An mbarrier used by a warp. Raises Fault if it does not exist or the warp can't know."""
        found = m.part(Shared).occupants.get(offset)
        if not isinstance(found, MBarrier):
            m.fault(f"no mbarrier is at byte {offset} of shared memory")
        warps, ledger = np.array([warp]), m.part(Shared).ledger
        cells = m.part(Shared).cells(np.array([offset]), MBARRIER)
        ledger.check_seen(m, "use", warps, cells)
        ledger.note_read(m, warps, m.clocks.now(warps), cells)
        unfenced = proxy and not found.announced
        if unfenced and (m.clocks.fenced[warp, ledger.writer[cells]] < ledger.time[cells]).any():
            way = "is used by the other proxy without fence.proxy.async after its init"
            m.note(f"an mbarrier {way}")
        return found

    def end(self, m: Program) -> None:
        """The program ends: report arrivals and bytes to come that nobody waits for.

        They occur at the end of a pipeline. Copies on their way are a fault of their own.
        """
        for x in m.part(Shared).occupants.values():
            if isinstance(x, MBarrier) and not x.is_idle:
                awaited = f"{x.pending} arrivals and {x.bytes} bytes"
                text = f"it ends while the mbarrier at byte {x.offset} expects {awaited}"
                m.report(Omission.ARRIVALS, text)
        if self.named:
            text = f"it ends while warps are awaited at barriers {sorted(self.named)}"
            m.report(Omission.ARRIVALS, text)


@action(r"(?:bar|barrier)\.(?P<way>sync|arrive)(?:\.aligned)?", "<- u32 u32?", waits=True)
def meet_at_barrier(
    m: Program, g: Threads, number: Array, threads: Array | None = None, *, way: str
) -> None:
    """Warps arrive one by one. `sync`: each waits for this many threads; without a number, for all.

    All lanes of a warp have one barrier number.
    """
    many = m.launch.threads if threads is None else threads
    numbers, counts = g.stack((number, many))[:, ::WARP].tolist()
    warps, first = m.together(g), g.span.start // WARP
    m.jump(g, m.block + 1)
    for warp in warps.tolist():
        at = warp - first
        m.part(Barriers).arrive(m, warp, numbers[at], counts[at], waits=way == "sync")


@final
@define(eq=False)
class ClusterBarrier:
    """The barrier of a cluster of one program.

    arrived, waited: how often each warp did. seen: by the arrived ones, by phase. held: warps.
    """

    arrived: Array
    waited: Array
    seen: dict[int, Array] = field(factory=dict[int, Array])
    held: list[int] = field(factory=list[int])

    @classmethod
    def of(cls, m: Program) -> ClusterBarrier:
        made = cls(np.zeros(m.warps, np.int32), np.zeros(m.warps, np.int32))
        m.on_idle.append(made.advance)
        return made

    def advance(self, m: Program) -> bool:
        """Let waiting warps go on once all others have arrived or ended; True if any."""
        there = ~m.gone.reshape(-1, WARP).all(1)
        ready = [w for w in self.held if self.waited[w] < self.arrived[there].min()]
        for warp in ready:
            m.clocks.learn(warp, self.seen[int(self.waited[warp])])
            self.waited[warp] += 1
            self.held.remove(warp)
            m.release(warp)
        return bool(ready)


@action(
    r"barrier\.cluster\.(?P<way>arrive|wait)(?P<order>\.\w+e|\.relaxed)?(?:\.aligned)?",
    "<-",
    waits=True,
)
def meet_in_cluster(m: Program, g: Threads, way: str, order: str | None) -> None:
    """Warps arrive at the barrier of the cluster, or wait for all; `relaxed`: it orders nothing."""
    barrier, warps = m.part(ClusterBarrier), m.together(g)
    m.jump(g, m.block + 1)
    for warp in warps.tolist():
        phase, waits = int(barrier.waited[warp]), way == "wait"
        if barrier.arrived[warp] - phase != waits:
            m.fault(f"barrier.cluster.{way} without the other one, of arrive and wait, before it")
        if waits:
            barrier.held.append(warp)
            m.hold(warp, "waits at the barrier of the cluster")
            continue
        barrier.arrived[warp] += 1
        seen = barrier.seen.setdefault(phase, m.clocks.nothing)
        if order != ".relaxed":
            m.clocks.tell(warp, seen)


@action(r"fence\.proxy\.async(?:\.(?P<memory>shared|global)(?:::(?:cta|cluster))?)?", "<-")
def fence_proxy(m: Program, g: Threads, memory: str | None) -> None:
    """Copies and products may read and overwrite the writes known to a thread."""
    m.clocks.fence(g.warps, memory or "")


@action(r"fence\.mbarrier_init\.release\.cluster", "<-")
def fence_init(m: Program, g: Threads) -> None:
    """Copies and other programs may use the mbarriers initialised by a warp."""
    shared = m.part(Shared)
    for at, mbarrier in shared.occupants.items():
        cells = shared.cells(np.array([at]), MBARRIER)
        if isinstance(mbarrier, MBarrier) and np.isin(shared.ledger.writer[cells], g.warps).all():
            mbarrier.announced = True


@action(r"griddepcontrol\.(?:wait|launch_dependents)", "<-")
def depend_on_launches(m: Program, g: Threads) -> None:
    """Orders overlapping launches; here they follow each other."""


@action(r"mapa\.shared::cluster\.u32", "u32 <- u32 u32")
def map_address(m: Program, g: Threads, address: Array, rank: Array) -> Array:
    """d = the address of shared memory in a program of the cluster, which has one program here."""
    if g.each(rank).any():
        m.fault("mapa to another program of the cluster, of which there is one")
    return address


MB = r"\.shared(?:::cta)?\.b64"


@action("mbarrier.init" + MB, "<- @ u32")
def init_mbarrier(m: Program, g: Threads, address: Array, count: Array) -> None:
    """An mbarrier that counts `count` arrivals in each phase."""
    counts = g.each(count).tolist()
    for warp, offset, each in zip(g.owners.tolist(), places(m, g, address), counts, strict=True):
        shared, barriers = m.part(Shared), m.part(Barriers)
        if not 1 <= each <= MOST_ARRIVALS:
            m.fault(f"an mbarrier of {each} arrivals, not 1 to {MOST_ARRIVALS}")
        found = shared.occupants.pop(offset, None)
        if found is not None and not found.is_idle:
            m.fault(f"the mbarrier at byte {offset} is initialised again while it is in use")
        shared.ledger.inits.add(m.line)
        shared.store(m, "mbarrier.init", np.array([warp]), np.array([offset]), ZEROS)
        number = barriers.agents.setdefault(offset, len(barriers.agents))
        if number >= MOST_MBARRIERS:
            m.refuse(f"more than {MOST_MBARRIERS} mbarriers")
        passed = barriers.phases.get(offset, 0)
        agent = m.clocks.mbarrier(number)
        shared.occupants[offset] = MBarrier(offset, each, agent, passed, m.clocks.nothing)


@action("mbarrier.inval" + MB, "<- @")
def invalidate_mbarrier(m: Program, g: Threads, address: Array) -> None:
    """Free the bytes of an mbarrier for other uses."""
    for warp, offset in zip(g.owners.tolist(), places(m, g, address), strict=True):
        found = m.part(Barriers).use(m, warp, offset)
        if not found.is_idle:
            m.fault(f"the mbarrier at byte {offset} is invalidated while it is in use")
        del m.part(Shared).occupants[offset]
        m.part(Barriers).phases[offset] = found.passed + found.phase
        m.part(Shared).ledger.inits.add(m.line)
        m.part(Shared).store(m, "mbarrier.inval", np.array([warp]), np.array([offset]), ZEROS)


@action(r"mbarrier\.arrive(?P<expect>\.expect_tx)?" + MB, "b64 <- @ u32?")
def arrive_at_mbarrier(
    m: Program, g: Threads, address: Array, number: Array | None = None, expect: str | None = None
) -> Array:
    """Each thread arrives once or `number` times; `expect_tx`: once, plus bytes of copies.

    d: the state of the mbarrier, for instructions that the virtual GPU does not have.
    """
    numbers = g.each(1 if number is None else number).tolist()
    for warp, offset, each in zip(g.owners.tolist(), places(m, g, address), numbers, strict=True):
        mbarrier = m.part(Barriers).use(m, warp, offset)
        m.clocks.tell(warp, mbarrier.seen)
        mbarrier.arrive(m, 1 if expect else each, each if expect else 0)
    return np.full(g.count, POISON, np.uint64)


@action(r"mbarrier\.try_wait\.parity\.acquire\.cta" + MB, "pred <- @ u32")
def look_at_phase(m: Program, g: Threads, address: Array, parity: Array) -> Array:
    """d: the phase of this parity is over. It does not wait; a GPU waits for a time of its own."""
    parities = lowest_bits(m, g.each(parity)).tolist()
    passed = np.zeros(len(parities), bool)
    for k, (warp, offset) in enumerate(zip(g.owners.tolist(), places(m, g, address), strict=True)):
        mbarrier = m.part(Barriers).use(m, warp, offset)
        if mbarrier.phase & 1 != parities[k]:
            m.clocks.learn(warp, mbarrier.done)
            passed[k] = True
    return g.spread(passed)


@action(r"mbarrier\.try_wait\.parity" + MB, "pred <- @ u32 u32?", waits=True)
def wait_for_phase(
    m: Program, g: Threads, address: Array, parity: Array, limit: Array | None = None
) -> Threads | None:
    """d = true, as soon as the phase of this parity is over; the first one has parity 0.

    limit: a time after which d is false; callers with a limit try again.
    """
    threads = g.numbers
    waits = np.stack([g.owners, places(m, g, address), lowest_bits(m, g.each(parity))])
    passed = np.zeros(len(threads), bool)
    for warp, offset, wanted in sorted({*zip(*waits.tolist(), strict=True)}):
        lanes = (waits == np.array([[warp], [offset], [wanted]])).all(axis=0)
        mbarrier = m.part(Barriers).use(m, warp, offset)
        if mbarrier.phase & 1 != wanted:
            m.clocks.learn(warp, mbarrier.done)
            passed[lanes] = True
        else:
            m.part(Barriers).sleeping.append((mbarrier, warp, threads[lanes]))
            text = f"mbarrier at byte {mbarrier.offset}, which is in phase {mbarrier.phase}"
            m.explain(warp, f"waits for a phase of parity {wanted} of the {text}")
    g.where(~g.spread(passed)).put(m.blocked, np.ones(g.count, bool))
    return g.where(g.spread(passed)) if passed.any() else None


def lowest_bits(m: Program, parities: Array) -> Array:
    """What GPUs read of parities; the ISA has 0 and 1 alone."""
    if (parities > 1).any():
        m.note(f"an mbarrier is waited for with the parity {parities.max():#x}, neither 0 nor 1")
    return parities & 1


def places(m: Program, g: Threads, address: Array) -> list[int]:
    """The offset given by each thread."""
    found: list[int] = m.part(Shared).offsets(m, "an mbarrier", g.take(address), MBARRIER).tolist()
    return found


@final
@define(eq=False)
class RegisterPool:
    """Registers of each warp, and free ones."""

    of_warp: Array
    free: int
    wanting: list[int] = field(factory=list[int])

    @classmethod
    def of(cls, m: Program) -> RegisterPool:
        each = m.launch.code.kernel.registers_of_thread(m.launch.threads)
        return cls(np.full(m.warps, each), REGISTERS - m.launch.threads * each)


@action(r"setmaxnreg\.(?P<way>inc|dec)\.sync\.aligned\.u32", "<- #", waits=True)
def set_registers(m: Program, g: Threads, count: int, way: str) -> None:
    """Set the registers of each thread; `inc` waits until they are free."""
    if count not in EACH:
        m.fault(f"setmaxnreg to {count}, not a multiple of 8 from 24 to 256")
    pool, block = m.part(RegisterPool), m.block
    for warp in m.together(g).tolist():
        more = (count - int(pool.of_warp[warp])) * WARP
        if (more < 0) == (way == "inc") and more:
            m.fault(f"setmaxnreg.{way} to {count} of a warp that has {pool.of_warp[warp]}")
        if more > pool.free:
            pool.wanting.append(warp)
            m.hold(warp, f"waits for {more} registers of which {pool.free} are free")
            continue
        pool.free -= more
        pool.of_warp[warp] = count
        m.at[warp * WARP : (warp + 1) * WARP] = block + 1
        if more < 0:
            for other in pool.wanting:
                m.release(other)
            pool.wanting.clear()
