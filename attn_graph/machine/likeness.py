"""Whether tensors are like others: asked in full once, then in one call of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch._C._dynamo.guards import TensorGuards

# For `True in map(getattr, tensors, *NESTED)`, before a check: PyTorch's ends the process at nested
# tensors that have no strides.
NESTED = (repeat("is_nested"), repeat(False))
Check = Callable[..., bool]
Look = tuple[object, ...]
OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def never(*tensors: object) -> bool:
    """A check that nothing passes."""
    return False


def likeness(tensors: Sequence[torch.Tensor], *, sized: bool = True) -> Check:
    """A check that as many tensors pass if nothing that a plan rests on sets them apart from these.

    Of each tensor it compares class, shape, strides, dtype, device, requires_grad and the negative
    bit; of the thread, inference mode and where autocast is on. Other numbers of tensors raise
    TypeError. Nothing passes where a class is the user's own: classes are compared by their place
    in memory, which another may take. sized: whether shapes and strides count; else the number of
    axes does.
    """
    if not {*map(type, tensors)} <= {*OWN_CLASSES}:
        return never
    firsts = [next(n for n, other in enumerate(tensors) if other is t) for t in tensors]
    each = [t for n, t in enumerate(tensors) if firsts[n] == n]
    check: Check = TensorGuards(
        *each,
        dynamic_dims_sizes=[[*t.shape] if sized else [None] * t.ndim for t in each],  # type: ignore[misc]  # torch's stubs are wrong
        dynamic_dims_strides=[[*t.stride()] if sized else [None] * t.ndim for t in each],  # type: ignore[misc]  # as above
    ).check
    return check if len(each) == len(tensors) else partial(check_repeated, check, firsts)


def check_repeated(check: Check, firsts: Sequence[int], *tensors: torch.Tensor) -> bool:
    """The same where a tensor is passed several times, which PyTorch's check refuses.

    firsts: for each tensor the place where it is passed first.
    """
    for t, n in zip(tensors, firsts, strict=True):
        if t is not tensors[n]:
            return False
    return check(*[tensors[n] for n in dict.fromkeys(firsts)])


def look_at(t: object) -> Look | None:
    """What a plan rests on, of one tensor, as a value. None for anything that is not a dense
    tensor."""
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.is_nested:
        return None
    return t.shape, t.stride(), t.dtype, t.device, t.is_neg()
