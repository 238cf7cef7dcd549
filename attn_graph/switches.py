"""PyTorch's process-wide switches that attention heeds, as a value: read once a call of compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, final

import torch
from attrs import frozen
from torch._C import (  # behind torch.backends.cuda and torch itself, and faster: a call in each
    _get_cudnn_sdp_enabled,
    _get_deterministic_algorithms,
    _get_flash_sdp_enabled,
    _get_fp32_precision_getter,
    _get_mem_efficient_sdp_enabled,
)

Precision = Literal["ieee", "tf32"]
LIBRARIES = {"cuda": "cuda", "cpu": "mkldnn"}  # whose products they are: torch.backends.X.matmul

ROUNDED = ("tf32", "bf16")

# The name of the flash kernel that was activated in place of PyTorch's own; versions of PyTorch
# that know no others have no such function.
replaced: Callable[[], str | None] = getattr(
    torch.nn.attention, "current_flash_attention_impl", lambda: None
)


@final
@frozen
class Switches:
    """What this process says by PyTorch's switches; docs/torch-controls.md lists them all.

    deterministic: torch.use_deterministic_algorithms, with warn_only or without. flash, efficient,
    cudnn: the kernels of scaled_dot_product_attention, which torch.nn.attention.sdpa_kernel turns
    on and off. tf32, onednn: whether PyTorch's float32 matrix products may round their inputs, on
    GPUs to TF32, on CPUs to TF32 or bfloat16. flash_impl: the flash kernel that was activated in
    place of PyTorch's own, if any.
    """

    deterministic: bool = False
    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    tf32: bool = False
    onednn: bool = False
    flash_impl: str | None = None

    def precision(self, kind: str) -> Precision:
        """What float32 products on a "cuda" or "cpu" are to be where nobody says it."""
        return "tf32" if (self.tf32 if kind == "cuda" else self.onednn) else "ieee"


def read() -> tuple[bool, bool, bool, bool, bool, bool, str | None]:
    """The fields of Switches as they stand now, in under a microsecond."""
    return (
        _get_deterministic_algorithms(),
        _get_flash_sdp_enabled(),
        _get_mem_efficient_sdp_enabled(),
        _get_cudnn_sdp_enabled(),
        _get_fp32_precision_getter("cuda", "matmul") in ROUNDED,
        _get_fp32_precision_getter("mkldnn", "matmul") in ROUNDED,
        replaced(),
    )


def rounds(kind: str) -> bool:
    """Whether PyTorch's float32 matrix products there may round, by either of its APIs, now."""
    return _get_fp32_precision_getter(LIBRARIES[kind], "matmul") in ROUNDED
