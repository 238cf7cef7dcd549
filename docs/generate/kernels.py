"""Writes docs/reports/kernels.md, what the machine code of each kernel needs: `make kernel-report`.

Kernels are compiled for GPUs that the machine need not have. A test compiles some of the cases
again and fails if the table says otherwise, or if a kernel is not clean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.kernels.tilings import ARCHS, SHARED, Tiling, padded_head_size
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.launch_list import BY_KEYS
from attn_graph.lowering.triton.offline import MachineCode, compile_launches
from attn_graph.lowering.triton.plan import Flash
from attn_graph.lowering.triton.predict import (
    BALANCE,
    PROCESSORS,
    Clocks,
    Processor,
    TileWork,
    predict_clocks,
    slots_per_score,
)
from attn_graph.lowering.triton.tile_lists import blocks, classify_blocks
from attn_graph.lowering.triton.tiles import choose_push_tiling, choose_tiling
from attn_graph.lowering.triton.work import Work, split_graph
from attn_graph.masks.places import Block, Place
from attn_graph.spec import NAMES
from docs.generate.tutorial import TILE, compile_tutorial

PAGE = Path(__file__).parents[1] / "reports" / "kernels.md"
TARGETS = {80: "a100", 89: "l40s", 90: "h200", 100: "b200", 120: "b200"}  # 120: but for its sm
PASSES = ("forward", "query_gradient", "key_gradient")
PUSHES = ("push", "push_query_gradient", "push_key_gradient")  # with tangents of all they read
PRODUCTS = dict(zip((*PASSES, *PUSHES), (2, 3, 4, 6, 8, 10), strict=True))  # by pass
B, H, S = 2, 16, 4096
JOBS = int(os.environ.get("JOBS", os.cpu_count() or 1))
SPILLS = 6  # one in so many instructions of a loop may move a register to memory or back
VARIANTS = (
    *("no mask", "causal", "window", "bias", "soft cap", "alibi", "dropout", "segments", "prefix"),
    *("grouped heads", "sinks", "lengths", "boolean mask"),
)
SHORT = ("causal", "soft cap")
HEAD = """\
# What the kernels compile to

Written by `make kernel-report` with triton {triton}, without a GPU. Each line of the second table
is a kernel for one compute capability, dtype, head size (D = E) and pass. Registers are those of
one thread, shared memory and spills in bytes; "in the loop" says how many instructions of the loop
over full tiles move a spilled register. "programs" are resident on one multiprocessor, with so
many "warps". "slots" are instructions of one lane for each score, in full tiles and in mixed ones.

TFLOP/s are predicted by the model of `attn_graph/lowering/triton/predict.py`, which says what it
was compared with and what not: of full tiles alone, and of the whole kernel with 4096 queries and
keys, counting only pairs that the mask keeps ("-": data decide). They assume that the busiest
multiprocessor has {balance} of the mean work. sm_80 is an A100, 89 an L40S, 90 an H200, 100 a
B200, 120 an RTX PRO 6000. Tiles of 120 serve 86 and 89 too.

"window" is causal and 256 keys wide; "prefix" causal, or among the first 256 keys; "alibi" to
"lengths" are causal besides; "grouped heads" are four query heads to one of keys. "push" is forward
mode with tangents of q, k and v: six products, where the forward has two. "push_query_gradient" and
"push_key_gradient" are the backward in a direction, with a tangent of do as well: eight products
and ten, where the backward has three and four.

{summary}

Candidates for the forward on sm_90, bf16, D = 128, that were compiled and predicted in the same way
with triton 3.7.1. Programs of 128 x 128 on eight warps are alone on a multiprocessor: tensor cores
and exponentials take turns, and 480 is the most whatever else they issue. Two programs of four
warps overlap, and there the sum of each row counts: eight columns of it are kept, which costs no
exchange between lanes, 496 and 468 before. What they spill is the addresses of tiles: one load in
the loop over full tiles, and 33 to 39 loads and stores in 800 instructions of that over mixed ones,
which are reckoned in. Where programs are fewer than multiprocessors, the plan takes 128 x 128 all
the same. sm_80, 100 and 120 keep one sum of a row: with eight, registers are short.

