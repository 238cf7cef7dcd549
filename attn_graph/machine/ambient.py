"""PyTorch's state around a call, which must not reach numbers, nor what is kept between calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _DisableAutocast,
    _is_tracing,
    _len_torch_dispatch_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

without_autocast = _DisableAutocast  # a context: operations run in the dtypes they are given


def is_traced() -> bool:
    """Whether a tensor made now may belong to a dispatch mode, a transform or a trace.

    It may then be fake, wrapped or a part of someone's graph, and must not outlive the call.
    """
    return bool(_len_torch_dispatch_stack() or _are_functorch_transforms_active() or _is_tracing())


@contextmanager
def outside() -> Iterator[None]:
    """Work as if nothing surrounded it: no modes, transforms, autocast, nor default device.

    For planning, whose tensors are kept. It can decorate a function.
    """
    with (
        torch.inference_mode(False),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        without_autocast(),
        torch.device("cpu"),
    ):
        yield


@contextmanager
def steady(device: torch.device) -> Iterator[None]:
    """Run plain PyTorch without autocast, and make new tensors on `device`.

    Dispatch modes stay: they may watch a computation, or trace it.
    """
    with without_autocast(), device:
        yield


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether forward mode differentiates by one of these tensors."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )
