"""What masks keep, counted: against every place asked one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, final
from unittest.mock import Mock

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.lowering.cpu import schedule
from attn_graph.masks.places import Block, Place, Strip, Term, Untraceable
from attn_graph.sparsity import tiles as counts
from attn_graph.sparsity.layers import Region, bound_both, find_regions, floor_sum
from attn_graph.sparsity.parts import Tile
from attn_graph.testing import mask_formula
from attn_graph.testing.mask_check import MaskCase, mask_cases

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


@final
@frozen
class Slab(m.Mask):
    """A leaf of one's own."""

    stop: int

    def keep(self, at: Place) -> Term:
        return (at.j > 0) & (at.j < self.stop)


def brute(drawn: MaskCase, mask: m.Mask) -> torch.Tensor:
    """Every place [B,H,M,N], asked one by one."""
    return mask_formula.evaluate_place_by_place(mask, drawn.sizes, drawn.data)


def whole_of(drawn: MaskCase) -> Block:
    B, H, M, N = drawn.sizes
    return Block(range(B), range(H), range(M), H, M, N, drawn.data)


def check_counts(drawn: MaskCase, mask: m.Mask, block: tuple[int, int]) -> None:
    """The tiles by whatever way is taken, and all else by each way that there is."""
    B, H, M, N = drawn.sizes
    due, whole = brute(drawn, mask), whole_of(drawn)
    most, least = counts.bounds(mask, whole)
    assert most == least
    found = ag.tiles(mask, M, N, block=block, B=B, H=H, data=drawn.data)
    assert found.exact
    assert (found.empty, found.mixed, found.full) == tile_kinds(due, block)
    if due.numel():
        check_places(most, whole, due, block)
    closed = find_regions(most, whole)
    if closed is not None:
        check_regions(closed, N, due, block)


def check_places(mask: m.Mask, whole: Block, due: torch.Tensor, block: tuple[int, int]) -> None:
    """Counts of all places asked at once, whether the mask has a closed form or not."""
    places, flags = counts.keep_places(mask, whole), counts.flag_tiles(mask, whole, block)
    assert places is not None
    assert flags is not None
    found = counts.cover_places(places, whole, whole.H, exact=True)
    pairs, queries, keys = (int(x.sum()) for x in (due, due.any(3), due.any(2)))
    assert (found.pairs, found.queries, found.keys) == (pairs, queries, keys)
    some, every = (int(x.sum()) * counts.multiplicity(x, whole) for x in flags)
    _, mixed, full = tile_kinds(due, block)
    assert (some, every) == (mixed + full, full)


def check_regions(found: list[Region], N: int, due: torch.Tensor, block: tuple[int, int]) -> None:
    assert sum(region.pairs for region in found) == due.sum()
    assert sum(region.queries for region in found) == due.any(3).sum()
    assert sum(region.count * len(region.keys) for region in found) == due.any(2).sum()
    empty, mixed, full = tile_kinds(due, block)
    assert sum(region.tiles(block) for region in found) == mixed + full
    assert sum(region.outside(N).tiles(block) for region in found) == empty + mixed


def tile_kinds(kept: torch.Tensor, block: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles of [B,H,M,N] that are empty, mixed and full, one by one."""
    tiles = [t for row in kept.split(block[0], 2) for t in row.split(block[1], 3)]
    tiles = [t.flatten(2) for t in tiles if t.numel()]
    full = sum(int(t.all(-1).sum()) for t in tiles)
    empty = sum(int((~t).all(-1).sum()) for t in tiles)
    return empty, sum(len(t.flatten(0, 1)) for t in tiles) - empty - full, full


@many
@given(mask_cases(), sides, st.sampled_from([counts.AT_ONCE, 40, 9, 1]))
def test_counts_are_those_of_every_place_asked(
    drawn: MaskCase, block: tuple[int, int], at_once: int
) -> None:
    """However many are made at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "AT_ONCE", at_once)
        check_counts(drawn, drawn.mask, block)


@given(mask_cases(), sides, st.integers(1, 4))
def test_leaves_of_ones_own_are_counted_exactly(
    drawn: MaskCase, block: tuple[int, int], size: int
) -> None:
    for own in (Striped(size), Near(size), Slab(size)):
        check_counts(evolve(drawn, mask=own, data={}), own, block)
        for mask in (own & drawn.mask, ~own | drawn.mask):
            check_counts(drawn, mask, block)


