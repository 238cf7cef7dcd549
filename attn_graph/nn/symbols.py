"""Strides of results for sizes that are symbols of torch.compile and torch.export.

A symbol may be known only at run time, such as the rows of `x[mask]`: it is never evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key
from typing import Any

import torch

from attn_graph.ir.layouts import Plain
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
