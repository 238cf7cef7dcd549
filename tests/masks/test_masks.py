"""Masks: what they keep, what their blocks know about it, and the one form they are brought to."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.masks.canonical import canonical_mask
from attn_graph.masks.places import Block, Keys, Place, Term
from attn_graph.testing import mask_formula, strategies
from attn_graph.testing.mask_check import (
    MaskCase,
    blocks,
    check_keep,
    mask_cases,
    ranges,
)
from attn_graph.testing.strategies import Shape

many = settings(max_examples=4 * settings().max_examples)  # a mask is cheap to draw and to evaluate


def test_every_leaf_is_drawn_and_has_a_formula_of_its_own() -> None:
    leaves = {
        kind
        for kind in vars(m).values()
        if isinstance(kind, type) and issubclass(kind, m.Mask) and not issubclass(kind, m.Join)
    }
    assert leaves - {m.Mask, m.Diagonal} == set(m.LEAVES)
    assert strategies.LEAVES.keys() == mask_formula.LEAVES.keys() == set(m.LEAVES)


@many
@given(mask_cases())
def test_a_mask_in_any_form_keeps_what_the_page_says(drawn: MaskCase) -> None:
    """Asked for tensors and for integers; in its canonical form, which has no other; and as people
    write it."""
    check_keep(drawn)
    assert torch.equal(drawn.evaluate_singly(drawn.mask), drawn.kept)
    M, N = drawn.shape.M, drawn.shape.N
    canonical = canonical_mask(drawn.mask, M, N)
    everything = torch.ones_like(drawn.kept)
    form = everything if canonical is None else drawn.evaluate_singly(canonical)
    assert torch.equal(form, drawn.kept)
    assert canonical is None or canonical_mask(canonical, M, N) == canonical
    written = drawn.resolved.written().aligned("top_left")
    assert torch.equal(drawn.evaluate_singly(written), drawn.kept)


def check_block(mask: m.Mask, case: MaskCase, block: Block) -> None:
    """`span` has every key that some query keeps, and `surely` only keys that all queries keep."""
    kept = case.kept[block.batch.start : block.batch.stop, block.heads.start : block.heads.stop]
    here = kept[:, :, block.rows.start : block.rows.stop].flatten(0, 2)
    assert not (here.any(0) & ~mask.span(block).flags(block.N)).any()
    assert not (mask.surely(block).flags(block.N) & ~here.all(0)).any()


@many
@given(blocks(mask_cases()))
def test_span_covers_what_is_kept_and_what_is_surely_kept_is_kept(
    pair: tuple[MaskCase, Block],
) -> None:
    """And what a block says stays true for the blocks inside it."""
    drawn, block = pair
    check_block(drawn.mask, drawn, block)
    check_block(drawn.resolved, drawn, block)
    canonical = canonical_mask(drawn.mask, drawn.shape.M, drawn.shape.N)
    if canonical is not None:
        check_block(canonical, drawn, block)
    span, surely = drawn.resolved.span(block), drawn.resolved.surely(block)
    for i in block.rows:
        inner = evolve(block, rows=range(i, i + 1))
        assert (span & drawn.resolved.span(inner)) == drawn.resolved.span(inner)
        assert (surely & drawn.resolved.surely(inner)) == surely


@pytest.mark.parametrize("kind", m.LEAVES)
def test_each_leaf_alone_knows_its_blocks(kind: type[m.Mask]) -> None:
    def leaf(shape: Shape) -> SearchStrategy[m.Mask]:
        return strategies.LEAVES[kind](strategies.alignments(shape, None))

    @many
    @given(blocks(mask_cases(leaf)))
    def check(pair: tuple[MaskCase, Block]) -> None:
        check_block(pair[0].mask, *pair)
        check_block(pair[0].resolved, *pair)

    check()


@final
@frozen
class Own(m.Mask):
    """A user's mask: one of a few definitions, which may read integers of keys and flags."""

    kind: str

    @property
    def needs(self) -> dict[str, m.Data]:
        read = {"first": m.Data("bj"), "flags": m.Data("hi", (torch.bool,)), "far": m.Data("b")}
        read["depth"] = m.Data("i", (torch.float32,))
        return {name: data for name, data in read.items() if name in self.kind}

    def keep(self, at: Place) -> Term:
        match self.kind:
            case "blocks and a prefix":
                return (at.i // 3 == at.j // 3) | (at.j < 2)
            case "every second key":
                return (at.i - at.j) % 2 == 0
            case "every head has its own":
                return at.j <= at.i + at.h
            case "first by key":
                return at.i >= at.load("first", at.b, at.j)
            case "flags of queries":
                return at.load("flags", at.h, at.i) | (at.j == at.i)
            case "far before or behind":
                return at.load("far", at.b) < at.j - at.i
            case _:  # depth
                return at.j <= at.load("depth", at.i)


KINDS = (
    "blocks and a prefix",
    "every second key",
    "every head has its own",
    "first by key",
    "flags of queries",
    "far before or behind",
    "depth of a query",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_a_user_has_bounds_from_keep_alone(kind: str) -> None:
    @many
    @given(blocks(mask_cases(lambda _: st.just(Own(kind)))))
    def check(pair: tuple[MaskCase, Block]) -> None:
        check_block(pair[0].mask, *pair)
        check_block(~pair[0].mask, evolve(pair[0], mask=~pair[0].mask), pair[1])

    check()


def test_bounds_from_keep_are_as_close_as_a_bands() -> None:
    block = Block(range(1), range(1), range(40, 48), 1, 64, 64)
    assert Own("blocks and a prefix").span(block) == Keys(((0, 2), (39, 48)))
    assert Own("blocks and a prefix").surely(block) == Keys.between(0, 2)
    data = {"first": torch.arange(64)[None] // 8 * 8}
    known = evolve(block, data=data)
    assert Own("first by key").span(known) == Own("first by key").surely(known) == Keys(((0, 48),))
    assert Own("first by key").span(block) == block.all


class Dispatched(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", [m.Keep(), m.SameSegment()], ids=str)
def test_finding_the_keys_of_a_block_takes_few_operations(mask: m.Mask) -> None:
    """A CPU does so for each block of queries of each call."""
    numbers = torch.arange(512)[None] // 128
    keep = (numbers[0][:, None] == numbers)[None, None]
    data = {"keep": keep, "q_segments": numbers, "kv_segments": numbers}
    block = Block(range(1), range(1), range(128), 1, 512, 512, {n: data[n] for n in mask.needs})
    with Dispatched() as operations:
        surely, span = mask.bound_keys(block)
    assert surely == span == Keys.between(0, 128)
    assert operations.count <= 55


def test_a_join_surely_keeps_what_its_parts_say_together() -> None:
    """No less: a block of queries that a part keeps whole needs no mask."""
    block = Block(range(1), range(1), range(40, 48), 1, 64, 64)
    start, near, before = m.Prefix(8), m.Band(-9, 2), m.Prefix(40)
    assert (start | near).surely(block) == Keys(((0, 8), (38, 43)))
    assert (before & near).surely(block) == Keys.between(38, 40)
    assert (~near).surely(block) == Keys(((0, 31), (50, 64)))


def test_lengths_move_a_band_by_the_least_and_the_most_that_they_say() -> None:
    data = {"kv_lengths": torch.tensor([30, 34]), "q_lengths": torch.tensor([10, 20])}
    block = Block(range(2), range(1), range(8, 10), 1, 64, 64, data)
    band = m.Band(-20, 3, tuple(data))
    assert band.span(block) == Keys.between(8 + 10 - 20, 9 + 24 + 3 + 1) & block.all
    assert band.surely(block) == Keys.between(9 + 24 - 20, 8 + 10 + 3 + 1)
    for b, shift in enumerate((30 - 10, 34 - 20)):
        kept = [j for j in range(64) if band.keep(Place(b, 0, 8, j, 1, 64, 64, data))]
        assert kept == [*range(max(0, 8 + shift - 20), 8 + shift + 3 + 1)]


def test_strips_that_are_joined_are_one_strip() -> None:
    """With every bound of both, so that no tile beyond them is visited."""
    strip = (m.Band(-9, 2) & m.Prefix(40) & m.Band(-3, 7)).strip(Place(0, 0, 0, 0, 1, 64, 64))
    assert strip is not None
    assert (strip.low, strip.high, strip.keys, strip.rows) == (-3, 2, 40, None)
    assert (m.Prefix(40) & m.Keep()).strip(Place(0, 0, 0, 0, 1, 64, 64)) is None


def test_bands_are_written_as_causal_and_window() -> None:
    both = m.Band(None, 0) & (m.Band(-64, 0) | m.Prefix(4))
    assert str(both.written()) == "(Causal() & (Window(left=64) | Prefix(length=4)))"
    empty, moved = m.Band(1, -1), m.Band(None, 0, ("kv_lengths",))
    assert (empty.written(), moved.written()) == (empty, moved)


@given(mask_cases(), st.data())
def test_loading_slices_gives_what_gathering_gives(drawn: MaskCase, data: st.DataObject) -> None:
    B, H, M, N = drawn.sizes
    block = drawn.block(*(data.draw(ranges(n)) for n in (B, H, M)))
    sliced = Place.of(block, data.draw(ranges(N)))
    gathered = evolve(sliced, ranges=None)
    assert sliced.ranges is not None
    shape = [*map(len, sliced.ranges)]
    for name, reads in drawn.mask.needs.items():
        index = dict(zip("bhij", sliced.axes, strict=True))
        index |= {"x": sliced.i // reads.block[0], "y": sliced.j // reads.block[1]}
        at = [index[x] for x in reads.axes]
        a, b = sliced.load(name, *at), gathered.load(name, *at)
        x = drawn.data[name]
        due = x[tuple(0 if n == 1 else i for i, n in zip(at, x.shape, strict=True))]
        assert torch.equal(a.expand(shape), due.expand(shape))
        assert torch.equal(b.expand(shape), due.expand(shape))


def test_loading_in_another_order_of_axes_gathers() -> None:
    block = Block(range(2), range(1), range(3), 1, 3, 4, {"x": torch.arange(12).reshape(4, 3)})
    place = Place.of(block, range(4))
    assert torch.equal(place.load("x", place.j, place.i), torch.arange(12).reshape(4, 3).mT)
    assert torch.equal(place.load("x", place.j, place.j % 3), torch.tensor([0, 4, 8, 9]))


# The algebra of keys


@st.composite
def key_sets(draw: DrawFn) -> tuple[Keys, set[int]]:
    flags = draw(st.lists(st.booleans(), min_size=12, max_size=12))
    keys = Keys.where(torch.tensor(flags))
    return keys, {j for j, flag in enumerate(flags) if flag}


def same(keys: Keys, members: set[int]) -> bool:
    """The same members, and intervals that are sorted, apart from each other and not empty."""
    edges = [edge for interval in keys.intervals for edge in interval]
    in_order = all(a < b for a, b in pairwise(edges))
    return in_order and {j for j in range(-1, 20) if j in keys} == members


@given(key_sets(), key_sets())
def test_keys_are_joined_and_met_as_sets_are(
    a: tuple[Keys, set[int]], b: tuple[Keys, set[int]]
) -> None:
    assert same(a[0], a[1])
    assert same(a[0] | b[0], a[1] | b[1])
    assert same(a[0] & b[0], a[1] & b[1])
    assert same(a[0].outside(12), set(range(12)) - a[1])
    assert len(a[0]) == len(a[1])
    assert a[0].outside(12).outside(12) == a[0]
    assert (a[0] | b[0]).outside(12) == a[0].outside(12) & b[0].outside(12)


@given(key_sets(), st.integers(0, 5))
def test_bridging_fills_the_holes_up_to_a_size_and_no_other(
    drawn: tuple[Keys, set[int]], gap: int
) -> None:
    keys, members = drawn
    bridged = keys.bridged(gap)
    assert (bridged & keys) == keys
    holes = [(b, c) for (_, b), (c, _) in zip(keys.intervals, keys.intervals[1:], strict=False)]
    filled = {j for b, c in holes if c - b <= gap for j in range(b, c)}
    assert same(bridged, members | filled)


@given(key_sets(), st.integers(0, 12), st.integers(0, 12))
def test_keys_cover_an_interval_when_they_hold_all_of_it(
    drawn: tuple[Keys, set[int]], start: int, stop: int
) -> None:
    assert drawn[0].covers(start, stop) == (set(range(start, stop)) <= drawn[1])


def test_keys_between_nothing_are_none() -> None:
    assert Keys.between(3, 3) == Keys.between(4, 3) == Keys() == Keys.where(torch.zeros(0).bool())


# One form


A, B = m.Keep("a"), m.Keep("b")
SAME = [
    (A & B, B & A),
    (A | B, B | A),
    (A & (B & A), B & A),
    (~~A, A),
    (~(~A & ~A), A),
    (m.Causal() & m.Window(4), m.Window(4, 0)),
    (m.Causal() & m.Window(4, 9), m.Window(4)),
    (m.Causal("top_left"), m.Causal("bottom_right")),
    (m.Causal() & m.Window(8), m.Causal()),
    (m.Causal() & m.Window(8, 8) & A, A & m.Causal()),
    (m.Window(None, None) & A, A),
    ((m.Window(None, None) | B) & A, A),
    (m.Window(None, 0), m.Causal()),
    (A | m.Window(9, None) | B, m.Window(7, 7)),
    (m.Prefix(8), m.Window(7, 7)),
]


@pytest.mark.parametrize(("a", "b"), SAME, ids=str)
def test_masks_that_are_one_have_one_form(a: m.Mask, b: m.Mask) -> None:
    assert canonical_mask(a, 8, 8) == canonical_mask(b, 8, 8)


@pytest.mark.parametrize("mask", [m.Window(7, 7), m.Window(None, 7), m.Prefix(9), m.Prefix(8)])
def test_a_mask_that_keeps_everything_is_none(mask: m.Mask) -> None:
    assert canonical_mask(mask, 8, 8) is None
    assert canonical_mask(~mask, 8, 8) is not None


@pytest.mark.parametrize("mask", [m.Window(6, 7), m.Window(7, 6), m.Prefix(7), m.Causal(), A])
def test_a_mask_that_keeps_nearly_everything_is_not(mask: m.Mask) -> None:
    assert canonical_mask(mask, 8, 8) is not None


@pytest.mark.parametrize("band", [m.Band(None, -8), m.Band(None, -99), m.Band(8, 9), m.Band(99)])
def test_a_band_beyond_every_place_keeps_nothing_in_one_form(band: m.Band) -> None:
    form = canonical_mask(band, 8, 8)
    assert form is not None
    assert not form.keep(Place.of(Block(range(1), range(1), range(8), 1, 8, 8), range(8))).any()


@many
@given(
    st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.integers(1, 6),
    st.integers(1, 6),
)  # fmt: skip
def test_a_trimmed_band_hides_a_place_by_each_bound_and_is_trimmed_no_more(
    low: int | None, high: int | None, M: int, N: int
) -> None:
    gaps = torch.arange(N) - torch.arange(M)[:, None]
    kept = torch.ones(M, N, dtype=torch.bool)
    kept &= gaps >= (-M if low is None else low)
    kept &= gaps <= (N if high is None else high)
    trimmed = canonical_mask(m.Band(low, high), M, N)
    assert (trimmed is None) == bool(kept.all())
    if trimmed is not None:
        assert isinstance(trimmed, m.Band)
        assert trimmed.low is None or bool((gaps < trimmed.low).any())
        assert trimmed.high is None or bool((gaps > trimmed.high).any())
        again = m.Band(trimmed.low, trimmed.high)
        assert canonical_mask.__wrapped__(again, M, N) is again


def test_bottom_right_lets_the_last_query_meet_the_last_key() -> None:
    assert canonical_mask(m.Causal("bottom_right"), 3, 8) == m.Band(None, 5)
    assert canonical_mask(m.Causal("top_left"), 3, 8) == m.Band(None, 0)
    assert canonical_mask(m.Causal("bottom_right"), 8, 3) == m.Band(None, -5)


def test_lengths_in_the_mask_move_its_diagonal() -> None:
    mask = canonical_mask(m.Causal("bottom_right") & m.KeyLengths(), 4, 8)
    assert mask == m.Band(None, 0, ("kv_lengths",)) & m.KeyLengths()
    data = {"kv_lengths": torch.tensor([3, 8])}
    kept = mask_formula.evaluate_place_by_place(
        m.Band(None, 0, ("kv_lengths",)) & m.KeyLengths(), (2, 1, 4, 8), data
    )
    assert kept[0, 0].sum(-1).tolist() == [0, 1, 2, 3]
    assert kept[1, 0].sum(-1).tolist() == [5, 6, 7, 8]


def test_bounds_that_say_the_same_are_the_same() -> None:
    assert m.Window(4.0) == m.Window(4)
    assert str(m.Window(4.0, 1.0)) == "Window(left=4, right=1)"
    with pytest.raises(ag.GraphError, match=r"2\.5"):
        m.Window(2.5)
    with pytest.raises(ag.GraphError, match="inf"):
        m.Prefix(float("inf"))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("M", "N"), [*product([1, 3, 5], [1, 4])])
def test_a_graphs_alignment_holds_for_leaves_that_say_nothing(
    M: int, N: int, align: m.Align
) -> None:
    said = m.Causal("top_left") & m.Window(2) | ~m.Causal()
    left = m.Causal("top_left") & m.Window(2, 0, align) | ~m.Causal(align)
    assert said.aligned(align) == left
    assert canonical_mask(said.aligned(align), M, N) == canonical_mask(left, M, N)
