"""Attentions whose sizes have names: planned for each size when a call first has it.

What sizes do not change is worked out once, when the executable is built. For the others a size is
a problem of numbers, as that of a graph of its own would be, and runs in the same tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import final

import torch
from attrs import Factory, field, frozen

from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.binding import settle_attention
from attn_graph.lowering.folding import as_shaped, fold_problem
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.steps import Work
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.fitting import Shape, Specs, compile_reads, compile_specs, find_reads
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import bind, dims_in

MOST_SIZES = 64  # of which a step keeps what runs them
Tensors = Sequence[torch.Tensor]
Shapes = Sequence[Shape]
Ready = tuple[Work, Work]  # what runs a problem, and what does where o alone is wanted


@final
@frozen(eq=False)
class SizedStep:
    """Runs an attention, or its gradient, in any sizes of at least 1.

    op: with sizes by name. names: those that its operands give. read: operands -> sizes, in their
    order; lay: sizes -> specs. moves: whether bounds of its mask move with sizes. folds: whether
    heads may be rows. lower: makes a problem of numbers run.
    """

    op: Attention | AttentionGrad
    names: tuple[str, ...]
    read: Callable[[Tensors], Shape]
    lay: Specs
    moves: bool
    folds: bool
    lower: Callable[[Problem], Ready]
    at: Callable[[Shape], Ready] = field(
        init=False,
        default=Factory(lambda step: lru_cache(MOST_SIZES)(step.make), takes_self=True),
    )

    @classmethod
    def of(
        cls,
        op: Attention | AttentionGrad,
        specs: Sequence[TensorSpec],
        folds: bool,
        lower: Callable[[Problem], Ready],
    ) -> SizedStep | None:
        """None where operands do not give all sizes."""
        reads = dict(find_reads(specs))
        known = {symbol.name for dim in dims_in(tuple(specs)) for symbol in dim.symbols}
        if not known <= reads.keys():
            return None
        names = tuple(reads)
        moves = next(dims_in(op), None) is not None
        read, lay = compile_reads([*reads.values()]), compile_specs(names, specs)
        return cls(op, names, read, lay, moves, folds, lower)

    def call(self, device: torch.device, *operands: torch.Tensor) -> Tensors:
        """The results."""
        return self.at(self.read(operands))[0](device, *operands)

    def infer(self, device: torch.device, *operands: torch.Tensor) -> Tensors:
        """The first result, and perhaps others."""
        return self.at(self.read(operands))[1](device, *operands)

    @neutral_state()
    def make(self, sizes: Shape) -> Ready:
        """What runs these sizes."""
        specs = self.lay(*sizes)
        op = bind(self.op, dict(zip(self.names, sizes, strict=True))) if self.moves else self.op
        node: Attention = op.attention if isinstance(op, AttentionGrad) else op
        kept: Sequence[int] | None = None
        if node.mask or node.modifiers:
            M, N = specs[0].shape[2], specs[1].shape[2]
            op, kept = settle_attention(op, node, M, N, len(specs))
        problem = Problem.of(op, specs if kept is None else [specs[n] for n in kept])
        folded = fold_problem(problem) if self.folds else None
        ready = self.lower(problem if folded is None else folded)
        if folded is not None:
            shapes = [spec.shape for spec in folded.specs], result_shapes(problem)
            ready = wrap_each(ready, run_folded, *shapes)
        return ready if kept is None else wrap_each(ready, run_selected, kept)


def wrap_each(ready: Ready, wrapper: Callable[..., Tensors], *given: object) -> Ready:
    """Both ways to run within a function of theirs."""
    call, infer = ready
    return partial(wrapper, call, *given), partial(wrapper, infer, *given)


def run_selected(
    work: Work, kept: Sequence[int], device: torch.device, *operands: torch.Tensor
) -> Tensors:
    """Run what reads some of the operands."""
    return work(device, *[operands[n] for n in kept])


def run_folded(
    work: Work, given: Shapes, due: Shapes, device: torch.device, *operands: torch.Tensor
) -> Tensors:
    """Run what reads heads as rows. given, due: shapes of what that reads, and of the results."""
    results = work(device, *map(as_shaped, operands, given))
    return [*map(as_shaped, results, due)]


def result_shapes(problem: Problem) -> Shapes:
    """The shapes of the results, in their order."""
    if problem.grad is not None:
        wanted = zip(problem.specs, problem.grad.wants, strict=False)
        return [spec.shape for spec, wants in wanted if wants]
    shape = (problem.B, problem.H, problem.M, problem.E)
    return [shape, *(shape[:3] for _ in problem.node.stats)]