@many
@given(mask_cases(), st.data())
def test_without_its_data_a_mask_is_bounded(drawn: MaskCase, data: st.DataObject) -> None:
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


strips: st.SearchStrategy[m.Mask] = st.deferred(
    lambda: st.one_of(
        st.builds(m.Band, st.integers(-90, 90), st.integers(-90, 90)),
        st.builds(m.Band, st.none(), st.integers(-90, 90)),
        st.builds(m.Band, st.integers(-90, 90), st.none()),
        st.builds(m.Prefix, st.integers(0, 90)),
        st.just(m.KeyLengths()),
        st.just(m.QueryLengths()),
        st.just(m.Band(-9, 5, ("kv_lengths", "q_lengths"))),
        st.builds(m.And, strips, strips),
        st.builds(m.Or, strips, strips),
        st.builds(m.Not, strips),
    )
)
lengths = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=4)
STRIPED, CAUSAL = Striped(3), ag.Causal()
middle, blocks = st.integers(1, 99), st.tuples(st.integers(1, 40), st.integers(1, 40))


@many
@given(strips, middle, middle, blocks, lengths)
@example(m.Or(m.Band(None, -7), m.Not(m.Band(-9, None))), 97, 99, (13, 40), [(0, 0)])
@example(m.Or(m.Band(-3, 0), m.Prefix(20)), 64, 80, (16, 16), [(0, 0)])
def test_closed_forms_agree_with_counting_place_by_place(
    mask: m.Mask, M: int, N: int, block: tuple[int, int], pairs: list[tuple[int, int]]
) -> None:
    q, k = (torch.tensor(x) for x in zip(*pairs, strict=True))
    data = {"q_lengths": q.clamp(max=M), "kv_lengths": k.clamp(max=N)}
    read = {name: data[name] for name in mask.needs}
    whole = Block(range(len(pairs)), range(2), range(M), 2, M, N, read)
    found = find_regions(mask, whole)
    assert found is not None
    places = counts.keep_places(mask, whole)
    assert places is not None
    due = torch.cat([*places], 2).expand(len(pairs), 2, M, N)
    check_regions(found, N, due, block)


@pytest.mark.parametrize("mask", [ag.Window(100), CAUSAL, CAUSAL | ag.Prefix(9), STRIPED], ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_planning_lists_few_tiles_whatever_the_sizes(mask: m.Mask, alibi: bool) -> None:
    x = ag.TensorSpec((1, 1, 10**9, 8), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        made = Counter[str]()

        def note(*args: Any, **named: Any) -> Tile:  # Any: fields of a tile
            made["tiles"] += 1
            return Tile(*args, **named)

        patch.setattr(schedule, "Tile", note)
        ag.explain(ag.attention(x, x, x, mask=mask, alibi=alibi), target="cpu")
    assert made["tiles"] <= 8 * schedule.MOST_TILES


def test_segments_in_any_order_are_counted() -> None:
    numbers = {"q_segments": [[2, 0, 0, 1]], "kv_segments": [[2, 0, 1, 0]]}
    data = {name: torch.tensor(values) for name, values in numbers.items()}
    found = ag.tiles(m.SameSegment(), 4, 4, block=(1, 1), data=data)
    assert (found.full, found.mixed, found.empty, found.exact) == (6, 0, 10, True)


def test_documents_of_any_length_are_counted_exactly() -> None:
    numbers = torch.arange(2**20)[None] // 2**17
    data = {"q_segments": numbers, "kv_segments": numbers}
    found = ag.tiles(ag.Causal() & m.SameSegment(), 2**20, 2**20, data=data)
    assert (found.mixed, found.full, found.exact) == (2**13, 8 * 2**10 * (2**10 - 1) // 2, True)


@many
@given(st.lists(st.integers(16, 40), min_size=1, max_size=3), st.integers(-40, 40), sides, blocks)
@example([32, 33], 0, (1, 1), (64, 64))
@example([16, 16], 0, (1, 1), (1, 3))
def test_documents_are_counted_in_tiles_of_any_size(
    lengths: list[int], high: int, low: tuple[int, int], block: tuple[int, int]
) -> None:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    data = {"q_segments": numbers, "kv_segments": numbers}
    L = len(numbers[0])
    whole = Block.whole((1, 1, L, L), data)
    for band in (m.Band(None, high), m.Band(high - low[0] * low[1], high)):
        mask = m.SameSegment() & band
        found = find_regions(mask, whole)
        assert found is not None
        due = mask.keep(Place.of(whole, range(L))).expand(1, 1, L, L)
        check_regions(found, L, due, block)


def test_a_long_run_of_keys_that_all_queries_keep_needs_no_mask() -> None:
    block = Block(range(1), range(1), range(3000, 3128), 1, 6000, 6000)
    parts = schedule.block_tile(m.Band(-3000, 0), block, range(1), 2048).parts
    assert [(p.start, p.stop, p.kind) for p in parts] == [
        (0, 127, "mixed"),
        (127, 3001, "full"),
        (3001, 3128, "mixed"),
    ]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 90), st.integers(-90, 90))
def test_floor_sum_is_the_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * t + b) // m for t in range(n))


