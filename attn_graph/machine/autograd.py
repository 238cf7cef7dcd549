"""Plans as functions of PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Protocol

import torch
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from attn_graph.errors import GraphError

remove_batch_dim = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]  # as PyTorch's older vmap does
add_batch_dim = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage]
Context = Any  # autograd's own, with attributes of torch's choice
Tensors = Sequence[torch.Tensor]


class Recordable(Protocol):
    """The part of a plan that autograd needs."""

    @property
    def constants(self) -> Sequence[int]:
        """Places of the outputs without a gradient."""
        ...

    def run(self, *tensors: torch.Tensor) -> tuple[Tensors, Tensors]:
        """The outputs, and the values kept for the backward beside the inputs."""
        ...

    def pull(
        self, needs: tuple[bool, ...], saved: Tensors, grads: Sequence[torch.Tensor | None]
    ) -> Tensors:
        """The gradients of the inputs marked in `needs`."""
        ...

    def push_outputs(
        self, primals: Tensors, tangents: Mapping[int, torch.Tensor]
    ) -> tuple[Tensors, tuple[torch.Tensor | None, ...]]:
        """The outputs, and the tangent of each, by the tangents of some inputs."""
        ...


class PlanFunction(torch.autograd.Function):
    """A call of a plan, recorded by autograd; its backward calls the plan of the gradient.

    If autograd records the backward too, that is a recorded call of the gradient's plan.
    """

    @staticmethod
    def forward(ctx: Context, plan: Recordable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The plan's outputs; inputs and intermediate results are saved for the backward."""
        outputs, saved = plan.run(*tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.plan = plan
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        if plan.constants:
            ctx.mark_non_differentiable(*(outputs[place] for place in plan.constants))
        return tuple(outputs)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch names ctx as it likes
        ctx: Context, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each input that needs one, None for the plan and other inputs."""
        needs = ctx.needs_input_grad[1:]
        if has_batch(grads):
            gradients = run_each(partial(ctx.plan.pull, needs, ctx.saved_tensors), grads)
        else:
            gradients = ctx.plan.pull(needs, ctx.saved_tensors, grads)
        if False not in needs:
            return (None, *gradients)
        rest = iter(gradients)
        return None, *(next(rest) if need else None for need in needs)

    @staticmethod
    def jvp(ctx: Context, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The tangent of each output: results of a plan, recorded by autograd in turn."""
        primals, _ = split_tangents(ctx.saved_for_forward)
        given = enumerate(tangents[1:])
        moved = {n: t for n, t in given if t is not None and not t._is_zerotensor()}
        return ctx.plan.push_outputs(primals, moved)[1]  # type: ignore[no-any-return]  # of a Recordable


# The engine calls this. PyTorch's own looks for vjp or boxes in the class at each call.
PlanFunction._backward_cls.apply = PlanFunction.backward  # type: ignore[attr-defined]  # made by torch

# Function.apply itself, without its work for transforms: these are refused here.
record = super(torch.autograd.Function, PlanFunction).apply  # pyright: ignore[reportAttributeAccessIssue]  # of torch's C base class


def run_with_autograd(plan: Recordable, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """The plan's outputs, differentiable by every input with requires_grad.

    Raises GraphError under torch.func's transforms. Their calls take another path: only the
    backward of a call outside of them comes here.
    """
    if _are_functorch_transforms_active():
        raise GraphError(
            "within a transform of torch.func a gradient is taken of a plan's call outside of it; "
            "call the plan within the transform, or take the gradient without create_graph"
        )
    return record(plan, *tensors)  # type: ignore[no-any-return, no-untyped-call]  # of torch


# The older vmap: torch.autograd.grad(is_grads_batched=True), gradcheck(check_batched_grad=True),
# and with tangents torch.autograd.functional.jacobian(strategy="forward-mode", vectorize=True)


def has_batch(tensors: Iterable[torch.Tensor | None]) -> bool:
    """True if PyTorch's older vmap maps one of these tensors."""
    return any(t is not None and is_legacy_batchedtensor(t) for t in tensors)


def run_each(
    run: Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]],
    given: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The results for each entry of a batch of tensors, one after another, as a batch.

    The older vmap hides the axis of entries, and has no rule for custom functions. Raises
    GraphError for one vmap within another.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    hidden = {n: x for n, x in enumerate(given) if x is not None and is_legacy_batchedtensor(x)}
    shown = {n: remove_batch_dim(x, level, 0, 0) for n, x in hidden.items()}
    if has_batch(shown.values()):
        raise GraphError("PyTorch's older vmap within another; torch.func.vmap may be nested")
    size = next(iter(shown.values())).shape[0]
    if not size:  # every entry gives the results' shapes
        shown = {n: x.new_zeros(1, *x.shape[1:]) for n, x in shown.items()}
    entries = [
        run([shown[n][entry] if n in shown else x for n, x in enumerate(given)])
        for entry in range(max(size, 1))
    ]
    return [batch_entries(each, size, level) for each in zip(*entries, strict=True)]


def batch_entries(
    entries: Sequence[torch.Tensor | None], size: int, level: int
) -> torch.Tensor | None:
    """The first `size` entries as a batch hidden by the older vmap; None if they are None."""
    known = [x for x in entries if x is not None]
    return add_batch_dim(torch.stack(known)[:size], 0, level) if known else None


def push_each(
    plan: Recordable, primals: Tensors, tangents: Mapping[int, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
    """`plan.push_outputs` for tangents mapped by the older vmap; the outputs are not mapped."""
    outputs = list[Tensors]()

    def push(entry: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        given = {n: t for n, t in zip(tangents, entry, strict=True) if t is not None}
        own, moved = plan.push_outputs(primals, given)
        outputs.append(own)
        return moved

    moved = run_each(push, [*tangents.values()])
    return tuple(outputs[0]), tuple(moved)


# Forward mode


def split_tangents(
    tensors: Tensors,
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Tensors without their tangents, and the tangents by place, except known zeros."""
    pairs = [forward_ad.unpack_dual(t) for t in tensors]
    tangents = {n: t for n, (_, t) in enumerate(pairs) if t is not None and not t._is_zerotensor()}
    return [primal for primal, _ in pairs], tangents


def select_moving(
    carried: Set[int], tangents: Mapping[int, torch.Tensor]
) -> Mapping[int, torch.Tensor]:
    """The tangents, by input, without those of `carried` inputs unless all of these have one.

    Carried are the o and lse read by a gradient: a plan computes the missing tangents.
    """
    if carried <= tangents.keys():
        return tangents
    return {n: t for n, t in tangents.items() if n not in carried}
