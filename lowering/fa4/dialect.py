"""Masks and modifiers as functions for FlashAttention 4's kernels, in CuTe, by Triton's trace.

The functions have the arguments of Triton's. functions.py has their helpers, and hands them to the
package. Added and compared integers are read at run time, so another length needs no new kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.lowering.codegen.device_code import WHERE, Tracer
from attn_graph.lowering.codegen.symbols import (
    Code,
    Dialect,
    Kind,
    Numbers,
    Operand,
    Symbol,
    code_literal,
    is_zero,
)
from attn_graph.lowering.problem import Problem, read_specs
from attn_graph.masks.places import Untraceable, trace_definition
from attn_graph.spec import MOST_INT32, TensorSpec

CUTE = Dialect(
    forms={
        "invert": "invert({0})",
        "never": "false_everywhere({0})",
        "always": "true_everywhere({0})",
        "neg": "{0} * -1",
        "maximum": "larger({0}, {1})",
        "minimum": "smaller({0}, {1})",
        "where": "pick({0}, {1}, {2})",
        "float": "as_float({0})",
        "long": "as_long({0})",
        "abs": "magnitude({0})",
    },
    functions={
        **{
            name: f"cute.math.{name}({{0}})"
            for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos")
        },
        "sigmoid": "1.0 / (cute.math.exp({0} * -1.0) + 1.0)",
        "tanh": "cute.math.tanh({0})",
    },
    half={"tanh": "cute.math.tanh({0}, fastmath=True)"},
)


@final
@frozen
class CuteCode:
    """An attention's mask and modifiers as the package takes them.

    texts: of the existing functions among "keep" (the mask), "change" (all modifiers) and "back"
    (their derivative). numbers: the integers to pass. axes: the mask's axes of "bh", besides its
    tensors' data.
    """

    texts: Mapping[str, str] = field(factory=dict)
    numbers: tuple[int, ...] = ()
    axes: frozenset[str] = frozenset()


@final
@frozen(eq=False)
class CuteArray:
    """A tensor read by generated code, aux_tensors[slot] of the package, as `as_read` views it.

    Places past the last query or key read the last one, and those computed from such places read
    an end of their axis: the package's kernels ask for them, and a load there would be outside of
    the tensor.
    """

    code: Code
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    is_long: bool
    reach: int = MOST_INT32

    def __getitem__(self, index: tuple[Operand, ...]) -> Symbol:
        """The element at `index`."""
        kept, ends = read_axes_of(TensorSpec(self.shape, self.dtype, self.strides))
        sizes = (f"data[{self.slot}].shape[{axis}]" for axis in range(len(kept)))
        places = [place_text(index[n], size) for n, size in zip(kept, sizes, strict=True)]
        places += ["0"] * ends
        kind: Kind = "float" if self.dtype.is_floating_point else "int"
        kind = "bool" if self.dtype == torch.bool else kind
        text = f"read_{kind}(data[{self.slot}], {', '.join(places)})"
        return evolve(self.code.add_line(text, kind, index), reach=self.reach)


def place_text(x: Operand, size: str) -> str:
    """A place along an axis, as code. size: the code of the axis's."""
    text, axes = (x.text, x.axes) if isinstance(x, Symbol) else (code_literal(x)[0], frozenset())
    ends = {"i": "M", "j": "N"}
    if is_zero(x) or axes.isdisjoint(ends):
        return "0" if is_zero(x) else text
    return f"inside({text}, {ends[text]})" if text in ends else f"between({text}, {size})"


def read_axes_of(spec: TensorSpec) -> tuple[list[int], int]:
    """The axes of a tensor as passed to the package, and the number of axes of one element after
    them.

    The package needs exactly one axis of stride 1, and compiles another kernel for a stride of 0.
    Raises Untraceable if two axes have stride 1.
    """
    pairs = enumerate(zip(spec.shape, spec.strides, strict=True))
    kept = [n for n, (size, stride) in pairs if size != 1 and stride != 0]
    unit = sum(spec.strides[n] == 1 for n in kept)
    if unit > 1:
        raise Untraceable(f"{spec} has two axes of stride 1, and FlashAttention 4 takes one")
    return kept, 1 - unit


def as_read(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A tensor's view for generated code, with booleans as bytes."""
    kept, ends = read_axes_of(spec)
    shape = [spec.shape[n] for n in kept] + [1] * ends
    strides = [spec.strides[n] for n in kept] + [1] * ends
    view = x.view(torch.uint8) if x.dtype == torch.bool else x
    return view.as_strided(shape, strides, x.storage_offset())


def trace_problem(problem: Problem, *, with_mask: bool) -> CuteCode:
    """The functions of a problem. Raises Untraceable for untraceable code.

    with_mask: True to include the mask.
    """
    strides = tuple(spec.strides for spec in read_specs(problem))
    tracer = Tracer(problem, Numbers(plain=True), strides, dialect=CUTE, array=CuteArray)  # type: ignore[arg-type]  # strides as they are
    texts, axes = {}, frozenset[str]()
    if with_mask:
        code, mask = tracer.start(), problem.node.mask
        assert mask is not None
        kept = trace_definition(mask.keep, tracer.place(code).reading(tracer.arrays(code)[1]))
        if not isinstance(kept, Symbol) or kept.kind != "bool":
            raise Untraceable(f"the mask {mask} gives no boolean of a place")
        texts["keep"], axes = code.write_function("keep", WHERE, kept), kept.axes & frozenset("bh")
    texts["change"] = tracer.change()
    if problem.grad is not None and texts["change"]:
        texts["back"] = tracer.back() or f"def back(ds, s, {WHERE}):\n    return ds\n"
    known = {name: text for name, text in texts.items() if text}
    return CuteCode(known, tuple(tracer.numbers.values), axes)


def in_place(h: Operand, i: Operand, shared: int) -> tuple[Operand, Operand]:
    """The head and the query of a place. shared: query heads of a group, if the package wrongly
    takes them for packed into rows, and gives head h r + i % r, query i // r; else 1."""
    return (h, i) if shared == 1 else (h // shared, i * shared + h % shared)
