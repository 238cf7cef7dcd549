"""Translates each basic block into one Python function over arrays with an element a thread.

`block(m, R, g)` executes a block in program m for the threads g at it. R holds an array for each
register. Inside the function registers are local variables; those read by other blocks too are
written back at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, final

import numpy as np
from attrs import define, field, frozen

from attn_graph.testing.gpu.faults import Omission, UnknownInstructionError
from attn_graph.testing.gpu.ptx import (
    JUMPS,
    Address,
    Block,
    Ignored,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
    registers_of,
)
from attn_graph.testing.gpu.rules import DTYPES, DType, Rule, find_rule

HELD = {"pred": "?", "b8": "u2", "b16": "u2", "b32": "u4", "f32": "u4", "u32": "u4"}  # of registers
PRODUCT = "wgmma."
UNSET = "which no instruction sets"
EARLY = "a register of tcgen05.ld is read before tcgen05.wait::ld"
WAIT_FOR_LOADS = "tcgen05.wait::ld.sync.aligned"
LATE = "tcgen05.ld without tcgen05.wait::ld before its registers are used, or the next jump"


@final
@frozen(eq=False)
class Translation:
    """A kernel, and a function for each of its blocks.

    held: the dtype of each register. row: numbers of the registers that products of warp groups use
    while other instructions run. grain: bytes of the smallest store to shared memory.
    """

    kernel: Kernel
    functions: tuple[Callable[..., None], ...]
    held: tuple[DType, ...]
    row: Mapping[int, int]
    grain: int

    def __str__(self) -> str:
        return self.kernel.name

    @cached_property
    def sources(self) -> Mapping[int, str]:
        """The place in the source of each line of the PTX."""
        return {step.line: step.source for step in steps_of(self.kernel)}


def translate_kernel(kernel: Kernel) -> Translation:
    shape = Shape.of(kernel)
    return Translation(
        kernel,
        tuple(compile_block(shape, at) for at in range(len(kernel.blocks))),
        tuple(np.dtype(dtype_of(kind)) for kind in kernel.registers.values()),
        {k: n for n, k in enumerate(sorted(shape.number[x] for x in shape.watched))},
        min((4, *map(store_bytes, steps_of(kernel)))),
    )


def dtype_of(kind: str) -> str:
    return HELD.get(kind, "u8")


def steps_of(kernel: Kernel) -> Iterator[Instruction]:
    for block in kernel.blocks:
        yield from block


def store_bytes(step: Instruction) -> int:
    if not step.opcode.startswith("st.shared"):
        return 4
    stored = step.operands[1]
    return DTYPES[step.opcode.split(".")[-1]].itemsize * len(items(stored))


def items(operand: Operand) -> tuple[Operand, ...]:
    """The operands in a vector, or the operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def rule_of(step: Instruction) -> Rule:
    """The rule of an instruction. Raises UnknownInstructionError."""
    rule = find_rule(step.opcode)
    if rule is None:
        raise UnknownInstructionError(f"the virtual GPU does not have {step}")
    return rule


def rule_named(opcode: str) -> Rule:
    rule = find_rule(opcode)
    assert rule is not None
    return rule


def is_product(step: Instruction) -> bool:
    """True if registers of an instruction are used after it."""
    return step.opcode.startswith("wgmma.mma_async")


@final
@frozen(eq=False)
class Shape:
    """Facts about a kernel for all of its blocks. kept: registers that outlive a block.

    watched: those of products. set: those set by an instruction, or left undefined on purpose.
    """

    kernel: Kernel
    number: dict[str, int]
    kept: frozenset[str]
    watched: frozenset[str]
    set: frozenset[str]

    @classmethod
    def of(cls, kernel: Kernel) -> Shape:
        number = {name: n for n, name in enumerate(kernel.registers)}
        products = [step for step in steps_of(kernel) if is_product(step)]
        used = (x for step in products for o in step.operands[:2] for x in registers_of(o))
        watched = frozenset(x for x in used if kernel.registers[x] in ("b32", "f32"))
        results = (x for step in steps_of(kernel) for x in registers_of_results(step))
        known = frozenset(results) | watched | kernel.undefined
        return cls(kernel, number, frozenset(lasting_registers(kernel.blocks)), watched, known)


def lasting_registers(blocks: Iterable[Block]) -> Iterator[str]:
    """Registers in more than one block, or read before they are set."""
    seen = Counter[str]()
    for block in blocks:
        written = set[str]()
        named = set[str]()
        for step in block:
            results = [*registers_of_results(step)]
            read = {x for o in step.operands[bool(results) :] for x in registers_of(o)}
            if step.guard:
                read |= {step.guard[0].name, *results}
            yield from read - written
            written |= {*results}
            named |= read | written
        seen.update(named)
    yield from (name for name, count in seen.items() if count > 1)


