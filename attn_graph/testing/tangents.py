"""The right tangents: PyTorch's derivatives of the formula, by the accuracy rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch.func import jvp, vjp

from attn_graph.ir.graph import Graph
from attn_graph.testing.formula import Tensor, attend, cast, read_chain
from attn_graph.testing.rule import NOTHING, UNIT, Expectation, Sizes, low_dtype

Named = Mapping[str, Tensor]


@frozen
class Directions:
    """Tangents of inputs by name; cotangents of o and lse, and their tangents."""

    tangents: Named
    do: Tensor
    dlse: Tensor
    tdo: Tensor
    tdlse: Tensor

    def to(self, dtype: torch.dtype) -> Directions:
        tangents = {name: x.to(dtype) for name, x in self.tangents.items()}
        rest = (x.to(dtype) for x in (self.do, self.dlse, self.tdo, self.tdlse))
        return Directions(tangents, *rest)


def formula_at(graph: Graph, tensors: Sequence[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(o, lse) of the formula, as a function of the floating inputs by name."""
    attend(read_chain(graph, tensors))  # draws dropout, which is cached, outside of transforms

    def call(moving: Named) -> tuple[Tensor, Tensor]:
        given = [moving.get(i.name, x) for i, x in zip(graph.inputs, tensors, strict=True)]
        f = attend(read_chain(graph, given))
        blind = f.lse.isinf()
        return f.o, torch.where(blind, f.lse.detach(), f.lse)

    return call


def floating_inputs(graph: Graph, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    pairs = zip(graph.inputs, tensors, strict=True)
    return {i.name: x for i, x in pairs if x.is_floating_point()}


def push_formula(
    graph: Graph, tensors: Sequence[Tensor], tangents: Named, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """o, lse, to and tlse by PyTorch's forward mode over the formula, every step in `dtype`."""
    given = cast(graph, tensors, dtype)
    known = floating_inputs(graph, given)
    moves = {
        n: tangents[n].to(dtype) if n in tangents else torch.zeros_like(x) for n, x in known.items()
    }
    results, moved = jvp(formula_at(graph, given), (known,), (moves,))[:2]
    return (*results, *moved)


def push_gradient_formula(
    graph: Graph, tensors: Sequence[Tensor], along: Directions, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tangent of each floating input's gradient: forward over reverse, in `dtype`."""
    given, along = cast(graph, tensors, dtype), along.to(dtype)
    known, call = floating_inputs(graph, given), formula_at(graph, given)
    zeros = {n: torch.zeros_like(x) for n, x in known.items()}

    def gradient(moving: Named, do: Tensor, dlse: Tensor) -> Named:
        found: Named = vjp(call, moving)[1]((do, dlse))[0]
        return found

    point = (known, along.do, along.dlse)
    direction = (zeros | dict(along.tangents), along.tdo, along.tdlse)
    moved: dict[str, Tensor] = jvp(gradient, point, direction)[1]
    return moved


def expect_tangents(
    graph: Graph, tensors: Sequence[Tensor], tangents: Named
) -> tuple[Expectation, ...]:
    """The right tangents of o and lse, within the accuracy rule."""
    refs = push_formula(graph, tensors, tangents, torch.float64)[2:]
    lows = push_formula(graph, tensors, tangents, low_dtype(graph))[2:]
    sizes = Sizes.of(graph, tensors, tangents)
    terms = zip(("to", "tlse"), refs, lows, sizes.pushed(), strict=True)
    return tuple(Expectation(name, ref, low, size, True) for name, ref, low, size in terms)


def expect_gradient_tangents(
    graph: Graph, tensors: Sequence[Tensor], along: Directions
) -> dict[str, Expectation]:
    """The right tangent of each floating input's gradient, within the accuracy rule."""
    refs = push_gradient_formula(graph, tensors, along, torch.float64)
    lows = push_gradient_formula(graph, tensors, along, low_dtype(graph))
    sizes = Sizes.of(graph, tensors, along.tangents)
    rounding = UNIT[low_dtype(graph)] / UNIT[torch.float32]
    exact = along.to(torch.float64)
    terms = sizes.pulled(exact.do, exact.dlse, exact.tdo, exact.tdlse, rounding)
    return {
        name: Expectation(f"td{name}", ref, lows[name], terms.get(name, NOTHING), True)
        for name, ref in refs.items()
    }
