"""Forward mode derivatives of functions of tensors, by PyTorch, for a user's own steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from warnings import catch_warnings, simplefilter

import torch
from torch.autograd import forward_ad

from attn_graph.machine.imports import load_modules

Tensors = Mapping[str, torch.Tensor]  # by name
DERIVATIVES = "torch._decomp.decompositions_for_jvp"


@contextmanager
def forward_mode() -> Iterator[None]:
    """A context with forward mode: the current one, since PyTorch can't nest, or a new one."""
    # make_dual imports this at its first call, if Python compiles at all. It scripts functions by
    # torch.jit.script, which is deprecated: PyTorch would warn of its own code.
    imports = os.environ.get("PYTORCH_JIT", "1") == "1" and __debug__
    if imports and DERIVATIVES not in sys.modules:
        with catch_warnings():
            simplefilter("ignore", DeprecationWarning)
            load_modules(DERIVATIVES)
    level = nullcontext() if forward_ad._current_level >= 0 else forward_ad.dual_level()
    with forward_ad._set_fwd_grad_enabled(True), level:
        yield


def tangent_of(result: torch.Tensor) -> torch.Tensor:
    """The tangent of a result; zeros if it has none."""
    primal, tangent = forward_ad.unpack_dual(result)
    return torch.zeros_like(primal) if tangent is None else tangent


def trace_along(
    fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tangent: torch.Tensor
) -> torch.Tensor:
    """The tangent of fn(x), which may write to x. x and its tangent stay unchanged."""
    with forward_mode():
        return tangent_of(fn(forward_ad.make_dual(x, tangent).clone()))


def trace_along_data(
    fn: Callable[[torch.Tensor, Tensors], torch.Tensor],
    s: torch.Tensor,
    data: Tensors,
    tangents: Tensors,
) -> torch.Tensor:
    """The tangent of fn(s, data), which may write to s, as some of the data move."""
    with forward_mode():
        moving = {
            name: forward_ad.make_dual(data[name].to(s.dtype), t.to(s.dtype))
            for name, t in tangents.items()
        }
        return tangent_of(fn(s.clone(), {**data, **moving}))


def trace_results(
    fn: Callable[..., tuple[torch.Tensor, ...]],
    operands: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """fn(*operands), and the tangent of each result. None in tangents is 0."""
    with forward_mode():
        pairs = zip(operands, tangents, strict=True)
        results = fn(*(x if t is None else forward_ad.make_dual(x.clone(), t) for x, t in pairs))
        primals = tuple([forward_ad.unpack_dual(x).primal for x in results])
        return primals, tuple(map(tangent_of, results))
