"""A frozen value's memory of devices between calls: its only cell that is written."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

import torch
from attrs import define, field

from attn_graph.errors import PlanTargetError
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.workspace import is_capturing

T = TypeVar("T")


@final
@define(eq=False)
class DeviceMemo(Generic[T]):
    """Things made for a device, or for a device and a name, at first use.

    Threads that need one at the same time may make it twice, and then share the first.
    """

    things: dict[Hashable, T] = field(factory=dict, init=False)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The thing of this key; `make` makes a missing one."""
        thing = self.things.get(key)
        return self.things.setdefault(key, make()) if thing is None else thing


def copy_to(device: torch.device, host: torch.Tensor, what: str) -> torch.Tensor:
    """A lasting copy of a host tensor on a device: not part of a mode, trace or capture.

    The host waits for the copy, because another stream may read it next. Raises PlanTargetError
    while a CUDA graph is captured: the memory would be the graph's.
    """
    if device.type == "cuda" and is_capturing(device):
        raise PlanTargetError(
            f"{what} are not on {device} yet, and nothing is copied there while a CUDA graph is "
            "captured; call the plan once before the capture, and its gradient if that is captured"
        )
    with neutral_state():
        return host.to(device)


def full_vector(
    B: int, each: float, device: torch.device, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """B equal numbers on a device, lasting as `copy_to`'s."""
    with neutral_state():
        host = torch.full((B,), each, dtype=dtype)
    return copy_to(device, host, "numbers")
