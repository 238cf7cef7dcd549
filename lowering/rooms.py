"""Rooms: the caller's tensors for results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from attn_graph.errors import PlanMismatchError
from attn_graph.lowering.problem import find_misplaced
from attn_graph.spec import normalise_strides

Rooms = Mapping[str, torch.Tensor]  # by the result's name
ResultLayout = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape, strides, dtype of a result
NO_ROOMS: Rooms = {}
zero_each = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]  # documented


def room_name(result: str) -> str:
    """The name of a room among the buffers of a call."""
    return f"out.{result}"


def room_or_new(
    rooms: Rooms, name: str, layout: ResultLayout, device: torch.device
) -> torch.Tensor:
    """The room of a result, or new memory if it has none, or if it lies in another way."""
    shape, strides, dtype = layout
    room = rooms.get(name)
    if room is not None and room.dtype == dtype:
        due = normalise_strides(shape, strides)
        if normalise_strides(room.shape, room.stride()) == due:
            return room.as_strided(shape, strides)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def require_aligned(rooms: Rooms) -> None:
    """Raise PlanMismatchError for rooms that do not begin at multiples of 16 bytes."""
    if texts := find_misplaced(rooms.items()):
        raise PlanMismatchError(*texts, way_out="")


def write_named(
    run: Callable[..., tuple[Sequence[torch.Tensor], object]],
    names: Sequence[str],
    rooms: Sequence[torch.Tensor],
    *tensors: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """`Executable.write`, by a function that takes rooms by name. names: of the outputs."""
    return run(*tensors, rooms=dict(zip(names, rooms, strict=True)))[0]
