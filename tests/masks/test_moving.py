"""A mask that is moved to a box keeps there what the whole one keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.transforms.moving import Box, cut_data, move_mask
from attn_graph.masks.canonical import EVERYTHING, canonical_mask
from attn_graph.masks.places import Block, Place
from attn_graph.testing.mask_check import mask_cases


def keep(mask: m.Mask | None, sizes: tuple[int, int, int, int], data: dict[str, Any]) -> Any:
    """Every place of [B,H,M,N]: whether a mask keeps it."""
    B, H, M, N = sizes
    at = Place.of(Block(range(B), range(H), range(M), H, M, N, data), range(N))
    return torch.as_tensor((EVERYTHING if mask is None else mask).keep(at)).expand(sizes)


def axes_of(mask: m.Mask) -> dict[str, str]:
    return {name: data.axes for name, data in mask.needs.items()}


@st.composite
def ranges(draw: st.DrawFn, size: int) -> range:
    """Some neighbours of `size` positions, perhaps none."""
    first = draw(st.integers(0, size))
    return range(first, draw(st.integers(first, size)))


FORMULAS = (
    ag.Formula("i // 3 == j // 3"),
    ag.Formula("abs(i - j) * 2 <= h + b + 3"),
    ag.Formula("max(i, 5) - min(j, 2 + h) <= 3"),
    ag.Formula("page_i <= page_j", (("page_i", "bi"), ("page_j", "j"))),
)


@given(st.data())
def test_a_part_keeps_what_the_whole_keeps_there(data: st.DataObject) -> None:
    case = data.draw(mask_cases())
    simple = canonical_mask(case.mask, *case.sizes[2:])
    mask = EVERYTHING if simple is None else simple
    batch, heads, rows, keys = (data.draw(ranges(n)) for n in case.sizes)
    box = Box(batch, heads, rows, keys, case.sizes)
    assert_alike(mask, move_mask(mask, box), box, case.data)


def assert_alike(mask: m.Mask, moved: m.Mask, box: Box, tensors: dict[str, Any]) -> None:
    """What `moved` keeps of a box is what `mask` keeps there of all places."""
    whole = keep(mask, box.sizes, tensors)
    index = tuple(slice(own.start, own.stop) for own in box.ranges.values())
    own = keep(moved, box.shape, cut_data(axes_of(moved), box, tensors))
    assert torch.equal(own, whole[index])
    assert canonical_mask(moved, *box.shape[2:]) is not None or bool(own.all())


@pytest.mark.parametrize("mask", FORMULAS, ids=str)
def test_formulas_move(mask: ag.Formula) -> None:
    B, H, M, N = sizes = (2, 3, 11, 9)
    full = {"b": B, "h": H, "i": M, "j": N}
    tensors = {
        name: torch.arange(torch.Size(full[x] for x in axes).numel()).reshape(
            [full[x] for x in axes]
        )
        for name, axes in mask.elements
    }
    box = Box(range(1, 2), range(1, 3), range(4, 10), range(3, 9), sizes)
    assert_alike(mask, move_mask(mask, box), box, tensors)


def test_lengths_of_a_part_are_its_own() -> None:
    sizes = (3, 1, 10, 10)
    box = Box(range(3), range(1), range(10), range(4, 8), sizes)
    moved = cut_data({"kv_lengths": "b"}, box, {"kv_lengths": torch.tensor([2, 6, 10])})
    assert moved["kv_lengths"].tolist() == [0, 2, 4]  # never beyond what the box has


@frozen
class Odd(m.Mask):
    """A leaf of a user's own."""

    def keep(self, at: ag.extend.Place) -> Any:
        return (at.i + at.j) % 2 == 1


def test_what_can_t_be_moved_says_so() -> None:
    box = Box.whole(1, 1, 4, 4)
    with pytest.raises(ag.GraphError, match=r"Odd\(\) is your own leaf.*Formula"):
        move_mask(Odd() & m.Prefix(2), box)
    with pytest.raises(ag.GraphError, match="kv_lengths"):
        move_mask(ag.Formula("j < kv_lengths", (("kv_lengths", "b"),)), box)
