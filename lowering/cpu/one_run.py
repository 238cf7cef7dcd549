"""A forward of few scores: all heads in one run, in as few steps as there can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.row_sums import sum_rows_
from attn_graph.lowering.cpu.row_tiles import RowTiles, Tensors
from attn_graph.lowering.cpu.run_mask import RunMask


@final
@frozen(eq=False)
class OneRun:
    """What `RowTiles.infer` computes of tiles that are one run, in one function of ours: where a
    query reads many keys, even Python's own code has to come from memory again.

    layout: shape and strides of o. rows: q and o as [n,L,.], where rows are of several heads.
    """

    tiles: RowTiles
    mask: RunMask | None
    scale: float
    layout: tuple[tuple[int, ...], tuple[int, ...]]
    rows: tuple[tuple[int, int, int], tuple[int, int, int]] | None

    @classmethod
    def of(cls, tiles: RowTiles) -> OneRun:
        """tiles: one run."""
        p, (at_q, _, _, at_o) = tiles.problem, tiles.shapes[:4]
        rows = None if p.H == p.G else (at_q, at_o)
        return cls(tiles, tiles.mask, p.node.scale, p.layout_of_o, rows)

    def infer(self, operands: Sequence[torch.Tensor], scratch: Tensors) -> tuple[torch.Tensor, ...]:
        """o alone. Left to the tiles where some keys are not read, or a query may see none."""
        hiding = self.mask and self.mask.read(operands)
        if hiding and not hiding.whole:
            return self.tiles.infer_runs(operands, scratch, None, hiding)
        q, k, v = operands[:3]
        o, s = torch.empty_strided(*self.layout, dtype=q.dtype, device=q.device), scratch["p"]
        if self.rows is None:  # `view`, which is told the shape, takes twice as long
            rows_of_q, rows_of_o = q.flatten(0, 1), o.flatten(0, 1)
        else:
            rows_of_q, rows_of_o = map(torch.Tensor.view, (q, o), self.rows)
        torch.baddbmm(s, rows_of_q, k.flatten(0, 1).mT, beta=0, alpha=self.scale, out=s)
        if hiding:
            hiding.hide(s)
        torch.softmax(s, -1, out=s)
        if self.tiles.sums_rows:
            sum_rows_(rows_of_o, s, v.flatten(0, 1))
        else:
            torch.bmm(s, v.flatten(0, 1), out=rows_of_o)
        return (o,)
