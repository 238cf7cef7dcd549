"""The results of the operators, from a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.errors import GraphError
from attn_graph.ir.arguments import statistic_names
from attn_graph.ir.attention import SAVED
from attn_graph.ir.graph import Graph
from attn_graph.ir.layouts import Plain
from attn_graph.ir.ops import STATISTICS
from attn_graph.ir.storage.scaling import O_SCALE
from attn_graph.ir.transforms.vjp import residuals
from attn_graph.machine.cache import remember
from attn_graph.planner.forms.content import CallContent, read_content
from attn_graph.spec import (
    DTYPES,
    TensorSpec,
    dense_strides,
    new_strides,
    order_axes,
    order_letters,
)


def strides_like(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    """Dense strides of a shape in the memory order of other sizes and strides."""
    if not any(isinstance(n, torch.SymInt) for n in (*sizes, *strides)):
        return dense_strides(shape, order_axes(sizes, strides))
    # Like PyTorch's strides of unknown sizes. Any: by its types sym_max may be a float.
    least: list[Any] = [torch.sym_max(n, 1) for n in shape]
    return dense_strides(least, order_symbols(sizes, strides))


def strides_as(declared: Plain, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a result of this shape, as `outputs` of a call declare them."""
    if isinstance(declared, str):
        return strides_like(shape, shape, dense_strides(shape, order_letters(declared)))
    return new_strides(TensorSpec(declared[0], DTYPES[declared[1]], declared[2]))


def order_symbols(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """`order_axes` for sizes assumed to be neither 0 nor 1 unless tracing knows."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false as surely  # slow to load

    def reaches(a: int, b: int) -> bool:
        return surely(a >= b) or (isinstance(a, torch.SymInt) and surely(a % b == 0))

    def compare(a: int, b: int) -> int:
        return reaches(strides[b], strides[a]) - reaches(strides[a], strides[b])

    axes = range(len(shape))
    long = [a for a in axes if not surely(shape[a] == 1)]
    if any(surely(n == 0) for n in shape) or any(surely(strides[a] == 0) for a in long):
        return tuple(axes)
    ranked = iter(sorted(long, key=cmp_to_key(compare)))
    return tuple([next(ranked) if a in long else a for a in axes])


@final
@frozen
class Results:
    """The results of `attention`: those of a call, then further residuals of the backward.

    count: the results of a call. saved: the places of the residuals. constants: the places of
    results without a gradient. names: of all results of a call without a plan. graph: of a plan.
    """

    count: int
    saved: tuple[int, ...]
    constants: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    graph: Graph | None = None


@remember
def results_of(text: str) -> Results:
    content = read_content(text)
    if isinstance(content, CallContent):
        narrow = O_SCALE in content.names
        names = ("o", *statistic_names(content.stats), *(("amax",) if narrow else ()))
        saved = ("wide", "lse") if narrow else SAVED
        every = (*names, *(name for name in saved if name not in names))
        constants = tuple(place for place, name in enumerate(names) if name in STATISTICS)
        return Results(len(names), tuple(map(every.index, saved)), constants, every)
    graph, *_ = content.restore()
    known, outputs, kept = graph.differentiable_outputs, graph.outputs, residuals(graph)
    numbers = outputs + tuple(i for i in kept if i not in outputs)
    constants = tuple(place for place, i in enumerate(outputs) if i not in known)
    return Results(len(outputs), tuple(map(numbers.index, kept)), constants, graph=graph)


def restore_graph(text: str) -> Graph:
    """The graph of a plan."""
    graph = results_of(text).graph
    assert graph is not None
    return graph


def names_of_inputs(text: str) -> tuple[str, ...]:
    content = read_content(text)
    if isinstance(content, CallContent):
        return content.inputs
    return tuple(i.name for i in restore_graph(text).inputs)


def require_count(text: str, count: int) -> None:
    """Raise GraphError for a number of tensors that differs from the text's."""
    names = names_of_inputs(text)
    if count != len(names):
        raise GraphError(f"the text reads {len(names)} tensors, {', '.join(names)}; got {count}")
