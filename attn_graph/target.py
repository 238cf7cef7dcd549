"""Where a graph is to run: a device and the libraries on it, as a value."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, final

import torch
from attrs import field, frozen

from attn_graph.ambient import outside
from attn_graph.devices import Peaks, devices, product
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
@frozen(cache_hash=True)
class Target:
    """A device and its libraries. Planning reads this value and never asks the machine again.

    kind: "cpu" or "cuda". sm: compute capability, 90 for 9.0; 0 on a CPU. native: the half
    precision dtypes, "f16" and "bf16", that the CPU's matrix instructions take as they are.
    libraries: name and version of each that is installed. interprets: whether Triton's kernels
    run on the CPU, slowly, because TRITON_INTERPRET=1 was set when Python started.

    The rest is what costs are told from; None is not known. shared_memory: bytes that one program
    may ask for. memory, l2: bytes. bandwidth: bytes/s. peaks: dtype and dense flop/s of matrix
    products; "f32" is without TF32. `attrs.evolve(Target.of("h200"), bandwidth=4e12)` is a machine
    of your own.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    sm: int = 0
    native: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()
    interprets: bool = False
    multiprocessors: int | None = field(default=None, kw_only=True)
    shared_memory: int | None = field(default=None, kw_only=True)
    shared_memory_per_sm: int | None = field(default=None, kw_only=True)
    memory: int | None = field(default=None, kw_only=True)
    bandwidth: float | None = field(default=None, kw_only=True)
    l2: int | None = field(default=None, kw_only=True)
    peaks: Peaks = field(default=(), kw_only=True)

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
        device = devices()[name]
        return cls(
            name,
            "cuda",
            device.sm,
            libraries=installed(),
            multiprocessors=device.multiprocessors,
            shared_memory=device.shared_memory,
            shared_memory_per_sm=device.shared_memory_per_sm,
            memory=device.memory,
            bandwidth=device.bandwidth,
            l2=device.l2,
            peaks=device.peaks,
        )

    def peak(self, dtype: str) -> float | None:
        """Dense flop/s of matrix products in a dtype, "bf16" say; None: not known."""
        return dict(self.peaks).get(dtype)

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind)

    def __str__(self) -> str:
        told = f"{self.kind} sm_{self.sm}" if self.sm else self.kind
        return self.name if self.name == told else f"{self.name} ({told})"


@cache
@outside()
def machine() -> Target:
    """The GPU as PyTorch tells it. Its rates are the table's, if that has the very product."""
    if not torch.cuda.is_available():
        return cpu()
    found: Any = torch.cuda.get_device_properties()  # Any: PyTorch's stubs leave a field out
    known = product(found.name)
    return Target(
        found.name,
        "cuda",
        10 * found.major + found.minor,
        libraries=installed(),
        interprets=interpreting(),
        multiprocessors=found.multi_processor_count,
        shared_memory=found.shared_memory_per_block_optin,
        shared_memory_per_sm=found.shared_memory_per_multiprocessor,
        memory=found.total_memory,
        bandwidth=known.bandwidth if known else None,
        l2=found.L2_cache_size,
        peaks=known.peaks if known else (),
    )


@cache
@outside()
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
