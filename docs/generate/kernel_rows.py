"""What the report of kernels says of one kernel: the cells of its row, and what is not clean."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.kernels.tilings import SHARED, Tiling, padded_head_size
from attn_graph.lowering.codegen.machine_code import MachineCode
from attn_graph.lowering.codegen.tile_lists import blocks
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.launch_list import BY_KEYS
from attn_graph.masks.places import Block, Place
from attn_graph.sparsity.tiles import bound_tiles
from attn_graph.spec import NAMES
from docs.generate.predict import (
    PROCESSORS,
    Clocks,
    Processor,
    TileWork,
    predict_clocks,
    slots_per_score,
)
from docs.generate.sass import Body, read_body

TARGETS = {80: "a100", 89: "l40s", 90: "h200", 100: "b200", 120: "b200"}  # 120: but for its sm
PASSES = ("forward", "query_gradient", "key_gradient")
PUSHES = ("push", "push_query_gradient", "push_key_gradient")  # with tangents of all they read
SPLIT = "split_forward"  # of few queries, whose keys several programs share
PRODUCTS: dict[str, int] = dict(
    zip((*PASSES, *PUSHES, SPLIT), (2, 3, 4, 6, 8, 10, 2), strict=True)
)  # by pass
SPILLS = 6  # one in so many instructions of a loop may move a register to memory or back
GROUPED = 64  # rows of the least tile that instructions of four warps take
JOBS = int(os.environ.get("JOBS", os.cpu_count() or 1))
C = TypeVar("C")


def target_of(sm: int) -> ag.Target:
    """A GPU of a compute capability."""
    return evolve(ag.Target.of(TARGETS[sm]), sm=sm)


@final
@frozen
class Row:
    """What compiling a case gave.

    text: the line of the page. seconds, flop: of the whole kernel, for the pairs that the mask
    keeps; 0 where data decide. complaints: what is not clean.
    """

    text: str
    seconds: float
    flop: float
    complaints: tuple[str, ...]


@final
@frozen
class Kernel:
    """What judges the machine code of a kernel. bytes: of an element. size: D = E. rows: of its
    tile, where they may be fewer than 64."""

    sm: int
    bytes: int
    size: int
    pass_: str
    rows: int = GROUPED

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of so many bytes."""
        return torch.bfloat16 if self.bytes == 2 else torch.float32

    def programs(self, machine: MachineCode) -> int:
        """How many programs of a kernel are resident."""
        return PROCESSORS[self.sm].programs(machine.registers, machine.warps, machine.shared)

    def clocks_of(
        self, machine: MachineCode, tile: Tiling, launches: int, body: Body | None = None
    ) -> Clocks:
        """What a kernel, one of `launches` that share the pass's products, takes. body: its loops,
        if they are other than those that are read."""
        width = padded_head_size(self.size)
        rows, tensors = tile.block_m if self.pass_ in BY_KEYS else tile.block_n, 2
        if self.pass_ in PUSHES:
            tensors = 4
        flop = 2 * PRODUCTS[self.pass_] * tile.block_m * tile.block_n * width / launches
        work = TileWork(flop if self.bytes == 2 else 0, tensors * rows * width * self.bytes)
        at = PROCESSORS[self.sm]
        return predict_clocks(
            at, body or read_body(machine.sass), work, machine.warps, self.programs(machine)
        )

    def resources(self, codes: list[MachineCode], scores: int) -> Iterator[object]:
        """The cells from registers to slots, of all launches of the pass, and instructions."""
        worst = max(codes, key=lambda m: (m.spilled, m.registers))
        bodies = [read_body(m.sass) for m in codes]
        yield worst.registers
        yield max(m.shared for m in codes)
        yield worst.spilled
        yield max(body.full.spills for body in bodies)
        programs = min(map(self.programs, codes))
        yield programs
        yield programs * worst.warps
        full, mixed = (
            sum(slots_per_score(loop, worst.warps, scores) for loop in loops)
            for loops in ([x.full for x in bodies], [x.mixed for x in bodies])
        )
        yield f"{full:.1f} / {mixed:.1f}"
        counts = *worst.instructions, ("begun anew", max(m.renewed for m in codes))
        yield ", ".join(f"{n} {name}" for name, n in counts if n)

    def complaints(self, machine: MachineCode) -> Iterator[str]:
        """What is not clean about a kernel's machine code."""
        counts = dict(machine.instructions)
        limit = SHARED[self.sm]
        loop = read_body(machine.sass).full
        if loop.spills * SPILLS > loop.issued:
            yield f"{loop.spills} of the {loop.issued} instructions of its loop move registers"
        if machine.serialized:
            yield "matrix products are serialized"
        if machine.shared > limit:
            yield f"{machine.shared} bytes of shared memory, {limit} are there"
        if machine.registers * 32 * machine.warps > 65536:
            yield f"{machine.registers} registers on {machine.warps} warps, 65536 are there"
        grouped = {90: "wgmma", 100: "tcgen05"} if self.rows >= GROUPED else {}
        kind = grouped.get(self.sm, "mma")
        if self.bytes == 2 and not counts[kind]:
            yield f"not this architecture's matrix instructions: {counts}"
        if not counts["cp.async"] and not counts["tma"]:
            yield "no asynchronous copies"


def show_tile(tile: Tiling) -> str:
    """A tiling in words."""
    size = f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages"
    return size + (", dk and dv apart" if tile.apart else "")


def seconds_and_pairs(
    clocks: Clocks, at: Processor, problem: Problem, tile: Tiling, by_keys: bool
) -> tuple[float, int] | None:
    """The time of a whole kernel, and how many pairs its mask keeps; None where data decide."""
    p, mask = problem, problem.node.mask
    lines = blocks(p.N, tile.block_n) if by_keys else blocks(p.M, tile.block_m)
    heads = p.B * p.H
    if mask is None:
        tiles = blocks(p.M, tile.block_m) * blocks(p.N, tile.block_n)
        return clocks.seconds(at, heads * tiles, 0, heads * lines), heads * p.M * p.N
    if mask.needs:
        return None
    kinds = bound_tiles(mask, Block.whole(p.sizes), (tile.block_m, tile.block_n))
    full, mixed = (int((kinds == kind).sum()) * heads for kind in (2, 1))
    places = Block(range(1), range(1), range(p.M), p.H, p.M, p.N)
    kept = torch.as_tensor(mask.keep(Place.of(places, range(p.N))))
    return clocks.seconds(at, full, mixed, heads * lines), heads * int(kept.sum())


def row_of(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def first_cells(case: Any, variant: str, tile: Tiling) -> Iterator[object]:  # Any: of the report
    """The cells that say which kernel it is."""
    kernel: Kernel = case.kernel
    yield from (kernel.sm, NAMES[kernel.dtype], kernel.size, kernel.pass_, variant)
    yield show_tile(tile)


def measure_cases(cases: Sequence[C], measure: Any) -> dict[C, Any]:  # Any: of C, to what it says
    """What measuring each case gives; compiled on all cores."""
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(measure, cases), strict=True))
