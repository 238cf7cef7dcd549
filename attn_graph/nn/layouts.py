"""Errors of the library's operators for tensors without strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from attn_graph.errors import PlanMismatchError
from attn_graph.spec import layout_problem

KEYS = (  # PyTorch's dispatch keys of such tensors
    "NestedTensorCPU", "NestedTensorCUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU",
    "SparseCsrCUDA", "MkldnnCPU",
)  # fmt: skip


def refuse_layouts(library: torch.library.Library, name: str) -> None:
    """Register kernels of an operator that refuse tensors without strides."""

    def refuse(tensors: Sequence[Tensor], *rest: object) -> None:
        told = ((n, layout_problem(t)) for n, t in enumerate(tensors))
        raise PlanMismatchError(
            *(f"{name}: tensor {n} {problem}" for n, problem in told if problem)
        )

    def refuse_jagged(
        cls: object, func: object, types: object, args: tuple[Sequence[Tensor]], kwargs: object
    ) -> None:
        refuse(*args)

    for key in KEYS:
        library.impl(name, refuse, key)
    torch.library.register_torch_dispatch(
        f"{library.ns}::{name}", NestedTensor, refuse_jagged, lib=library
    )
