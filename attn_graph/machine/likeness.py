"""Whether tensors are like others: asked in full once, then in one call of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards

Check = Callable[..., bool]
Look = tuple[object, ...]
OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def never(*tensors: object) -> bool:
    """A check that nothing passes."""
    return False


def likeness(tensors: Sequence[torch.Tensor]) -> Check:
    """A check that as many tensors pass if nothing that a plan rests on sets them apart from these.

    Of each tensor it compares class, shape, strides, dtype, device, requires_grad and the negative
    bit; of the thread, inference mode and where autocast is on. Other numbers of tensors raise
    TypeError. Nothing passes where a class is the user's own: classes are compared by their place
    in memory, which another may take.
    """
    if not {*map(type, tensors)} <= {*OWN_CLASSES}:
        return never
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[[*t.shape] for t in tensors],  # type: ignore[misc]  # torch's stubs are wrong
        dynamic_dims_strides=[[*t.stride()] for t in tensors],  # type: ignore[misc]  # as above
    ).check


def look_at(t: object) -> Look | None:
    """What a plan rests on, of one tensor, as a value. None for what is no dense tensor."""
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.is_nested:
        return None
    return t.shape, t.stride(), t.dtype, t.device, t.is_neg()
