"""The machine to run a graph on: a device and its libraries, as a value."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, final

import torch
from attrs import field, frozen

from attn_graph.errors import GraphError, show
from attn_graph.machine.ambient import neutral_state
from attn_graph.machine.gpus import Peaks, devices
from attn_graph.spec import as_integer, maybe_real, maybe_whole

LOG = logging.getLogger("attn_graph")
FRONTEND = "nvidia-cudnn-frontend"
PACKAGES = ("torch", "triton", FRONTEND)
CUDNN = (  # packages, one of them cuDNN itself; jit has the part for attention
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-jit-cu13",
    "nvidia-cudnn-jit-cu12",
)
FLASH = (
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
)  # and its compiler
SYSTEM_CUDNN = "cudnn"  # loaded by PyTorch if pip installed none: a system's, or conda's
LIBRARIES = (*PACKAGES, *FLASH, *CUDNN, SYSTEM_CUDNN)
Version = tuple[int, int, int]
VIRTUAL: set[Target] = set()  # GPUs emulated by this machine's CPU, on its own tensors


@final
@frozen(cache_hash=True)
class Target:
    """A device and its libraries. Planning reads this value and never looks at the machine again.

    kind: "cpu" or "cuda". sm: compute capability, 90 for 9.0; 0 on a CPU. native: the half
    precision dtypes, "f16" and "bf16", supported by the CPU's matrix instructions. libraries: name
    and version of each installed one. interprets: True if Triton's kernels run on the CPU, slowly,
    because TRITON_INTERPRET=1 was set when Python started.

    All other fields serve cost estimates; None is not known. shared_memory: bytes for one program.
    memory, l2: bytes. bandwidth: bytes/s. peaks: dtype and dense flop/s of matrix products; "f32"
    is without TF32. driver: the version of CUDA supported by the GPU's driver, 13000 for 13.0; each
    cuDNN plan built ahead is for one driver version. `attrs.evolve(Target.of("h200"),
    bandwidth=4e12)` is a machine of your own.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    sm: int = field(default=0, converter=as_integer)
    native: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()
    interprets: bool = False
    multiprocessors: int | None = field(default=None, converter=maybe_whole, kw_only=True)
    shared_memory: int | None = field(default=None, converter=maybe_whole, kw_only=True)
    shared_memory_per_sm: int | None = field(default=None, converter=maybe_whole, kw_only=True)
    memory: int | None = field(default=None, converter=maybe_whole, kw_only=True)
    bandwidth: float | None = field(default=None, converter=maybe_real, kw_only=True)
    l2: int | None = field(default=None, converter=maybe_whole, kw_only=True)
    peaks: Peaks = field(default=(), kw_only=True)
    driver: int | None = field(default=None, converter=maybe_whole, kw_only=True)

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> Target:
        """A device of this machine, by default the current GPU, or the CPU if PyTorch has no GPU.

        Equal GPUs are equal targets, and share plans. Raises GraphError for a device missing here.
        """
        if device is None:
            return describe_machine(current_gpu() if gpu_count() else "cpu")
        try:
            place = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise GraphError(f'{show(device)} is not a device; write "cuda:0" or "cpu"') from error
        if place.type == "cpu":
            return describe_machine("cpu")
        index = current_gpu() if place.index is None else place.index
        if place.type != "cuda" or index >= gpu_count():
            here, names = ", ".join(map(str, local_devices())), ", ".join(devices())
            raise GraphError(
                f"device {str(place)!r} is not here; here are {here}; to plan for a GPU of another "
                f"machine, write its name: {names}"
            )
        return describe_machine(index)

    @classmethod
    def of(cls, name: str) -> Target:
        """A machine by name, in small or capital letters, with the libraries installed here: `cpu`,
        one of gpus.toml, or `cuda` and `cuda:0` for GPUs of this machine.

        Raises GraphError for an unknown name, and for a missing GPU.
        """
        known = name.lower() if isinstance(name, str) else None
        if known in devices():
            return describe_machine(known)
        if known is not None and known.partition(":")[0] in ("cpu", "cuda"):
            return cls.here(known)
        names = ", ".join(devices())
        raise GraphError(f"target {show(name)} is not known; known are cpu, cuda, {names}")

    @cached_property
    def cudnn_versions(self) -> tuple[Version | None, Version | None]:
        """The versions of cuDNN and of its frontend; None for a missing library."""
        known = dict(self.libraries)
        cudnn = next(filter(None, map(known.get, (*CUDNN, SYSTEM_CUDNN))), "")
        return read_version(cudnn), read_version(known.get(FRONTEND, ""))

    def peak(self, dtype: str) -> float | None:
        """Dense flop/s of matrix products in a dtype, "bf16" say; None: not known."""
        return dict(self.peaks).get(dtype)

    @property
    def device(self) -> torch.device | None:
        """The matching device of this machine, if any; the current GPU before others."""
        return next((d for d in local_devices() if Target.here(d) == self), None)

    @property
    def is_emulated(self) -> bool:
        """True for a GPU of VIRTUAL."""
        return self in VIRTUAL

    @property
    def tensors_on(self) -> str:
        """The type of device for its tensors: `kind`, or "cpu" for an emulated GPU."""
        return "cpu" if self.is_emulated else self.kind

    def current(self) -> AbstractContextManager[object]:
        """A context in which its device is the current one, if it is a GPU of this machine."""
        device = self.device if gpu_count() else None
        elsewhere = device is not None and device.type == "cuda" and device.index != current_gpu()
        return torch.cuda.device(device) if elsewhere else nullcontext()

    def __str__(self) -> str:
        kind = f"{self.kind} sm_{self.sm}" if self.sm else self.kind
        return self.name if self.name == kind else f"{self.name} ({kind})"


