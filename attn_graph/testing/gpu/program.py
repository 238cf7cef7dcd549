"""One program of a launch: its threads, the choice of the next ones, and shared memories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import prod
from random import Random
from typing import Any, NoReturn, Protocol, Self, TypeVar, final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.clocks import Clocks
from attn_graph.testing.gpu.faults import Fault, Omission, UnknownInstructionError, remedy_for
from attn_graph.testing.gpu.ptx import ASSERTION, LOCAL
from attn_graph.testing.gpu.rules import Array, DType, any_of
from attn_graph.testing.gpu.threads import WARP, Threads
from attn_graph.testing.gpu.translate import Translation

SHARED = 1024  # the first address of shared memory; the system has those below
PARAMETERS = 1 << 60  # their first generic address; a tensor is never there
TEXTS = 1 << 59  # where those of the kernel begin, in the same way
PAGE = 1 << 12  # between two of them
POISON = 0x7FBADBAD7FBADBAD  # in unset registers: NaN
NOBODY = np.int32(2**30)


class Part(Protocol):
    """A memory or a unit of a program."""

    @classmethod
    def of(cls, m: Program) -> Self: ...


Made = TypeVar("Made", bound=Part)


@final
@frozen(eq=False)
class Launch:
    """A launch of a kernel.

    grid: programs along each axis. shared: bytes of a program's shared memory. parameters: their
    bytes by name. memory: shared by all programs. seed: chooses the next program and threads; None:
    the first, and those furthest behind. omits: known omissions of the kernel. multiprocessors: of
    the GPU. eras: the number of the program of each; a program has one, and another after each time
    that it lets others know. released: by address, the eras that come before those who acquire it.
    """

    code: Translation
    grid: tuple[int, int, int]
    threads: int
    shared: int
    parameters: Mapping[str, bytes]
    memory: object
    seed: int | None = None
    notes: set[str] = field(factory=set[str])
    omits: frozenset[Omission] = frozenset()
    multiprocessors: int = 1
    eras: list[int] = field(factory=lambda: [0])
    released: dict[int, Array] = field(factory=dict[int, Array])

    def numbers(self) -> list[int]:
        """The programs in their order."""
        numbers = [*range(prod(self.grid))]
        if self.seed is not None:
            Random(self.seed).shuffle(numbers)
        return numbers

    def run(self, numbers: Iterable[int]) -> None:
        """Programs, one after another. Raises Fault."""
        with np.errstate(all="ignore"):
            for number in numbers:
                Program(self, number).run()

    def place(self, number: int) -> tuple[int, int, int]:
        """Where a program is in the grid."""
        x, y, _ = self.grid
        return number % x, number // x % y, number // (x * y)


@final
@define(eq=False)
class Program:
    """One program.

    number: from 0 on, along x first. at: the block of each thread. line: of the current
    instruction. block: its number. waiting: the reason of each warp that is held back. registers:
    those of products lie in `watched`. parts: memories and units, by class, made when an
    instruction first needs one. on_idle: actions that may let a warp go on if none can. at_end:
    checks. first_era, era: its own, see Launch. ordered: by era, if this program comes after it;
    None: after none.
    """

    launch: Launch
    number: int
    place: tuple[int, int, int] = field(init=False)
    line: int = 0
    block: int = 0
    at: Array = field(init=False)
    blocked: Array = field(init=False)
    gone: Array = field(init=False)
    waiting: dict[int, str] = field(factory=dict[int, str])
    registers: list[Array] = field(init=False)
    watched: Array = field(init=False)
    random: Random | None = field(init=False)
    clocks: Clocks = field(init=False)
    parts: dict[type[Any], Any] = field(init=False)
    on_idle: list[Callable[[Program], bool]] = field(factory=list[Callable[["Program"], bool]])
    at_end: list[Callable[[Program], None]] = field(factory=list[Callable[["Program"], None]])
    first_era: int = field(init=False)
    ordered: Array | None = None

    def __attrs_post_init__(self) -> None:
        code, threads = self.launch.code, self.launch.threads
        self.at = np.zeros(threads, np.int32)
        self.blocked, self.gone = np.zeros(threads, bool), np.zeros(threads, bool)
        self.watched = np.full((len(code.row), threads), POISON & (2**32 - 1), np.uint32)
        unset = {d: iter(poison(count, threads, d)) for d, count in Counter(code.held).items()}
        self.registers = [next(unset[dtype]) for dtype in code.held]
        for register, row in code.row.items():  # those of products
            self.registers[register] = self.watched[row]
        self.place, self.first_era = self.launch.place(self.number), self.begin_era()
        seed = self.launch.seed
        self.random = None if seed is None else Random(f"{seed} {self.place}")
        self.clocks = Clocks(self.warps)
        self.parts = {type(self.launch.memory): self.launch.memory}

    @property
    def warps(self) -> int:
        return self.launch.threads // WARP

    def part(self, kind: type[Made]) -> Made:
        found = self.parts.get(kind)
        if found is None:
            found = self.parts[kind] = kind.of(self)
        made: Made = found
        return made

    # Other programs of the launch

    def begin_era(self) -> int:
        """The number of a new era."""
        self.launch.eras.append(self.number)
        return len(self.launch.eras) - 1

    @property
    def era(self) -> int:
        return len(self.launch.eras) - 1

    def acquire(self, addresses: Array) -> None:
        """Come after what other programs did before they released these places."""
        made = {
            id(x): x for at in addresses.tolist() if (x := self.launch.released.get(at)) is not None
        }
        for eras in made.values():
            known = np.zeros(len(self.launch.eras), bool)
            known[: len(eras)] = eras
            if self.ordered is not None:
                known[: len(self.ordered)] |= self.ordered
            self.ordered = known

    def release_to(self, addresses: Array) -> None:
        """Let those that acquire these places come after all up to now, and after what came before
        it."""
        eras = np.zeros(len(self.launch.eras), bool)
        if self.ordered is not None:
            eras[: len(self.ordered)] = self.ordered
        eras[self.first_era :] = True
        self.launch.released.update(dict.fromkeys(addresses.tolist(), eras))
        self.begin_era()

    def is_unordered(self, eras: Array) -> Array:
        """True for accesses by other programs that this one does not come after."""
        others: Array = (eras != 0) & (eras < self.first_era)
        if self.ordered is None or not any_of(others):
            return others
        known = np.zeros(len(self.launch.eras), bool)
        known[: len(self.ordered)] = self.ordered
        others &= (eras < 0) | ~known[np.where(others, eras, 0)]
        return others

    def run(self) -> None:
        """All threads to their end. Raises Fault."""
        functions = self.launch.code.functions
        while not self.gone.all():
            chosen = self.choose()
            if chosen is not None:
                at, threads = chosen
                functions[at](self, self.registers, threads)
            elif not any(advance(self) for advance in self.on_idle):
                self.line = 0
                waiting = (f"warp {warp} {reason}" for warp, reason in self.waiting.items())
                self.fault("deadlock: " + "; ".join(waiting))
        self.line = 0
        for check in self.at_end:
            check(self)

    def choose(self) -> tuple[int, Threads] | None:
        """Some warps that can go on, at the block furthest behind in each."""
        behind = np.where(self.blocked | self.gone, NOBODY, self.at).reshape(-1, WARP).min(1)
        if (at := int(behind.min())) == NOBODY:
            return None
        first = int(behind.argmin())
        if self.random:
            first = self.random.choice(np.flatnonzero(behind < NOBODY).tolist())
            at = int(behind[first])
        last, alone = first + 1, self.random and self.random.random() < 0.25
        while not alone and last < len(behind) and behind[last] == at:
            last += 1
        span = slice(first * WARP, last * WARP)
        active = (self.at[span] == at) & ~self.blocked[span] & ~self.gone[span]
        return at, Threads(span, active if any_of(~active) else None)

    def fault(self, text: str, *places: str) -> NoReturn:
        """Raise Fault, with the place in the kernel, the accesses, and what usually helps."""
        remedy = [f"usually: {x}" for x in (remedy_for(text),) if x]
        raise Fault("\n  ".join([self.describe(text), *places, *remedy]))

    def refuse(self, text: str) -> NoReturn:
        """Raise UnknownInstructionError, with the place in the kernel."""
        raise UnknownInstructionError(self.describe(f"{text}, which the virtual GPU does not do"))

    def note(self, text: str) -> None:
        """Note a missing step of the PTX ISA that GPUs are known to do without."""
        self.launch.notes.add(self.describe(text, program=False))

    def report(self, omission: Omission, text: str, *places: str) -> None:
        """Raise Fault for an omission, or note it if the launch declares it."""
        if omission not in self.launch.omits:
            self.fault(text, *places)
        self.note(text)

    def name_of(self, register: int) -> str:
        return [*self.launch.code.kernel.registers][register]

    def describe(self, text: str, program: bool = True) -> str:
        """A sentence with the place in the kernel."""
        kernel = self.launch.code.kernel
        where = f" [{self.cite(self.line)}]" if self.line else ""
        return f"{kernel.name}{f', program {self.place}' if program else ''}: {text}{where}"

    def cite(self, line: int) -> str:
        """A line of the PTX, and of the source."""
        return f"PTX line {line}, {self.launch.code.sources.get(line, '')}".rstrip(", ")

    # Values that a program has

    def special(self, name: str, threads: Threads) -> Array:
        """A register set by the hardware."""
        span = threads.span
        number = np.arange(span.start, span.stop, dtype=np.uint32)
        by_thread = {"tid.x": number, "laneid": number % WARP, "warpid": number // WARP}
        if name in by_thread:
            return by_thread[name].astype(np.uint32)
        word, _, axis = name.partition(".")
        sizes = (self.launch.threads, 1, 1)
        axes = {"ctaid": self.place, "nctaid": self.launch.grid, "ntid": sizes}
        alone = {"tid": 0, "cluster_ctaid": 0, "cluster_ctarank": 0, "cluster_nctarank": 1}
        cores = self.launch.multiprocessors
        alone |= {"smid": self.number % cores, "nsmid": cores}
        if word not in {**axes, **alone}:
            self.refuse(f"the register %{name}")
        value = axes[word]["xyz".index(axis)] if word in axes else alone[word]
        return np.full(threads.count, value, np.uint32)

    def address_of(self, name: str) -> int:
        if name in self.launch.parameters:
            return [*self.launch.parameters].index(name) * PAGE
        kernel = self.launch.code.kernel
        if name in kernel.texts:
            return TEXTS + [*kernel.texts].index(name) * PAGE
        if name.startswith(LOCAL):
            return 0
        if name not in kernel.dynamic:
            self.refuse(f"the name {name}")
        return SHARED

    def text_at(self, address: int) -> str:
        """A text of the kernel, less its last byte, which is 0."""
        text = [*self.launch.code.kernel.texts.values()][(address - TEXTS) // PAGE]
        return text.rstrip(b"\0").decode(errors="replace")

    def parameter_at(self, address: int) -> bytes:
        number, rest = divmod(address - PARAMETERS, PAGE)
        if rest or not 0 <= number < len(self.launch.parameters):
            self.fault(f"{address:#x} is not the address of a parameter")
        return [*self.launch.parameters.values()][number]

    # Control flow

    def jump(self, threads: Threads, block: int) -> None:
        threads.put(self.at, np.full(threads.count, block, np.int32))

    def jump_to(self, threads: Threads, numbers: Array, blocks: list[int]) -> None:
        """Each thread goes on with the block of its number."""
        numbers = np.broadcast_to(numbers, threads.count)
        if (threads.take(numbers) >= len(blocks)).any():
            self.fault(f"a jump to a label behind the last of {len(blocks)}")
        goals = np.array(blocks, np.int32)[np.minimum(numbers, len(blocks) - 1)]
        threads.put(self.at, goals)

    def branch(self, threads: Threads, condition: Array, yes: int, no: int) -> None:
        threads.put(self.at, np.where(condition, np.int32(yes), np.int32(no)))

    def leave(self, threads: Threads, condition: Array | None, other: int) -> None:
        """The threads end if the condition is true; others go on with the next block."""
        self.jump(threads, other)
        some = threads if condition is None else threads.where(condition)
        some.put(self.gone, np.ones(threads.count, bool))

    def hold(self, warp: int, reason: str) -> None:
        self.blocked[warp * WARP : (warp + 1) * WARP] = True
        self.explain(warp, reason)

    def explain(self, warp: int, reason: str) -> None:
        self.waiting[warp] = f"{reason} ({self.cite(self.line)})"

    def release(self, warp: int, threads: Array | None = None) -> None:
        """A warp, or some of its threads, go on."""
        every = slice(warp * WARP, (warp + 1) * WARP)
        self.blocked[every if threads is None else threads] = False
        if not any_of(self.blocked[every]):
            self.waiting.pop(warp, None)

    def together(self, threads: Threads) -> Array:
        """The warps of these threads. Raises Fault if one of them is divided."""
        if not threads.is_whole:
            # Other lanes may be about to fail an assertion, at a block of its own.
            code, at = self.launch.code, np.where(threads.flags, -1, self.at[threads.span])
            for block in np.unique(at[at >= 0]).tolist():
                if any(step.opcode == ASSERTION for step in code.kernel.blocks[block]):
                    code.functions[block](self, self.registers, Threads(threads.span, at == block))
            self.fault("an instruction of the whole warp is executed by a part of it")
        return threads.warps


def poison(count: int, threads: int, dtype: DType) -> Array:
    """The contents of unset registers."""
    bits = 0 if dtype.kind == "b" else POISON & ((1 << 8 * dtype.itemsize) - 1)
    return np.full((count, threads), bits, dtype)
