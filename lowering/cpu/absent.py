"""Rows past a length: products read zeros in place of their NaN and Inf.

A weight of 0 times NaN is NaN, so one absent row would reach all others. A CPU reads the lengths as
numbers, and one sum of the rows past the shortest length. If the sum is finite, as usual, tensors
are read in place; otherwise, or if no number may be read, a copy is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite, prod
from typing import Any, final

import torch
from attrs import evolve, frozen

from attn_graph.ir.storage.packed import LEAVES, LENGTHS, and_parts
from attn_graph.ir.storage.packing import require_fitting
from attn_graph.machine.ambient import is_traced
from attn_graph.machine.sizes import format_bytes
from attn_graph.spec import TensorSpec

BOUNDARY = 64  # bytes: PyTorch's alignment of memory
LEAST_ENTRY = 2**16  # numbers: to read fewer takes less time than another sum
Tensors = Sequence[torch.Tensor]
Rooms = Mapping[str, torch.Tensor]
Work = Callable[[Tensors, Rooms], Tensors]
Reach = Callable[[Tensors, Sequence[int]], int]  # operands, lengths -> how many keys are read


@final
@frozen(eq=False)
class EndedRows:
    """Rows ended by one kind of lengths, of keys or of queries. lengths: the number of their
    operand. ended: the operands [B,.,L,.] with these rows. reach: how many rows a call reads; None:
    all."""

    of_keys: bool
    lengths: int
    ended: tuple[int, ...]
    reach: Reach | None = None

    def dirty(self, operands: Tensors) -> Sequence[int]:
        """The operands with NaN or Inf in rows both read and absent, or all if unknown."""
        first, lengths = operands[self.ended[0]], operands[self.lengths]
        if not has_numbers(first):
            return self.ended
        counts: list[int] = lengths.tolist()
        stop = first.shape[2] if self.reach is None else self.reach(operands, counts)
        if max(0, min(counts)) >= stop:
            return ()
        return [n for n in self.ended if not ends_finite(operands[n][:, :, :stop], counts)]


@final
@frozen(eq=False)
class Ends:
    """The rows of operands ended by lengths. bytes: of copies of all ended operands."""

    sides: tuple[EndedRows, ...]
    bytes: int

    @classmethod
    def of(
        cls,
        op: Any,  # Any: a Fused, as an Op gives it
        specs: Sequence[TensorSpec],
    ) -> Ends | None:
        """None if no lengths end rows. op: an attention, or a derivative of one. specs: of its
        operands."""
        node = op.attention
        parts, weights = and_parts(node.mask), "weights"  # are 0 in absent rows
        lying = [role.side if role.name != weights else "" for role in op.takes]
        sides = tuple(
            EndedRows(
                side == "keys",
                node.roles.index(LENGTHS[side]),
                tuple(n for n, x in enumerate(lying) if x == side and len(specs[n].shape) == 4),
            )
            for side, leaf in LEAVES.items()
            if leaf in parts
        )
        copied = [specs[n] for side in sides for n in side.ended]
        return (
            cls(sides, sum(extent(x) * x.dtype.itemsize + BOUNDARY for x in copied))
            if sides
            else None
        )

    def reaching(self, reach: Reach | None) -> Ends:
        sides = (evolve(x, reach=reach) if x.of_keys else x for x in self.sides)
        return evolve(self, sides=tuple(sides))

    @property
    def note(self) -> str:
        """The copies, for `explain`."""
        size = format_bytes(self.bytes)
        return f"rows past a length that hold NaN or Inf are read as 0, from copies: up to {size}"

    def check(self, operands: Tensors) -> None:
        """Raise PlanMismatchError for lengths beyond the rows, if numbers may be read."""
        if has_numbers(operands[0]):
            for side in self.sides:
                rows = operands[side.ended[0]].shape[2]
                name = LENGTHS["keys" if side.of_keys else "rows"]
                require_fitting(name, operands[side.lengths].tolist(), rows)

    def clear(self, operands: Tensors) -> Tensors:
        """The operands, with zeros in absent rows of NaN or Inf."""
        pairs = [(n, side.lengths) for side in self.sides for n in side.dirty(operands)]
        if not pairs:
            return operands
        cleared = [*operands]
        for n, lengths in pairs:
            x = operands[n]
            past = torch.arange(x.shape[2], device=x.device) >= operands[lengths][:, None]
            cleared[n] = copy_alike(x).masked_fill_(past[:, None, :, None], 0.0)
        return cleared


def clear_first(ends: Ends, work: Work, operands: Tensors, scratch: Rooms) -> Tensors:
    ends.check(operands)
    return work(ends.clear(operands), scratch)


def clear_after(ends: Ends, work: Work, operands: Tensors, scratch: Rooms) -> Tensors:
    """A forward whose steps all pass NaN on: run it, and clear and run again if o is not finite."""
    if has_numbers(operands[0]):
        ends.check(operands)
        results = work(operands, scratch)
        if is_finite(results[0]) or (cleared := ends.clear(operands)) is operands:
            return results
        del results
        return work(cleared, scratch)
    return clear_first(ends, work, operands, scratch)


def has_numbers(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.is_cpu and not is_traced()


def ends_finite(x: torch.Tensor, counts: Sequence[int]) -> bool:
    """True if all rows of x [B,.,L,.] past their entry's length are finite. Few numbers of each
    entry are read at once, from the shortest length on."""
    past = x[:, :, max(0, min(counts)) :]
    if past[:1].numel() < LEAST_ENTRY:
        return is_finite(past)
    return all(is_finite(each[:, max(0, n) :]) for each, n in zip(x, counts, strict=True))


def is_finite(x: torch.Tensor) -> bool:
    """True if no number is NaN or Inf: by the sum, the fastest reading, and by the extremes if the
    sum leaves the dtype's range."""
    return isfinite(x.sum().item()) or all(isfinite(y.item()) for y in x.aminmax())


def copy_alike(x: torch.Tensor) -> torch.Tensor:
    """A copy with equal strides and alignment, since BLAS may round by how a matrix lies. In C
    order if elements share places."""
    if not has_numbers(x) or not lies_apart(x):
        return x.clone(memory_format=torch.contiguous_format)
    size = x.itemsize
    room = x.new_empty(extent(TensorSpec.like(x)) + BOUNDARY // size)
    first = (x.data_ptr() - room.data_ptr()) % BOUNDARY // size
    return room.as_strided(x.shape, x.stride(), first).copy_(x)


def lies_apart(x: torch.Tensor) -> bool:
    end = 0
    for step, n in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if step <= end:
            return False
        end += step * (n - 1)
    return True


def extent(spec: TensorSpec) -> int:
    """Places from the first element to the last, at least as many as elements."""
    last = sum((n - 1) * s for n, s in zip(spec.shape, spec.strides, strict=True))
    return max(last + 1, prod(spec.shape))
