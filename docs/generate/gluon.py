"""Writes docs/reports/gluon.md, what the Gluon kernels compile to: `make gluon-report`.

Each run writes the rows of the version of Triton that it imports and leaves those of others. A test
compiles some of the cases again, and fails if the page says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, final

import torch
from attrs import frozen

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.problem import sole
from attn_graph.lowering.triton.gluon_plan import plan_launches
from attn_graph.lowering.triton.offline import (
    MachineCode,
    inspect_launch,
    mock_tensors,
)
from docs.generate.overlap import TileLoop, read_loops

PAGE = Path(__file__).parents[1] / "reports" / "gluon.md"
SIZES = (64, 128)
VARIANTS = ("full", "causal", "window", "prefix", "segments", "soft cap")
# And the products of each; behind a comma the variant of the plan.
PASSES = {
    "forward": 2,
    "forward, 2 heads": 2,
    "forward, turns": 2,
    "query_gradient": 3,
    "key_gradient": 4,
}
UNTAKEN = (  # rows that may see no key; modifiers where registers are short
    *((size, each, "segments") for size in SIZES for each in ("query_gradient", "key_gradient")),
    (128, "key_gradient", "soft cap"),
)
B, H, S = 2, 8, 4096
GROUPS = 2  # of four warps, which share a multiprocessor's four schedulers
TENSOR = 4096  # flop of wgmma in half precision, a clock and multiprocessor
FUNCTION = 8  # clocks of a scheduler's special function unit for one instruction
CLOCK, MULTIPROCESSORS = 1.65e9, 132  # Hz under such a load, and those of an H200
LEAST, MOST = 1.3, 1.5  # clocks of a tile, as multiples of those of its busiest unit
REGISTERS = 240  # that a thread of a group is to have
MOST_SPILLS = 2  # instructions of a loop, for one register: Triton 3.9 does so, others not at all
HEAD = """\
# What the Gluon kernels compile to

Written by `make gluon-report`, without a GPU, for compute capability 9.0 in bf16, B = 2, H = 8,
M = N = 4096; "window" is causal and 256 keys wide, "prefix" causal with 512 keys that all see.
"2 heads" takes two heads in a program, with "turns" the two groups of warps issue products one
after the other, "key_gradient" is dk and dv. Gradients of segments, where a query may see no key,
and at D = 128 dk and dv of modifiers, for which registers are short, are computed by the kernels of
`triton`.

Of each loop over tiles, read from the machine code: instructions of one warp and tile, how many of
its exponentials (and the like) stand behind a product and before the wait that ends the last, and
the clocks of the busiest unit for the tiles of both groups of warps: tensor cores 4096 flop, four
schedulers one instruction each, special functions 16 a clock. Every exponential there means that
softmax runs beside products of its own group.

The last column is a prediction, not a measurement: the busiest unit's clocks times 1.5 and 1.3, at
1.65 GHz on 132 multiprocessors. By the same measure FlashAttention 3's published forward on an H100
(648 TFLOP/s at D = 128, 497 at D = 64) takes 1.4 and 1.7 times its busiest unit; so at D = 64 the
lower figure of the forward is the likelier, or less. dq counts three products and dk with dv four:
the whole backward, which counts five, is 5/7 of both, 425 to 490, where FlashAttention 3, whose one
kernel multiplies five times and adds up dq in no fixed order, was measured at 561. Start and end of
a program are not in it. What is spilled, in bytes of a thread, is spilled outside of the loops, but
for one register a tile of masked kernels at D = 128 under Triton 3.9.0; where N is no multiple of
16 one is spilled under all, outside.

For each head but the first, a program of several heads saves the launch and the first copies, 0.45
tiles of 128 x 128 by the model that `explain` tells programs by: 2 % of a causal mask with S = 4096
and 64 heads, four in a program, and 8 % of no mask with S = 512 and 512 heads. It issues up to 15
instructions more for a tile, and keeps up to 26 registers for the next head in memory, outside of
the loops.

Turns fix the order in which the groups issue products, by up to 7 instructions a tile. What that
brings can't be read off; FlashAttention 3 has them up to D = 128. In a simulation, tensor cores
that serve by the order of issue lose nothing with them or without; those that serve two groups by
halves lose 3 to 6 % at D = 128, and 19 to 30 % at D = 64, if the groups begin at once, with them or
without, and nothing if one begins 300 clocks later.

| triton | D | pass | variant | tile | loop | shared | spilled | issue | beside | clocks | TFLOP/s |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


