"""Every small operand lies anyhow: views give what dense tensors do, in every form and way.

Small operands are all tensors that a graph reads beside q, k and v: lengths, starts, tables of
pages, biases, slopes, sinks, segments, seeds, scales, and the data of masks and modifiers. Run with
TRITON_INTERPRET=1, Triton's kernels read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.testing.rule import allowance, distance
from tests.support.forms import (
    COMPILED,
    LAYOUTS,
    PARTS,
    WAYS,
    Case,
    Sizes,
    Way,
    gradients,
    values,
    ways_for,
)
from tests.support.tracing import traces

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta|prototype|PyTorch API of nested|is_fx_tracing|The .grad attribute of a Tensor)"
)
CPU = ag.Target.of("cpu")
EXPANDED = ("0", "1", "01", "2", "012", "0123")  # along these axes
HOW = ("", "gaps", "offset", "reversed", *EXPANDED)
LARGE = (
    Sizes(1, 40, 2, 8, 8, 8),
    Sizes(64, 130, 100, 16, 16, 16),
    Sizes(150, 200, 280, 32, 64, 32),
)
LOW = (torch.float32, torch.bfloat16, torch.float16)
OWN_PLANS: dict[str, tuple[Way, Way]] = {  # of tensors that lie so
    "planned": (lambda _, case: values(case.attend_by_plan(lying=True), case), values),
    "planned gradients": (
        lambda _, case: gradients(case.attend_by_plan(lying=True), case),
        gradients,
    ),
}
EVERY = {**WAYS, **OWN_PLANS}
PLAIN = ("called", "recorded", *OWN_PLANS)
some = settings(max_examples=max(1, settings().max_examples // 2))  # each is larger
compiles = pytest.mark.skipif(CPU.interprets, reason="what CPUs compute")
interpreted = pytest.mark.skipif(not CPU.interprets, reason="needs TRITON_INTERPRET=1")


def ways_of(case: Case, among: Sequence[str]) -> list[str]:
    trains = bool(case.trained(case.draw(0)))
    own = ["planned", *["planned gradients"] * trains]
    return [way for way in (*ways_for(case), *own) if way in among]


@st.composite
def cases(draw: DrawFn, sizes: Sequence[Sizes], dtypes: Sequence[torch.dtype]) -> Case:
    """A call, whose small operands lie anyhow; starts, which differ, are never expanded."""
    layout, several = draw(st.sampled_from([*LAYOUTS])), st.sampled_from([*PARTS])
    parts = draw(st.lists(several, min_size=1, max_size=3, unique=True))
    case = Case.of(layout, parts, draw(st.booleans()), sizes=draw(st.sampled_from(sizes)))
    lies = {n: draw(st.sampled_from(HOW[:4] if n.endswith("starts") else HOW)) for n in case.names}
    return evolve(case, dtype=draw(st.sampled_from(dtypes)), lies=lies)


def check_lying(case: Case, way: str) -> None:
    """Assert that views give what dense copies of them do: in low precision within the accuracy
    rule, for which the copies are `low`."""
    run, run_plan = EVERY[way]
    same = evolve(case, lies={n: how for n, how in case.lies.items() if how in EXPANDED})
    made, due = run(case.attend, case), run_plan(same.attend_by_plan(), same)
    if case.dtype == torch.float64:
        torch.testing.assert_close(made, due)
        return
    options = {n: x for n, x in same.options.items() if n != "backends"}
    wide = evolve(same, dtype=torch.float64, options=options)
    for x, y, ref in zip(made, due, run_plan(wide.attend_by_plan(), wide), strict=True):
        most = allowance(ref, y, x.dtype, gradient=run_plan is not values)
        assert distance(x, ref) <= most, f"{way}\n{x}\nis not\n{ref}"


@compiles
@given(cases((Sizes(),), (torch.float64,)), st.data())
def test_views_give_what_dense_operands_do_in_every_form(case: Case, data: st.DataObject) -> None:
    quick = [way for way in ways_of(case, [*EVERY]) if way not in COMPILED]
    for way in data.draw(st.lists(st.sampled_from(quick), min_size=1, max_size=3, unique=True)):
        check_lying(case, way)


@compiles
@some
@given(cases(LARGE, (torch.float64, *LOW)), st.data())
def test_views_give_what_dense_operands_do_in_every_way_of_cpus(
    case: Case, data: st.DataObject
) -> None:
    check_lying(case, data.draw(st.sampled_from(ways_of(case, PLAIN))))


@compiles
@traces
@settings(settings.get_profile("few"))
@given(cases((Sizes(),), (torch.float64,)), st.data())
def test_compiled_and_exported_code_reads_views(case: Case, data: st.DataObject) -> None:
    """PyTorch itself, compiled, loses nested tensors whose offsets are no dense tensor."""
    if case.is_jagged:
        case = evolve(case, lies=case.lies | dict.fromkeys(LAYOUTS[case.layout], ""))
    check_lying(case, data.draw(st.sampled_from(ways_of(case, COMPILED))))


@interpreted
@settings(max_examples=max(1, settings().max_examples // 4))
@given(cases((Sizes(),), LOW), st.data())
def test_kernels_read_views(case: Case, data: st.DataObject) -> None:
    way = data.draw(st.sampled_from(ways_of(case, PLAIN)))
    try:
        check_lying(evolve(case, options={**case.options, "backends": ("triton",)}), way)
    except ag.NoBackendError:
        assert "gradients" in way or way == "recorded"  # that of what a modifier reads, say
        reject()


@compiles
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", PARTS)
def test_views_with_the_negative_bit_are_numbers_too(part: tuple[str, ...], layout: str) -> None:
    """In every form. Plans name the view, and the copy to pass."""
    case = Case.of(layout, [part], joined=True)
    named = case.draw(0)
    own = {n: "negative" for n in part if named[n].is_floating_point()}
    negative = evolve(case, lies=own)
    for way in (way for way in ways_for(case) if own and way not in COMPILED):
        run, run_plan = WAYS[way]
        made, due = run(negative.attend, negative), run_plan(case.attend_by_plan(), case)
        torch.testing.assert_close(made, due)
    if own:
        with pytest.raises(ag.PlanMismatchError, match=f"pass {min(own)}.resolve_neg"):
            case.attend_by_plan(lying=True)(negative.draw(0))
