"""An attention that is one call of PyTorch's fused CPU kernel, on operands as they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels import fused_cpu
from attn_graph.lowering.cpu.corners import CAUSAL, takes_steps
from attn_graph.lowering.cpu.far_rows import refuse_far_rows
from attn_graph.lowering.cpu.fused_tiles import LEAST_FULL, describe_calls, result_bytes
from attn_graph.lowering.cpu.schedule import Part, Tile, parts_of
from attn_graph.lowering.problem import Problem, has_flash_order, is_readable
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks.places import Block
from attn_graph.spec import INF, TensorSpec


@final
@frozen
class WholeTiles:
    """Forward and backward of one problem. part: the keys that are read, in one run."""

    problem: Problem
    part: Part

    @classmethod
    def plan(cls, problem: Problem) -> WholeTiles | None:
        """The one tile of a problem; None where it takes more than a call of the kernel."""
        part = None if has_more_steps(problem) else find_part(problem)
        if part is None or not all(is_readable(x, like=n == 0) for n, x in large_operands(problem)):
            return None
        gives_o = problem.grad is not None or has_flash_order(problem.specs[0])
        return cls(problem, part) if gives_o else None

    @property
    def buffers(self) -> dict[str, Buffer]:
        """None: nothing is copied."""
        return {}

    @property
    def scratch(self) -> Scratch:
        """Nothing is leased."""
        return Scratch()

    @property
    def temporary(self) -> int:
        """Bytes that PyTorch allocates beside the workspace, at most."""
        return result_bytes(self.problem, self.problem.D)

    def summary(self) -> str:
        """How it runs, for `explain`."""
        p = self.problem
        return describe_calls(p, [Tile(range(p.B), range(p.M), (self.part,))])

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, lse."""
        q, k, v = operands[:3]
        part, node = self.part, self.problem.node
        if len(part) < self.problem.N:
            k, v = k[:, :, part.start : part.stop], v[:, :, part.start : part.stop]
        return fused_cpu.attend(q, k, v, node.scale, part.kind == "causal")

    def backward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients of q, k and v, by number of the operand."""
        p = self.problem
        assert p.grad is not None
        read = p.grad.split(operands)
        assert read.do is not None
        refuse_far_rows(p.node, read.lse)
        lse = read.lse.masked_fill(read.lse == -INF, 0.0)
        q, k, v = read.own[:3]
        causal = self.part.kind == "causal"
        pulled = fused_cpu.attend_backward(q, k, v, read.do, read.o, lse, p.node.scale, causal)
        return dict(enumerate(pulled))


def has_more_steps(problem: Problem) -> bool:
    """Whether something is added to scores or results, or converted from dtype to dtype."""
    p = problem
    half = p.dtype == torch.bfloat16 and p.grad is None  # which the kernel computes by itself
    return bool(p.node.modifiers) or p.node.sinks or p.D != p.E or not (p.dtype == p.wide or half)


def find_part(problem: Problem) -> Part | None:
    """The keys that are read, if they are one run of which the mask need not be asked: all, those
    of a triangle, or what one query sees."""
    p, mask = problem, problem.node.mask
    if mask is None:
        return Part(0, p.N, "full")
    if mask == CAUSAL:
        return None if p.low_scale or takes_steps(p) else Part(0, p.N, "causal")
    if p.M > 1 or p.grad is not None or mask.needs:
        return None
    parts = parts_of(mask, Block(range(p.B), range(p.H), range(1), p.H, 1, p.N), LEAST_FULL)
    return parts[0] if len(parts) == 1 and parts[0].kind == "full" else None


def large_operands(problem: Problem) -> Iterator[tuple[int, TensorSpec]]:
    """Each of the large operands, by number in any order, of which q is 0."""
    yield from enumerate(problem.specs[:3])
    if problem.grad is not None:
        given = problem.grad.split(problem.specs)
        yield 3, given.o
        if given.do is not None:
            yield 4, given.do
