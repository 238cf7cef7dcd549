"""PyTorch's process-wide switches that attention heeds, as a value: read once a call of compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, final

import torch
from attrs import frozen
from torch._C import _get_fp32_precision_getter  # behind torch.backends.cuda.matmul, and faster
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, mem_efficient_sdp_enabled

Precision = Literal["ieee", "tf32"]

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
    on and off. tf32: whether PyTorch's float32 matrix products on GPUs may round to TF32.
    flash_impl: the flash kernel that was activated in place of PyTorch's own, if any.
    """

    deterministic: bool = False
    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    tf32: bool = False
    flash_impl: str | None = None

    @property
    def precision(self) -> Precision:
        """What float32 products are to be where nobody says it."""
        return "tf32" if self.tf32 else "ieee"


def read() -> tuple[bool, bool, bool, bool, bool, str | None]:
    """The fields of Switches as they stand now, in under a microsecond."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        flash_sdp_enabled(),
        mem_efficient_sdp_enabled(),
        cudnn_sdp_enabled(),
        products_are_tf32(),
        replaced(),
    )


def products_are_tf32() -> bool:
    """Whether PyTorch's float32 products on GPUs may round to TF32, by either of its APIs."""
    return _get_fp32_precision_getter("cuda", "matmul") == "tf32"
