"""Graphs run equation by equation: what goes from one to the next, and what is handed out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.ir.vjp import residuals, statistics

Tensors = Sequence[torch.Tensor]
Work = Callable[..., Tensors]  # of the device of a call, and of operands on it


@final
@frozen(eq=False)
class Steps:
    """The equations of a graph, ready to run. calls: for each what it reads, and its work.

    saved, stats: the values that derivatives read, and those that are statistics of rows.
    """

    graph: Graph
    calls: tuple[tuple[Sequence[int], Work], ...]
    saved: tuple[int, ...]
    stats: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, calls: Sequence[tuple[Sequence[int], Work]]) -> Steps:
        """calls: in the order of the equations."""
        return cls(graph, tuple(calls), residuals(graph), statistics(graph))

    def run(self, device: torch.device, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs, and what is saved."""
        values = list(tensors)
        for args, call in self.calls:
            values += call(device, *[values[i] for i in args])
        outputs = hand_out(values, self.graph.outputs, self.stats)
        return outputs, [values[i] for i in self.saved]

    @property
    def bytes_between(self) -> int:
        """Bytes of the values between equations: neither inputs, nor returned, nor saved for a
        derivative that there is."""
        saved = () if self.graph.gradient_problems else self.saved
        kept = {*range(len(self.graph.inputs)), *self.graph.outputs, *saved}
        return sum(t.bytes for i, t in enumerate(self.graph.types) if i not in kept)


def hand_out(values: Tensors, outputs: Sequence[int], stats: frozenset[int]) -> list[torch.Tensor]:
    """The outputs: statistics in C order, and a value that is returned twice as two tensors."""
    results: list[torch.Tensor] = []
    for place, i in enumerate(outputs):
        value = values[i].contiguous() if i in stats else values[i]
        results.append(value.clone() if i in outputs[:place] else value)
    return results
