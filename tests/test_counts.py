"""What masks keep, counted: against every place asked one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import counts
from attn_graph import masks as m
from attn_graph.keys import Block, Place, Strip, Term
from tests import plain_masks
from tests.test_masks import Asked, asked

many = settings(max_examples=4 * settings().max_examples)
sides = st.tuples(st.integers(1, 6), st.integers(1, 6))


@final
@frozen
class Striped(m.Mask):
    """A leaf that tells nothing but what it keeps, by batch entry and head too."""

    step: int

    def keep(self, at: Place) -> Term:
        return (at.j + at.i * at.b + at.h) % self.step == 0


@final
@frozen
class Near(m.Mask):
    """A leaf of one's own that tells its strip."""

    reach: int

    def keep(self, at: Place) -> Term:
        return (at.j - at.i <= self.reach) & (at.i - at.j <= self.reach)

    def strip(self, at: Place) -> Strip:
        return Strip(-self.reach, self.reach)


def brute(drawn: Asked, mask: m.Mask) -> torch.Tensor:
    """Every place [B,H,M,N], asked one by one."""
    return plain_masks.place_by_place(mask, drawn.sizes, drawn.data)


def counted(drawn: Asked, mask: m.Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of each query [B,H,M], and the keys that any sees [B,H,N], by `kept`."""
    B, H, M, N = drawn.sizes
    whole = Block(range(B), range(H), range(M), H, M, N, drawn.data)
    most, least = counts.bounds(mask, whole)
    assert most == least
    found = counts.kept(most, whole)
    return found.keys_of.expand(B, H, M), found.seen.expand(B, H, N)


def check_counts(drawn: Asked, mask: m.Mask, block: tuple[int, int]) -> None:
    B, H, M, N = drawn.sizes
    due = brute(drawn, mask)
    keys_of, seen = counted(drawn, mask)
    assert torch.equal(keys_of, due.sum(-1))
    assert torch.equal(seen, due.any(2))
    found = ag.tiles(mask, M, N, block=block, B=B, H=H, data=drawn.data)
    assert found.exact
    assert (found.empty, found.mixed, found.full) == tile_kinds(due, block)


def tile_kinds(kept: torch.Tensor, block: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles of [B,H,M,N] that are empty, mixed and full, one by one."""
    tiles = [t for row in kept.split(block[0], 2) for t in row.split(block[1], 3)]
    tiles = [t.flatten(2) for t in tiles if t.numel()]
    full = sum(int(t.all(-1).sum()) for t in tiles)
    empty = sum(int((~t).all(-1).sum()) for t in tiles)
    return empty, sum(len(t.flatten(0, 1)) for t in tiles) - empty - full, full


@many
@given(asked(), sides)
def test_counts_are_those_of_every_place_asked(drawn: Asked, block: tuple[int, int]) -> None:
    check_counts(drawn, drawn.mask, block)


@many
@given(asked(), sides, st.integers(1, 4), st.integers(1, 40))
def test_counts_do_not_depend_on_how_many_are_made_at_once(
    drawn: Asked, block: tuple[int, int], most_edges: int, at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "MOST_EDGES", most_edges)
        patch.setattr(counts, "AT_ONCE", at_once)
        patch.setattr(counts, "MOST_OPEN", 2 * at_once)
        check_counts(drawn, drawn.mask, block)


@many
@given(asked(), sides, st.integers(1, 4))
def test_leaves_of_ones_own_are_counted_exactly(
    drawn: Asked, block: tuple[int, int], size: int
) -> None:
    for own in (Striped(size), Near(size)):
        check_counts(evolve(drawn, mask=own, data={}), own, block)
        for mask in (own & drawn.mask, ~own | drawn.mask):
            check_counts(drawn, mask, block)


@many
@given(asked(), st.data())
def test_without_its_data_a_mask_is_bounded(drawn: Asked, data: st.DataObject) -> None:
    """Whatever tensors are left out: the most lacks no place, the least has none too many."""
    B, H, M, N = drawn.sizes
    names = sorted(drawn.mask.needs)
    given_names = data.draw(st.sets(st.sampled_from(names))) if names else set()
    some = {name: drawn.data[name] for name in given_names}
    mask = drawn.mask.resolved(M, N, m.ragged_in(drawn.mask.needs))
    due = brute(drawn, mask)
    whole = Block(range(B), range(H), range(M), H, M, N, some)
    most, least = (brute(drawn, x) for x in counts.bounds(drawn.mask, whole))
    assert (due & ~most).sum() == 0
    assert (least & ~due).sum() == 0
    found = ag.tiles(drawn.mask, M, N, block=(2, 3), B=B, H=H, data=some)
    empty, _, full = tile_kinds(due, (2, 3))
    assert found.empty <= empty
    assert found.full <= full
    assert found.exact or given_names != set(names)


def test_a_window_over_64k_positions_is_counted_in_no_time() -> None:
    S, left = 65536, 4095
    mask = ag.Causal() & ag.Window(left)
    whole = Block(range(1), range(1), range(S), 1, S, S, {})
    most, _ = counts.bounds(mask, whole)
    with counting() as calls:
        found = int(counts.kept(most, whole).keys_of.sum())
    assert found == (left + 1) * S - left * (left + 1) // 2
    assert max(calls) <= counts.AT_ONCE
    assert sum(calls) <= 8 * S


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many places a band's `keep` was asked for in this block, call by call."""
    calls: list[int] = []
    before = m.Band.keep

    def keep(mask: m.Band, at: Place) -> Term:
        found = before(mask, at)
        calls.append(found.numel())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m.Band, "keep", keep)
        yield calls


def test_lengths_that_are_not_known_leave_the_triangle_that_they_could_fill() -> None:
    mask = ag.Causal("bottom_right") & ag.KeyLengths()
    found = ag.tiles(mask, 64, 128, block=(64, 64))
    assert (found.empty, found.mixed, found.full, found.exact) == (0, 2, 0, False)
    exact = ag.tiles(mask, 64, 128, block=(64, 64), data={"kv_lengths": torch.tensor([128])})
    assert (exact.mixed, exact.full, exact.exact) == (1, 1, True)


def test_tiles_say_what_is_wrong_with_their_arguments() -> None:
    with pytest.raises(ag.GraphError, match=r"block \(0, 128\) holds no place"):
        ag.tiles(ag.Causal(), 4, 4, block=(0, 128))
    with pytest.raises(ag.GraphError, match="reads no keep; it reads kv_lengths"):
        ag.tiles(ag.KeyLengths(), 4, 4, data={"keep": torch.ones(1, 1, 1, 4).bool()})
    with pytest.raises(ag.GraphError, match="does not fit"):
        ag.tiles(ag.KeyLengths(), 4, 4, B=2, data={"kv_lengths": torch.tensor([1])})
    with pytest.raises(ag.GraphError, match="where the diagonal lies is not said"):
        ag.tiles(ag.Causal(), 4, 8)


def test_tiles_print_what_they_are() -> None:
    assert str(ag.tiles(ag.Causal(), 256, 256)) == (
        "4 tiles of 128 x 128: 1 empty, 2 mixed, 1 full"
    )
    assert str(evolve(ag.tiles(None, 1, 1), exact=False)).endswith("before the data are known")
