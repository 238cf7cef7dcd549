"""Graphs that cuDNN nearly takes: half precision, head sizes of 8, rows on 16 bytes, few masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_graph import masks as m
from attn_graph.ir import builder
from attn_graph.ir.graph import Graph
from attn_graph.spec import TensorSpec
from attn_graph.testing.strategies import (
    Shape,
    addend_specs,
    aligns,
    broadcast,
    caps,
    maybe,
    scales,
    specs,
)


@st.composite
def cudnn_graphs(
    draw: DrawFn, sizes: SearchStrategy[int] | None = None, stats: tuple[str, ...] = ()
) -> Graph:
    """Most are taken; sizes are those of M and N."""
    length = st.integers(1, 20) if sizes is None else sizes
    M, G = draw(length), draw(st.integers(1, 3))
    N = draw(st.one_of(st.just(M), length))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (24, 8), (8, 16), (64, 64)]))
    shape = Shape(draw(st.integers(1, 3)), G * draw(st.integers(1, 3)), G, M, N, D, E)
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    kinds = (draw(spaced(x, dtype)) for x in (shape.q, shape.k, shape.v))
    return builder.attention(*kinds, **draw(cudnn_options(shape, dtype)), stats=stats)


@st.composite
def cudnn_options(
    draw: DrawFn, shape: Shape, dtype: torch.dtype
) -> dict[str, Any]:  # Any: options of `attention`
    align = draw(st.one_of(aligns, st.none()) if shape.M == shape.N else aligns)
    window = st.builds(m.Window, st.integers(0, 9), st.sampled_from([0, 0, 3, None]))
    mask = draw(maybe(st.one_of(st.just(m.Causal()), window)))
    lengths = draw(maybe(st.sets(st.sampled_from(m.LENGTHS), min_size=1))) or ()
    bias = draw(maybe(bias_shapes(shape))) if mask is None or align != "bottom_right" else None
    kind = draw(st.sampled_from([dtype, dtype, torch.float32]))
    return {
        "mask": mask,
        "align": align,
        "scale": draw(scales),
        "bias": None if bias is None else TensorSpec(bias, kind),
        "alibi": draw(maybe(st.just(True))) if mask == m.Causal() else None,
        "soft_cap": draw(maybe(caps)) if mask is None and not lengths else None,
        "sinks": draw(maybe(addend_specs("sinks", shape, dtype))),
    } | {name: draw(length_specs(shape)) for name in sorted(lengths)}


def bias_shapes(shape: Shape) -> SearchStrategy[tuple[int, ...]]:
    return broadcast(shape.full("bhij"))


def length_specs(shape: Shape) -> SearchStrategy[TensorSpec]:
    """[B] int32 or int64, dense or not."""
    dtype = st.sampled_from([torch.int32, torch.int64])
    return dtype.flatmap(lambda kind: specs(shape.full("b"), kind))


@st.composite
def spaced(draw: DrawFn, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """Any order of the outer axes, gaps of 8 elements, or one head or batch entry for all."""
    strides, step = [*shape[:-1], 1], shape[-1] + 8 * draw(st.integers(0, 1))
    for axis in draw(st.permutations(range(len(shape) - 1))):
        strides[axis] = step
        step = step * shape[axis] + 8 * draw(st.integers(0, 1))
    shared = draw(st.sampled_from([(), (), (), (0,), (1,), (0, 1)]))
    return TensorSpec(shape, dtype, [0 if n in shared else s for n, s in enumerate(strides)])


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same, on an address that is a multiple of 16 bytes."""
    shape, strides = tensor.shape, tensor.stride()
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    storage = tensor.as_strided((last + 1,), (1,)).clone()
    return storage.as_strided(shape, strides, 0)
