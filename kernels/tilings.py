"""Tile sizes of the kernels: one table.

Tests hold part of it to the shared memory that there is and to few spilled registers; `make
compiled` holds all of it, and says what does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, final, get_args

from attrs import evolve, frozen

Pass = Literal["forward", "query_gradient", "key_gradient"]
PushPass = Literal["push", "push_query_gradient", "push_key_gradient"]  # of forward mode
ARCHS = (80, 90, 100, 120)
WIDTHS = (16, 32, 64, 128, 256, 512)
HELD = WIDTHS[-1]  # columns of one tile of rows; see kernels/pieces.py
# The most bytes of shared memory for one program: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability", less 1 KiB for the system.
SHARED = {
    80: 166912, 86: 101376, 87: 166912, 89: 101376,
    90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
LEAST_SHARED = min(SHARED.values())


@final
@frozen
class Tiling:
    """BLOCK_M queries by BLOCK_N keys at a time, on `warps` warps, `stages` tiles in flight.

    apart: one launch for dk and one for dv, because the registers cannot hold both sums. spills:
    the most bytes of a thread's registers that kernels move to memory, if over FEW_SPILLED, since
    smaller tiles are predicted to be slower all the same.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    apart: bool = False
    spills: int = 0

    @property
    def options(self) -> tuple[int, int]:
        return self.warps, self.stages

    @property
    def resident(self) -> int:
        """Programs on a multiprocessor at full speed."""
        return max(1, FULL // self.warps)


def tiling(
    sm: int, itemsize: int, width: int, pass_: Pass, modified: bool, copied: bool, decided: bool
) -> Tiling:
    """The tiling of a kernel without a feature of its own.

    sm: compute capability, 90 for 9.0; 0 is Triton's interpreter, faster with few tiles. itemsize:
    bytes of an element. width: the larger of the padded head sizes. modified: True if modifiers
    change the scores. copied: True if the copy engine brings all tiles. decided: True if data
    decide the mask.
    """
    if sm == 0:
        return INTERPRETED
    arch = table_arch(sm)
    usual = TABLE[arch, itemsize, pass_][width]["modified" if modified else "plain"]
    if copied and (rows := COPIED.get((arch, pass_, width))):
        usual = rows[1 if modified else 2 * decided]
    return usual


def own_tiling(
    sm: int, itemsize: int, width: int, pass_: Pass | PushPass, features: Iterable[str]
) -> Tiling | None:
    """The tiling of the first of a kernel's features that has one of its own; arguments as in
    `tiling`."""
    if sm == 0:
        return None
    tiles = TABLE[table_arch(sm), itemsize, pass_][width]
    return next((tiles[name] for name in features if name in tiles), None)


def push_tiling(sm: int, itemsize: int, width: int, pass_: PushPass) -> Tiling:
    """The tiling of a kernel of forward mode; arguments as in `tiling`."""
    return INTERPRETED if sm == 0 else TABLE[table_arch(sm), itemsize, pass_][width]["plain"]


def split_tiling(sm: int, itemsize: int, width: int, rows: int) -> Tiling:
    """The tiling of few rows; programs share their keys. rows: of all heads with common keys."""
    if sm == 0:
        return INTERPRETED_SPLIT
    if width == HELD:
        held = min(WIDE_SPLIT_ROWS[itemsize], padded_head_size(rows))
        return Tiling(held, *WIDE_SPLIT[itemsize][table_arch(sm)])
    imprecise = itemsize == 4 and table_arch(sm) == 100
    most = IMPRECISE_ROWS // 2 if imprecise else MOST_SPLIT_ROWS
    held = min(most, padded_head_size(rows))
    usual = SPLIT[itemsize][width]
    return Tiling(held, *(usual if itemsize == 2 else SPLIT_MANY.get((width, held), usual)))


def table_arch(sm: int) -> int:
    """The compute capability with the table rows for another.

    100 serves up to 119, with its matrix units; 120 all with as little shared memory.
    """
    if sm == 90 or 100 <= sm < 120:
        return min(sm, 100)
    return 120 if shared_memory(sm) == SHARED[120] else 80


def summed_columns(sm: int, itemsize: int) -> int:
    """The number of sums of a row in a forward. On sm_90 in half precision several spare its lanes
    an exchange, see `sum_columns`; elsewhere one, since more take scarce registers."""
    return 8 if sm in (0, 90) and itemsize == 2 else 1


def padded_head_size(size: int) -> int:
    """A head size as one tile holds it: a power of two, and at least 16, as matrix units need."""
    return 16 if size <= 16 else 1 << (size - 1).bit_length()


def held_head_size(size: int) -> int:
    """A head size of q and k as kernels hold it, in pieces if it is wide: 576 as 512 + 64."""
    return padded_head_size(size) if size <= HELD else HELD + padded_head_size(size - HELD)


def shared_memory(sm: int) -> int:
    """Bytes of shared memory for one program, or the least of all if unknown."""
    return SHARED.get(sm, LEAST_SHARED)


LEAST = 16  # queries or keys at a time in matrix units
FEW_SPILLED = 256  # bytes of a thread's registers in memory that no tile has to name
# From this many rows on, Triton gives products of float32 to the tensor cores of sm_100. They round
# factors to TF32, even if a kernel asks for IEEE: seen with dropout, under 3.6.0 to 3.7.1.
IMPRECISE_ROWS = 64

# Other tilings than the table's, for tuning: each changes the tilings of a plan.
VARIANTS: dict[str, Callable[[Tiling], Tiling]] = {
    "half the queries": lambda t: evolve(t, block_m=max(LEAST, t.block_m // 2)),
    "half the keys": lambda t: evolve(t, block_n=max(LEAST, t.block_n // 2)),
    "twice the queries": lambda t: evolve(t, block_m=2 * t.block_m),
    "twice the keys": lambda t: evolve(t, block_n=2 * t.block_n),
    "twice the keys and warps": lambda t: evolve(t, block_n=2 * t.block_n, warps=2 * t.warps),
    "half the warps": lambda t: evolve(t, warps=max(4, t.warps // 2)),
    "half the queries and warps": lambda t: evolve(
        t, block_m=max(LEAST, t.block_m // 2), warps=max(4, t.warps // 2)
    ),
    "half the keys and warps": lambda t: evolve(
        t, block_n=max(LEAST, t.block_n // 2), warps=max(4, t.warps // 2)
    ),
    "a stage less": lambda t: evolve(t, stages=max(1, t.stages - 1)),
    "a stage more": lambda t: evolve(t, stages=t.stages + 1),
}
INTERPRETED = Tiling(32, 32, 4, 1)
INTERPRETED_SPLIT = Tiling(16, 32, 4, 1)
DELTA = Tiling(64, 0, 4, 1)  # reads each row once, and no keys
SUMS = Tiling(0, 16, 4, 1)  # adds up heads; each row is read once
MERGE = Tiling(1, 16, 4, 1)  # joins the parts of few rows, 16 at a time
MERGE_ROWS = Tiling(4, 4, 4, 1)  # joins the parts of many rows
LISTS = Tiling(0, 0, 4, 1)  # for the kernels of lists, without tiles of their own

# Of few rows, by bytes of an element and the larger width: keys of a tile, warps, and tiles in
# flight. These kernels wait for memory, and sixteen rows leave registers for many copies. Products
# of float32 take registers: eight warps avoid the spills of four.
MOST_SPLIT_ROWS = 64
SPLIT = {
    2: {16: (128, 4, 3), 32: (128, 4, 3), 64: (128, 4, 3), 128: (64, 4, 3), 256: (32, 4, 3)},
    4: {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 2), 128: (64, 8, 2), 256: (16, 4, 2)},
}
# In float32, by width and rows of a tile, if more rows need more warps.
SPLIT_MANY = {(128, 64): (32, 16, 2), (256, 32): (16, 8, 2), (256, 64): (16, 16, 1)}
# Of heads 512 wide and wider: the most rows of a tile, since sums of more would fill the registers,
# and by row of the table, as far as shared memory goes, the others.
WIDE_SPLIT_ROWS = {2: 32, 4: 16}
WIDE_SPLIT = {
    2: {80: (32, 8, 2), 90: (64, 8, 2), 100: (32, 8, 2), 120: (16, 8, 2)},
    4: dict.fromkeys(ARCHS, (16, 8, 1)),
}

# (compute capability, bytes of an element, pass): width: feature: tile. In half precision and 64 or
# 128 wide, the tiles of 80, 90 and 120, and of 100 for dk and dv without modifiers, are the fastest
# candidates predicted by docs/generate/predict.py: most resident warps, then fewest instructions of
# a score, and a few spilled registers if the whole wins. All others are the largest tried without
# spills under Triton 3.7.1, or with as many as they say. docs/reports/kernels.md has the compiled
# figures of most of them, and a test compiles part of it again, under other versions too. Products
# of float32 have fewer than IMPRECISE_ROWS rows on 100.
Table = dict[tuple[int, int, str], dict[int, dict[str, Tiling]]]
NONE = "-"  # a feature has no tile of its own


def read_cell(cell: str) -> Tiling:
    """`128x64/8.2`: queries x keys, warps, stages; then a quote sets `apart`, and `~512` spills."""
    sizes, _, spills = cell.partition("~")
    rows, columns, warps, stages = map(int, re.split(r"[x/.]", sizes.rstrip("'")))
    return Tiling(rows, columns, warps, stages, sizes.endswith("'"), int(spills or 0))


def read_tilings() -> Table:
    """The tilings of tilings.txt, by capability, bytes and pass, then by width, then by feature."""
    table: Table = {}
    lines = Path(__file__).with_name("tilings.txt").read_text(encoding="utf-8").splitlines()
    for line in (x for x in lines if not x.startswith("#")):
        arch, itemsize, pass_, feature, *cells = line.split()
        for sm in ARCHS if arch == "*" else [int(arch)]:
            by_width = table.setdefault((sm, int(itemsize), pass_), {})
            for width, cell in zip(WIDTHS, cells, strict=False):
                tiles = by_width.setdefault(width, {})
                tiles |= {} if cell == NONE else {feature: read_cell(cell)}
    return table


TABLE = read_tilings()
# By row of the table, widths with tiles brought by the copy engine in half precision: with others
# kernels were no faster, or spilled.
COPYING = {90: (64, 128)}
# It takes fewer registers, and other tiles are faster with it: without modifiers, with modifiers,
# and with a mask decided by data, which spills most.
COPIED: dict[tuple[int, str, int], tuple[Tiling, Tiling, Tiling]] = {
    (90, "forward", 128): (
        Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 2), Tiling(128, 64, 4, 2),
    ),
    (90, "query_gradient", 128): (
        Tiling(128, 128, 8, 2), Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 2),
    ),
    (90, "key_gradient", 128): (
        Tiling(64, 64, 4, 2), Tiling(32, 64, 4, 2), Tiling(32, 64, 4, 2),
    ),
}  # fmt: skip
# And under a narrow mask, where larger tiles would hold many dropped places; its speed at a place,
# as a share of the usual tile's.
SHORT = {(90, "query_gradient", 128): (Tiling(64, 64, 4, 2), 0.85)}
# Tiles made for two programs on a multiprocessor, by row of the table, side and width: the variant
# for one program alone there. And rows of the table with tiles of FULL warps that may be halved.
FULL = 8  # warps for full speed of a multiprocessor
ALONE = {
    (80, "queries", 64): "half the queries",
    (90, "queries", 64): "half the queries",
    (90, "queries", 128): "twice the keys and warps",
}
HALVED = ((80, "queries"), (90, "queries"), (90, "keys"), (120, "queries"), (120, "keys"))
# Float32 has no matrix units here, and 80's tiles fit the least shared memory.
TABLE |= {(120, 4, pass_): TABLE[80, 4, pass_] for pass_ in get_args(Pass)}

# Without matrix units one tile does for all in float32.
for (_, itemsize, pass_), tiles in TABLE.items():
    if itemsize == 4 and pass_ in get_args(Pass):
        tile = Tiling(16, 16, 8, 1, pass_ == "key_gradient")
        tiles[HELD] = {"plain": tile, "modified": tile}
WIDE_GRADIENT = 139264  # bytes of shared memory of these in a gradient, by machine code,
WIDE_TF32 = 163840  # and of tiles 256 wide with TF32
