"""Launches of Triton kernels, as values: known when a plan is made, run with a call's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, final

from attrs import evolve, frozen

from attn_graph.backend import RefusedError
from attn_graph.errors import Reason
from attn_graph.lowering.triton.device_code import compile_text

HOMES = {
    "forward": "forward",
    "delta": "backward",
    "query_gradient": "backward",
    "key_gradient": "backward",
    "collect_places": "collect",
    "collect_lines": "collect",
    "extremes": "lists",
    "list_tiles": "lists",
}
Tensors = Mapping[str, Any]  # tensors by name, tuples of them, or what stands for them


@cache
def kernel(name: str) -> Any:  # Any: a function of Triton
    return getattr(import_module(f"attn_graph.kernels.{HOMES[name]}"), name)


@cache
def out_of_resources() -> Any:  # Any: a class of Triton's
    from triton.runtime.errors import OutOfResources

    return OutOfResources


@cache
def is_interpreting() -> bool:
    """Whether Triton was imported to interpret kernels, and not to compile them."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel("forward"), JITFunction)


@cache
def check_interpreter(expected: bool) -> None:
    """Kernels are planned one way or the other: compiled ones compute garbage in the interpreter,
    which knows no bfloat16 and says nothing.

    Raises RuntimeError if Triton was imported under another TRITON_INTERPRET than planning saw.
    """
    if is_interpreting() != expected:
        raise RuntimeError(
            f"this plan is for {'interpreted' if expected else 'compiled'} kernels, and Triton "
            f"was imported to {'interpret' if is_interpreting() else 'compile'} them; set "
            "TRITON_INTERPRET before Python starts, or not at all"
        )


@final
@frozen(eq=False)
class Launch:
    """One launch: which kernel, how many programs, and what is passed.

    tensors: the name of a tensor, or of several, for each pointer of the kernel. texts: generated
    functions, by parameter. fixed: all other arguments.
    """

    kernel: str
    grid: int
    tensors: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, Any]
    texts: Mapping[str, str]
    warps: int
    stages: int

    def arguments(self, tensors: Tensors) -> dict[str, Any]:  # Any: as the kernel takes them
        functions = {parameter: compile_text(text) for parameter, text in self.texts.items()}
        pointers = {
            parameter: tensors[x] if isinstance(x, str) else tuple(tensors[name] for name in x)
            for parameter, x in self.tensors.items()
        }
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return {**pointers, **self.fixed, **functions, **options}

    def without(self, parameter: str) -> Launch:
        """The same launch with None for a pointer: the kernel leaves out what is stored there."""
        rest = {name: x for name, x in self.tensors.items() if name != parameter}
        return evolve(self, tensors=rest, fixed={**self.fixed, parameter: None})

    def __call__(self, tensors: Tensors) -> None:
        """Raises RefusedError where the GPU has not what the tiles need: those of the table fit."""
        try:
            kernel(self.kernel)[(self.grid,)](**self.arguments(tensors))
        except out_of_resources() as error:
            need = f"needs {error.required} of {error.name} for its tiles"
            most = f"of which the GPU has {error.limit}"
            reason = Reason("tile_resources", most, need, "{actual}, {limit}")
            raise RefusedError(reason) from error