| tile | spilled | in the loop | programs | slots | no mask | causal |
|---|---|---|---|---|---|---|
| 128 x 64, 4 warps, 2 stages | 120 | 1 | 2 | 9.5 / 12.3 | 500 | 471 |
| 128 x 128, 8 warps, 2 stages | 0 | 0 | 1 | 7.5 / 9.9 | 472 | 443 |
| 256 x 64, 8 warps, 2 stages | 120 | 1 | 1 | 9.5 / 12.4 | 454 | 413 |
| 128 x 64, 8 warps, 2 stages | 0 | 0 | 1 | 10.1 / 12.3 | 440 | 414 |
| 128 x 64, 8 warps, 3 stages | 0 | 0 | 1 | 10.3 / 12.7 | 434 | 405 |
| 128 x 32, 4 warps, 2 stages | 0 | 0 | 2 | 14.2 / 17.3 | 434 | 410 |
| 128 x 64, 4 warps, 3 stages | 184 | 0 | 1 | 9.4 / 13.4 | 389 | 362 |
| 256 x 32, 8 warps, 2 stages | 0 | 0 | 1 | 14.2 / 17.2 | 384 | 351 |
| 64 x 64, 4 warps, 2 stages | 0 | 0 | 2 | 10.0 / 12.3 | 325 | 314 |
| 64 x 128, 4 warps, 2 stages | 0 | 0 | 1 | 7.5 / 9.9 | 322 | 304 |

Whole kernels beside others for the same, compiled in the same run and judged by the same model, in
TFLOP/s: FlexAttention's templates of torch {torch} with the tiles that Inductor takes without a
search, and the forward of Triton's tutorial, 128 x 128, 8 warps, by the copy engine. What Flex
spills is in bytes. A GPU that has the choice of the `gluon` backend or of cuDNN does not run ours.

{beside}

| {columns} |
|{dashes}|
"""
COLUMNS = (
    *("sm", "dtype", "D", "pass", "variant", "tile", "registers", "shared", "spilled"),
    *("in the loop", "programs", "warps", "slots", "instructions", "TFLOP/s, full", "whole"),
)
SUMMARY = """\
| sm | D | forward | causal | soft cap | window | backward | causal | soft cap | window |
|---|---|---|---|---|---|---|---|---|---|
"""

BESIDE = """\
| sm | D | variant | forward | Flex | it spills | tutorial | backward | Flex | it spills |
|---|---|---|---|---|---|---|---|---|---|
"""


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
@frozen(order=True)
class Case:
    """A kernel to compile. bytes: of an element. size: D = E."""

    sm: int
    bytes: int
    size: int
    pass_: str
    variant: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of so many bytes."""
        return torch.bfloat16 if self.bytes == 2 else torch.float32

    def graph(self) -> ag.Graph:
        """An attention that runs the kernel."""
        x = ag.TensorSpec((B, H, S, self.size), self.dtype)
        k = ag.TensorSpec((B, H // 4, S, self.size), self.dtype)
        segments = ag.TensorSpec((B, S), torch.int32)
        causal = {"mask": ag.Causal()}
        options: dict[str, dict[str, Any]] = {
            "no mask": {},
            "causal": causal,
            "window": {"mask": ag.Causal() & ag.Window(255)},
            "bias": {"bias": ag.TensorSpec((1, H, S, S), self.dtype)},
            "soft cap": {"soft_cap": 30.0},
            "alibi": causal | {"alibi": True},
            "dropout": causal | {"dropout": 0.1},
            "segments": causal | {"segments": (segments, segments)},
            "prefix": {"mask": ag.Causal() | ag.Prefix(256)},
            "grouped heads": causal,
            "sinks": causal | {"sinks": ag.TensorSpec((H,), torch.float32)},
            "lengths": causal | {"kv_lengths": ag.TensorSpec((B,), torch.int32)},
            "boolean mask": {"keep": ag.TensorSpec((B, 1, S, S), torch.bool)},
        }
        keys = k if self.variant == "grouped heads" else x
        return ag.attention(x, keys, keys, **options[self.variant])

    def work(self) -> Work:
        """The attention, its gradient, or forward mode of one, whichever the pass is of."""
        forward, backward = ag.vjp(self.graph(), ["q", "k", "v"])
        graph = forward if self.pass_ in ("forward", "push") else backward
        if self.pass_ in PUSHES:
            given = ["o", "lse", "do"] if graph is backward else []
            graph = ag.jvp(graph, ["q", "k", "v", *given])
        return split_graph(graph)[-1].work

    def problem(self) -> Problem:
        """The attention or its gradient, whichever the pass is of."""
        return self.work().problem

    def compile(self) -> tuple[Problem, Tiling, list[MachineCode]]:
        """The problem, its tiling, and the machine code of every launch of the pass."""
        target = evolve(ag.Target.of(TARGETS[self.sm]), sm=self.sm)
        work, problem = self.work(), self.problem()
        flash = Flash.plan(work, target)
        launches = tuple(launch for launch in flash.launches if launch.kernel == self.pass_)
        choose: Any = choose_push_tiling if self.pass_ in PUSHES else choose_tiling  # Any: by pass
        tile = choose(problem, target, self.pass_)
        return problem, tile, compile_launches(evolve(flash, launches=launches))

    def measure(self) -> Row:
        """Compile it: the row of the page."""
        problem, tile, codes = self.compile()
        at, flop = PROCESSORS[self.sm], 2 * PRODUCTS[self.pass_] * self.size
        full, *more = (self.clocks_of(m, tile, len(codes)) for m in codes)
        clocks = sum(more, start=full)
        whole = seconds_and_pairs(clocks, at, problem, tile, self.pass_ in BY_KEYS)
        seconds, pairs = whole or (0.0, 0)
        scores = tile.block_m * tile.block_n
        rates = (
            f"{flop * scores / clocks.full * at.count * at.clock / 1e12:.0f}",
            f"{flop * pairs / seconds / 1e12:.0f}" if whole else "-",
        )
        cells = (
            *(self.sm, NAMES[self.dtype], self.size, self.pass_, self.variant, show_tile(tile)),
            *self.resources(codes, scores),
            *rates,
        )
        complaints = tuple(f"{self}: {text}" for m in codes for text in self.complaints(m))
        return Row(f"| {' | '.join(map(str, cells))} |", seconds, flop * pairs, complaints)

    def programs(self, machine: MachineCode) -> int:
        """How many programs of a kernel are resident."""
        return PROCESSORS[self.sm].programs(machine.registers, machine.warps, machine.shared)

    def beside(self, name: str) -> Row:
        """The row of another's kernel for the case; its text is what it spills."""
        from docs.generate.flex import FlexCase  # of Inductor's insides, which versions change

        if name == "tutorial":
            tile, machine = TILE, compile_tutorial(self.sm, self.size, self.variant == "causal")
        else:
            flex = FlexCase(self.sm, (B, H, S, self.size), self.variant)
            tile, machine = flex.compile_pass(self.pass_)
        clocks, problem = self.clocks_of(machine, tile, 1), self.problem()
        by_keys = self.pass_ in BY_KEYS
        whole = seconds_and_pairs(clocks, PROCESSORS[self.sm], problem, tile, by_keys)
        assert whole is not None  # of masks that no data decide
        seconds, pairs = whole
        flop = 2 * PRODUCTS[self.pass_] * self.size * pairs
        return Row(str(machine.spilled), seconds, flop, ())

    def clocks_of(self, machine: MachineCode, tile: Tiling, launches: int) -> Clocks:
        """What a kernel, one of `launches` that share the pass's products, takes."""
        width = padded_head_size(self.size)
        rows, tensors = tile.block_m if self.pass_ in BY_KEYS else tile.block_n, 2
        if self.pass_ in PUSHES:
            tensors = 4
        flop = 2 * PRODUCTS[self.pass_] * tile.block_m * tile.block_n * width / launches
        work = TileWork(flop if self.bytes == 2 else 0, tensors * rows * width * self.bytes)
        at = PROCESSORS[self.sm]
        return predict_clocks(at, machine.body, work, machine.warps, self.programs(machine))

    def resources(self, codes: list[MachineCode], scores: int) -> Iterator[object]:
        """The cells from registers to slots, of all launches of the pass, and instructions."""
        worst = max(codes, key=lambda m: (m.spilled, m.registers))
        yield worst.registers
        yield max(m.shared for m in codes)
        yield worst.spilled
        yield max(m.body.full.spills for m in codes)
        programs = min(map(self.programs, codes))
        yield programs
        yield programs * worst.warps
        full, mixed = (
            sum(slots_per_score(loop, worst.warps, scores) for loop in loops)
            for loops in ([m.body.full for m in codes], [m.body.mixed for m in codes])
        )
        yield f"{full:.1f} / {mixed:.1f}"
        yield ", ".join(f"{n} {name}" for name, n in worst.instructions if n)

    def complaints(self, machine: MachineCode) -> Iterator[str]:
        """What is not clean about a kernel's machine code."""
        counts = dict(machine.instructions)
        limit = SHARED[self.sm]
        loop = machine.body.full
        if loop.spills * SPILLS > loop.issued:
            yield f"{loop.spills} of the {loop.issued} instructions of its loop move registers"
        if machine.serialized:
            yield "matrix products are serialized"
        if machine.shared > limit:
            yield f"{machine.shared} bytes of shared memory, {limit} are there"
        if machine.registers * 32 * machine.warps > 65536:
            yield f"{machine.registers} registers on {machine.warps} warps, 65536 are there"
        kind = {90: "wgmma", 100: "tcgen05"}.get(self.sm, "mma")
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
    kinds = classify_blocks(mask, p, tile)
    full, mixed = (int((kinds == kind).sum()) * heads for kind in (2, 1))
    places = Block(range(1), range(1), range(p.M), p.H, p.M, p.N)
    kept = torch.as_tensor(mask.keep(Place.of(places, range(p.N))))
    return clocks.seconds(at, full, mixed, heads * lines), heads * int(kept.sum())


def all_cases() -> list[Case]:
    """The kernels of the page: head sizes of 64 and 128 in half precision on sm_90 by all variants,
    elsewhere by some, and of other sizes and float32 the most used."""
    kinds: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], int], ...] = (
        ((90,), (64, 128), VARIANTS, 2),
        ((80, 100, 120), (64, 128), ("no mask", "causal", "soft cap"), 2),
        ((90,), (96, 256), ("causal", "soft cap"), 2),
        ((90,), (16, 32), ("causal",), 2),
        ((89,), (128,), ("causal",), 2),
        ((80, 90), (64, 128), ("causal",), 4),
    )
    forms = [
        *product((80, 90, 100), (2,), (64, 128), PUSHES, SHORT),
        *product((90,), (4,), (64,), PUSHES, SHORT[:1]),
    ]
    return sorted(
        Case(sm, size, width, pass_, variant)
        for sms, widths, variants, size in kinds
        for sm, width, pass_, variant in product(sms, widths, PASSES, variants)
    ) + sorted(Case(*form) for form in forms)


