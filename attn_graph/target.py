"""Where a graph is to run: a device and the libraries on it, as a value."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, final

import torch
from attrs import frozen

from attn_graph.devices import devices
from attn_graph.errors import GraphError

LIBRARIES = (
    "torch",
    "triton",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-jit-cu13",
    "nvidia-cudnn-jit-cu12",
)


@final
@frozen
class Target:
    """A device and its libraries. Planning reads this value and never asks the machine again.

    kind: "cpu" or "cuda". sm: compute capability, 90 for 9.0; 0 on a CPU. native: the half
    precision dtypes, "f16" and "bf16", that the CPU's matrix instructions take as they are.
    libraries: name and version of each that is installed. interprets: whether Triton's kernels
    run on the CPU, slowly, because TRITON_INTERPRET=1 was set when Python started.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    sm: int = 0
    native: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()
    interprets: bool = False

    @classmethod
    def here(cls) -> Target:
        """This machine: its GPU if PyTorch can use one, else its CPU."""
        return machine()

    @classmethod
    def of(cls, name: str) -> Target:
        """A machine by name, `cpu` or one of devices.toml, with the libraries installed here.

        Raises GraphError for an unknown name.
        """
        if name == "cpu":
            return cpu()
        if name not in devices():
            raise GraphError(f"target {name!r} is not known; known are cpu, {', '.join(devices())}")
        return cls(name, "cuda", devices()[name].sm, (), installed())

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    def __str__(self) -> str:
        told = f"{self.kind} sm_{self.sm}" if self.sm else self.kind
        return self.name if self.name == told else f"{self.name} ({told})"


@cache
def machine() -> Target:
    if not torch.cuda.is_available():
        return cpu()
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return Target(name, "cuda", 10 * major + minor, (), installed(), interpreting())


@cache
def cpu() -> Target:
    """The CPU of this machine. What is native is what oneDNN, PyTorch's CPU library, says it is."""
    found = []
    if torch.backends.mkldnn.is_available():
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found.append("bf16")
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            found.append("f16")
    return Target("cpu", "cpu", 0, tuple(found), installed(), interpreting())


def interpreting() -> bool:
    """Whether Triton will interpret its kernels, by the values that Triton takes for true."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def installed() -> tuple[tuple[str, str], ...]:
    return tuple((name, found) for name in LIBRARIES if (found := version_of(name)))


def version_of(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
