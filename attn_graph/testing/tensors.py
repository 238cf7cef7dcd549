"""Tensors for a graph: any strides, sensible values, NaN in the gaps between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_graph.ir import ops
from attn_graph.ir.arguments import ADDENDS
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph
from attn_graph.ir.storage.scaling import O_SCALE, SCALES
from attn_graph.spec import IN_PAIRS, TensorSpec, ValueType, dense_strides

BETWEEN = 77  # integers in gaps, never to be read
EXTREME = 1e4  # scores this far from 0: exp(s) is 0 or inf in any dtype


def tensors_for(graph: Graph, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """A tensor for each input: its shape, dtype and strides, and sensible values.

    The gaps between floating elements, before the first and after the last, are NaN. One seed in
    eight gives scores near -1e4, one in eight near +1e4. Biases and sinks have -inf at some places,
    and biases for whole queries.
    """
    random = torch.Generator().manual_seed(seed)
    shift = {6: EXTREME, 7: -EXTREME}.get(seed % 8, 0.0)
    sizes = {i.name: i.spec.shape for i in graph.inputs}
    most = {"q_lengths": sizes.get("q", (0, 0))[-2], "kv_lengths": sizes.get("k", (0, 0))[-2]}
    means = centres(graph, shift) | dict.fromkeys((*SCALES, O_SCALE), 1.0)
    tensors = []
    for i in graph.inputs:
        name = i.name.rstrip("0123456789")  # a second one of a kind
        mean, spread = means.get(name, 0.0), SPREADS.get(name, 1.0)
        values = filler(i.spec.type, random, most.get(name, 2), mean, spread)
        tensors.append(lay_out(i.spec, values, random, device))
        if name in ADDENDS and name != "alibi" and tensors[-1].numel():
            hide(tensors[-1], random)
    return tuple(tensors)


def hide(tensor: torch.Tensor, random: torch.Generator) -> None:
    """Put -inf at some places of a bias or of sinks, or at all of some queries; mostly nowhere."""
    kind = int(torch.randint(5, (), generator=random))
    shape = {3: tensor.shape, 4: (*tensor.shape[:-1], 1)}.get(kind)
    if shape is not None:
        hidden = (torch.rand(shape, generator=random) < 0.3).expand(tensor.shape)
        storage = tensor.as_strided((tensor.untyped_storage().size() // tensor.itemsize,), (1,), 0)
        places = torch.arange(len(storage))
        at = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[hidden]
        storage[at.to(tensor.device)] = -torch.inf  # axes of stride 0 can't be written through


SPREADS = {"alibi": 0.3, "sinks": 2.0} | dict.fromkeys((*SCALES, O_SCALE), 0.3)


def centres(graph: Graph, shift: float) -> dict[str, float]:
    scale = next((e.op.scale for e in graph.eqns if isinstance(e.op, (ops.Scores, Attention))), 0.0)
    if not shift or not scale:
        return {}
    D = graph.inputs[0].spec.shape[-1]
    size = (abs(shift) / (abs(scale) * D)) ** 0.5
    return {"q": size, "k": size if (shift > 0) == (scale > 0) else -size}


def filler(
    type_: ValueType, random: torch.Generator, most: int, mean: float, spread: float
) -> Callable[[int], torch.Tensor]:
    """A function of a count: normal numbers, or lengths and segments up to `most`, or flags."""
    kind = type_.dtype

    def numbers(count: int) -> torch.Tensor:
        if kind.is_floating_point:
            drawn = torch.randn(count, generator=random, dtype=torch.float64)
            return (drawn * spread + mean).to(kind)
        if kind == torch.bool:  # few flags leave rows that see nothing
            share = (0.1, 0.5, 0.9)[int(torch.randint(3, (), generator=random))]
            return torch.rand(count, generator=random) < share
        if not type_.shape:  # seed or offset: all 64 bits
            return torch.randint(-(2**63), 2**63 - 1, (count,), generator=random)
        if kind == IN_PAIRS:
            return torch.randint(256, (count,), generator=random).to(kind)
        if kind == torch.int8:
            return torch.randint(-6, 7, (count,), generator=random).to(kind)
        return torch.randint(most + 1, (count,), generator=random).to(kind)

    return numbers


def lay_out(
    spec: TensorSpec,
    values: Callable[[int], torch.Tensor],
    random: torch.Generator,
    device: str = "cpu",
) -> torch.Tensor:
    """A tensor of this spec, anywhere in a storage; meaningless strides are odd numbers."""
    start, odd = (int(x) for x in torch.randint(0, 6, (2,), generator=random))
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
    empty = 0 in spec.shape
    storage = values(start + (0 if empty else last + 1))
    plain = dense_strides(spec.shape)
    strides = [odd if empty or n == 1 else s for n, s in zip(spec.shape, spec.strides, strict=True)]
    where = spec.shape, plain if empty and odd < 3 else strides, start
    if storage.is_floating_point():  # NaN in its gaps, and in three more elements
        gaps = torch.ones(len(storage) + 3, dtype=torch.bool)
        gaps[torch.arange(len(storage)).as_strided(*where)] = False
        wide = torch.cat([storage, storage.new_zeros(3)]).double()  # PyTorch fills no float8
        storage = wide.masked_fill_(gaps, torch.nan).to(storage.dtype)
    tensor = storage.to(device).as_strided(*where)
    assert TensorSpec.like(tensor) == spec
    return tensor


def lay_anyhow(x: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """These numbers as a slice with gaps; axes of equal numbers may become expanded.

    So lie columns of a table of metadata, or one length for all. The integers in gaps are not valid
    starts, lengths or pages.
    """
    steps = torch.randint(1, 4, (max(1, x.ndim),), generator=random).tolist()
    narrow = x
    for axis in range(x.ndim):
        alike = x.shape[axis] and bool((narrow == narrow.narrow(axis, 0, 1)).all())
        if alike and int(torch.randint(2, (), generator=random)):
            narrow = narrow.narrow(axis, 0, 1)
    rooms = [n * step for n, step in zip(narrow.shape, steps, strict=False)]
    room = torch.full(rooms, torch.nan if x.is_floating_point() else BETWEEN).to(x.dtype)
    cut = room[tuple(slice(None, None, step) for step in steps[: x.ndim])]
    return cut.copy_(narrow).expand(x.shape)


def cotangents_for(
    graph: Graph, seed: int, device: str = "cpu"
) -> tuple[Any, ...]:  # Any: tensors, and None for an output that has no gradient
    """A dense cotangent for each output, of its shape and dtype; None without a gradient."""
    random = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(t.shape, generator=random, dtype=torch.float64).to(device, t.dtype)
        if i in graph.differentiable_outputs
        else None
        for i, t in zip(graph.outputs, graph.output_types, strict=True)
    )
