"""An attention in one call of PyTorch's fused CPU kernel, on operands in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels import fused_cpu
from attn_graph.kernels.fused_cpu import flash
from attn_graph.lowering.cpu.far_rows import refuse_far_rows
from attn_graph.lowering.cpu.fused_tiles import describe_calls
from attn_graph.lowering.cpu.planned_tiles import LEAST_FULL, is_small
from attn_graph.lowering.cpu.schedule import Part, Tile, parts_of
from attn_graph.lowering.problem import (
    Problem,
    cotangent_bytes,
    has_flash_order,
    is_readable,
)
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.masks import Keep
from attn_graph.masks.canonical import CAUSAL
from attn_graph.masks.places import Block
from attn_graph.spec import INF, TensorSpec


@final
@frozen
class WholeTiles:
    """Forward and backward of one problem. part: the read keys, in one run; if "mixed", booleans of
    each batch entry hide some of them."""

    problem: Problem
    part: Part

    @classmethod
    def plan(cls, problem: Problem) -> WholeTiles | None:
        """The one tile of a problem; None if it takes more than a call of the kernel."""
        part = None if has_more_steps(problem) else find_part(problem)
        if part is None or not all(is_readable(x, like=n == 0) for n, x in large_operands(problem)):
            return None
        gives_o = problem.grad is not None or has_flash_order(problem.specs[0])
        return cls(problem, part) if gives_o else None

    @property
    def takes_any_keys(self) -> bool:
        """True if a call may bring another number of keys: it reads all of them."""
        return self.part.kind != "causal" and len(self.part) == self.problem.N

    @property
    def buffers(self) -> dict[str, Buffer]:
        return {}

    @property
    def scratch(self) -> Scratch:
        return Scratch()

    @property
    def temporary(self) -> int:
        """Bytes allocated by PyTorch beside the workspace, at most: an addend, an lse without -inf,
        and do as the kernel reads it. Results are the whole's."""
        p, flags = self.problem, prod(self.problem.specs[3].shape) if self.is_masked else 0
        vectors = p.B * p.H * p.M * (p.wide.itemsize + torch.bool.itemsize)
        return vectors + cotangent_bytes(p) + flags * (torch.float64.itemsize + p.dtype.itemsize)

    @property
    def is_masked(self) -> bool:
        return self.part.kind == "mixed"

    def summary(self) -> str:
        p = self.problem
        return describe_calls(p, [Tile(range(p.B), range(p.M), (self.part,))])

    def forward(
        self, operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        addend = self.addend(operands) if self.is_masked else None
        unseen = None if addend is None else fused_cpu.find_unseen(addend)
        q, (k, v), scale = operands[0], map(self.cut, operands[1:3]), self.problem.node.scale
        return fused_cpu.attend(q, k, v, scale, self.part.kind == "causal", addend, unseen)

    @property
    def infer(self) -> Callable[..., Sequence[torch.Tensor]]:
        """Gives o first. It returns a function that looks at tensors alone: most calls take less
        time than a few lines of Python."""
        scale, causal = self.problem.node.scale, self.part.kind == "causal"
        masked, cuts = self.is_masked, len(self.part) < self.problem.N

        def run(
            operands: Sequence[torch.Tensor], scratch: Mapping[str, torch.Tensor]
        ) -> Sequence[torch.Tensor]:
            q, k, v = operands[:3]
            if cuts:
                k, v = self.cut(k), self.cut(v)
            addend = self.addend(operands) if masked else None
            return flash(q, k, v, 0.0, causal, attn_mask=addend, scale=scale)

        return run

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        whole = len(self.part) == self.problem.N
        return x if whole else x[:, :, self.part.start : self.part.stop]

    def addend(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.where(operands[3], 0.0, -INF).to(operands[0].dtype)

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
    """True if scores or results need an addition or a conversion."""
    p = problem
    half = p.dtype == torch.bfloat16 and p.grad is None  # computed by the kernel itself
    return bool(p.node.modifiers) or p.node.sinks or p.D != p.E or not (p.dtype == p.wide or half)


def find_part(problem: Problem) -> Part | None:
    """The read keys, if they are one run and need no evaluation of the mask: all, a triangle, or
    the keys of one query."""
    p, mask = problem, problem.node.mask
    if mask is None:
        return Part(0, p.N, "full")
    if mask == CAUSAL:
        return None if p.low_scale else Part(0, p.N, "causal")
    if hides_whole_keys(p):
        return Part(0, p.N, "mixed") if is_small(p) else None
    if p.M > 1 or p.grad is not None or mask.needs:
        return None
    parts = parts_of(mask, Block(range(p.B), range(p.H), range(1), p.H, 1, p.N), LEAST_FULL)
    return parts[0] if len(parts) == 1 and parts[0].kind == "full" else None


def hides_whole_keys(problem: Problem) -> bool:
    """True if a forward has a boolean mask of the keys of each batch entry, and no other."""
    p, mask = problem, problem.node.mask
    if p.grad is not None or not isinstance(mask, Keep):
        return False
    return p.by_role.mask[mask.name].shape[1:] == (1, 1, p.N)


def large_operands(problem: Problem) -> Iterator[tuple[int, TensorSpec]]:
    """The large operands, by number in any order; q has 0."""
    yield from enumerate(problem.specs[:3])
    if problem.grad is not None:
        given = problem.grad.split(problem.specs)
        yield 3, given.o
        if given.do is not None:
            yield 4, given.do
