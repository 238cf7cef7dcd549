"""Attention on packed tensors with sequences padded to the longest possible one."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.builder import Builder
from attn_graph.ir.packed import Packed, run_one
from attn_graph.lowering.backend import Executable
from attn_graph.lowering.cpu.paged import Lower, Rooms, Tensors
from attn_graph.machine.workspace import Buffer
from attn_graph.spec import TensorSpec


@final
@frozen(eq=False)
class PaddedRun:
    """Runs an equation on packed tensors with sequences padded, in one graph. This is for steps
    dependent on a sequence's number in the batch, or on the largest length."""

    op: Packed
    specs: tuple[TensorSpec, ...]
    lower: Lower

    @cached_property
    def padded(self) -> Executable:
        packed = [side in self.op.readers for side in self.op.op.operand_sides]
        types = self.op.padded([spec.type for spec in self.specs])
        b = Builder(True)
        specs = [
            TensorSpec(t.shape, t.dtype) if pads else spec
            for t, spec, pads in zip(types, self.specs, packed, strict=False)
        ]
        values = [b.input(f"x{n}", spec) for n, spec in enumerate(specs)]
        return self.lower(b.graph(*b.emit(self.op.op, *values)))

    @property
    def probes(self) -> tuple[Executable, ...]:
        return (self.padded,)

    @property
    def held(self) -> int:
        """Bytes of the padded operands and results."""
        types = self.op.padded([spec.type for spec in self.specs])
        return sum(t.bytes for t in (*types, *self.op.op.infer(*types)))

    @property
    def summary(self) -> str:
        return f"sequences padded to the longest; {'; '.join(self.padded.notes)}"

    @property
    def rooms(self) -> dict[int, Buffer]:
        return {}

    def run(self, operands: Tensors, _rooms: Rooms) -> list[torch.Tensor]:
        outputs, _ = self.padded.run(*self.op.read(run_one, operands))
        return [*self.op.write(run_one, outputs, operands)]
