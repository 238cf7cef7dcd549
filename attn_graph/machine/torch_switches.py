"""PyTorch's process-wide switches for attention, as a value, read once by each `compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, final

import torch
from torch._C import (  # behind torch.backends and torch itself, and faster: a call in each
    _get_cudnn_enabled,
    _get_cudnn_sdp_enabled,
    _get_deterministic_algorithms,
    _get_flash_sdp_enabled,
    _get_fp32_precision_getter,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _get_sdp_priority_order,
)

from attn_graph.machine.target import VIRTUAL

Precision = Literal["ieee", "tf32", "fp8"]
KernelName = Literal["math", "flash", "efficient", "cudnn"]
LIBRARIES = {"cuda": "cuda", "cpu": "mkldnn"}  # torch.backends.X.matmul, by kind of device

RawSwitches = tuple[
    bool, bool, bool, bool, str, str, str | None, bool, bool, tuple[int, ...]
]  # in the order of Switches

ROUNDED = ("tf32", "bf16")
KERNELS: tuple[KernelName, ...] = ("math", "flash", "efficient", "cudnn")  # by number in SDPBackend
SETTERS: dict[KernelName, str] = {  # of torch.backends.cuda, by the kernel it turns on and off
    "math": "enable_math_sdp",
    "flash": "enable_flash_sdp",
    "efficient": "enable_mem_efficient_sdp",
    "cudnn": "enable_cudnn_sdp",
}
# PyTorch's own orders: the second one on GPUs of compute capability 9 and 10, from the process's
# first call of scaled_dot_product_attention there.
USUAL: tuple[KernelName, ...] = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST: tuple[KernelName, ...] = ("cudnn", "flash", "efficient", "math")
PUTS_CUDNN_FIRST = range(90, 110)  # compute capabilities

# The name of the flash kernel activated in place of PyTorch's own. Versions of PyTorch without
# other kernels lack the function.
active_flash_impl: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)


@final
class Switches(NamedTuple):
    """PyTorch's switches as this process has set them; docs/torch-controls.md lists them all.

    deterministic: torch.use_deterministic_algorithms, with warn_only or without. flash, efficient,
    cudnn, math: the kernels of scaled_dot_product_attention, turned on and off by
    torch.nn.attention.sdpa_kernel. tf32, onednn: True if PyTorch's float32 matrix products may
    round their inputs, on GPUs to TF32, on CPUs to TF32 or bfloat16. flash_impl: the flash kernel
    activated in place of PyTorch's own, if any. cudnn_library: torch.backends.cudnn.enabled.
    priority: the kernels by their numbers in SDPBackend, the first choice first.
    """

    deterministic: bool = False
    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    tf32: bool = False
    onednn: bool = False
    flash_impl: str | None = None
    math: bool = True
    cudnn_library: bool = True
    priority: tuple[int, ...] = tuple(map(KERNELS.index, USUAL))

    def precision(self, kind: str) -> Precision:
        """The default precision of float32 products on a "cuda" or "cpu" device."""
        return "tf32" if (self.tf32 if kind == "cuda" else self.onednn) else "ieee"

    def ways_off(self, kernel: KernelName) -> Iterator[str]:
        """The switches by which this process has turned a kernel off; none: it is on."""
        if not getattr(self, kernel):
            yield f"sdpa_kernel or by torch.backends.cuda.{SETTERS[kernel]}(False)"
        if kernel == "cudnn" and not self.cudnn_library:
            yield "torch.backends.cudnn.enabled = False"

    def order(self, kind: str, sm: int) -> tuple[KernelName, ...]:
        """The kernels still on, in the order set by sdpa_kernel for GPUs.

        Empty for PyTorch's own order, and on CPUs, because PyTorch has none there.
        """
        if kind == "cpu":
            return ()
        known: list[KernelName] = [KERNELS[n] for n in self.priority if n < len(KERNELS)]
        ranked: tuple[KernelName, ...] = tuple([x for x in known if getattr(self, x)])
        usual = (USUAL, CUDNN_FIRST) if sm in PUTS_CUDNN_FIRST else (USUAL,)
        own = [tuple([name for name in each if name in ranked]) for each in usual]
        return () if ranked in own else ranked

    def changed(self) -> Iterator[tuple[str, object]]:
        """Each switch that differs from PyTorch's default, with its value.

        The order of kernels counts as unchanged if PyTorch itself sets it on any GPU.
        """
        usual = Switches(priority=self.priority)
        yield from ((n, x) for n, x in self._asdict().items() if x != getattr(usual, n))
        if order := self.order("cuda", PUTS_CUDNN_FIRST.start):
            yield "priority", ", ".join(order)


def read_switches() -> Switches:
    """The switches as they are now."""
    return as_switches(raw_switches())


def as_switches(raw: RawSwitches) -> Switches:
    """A value from the result of `raw_switches`."""
    deterministic, flash, efficient, cudnn, cuda, mkldnn, impl, math, library, order = raw
    rounds = (cuda in ROUNDED, mkldnn in ROUNDED)
    return Switches(deterministic, flash, efficient, cudnn, *rounds, impl, math, library, order)


def switches_that_count(on_cpu: bool) -> tuple[object, ...]:
    """The switches that decide the backend on a device. Every call compares them, in a fraction of
    a microsecond. On CPUs that emulate no GPU, switches of GPU products and of kernel order are
    left out."""
    if VIRTUAL or not on_cpu:
        return raw_switches()
    return (
        _get_deterministic_algorithms(),
        _get_flash_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _get_fp32_precision_getter("mkldnn", "matmul"),
        _get_math_sdp_enabled(),
        _get_cudnn_enabled(),
    )


def raw_switches() -> RawSwitches:
    """The state of each switch in PyTorch."""
    return (
        _get_deterministic_algorithms(),
        _get_flash_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _get_fp32_precision_getter("cuda", "matmul"),
        _get_fp32_precision_getter("mkldnn", "matmul"),
        active_flash_impl(),
        _get_math_sdp_enabled(),
        _get_cudnn_enabled(),
        tuple(_get_sdp_priority_order()),
    )


def products_round(kind: str) -> bool:
    """True if PyTorch's float32 products on a "cuda" or "cpu" device may round their inputs now."""
    return _get_fp32_precision_getter(LIBRARIES[kind], "matmul") in ROUNDED
