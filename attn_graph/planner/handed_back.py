"""Tensors that autograd hands to a backward: their layout may differ from the declared one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.graph import Graph
from attn_graph.ir.vjp import result_spec, saved_specs, saved_statistics
from attn_graph.machine.target import Target
from attn_graph.machine.tensors import as_it_lies, require_as_declared
from attn_graph.spec import TensorSpec, dense_strides, memory_order


@final
@frozen(eq=False)
class HandedBack:
    """Tensors saved by a graph's forward, and cotangents of its outputs.

    sizes: the values of named sizes in these tensors.
    """

    graph: Graph
    target: Target
    sizes: Mapping[str, int]
    saved: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]

    @cached_property
    def declared(self) -> dict[str, TensorSpec]:
        """The declared specs of saved tensors, by name."""
        return saved_specs(self.graph)

    def moved(self) -> list[TensorSpec] | None:
        """The actual specs of saved tensors; None if they are as declared.

        Raises PlanMismatchError for tensors of other shapes or dtypes.
        """
        named = dict(zip(self.declared, self.saved, strict=True))
        bound = {name: spec.bind(self.sizes) for name, spec in self.declared.items()}
        actual = {name: as_it_lies(bound[name], t) for name, t in named.items()}
        require_as_declared(named, actual, self.target)
        for name in saved_statistics(self.graph):  # read in any memory order
            actual[name] = bound[name]
        if actual == bound:
            return None
        return generalise_all([*self.declared.values()], [*actual.values()], self.sizes)

    def cotangents(self) -> list[TensorSpec | None]:
        due = [result_spec(self.graph, i) for i in self.graph.outputs]
        given = [None if g is None else TensorSpec.like(g) for g in self.grads]
        return generalise_given(due, given, self.sizes)

    def anew(self, backward: Graph) -> tuple[tuple[int, TensorSpec], ...]:
        """The cotangents to copy into another layout for a backward, by number, with specs."""
        given = [g for g in self.grads if g is not None]
        inputs = [i.spec.bind(self.sizes) for i in backward.inputs[len(self.saved) :]]
        return tuple(
            (n, spec)
            for n, (g, spec) in enumerate(zip(given, inputs, strict=True))
            if g.is_neg() or TensorSpec.like(g) != spec
        )


def generalise(spec: TensorSpec, exact: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
    """A spec of the shape of `spec` that is `exact` for these sizes: `spec` itself, dense in
    another order, or with the strides of `exact` as numbers."""
    if not spec.dims:
        return exact
    order = dense_strides(spec.shape, memory_order(exact))
    every = (spec, TensorSpec(spec.shape, spec.dtype, order))
    fits = (x for x in every if x.bind(sizes) == exact)
    return next(fits, TensorSpec(spec.shape, spec.dtype, exact.strides))


def generalise_all(
    specs: Sequence[TensorSpec], exact: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> list[TensorSpec]:
    return [generalise(spec, own, sizes) for spec, own in zip(specs, exact, strict=True)]


def generalise_given(
    specs: Sequence[TensorSpec], exact: Sequence[TensorSpec | None], sizes: Mapping[str, int]
) -> list[TensorSpec | None]:
    """`generalise` for each spec; None stays None."""
    pairs = zip(specs, exact, strict=True)
    return [None if own is None else generalise(spec, own, sizes) for spec, own in pairs]
