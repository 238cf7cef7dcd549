"""A backward plan in the form that autograd calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar, final

import torch
from attrs import frozen
from torch.autograd import forward_ad

from attn_graph.ir.graph import Graph
from attn_graph.machine.ambient import has_tangent
from attn_graph.machine.autograd import Recordable, run_with_autograd
from attn_graph.machine.likeness import Check, never
from attn_graph.machine.tensors import copy_laid_as
from attn_graph.planner.sized import Sized
from attn_graph.spec import TensorSpec

Tensors = tuple[torch.Tensor, ...]


class GradientPlan(Recordable, Protocol):
    """The part of a plan used by a pull."""

    @property
    def graph(self) -> Graph:
        """The gradient's graph."""
        ...

    @property
    def sized(self) -> Sized | None:
        """The runner of a graph with named sizes; None without them."""
        ...

    def push(self, tensors: Tensors) -> Tensors:
        """The gradients with their tangents."""
        ...


PlanT = TypeVar("PlanT", bound=GradientPlan)


@final
@frozen(eq=False)
class Pull(Generic[PlanT]):
    """A backward plan, and the cotangents it needs in another layout, by number.

    unsized: for named sizes, the check that tensors of other sizes must pass for this plan.
    """

    plan: PlanT
    anew: tuple[tuple[int, TensorSpec], ...] = ()
    unsized: Check = never

    def lay_out(self, cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        """The cotangents in the plan's layouts."""
        for n, spec in self.anew:
            cotangents[n] = copy_laid_as(cotangents[n], spec)
        return cotangents

    def takes(self, tensors: Tensors) -> bool:
        """True if the plan accepts these tensors without a copy, at any size."""
        sized = self.plan.sized
        return sized is not None and self.unsized(*tensors) and bool(sized.fit.lying(tensors))

    def run(self, tensors: Tensors) -> Sequence[torch.Tensor]:
        """The gradients, differentiable if autograd records them."""
        if torch.is_grad_enabled():
            carried = self.plan.graph.carried
            held = [t.detach() if n in carried else t for n, t in enumerate(tensors)]
            return run_with_autograd(self.plan, held)
        if forward_ad._current_level >= 0 and has_tangent(tensors):
            return self.plan.push(tensors)
        return self.plan.run(*tensors)[0]
