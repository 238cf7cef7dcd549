"""A Hopper multiprocessor for kernels written in Gluon, emulated for their schedule and numbers.

`Machine.run` executes the kernel's own Python functions: only the names that they take from Triton
are others here. Every partition of `warp_specialize` is an agent; agents stop before each
instruction that others may notice, and a seed draws who goes on: an agent, a copy that lands, a
product that ends. A Fault is raised for

- a deadlock;
- an access to shared memory that is not ordered, by mbarriers and waits, after the accesses that it
  conflicts with, in this order of events or any other (vector clocks say so);
- a result that is read before its wait, an mbarrier that gets an arrival too many, and what is left
  when the kernel ends: copies, products, phases that only some have arrived at.

mbarriers are as PTX ISA 8.x describes them: a phase ends when all have arrived and all expected
bytes too; a wait names the parity of a phase and goes on once the current phase has the other one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from attrs import define, field, frozen

from tests.support.gluon_values import Value, round_array

MOST_STEPS = 200_000
Clock = dict[str, int]  # by agent: how much of what it did is known to have happened


def taken_lock() -> threading.Lock:
    """A lock that its taker waits for until another thread releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Fault(AssertionError):
    """What a kernel does wrong."""


class Stopped(BaseException):
    """Ends the thread of an agent after another one's fault."""


def join_clocks(own: Clock, other: Mapping[str, int]) -> None:
    """Add what another clock knows."""
    for name, time in other.items():
        own[name] = max(own.get(name, 0), time)


@define(eq=False)
class Access:
    """A read or a write of shared memory.

    epoch: when it was, on its agent's clock; None: it is under way, and no wait has ended it.
    fenced: whether asynchronous instructions may read what it wrote.
    """

    view: np.ndarray
    agent: str
    epoch: int | None
    writes: bool
    label: str
    fenced: bool = True

    def known_to(self, clock: Clock) -> bool:
        """Whether an agent with this clock comes after it."""
        return self.epoch is not None and clock.get(self.agent, 0) >= self.epoch


