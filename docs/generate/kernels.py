"""Writes docs/reports/kernels.md, what the machine code of each kernel needs: `make kernel-report`.

Kernels are compiled for GPUs that the machine need not have. A test compiles some of the cases
again and fails if the table says otherwise, or if a kernel is not clean.
"""

from __future__ import annotations

from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.kernels.tilings import ARCHS, Tiling
from attn_graph.lowering.codegen.machine_code import MachineCode
from attn_graph.lowering.problem import Problem, facts_of
from attn_graph.lowering.triton.launch_list import BY_KEYS, PASS_OF
from attn_graph.lowering.triton.plan import Flash, compile_launches
from attn_graph.lowering.triton.programs import choose_push_tiling, choose_tiling
from attn_graph.lowering.triton.work import Work, split_graph
from docs.generate.kernel_rows import (
    PASSES,
    PRODUCTS,
    PUSHES,
    Kernel,
    Row,
    first_cells,
    measure_cases,
    row_of,
    seconds_and_pairs,
    target_of,
)
from docs.generate.kernels_serving import serving_section
from docs.generate.predict import BALANCE, PROCESSORS
from docs.generate.tutorial import TILE, compile_tutorial

PAGE = Path(__file__).parents[1] / "reports" / "kernels.md"
B, H, S = 2, 16, 4096
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
"begun anew" counts products of sm_90 that NVIDIA's assembler sets apart from those before, because
one of their registers is set late (its info C7519).

TFLOP/s are predicted by the model of `docs/generate/predict.py`, which says what it
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
which are reckoned in. Where programs are few, the plan takes 128 x 128 all the same, or 64 x 128 on
four warps. sm_80, 100 and 120 keep one sum of a row: with
eight, registers are short.

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
spills is in bytes. Where cuDNN takes a graph on sm_90 and sm_100 it is predicted to be faster, and
comes first; for others these kernels do.

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
@frozen(order=True)
class Case:
    """A kernel to compile. bytes: of an element. size: D = E."""

    sm: int
    bytes: int
    size: int
    pass_: str
    variant: str

    @property
    def kernel(self) -> Kernel:
        """What judges its machine code."""
        return Kernel(self.sm, self.bytes, self.size, self.pass_)

    def graph(self) -> ag.Graph:
        """An attention that runs the kernel."""
        x = ag.TensorSpec((B, H, S, self.size), self.kernel.dtype)
        k = ag.TensorSpec((B, H // 4, S, self.size), self.kernel.dtype)
        segments = ag.TensorSpec((B, S), torch.int32)
        causal = {"mask": ag.Causal()}
        options: dict[str, dict[str, Any]] = {
            "no mask": {},
            "causal": causal,
            "window": {"mask": ag.Causal() & ag.Window(255)},
            "bias": {"bias": ag.TensorSpec((1, H, S, S), self.kernel.dtype)},
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
        return split_graph(facts_of(graph))[-1].work

    def problem(self) -> Problem:
        """The attention or its gradient, whichever the pass is of."""
        return self.work().problem

    def compile(self) -> tuple[Problem, Tiling, list[MachineCode]]:
        """The problem, its tiling, and the machine code of every launch of the pass."""
        target = target_of(self.sm)
        work, problem = self.work(), self.problem()
        flash = Flash.plan(work, target)
        launches = tuple(
            launch
            for launch in flash.launches
            if launch.kernel == PASS_OF.get(self.pass_, self.pass_)
        )
        choose: Any = choose_push_tiling if self.pass_ in PUSHES else choose_tiling  # Any: by pass
        tile = choose(problem, target, self.pass_)
        return problem, tile, compile_launches(evolve(flash, launches=launches))

    def measure(self) -> Row:
        """Compile it: the row of the page."""
        problem, tile, codes = self.compile()
        at, flop = PROCESSORS[self.sm], 2 * PRODUCTS[self.pass_] * self.size
        full, *more = (self.kernel.clocks_of(m, tile, len(codes)) for m in codes)
        clocks = sum(more, start=full)
        whole = seconds_and_pairs(clocks, at, problem, tile, self.pass_ in BY_KEYS)
        seconds, pairs = whole or (0.0, 0)
        scores = tile.block_m * tile.block_n
        rates = (
            f"{flop * scores / clocks.full * at.count * at.clock / 1e12:.0f}",
            f"{flop * pairs / seconds / 1e12:.0f}" if whole else "-",
        )
        cells = (
            *first_cells(self, self.variant, tile),
            *self.kernel.resources(codes, scores),
            *rates,
        )
        complaints = tuple(f"{self}: {text}" for m in codes for text in self.kernel.complaints(m))
        return Row(row_of(*cells), seconds, flop * pairs, complaints)

    def beside(self, name: str) -> Row:
        """The row of another's kernel for the case; its text is what it spills."""
        from docs.generate.flex import FlexCase  # of Inductor's insides, which versions change

        if name == "tutorial":
            causal = self.variant == "causal"
            tile, (machine, body) = TILE, compile_tutorial(self.sm, self.size, causal)
        else:
            flex = FlexCase(self.sm, (B, H, S, self.size), self.variant)
            tile, machine, body = flex.compile_pass(self.pass_)
        clocks, problem = self.kernel.clocks_of(machine, tile, 1, body), self.problem()
        by_keys = self.pass_ in BY_KEYS
        whole = seconds_and_pairs(clocks, PROCESSORS[self.sm], problem, tile, by_keys)
        assert whole is not None  # of masks that no data decide
        seconds, pairs = whole
        flop = 2 * PRODUCTS[self.pass_] * self.size * pairs
        return Row(str(machine.spilled), seconds, flop, ())


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
        lines.append(row_of(sm, size, *rates))
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
        lines.append(row_of(*cells))
    return BESIDE + "\n".join(lines)


def whole_rate(rows: list[Row | None]) -> str:
    """TFLOP/s of a forward, or of both kernels of a gradient. A gradient counts five products for
    the three of dq and the four of dk and dv, which compute two of them again."""
    there = [row for row in rows if row is not None]
    if not there:
        return "-"
    flop = there[0].flop * (1 if len(there) == 1 else 5 / 3)
    return f"{flop / sum(row.seconds for row in there) / 1e12:.0f}"


def measure_other(case: tuple[Case, str]) -> Row:
    """The row of another's kernel."""
    return case[0].beside(case[1])


def main() -> None:
    rows, others = (
        measure_cases(all_cases(), Case.measure),
        measure_cases(other_cases(), measure_other),
    )
    head = HEAD.format(
        triton=version("triton"),
        torch=version("torch").partition("+")[0],
        balance=BALANCE,
        summary=summarize(rows),
        beside=compare(rows, others),
        columns=" | ".join(COLUMNS),
        dashes="|".join("---" for _ in COLUMNS),
    )
    serving, unclean = serving_section()
    text = head + "\n".join(row.text for row in rows.values()) + "\n" + serving
    PAGE.write_text(text, encoding="utf-8")
    complaints = [text for row in rows.values() for text in row.complaints] + unclean
    print("\n".join(complaints) or f"{len(rows)} kernels, all clean")
    raise SystemExit(bool(complaints))


if __name__ == "__main__":
    main()
