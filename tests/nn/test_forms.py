"""The function form gives what the plan does, for every named input, layout and way to call it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forms import (
    COMPILED,
    FURTHER,
    LAYOUTS,
    PARTS,
    Case,
    check_call,
    has_masks,
    ways_for,
)
from tests.support.tracing import traces

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta|prototype|PyTorch API of nested|is_fx_tracing|The .grad attribute of a Tensor)"
)
PRODUCT = [
    (layout, part, joined)
    for layout in LAYOUTS
    for part in PARTS
    for joined in ((True, False) if has_masks(part) else (True,))
]
MORE = st.lists(st.sampled_from(FURTHER), unique=True)
SEVERAL = st.lists(st.sampled_from([*PARTS]), min_size=1, max_size=3, unique=True)


@given(st.sampled_from([*LAYOUTS]), st.data(), st.booleans())
def test_every_way_to_call_gives_what_the_plan_does(
    layout: str, data: st.DataObject, joined: bool
) -> None:
    case = Case.of(layout, data.draw(SEVERAL), joined, data.draw(MORE))
    quick = [way for way in ways_for(case) if way not in COMPILED]
    for way in data.draw(st.lists(st.sampled_from(quick), min_size=1, max_size=3, unique=True)):
        check_call(case, way)


@traces
@settings(settings.get_profile("few"))
@given(st.sampled_from([*LAYOUTS]), st.data(), st.booleans())
def test_compiled_and_exported_code_gives_what_the_plan_does(
    layout: str, data: st.DataObject, joined: bool
) -> None:
    case = Case.of(layout, data.draw(SEVERAL), joined, data.draw(MORE))
    check_call(case, data.draw(st.sampled_from([way for way in ways_for(case) if way in COMPILED])))


@traces
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "part", "joined"), PRODUCT)
def test_each_named_input_alone_by_every_way(
    layout: str, part: tuple[str, ...], joined: bool
) -> None:
    case = Case.of(layout, [part], joined)
    for way in ways_for(case):
        check_call(case, way)


@traces
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("further", FURTHER)
def test_values_within_keys_and_layouts_of_outputs_alone_by_every_way(
    layout: str, further: str
) -> None:
    case = Case.of(layout, [()], True, [further])
    for way in ways_for(case):
        check_call(case, way)
