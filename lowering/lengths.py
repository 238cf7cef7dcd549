"""Lengths of packed sequences: differences of their starts, or tensors of their own."""

from __future__ import annotations

import torch

from attn_graph.ir.graph import Graph
from attn_graph.ir.packed import Packed


def gapless_sides(graph: Graph) -> tuple[str, ...]:
    """The packed sides whose lengths are the differences of their starts. graph: ends in Packed."""
    makers, where = {outs[0]: eqn for eqn, outs in graph.numbered}, packed_sides(graph)
    pairs = where.items()
    return tuple(side for side, (starts, n) in pairs if n in makers and makers[n].args == (starts,))


def shares_lengths(graph: Graph) -> bool:
    """True if packed q and k have equal lengths. graph: ends in Packed."""
    where = packed_sides(graph)
    return len(where) == 2 and len({lengths for _, lengths in where.values()}) == 1


def packed_sides(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The numbers of starts and lengths of each packed side."""
    last = graph.eqns[-1]
    op: Packed = last.op.packed
    _, where = op.split(last.args)
    return {side: where[side] for side in op.sides}


def rows_outside(starts: torch.Tensor, lengths: torch.Tensor | None, T: int) -> torch.Tensor:
    """Marks each of T packed rows that belongs to no sequence: [T] of bool. lengths: None without
    gaps."""
    row = torch.arange(T, dtype=starts.dtype, device=starts.device)
    if lengths is None:
        return (row < starts[0]) | (row >= starts[-1])
    last = torch.searchsorted(starts.contiguous(), row, right=True) - 1
    entry = last.clamp(0, len(lengths) - 1)
    return (row < starts[entry]) | (row >= starts[entry] + lengths[entry])
