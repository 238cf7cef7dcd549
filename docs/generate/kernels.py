"""Writes docs/reports/kernels.md, what the machine code of every kernel says: `make kernel-report`.

Kernels are compiled for GPUs that need not be there. A test compiles some of the cases again and
fails where the table is not what comes out, or where a kernel is not clean.
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
from attn_graph.kernels.tilings import ARCHS, WIDTHS, Tiling
from attn_graph.lowering.problem import sole
from attn_graph.lowering.triton.offline import LEAST_SHARED, SHARED, MachineCode, machine_codes
from attn_graph.lowering.triton.plan import Flash, tiling_of
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
    """A kernel to compile."""

    sm: int
    bytes: int
    size: int
    pass_: str
    variant: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bytes == 2 else torch.float32

    def graph(self) -> ag.Graph:
        x = ag.TensorSpec((B, H, S, self.size), self.dtype)
        options: dict[str, dict[str, Any]] = {
            "no mask": {},
            "causal": {"mask": ag.Causal()},
            "window": {"mask": ag.Causal() & ag.Window(255)},
            "bias": {"bias": ag.TensorSpec((1, H, S, S), self.dtype)},
            "soft cap": {"soft_cap": 30.0},
        }
        return ag.attention(x, x, x, **options[self.variant])

    def machines(self) -> tuple[Tiling, list[MachineCode]]:
        """The tile, and the code of every launch of the pass."""
        forward, backward = ag.vjp(self.graph(), ["q", "k", "v"])
        problem = sole(forward if self.pass_ == "forward" else backward)
        assert problem is not None
        flash = Flash.plan(problem, ag.Target.of(TARGETS[self.sm]))
        launches = tuple(launch for launch in flash.launches if launch.kernel == self.pass_)
        tiling = tiling_of(problem, flash.target, self.pass_)  # type: ignore[arg-type]  # one of PASSES
        return tiling, machine_codes(evolve(flash, launches=launches))

    def measured(self) -> tuple[str, list[str]]:
        """The line of the table, and what is not clean."""
        tile, found = self.machines()
        worst = max(found, key=lambda m: (m.spilled, m.registers))
        counts = ", ".join(f"{n} {name}" for name, n in worst.instructions if n)
        size = f"{tile.block_m} x {tile.block_n}, {tile.warps} warps, {tile.stages} stages"
        size += ", dk and dv apart" if tile.apart else ""
        cells = (
            *(self.sm, NAMES[self.dtype], self.size, self.pass_, self.variant, size),
            *(worst.registers, max(m.shared for m in found), worst.spilled, counts),
        )
        complaints = [f"{self}: {text}" for m in found for text in self.complaints(m)]
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


def cases(
    sms: Iterable[int] = ARCHS,
    widths: Iterable[int] = WIDTHS,
    variants: Iterable[str] = VARIANTS,
    bytes_: Iterable[int] = (2, 4),
) -> list[Case]:
    return [Case(*each) for each in product(sms, bytes_, widths, PASSES, variants)]


def measure_cases(all_cases: list[Case]) -> tuple[list[str], list[str]]:
    """The lines of cases, and all complaints; compiled on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = [*pool.map(Case.measured, all_cases)]
    return [line for line, _ in found], [text for _, each in found for text in each]


def main() -> None:
    lines, complaints = measure_cases(cases())
    head = HEAD.format(triton=version("triton"))
    PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(complaints) or f"{len(lines)} kernels, all clean")
    raise SystemExit(bool(complaints))


if __name__ == "__main__":
    main()
