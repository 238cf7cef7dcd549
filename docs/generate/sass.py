"""Loops of a kernel's machine code: how many instructions of each kind one tile takes.

`nvdisasm -c` of CUDA prints the code as text, one instruction a line, with labels that branches
jump to. A kernel has one innermost loop for full tiles and one for mixed ones; what these hold is
what a kernel's time is made of.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import final

from attrs import frozen

LABEL = re.compile(r"^\s*\.?(L_x_\w+):")
# "/*0a30*/ @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;", in braces where two are issued at once
INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)\s*(.*?)\s*;"
)
PRODUCT_SIZES = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
PRODUCTS = ("HGMMA", "HMMA", "UTCHMMA")  # of sm_90; of 80, 86, 89 and 120; of 100
FLOATS = ("FFMA", "FMUL", "FADD")
Instruction = tuple[str, str]  # its name with suffixes, and its operands


@final
@frozen
class Loop:
    """Instructions of one warp in one turn of a loop.

    issued: all of them. special: on the unit for exponentials, logarithms and reciprocals. floats:
    sums and products of float32. spills: stores and loads of registers that had no room. fetched:
    bytes of shared memory that products of a group of four warps read, on sm_90.
    """

    issued: int
    special: int = 0
    floats: int = 0
    spills: int = 0
    fetched: int = 0


@final
@frozen
class Body:
    """The machine code of a kernel: its innermost loops over tiles, first those over full tiles,
    and how many instructions stand outside of them."""

    loops: tuple[Loop, ...]
    outside: int

    @property
    def full(self) -> Loop:
        """The loop over full tiles."""
        return self.loops[0]

    @property
    def mixed(self) -> Loop:
        """The loop over mixed tiles; for sm_100 Triton makes several loops of each."""
        return self.loops[len(self.loops) // 2]


@lru_cache(maxsize=256)
def read_body(text: str) -> Body:
    """The loops in what `nvdisasm -c` printed."""
    code, labels = read_instructions(text)
    spans = innermost_spans(code, labels)
    loops = tuple(count_loop(code[a : b + 1]) for a, b in spans)
    return Body(loops, len(code) - sum(loop.issued for loop in loops))


def read_instructions(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions, and the number of the one after each label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append((instruction[1], instruction[2]))
    return code, labels


def innermost_spans(
    code: Sequence[Instruction], labels: Mapping[str, int]
) -> list[tuple[int, int]]:
    """First and last instruction of loops over tiles that hold no other such loop, in order.

    Waits that stand behind the end of the code, and branch back to it, make no loops.
    """
    ends: dict[int, int] = {}
    for n, (name, operands) in enumerate(code):
        target = re.search(r"\bL_x_\w+", operands) if name.startswith("BRA") else None
        start = labels.get(target[0], n + 1) if target else n + 1
        if start > n or any(each == "EXIT" for each, _ in code[start : n + 1]):
            continue
        if computes(code[start : n + 1]):
            ends[start] = max(n, ends.get(start, 0))
    spans = sorted(ends.items())
    return [span for span in spans if not any(is_within(other, span) for other in spans)]


def is_within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    """Whether a span lies within another one."""
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def computes(code: Sequence[Instruction]) -> bool:
    """Whether these are the instructions of a tile: in half precision matrix products, in float32
    many sums."""
    kinds = Counter(name.split(".")[0] for name, _ in code)
    return any(kinds[name] for name in PRODUCTS) or kinds["FFMA"] > 64


def count_loop(code: Sequence[Instruction]) -> Loop:
    """How many instructions of each kind these are."""
    kinds = Counter(name.split(".")[0] for name, _ in code)
    return Loop(
        issued=len(code),
        special=kinds["MUFU"],
        floats=sum(kinds[name] for name in FLOATS),
        spills=kinds["STL"] + kinds["LDL"],
        fetched=sum(fetched_bytes(*each) for each in code),
    )


def fetched_bytes(name: str, operands: str) -> int:
    """Bytes of shared memory that a product of sm_90 reads: one factor, or both."""
    if not (sizes := product_sizes(name)):
        return 0
    rows, columns, depth = sizes
    in_registers = re.match(r"R\d+, R\d+", operands)
    return 2 * depth * (columns + (0 if in_registers else rows))


def product_sizes(name: str) -> tuple[int, ...]:
    """Rows, columns and depth of a product of sm_90; () of another instruction."""
    sizes = PRODUCT_SIZES.match(name)
    return tuple(map(int, sizes.groups())) if sizes else ()