def registers_of_results(step: Instruction) -> Iterator[str]:
    """The registers set by an instruction; none of a product: it reads them too."""
    if step.opcode in JUMPS or is_product(step):
        return
    if step.opcode.startswith("mov") or rule_of(step).results:
        yield from registers_of(step.operands[0])


def compile_block(shape: Shape, at: int) -> Callable[..., None]:
    writer = BlockWriter(shape, at)
    writer.write()
    name = f"block_{at}"
    text = "\n ".join([f"def {name}(m, R, g):", *writer.lines])
    exec(compile(text, f"<{shape.kernel.name} {name}>", "exec"), writer.names)
    made: Callable[..., None] = writer.names[name]
    return made


@final
@define(eq=False)
class BlockWriter:
    """Writes the text of one function.

    names: the objects used in the text. values: of each register the variables that hold it, by
    dtype. changed: registers to be written back. arriving: those that an instruction fills later.
    """

    shape: Shape
    at: int
    lines: list[str] = field(factory=lambda: ["s, n = g.span, g.count"])
    names: dict[str, Any] = field(factory=lambda: {"np": np})
    values: dict[str, dict[str, str]] = field(factory=dict[str, dict[str, str]])
    changed: set[str] = field(factory=set[str])
    arriving: set[str] = field(factory=set[str])
    step: Instruction = field(init=False)

    def write(self) -> None:
        """All instructions; then registers are written back, and the threads go on."""
        last = f"m.jump(g, {self.at + 1})"
        for step in self.shape.kernel.blocks[self.at]:
            self.step = step
            if self.step.opcode in JUMPS:
                last = self.leave()
            elif self.step.opcode.startswith("mov."):
                self.move()
            else:
                self.call(rule_of(self.step))
        self.flush(self.changed & self.shape.kept | self.changed & self.shape.watched)
        self.put(last)

    def refuse(self, text: str) -> None:
        """Raises UnknownInstructionError for the instruction."""
        raise UnknownInstructionError(f"{self.shape.kernel.name}: {text}: {self.step}")

    def put(self, text: str) -> None:
        """A line of the text."""
        self.lines.append(text)

    def assign(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.put(f"{name} = {expression}")
        return name

    def give(self, thing: object) -> str:
        """A name for an object in the text."""
        name = f"x{len(self.names)}"
        self.names[name] = thing
        return name

    def watcher(self, use: str) -> str:
        """The name of a check of registers of products."""
        return self.give(rule_named(f"register.{use}").call)

    # Operands

    def read(self, operand: Operand, kind: str) -> str:
        """The value of an operand, in a PTX type."""
        dtype = DTYPES[kind]
        match operand:
            case Register(name):
                return self.read_register(name, dtype)
            case Immediate(number):
                return self.give(constant(number, dtype))
            case Special(name):
                return self.assign(f"m.special({name!r}, g)")
            case Symbol(name):
                return self.assign(f"np.full(n, m.address_of({name!r}), {dtype.str[1:]!r})")
            case _:
                self.refuse(f"the operand {operand}")
        return ""

    def read_register(self, name: str, dtype: DType) -> str:
        kept, want = dtype_of(self.shape.kernel.registers[name]), dtype.str[1:]
        views = self.values.setdefault(name, {})
        if name in self.arriving:
            self.put(f"m.line = {self.step.line}")
            self.put(f"m.note({EARLY!r})")
        if name not in self.shape.set and not self.step.opcode.startswith("mov."):
            self.put(f"m.line = {self.step.line}")
            self.put(f"m.fault({f'{name} is read, {UNSET}'!r})")
        if not views:
            if name in self.shape.watched:
                self.put(f"m.line = {self.step.line}")
                self.put(f"{self.watcher('read')}(m, g, {self.shape.number[name]})")
            views[kept] = self.assign(f"R[{self.shape.number[name]}][s]")
        if want not in views:
            source = next(iter(views.values()))
            if dtype.itemsize != np.dtype(kept).itemsize:
                whole = self.read_register(name, np.dtype(kept))
                source = f"{whole}.astype('u{dtype.itemsize}')"
            views[want] = self.assign(f"{source}.view({want!r})")
        return views[want]

    def argument(self, operand: Operand, kind: str) -> str:
        """The value of an operand of an action, by its kind."""
        if kind == "#":
            assert isinstance(operand, Immediate)
            return str(operand.value)
        if kind == "&" and isinstance(operand, Address):
            return f"({self.address(operand, '@')},)"
        if kind == "&" and isinstance(operand, Vector):
            return str(tuple(self.shape.number[x] for x in registers_of(operand)))
        if kind.endswith("*"):
            return "(" + "".join(f"{self.read(x, kind[:-1])}, " for x in items(operand)) + ")"
        if kind.startswith("@") or kind == "param":
            assert isinstance(operand, Address)
            return self.address(operand, kind)
        return self.read(operand, "u64" if kind == "&" else kind)

    def address(self, operand: Address, kind: str) -> str:
        """An address in memory; for a parameter its name and offset; for a map also coordinates."""
        base, offset = operand.base, operand.offset
        if kind == "param":
            assert isinstance(base, Symbol)
            return f"{base.name!r}, {offset}"
        if isinstance(base, Symbol):
            return self.assign(f"np.full(n, m.address_of({base.name!r}) + {offset}, 'u4')")
        assert isinstance(base, Register)
        wide = dtype_of(self.shape.kernel.registers[base.name]) == "u8"
        value = self.read(base, "u64" if wide else "u32")
        if offset:
            step = self.give(constant(offset, DTYPES["u64" if wide else "u32"]))
            value = self.assign(f"{value} + {step}")
        places = "".join(f"{self.read(x, 's32')}, " for x in operand.coordinates)
        return f"{value}, ({places})" if kind == "@map" else value

    # Results

    def set(self, target: Operand, kind: str, expression: str) -> None:
        """Set a register to a value of some type, for threads with a true guard."""
        if isinstance(target, Ignored):
            return
        if not isinstance(target, Register):
            self.refuse(f"the result {target}")
            return
        dtype, kept = DTYPES[kind], np.dtype(dtype_of(self.shape.kernel.registers[target.name]))
        if dtype.itemsize != kept.itemsize or (dtype.kind == "b") != (kept.kind == "b"):
            expression = f"{expression}.astype({kept.kind + str(kept.itemsize)!r})"
            dtype = kept
        if self.step.guard:
            old = self.read_register(target.name, dtype)
            expression = f"np.where({self.guard()}, {expression}, {old})"
        if target.name in self.shape.watched:
            self.put(f"m.line = {self.step.line}")
            self.put(f"{self.watcher('write')}(m, g, {self.shape.number[target.name]})")
        self.values[target.name] = {dtype.str[1:]: self.assign(expression)}
        self.changed.add(target.name)

    def guard(self) -> str:
        """The condition for the instruction to be executed."""
        assert self.step.guard is not None
        register, wanted = self.step.guard
        value = self.read_register(register.name, DTYPES["pred"])
        return value if wanted else f"~{value}"

    def threads(self) -> str:
        return self.assign(f"g.where({self.guard()})") if self.step.guard else "g"

    def flush(self, names: Iterable[str]) -> None:
        pairs = [
            (
                self.shape.number[x],
                self.read_register(x, np.dtype(dtype_of(self.shape.kernel.registers[x]))),
            )
            for x in sorted(names, key=self.shape.number.__getitem__)
        ]
        if pairs:
            self.put("if g.active is None:")
            self.lines += [f" R[{k}][s] = {value}" for k, value in pairs]
            self.put("else:")
            self.lines += [f" np.copyto(R[{k}][s], {value}, where=g.active)" for k, value in pairs]
        self.changed -= {*names}

    # Instructions

    def call(self, rule: Rule) -> None:
        step = self.step
        targets = step.operands[: len(rule.results)]
        given = step.operands[len(rule.results) :]
        least = sum(not kind.endswith("?") for kind in rule.operands)
        if len(targets) < len(rule.results) or not least <= len(given) <= len(rule.operands):
            self.refuse(f"{len(step.operands)} operands")
        if is_product(step) or step.opcode.startswith(PRODUCT):
            self.flush(self.changed & self.shape.watched)
        kinds = [kind.rstrip("?") for kind in rule.operands]
        pairs = zip(given, kinds, strict=False)
        arguments = [self.argument(x, kind) for x, kind in pairs if kind != "_"]
        function = self.give(rule.call)
        if rule.machine:
            self.act(rule, function, arguments, targets)
        else:
            made = f"{function}({', '.join(arguments)})"
            if all(isinstance(x, Immediate) for x in given):
                made = f"np.full(n, {made})"
            pair = "|" in rule.results[0]
            self.spread(rule.results[0], targets[0], self.assign(made) if pair else made)

    def act(
        self, rule: Rule, function: str, arguments: list[str], targets: tuple[Operand, ...]
    ) -> None:
        """An action on memory or other threads."""
        if rule.waits:
            self.put(f"m.block = {self.at}")
        extra = [f"used={self.step.used}"] if self.step.used is not None else []
        threads = self.threads()
        if rule.waits and self.step.guard:
            self.put(f"m.jump(g.where(~({self.guard()})), {self.at + 1})")
            self.put(f"if not {threads}.warps.size: return")
        self.put(f"m.line = {self.step.line}")
        made = f"{function}({', '.join(['m', threads, *arguments, *extra])})"
        if rule.waits:
            self.put(f"g = {made}")
            self.put("if g is None: return")
            for target, kind in zip(targets, rule.results, strict=True):
                self.set(target, kind, "np.ones(n, '?')")
        elif not rule.results:
            self.put(made)
        else:
            self.spread(rule.results[0], targets[0], self.assign(made))
        if self.step.opcode.startswith(PRODUCT):
            self.values = {k: v for k, v in self.values.items() if k not in self.shape.watched}
        self.follow(targets)

    def spread(self, kinds: str, target: Operand, made: str) -> None:
        """Set a register; or those of a vector, or of a pair with a type for each.

        `?`: the second of a pair may be missing.
        """
        if kinds[-1] != "*" and "|" not in kinds:
            self.set(target, kinds, made)
            return
        places = items(target)
        each = kinds.rstrip("?").split("|") if "|" in kinds else [kinds[:-1]] * len(places)
        for n, (place, kind) in enumerate(zip(places, each, strict=kinds[-1] != "?")):
            self.set(place, kind, f"{made}[{n}]")

    def follow(self, targets: tuple[Operand, ...]) -> None:
        """Registers filled by tcgen05.ld are ready after its wait."""
        load = self.step.opcode.startswith("tcgen05.ld")
        filled = frozenset(x for target in targets for x in registers_of(target))
        if load and not self.is_awaited(filled):
            self.put(f"m.report({self.give(Omission.TENSOR_LOADS)}, {LATE!r})")
            self.put(f"{self.give(rule_named(WAIT_FOR_LOADS).call)}(m, {self.threads()})")
        elif load:
            self.arriving |= filled
        elif self.step.opcode == WAIT_FOR_LOADS:
            self.arriving.clear()

    def is_awaited(self, filled: frozenset[str]) -> bool:
        """True if a wait for tcgen05.ld comes before the next jump and the use of its registers.

        Copies of these registers are only noted.
        """
        block = self.shape.kernel.blocks[self.at]
        for step in block[block.index(self.step) + 1 :]:
            if step.opcode == WAIT_FOR_LOADS:
                return True
            used = {x for operand in step.operands for x in registers_of(operand)}
            if used & filled and not step.opcode.startswith("mov."):
                return False
        return False

    def move(self) -> None:
        """mov: a copy; or the parts of a number, or a number of parts, the lowest bits first."""
        kind = self.step.opcode.removeprefix("mov.")
        if kind not in DTYPES or len(self.step.operands) != 2:
            self.refuse("an unknown move")
        target, source = self.step.operands
        dtype = DTYPES[kind]
        if isinstance(target, Vector):
            part = np.dtype(f"u{dtype.itemsize // len(target.items)}")
            whole = self.assign(
                f"np.ascontiguousarray({self.read(source, kind)}).view({part.str[1:]!r})"
            )
            for n, place in enumerate(target.items):
                self.set(place, f"b{8 * part.itemsize}", f"{whole}[{n}::{len(target.items)}]")
        elif isinstance(source, Vector):
            part_kind = f"b{8 * dtype.itemsize // len(source.items)}"
            parts = ", ".join(self.read(x, part_kind) for x in source.items)
            self.set(
                target,
                kind,
                f"np.stack(np.broadcast_arrays({parts}), 1).view({dtype.str[1:]!r}).reshape(-1)",
            )
        elif isinstance(source, Immediate):
            self.set(target, kind, f"np.full(n, {self.read(source, kind)})")
        else:
            self.set(target, kind, self.read(source, kind))

    def leave(self) -> str:
        """The statement by which threads leave the block."""
        opcode, operands, labels = self.step.opcode, self.step.operands, self.shape.kernel.labels
        if opcode in ("ret", "exit"):
            return f"m.leave(g, {self.guard() if self.step.guard else None}, {self.at + 1})"
        if opcode.startswith("brx"):
            goals = [labels[x.name] for x in items(operands[1]) if isinstance(x, Symbol)]
            if self.step.guard:
                self.refuse("a condition")
            return (
                f"m.line = {self.step.line}; m.jump_to(g, {self.read(operands[0], 'u32')}, {goals})"
            )
        assert isinstance(operands[0], Symbol)
        goal = labels[operands[0].name]
        if not self.step.guard:
            return f"m.jump(g, {goal})"
        return f"m.branch(g, {self.guard()}, {goal}, {self.at + 1})"


def constant(number: int, dtype: DType) -> Any:  # Any: a scalar of NumPy's
    """A number in the text, by the lowest bits that its type holds."""
    if dtype.kind == "b":
        return np.bool_(number)
    bits = number & ((1 << 8 * dtype.itemsize) - 1)
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]
