"""Backward plans for tensors that autograd hands back, whatever their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attn_graph.ir.layouts import output_specs
from attn_graph.ir.transforms.vjp import saved_specs, saved_statistics
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.likeness import likeness, look_at
from attn_graph.machine.tensors import as_it_lies, require_as_declared
from attn_graph.plan import MOST_PULLS, Pattern, Plan, Pull
from attn_graph.spec import TensorSpec, dense_strides, memory_order


def recall_pull(
    plan: Plan,
    needs: Sequence[bool],
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    pattern: Pattern,
) -> Pull:
    """The backward plan for tensors like these, remembered."""
    if is_traced():
        return plan_handed_back(plan, needs, saved, grads)
    memo, tensors = plan.memo, (*saved, *(g for g in grads if g is not None))
    _, last, pull = memo.pull
    if pull is not None and last == pattern and pull.unsized(*tensors):
        sized = pull.plan.sized  # of any sizes, without a copy
        if sized is not None and sized.fit.lying(tensors):
            return pull
    key = (*pattern, *map(look_at, tensors))
    pull = memo.pulls.get(key)
    if pull is None:
        pull = plan_handed_back(plan, needs, saved, grads)
        if len(memo.pulls) >= MOST_PULLS:
            memo.pulls.clear()
        memo.pulls[key] = pull
    if not plan.target.is_emulated:  # a GPU that is may end
        memo.pull = likeness(tensors), pattern, pull
    return pull


def plan_handed_back(
    plan: Plan,
    needs: Sequence[bool],
    saved: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> Pull:
    """The backward plan for tensors handed back by autograd: saved ones may have moved."""
    sizes, given = plan.sizes_of(saved), [g for g in grads if g is not None]
    wants = [i for i, need in enumerate(needs) if need]
    due = output_specs(plan.graph)
    exact = [None if g is None else TensorSpec.like(g) for g in grads]
    cotangents = generalise_given(due, exact, sizes)
    gradient = plan.backward(wants, cotangents, specs_of_moved(plan, saved, sizes))
    inputs = [i.spec.bind(sizes) for i in gradient.graph.inputs[len(saved) :]]
    anew = tuple(
        (n, spec)
        for n, (g, spec) in enumerate(zip(given, inputs, strict=True))
        if g.is_neg() or TensorSpec.like(g) != spec
    )
    if gradient.sized is None or anew or is_traced():
        return Pull(gradient, anew)
    return Pull(gradient, (), likeness((*saved, *given), sized=False))


def specs_of_moved(
    plan: Plan, saved: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> list[TensorSpec] | None:
    """The actual specs of saved tensors; None if they are as declared.

    Raises PlanMismatchError for tensors of other shapes or dtypes.
    """
    declared = saved_specs(plan.graph)
    named = dict(zip(declared, saved, strict=True))
    bound = {name: spec.bind(sizes) for name, spec in declared.items()}
    actual = {name: as_it_lies(bound[name], t) for name, t in named.items()}
    require_as_declared(named, actual, plan.target)
    for name in saved_statistics(plan.graph):  # read in any memory order
        actual[name] = bound[name]
    if actual == bound:
        return None
    return [generalise(spec, actual[name], sizes) for name, spec in declared.items()]


def generalise(spec: TensorSpec, exact: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    """A spec of the shape of `spec` that is `exact` for these sizes: `spec` itself, dense in
    another order, or with the strides of `exact` as numbers."""
    if not spec.dims:
        return exact
    order = dense_strides(spec.shape, memory_order(exact))
    every = (spec, TensorSpec(spec.shape, spec.dtype, order))
    fits = (x for x in every if x.bind(sizes) == exact)
    return next(fits, TensorSpec(spec.shape, spec.dtype, exact.strides))


def generalise_given(
    specs: Sequence[TensorSpec], exact: Sequence[TensorSpec | None], sizes: Mapping[str, int]
) -> list[TensorSpec | None]:
    """`generalise` for each spec; None stays None."""
    pairs = zip(specs, exact, strict=True)
    return [None if own is None else generalise(spec, own, sizes) for spec, own in pairs]
