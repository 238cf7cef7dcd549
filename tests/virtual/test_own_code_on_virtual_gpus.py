"""Masks and modifiers of one's own: the code that Triton makes of them, on a virtual GPU."""

from __future__ import annotations

import pytest

from attn_graph import testing
from tests.test_examples import example


@pytest.mark.slow
def test_a_modifier_of_ones_own_is_compiled_and_executed() -> None:
    testing.check_modifier(example("own_modifier").Fade(3), gpu="a100")


@pytest.mark.slow
def test_a_mask_of_ones_own_is_compiled_and_executed() -> None:
    testing.check_mask(example("own_mask").Blocks(3), gpu="b200")
