"""A comparison of positions has one form, whoever writes it: as a band, as text, or as `keep`."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.extend import Block, Place
from attn_graph.ir.passes import simplify
from attn_graph.masks.canonical import canonical_mask, is_ours


@final
@frozen
class Own(ag.Mask):
    """A mask of a user's."""

    text: str

    def keep(self, at: Place) -> Any:  # Any: as `Mask.keep`
        names = {"b": at.b, "h": at.h, "i": at.i, "j": at.j, "M": at.M, "N": at.N}
        return eval(self.text, {"abs": abs}, names)


integers: SearchStrategy[str] = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["i", "j", "j - i", "i - j"]),
        st.integers(-9, 9).map("({})".format),
        st.builds("({} {} {})".format, integers, st.sampled_from("+-"), integers),
        st.builds("({} * {})".format, integers, st.integers(-2, 2)),
        st.builds("({} {} {})".format, integers, st.sampled_from(["//", "%"]), st.integers(1, 3)),
        st.builds("(-{})".format, integers),
        st.builds("abs({})".format, integers),
    )
)
comparisons = st.builds(
    "{} {} {}".format, integers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), integers
)
joins: SearchStrategy[str] = st.deferred(
    lambda: st.one_of(
        comparisons.map("({})".format),
        st.builds("({} {} {})".format, joins, st.sampled_from("&|^"), joins),
        st.builds("({} == {})".format, joins, joins),
        joins.map("(~{})".format),
    )
)


def kept(mask: m.Mask | None, M: int, N: int) -> torch.Tensor:
    place = Place.of(Block.whole((1, 1, M, N)), range(N))
    keep = True if mask is None else mask.keep(place)
    return torch.as_tensor(keep, dtype=torch.bool).expand(1, 1, M, N)


@given(comparisons, st.sampled_from([(6, 9), (9, 6), (1, 7)]))
def test_a_formula_keeps_in_one_form_what_it_says(text: str, sizes: tuple[int, int]) -> None:
    mask = ag.Formula(text)
    assert torch.equal(kept(canonical_mask(mask, *sizes), *sizes), kept(mask, *sizes))


@given(joins, st.sampled_from([(6, 9), (9, 6), (1, 7)]))
def test_a_mask_of_ones_own_keeps_in_one_form_what_it_says(
    text: str, sizes: tuple[int, int]
) -> None:
    mask = Own(text)
    assert torch.equal(kept(canonical_mask(mask, *sizes), *sizes), kept(mask, *sizes))


FORMS = {  # what users write, and the equal mask
    "j <= i": ag.Causal(),
    "i - 4 <= j": ag.Window(4, None),
    "abs(i - j) < 3": ag.Window(2, 2),
    "2 >= abs(j - i)": ag.Window(2, 2),
    "-j > -4": ag.Prefix(4),
    "2 * j - j - 3 < 1": ag.Prefix(4),
    "i == j": ag.Window(0, 0),
    "i != j": ~ag.Window(0, 0),
}


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("kind", [ag.Formula, Own])
def test_a_graph_under_a_comparison_of_positions_is_the_one_under_a_band(
    text: str, kind: type[m.Mask]
) -> None:
    """So each backend that supports the band supports the comparison, and both share a plan."""
    x = ag.TensorSpec((1, 2, 16, 8), torch.float32)
    own, due = (simplify(ag.attention(x, x, x, mask=mask)) for mask in (kind(text), FORMS[text]))
    assert own == due


def test_a_join_within_keep_is_a_join_of_bands() -> None:
    mask = Own("(i - 4 <= j) & (j <= i) | (j < N - 6)")
    window = ag.Causal("top_left") & ag.Window(4, align="top_left")
    assert canonical_mask(mask, 9, 9) == canonical_mask(window | ag.Prefix(3), 9, 9)


@pytest.mark.parametrize(
    "text",
    ["(j <= i) | (h == 0)", "i + j < 9", "(i - j < 3) == (j < 3)", "j % 2 == 0", "j < N / 2"],
)
def test_other_masks_of_ones_own_stay_what_they_are(text: str) -> None:
    assert canonical_mask(Own(text), 9, 9) == Own(text)
    assert not is_ours(Own(text))
