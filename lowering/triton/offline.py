"""Compiles kernels for any GPU, here or not, and reads their machine code."""

from __future__ import annotations

from typing import Any

from attn_graph.lowering.codegen.launches import is_interpreting
from attn_graph.lowering.codegen.machine_code import MachineCode, compile_launch, inspect_launch
from attn_graph.lowering.triton.places import kernel_strides
from attn_graph.lowering.triton.plan import Flash


def compile_launches(flash: Flash) -> list[MachineCode]:
    """Compile every launch for the target's compute capability. Returns the needs of each machine
    code."""
    tensors = mock_tensors(flash)
    return [inspect_launch(launch, tensors, flash.target.sm) for launch in flash.launches]


def compile_ahead(flash: Flash) -> None:
    """Compile every launch for the target into Triton's cache, with lse and without.

    Nothing under the interpreter.
    """
    if not is_interpreting():
        tensors = mock_tensors(flash)
        for launch in dict.fromkeys((*flash.launches, *flash.without_lse)):
            compile_launch(launch, tensors, flash.target.sm)


def mock_tensors(flash: Flash) -> dict[str, Any]:  # Any: Triton's
    """Stand-ins for tensors of launches, while they are compiled."""
    from triton.runtime.jit import MockTensor

    tensors: dict[str, Any] = {name: MockTensor(dtype) for name, dtype in flash.dtypes().items()}
    o = kernel_strides(flash.lying, "o", flash.lying.o())
    return tensors | dict.fromkeys(("o.strides", "to.strides"), o)
