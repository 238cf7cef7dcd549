"""Checks for tensors like earlier ones: asked in full once, then in one call of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch._C._dynamo.guards import TensorGuards

from attn_graph.spec import layout_problem

# For `True in map(getattr, tensors, *NESTED)`, before a check: PyTorch's ends the process at nested
# tensors without strides.
NESTED = (repeat("is_nested"), repeat(False))
Check = Callable[..., bool]
Look = tuple[object, ...]
OWN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def never(*tensors: object) -> bool:
    return False


def likeness(tensors: Sequence[torch.Tensor], *, sized: bool = True) -> Check:
    """A check passed by as many tensors that differ from these in nothing a plan depends on.

    Of each tensor it compares class, shape, strides, dtype, device, requires_grad and the negative
    bit; of the thread, inference mode and autocast's devices. Other numbers of tensors raise
    TypeError. The check always fails for a user's own class: classes are compared by their place in
    memory, and another class may take it. sized: True compares shapes and strides, False the number
    of axes.
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
    """The check for a tensor passed several times, refused by PyTorch's own.

    firsts: for each tensor the place of its first occurrence.
    """
    for t, n in zip(tensors, firsts, strict=True):
        if t is not tensors[n]:
            return False
    return check(*[tensors[n] for n in dict.fromkeys(firsts)])


def look_at(t: object) -> Look | None:
    """The properties of a dense tensor a plan depends on, as a value. None for anything else."""
    if not isinstance(t, torch.Tensor) or layout_problem(t):
        return None
    return t.shape, t.stride(), t.dtype, t.device, t.is_neg()
