"""Writes docs/reports/kernels.md, what the machine code of each kernel needs: `make kernel-report`.

Kernels are compiled for GPUs that the machine need not have. A test compiles some of the cases
again and fails if the table says otherwise, or if a kernel is not clean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, frozen

import attn_graph as ag
from attn_graph.kernels.tilings import ARCHS, LEAST_SHARED, SHARED, WIDTHS, Tiling
from attn_graph.lowering.problem import sole
from attn_graph.lowering.triton.offline import MachineCode, compile_launches
from attn_graph.lowering.triton.plan import Flash, choose_tiling
from attn_graph.spec import NAMES

PAGE = Path(__file__).parents[1] / "reports" / "kernels.md"
TARGETS = {80: "a100", 90: "h200", 100: "b200"}
PASSES = ("forward", "query_gradient", "key_gradient")
B, H, S = 2, 4, 4096
VARIANTS = ("no mask", "causal", "window", "bias", "soft cap")
HEAD = """\
# What the kernels compile to

Written by `make kernel-report` with triton {triton}, without a GPU. Each line is a kernel for one
compute capability, dtype, head size (D = E) and pass; registers are those of one thread, shared
memory and spills in bytes, instructions as they stand in the code. "bias" and "soft cap" stand for
graphs that modify scores, which have tiles of their own; "window" is causal and 256 keys wide.

| sm | dtype | D | pass | variant | tile | registers | shared | spilled | instructions |
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
    def dtype(self) -> torch.dtype:
        """The dtype of so many bytes."""
        return torch.bfloat16 if self.bytes == 2 else torch.float32

    def graph(self) -> ag.Graph:
        """An attention that runs the kernel."""
        x = ag.TensorSpec((B, H, S, self.size), self.dtype)
        options: dict[str, dict[str, Any]] = {
            "no mask": {},
            "causal": {"mask": ag.Causal()},
            "window": {"mask": ag.Causal() & ag.Window(255)},
            "bias": {"bias": ag.TensorSpec((1, H, S, S), self.dtype)},
            "soft cap": {"soft_cap": 30.0},
        }
        return ag.attention(x, x, x, **options[self.variant])

    def compile(self) -> tuple[Tiling, list[MachineCode]]:
        """The tiling, and the machine code of every launch of the pass."""
        forward, backward = ag.vjp(self.graph(), ["q", "k", "v"])
        problem = sole(forward if self.pass_ == "forward" else backward)
        assert problem is not None
        flash = Flash.plan(problem, ag.Target.of(TARGETS[self.sm]))
        launches = tuple(launch for launch in flash.launches if launch.kernel == self.pass_)
        tiling = choose_tiling(problem, flash.target, self.pass_)  # type: ignore[arg-type]  # one of PASSES
        return tiling, compile_launches(evolve(flash, launches=launches))

    def measure(self) -> tuple[str, list[str]]:
        """The row of the table, and what is not clean."""
        tile, codes = self.compile()
        worst = max(codes, key=lambda m: (m.spilled, m.registers))
        counts = ", ".join(f"{n} {name}" for name, n in worst.instructions if n)
        size = f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages"
        size += ", dk and dv apart" if tile.apart else ""
        cells = (
            *(self.sm, NAMES[self.dtype], self.size, self.pass_, self.variant, size),
            *(worst.registers, max(m.shared for m in codes), worst.spilled, counts),
        )
        complaints = [f"{self}: {text}" for m in codes for text in self.complaints(m)]
        return f"| {' | '.join(map(str, cells))} |", complaints

    def complaints(self, machine: MachineCode) -> Iterator[str]:
        """What is not clean about a kernel's machine code."""
        counts = dict(machine.instructions)
        limit = LEAST_SHARED if self.sm == 80 else SHARED[self.sm]  # 80 stands for 86 and 89 too
        if machine.spilled:
            yield f"{machine.spilled} bytes spilled"
        if machine.serialized:
            yield "matrix products are serialized"
        if machine.shared > limit:
            yield f"{machine.shared} bytes of shared memory, {limit} are there"
        if machine.registers * 32 * machine.warps > 65536:
            yield f"{machine.registers} registers on {machine.warps} warps, 65536 are there"
        if self.bytes == 2 and not counts[{80: "mma", 90: "wgmma", 100: "tcgen05"}[self.sm]]:
            yield f"not this architecture's matrix instructions: {counts}"
        if not counts["cp.async"] and not counts["tma"]:
            yield "no asynchronous copies"


def all_cases(
    sms: Iterable[int] = ARCHS,
    widths: Iterable[int] = WIDTHS,
    variants: Iterable[str] = VARIANTS,
    bytes_: Iterable[int] = (2, 4),
) -> list[Case]:
    """Every combination of these with the passes."""
    return [Case(*each) for each in product(sms, bytes_, widths, PASSES, variants)]


def measure_cases(cases: list[Case]) -> tuple[list[str], list[str]]:
    """The rows of cases, and all complaints; compiled on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        results = [*pool.map(Case.measure, cases)]
    return [line for line, _ in results], [text for _, each in results for text in each]


def main() -> None:
    lines, complaints = measure_cases(all_cases())
    head = HEAD.format(triton=version("triton"))
    PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(complaints) or f"{len(lines)} kernels, all clean")
    raise SystemExit(bool(complaints))


if __name__ == "__main__":
    main()
