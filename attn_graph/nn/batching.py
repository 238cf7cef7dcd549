"""torch.func.vmap of the operators: the mapped axis becomes a part of the batch, or a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from attrs import frozen
from torch import Tensor

from attn_graph.ir.arguments import ARGUMENTS
from attn_graph.ir.layouts import has_sizes
from attn_graph.ir.storage.scaling import O_SCALE
from attn_graph.ir.terms.relative import counting_parts
from attn_graph.nn.packed_sizes import PACKING
from attn_graph.planner.forms.content import CallContent, Content

WHOLE = PACKING | {O_SCALE}  # inputs of calls that a longer batch would change

Op = Callable[..., list[Tensor]]
Dims = Sequence[int | None]  # for each tensor the axis along which it is mapped


@final
@frozen(eq=False)
class Mapped:
    """The tensors of a call under vmap, the inputs first.

    size: of the mapped axis. names: of the inputs.
    """

    size: int
    tensors: Sequence[Tensor]
    dims: Dims
    names: tuple[str, ...] = ()

    @property
    def shapes(self) -> list[list[int]]:
        return [
            [n for axis, n in enumerate(t.shape) if axis != d]
            for t, d in zip(self.tensors, self.dims, strict=True)
        ]

    @property
    def batch(self) -> int:
        return self.shapes[0][0]

    def has_batch(self, n: int) -> bool:
        """True if the first axis of tensor n is the batch, full or 1."""
        argument = ARGUMENTS.get(self.names[n]) if n < len(self.names) else None
        if argument is None or argument.scales:
            return True
        return argument.form(len(self.shapes[n])).axes.startswith("b")

    def folds(self, needs: Sequence[bool]) -> bool:
        """True if one call with a longer batch computes all. needs: inputs that need gradients."""
        shapes, batch = self.shapes, self.batch
        mapped = [n for n, d in enumerate(self.dims) if d is not None]
        wanted = [n for n, need in enumerate(needs) if need]
        each_its_own = all(self.has_batch(n) and shapes[n][0] == batch for n in wanted)
        return each_its_own and all(map(self.has_batch, mapped))

    def folded(self) -> list[Tensor]:
        return [
            self.fold(t, d) if self.has_batch(n) else t
            for n, (t, d) in enumerate(zip(self.tensors, self.dims, strict=True))
        ]

    def fold(self, t: Tensor, d: int | None) -> Tensor:
        if d is None:
            if t.ndim == 4 and t.shape[0] == 1 != self.batch:  # broadcasts, as it did
                return t
            return t.expand(self.size, *t.shape).flatten(0, 1)
        front = t.movedim(d, 0)
        return front.expand(self.size, self.batch, *front.shape[2:]).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """A result with the mapped axis in front; B is explicit, for results without elements."""
        each = x.shape[0] // self.size if self.size else self.batch
        return x.reshape(self.size, each, *x.shape[1:])


def map_call(
    op: Op,
    content: Content,
    mapped: Mapped,
    needs: Sequence[bool],
    *more: Any,  # Any: of the op
) -> tuple[list[Tensor], list[int]]:
    """The results for all, and for each the axis along which it is mapped: the first."""
    if is_foldable(content) and mapped.folds(needs):
        results = op(mapped.folded(), *more)
        return [mapped.unfold(x) for x in results], [0] * len(results)
    pairs, size = [*zip(mapped.tensors, mapped.dims, strict=True)], mapped.size
    calls = [[t if d is None else t.select(d, i) for t, d in pairs] for i in range(size)]
    if not size:  # zeros for one call, which gives the shapes
        shapes = zip(pairs, mapped.shapes, strict=True)
        calls = [[t if d is None else t.new_zeros(shape) for (t, d), shape in shapes]]
    every = [op(tensors, *more) for tensors in calls]
    stacked = [torch.stack(each)[: mapped.size] for each in zip(*every, strict=True)]
    return stacked, [0] * len(stacked)


def is_foldable(content: Content) -> bool:
    """True if a longer batch computes each entry as alone.

    False for plans, and for results declared by their sizes, which are fixed; for dropout, formulas
    and a user's own masks, which may count entries; for packed tensors and pages, and for tensors
    without an axis of the batch, such as the table of a modifier; for amax, which is of all.
    """
    if not isinstance(content, CallContent) or WHOLE & {*content.names} or content.dropout:
        return False
    if has_sizes(content.outputs):
        return False
    options = content.restore()
    mask, steps = options["mask"], options["modifiers"]
    read = [x for step in steps for x in step.needs.values()]
    return not counting_parts(mask, steps) and all(x.axes.startswith("b") for x in read)