def default_target(device: torch.device | None = None) -> Target:
    """The target of a graph without one, for tensors on a device: a GPU that is emulated now for
    tensors of the CPU and for those of no known device, else `Target.here(device)`."""
    emulated = next(iter(VIRTUAL), None)
    if emulated is not None and (device is None or device.type == emulated.tensors_on):
        return emulated
    return Target.here(device)


@cache
def gpu_count() -> int:
    """The number of GPUs that PyTorch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current_gpu() -> int:
    """The current GPU of the calling thread; 0 before anything is on one, and after a fork."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def local_devices() -> Iterator[torch.device]:
    """This machine's GPUs, the current one first, and its CPU."""
    now = current_gpu()
    yield from (torch.device("cuda", n) for n in sorted(range(gpu_count()), key=lambda n: n != now))
    yield torch.device("cpu")


@cache
@neutral_state()
def describe_machine(machine: str | int) -> Target:
    """This machine's CPU, "cpu"; a GPU of it, by number; or one of the table, by name."""
    if machine == "cpu":
        return describe_cpu()
    return describe_gpu(machine) if isinstance(machine, int) else describe_product(machine)


def describe_product(name: str) -> Target:
    """A GPU of the table, with the libraries installed here."""
    device = devices()[name]
    return Target(
        name,
        "cuda",
        device.sm,
        libraries=installed_libraries(),
        multiprocessors=device.multiprocessors,
        shared_memory=device.shared_memory,
        shared_memory_per_sm=device.shared_memory_per_sm,
        memory=device.memory,
        bandwidth=device.bandwidth,
        l2=device.l2,
        peaks=device.peaks,
    )


def describe_gpu(index: int) -> Target:
    """A GPU of this machine. Its rates are from the table, if it lists this very product."""
    gpu: Any = torch.cuda.get_device_properties(index)  # Any: PyTorch's stubs leave a field out
    known = next((device for device in devices().values() if device.product == gpu.name), None)
    return Target(
        gpu.name,
        "cuda",
        10 * gpu.major + gpu.minor,
        libraries=installed_libraries(),
        interprets=triton_interprets(),
        multiprocessors=gpu.multi_processor_count,
        shared_memory=gpu.shared_memory_per_block_optin,
        shared_memory_per_sm=gpu.shared_memory_per_multiprocessor,
        memory=gpu.total_memory,
        bandwidth=known.bandwidth if known else None,
        l2=gpu.L2_cache_size,
        peaks=known.peaks if known else (),
    )


def describe_cpu() -> Target:
    """The CPU of this machine. native: as oneDNN, PyTorch's CPU library, reports it."""
    native = []
    if torch.backends.mkldnn.is_available():
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            native.append("bf16")
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            native.append("f16")
    return Target("cpu", "cpu", 0, tuple(native), installed_libraries(), triton_interprets())


def triton_interprets() -> bool:
    """True if Triton will interpret its kernels, by its own list of true values."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def installed_libraries() -> tuple[tuple[str, str], ...]:
    by_pip = [(name, version_of(name)) for name in (*PACKAGES, *FLASH, *CUDNN)]
    has_cudnn = any(number for name, number in by_pip if name in CUDNN)
    libraries = by_pip if has_cudnn else [*by_pip, (SYSTEM_CUDNN, system_cudnn())]
    return tuple((name, number) for name, number in libraries if number)


def read_version(text: str) -> Version | None:
    """Major, minor and patch; None without a number."""
    numbers = re.findall(r"\d+", text)[:3]
    major, minor, patch = (*map(int, numbers), 0, 0, 0)[:3]
    return (major, minor, patch) if numbers else None


def version_of(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def system_cudnn() -> str | None:
    """The version of the cuDNN loaded by PyTorch, "9.20.0"; None without one."""
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:  # it is older than PyTorch's build expects
        LOG.warning("PyTorch does not load cuDNN: %s", error)
        return None
    if number is None:
        return None
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
