"""The part of docs/reports/kernels.md on packed tensors, keys in pages and few queries."""

from __future__ import annotations

from itertools import product
from typing import Any, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.machine_code import MachineCode
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem, facts_of, sole
from attn_graph.lowering.triton.launch_list import BY_KEYS
from attn_graph.lowering.triton.plan import Flash, compile_launches
from docs.generate.kernel_rows import (
    PASSES,
    PRODUCTS,
    SPLIT,
    Kernel,
    Row,
    first_cells,
    measure_cases,
    row_of,
    seconds_and_pairs,
    target_of,
)
from docs.generate.predict import LATENCY, PROCESSORS, TileWork, predict_clocks
from docs.generate.sass import read_body

MERGE = "merge_parts"
H, G = 32, 8  # heads of queries, and of keys
SEQUENCES, CHUNK, PACKED, CACHE, LONG = 8, 512, 2048, 4096, 32768  # a batch, and lengths
SMS, SIZES, PAGE_ROWS = (80, 90, 100), (64, 128), 16
HEADING = "## Packed tensors, pages and few queries"
HEAD = """
{heading}

32 query heads, 8 of keys. "packed" are 8 sequences of up to 2048 rows, causal; "pages of 16" are 8
chunks of 512 queries against caches of 4096 keys in pages of 16 rows, causal bottom right; "packed,
pages of 16" is the same with packed queries. "whole" takes all sequences to be as long as they may
be. What adds up gradients of pages is not in it.

| {columns} |
|{dashes}|
{rows}

One query against a cache of 32768 keys, with lengths: `split_forward`, in which programs share the
keys of a head and each key is read once, and `merge_parts`, which joins its parts. "packed, pages
of 16": the query is one row of a packed tensor. The time is that of the busiest multiprocessor by
the same model, or of reading the cache at the GPU's bandwidth, whichever is longer, and of merging;
GB/s are bytes of keys and values in that time. What launching takes is not in it.

| {few_columns} |
|{few_dashes}|
{few_rows}

Goals for some of them, set before the kernels were written by sketches with tiles of their own:
registers of a thread with nothing spilled. "programs": more registers, and as many programs of a
multiprocessor as with the goal's.

| {goal_columns} |
|{goal_dashes}|
{goal_rows}
"""
COLUMNS = (
    *("sm", "dtype", "D", "pass", "variant", "tile", "registers", "shared", "spilled"),
    *("in the loop", "programs", "warps", "slots", "instructions", "TFLOP/s, full", "whole"),
)
FEW_COLUMNS = (*COLUMNS[:-2], "registers to merge", "parts", "GB/s", "ms")
GOAL_COLUMNS = ("sm", "D", "kernel", "variant", "goal", "registers", "spilled", "holds")


