"""Memory shared by tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Axes = Sequence[tuple[int, int]]  # size and stride of each, in bytes


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if an element of one may lie in an element of the other.

    False is certain. True may be wrong for tensors taking turns in memory, unless their elements
    keep to different parts of equally long pieces, as q, k and v of one product do.
    """
    return find_overlap((a,), (b,)) is not None


def find_overlap(
    rooms: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[int, int] | None:
    """The first room that `may_overlap` a tensor or an earlier room: its number, and the other's
    among tensors and rooms. None without one."""
    ends, every = list[tuple[int, int]](), (*tensors, *rooms)
    for x in every:  # by loops: a call with results given has a few tensors, and calls take longer
        start, last = x.data_ptr(), 0
        for n, step in zip(x.shape, x.stride(), strict=True):
            last += (n - 1) * step
        ends.append((start, start + (last + 1) * x.itemsize))
    for n, (start, stop) in enumerate(ends[len(tensors) :]):
        for m, (other, end) in enumerate(ends[: len(tensors) + n]):
            if start < end and other < stop and shares_pieces(rooms[n], every[m]):
                return n, m
    return None


def shares_pieces(a: torch.Tensor, b: torch.Tensor) -> bool:
    """`may_overlap`, if the extents of two tensors cross."""
    if not (a.numel() and b.numel()):
        return False
    one, two = long_axes(a), long_axes(b)
    start, other = a.data_ptr(), b.data_ptr()
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


def parts_differ(
    start: int, one: Axes, other: int, two: Axes, tensors: Sequence[torch.Tensor], step: int
) -> bool:
    """True if the tensors keep to different parts of all pieces of `step` bytes.

    Axes with strides of whole pieces leave an element's place in its piece as it is; the others
    reach over some bytes from the first one's place.
    """
    lengths = [
        sum((n - 1) * s for n, s in axes if s % step) + x.itemsize
        for axes, x in zip((one, two), tensors, strict=True)
    ]
    gap = (other - start) % step
    return lengths[0] <= gap and gap + lengths[1] <= step
