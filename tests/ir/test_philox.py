"""Philox 4x32-10: the published answers, and bits that depend on their place alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.ops import Dropout, dropout_keeps
from attn_graph.machine.philox import ROOMS, counters, random_words, threshold
from attn_graph.masks.places import Block, Place
from attn_graph.testing import formula

Words = tuple[int, int, int, int]
ONES = 0xFFFFFFFF

# Random123 (D. E. Shaw Research), tests/kat_vectors: key, counter, answer of philox4x32 10.
KNOWN: list[tuple[tuple[int, int], Words, Words]] = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
int64s = st.integers(-(2**63), 2**63 - 1)
SIZES = (2, 3, 5, 11)


def drawn(
    ranges: tuple[range, range, range, range], rate: float, seed: int, offset: int
) -> torch.Tensor:
    """Which places of these ranges of [2,3,5,11] are kept."""
    _, H, M, N = SIZES
    b, h, i, j = ranges
    return dropout_keeps(Place.of(Block(b, h, i, H, M, N), j), rate, seed, offset)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[range, range, range, range]:
    starts = [draw(st.integers(0, n - 1)) for n in SIZES]
    b, h, i, j = (
        range(start, draw(st.integers(start + 1, n)))
        for start, n in zip(starts, SIZES, strict=True)
    )
    return b, h, i, j


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN)
def test_the_published_answers_come_out(
    key: tuple[int, int], counter: Words, answer: Words
) -> None:
    block, i, bh, offset = counter
    seed, one = key[1] << 32 | key[0], range(1)
    rooms = [torch.empty(1, 1, 1, 1, dtype=torch.int64) for _ in range(ROOMS)]
    j = range(4 * block, 4 * block + 4)
    found = random_words(seed, offset, range(bh, bh + 1), one, range(i, i + 1), j, 1, rooms)
    assert tuple(int(word) for word in found) == answer
    assert formula.philox(key, counter) == answer


@given(blocks(), int64s, int64s)
def test_any_block_draws_the_bits_of_the_whole(
    ranges: tuple[range, range, range, range], seed: int, offset: int
) -> None:
    everything = range(SIZES[0]), range(SIZES[1]), range(SIZES[2]), range(SIZES[3])
    whole = drawn(everything, 0.5, seed, offset)
    index = tuple(slice(r.start, r.stop) for r in ranges)
    assert torch.equal(drawn(ranges, 0.5, seed, offset), whole[index])


@given(blocks(), int64s, int64s)
def test_a_part_draws_the_bits_of_its_places_in_the_whole(
    ranges: tuple[range, range, range, range], seed: int, offset: int
) -> None:
    origin = (*(r.start for r in ranges), SIZES[1])
    own = [range(len(r)) for r in ranges]
    part = Place.of(Block(own[0], own[1], own[2], len(own[1]), len(own[2]), len(own[3])), own[3])
    due = drawn(ranges, 0.5, seed, offset)
    assert torch.equal(dropout_keeps(part, 0.5, seed, offset, origin), due)
    sizes = (len(own[0]), len(own[1]), len(own[2]), len(own[3]))
    assert torch.equal(formula.draw_dropout(0.5, seed, offset, sizes, origin) == 1, due)


@pytest.mark.parametrize("origin", [(1, 2, 3), (0, 0, -4, 0, 1), (0, 0, 0.5, 0, 1)])
def test_an_origin_is_four_positions_and_a_number_of_heads(origin: tuple[float, ...]) -> None:
    with pytest.raises(ag.GraphError, match=r"is not \(b, h, i, j, H\)"):
        Dropout(0.5, origin)  # type: ignore[arg-type]


@given(st.sampled_from([0.0, 0.1, 0.5, 0.9]), int64s, int64s)
def test_the_bits_are_those_of_the_page(rate: float, seed: int, offset: int) -> None:
    everything = range(SIZES[0]), range(SIZES[1]), range(SIZES[2]), range(SIZES[3])
    due = formula.draw_dropout(rate, seed, offset, SIZES)
    assert torch.equal(drawn(everything, rate, seed, offset).double(), due)


def dropped(sizes: tuple[int, int, int, int], rate: float, seed: int, offset: int) -> torch.Tensor:
    """Where dropout drops a weight of [B,H,M,N], as float64 numbers 1 and 0."""
    B, H, M, N = sizes
    place = Place.of(Block(range(B), range(H), range(M), H, M, N), range(N))
    return (~dropout_keeps(place, rate, seed, offset)).double()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    """To half of 1/256, from which it is four times as far as chance may take the mean."""
    drops = dropped((4, 8, 128, 256), rate, 1234, 5)
    spread = (rate * (1 - rate) / drops.numel()) ** 0.5  # of the mean of independent bits
    assert 8 * spread <= 2**-8
    assert abs(float(drops.mean()) - rate) < 4 * spread


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_bits_of_places_seeds_and_offsets_are_independent(rate: float) -> None:
    """Bits any distance apart, along one axis or several, are as often both dropped as chance has
    it; and so are those of two seeds or offsets, at one place or at two."""
    sizes = 4, 8, 64, 64
    count = 4 * 8 * 64 * 64  # of the distances, of which all are checked, and of the pairs of each

    def transform(seed: int, offset: int) -> torch.Tensor:
        standard = (dropped(sizes, rate, seed, offset) - rate) / (rate - rate**2) ** 0.5
        waves: torch.Tensor = torch.fft.fftn(standard)
        return waves

    first = transform(99, 3)
    for other in [(99, 3), (100, 3), (99, 4), (99 + 2**32, 3), (3, 99)]:
        sums = torch.fft.ifftn(first * transform(*other).conj()).real / count**0.5
        if other == (99, 3):
            sums[0, 0, 0, 0] = 0  # of each bit with itself
        assert sums.abs().max() < 6  # of so many normal numbers one in 4,000 draws has a larger


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_each_row_head_and_key_drops_its_share(rate: float) -> None:
    """Counts along each axis scatter as those of independent bits: chi squared is near its mean."""
    drops = dropped((16, 8, 64, 512), rate, 7, 0)
    for axis, n in enumerate(drops.shape):
        counts = drops.movedim(axis, 0).reshape(n, -1).sum(1)
        each = drops.numel() / n
        chi = float(((counts - each * rate) ** 2).sum()) / (each * rate * (1 - rate))
        assert abs(chi - n) < 4.5 * (2 * n) ** 0.5


@pytest.mark.parametrize(("seed", "offset"), [(1, 0), (0, 1), (2**32, 0), (-1, 0), (0, -1)])
def test_another_seed_or_offset_draws_other_bits(seed: int, offset: int) -> None:
    everything = range(2), range(3), range(5), range(11)
    assert not torch.equal(drawn(everything, 0.5, 0, 0), drawn(everything, 0.5, seed, offset))


def test_no_two_places_share_a_word() -> None:
    block = Block(range(2), range(3), range(5), 3, 5, 16)
    place = Place.of(block, range(16))
    assert place.ranges is not None
    rooms = [torch.empty(2, 3, 5, 4, dtype=torch.int64) for _ in range(ROOMS)]
    found = torch.stack(random_words(7, 0, *place.ranges, 3, rooms))
    assert len(found.unique()) == found.numel()
    assert found.min() >= 0
    assert found.max() <= ONES


def test_counters_cover_their_keys_four_by_four() -> None:
    assert counters(range(3, 9)) == range(3)
    assert counters(range(4, 8)) == range(1, 2)
    assert len(counters(range(0))) == 0


def test_the_threshold_leaves_the_share_of_words_that_is_kept() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**31
    assert threshold(1 - 2**-40) == 2**32
