"""PyTorch's state around a call. It must not change a number, nor anything that outlives the
call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _are_functorch_transforms_active,
    _DisableAutocast,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from attn_graph.errors import GraphError

COUNTER = "torch.utils.flop_counter"  # imports Triton: read only after others imported it
Formula = Callable[..., int]  # of an operator's arguments

# While a transform of torch.func runs an operator, PyTorch leaves out what serves tensors of zeros
# without memory, which forward mode makes: without it they are read.
WITHIN_TRANSFORM = DispatchKey.ZeroTensor

flop_formulas: dict[Any, Formula] = {}  # by operator; Any: PyTorch's packets of overloads
without_autocast = _DisableAutocast  # in this context operations keep the dtypes of tensors


def named_in_profiles(name: str) -> AbstractContextManager[object]:
    """A context that PyTorch's profilers and NVTX show as `attn_graph.<name>`."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"attn_graph.{name}")


def is_traced() -> bool:
    """True if a tensor made now may belong to a dispatch mode, a transform or a trace.

    It may then be fake, wrapped or a part of another graph, and must not outlive the call.
    """
    return _len_torch_dispatch_stack() > 0 or _are_functorch_transforms_active() or _is_tracing()


def require_untraced() -> None:
    """Raise GraphError for results in the caller's tensors if the call is traced or transformed."""
    if is_dynamo_compiling() or is_traced():
        raise GraphError(
            "out= is written while a call runs, and this one is traced or transformed; "
            "write out.copy_(...) of its result"
        )


@cache
def usual_keys() -> tuple[DispatchKeySet, DispatchKeySet]:
    """What PyTorch's dispatcher has and leaves out by itself, as in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        read = _dispatch_tls_local_include_set, _dispatch_tls_local_exclude_set
        have, leave = (thread.submit(each).result() for each in read)
    return have, leave


def is_neutral() -> bool:
    """True without modes, transforms, autocast and a default device."""
    return not (
        torch.is_inference_mode_enabled()
        or _is_any_autocast_enabled()
        or _are_functorch_transforms_active()
        or _dispatch_tls_is_dispatch_key_excluded(WITHIN_TRANSFORM)
        or _len_torch_function_stack()  # a default device is on it
        or _len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
    )


@contextmanager
def neutral_state() -> Iterator[None]:
    """A context without modes, transforms, autocast and default device, whatever surrounds it.

    For planning, whose tensors outlive the call. It can decorate a function.
    """
    if is_neutral():  # as it mostly is
        yield
        return
    with (
        torch.inference_mode(False),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _ForceDispatchKeyGuard(*usual_keys()),
        without_autocast(),
        # only where a default device may be set: within it Python runs at every operation
        torch.device("cpu") if _len_torch_function_stack() else nullcontext(),
    ):
        yield


@contextmanager
def plain_ops_on(device: torch.device) -> Iterator[None]:
    """A context without autocast, in which new tensors are on `device`.

    Dispatch modes stay: they may watch a computation, or trace it.
    """
    with without_autocast(), device:
        yield


def constant_beside(constant: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor made by planning, in the form for operations on `tensor`: fake beside a fake one."""
    mode = detect_fake_mode((tensor,))
    if mode is None or mode.allow_non_fake_inputs:
        return constant
    fake: torch.Tensor = mode.from_tensor(constant)
    return fake


def has_tangent(tensors: Sequence[torch.Tensor]) -> bool:
    """True if one of these tensors has a tangent of forward mode."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def teach_counters() -> None:
    """Give the flops of our operators to PyTorch's registry, and to counters that are open."""
    module = sys.modules.get(COUNTER)
    if module is None:
        return
    module.flop_registry.update(flop_formulas)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module._FlopCounterMode):
            mode.counter.flop_registry.update(flop_formulas)  # pyright: ignore[reportAttributeAccessIssue]  # of a class looked up at run time
