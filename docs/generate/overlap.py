"""Reads the order of instructions: whether softmax runs beside the matrix products of Hopper.

A group of four warps issues its products (`wgmma`) and goes on; it waits for all but the last n by
one instruction. What stands behind a product, and before the wait that ends the last, runs beside
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import final

from attrs import frozen

from docs.generate.sass import (
    Instruction,
    Loop,
    count_loop,
    innermost_spans,
    product_sizes,
    read_instructions,
)

REGISTERS = "USETMAXREG"  # sets the registers of each thread of a group
WAIT = "WARPGROUP.DEPBAR"
WAIT_FOR_SCORES = "gsb0, 0x1"
END_OF_PRODUCT = "gsb0"  # the last operand of its last instruction


@final
@frozen
class TileLoop:
    """A loop over tiles, of one group of four warps.

    counts: of one warp and tile. registers: of a thread. flop: of the products of the group and
    tile. beside: how many of the exponentials and the like stand where a product runs.
    """

    counts: Loop
    registers: int
    flop: int
    beside: int


def read_loops(code: str) -> list[TileLoop]:
    """The innermost loops in which softmax can run beside a product, in their order.

    Threads that wait for memory do so behind the code, and branch back to it: these are no loops.
    """
    instructions, labels = read_instructions(code)
    registers = [*accumulate(map(read_registers, instructions), keep_last)]
    spans = innermost_spans(instructions, labels, overlaps)
    return [read_loop(instructions[a : b + 1], registers[a]) for a, b in spans]


def read_registers(instruction: Instruction) -> int:
    """How many registers a thread has behind an instruction; 0: as many as before."""
    name, operands = instruction
    return int(operands.split(",")[-1], 16) if name.startswith(REGISTERS) else 0


def keep_last(before: int, now: int) -> int:
    """The registers of a thread, as they were or as they are set now."""
    return now or before


def overlaps(body: Sequence[Instruction]) -> bool:
    """Whether one group issues two products here and waits for the first alone."""
    waits = [operands for name, operands in body if name.startswith(WAIT)]
    return WAIT_FOR_SCORES in waits and not any(name.startswith(REGISTERS) for name, _ in body)


def read_loop(body: Sequence[Instruction], registers: int) -> TileLoop:
    """The figures of a loop."""
    running, beside = 0, 0
    for name, operands in body:
        if name.startswith(WAIT):
            running = min(running, int(operands.split(",")[-1], 16))
        running += bool(product_sizes(name)) and operands.endswith(END_OF_PRODUCT)
        beside += running > 0 and name.startswith("MUFU")
    flop = sum(2 * prod(sizes) for name, _ in body if (sizes := product_sizes(name)))
    return TileLoop(count_loop(body), registers, flop, beside)
