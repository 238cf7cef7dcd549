"""Launches of Triton kernels as values: made with a plan, run with the tensors of a call."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, final

import torch
from attrs import evolve, field, frozen

from attn_graph import kernels
from attn_graph.errors import Reason
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.codegen.device_code import compile_text
from attn_graph.lowering.problem import ALIGNED
from attn_graph.machine.imports import load_modules
from attn_graph.spec import TensorSpec

HOMES = {
    "forward": "forward",
    "split_forward": "decode",
    "merge_parts": "decode",
    "delta": "backward",
    "sum_weights": "weight_sums",
    "query_gradient": "backward",
    "key_gradient": "backward",
    "sum_parts": "backward",
    "sum_pages": "page_sums",
    "collect_places": "collect",
    "collect_lines": "collect",
    "extremes": "lists",
    "list_tiles": "lists",
}
Pointers = dict[str, str | tuple[str, ...]]  # names of tensors, by parameter of a kernel
Tensors = Mapping[str, Any]  # by name: tensors, tuples of tensors, or Triton's mock tensors


def load_kernel(name: str) -> Any:  # Any: a function of Triton
    return getattr(load_modules(f"attn_graph.kernels.{HOMES[name]}"), name)


@cache
def parameters(kernel: str) -> tuple[str, ...]:
    """The parameters of a kernel, by its source: planning needs no Triton."""
    tree = ast.parse((Path(kernels.__file__).parent / f"{HOMES[kernel]}.py").read_text())
    (found,) = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == kernel)
    return tuple(x.arg for x in found.args.args)


@cache
def load_driver() -> Any:  # Any: Triton's; its `active` one is the GPU's
    """None if this process imported Triton with TRITON_INTERPRET=1."""
    forward, jit = load_kernel("forward"), load_modules("triton.runtime.jit")
    compiles = isinstance(forward, jit.JITFunction)
    return load_modules("triton.runtime").driver if compiles else None


def is_interpreting() -> bool:
    return load_driver() is None


def check_interpreter(expected: bool) -> None:
    """Raises RuntimeError if kernels would not run as they were planned, interpreted or compiled.

    The interpreter has no bfloat16: kernels planned to be compiled give garbage there, silently.
    """
    if is_interpreting() != expected:
        raise RuntimeError(
            f"this plan is for {'interpreted' if expected else 'compiled'} kernels, and Triton "
            f"was imported to {'interpret' if is_interpreting() else 'compile'} them; set "
            "TRITON_INTERPRET before Python starts, or not at all"
        )


@final
@frozen
class Descriptor:
    """A tensor of half precision in tiles, as the copy engine of Hopper GPUs (TMA) takes it.

    tensor: its name. tile: the sizes of a tile; it reads 0 outside of the tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    @classmethod
    def tiles(cls, name: str, spec: TensorSpec, rows: int, width: int) -> Descriptor:
        """Of an operand [B,H,L,D] in tiles of `rows` rows, at least as wide as D.

        An axis of one element has the stride of a dense one, from rows of whole 16 bytes on.
        """
        step = ALIGNED // spec.dtype.itemsize
        strides: tuple[int, ...] = (1,)
        dense = -(-spec.shape[3] // step) * step
        for n, s in [*zip(spec.shape[:3], spec.strides, strict=False)][::-1]:
            strides = (dense if n == 1 else s, *strides)
            dense = n * strides[0]
        return cls(name, spec.shape, strides, (1, 1, rows, width))

    def of(self, tensor: torch.Tensor) -> Any:  # Any: Triton's
        """The kernel's argument; None if the tensor begins off 16 bytes, and the kernel reads by a
        pointer."""
        if tensor.data_ptr() % ALIGNED:
            return None
        tools = load_modules("triton.tools.tensor_descriptor")
        return tools.TensorDescriptor(tensor, [*self.shape], [*self.strides], [*self.tile])


@final
@frozen(eq=False)
class Launch:
    """One launch of a kernel.

    grid: the number of programs. tensors: for each pointer of the kernel, the name of its tensor,
    or the names of several. texts: the source of generated functions, by parameter. fixed: all
    other arguments but the descriptors, by parameter too. compiled: the launched kernels, as Triton
    takes long to look them up.
    """

    kernel: str
    grid: int
    tensors: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, Any]
    texts: Mapping[str, str]
    warps: int
    stages: int
    descriptors: Mapping[str, Descriptor] = field(factory=dict)
    compiled: dict[Hashable, Any] = field(factory=dict, init=False)  # Any: Triton's

    @cached_property
    def function(self) -> Any:  # Any: of Triton
        return load_kernel(self.kernel)

    def arguments(self, tensors: Tensors) -> dict[str, Any]:  # Any: as the kernel takes them
        """All arguments of the kernel, by name."""
        functions = {parameter: compile_text(text) for parameter, text in self.texts.items()}
        pointers = {
            parameter: tensors[x] if isinstance(x, str) else tuple(tensors[name] for name in x)
            for parameter, x in self.tensors.items()
        }
        tiled = {parameter: x.of(tensors[x.tensor]) for parameter, x in self.descriptors.items()}
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return {**pointers, **tiled, **self.fixed, **functions, **options}

    def without(self, parameter: str) -> Launch:
        """A launch with None for a pointer. The kernel then stores nothing there."""
        rest = {name: x for name, x in self.tensors.items() if name != parameter}
        return evolve(self, tensors=rest, fixed={**self.fixed, parameter: None})

    def __call__(self, tensors: Tensors) -> None:
        """Launch it. Raises RefusedError if the GPU has too little memory for the tiles."""
        function, arguments, driver = self.function, self.arguments(tensors), load_driver()
        if driver is None:
            function[(self.grid,)](**arguments)
            return
        given = [distinguish(arguments[x]) for x in (*self.tensors, *self.descriptors)]
        key = driver.active.get_current_device(), *given
        if compiled := self.compiled.get(key):
            compiled[(self.grid, 1, 1)](*[arguments[name] for name in function.arg_names])
            return
        try:
            self.compiled[key] = function[(self.grid,)](**arguments)
        except load_modules("triton.runtime.errors").OutOfResources as error:
            need = f"needs {error.required} of {error.name} for its tiles"
            most = f"of which the GPU has {error.limit}"
            reason = Reason("tile_resources", most, need, "{actual}, {limit}")
            raise RefusedError(reason) from error


def distinguish(argument: Any) -> Hashable:  # Any: of a kernel
    """The facts by which Triton chooses a compiled kernel for an argument: alignment of tensors,
    numbers, and absence."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % ALIGNED
    if isinstance(argument, tuple):
        return tuple(map(distinguish, argument))
    return argument if isinstance(argument, int) else argument is None