@final
@frozen(order=True)
class Case:
    """A kernel to compile. size: D = E."""

    size: int
    pass_: str
    variant: str

    def graph(self) -> ag.Graph:
        """An attention that runs the kernel."""
        x = ag.TensorSpec((B, H, S, self.size), torch.bfloat16)
        ids = ag.TensorSpec((B, S), torch.int64)
        options: dict[str, dict[str, Any]] = {
            "full": {},
            "causal": {"mask": ag.Causal()},
            "window": {"mask": ag.Causal() & ag.Window(255)},
            "prefix": {"mask": ag.Causal() | ag.Prefix(512)},
            "segments": {"segments": (ids, ids)},
            "soft cap": {"soft_cap": 30.0},
        }
        return ag.attention(x, x, x, **options[self.variant])

    def compile(self) -> tuple[MachineCode, list[TileLoop]]:
        """What the machine code needs, and its loops over tiles."""
        graph = self.graph()
        pass_, _, way = self.pass_.partition(", ")
        if pass_ != "forward":
            graph = ag.vjp(graph, ["q", "k", "v"])[1]
        problem = sole(simplify(graph))
        assert problem is not None
        flash = plan_launches(problem, ag.Target.of("h200"), way or None)
        (launch,) = (x for x in flash.launches if x.kernel == f"gluon_{pass_}")
        machine = inspect_launch(launch, mock_tensors(flash), flash.target.sm)
        return machine, read_loops(machine.sass)

    def measure(self) -> tuple[list[str], list[str]]:
        """The rows of the table, and what is not as it should be."""
        machine, loops = self.compile()
        kinds = ("mixed", "full") if len(loops) == 2 * GROUPS else ("full",)
        rows = [
            self.row(machine, kind, max(loops[n :: len(kinds)], key=busiest))
            for n, kind in enumerate(kinds)
        ]
        return rows, [f"{self}: {text}" for text in complaints(machine, loops)]

    def row(self, machine: MachineCode, kind: str, loop: TileLoop) -> str:
        """A line of the table."""
        rows = loop.flop // (2 * PASSES[self.pass_] * 64 * self.size)
        tile = f"{rows} x 128" if self.pass_ == "key_gradient" else f"128 x {rows}"
        clocks = busiest(loop)
        rates = [GROUPS * loop.flop / (f * clocks) * CLOCK * MULTIPROCESSORS for f in (MOST, LEAST)]
        cells = (
            *(version("triton"), self.size, self.pass_, self.variant, tile, kind),
            *(
                machine.shared,
                machine.spilled,
                loop.counts.issued,
                f"{loop.beside} of {loop.counts.special}",
                clocks,
            ),
            " to ".join(f"{rate / 1e12:.0f}" for rate in rates),
        )
        return f"| {' | '.join(map(str, cells))} |"


def busiest(loop: TileLoop) -> int:
    """Clocks of the busiest unit for the tiles of all groups."""
    each = loop.flop // TENSOR, loop.counts.issued, FUNCTION * loop.counts.special
    return GROUPS * max(each)


def complaints(machine: MachineCode, loops: list[TileLoop]) -> Iterator[str]:
    """What is not clean about the kernel's machine code."""
    if machine.serialized:
        yield "matrix products are serialized"
    if len(loops) not in (GROUPS, 2 * GROUPS):
        yield f"{len(loops)} loops where softmax can run beside a product"
    for loop in loops:
        if loop.beside < loop.counts.special:
            yield f"{loop.counts.special - loop.beside} exponentials do not run beside a product"
        if loop.counts.spills > MOST_SPILLS:
            yield f"{loop.counts.spills} instructions of a loop spill registers"
        if loop.registers != REGISTERS:
            yield f"{loop.registers} registers, {REGISTERS} are to be set"


def all_cases() -> list[Case]:
    """Every head size and pass with every variant that it takes."""
    every = product(SIZES, PASSES, VARIANTS)
    return [Case(*each) for each in every if each not in UNTAKEN]


def rows_of_others() -> list[str]:
    """The rows of the page that are of other versions of Triton."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    own = f"| {version('triton')} |"
    return [x for x in lines if x.startswith("| ") and x[2].isdigit() and not x.startswith(own)]


def main() -> None:
    results = [case.measure() for case in all_cases()]
    own = [row for rows, _ in results for row in rows]
    pages = [rows_of_others(), own]
    pages.sort(key=lambda rows: rows[:1])
    lines = [row for rows in pages for row in rows]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    wrong = [text for _, each in results for text in each]
    print("\n".join(wrong) or f"{len(results)} kernels, all clean")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