@given(mask_cases(), sides, st.integers(1, 4))
def test_bounds_by_few_blocks_lack_no_place_and_have_none_too_many(
    drawn: MaskCase, block: tuple[int, int], most_layers: int
) -> None:
    due, whole = brute(drawn, drawn.mask), whole_of(drawn)
    most, least = counts.bounds(drawn.mask, whole)
    empty, _, full = tile_kinds(due, block)
    total = sum(tile_kinds(due, block))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_graph.sparsity.layers.MOST_LAYERS", most_layers)
        (outer,), (inner,) = bound_both(most, least, whole, block[0])
    assert len(outer.layers) <= most_layers
    assert outer.pairs >= due.sum() >= inner.pairs
    assert outer.queries >= due.any(3).sum()
    assert total - outer.tiles(block) <= empty
    assert total - inner.outside(whole.N).tiles(block) <= full


@given(mask_cases(), sides)
def test_tiles_of_a_list_lack_no_place_and_full_ones_have_all(
    drawn: MaskCase, block: tuple[int, int]
) -> None:
    mask = drawn.mask.resolved(*drawn.sizes[2:], m.ragged_in(drawn.mask.needs))
    kinds = counts.bound_tiles(mask, whole_of(drawn), block)
    for line, rows in zip(kinds.tolist(), brute(drawn, mask).split(block[0], 2), strict=False):
        for kind, tile in zip(line, rows.split(block[1], 3), strict=False):
            assert kind > 0 or not tile.any()
            assert kind < 2 or tile.all()


@final
@frozen
class Blocks(m.Mask):
    """Query and key are in the same block: a leaf of one's own."""

    size: int

    def keep(self, at: Place) -> Term:
        return at.i // self.size == at.j // self.size


def test_a_mask_of_one_strip_is_counted_without_evaluating_it() -> None:
    def keep(_: Near, at: Place) -> Term:
        raise Untraceable(f"places {at.i} are evaluated")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Near, "keep", keep)
        found = ag.tiles(Near(5) & Near(7), 256, 256)
    assert (found.empty, found.mixed, found.full, found.exact) == (0, 4, 0, True)


def test_an_exact_count_of_tiles_evaluates_each_place_once() -> None:
    with counting() as calls:
        found = ag.tiles(STRIPED, 512, 512)
        kinds = counts.classify_tiles(STRIPED, Block.whole((1, 1, 512, 512), {}), (128, 128))
    assert found.exact
    assert int((kinds == 1).sum()) == found.mixed
    assert sum(calls) <= 2 * (512**2 + 8)  # and looks if batch entries and heads differ


READERS: dict[str, Callable[[m.Mask, Block], Any]] = {  # of the bounds of 8 blocks of queries
    "tiles of a list": lambda mask, whole: counts.bound_tiles(mask, whole, (128, 128)),
    "an estimate": lambda mask, whole: bound_both(mask, mask, whole, 128),
    "parts on a CPU": lambda mask, whole: [
        schedule.block_tile(mask, block, range(1), 64).parts for block in whole.split(128)
    ],
}


@pytest.mark.parametrize("name", READERS)
def test_a_mask_is_evaluated_once_for_both_bounds_of_a_block(name: str) -> None:
    """By its `keep` at ranges, alone and within joins."""
    whole = Block.whole((1, 1, 1024, 1024), {})
    for mask in (Blocks(64), ~Blocks(64) & CAUSAL | Blocks(3)):
        with pytest.MonkeyPatch.context() as patch:
            keep = Mock(side_effect=Blocks.keep)
            patch.setattr(Blocks, "keep", lambda mask, at, keep=keep: keep(mask, at))
            READERS[name](mask, whole)
        assert keep.call_count == 8 * str(mask).count("Blocks")


