"""GPUs that one can plan for without having them, from the table in gpus.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import final

from attrs import frozen

Peaks = tuple[tuple[str, float], ...]  # (dtype, flop/s)


@final
@frozen
class Device:
    """What a GPU is, as far as planning asks. Fields as told at the top of gpus.toml."""

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
    """All of the table, by the name that `Target.of` takes."""
    text = files("attn_graph.machine").joinpath("gpus.toml").read_text()
    return {
        name: Device(**fields | {"peaks": tuple(fields["peaks"].items())})
        for name, fields in tomllib.loads(text).items()
    }


def product(name: str) -> Device | None:
    """The device that drivers call by exactly this name: "NVIDIA H200 NVL" is another one."""
    return next((device for device in devices().values() if device.product == name), None)
