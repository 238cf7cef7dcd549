"""Two tilings of a few queries with lengths: each call takes one by how much of the keys is left.

Products in half precision read all keys, since oneDNN copies operands with gaps; PyTorch's fused
kernel reads those that count, and spends as long on one query as on four.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.cpu.run_mask import reads_numbers
from attn_graph.lowering.folding import fold_problem
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.steps import Work
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.workspace import Scratch

# Rows of a key/value head, and numbers of k, of which the kernel is the faster where lengths leave
# no more than such a part of the keys: measured of 2 to 8 rows, 1 and 2 threads, up to 2.5 times.
ROWS, LEAST_READ, MOST_FILLED = range(2, 17), 2**20, 1 / 3


@final
@frozen
class TilesByLength:
    """The forward of one problem. many: the tiles of calls whose lengths leave more of the keys.
    few: those of others."""

    many: RowTiles
    few: FusedTiles

    @classmethod
    def plan(cls, many: RowTiles) -> TilesByLength | None:
        """None where one tiling is the faster whatever the lengths are."""
        p = many.problem
        short = p.lines in ROWS and prod(p.specs[1].shape) >= LEAST_READ
        half = p.grad is None and p.dtype != p.wide
        return cls(many, FusedTiles.plan(p)) if short and half and reads_lengths(p) else None

    @property
    def problem(self) -> Problem:
        """What both compute."""
        return self.many.problem

    @property
    def scratch(self) -> Scratch:
        """The larger of both."""
        return max(self.many.scratch, self.few.scratch, key=lambda scratch: scratch.bytes)

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most."""
        return max(self.many.temporary, self.few.temporary)

    def summary(self) -> str:
        """How it runs, for `explain`."""
        few = self.few.summary()
        return f"{self.many.summary()}; where lengths leave a third of the keys or less, {few}"

    def choose(self, many: Work, few: Work) -> Work:
        """What runs a call, of what runs either tiling."""

        def call(device: torch.device, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
            return (few if self.leaves_few(operands) else many)(device, *operands)

        return call

    def leaves_few(self, operands: Sequence[torch.Tensor]) -> bool:
        """Whether the lengths of a call, which are read as numbers, leave few keys."""
        q, lengths = operands[0], operands[3]
        if type(q) is not torch.Tensor or not q.is_cpu or is_traced():
            return False
        count: int = sum(lengths.tolist())
        return count <= MOST_FILLED * self.problem.B * self.problem.N


def reads_lengths(problem: Problem) -> bool:
    """Whether lengths are all that the mask reads, and the kernel reads keys once: of heads that
    share some, as rows of one."""
    p = problem
    lengths = p.node.data_names[1] == ("kv_lengths",) and reads_numbers(p)
    return lengths and (p.H == p.G or fold_problem(p) is not None)
