"""A machine with GPUs, played: what PyTorch tells of them, which is current, tensors on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from attrs import define, field

import attn_graph as ag
from attn_graph.machine import target
from attn_graph.machine.gpus import devices

MEMORY = 2**36


def described(name: str) -> SimpleNamespace:
    """A device of the table as PyTorch tells of it."""
    known = devices()[name]
    return SimpleNamespace(
        name=known.product,
        major=known.sm // 10,
        minor=known.sm % 10,
        multi_processor_count=known.multiprocessors,
        shared_memory_per_block_optin=known.shared_memory,
        shared_memory_per_multiprocessor=known.shared_memory_per_sm,
        total_memory=MEMORY,
        L2_cache_size=known.l2,
    )


@final
@define
class Box:
    """Its GPUs in order, and the current one."""

    gpus: list[SimpleNamespace]
    current: int = field(default=0, init=False)

    def exchange(self, index: int) -> int:
        """Make a GPU current, or none other if it is negative; the one that was before."""
        before = self.current
        self.current = index if index >= 0 else before
        return before

    def properties(self, index: int | None = None) -> SimpleNamespace:
        return self.gpus[self.current if index is None else index]


@contextmanager
def box(*names: str) -> Iterator[Box]:
    """Within this block the machine has these GPUs of the table, the first one current."""
    found = Box([described(name) for name in names])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(found.gpus),
            "current_device": lambda: found.current,
            "get_device_properties": found.properties,
            "_exchange_device": found.exchange,
            "_maybe_exchange_device": found.exchange,
        }.items():
            patch.setattr(torch.cuda, name, value)
        forget()
        try:
            yield found
        finally:
            forget()


def forget() -> None:
    """No plan and no target of the machine as it was."""
    target.gpu_count.cache_clear()
    target.describe_machine.cache_clear()
    ag.clear_cache()


@final
class Placed(torch.Tensor):
    """A tensor that says that it is on a device, and holds nothing."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **more: Any) -> Any:  # Any: as PyTorch has it
        raise AssertionError("it holds nothing")


def placed(spec: ag.TensorSpec, device: str) -> torch.Tensor:
    """A tensor of a spec on a device of a box."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        Placed, spec.shape, strides=spec.strides, dtype=spec.dtype, device=torch.device(device)
    )
    return made
