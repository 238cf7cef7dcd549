"""Masks in plain PyTorch: the kept places, leaf by leaf, on whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from attrs import frozen

from attn_graph import masks
from attn_graph.masks.places import Place
from attn_graph.spec import INF

Tensor = torch.Tensor
Data = Mapping[str, Tensor]


@frozen
class Places:
    """Every place of [B,H,M,N], and the tensors of the mask."""

    sizes: tuple[int, int, int, int]
    data: Data

    def axis(self, letter: str) -> Tensor:
        """Positions laid along one axis."""
        place = "bhij".index(letter)
        return torch.arange(self.sizes[place]).reshape([-1] + [1] * (3 - place))

    def lengths(self, name: str) -> Tensor:
        """Lengths [B,1,1,1]."""
        return self.data[name].reshape(-1, 1, 1, 1)

    def aligned_rows(self, align: str | None, lengths: Sequence[str]) -> Tensor:
        """i', the key aligned with query i. lengths: those that end sequences."""
        i, (_, _, M, N) = self.axis("i"), self.sizes
        if align != "bottom_right":
            return i
        last_key = self.lengths("kv_lengths") if "kv_lengths" in lengths else N
        last_query = self.lengths("q_lengths") if "q_lengths" in lengths else M
        return i + last_key - last_query


def causal(mask: masks.Causal, at: Places) -> Tensor:
    """j <= i'."""
    return at.axis("j") <= at.aligned_rows(mask.align, [*at.data])


def window(mask: masks.Window, at: Places) -> Tensor:
    """i' - left <= j <= i' + right."""
    left = INF if mask.left is None else mask.left
    right = INF if mask.right is None else mask.right
    i, j = at.aligned_rows(mask.align, [*at.data]), at.axis("j")
    return (i - left <= j) & (j <= i + right)


def band(mask: masks.Band, at: Places) -> Tensor:
    """low <= j - i' <= high."""
    gap = at.axis("j") - (
        at.aligned_rows("bottom_right", mask.ragged) if mask.ragged else at.axis("i")
    )
    low = -INF if mask.low is None else mask.low
    return (low <= gap) & (gap <= (INF if mask.high is None else mask.high))


def same_segment(mask: masks.SameSegment, at: Places) -> Tensor:
    """Query and key have equal numbers."""
    q, k = at.data["q_segments"], at.data["kv_segments"]
    return q[:, None, :, None] == k[:, None, None, :]


def keep_blocks(mask: masks.KeepBlocks, at: Places) -> Tensor:
    """The element of the table for the blocks of i and j."""
    table = at.data[mask.name]
    i, j = ((at.axis(x) + n).flatten() for x, n in zip("ij", mask.start, strict=True))
    x, y = (i // mask.rows) % table.shape[2], (j // mask.keys) % table.shape[3]
    return table[:, :, x][..., y]


LEAVES: dict[type[masks.Mask], Callable[[Any, Places], Tensor]] = {
    masks.Causal: causal,
    masks.Window: window,
    masks.Band: band,
    masks.SameSegment: same_segment,
    masks.Prefix: lambda mask, at: at.axis("j") < mask.length,
    masks.Keep: lambda mask, at: at.data[mask.name],
    masks.KeepBlocks: keep_blocks,
    masks.KeyLengths: lambda mask, at: at.axis("j") < at.lengths("kv_lengths"),
    masks.QueryLengths: lambda mask, at: at.axis("i") < at.lengths("q_lengths"),
}


def evaluate_mask(mask: masks.Mask, at: Places) -> Tensor:
    """True for kept places, [B,H,M,N] or broadcast to it."""
    match mask:
        case masks.And(a, b):
            return evaluate_mask(a, at) & evaluate_mask(b, at)
        case masks.Or(a, b):
            return evaluate_mask(a, at) | evaluate_mask(b, at)
        case masks.Not(a):
            return ~evaluate_mask(a, at)
        case _ if type(mask) in LEAVES:
            return LEAVES[type(mask)](mask, at)
        case _:
            return evaluate_place_by_place(mask, at.sizes, at.data)


def evaluate_place_by_place(
    mask: masks.Mask, sizes: tuple[int, int, int, int], data: Data
) -> Tensor:
    """`keep` at every single place, in integers: slow, and the meaning of the mask."""
    _, H, M, N = sizes
    places = (Place(b, h, i, j, H, M, N, data) for b, h, i, j in product(*map(range, sizes)))
    answers = [bool(mask.keep(place)) for place in places]
    return torch.tensor(answers, dtype=torch.bool).reshape(sizes)
