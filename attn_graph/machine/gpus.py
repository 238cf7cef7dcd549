"""GPUs to plan for without having them, from the table in gpus.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import final

from attrs import frozen

Peaks = tuple[tuple[str, float], ...]  # (dtype, flop/s)


@final
@frozen
class Device:
    """A GPU as planning sees it. The top of gpus.toml explains the fields."""

    product: str
    sm: int
    multiprocessors: int
    shared_memory: int
    shared_memory_per_sm: int
    programs_per_sm: int
    threads_per_sm: int
    memory: int
    bandwidth: float
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    l2: int
    peaks: Peaks


@cache
def devices() -> dict[str, Device]:
    """All GPUs of the table, by the names for `Target.of`."""
    text = Path(__file__).with_name("gpus.toml").read_text()
    return {
        name: Device(**fields | {"peaks": tuple(fields["peaks"].items())})
        for name, fields in tomllib.loads(text).items()
    }
