"""Forward mode derivatives of functions of tensors, by PyTorch, for steps of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.func import jvp

Tensors = Mapping[str, torch.Tensor]  # by name


def trace_along(
    fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tangent: torch.Tensor
) -> torch.Tensor:
    """The tangent of fn(x), which may write to x. x and its tangent stay as they are."""
    result: torch.Tensor = jvp(lambda each: fn(each.clone()), (x,), (tangent,))[1]
    return result


def trace_along_data(
    fn: Callable[[torch.Tensor, Tensors], torch.Tensor],
    s: torch.Tensor,
    data: Tensors,
    tangents: Tensors,
) -> torch.Tensor:
    """The tangent of fn(s, data), which may write to s, as some of the data move."""
    wide = {name: data[name].to(s.dtype) for name in tangents}
    moved = {name: x.to(s.dtype) for name, x in tangents.items()}

    def call(s: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
        return fn(s.clone(), {**data, **own})

    result: torch.Tensor = jvp(call, (s, wide), (torch.zeros_like(s), moved))[1]
    return result
