"""Parses PTX as Triton prints it: a kernel as basic blocks of instructions."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from struct import pack
from typing import final

from attrs import define, field, frozen

from attn_graph.testing.gpu.faults import UnknownInstructionError

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
REGISTERS = 65536  # of a multiprocessor
ALONE = (  # each of these is a block by itself: threads wait there, or others go on
    *("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive", "mbarrier.try_wait"),
    *("setmaxnreg", "barrier.cluster"),
)
ASSERTION = "call.__assertfail"
CALLED = {"vprintf", "__assertfail"}  # functions that kernels may call
LOCAL = "__local_depot"  # the name of the memory of a thread
CALL = re.compile(r"call(?:\.uni)?\s+(?:\([^)]*\),\s*)?(\w+)\b.*")
JUMPS = ("bra", "bra.uni", "brx.idx", "brx.idx.uni", "ret", "exit")
GOALS = re.compile(r"\bbra(?:\.uni)?\s+([\w$]+)\s*;|\.branchtargets\s+([^;]*);")
STATEMENT = re.compile(
    r"\s*(?:(?P<brace>[{}])"
    r"|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*"
    r"|(?P<label>[\w$]+):(?!:)"
    r"|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
PARAMETER = re.compile(
    r"\.(?P<kind>[busf])(?P<bits>\d+)\s[^,]*?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$"
)
TEXT = re.compile(r"\.global\s[^;=]*?\.b8\s+(\w+)\[\d+\]\s*=\s*\{([^}]*)\}")
NUMBER = re.compile(
    r"0[fFdD](?P<bits>[0-9a-fA-F]+)|(?P<real>-?\d+\.\d*)|(?P<whole>-?(?:0x[0-9a-fA-F]+|\d+))U?"
)


@final
@frozen
class Register:
    """A register of each thread."""

    name: str


@final
@frozen
class Special:
    """A register set by the hardware: `tid.x`."""

    name: str


@final
@frozen
class Immediate:
    """A number in the text; the bits of a floating-point number."""

    value: int


@final
@frozen
class Symbol:
    """A name: of a parameter, a label, or shared memory."""

    name: str


@final
@frozen
class Ignored:
    """`_`, an unused result."""


@final
@frozen
class Vector:
    """`{a, b}`; or `a|b`, two results."""

    items: tuple[Operand, ...]


@final
@frozen
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor map."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Special | Immediate | Symbol | Ignored | Vector | Address


@final
@frozen
class Instruction:
    """One instruction.

    line: of the PTX text. source: "file:line" of the kernel. guard: a predicate, and its value for
    threads that execute it. used: of a load, the bytes that the compiler needs, one bit each.
    """

    line: int
    source: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None = None
    used: int | None = None

    def __str__(self) -> str:
        return f"{self.opcode} (PTX line {self.line}, {self.source})"


Block = tuple[Instruction, ...]


@final
@frozen(eq=False)
class Kernel:
    """A kernel.

    parameters: bytes of each, by name. registers: the type of each. labels: numbers of blocks.
    threads: of a program. most_registers: of a thread. dynamic: names of the shared memory sized by
    the launch. undefined: registers that the compiler leaves so, by its comments. texts: constant
    bytes by name. local: bytes of the memory of a thread.
    """

    name: str
    parameters: Mapping[str, int]
    registers: Mapping[str, str]
    blocks: tuple[Block, ...]
    labels: Mapping[str, int]
    threads: int
    most_registers: int | None
    dynamic: frozenset[str]
    undefined: frozenset[str]
    texts: Mapping[str, bytes]
    local: int

    def registers_of_thread(self, threads: int) -> int:
        """The most that each may have; only the assembler knows how many it uses."""
        return self.most_registers or min(256, REGISTERS // max(threads, 1) // 8 * 8)


def registers_of(operand: Operand) -> Iterator[str]:
    match operand:
        case Register(name):
            yield name
        case Vector(items):
            for item in items:
                yield from registers_of(item)
        case Address(base, _, coordinates):
            for item in (base, *coordinates):
                yield from registers_of(item)
        case _:
            pass


@final
@define
class Scope:
    """Names declared between two braces, and the number that makes them unique."""

    number: int = 0
    names: set[str] = field(factory=set[str])


@final
@define
class Reader:
    """The state of reading a kernel's body. goals: the targets of jumps. tables: those of
    jumps by a number, by label."""

    goals: frozenset[str]
    registers: dict[str, str] = field(factory=dict[str, str])
    blocks: list[list[Instruction]] = field(factory=lambda: [[]])
    labels: dict[str, int] = field(factory=dict[str, int])
    scopes: list[Scope] = field(factory=lambda: [Scope()])
    count: int = 0
    source: str = ""
    used: int | None = None
    name: str = ""
    tables: dict[str, Vector] = field(factory=dict[str, Vector])

    def enter(self, rest: str) -> None:
        """A brace opens: its labels may be used before their definition."""
        self.count += 1
        inner = rest[: closing_brace(rest)]
        self.scopes.append(Scope(self.count, set(re.findall(r"(?m)^\s*([\w$]+):(?!:)", inner))))

    def unique(self, name: str) -> str:
        """A name, with the number of its declaring scope."""
        inner = next((s for s in reversed(self.scopes) if name in s.names), None)
        return f"{name}@{inner.number}" if inner else name

    def label(self, name: str) -> None:
        """The next instruction begins a block, if it is the target of a jump."""
        label = self.name = self.unique(name)
        if self.blocks[-1] and name in self.goals:
            self.blocks.append([])
        self.labels[label] = len(self.blocks) - 1

    def directive(self, text: str) -> None:
        """Declarations of registers, and the pragma on loads; others are ignored."""
        word, _, rest = text.partition(" ")
        if word == ".reg":
            kind, _, names = rest.strip(" .").partition(" ")
            for name in parts_of(names):
                self.declare(name, kind)
        elif word == ".branchtargets":
            self.tables[self.name] = self.vector(rest)
        elif mask := re.match(r'\.pragma "used_bytes_mask (0x[0-9a-fA-F]+)"', text):
            self.used = int(mask[1], 16)

    def declare(self, name: str, kind: str) -> None:
        many = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]
        if len(self.scopes) > 1:
            self.scopes[-1].names.update(names)
        self.registers.update(dict.fromkeys(map(self.unique, names), kind))

    def instruct(self, text: str, line: int) -> None:
        """An instruction. It ends its block if it jumps or waits."""
        guard = None
        if condition := re.match(r"@(!?)([%\w$]+)\s+", text):
            guard = Register(self.unique(condition[2])), not condition[1]
            text = text[condition.end() :]
        text = CALL.sub(r"call.\1", text)
        opcode, _, rest = text.partition(" ")
        operands = tuple(map(self.operand, parts_of(rest)))
        step = Instruction(line, self.source, opcode, operands, guard, self.used)
        self.used = None
        if opcode.startswith(ALONE) and self.blocks[-1]:
            self.blocks.append([])
        self.blocks[-1].append(step)
        if opcode in JUMPS or opcode.startswith(ALONE):
            self.blocks.append([])

    def operand(self, text: str) -> Operand:
        """The text between two commas."""
        if text[0] in "{[":
            return (self.address if text[0] == "[" else self.vector)(text[1:-1].strip())
        if "|" in text:
            return Vector(tuple(self.operand(x.strip()) for x in text.split("|")))
        if number := NUMBER.fullmatch(text):
            return Immediate(bits_of(number))
        name = self.unique(text)
        if text == "_":
            return Ignored()
        if name in self.tables:
            return self.tables[name]
        if name in self.registers:
            return Register(name)
        return Special(text[1:]) if text.startswith("%") else Symbol(name)

    def vector(self, text: str) -> Vector:
        """The text between braces."""
        return Vector(tuple(map(self.operand, parts_of(text))))

    def address(self, text: str) -> Address:
        """The text between brackets."""
        base, *rest = parts_of(text)
        if rest:
            coordinates = self.operand(rest[0])
            assert isinstance(coordinates, Vector)
            return Address(self.operand(base), 0, coordinates.items)
        moved = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", base)
        return (
            Address(self.operand(moved[1]), int(moved[2], 0))
            if moved
            else Address(self.operand(base))
        )


def bits_of(number: re.Match[str]) -> int:
    """A number in the text; of a floating-point one the bits, of float32 if it is in decimals."""
    if number["real"]:
        return int.from_bytes(pack("<f", float(number["real"])), "little")
    return int(number["bits"], 16) if number["bits"] else int(number["whole"], 0)


def closing_brace(text: str) -> int:
    """The place of the brace that closes the one before `text`; inner ones are paired."""
    depth = 1
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise UnknownInstructionError("a brace that is not closed")


def parts_of(text: str) -> list[str]:
    """The parts between commas outside of braces and brackets."""
    parts = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]


def parse(text: str) -> Kernel:
    """The kernel of a PTX module. Raises UnknownInstructionError for several."""
    plain = re.sub(r"//[^\n]*", "", text)
    entries = [*re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", plain)]
    functions = {*re.findall(r"\.func\s+(?:\([^)]*\)\s*)?(\w+)", plain)}
    if len(entries) != 1 or functions - CALLED:
        raise UnknownInstructionError(
            f"{len(entries)} kernels in one PTX module, with functions {sorted(functions)}"
        )
    (entry,) = entries
    reader = read_body(plain, entry.end())
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    most = re.search(r"\.maxnreg\s+(\d+)", entry[3])
    return Kernel(
        name=entry[1],
        parameters=dict(map(read_parameter, parts_of(entry[2]))),
        registers=reader.registers,
        blocks=tuple(map(tuple, reader.blocks)),
        labels=reader.labels,
        threads=int(threads[1]) if threads else 0,
        most_registers=int(most[1]) if most else None,
        dynamic=frozenset(re.findall(r"\.extern\s+\.shared\s[^;]*?([\w$]+)\[\s*\]", plain)),
        texts={n: bytes(map(int, x.split(","))) for n, x in TEXT.findall(plain)},
        local=sum(map(int, re.findall(rf"\.local\s[^;]*?{LOCAL}\d*\[(\d+)\]", plain))),
        undefined=frozenset(re.findall(r"//\s*implicit-def:\s*([%\w$]+)", text)),
    )


def read_parameter(text: str) -> tuple[str, int]:
    match = PARAMETER.search(text)
    if match is None:
        raise UnknownInstructionError(f"the parameter {text!r}")
    return match["name"], BYTES[match["bits"]] * int(match["count"] or 1)


def read_body(text: str, at: int) -> Reader:
    files = {
        n: path.rpartition("/")[2] for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)
    }
    ends = [m.start() for m in re.finditer("\n", text)]
    goals = (name.strip() for found in GOALS.findall(text) for name in ",".join(found).split(","))
    reader = Reader(frozenset(goals))
    while reader.scopes:
        match = STATEMENT.match(text, at)
        if match is None:
            raise UnknownInstructionError(f"what stands at line {bisect_right(ends, at) + 1}")
        at = match.end()
        read_statement(
            reader, match, text, files, bisect_right(ends, match.start(match.lastgroup or 0)) + 1
        )
    return reader


def read_statement(
    reader: Reader, match: re.Match[str], text: str, files: Mapping[str, str], line: int
) -> None:
    """One statement: a brace, a place in the source, a label, a directive or an instruction."""
    if match["brace"] == "{":
        reader.enter(text[match.end() :])
    elif match["brace"]:
        reader.scopes.pop()
    elif match["label"]:
        reader.label(match["label"])
    elif match["line"]:
        if match["line"] != "0":
            reader.source = f"{files.get(match['file'], match['file'])}:{match['line']}"
    elif match["text"].strip().startswith("."):
        reader.directive(" ".join(match["text"].split()))
    else:
        reader.instruct(" ".join(match["text"].split()), line)
