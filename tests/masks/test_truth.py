"""What describes a computation is neither true nor false: `and`, `or` and `not` raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.testing import strategies

SHAPE = strategies.Shape(B=2, H=4, G=2, M=6, N=8, D=8, E=8)
X = ag.TensorSpec((1, 2, 6, 8), torch.float32)
TESTS: tuple[Callable[[object, object], object], ...] = (
    lambda a, b: a and b,
    lambda a, b: a or b,
    lambda a, _: not a,
    lambda a, _: bool(a),
    lambda a, b: a if a else b,
)


def refusal_of(test: Callable[[object, object], object], a: object) -> str:
    """What the error says."""
    with pytest.raises(ag.GraphError) as error:
        test(a, a)
    return str(error.value)


@given(strategies.masks(SHAPE), st.sampled_from(TESTS))
def test_masks_are_joined_by_operators_alone(
    mask: ag.Mask, test: Callable[[object, object], object]
) -> None:
    assert "join masks with &, | and ~" in refusal_of(test, mask)
    assert mask & mask is not None
    assert mask in (mask, None)


@given(strategies.modifiers(SHAPE), st.sampled_from(TESTS))
def test_modifiers_are_applied_one_after_another(
    modifier: ag.Modifier, test: Callable[[object, object], object]
) -> None:
    assert "one after another" in refusal_of(test, modifier)


@pytest.mark.parametrize("test", TESTS)
def test_formulas_addends_and_values_have_no_truth(
    test: Callable[[object, object], object],
) -> None:
    assert "join masks with" in refusal_of(test, ag.Formula("i >= j"))
    assert "one after another" in refusal_of(test, ag.Addend("real(i - j)"))

    def attend(q: ag.Value) -> ag.Value:
        assert "compare with None" in refusal_of(test, q)
        return ag.scores(q, q)

    ag.graph(attend, q=X)


def test_parts_that_read_one_tensor_in_two_ways_are_refused() -> None:
    """The second way would be taken for both."""
    x, flags = ag.TensorSpec((1, 1, 4, 8), torch.float32), ag.TensorSpec((1, 1, 4, 4), torch.bool)
    mask = ag.Formula("keep <= 3", (("keep", "bhij"),)) & ag.Keep()
    with pytest.raises(ag.GraphError, match=r"read keep in two ways.*a name of its own"):
        ag.attention(x, x, x, mask=mask, keep=flags)
    with pytest.raises(ag.GraphError, match=r"read keep in two ways.*a name of its own"):
        ag.tiles(mask, 4, 4, data={"keep": torch.ones(1, 1, 4, 4, dtype=torch.bool)})
    ag.attention(x, x, x, mask=ag.Keep("one") | ag.Keep("other"), one=flags, other=flags)