@define(eq=False)
class Shared:
    """Shared memory, or a part of it. accesses: those of the whole allocation that still matter."""

    name: str
    data: np.ndarray
    dtype: Any
    accesses: list[Access]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.data.shape

    def part(self, data: np.ndarray) -> Shared:
        """A view of the same allocation."""
        return Shared(self.name, data, self.dtype, self.accesses)

    def index(self, i: Any) -> Shared:
        """The i-th buffer."""
        check_index(self.name, i, len(self.data))
        return self.part(self.data[int(i)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """A range along one axis."""
        at = [slice(None)] * dim + [slice(int(start), int(start) + int(length))]
        return self.part(self.data[tuple(at)])

    def permute(self, order: Sequence[int]) -> Shared:
        """Axes in another order."""
        return self.part(self.data.transpose(order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        """Other sizes."""
        return self.part(self.data.reshape([int(n) for n in shape]))

    def load(self, layout: Any = None) -> Value:
        """Read it into registers."""
        agent = pause()
        self.touch(agent.name, agent.clock, agent.clock[agent.name], False)
        return Value(self.data.copy(), self.dtype)

    def store(self, x: Value) -> None:
        """Write registers to it. Only a fence shows that to asynchronous instructions."""
        agent = pause()
        self.touch(agent.name, agent.clock, agent.clock[agent.name], True).fenced = False
        self.data[...] = round_array(x.data, self.dtype)

    def overlapping(self) -> Iterator[Access]:
        """The accesses to some of the same elements."""
        return (a for a in self.accesses if np.shares_memory(a.view, self.data))

    def label(self) -> str:
        """What was written here last."""
        return next((a.label for a in reversed([*self.overlapping()]) if a.writes), "nothing")

    def touch(
        self, agent: str, clock: Clock, epoch: int | None, writes: bool, label: str = "",
        direct: bool = True,
    ) -> Access:  # fmt: skip
        """Record an access. Raises Fault where it is not ordered after those it conflicts with.

        direct: by ordinary instructions, which see what ordinary ones wrote without a fence.
        """
        what = f"{agent} {'writes' if writes else 'reads'} {self.name}"
        before = [*self.overlapping()]
        for other in before:
            kind = "written" if other.writes else "read"
            if (writes or other.writes) and not other.known_to(clock):
                raise Fault(f"{what}, and nothing says that {other.agent} has {kind} it by then")
            if other.writes and not other.fenced and not direct:
                raise Fault(f"{what} without a fence after what {other.agent} stored")
        if not writes and not any(a.writes for a in before):
            raise Fault(f"{what}, where nothing was written")
        if writes:
            self.accesses[:] = [a for a in self.accesses if a not in before]
        self.accesses.append(access := Access(self.data, agent, epoch, writes, label))
        return access


def check_index(name: str, i: Any, count: int) -> None:
    """Raise Fault for an index outside."""
    if not 0 <= int(i) < count:
        raise Fault(f"{name} has {count} buffers, and buffer {int(i)} is used")


@define(eq=False)
class Barrier:
    """An mbarrier. phase: how many have ended; clock: what those know who arrived so far."""

    name: str
    count: int = 0  # arrivals that a phase takes; 0: not initialised
    pending: int = 0
    bytes: int = 0  # expected and not yet here
    phase: int = 0
    clock: Clock = field(factory=dict)
    released: Clock = field(factory=dict)  # by the last phase that ended

    def change(self, arrivals: int, bytes: int, clock: Clock, who: str) -> None:
        """Arrivals, and bytes that are expected or, negative, are here."""
        if not self.count:
            raise Fault(f"{who} uses {self.name}, which is not initialised")
        if arrivals > self.pending:
            raise Fault(f"{who} arrives at {self.name}, where {self.pending} are due in this phase")
        join_clocks(self.clock, clock)
        self.pending -= arrivals
        self.bytes += bytes
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending, self.released = self.count, dict(self.clock)

    def has_ended(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity goes on."""
        return self.phase % 2 != parity

    @property
    def is_idle(self) -> bool:
        """Whether nobody has arrived in the current phase, and nothing is expected."""
        return self.pending == self.count and not self.bytes


@frozen(eq=False)
class Barriers:
    """Several mbarriers beside each other."""

    all: tuple[Barrier, ...]

    def index(self, i: Any) -> Barrier:
        """The i-th."""
        check_index(self.all[0].name, i, len(self.all))
        return self.all[int(i)]


@define(eq=False)
class Event:
    """What happens by itself, once and after `after`: a copy that lands, a product that ends."""

    name: str
    happen: Callable[[], object]
    after: Event | None = None
    done: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether it may happen now."""
        return self.after is None or self.after.done


@define(eq=False)
class Product:
    """An asynchronous wgmma. reads: its operands in shared memory; ended: by a wait."""

    event: Event
    reads: list[Access]
    result: Value | None = None
    ended: bool = False


@define(eq=False)
class Agent:
    """One partition of the warps, on a thread that runs only when it is its turn."""

    name: str
    machine: Machine
    function: Callable[..., Any]
    args: tuple[Any, ...]
    clock: Clock = field(factory=dict)
    products: list[Product] = field(factory=list)  # that no wait has ended
    stores: list[tuple[Event, Access]] = field(factory=list)
    condition: Callable[[], bool] = bool
    waits: str = ""
    done: bool = False
    result: Any = None
    turn: threading.Lock = field(factory=taken_lock)
    thread: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.clock[self.name] = 1
        self.condition = lambda: True
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    @property
    def is_possible(self) -> bool:
        """Whether it may go on."""
        return not self.done and self.condition()

    def live(self) -> None:
        """The thread: the function, from its first turn to its end, then whoever is next."""
        self.turn.acquire()
        HERE.agent = self
        try:
            if not self.machine.stopped:
                with np.errstate(all="ignore"):
                    self.result = self.function(*self.args)
                self.done = True
                self.machine.advance(None)
        except Stopped:
            pass
        except BaseException as error:  # raised again by `Machine.run`
            self.machine.error = error
            self.machine.ended.release()
        self.done = True

    def tick(self) -> None:
        """What the agent does from now on is later than what it has released."""
        self.clock[self.name] += 1


HERE = threading.local()


def pause(condition: Callable[[], bool] = lambda: True, waits: str = "") -> Agent:
    """Stop here until it is this agent's turn and the condition holds."""
    agent: Agent = HERE.agent
    agent.condition, agent.waits = condition, waits
    agent.machine.advance(agent)
    return agent


@define(eq=False)
class Machine:
    """One multiprocessor, for one program of a kernel. seed: of the order in which things happen.

    multiplied: agent, and what was in shared memory, of each product, in order.
    """

    seed: int
    program: tuple[int, ...] = (0, 0, 0)
    programs: tuple[int, ...] = (1, 1, 1)
    agents: list[Agent] = field(factory=list)
    events: list[Event] = field(factory=list)
    barriers: list[Barrier] = field(factory=list)
    multiplied: list[tuple[str, str, str]] = field(factory=list)
    memories: list[Shared] = field(factory=list)
    copies: int = 0
    steps: int = 0
    stopped: bool = False
    error: BaseException | None = None
    ended: threading.Lock = field(factory=taken_lock)
    random: Random = field(init=False)
    weights: dict[str, float] = field(factory=dict)  # how often who goes on, by name

    def __attrs_post_init__(self) -> None:
        self.random = Random(self.seed)

    def run(self, function: Callable[[], Any]) -> None:
        """One program of a kernel, from its start to its end. Raises Fault, or what it raises."""
        self.agents.append(main := Agent("main", self, function, ()))
        main.turn.release()
        self.ended.acquire()
        self.stop()
        if self.error is not None:
            raise self.error
        self.check_end()

    def advance(self, agent: Agent | None) -> None:
        """Let one after the other happen, until it is the agent's turn; None: it has ended.

        Agents do so themselves: most often the next one is the same.
        """
        while isinstance(next_ := self.draw(), Event):
            self.events.remove(next_)
            next_.happen()
            next_.done = True
        if next_ is agent is not None:
            return
        (next_.turn if next_ else self.ended).release()
        if agent is not None:
            agent.turn.acquire()
            if self.stopped:
                raise Stopped

    def draw(self) -> Agent | Event | None:
        """What happens next; None where all is done. Raises Fault where nothing can."""
        everything: list[Agent | Event] = [*self.agents, *self.events]
        able = [x for x in everything if x.is_possible]
        self.steps += 1
        if all(agent.done for agent in self.agents):
            return None
        if not able or self.steps > MOST_STEPS:
            what = "no end" if able else "deadlock"
            waiting = (f"{a.name} waits for {a.waits}" for a in self.agents if not a.done)
            raise Fault(f"{what}: {'; '.join(waiting)}")
        for x in able:
            self.weights.setdefault(x.name, 2.0 ** self.random.uniform(-5, 5))
        return self.random.choices(able, [self.weights[x.name] for x in able])[0]

    def check_end(self) -> None:
        """Raise Fault for what a kernel must not leave behind."""
        left = [event.name for event in self.events]
        left += [f"{a.name}'s product" for a in self.agents for _ in a.products]
        left += [f"{a.name}'s store" for a in self.agents for _ in a.stores]
        left += [f"{b.name}, {b.pending} of {b.count} and {b.bytes} bytes due"
                 for b in self.barriers if not b.is_idle]  # fmt: skip
        if left:
            raise Fault(f"the kernel ends, and not {'; '.join(left)}")

    def stop(self) -> None:
        """End all threads."""
        self.stopped = True
        for agent in self.agents:
            if not agent.done:
                agent.turn.release()
            agent.thread.join()

    def add(self, event: Event) -> Event:
        """An event that happens from now on, whenever it is drawn."""
        self.events.append(event)
        return event