@final
@frozen(order=True)
class ServingCase:
    """A kernel to compile. bytes: of an element. size: D = E. packed: whether q is, and k where
    page is 0. page: rows of one; 0: keys in one piece. queries: of an entry, 1 for SPLIT."""

    sm: int
    bytes: int
    size: int
    pass_: str
    packed: bool = False
    page: int = 0
    queries: int = CHUNK

    @property
    def kernel(self) -> Kernel:
        """What judges its machine code."""
        rows = self.queries * (H // G) if self.pass_ == SPLIT else CHUNK
        return Kernel(self.sm, self.bytes, self.size, self.pass_, rows)

    @property
    def variant(self) -> str:
        """How tensors lie, in words."""
        pages = f"pages of {self.page}" * bool(self.page)
        return ", ".join(filter(None, ("packed" * self.packed, pages))) or "one piece"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Entries, and queries and keys of the longest."""
        if self.pass_ in (SPLIT, MERGE):
            return 1, self.queries, LONG
        M, N = (self.queries, CACHE) if self.page else (PACKED, PACKED)
        return SEQUENCES, M, N

    def graph(self) -> ag.Graph:
        """An attention that runs the kernel."""
        (B, M, N), spec = self.sizes, ag.TensorSpec
        q: tuple[int, ...] = (B, H, M, self.size)
        k: tuple[int, ...] = (B, G, N, self.size)
        causal = ag.Causal("bottom_right" if self.page or self.pass_ == SPLIT else "top_left")
        options: dict[str, Any] = {"mask": None if M == 1 else causal}
        if self.packed:
            q, k = ((B * n, h, self.size) for h, n in ((H, M), (G, N)))
            options["q_starts"] = spec((B + 1,), torch.int32)
            options["max_lengths"] = (M, None if self.page else N)
        if self.page:
            k = (B * N // self.page, self.page, G, self.size)
            options["pages"] = spec((B, N // self.page), torch.int32)
        if not self.packed or self.page:
            options["kv_lengths"] = spec((B,), torch.int32)
        keys = spec(k, self.kernel.dtype)
        return ag.attention(spec(q, self.kernel.dtype), keys, keys, **options)

    def flash(self) -> Flash:
        """All launches of the attention, or of its gradient, whichever the kernel is of."""
        forward, backward = ag.vjp(self.graph(), ["q", "k", "v"])
        gradient = self.pass_ in PASSES[1:]
        lying = facts_of(simplify(backward if gradient else forward)).once(Lying.of)
        assert lying is not None
        return Flash.plan(lying, target_of(self.sm))

    def compile(self) -> tuple[Flash, list[MachineCode]]:
        """The launches of this kernel, and their machine code."""
        flash = self.flash()
        own = tuple(launch for launch in flash.launches if launch.kernel == self.pass_)
        flash = evolve(flash, launches=own)
        return flash, compile_launches(flash)

    def dense(self) -> Problem:
        """The same with all sequences as long as they may be, and each by itself."""
        (B, M, N), spec = self.sizes, ag.TensorSpec
        q, k = (spec((B, h, n, self.size), self.kernel.dtype) for h, n in ((H, M), (G, N)))
        problem = sole(simplify(ag.attention(q, k, k, mask=ag.Causal("bottom_right"))))
        assert problem is not None
        return problem

    def measure(self) -> Row:
        """Compile it: its row of the page."""
        return self.measure_few() if self.pass_ == SPLIT else self.measure_many()

    def measure_many(self) -> Row:
        """The row of a kernel whose programs take all keys, or all queries."""
        flash, codes = self.compile()
        tile, at, kernel = tile_of(flash), PROCESSORS[self.sm], self.kernel
        flop, scores = 2 * PRODUCTS[self.pass_] * self.size, tile.block_m * tile.block_n
        full, *more = (kernel.clocks_of(m, tile, len(codes)) for m in codes)
        clocks = sum(more, start=full)
        whole = seconds_and_pairs(clocks, at, self.dense(), tile, self.pass_ in BY_KEYS)
        assert whole is not None  # no data decide
        seconds, pairs = whole
        rates = flop * scores / clocks.full * at.count * at.clock, flop * pairs / seconds
        cells = *first_cells(self, self.variant, tile), *kernel.resources(codes, scores)
        text = row_of(*cells, *(f"{rate / 1e12:.0f}" for rate in rates))
        return Row(text, seconds, flop * pairs, self.complaints(codes))

    def measure_few(self) -> Row:
        """The row of a kernel whose programs share the keys of a head."""
        flash, (split,) = self.compile()
        tile, ((merge,), seconds) = tile_of(flash), (self.merging(), self.seconds(flash, split))
        p, parts = flash.problem, flash.launches[0].fixed["SPLITS"]
        read = p.B * p.G * p.N * (p.D + p.E) * self.bytes
        scores = tile.block_m * tile.block_n
        text = row_of(
            *first_cells(self, self.variant, tile),
            *self.kernel.resources([split], scores),
            *(merge.registers, parts, f"{read / seconds / 1e9:.0f}", f"{seconds * 1e3:.3f}"),
        )
        complaints = self.complaints([split])
        if merge.spilled:
            complaints += (f"{self}: merging spills {merge.spilled} bytes",)
        flop = 2 * PRODUCTS[SPLIT] * self.size * p.B * p.H * p.M * p.N
        return Row(text, seconds, flop, complaints)

    def merging(self) -> list[MachineCode]:
        """The machine code of what joins the parts."""
        return evolve(self, pass_=MERGE).compile()[1]

    def seconds(self, flash: Flash, split: MachineCode) -> float:
        """The time of both kernels, predicted."""
        (launch,), p, at = flash.launches, flash.problem, PROCESSORS[self.sm]
        tile, bandwidth = tile_of(flash), flash.target.bandwidth
        parts: int = launch.fixed["SPLITS"]
        assert bandwidth is not None
        busiest = -(-launch.grid // at.count)
        resident = min(busiest, self.kernel.programs(split))
        tiles = -(-p.N // (parts * tile.block_n))
        flop = 2 * PRODUCTS[SPLIT] * tile.block_m * tile.block_n * self.size
        bytes_ = tile.block_n * (p.D + p.E) * self.bytes
        work = TileWork(flop if self.bytes == 2 else 0, bytes_)
        clocks = predict_clocks(at, read_body(split.sass), work, split.warps, resident)
        computing = busiest * (tiles * clocks.full + clocks.program) / at.clock
        reading = p.B * p.G * p.N * (p.D + p.E) * self.bytes / bandwidth
        merging = LATENCY / at.clock + 2 * flash.scratch.bytes / bandwidth
        return max(computing, reading) + merging

    def complaints(self, codes: list[MachineCode]) -> tuple[str, ...]:
        """What is not clean."""
        return tuple(f"{self}: {text}" for m in codes for text in self.kernel.complaints(m))


def tile_of(flash: Flash) -> Tiling:
    """The tile of launches of one kernel."""
    launch = flash.launches[0]
    blocks = launch.fixed["BLOCK_M"], launch.fixed["BLOCK_N"]
    return Tiling(*blocks, launch.warps, launch.stages, len(flash.launches) > 1)


@final
@frozen(order=True)
class Goal:
    """Registers that a kernel is to do with, and spill nothing."""

    case: ServingCase
    registers: int

    def measure(self) -> str:
        """Its row of the page."""
        case, machine = self.case, self.case.compile()[1][0]
        cells = self.registers, machine.registers, machine.spilled, self.verdict(machine)
        return row_of(case.sm, case.size, case.pass_, case.variant, *cells)

    def verdict(self, machine: MachineCode) -> str:
        """Whether it holds."""
        if machine.spilled:
            return "no"
        goal = evolve(machine, registers=self.registers)
        same = self.case.kernel.programs(machine) >= self.case.kernel.programs(goal)
        return "yes" if machine.registers <= self.registers else "programs" if same else "no"


def all_goals() -> list[Goal]:
    """The goals of the page: sm, D, rows of a page and queries, registers."""
    packed = (90, 64, 255), (80, 64, 203), (90, 128, 255), (80, 128, 255), (90, 256, 239)
    split = (
        *((90, 128, 64, 1, 146), (90, 128, 16, 1, 124), (80, 128, 64, 1, 150)),
        *((80, 128, 16, 1, 122), (90, 128, 128, 1, 188), (90, 128, 64, 16, 176)),
        *((90, 64, 16, 1, 105), (90, 256, 16, 1, 168), (80, 64, 16, 1, 96)),
        *((80, 256, 16, 1, 96), (80, 128, 1, 1, 94)),
    )
    return [
        *(
            Goal(ServingCase(sm, 2, D, "forward", True), n)
            for sm, D, n in (*packed, (80, 256, 246))
        ),
        *(Goal(ServingCase(sm, 2, D, SPLIT, False, P, M), n) for sm, D, P, M, n in split),
        *(Goal(ServingCase(sm, 2, 128, MERGE, queries=1), 40) for sm in (90, 80)),
    ]


def serving_cases() -> tuple[list[ServingCase], list[ServingCase]]:
    """The kernels of many queries, and those of one."""
    places = (True, 0), (False, PAGE_ROWS), (True, PAGE_ROWS)
    many = [
        ServingCase(sm, 2, size, pass_, *place)
        for sm, size, place, pass_ in product(SMS, SIZES, places, PASSES)
    ]
    few = [
        ServingCase(sm, bytes_, size, SPLIT, *place, 1)
        for sm, bytes_, size, place in product(SMS, (2, 4), SIZES, ((False, 0), *places[1:]))
    ]
    return many, few


def serving_section() -> tuple[str, list[str]]:
    """This part of the page, and what is not clean."""
    cases = serving_cases()
    many, few = (measure_cases(each, ServingCase.measure) for each in cases)
    goals = measure_cases(all_goals(), Goal.measure)
    tables = {
        "": (COLUMNS, [row.text for row in many.values()]),
        "few_": (FEW_COLUMNS, [row.text for row in few.values()]),
        "goal_": (GOAL_COLUMNS, [*goals.values()]),
    }
    parts = {"heading": HEADING}
    for name, (columns, rows) in tables.items():
        parts |= {f"{name}columns": " | ".join(columns), f"{name}rows": "\n".join(rows)}
        parts[f"{name}dashes"] = "|".join("---" for _ in columns)
    return HEAD.format(**parts), [
        x for row in (*many.values(), *few.values()) for x in row.complaints
    ]