HUGE = 10**12
WHATEVER = (
    (CAUSAL, True),
    (CAUSAL & (ag.Window(512) | ag.Prefix(64)), True),
    (~ag.Window(1000, 1000) | (ag.Prefix(7) & ~ag.Window(5)), True),
    (STRIPED & CAUSAL, False),
    (Blocks(10**9) | ag.Prefix(10), False),
    (reduce(m.Or, [ag.Window(3 * n, -3 * n) | ag.Prefix(n) for n in range(90)]), False),
)


@pytest.mark.parametrize(("mask", "exact"), WHATEVER, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("size", [10**7, 99999999, HUGE])
def test_work_is_bounded_whatever_the_sizes(mask: m.Mask, exact: bool, size: int) -> None:
    with counting() as calls:
        found = ag.tiles(mask, size, size, B=size, H=size)
        seen = counts.count_pairs(mask, (size, size, size, size, size), {})
    assert sum(calls) <= 4 * counts.MOST_PLACES
    assert found.exact == seen.exact == exact
    assert found.estimated == seen.estimated == (not exact)
    assert found.total == size**2 * (-(-size // 128)) ** 2
    if mask is CAUSAL:
        assert seen.pairs == size**2 * size * (size + 1) // 2
        assert found.mixed == size**2 * -(-size // 128)


def test_a_span_of_ones_own_bounds_an_estimate() -> None:
    mask = Blocks(10**9)
    found = ag.tiles(mask, 10**11, 10**11)
    assert found.estimated
    assert found.empty > 0.9 * found.total
    assert "estimated" in str(found)


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many places each leaf's `keep` was asked for in this block, call by call."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for leaf in (m.Band, m.Prefix, Striped, Blocks):
            patch.setattr(leaf, "keep", note_calls(leaf.keep, calls))
        yield calls


def note_calls(keep: Callable[..., Term], calls: list[int]) -> Callable[..., Term]:
    def asks(mask: m.Mask, at: Place) -> Term:
        found = keep(mask, at)
        calls.append(found.numel())
        return found

    return asks


def test_lengths_that_are_not_known_leave_the_triangle_that_they_could_fill() -> None:
    mask = ag.Causal("bottom_right") & ag.KeyLengths()
    found = ag.tiles(mask, 64, 128, block=(64, 64))
    assert (found.empty, found.mixed, found.full, found.exact) == (0, 2, 0, False)
    exact = ag.tiles(mask, 64, 128, block=(64, 64), data={"kv_lengths": torch.tensor([128])})
    assert (exact.mixed, exact.full, exact.exact) == (1, 1, True)


def test_what_lengths_that_are_not_known_hide_may_be_anything() -> None:
    found = ag.tiles(~ag.KeyLengths(), 4, 4, block=(2, 2))
    assert (found.empty, found.mixed, found.full, found.exact) == (0, 4, 0, False)


def test_tiles_say_what_is_wrong_with_their_arguments() -> None:
    with pytest.raises(ag.GraphError, match="block 0 is not a whole number of at least 1"):
        ag.tiles(ag.Causal(), 4, 4, block=(0, 128))
    with pytest.raises(ag.GraphError, match="does not read keep; it reads kv_lengths"):
        ag.tiles(ag.KeyLengths(), 4, 4, data={"keep": torch.ones(1, 1, 1, 4).bool()})
    with pytest.raises(ag.GraphError, match="kv_lengths has batch size 1"):
        ag.tiles(ag.KeyLengths(), 4, 4, B=2, data={"kv_lengths": torch.tensor([1])})
    with pytest.raises(ag.GraphError, match="need an alignment of the diagonal"):
        ag.tiles(ag.Causal(), 4, 8)


def test_tiles_print_what_they_are() -> None:
    assert str(ag.tiles(ag.Causal(), 256, 256)) == (
        "4 tiles of 128 x 128: 1 empty, 2 mixed, 1 full"
    )
    assert str(evolve(ag.tiles(None, 1, 1), exact=False)).endswith("before the data are known")