def summarize(rows: dict[Case, Row]) -> str:
    """TFLOP/s of whole kernels in half precision: forward, then dq, dk and dv together."""
    lines = []
    for sm, size in product(ARCHS, (64, 128)):
        rates = [
            whole_rate([rows.get(Case(sm, 2, size, each, variant)) for each in passes])
            for passes in (PASSES[:1], PASSES[1:])
            for variant in ("no mask", "causal", "soft cap", "window")
        ]
        lines.append(f"| {' | '.join(map(str, (sm, size, *rates)))} |")
    return SUMMARY + "\n".join(lines)


def other_cases() -> list[tuple[Case, str]]:
    """Kernels of others to compile: Flex's as far as it has them, the tutorial's for sm_90."""
    variants = ("no mask", "causal", "soft cap", "window")
    places = ((80, (128,), variants[:3]), (90, (64, 128), variants), (120, (128,), variants[:3]))
    flex = [
        (Case(sm, 2, size, pass_, variant), "Flex")
        for sm, sizes, each in places
        for size, variant, pass_ in product(sizes, each, PASSES)
    ]
    tutorial = [
        (Case(90, 2, size, "forward", variant), "tutorial")
        for size, variant in product((64, 128), variants[:2])
    ]
    return flex + tutorial


def compare(rows: dict[Case, Row], others: dict[tuple[Case, str], Row]) -> str:
    """A line for each kind of kernel: ours, and theirs."""
    lines = []
    for sm, size, variant in dict.fromkeys((c.sm, c.size, c.variant) for c, _ in others):
        cells: list[object] = [sm, size, variant]
        for passes in (PASSES[:1], PASSES[1:]):
            cases = [Case(sm, 2, size, each, variant) for each in passes]
            flex = [others[case, "Flex"] for case in cases]
            cells += [whole_rate([rows[case] for case in cases]), whole_rate([*flex]), flex[0].text]
            if len(passes) == 1:
                cells.append(whole_rate([others.get((cases[0], "tutorial"))]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return BESIDE + "\n".join(lines)


def whole_rate(rows: list[Row | None]) -> str:
    """TFLOP/s of a forward, or of both kernels of a gradient. A gradient counts five products for
    the three of dq and the four of dk and dv, which compute two of them again."""
    there = [row for row in rows if row is not None]
    if not there:
        return "-"
    flop = there[0].flop * (1 if len(there) == 1 else 5 / 3)
    return f"{flop / sum(row.seconds for row in there) / 1e12:.0f}"


def measure_cases(cases: list[Case]) -> dict[Case, Row]:
    """The row of each case; compiled on all cores."""
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(Case.measure, cases), strict=True))


def measure_others(cases: list[tuple[Case, str]]) -> dict[tuple[Case, str], Row]:
    """The same of others' kernels."""
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        return dict(zip(cases, pool.map(Case.beside, *zip(*cases, strict=True)), strict=True))


def main() -> None:
    rows, others = measure_cases(all_cases()), measure_others(other_cases())
    head = HEAD.format(
        triton=version("triton"),
        torch=version("torch").partition("+")[0],
        balance=BALANCE,
        summary=summarize(rows),
        beside=compare(rows, others),
        columns=" | ".join(COLUMNS),
        dashes="|".join("---" for _ in COLUMNS),
    )
    text = head + "\n".join(row.text for row in rows.values()) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    complaints = [text for row in rows.values() for text in row.complaints]
    print("\n".join(complaints) or f"{len(rows)} kernels, all clean")
    raise SystemExit(bool(complaints))


if __name__ == "__main__":
    main()
