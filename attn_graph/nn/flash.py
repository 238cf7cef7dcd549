"""Plans in place of PyTorch's flash kernel, through PyTorch's own registry of such kernels."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from attn_graph.errors import GraphError, PlanTargetError
from attn_graph.machine.cache import remember
from attn_graph.nn.calls import PLAIN, content_of_call, draw_seed, exact
from attn_graph.nn.functional import TOP_LEFT
from attn_graph.nn.ops import run_attention, run_gradient

NAME = "attn_graph"  # in PyTorch's registry
Forward = tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def register_flash_attention() -> None:
    """Add plans to PyTorch's registry of flash kernels, as "attn_graph".

    After `torch.nn.attention.activate_flash_attention_impl("attn_graph")` plans compute, in the
    whole process, the calls of `scaled_dot_product_attention` that PyTorch sends to its flash
    kernel for GPUs: half precision without a mask. `restore_flash_attention_impl()` ends this.
    `attn_graph.replace_sdpa` replaces all other calls as well, in a block.

    A call without a supporting backend raises NoBackendError, since the registry has no way back.
    The backend `torch_flash` is that kernel and can't run meanwhile. On CPUs plans use PyTorch's
    flash kernel: without a GPU, activating raises PlanTargetError.
    """
    register_flash_attention_impl(NAME, register_fn=override_flash)


@final
@frozen(eq=False)
class Override:
    """PyTorch's flash operators, computed by plans until it is removed."""

    library: Library

    def remove(self) -> None:
        self.library._destroy()


def override_flash() -> Override:
    """Let plans compute PyTorch's flash operators for GPUs, in this process."""
    if not torch.cuda.is_available():
        raise PlanTargetError(
            "plans replace PyTorch's flash kernel for GPUs, and torch.cuda.is_available() is "
            "false; on CPUs use `with attn_graph.replace_sdpa():`"
        )
    library = Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", forward_flash, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", backward_flash, "CUDA")
    return Override(library)


@remember
def text_of(names: tuple[str, ...], causal: bool, scale: float | None, dropout: float) -> str:
    """The content of a call of PyTorch's flash kernel, with lse."""
    mask, rate = TOP_LEFT if causal else None, exact("rate", dropout)
    options = mask, exact("scale", scale), None, None, None, rate, ("lse",), None, *PLAIN
    return content_of_call(names, *options)


def forward_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Forward:
    """o, lse and PyTorch's operands of the backward, including dropout's seed and offset."""
    if return_debug_mask:
        raise GraphError("attention: plans have no debug mask; pass return_debug_mask=False")
    seed = draw_seed(q.device) if dropout_p else {}
    text = text_of((*seed,), is_causal, scale, dropout_p)
    o, lse = run_attention((q, k, v, *seed.values()), text)
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)
    M, N, two = q.shape[2], k.shape[2], (seed.get("seed", nothing), seed.get("offset", nothing))
    return o, lse, None, None, M, N, *two, nothing.to(q.dtype)


def backward_flash(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    seed = {"seed": philox_seed, "offset": philox_offset} if dropout_p else {}
    text = text_of((*seed,), is_causal, scale, dropout_p)
    inputs = (q, k, v, *seed.values())
    needs = [n < 3 for n in range(len(inputs))]
    dq, dk, dv = run_gradient((*inputs, o, lse, do), text, needs, (True, False))
    return dq, dk, dv
