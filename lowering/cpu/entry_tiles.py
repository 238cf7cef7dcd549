"""A forward whose batch entries are computed one by one, each of the keys that data leave it.

Products in float32 and float64 take operands with gaps where they lie: so keys that no query of a
batch entry sees are neither read nor hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.row_sums import count_sum_bytes
from attn_graph.lowering.cpu.asking import POSITIONS
from attn_graph.lowering.cpu.product_slots import FEW_SCORES, TileGrid
from attn_graph.lowering.cpu.row_choice import MOST_READING, reads_long, sums_rows
from attn_graph.lowering.cpu.row_core import Change, Core, RowSteps
from attn_graph.lowering.cpu.row_grid import SINGLE_ROWS
from attn_graph.lowering.cpu.row_tiles import Tensors
from attn_graph.lowering.cpu.run_mask import Hiding, RunMask, cuts_entries
from attn_graph.lowering.problem import Problem
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.spec import NAMES, TensorSpec


@final
@frozen
class EntryTiles(TileGrid):
    """The forward of a bare attention under a mask that hides keys of all queries of a batch entry.

    A tile is a batch entry: where a call's numbers may not be read, of all keys.
    """

    @classmethod
    def plan(cls, problem: Problem) -> EntryTiles | None:
        """The tiles of a problem; None of one that `cuts_entries` says no of."""
        return cls(problem, problem.M, 1, problem.G) if cuts_entries(problem) else None

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The scratch buffers, by name."""
        p, n = self.problem, self.problem.G * self.problem.lines
        sizes = {"p": n * p.N, "top": n, "total": n}
        if self.steps.turns:
            sizes["turned"] = n * p.N
        if self.moves:
            sizes["o"] = n * p.E
        return {name: Buffer((size,), p.dtype) for name, size in sizes.items()}

    @cached_property
    def scratch(self) -> Scratch:
        """The same side by side."""
        return Scratch(self.buffers)

    @cached_property
    def moves(self) -> bool:
        """Whether o of a batch entry has gaps, which products would fill head by head."""
        p, (shape, strides) = self.problem, self.problem.layout_of_o
        return not TensorSpec(shape[1:], p.dtype, strides[1:]).is_dense

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most: places that the mask is asked
        at, with caps; two numbers of each row of scores; and what sums of rows need."""
        p = self.problem
        places = p.B * p.N * (POSITIONS + 8)
        positions = torch.int64.itemsize * (p.B + p.H + p.M + p.N)
        sums = count_sum_bytes(p.G, p.lines, p.N, p.E, p.dtype) if self.steps.sums else 0
        return places + positions + sums + 2 * p.G * p.lines * p.wide.itemsize

    def summary(self) -> str:
        """How it runs, for `explain`."""
        size = f"{self.problem.H} heads x {self.problem.M} queries"
        more = ", and sums of rows of v" * self.steps.sums
        return (
            f"{NAMES[self.problem.dtype]} products on tiles of {size}, of the keys that count{more}"
        )

    @cached_property
    def steps(self) -> RowSteps:
        """How each batch entry is computed: by PyTorch's softmax, a single call, of few scores."""
        p = self.problem
        single = p.lines < SINGLE_ROWS or p.G * p.lines * p.N <= FEW_SCORES
        turns = p.lines <= MOST_READING and reads_long(p, p.B)
        sums = sums_rows(p, p.B)
        return RowSteps(p.node.scale, single, turns=turns, sums=sums)

    @cached_property
    def mask(self) -> RunMask:
        """What hides keys."""
        mask = RunMask.of(self, spans=True)
        assert mask is not None
        return mask

    # Calls

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """o and lse."""
        p = self.problem
        lse = torch.empty(p.sizes[:3], dtype=p.wide, device=operands[0].device)
        return *self.infer(operands, scratch, lse), lse

    def infer(
        self, operands: Sequence[torch.Tensor], scratch: Tensors, lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """o alone. lse: room for it [B,H,M], where that is wanted."""
        p, hiding = self.problem, self.mask.read(operands)
        o, core = p.new_o(operands[0].device), Core(self.steps, scratch, hiding.blind)
        made = scratch["o"].view(p.G, p.lines, p.E) if self.moves else None
        each = [x.view(p.B, p.G, -1, x.shape[3]).unbind() for x in (*operands[:3], o)]
        saved = repeat(None) if lse is None else lse.view(p.B, p.G, -1, 1).unbind()
        for (hide, keys), q, k, v, rows, room in zip(self.keys(hiding), *each, saved, strict=False):
            out = rows if made is None else made
            core.attend(hide, q, k[:, keys], v[:, keys], out, room)
            if made is not None:
                rows.copy_(made)
        return (o,)

    def keys(self, hiding: Hiding) -> Iterable[tuple[Change, slice]]:
        """What hides scores of each batch entry, and the keys that it reads."""
        if hiding.spans:
            return ((span.hide, slice(span.start, span.stop)) for span in hiding.spans)
        return zip(hiding.runs(1), repeat(slice(None)), strict=False)
