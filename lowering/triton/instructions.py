"""Reads the order of instructions: whether softmax runs beside the matrix products of Hopper.

A group of four warps issues its products (`wgmma`) and goes on; it waits for all but the last n by
one instruction. What stands between the wait for all but one and the wait for all runs beside the
last product.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import final

from attrs import frozen

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
LABEL = re.compile(r"^\s*\.?(L_x_\d+):")
BRANCH = re.compile(r"(L_x_\d+)")
SIZES = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
REGISTERS = "USETMAXREG"  # sets the registers of each thread of a group
WAIT = "WARPGROUP.DEPBAR"
WAIT_FOR_SCORES, WAIT_FOR_ALL = "gsb0, 0x1", "gsb0, 0x0"

Instruction = tuple[str, str]  # its name with suffixes, and its arguments


@final
@frozen
class TileLoop:
    """A loop over tiles, of one group of four warps.

    registers: of a thread. instructions: of one warp and tile. flop: of the products of the group
    and tile. functions: exponentials and the like, of one warp and tile; beside: how many of them
    stand where a product runs. spills: instructions that move registers to memory or back.
    """

    registers: int
    instructions: int
    flop: int
    functions: int
    beside: int
    spills: int = 0


def read_loops(code: str) -> list[TileLoop]:
    """The innermost loops in which softmax can run beside a product, in their order.

    Threads that wait for memory do so behind the code, and branch back to it: these are no loops.
    """
    instructions, labels = parse_instructions(code)
    counts = map(read_registers, instructions)
    registers = [*accumulate(counts, keep_last)]
    spans = [
        (labels[target], end)
        for end, (name, arguments) in enumerate(instructions)
        if name == "BRA"
        for target in BRANCH.findall(arguments)
        if labels.get(target, end) < end and overlaps(instructions[labels[target] : end])
    ]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [read_loop(instructions[a : b + 1], registers[a]) for a, b in sorted(inner)]


def parse_instructions(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions, and the number of the one behind each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := LINE.match(line):
            instructions.append((found[1], found[2]))
    return instructions, labels


def read_registers(instruction: Instruction) -> int:
    """How many registers a thread has behind an instruction; 0: as many as before."""
    name, arguments = instruction
    return int(arguments.split(",")[-1], 16) if name.startswith(REGISTERS) else 0


def keep_last(before: int, now: int) -> int:
    """The registers of a thread, as they were or as they are set now."""
    return now or before


def overlaps(body: list[Instruction]) -> bool:
    """Whether one group issues two products here and waits for the first alone."""
    waits = [arguments.strip() for name, arguments in body if name.startswith(WAIT)]
    return WAIT_FOR_SCORES in waits and not any(name.startswith(REGISTERS) for name, _ in body)


def read_loop(body: list[Instruction], registers: int) -> TileLoop:
    """The figures of a loop."""
    inside, functions, beside, flop = False, 0, 0, 0
    spills = sum(name.startswith(("STL", "LDL")) for name, _ in body)
    for name, arguments in body:
        if name.startswith(WAIT):
            inside = arguments.strip() == WAIT_FOR_SCORES
        elif name.startswith("MUFU"):
            functions, beside = functions + 1, beside + inside
        elif sizes := SIZES.match(name):
            m, n, k = map(int, sizes.groups())
            flop += 2 * m * n * k
    return TileLoop(registers, len(body), flop, functions, beside, spills)
