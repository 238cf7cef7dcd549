"""What the CuTe DSL hands its runtime, as a virtual GPU reads it: tensor maps and launches."""

from __future__ import annotations

import struct
from itertools import product
from typing import final

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from attn_graph.testing.gpu import UnknownInstructionError
from attn_graph.testing.gpu.dsl import check_launch, translate_map
from attn_graph.testing.gpu.maps import TensorMap
from attn_graph.testing.gpu.products import SPANS

TYPES = {6: 2, 7: 4, 10: 2}
USED, BYTES = 64, 128
KIND = 8  # where the word is that says the rank, the type and the swizzling


@final
@frozen
class Described:
    """A tensor and a box, innermost axis first, as the hardware is told of them."""

    address: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    type: int
    swizzling: int

    def pack(self, rest: bytes) -> bytes:
        """The bytes of its map; behind those that say something lies whatever was there before."""
        rank = len(self.shape)
        kind = 0x40002 | rank - 1 << 4 | self.type << 7 | self.swizzling << 13
        strides = [x // 16 for x in self.strides] + [0] * (6 - rank)
        sizes = [x - 1 for x in self.shape] + [0] * (5 - rank)
        numbers = struct.pack("<QI5I5I", self.address, kind, *strides[:5], *sizes)
        boxes = bytes(x - 1 for x in self.box)
        return (numbers + bytes(3) + boxes).ljust(USED, b"\0") + rest


@st.composite
def described(draw: st.DrawFn) -> Described:
    """Maps of one to five axes."""
    rank = draw(st.integers(1, 5))
    return Described(
        draw(st.integers(0, 2**47)) * 16,
        draw(st.lists(st.integers(1, 2**31), min_size=rank, max_size=rank)),
        [16 * draw(st.integers(1, 2**31)) for _ in range(rank - 1)],
        draw(st.lists(st.integers(1, 256), min_size=rank, max_size=rank)),
        draw(st.sampled_from([*TYPES])),
        draw(st.integers(0, 3)),
    )


garbage = st.binary(min_size=BYTES - USED, max_size=BYTES - USED)


@given(x=described(), rest=garbage)
def test_a_tensor_map_is_read_as_it_was_written(x: Described, rest: bytes) -> None:
    got = TensorMap.read(translate_map(x.pack(rest)))
    item, span = TYPES[x.type], SPANS[x.swizzling]
    due = (x.address, (*x.shape,), (*x.strides,), (*x.box,), item, span, False)
    assert (got.address, got.shape, got.strides, got.box, got.item, got.span, got.nan) == due


def unknown_bits(x: Described) -> list[int]:
    """Bits of a map of which nobody knows what they say."""
    rank = len(x.shape)
    known = {*range(8 + 4 * rank), *range(32, 32 + 4 * rank), *range(55, 55 + rank)}
    others = [8 * n + bit for n in range(USED) if n not in known for bit in range(8)]
    return others + [
        8 * KIND + bit for bit in range(32) if not 4 <= bit <= 10 and bit not in (13, 14)
    ]


@given(x=described(), rest=garbage, data=st.data())
def test_a_tensor_map_that_says_more_is_refused(
    x: Described, rest: bytes, data: st.DataObject
) -> None:
    changed = bytearray(x.pack(rest))
    bit = data.draw(st.sampled_from(unknown_bits(x)))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnknownInstructionError, match="a tensor map of"):
        translate_map(bytes(changed))


@given(x=described(), rest=garbage, type=st.integers(0, 15), rank=st.integers(6, 8))
def test_a_tensor_map_of_other_elements_or_more_axes_is_refused(
    x: Described, rest: bytes, type: int, rank: int
) -> None:
    wide = bytearray(x.pack(rest))
    wide[KIND] |= rank - 1 << 4
    other = bytearray(x.pack(rest))
    other[KIND : KIND + 2] = (
        int.from_bytes(other[KIND : KIND + 2], "little") & ~0x780 | type << 7
    ).to_bytes(2, "little")
    for changed in (wide,) if type in TYPES else (wide, other):
        with pytest.raises(UnknownInstructionError, match="a tensor map of kind"):
            translate_map(bytes(changed))


def test_other_parameters_are_left_as_they_are() -> None:
    assert translate_map(bytes(range(16))) == bytes(range(16))


@given(
    axes=st.lists(
        st.tuples(*(st.integers(*x) for x in ((1, 5), (1, 4), (-4, 6)))), min_size=1, max_size=5
    ),
    steps=st.lists(st.integers(1, 2**40), min_size=4, max_size=4),
)
def test_a_box_is_cut_to_its_tensor(axes: list[tuple[int, int, int]], steps: list[int]) -> None:
    """axes: the size of the tensor, and the size and the place of the box, innermost first."""
    shape, box, first = zip(*axes, strict=True)
    strides = (2, *(16 * x for x in steps[: len(axes) - 1]))
    rows, columns, at = TensorMap(2**46, shape, strides[1:], box, 2, 16, False).places(first)
    places = [[place + n for n in range(count)] for _, count, place in axes]
    due = [column for column, x in enumerate(places[0]) if 0 <= x < shape[0]]
    assert columns.tolist() == due
    inside = {
        row: 2**46
        + sum(x * s for x, s in zip((places[0][due[0]], *above[::-1]), strides, strict=True))
        for row, above in enumerate(product(*places[:0:-1]) if due else ())
        if all(0 <= x < n for x, n in zip(above[::-1], shape[1:], strict=True))
    }
    assert dict(zip(rows.tolist(), at.tolist(), strict=True)) == inside


TEXT = ".visible .entry kernel(.param .u64 x) {"
REFUSED = {
    "is not the kernel that was compiled": ("other", []),
    "attribute 4: [2, 1, 1]": ("kernel", [(4, [2, 1, 1])]),
    "attribute 2: [1, 0, 0]": ("kernel", [(2, [1, 0, 0])]),
    "attribute 9: [0, 0, 0]": ("kernel", [(6, [1]), (9, [0, 0, 0])]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_launches_that_a_virtual_gpu_does_not_make_are_refused(text: str) -> None:
    with pytest.raises(UnknownInstructionError) as caught:
        check_launch(TEXT, *REFUSED[text])
    assert text in str(caught.value)


def test_launches_of_programs_alone_are_made() -> None:
    check_launch(TEXT, "kernel", [(2, [0]), (4, [1, 1, 1]), (6, [1])])
