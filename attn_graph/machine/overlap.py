"""Tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Axes = Sequence[tuple[int, int]]  # size and stride of each, in bytes


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if an element of one may lie in an element of the other.

    False is certain. True may be wrong for tensors that take turns in memory, unless their elements
    keep to different parts of equally long pieces, as q, k and v of one product do.
    """
    if not (a.numel() and b.numel()):
        return False
    start, other = a.data_ptr(), b.data_ptr()
    if start < other:
        if start + byte_extent(a) <= other:
            return False
    elif other + byte_extent(b) <= start:
        return False
    one, two = long_axes(a), long_axes(b)
    return not any(
        parts_differ(start, one, other, two, (a, b), step) for _, step in (*one, *two) if step
    )


def overlaps_itself(x: torch.Tensor) -> bool:
    """True if two elements may share a place."""
    end = x.itemsize
    for n, step in sorted(long_axes(x), key=lambda axis: axis[1]):
        if step < end:
            return bool(x.numel())
        end = step * (n - 1) + end
    return False


def long_axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """The axes of more than one place."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return [(n, step * x.itemsize) for n, step in pairs if n > 1]


def byte_extent(x: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = 0  # by a loop: a call with results given has a few tensors, and a sum would be calls
    for n, step in zip(x.shape, x.stride(), strict=True):
        last += (n - 1) * step
    return (last + 1) * x.itemsize


def byte_reach(axes: Axes, x: torch.Tensor) -> int:
    """`byte_extent` along some axes alone."""
    return sum((n - 1) * step for n, step in axes) + x.itemsize


def parts_differ(
    start: int, one: Axes, other: int, two: Axes, tensors: Sequence[torch.Tensor], step: int
) -> bool:
    """True if the tensors keep to different parts of all pieces of `step` bytes.

    Axes with strides of whole pieces leave an element's place in its piece as it is; the others
    reach over some bytes from the first one's place.
    """
    lengths = [
        byte_reach([(n, s) for n, s in axes if s % step], x)
        for axes, x in zip((one, two), tensors, strict=True)
    ]
    gap = (other - start) % step
    return lengths[0] <= gap and gap + lengths[1] <= step
