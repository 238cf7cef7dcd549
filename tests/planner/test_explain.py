"""What is told before anything runs: true, complete, and with ways out that work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.extend import Backend, Executable, Reason, RefusedError
from attn_graph.instruments.explain import explain_graph
from attn_graph.instruments.explanation import Explanation
from attn_graph.instruments.remedies import Question, Remedy, kinds_for
from attn_graph.ir.passes import simplify
from attn_graph.lowering.request import Options, Request
from attn_graph.machine.target import Target
from attn_graph.plan.extras.explained import write_steps
from attn_graph.planner.choose import BACKENDS
from attn_graph.planner.forms.recorded import RUNS_KEPT
from attn_graph.testing.strategies import graphs, shapes
from tests.support.cudnn_graphs import cudnn_graphs
from tests.support.equipped import equip
from tests.support.html import Reader
from tests.support.reasons import skeleton

CPU = Target.of("cpu")
TARGETS = [
    evolve(equip("cpu"), native=(), interprets=False),
    *map(equip, ("a100", "h200", "b200")),
]
HALF, FLOAT = torch.bfloat16, torch.float32
X = ag.TensorSpec((2, 8, 512, 64), HALF)
READS: dict[str, Callable[[Question], ag.Graph]] = {
    "forward": Question.forward,
    "backward": Question.backward,
    "through lse": Question.backward,
}
BUILDS = "cudnn"  # a plan of its takes half a second: tests/lowering/test_cudnn_grid.py asks it


def sides(found: Explanation) -> Iterator[tuple[str, Explanation]]:
    yield "forward", found
    if found.backward:
        yield "backward", found.backward
    if found.through_lse:
        yield "through lse", found.through_lse


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
@given(
    graph=st.one_of(graphs(shapes(most=40, heads=8)), cudnn_graphs()),
    deterministic=st.booleans(),
    most=st.sampled_from([None, 0, 2**16]),
    avoid=st.sampled_from([(), ("triton",), ("cudnn", "math")]),
)
@settings(max_examples=3 * settings().max_examples)
def test_refusals_have_reasons_takers_lower_and_ways_out_work(
    target: Target, graph: ag.Graph, deterministic: bool, most: int | None, avoid: tuple[str, ...]
) -> None:
    options = Options(deterministic, most, avoid=avoid)
    found = explain_graph(Request(graph, target, options))
    by_name = {backend.name: backend for backend in BACKENDS}
    for pass_, side in sides(found):
        question = evolve(
            Question.of(Request(graph, target, options)), through_lse=pass_ == "through lse"
        )
        takers = [*([side.backend] if side.backend else []), *side.also]
        kept = pass_ != "forward" and any("keeps the weights" in note for note in found.notes)
        asked = {*RUNS_KEPT} if kept else by_name.keys()
        assert {*takers, *(r.backend for r in side.refusals)} == asked
        for name in takers:
            if name != BUILDS:
                by_name[name].lower(Request(READS[pass_](question), target, options))
        for each in side.refusals:
            assert each.reasons
            backend = by_name[each.backend]

            def asks(
                other: Question, backend: Backend = backend, p: str = pass_
            ) -> tuple[Reason, ...]:
                return backend.reasons(Request(READS[p](other), target, other.request.options))

            assert asks(question) == each.reasons
            by_remedy = {edit.remedy: edit.make for edit in question.edits}
            for reason, remedies in zip(each.reasons, each.lifts, strict=True):
                for remedy in remedies:
                    changed = by_remedy[remedy]()
                    assert changed is not None
                    assert reason.key not in {x.key for x in asks(changed)}
                    assert skeleton(reason) not in map(skeleton, asks(changed))
            if each.smallest:
                assert not asks(each.smallest.question)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@given(graph=st.one_of(graphs(shapes(most=40, heads=8)), cudnn_graphs()))
@settings(settings.get_profile("few"))
def test_a_graph_written_in_single_steps_is_the_same_graph(target: Target, graph: ag.Graph) -> None:
    """So a plan, which knows no other, offers the same changes as `explain` of the graph."""
    simple = simplify(graph)
    written = write_steps(simple)
    assert simplify(written) == simple
    request = Request(graph, target, Options())
    known, alike = (explain_graph(request.with_graph(g)) for g in (graph, written))
    fixes = [
        [(each.backend, each.lifts, each.way_out) for _, side in sides(x) for each in side.refusals]
        for x in (known, alike)
    ]
    assert fixes[0] == fixes[1]
    assert str(known) == str(alike)


STEPS = ("modifier", "mask", "dropout", "sinks", "statistics")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
@given(graph=st.one_of(graphs(shapes(most=40, heads=8)), cudnn_graphs()))
def test_a_reason_names_every_step_that_lifts_it(target: Target, graph: ag.Graph) -> None:
    """So no other step is tried for it."""
    for _, side in sides(explain_graph(Request(graph, target, Options()))):
        for search in (each.search for each in side.refusals if each.search):
            for edit in search.question.offer(STEPS):
                left = {x.key for x in search.asks(edit.after)} if edit.after else None
                gone = [x for x in search.reasons if left is not None and x.key not in left]
                assert all(edit.kind in kinds_for(reason) for reason in gone), (edit, gone)


def test_a_plan_explains_its_refusals_with_every_fix() -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal() & ag.Window(9), soft_cap=9.0, stats=True)
    lifts = [
        [(each.backend, each.lifts, each.way_out) for _, side in sides(x) for each in side.refusals]
        for x in (ag.explain(graph, target="cpu"), ag.compile(graph, target="cpu").explain())
    ]
    assert any(remedies for _, each, _ in lifts[1] for remedies in each)
    assert lifts[0] == lifts[1]


def test_segments_may_be_packed_and_pools_have_their_heads_in_the_third_axis() -> None:
    each = ag.TensorSpec((2, 512), torch.int32)
    segments = each, each
    graph = ag.attention(X, X, X, mask=ag.Causal(), segments=segments, stats=True)
    for name in ("cudnn", "torch_flash"):
        found = ag.explain(graph, target=TARGETS[2], backends=(name,), gradients=())
        (refusal,) = found.refusals
        assert str(refusal.smallest).startswith("pack the segments with q_starts=")
        assert refusal.smallest is not None
        assert not refusal.smallest.changes_result
        packed = ag.explain(refusal.smallest.graph, target=TARGETS[2])
        assert name in (packed.backend, *packed.also)
    pool, pages = ag.TensorSpec((9, 24, 8, 64), HALF), ag.TensorSpec((2, 3), torch.int32)
    graph = ag.attention(ag.TensorSpec((2, 8, 1, 64), HALF), pool, pool, pages=pages)
    (refusal,) = ag.explain(graph, target=TARGETS[2], backends=("cudnn",), gradients=()).refusals
    assert not any("repeat" in fix for fix in refusal.fixes)


def test_what_only_lowering_shows_has_no_fix() -> None:
    def lower(request: Request) -> Executable:
        raise RefusedError("needs what shows late, and there is none")

    late = Backend("late", lambda *asked: (), lower)
    found = ag.explain(CHANGES["drop dropout"], target=CPU, backends=(late, "math"))
    (refusal,) = found.refusals
    assert (refusal.lifts, refusal.smallest) == (((),), None)


def test_nothing_is_raised_where_all_refuse() -> None:
    graph = ag.attention(X, X, X, dropout=0.1)
    found = ag.explain(graph, target=TARGETS[2], backends=("cudnn",))
    assert found.backend is None
    assert str(found).startswith("no backend can run this on ")
    (refusal,) = found.refusals
    assert str(refusal.smallest) == "drop dropout"


def test_the_smallest_change_is_a_graph_that_can_be_compiled() -> None:
    x = ag.TensorSpec((2, 4, 100, 20), FLOAT)
    graph = ag.attention(x, x, x, mask=ag.Causal(), dropout=0.1)
    (refusal,) = ag.explain(graph, target=TARGETS[2], backends=("cudnn",)).refusals
    assert refusal.smallest is not None
    assert {*refusal.smallest.texts} == {
        "cast q, k and v to bf16",
        "pad head sizes with zeros to D = 24, E = 24 (o then has 4 more columns)",
        "drop dropout",
    }
    changed = refusal.smallest.graph
    assert [i.name for i in changed.inputs] == ["q", "k", "v"]
    assert ag.explain(changed, target=TARGETS[2]).backend == "cudnn"


CHANGES = {
    "make k dense": ag.attention(X, ag.TensorSpec(X.shape, HALF, (2**19, 2**16, 128, 2)), X),
    "do not differentiate lse": ag.attention(X, X, X, stats=True),
    "do not differentiate bias": ag.attention(X, X, X, bias=ag.TensorSpec((1, 8, 512, 512), FLOAT)),
    "cast bias to bf16": ag.attention(X, X, X, bias=ag.TensorSpec((1, 8, 512, 512), FLOAT)),
    "cast q, k and v to bf16": ag.attention(*(ag.TensorSpec(X.shape, FLOAT),) * 3),
    "drop Alibi": ag.attention(X, X, X, alibi=True),
    "drop the mask": ag.attention(X, X, X, mask=ag.Prefix(3)),
    "drop dropout": ag.attention(X, X, X, dropout=0.5),
}


def test_inference_has_one_pass() -> None:
    graph = ag.attention(X, X, X, stats=True)
    found = ag.explain(graph, target=TARGETS[2], gradients=())
    assert found.backward is None
    assert found.cost is not None
    assert found.cost.backward is None
    assert found.memory is not None
    assert found.memory.gradients == found.memory.workspace_backward == 0
    assert "backward" not in str(found.cost)
    with pytest.raises(ag.GraphError, match="no floating input is named w; there are q, k, v"):
        ag.explain(graph, gradients=("w",))


@pytest.mark.parametrize("sizes", [(1, 1, 10**7, 64), (999, 9999, 99999999, 64)])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_any_size_is_explained_exactly(target: Target, sizes: tuple[int, ...]) -> None:
    B, H, M, _ = sizes
    x = ag.TensorSpec(sizes, HALF)
    found = ag.explain(ag.attention(x, x, x, mask=ag.Causal()), target=target)
    assert found.cost is not None
    assert found.cost.pairs == B * H * M * (M + 1) // 2
    (tiles,) = found.tiles
    assert (tiles.mixed, tiles.exact) == (B * H * -(-M // 128), True)
    assert found.memory is not None
    assert found.memory.outputs == 2 * B * H * M * sizes[3]


def test_heads_that_are_not_grouped_are_a_way_out() -> None:
    few = ag.TensorSpec((2, 2, 512, 64), HALF)
    graph = ag.attention(X, few, few)
    (refusal,) = ag.explain(graph, target=TARGETS[2], backends=("torch_cudnn",)).refusals
    assert str(refusal.smallest) == "repeat k and v for all 8 heads"


@pytest.mark.parametrize("text", CHANGES)
def test_each_kind_of_change_is_named_where_it_helps(text: str) -> None:
    found = ag.explain(CHANGES[text], target=TARGETS[2], backends=("cudnn",))
    lifts = [x for _, side in sides(found) for r in side.refusals for x in r.lifts]
    assert any(text in map(str, remedies) for remedies in lifts)


def test_an_explanation_says_the_same_in_every_form(golden: Callable[[object], None]) -> None:
    graph = ag.attention(X, X, X, mask=ag.Causal() & ag.Window(63), soft_cap=30.0, stats=True)
    found = ag.explain(graph, target=TARGETS[2])
    golden(found)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["backend"] == found.backend
    assert [r["backend"] for r in told["refusals"]] == [r.backend for r in found.refusals]
    assert told["memory"]["peak"] == found.memory.peak if found.memory else False
    assert told["backward"]["backend"] == "triton"
    assert told["through_lse"]["backend"] == "triton"
    read = Reader(found._repr_html_())
    assert not read.open
    for part in (found.cause, *(x for r in found.refusals for x in map(str, r.told[1]))):
        assert part in read.text
    assert "(would run without SoftCap, which changes the result)" in read.text
    assert "backward, if lse gets a gradient" in read.text
    nobody = ag.explain(graph, target=TARGETS[2], backends=("cudnn",))._repr_html_()
    assert "no backend can run this on " in nobody


def test_a_plan_explains_itself_as_the_library_does() -> None:
    """But for what only a lowered plan knows."""
    graph = ag.attention(*(ag.TensorSpec((1, 2, 64, 16), FLOAT),) * 3, mask=ag.Window(3))
    plan, found = ag.compile(graph, target=CPU).explain(), ag.explain(graph, target=CPU)
    assert (plan.backend, plan.cause, plan.memory, plan.cost, plan.tiles) == (
        found.backend, found.cause, found.memory, found.cost, found.tiles,
    )  # fmt: skip
    assert [r.reasons for r in plan.refusals] == [r.reasons for r in found.refusals]


STATS = ag.attention(X, X, X, mask=ag.Causal(), stats=True)


def test_the_backward_by_o_comes_first_and_the_one_through_lse_beside_it() -> None:
    """What a step that uses o alone runs: lse is only handed out."""
    found = ag.explain(STATS, target=TARGETS[2])
    alone = ag.explain(ag.attention(X, X, X, mask=ag.Causal()), target=TARGETS[2])
    assert found.backward is not None
    assert found.through_lse is not None
    assert alone.backward is not None
    assert (found.backward.backend, found.through_lse.backend) == ("cudnn", "triton")
    assert found.backward.graph == alone.backward.graph
    assert found.memory is not None
    assert found.through_lse.memory is not None
    assert found.memory.workspace_backward > found.through_lse.memory.workspace_backward == 2**15
    told = str(found)
    assert told.index("\nbackward: cudnn runs this") < told.index(
        "\nbackward, if lse gets a gradient: triton runs this"
    )
    assert f"\nmemory, if lse gets a gradient: {found.through_lse.memory}\n" in told
    html = found._repr_html_()
    assert html.index("<h4>backward</h4>") < html.index("<h4>backward, if lse gets a gradient</h4>")
    assert found.to_dict()["memory"]["workspace_backward"] == found.memory.workspace_backward
    assert found.to_dict()["through_lse"]["memory"]["workspace_backward"] == 2**15


def test_refusals_are_told_once_where_lse_changes_nothing() -> None:
    found = ag.explain(STATS, target=TARGETS[2], backends=("math", "torch_sdpa"))
    ((refusal,), (other,)) = (x.refusals for _, x in [*sides(found)][1:])
    assert refusal.reasons == other.reasons
    ahead, _, told = str(found).partition("\nbackward, if lse gets a gradient: ")
    assert ahead.count(f"{refusal.backend} can't: ") == 1
    assert told.startswith("math runs this on ")
    assert "the only backend allowed that supports the graph\n" in told
    assert str(refusal.reasons[0]) not in told
    assert str(refusal.reasons[0]) not in found._repr_html_().partition("if lse gets")[2]


def test_lse_alone_has_its_gradient() -> None:
    def logsumexp(q: ag.Value, k: ag.Value) -> ag.Value:
        return ag.scores(q, k).softmax()[1]

    found = ag.explain(ag.graph(logsumexp, q=X, k=X), target=TARGETS[2])
    assert found.through_lse is None
    assert found.backward is not None
    assert [i.name for i in found.backward.graph.inputs if i.name.startswith("d")] == ["dlse"]


def test_a_plan_tells_of_the_backward_by_o_alone() -> None:
    x = ag.TensorSpec((1, 2, 64, 16), FLOAT)
    graph, plain = (ag.attention(x, x, x, stats=stats) for stats in (True, False))
    some = ag.compile(graph, target=CPU, backends=("torch_sdpa", "math"), workspace=ag.Workspace())
    other = ag.compile(plain, target=CPU, backends=("torch_sdpa", "math"))
    found, due = some.explain(), other.explain()
    assert some.memory().workspace_backward == other.memory().workspace_backward
    assert found.backward is not None
    assert due.backward is not None
    assert found.backward.graph == due.backward.graph
    assert found.through_lse is not None
    assert found.through_lse.graph == some.vjp.graph
    assert due.through_lse is None


def test_a_gradient_through_lse_that_nobody_takes_is_no_error() -> None:
    takes = Backend("takes", refuses_lse, lambda *given: Executable(lambda *_: ((), ())))
    plan = ag.compile(STATS, target=CPU, backends=(takes,))
    found = plan.explain()
    assert found.backward is not None
    assert found.backward.backend == "takes"
    assert found.through_lse is not None
    assert found.through_lse.backend is None
    assert [r.reasons for r in found.through_lse.refusals] == [(NO_LSE,)]
    assert plan.memory() == found.memory


NO_LSE = Reason.of("has no gradient of lse")


def refuses_lse(graph: ag.Graph, target: Target, options: Options) -> Iterator[str]:
    if any(i.name == "dlse" for i in graph.inputs):
        yield "has no gradient of lse"


def test_who_runs_nothing_needs_no_workspace() -> None:
    graph = ag.attention(X, X, X, dropout=0.1)
    found = ag.explain(graph, target=TARGETS[2], backends=("cudnn",))
    assert found.memory is None
    assert "memory" not in str(found)
    assert "workspace" not in str(found)


def test_explaining_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_graph.lowering.cudnn.plan.load_or_build", None)
    found = ag.explain(ag.attention(X, X, X), target=TARGETS[2])
    assert found.backend == "cudnn"
    assert found.memory is not None
    assert found.memory.untold == ("forward",)
    assert "workspace forward known after compile()" in str(found)


def test_a_change_is_no_way_out_if_the_same_limit_refuses_then() -> None:
    """ALiBi needs a causal mask: without any it is refused as well."""
    graph = ag.attention(X, X, X, alibi=True, mask=ag.Window(8, 8))
    (refusal,) = ag.explain(graph, target=TARGETS[2], backends=("cudnn",), gradients=()).refusals
    assert refusal.lifts == ((Remedy("drop Alibi", instead="without Alibi"),),)


def test_a_fix_is_one_change_for_each_reason_that_is_given() -> None:
    """That lse must stay undifferentiated shows only once the bias is gone: no fix is complete."""
    graph = ag.attention(X, X, X, bias=ag.TensorSpec((1, 8, 512, 512), HALF), stats=True)
    found = ag.explain(graph, target=TARGETS[2], backends=("torch_cudnn",))
    assert found.through_lse is not None
    (refusal,) = found.through_lse.refusals
    assert all(refusal.lifts)
    assert refusal.smallest is None


def test_an_unbuilt_plan_may_turn_out_too_large() -> None:
    found = ag.explain(ag.attention(X, X, X), target=TARGETS[2], max_workspace=0)
    assert found.notes == (
        "its built plan may need more workspace than max_workspace allows: then torch_cudnn runs "
        "it",
    )


def test_a_backend_that_refuses_only_when_it_lowers_is_explained() -> None:
    def lower(graph: ag.Graph, target: Target, options: Options) -> Executable:
        raise RefusedError("needs what shows late, and there is none")

    late = Backend("late", lambda *asked: (), lower)
    found = ag.explain(CHANGES["drop dropout"], target=CPU, backends=(late, "math"))
    assert found.backend == "math"
    late_reason = Reason.of("needs what shows late, and there is none")
    assert [r.reasons for r in found.refusals] == [(late_reason,)]


def test_costs_are_of_the_wanted_gradients_and_of_the_precision() -> None:
    graph = ag.attention(*(ag.TensorSpec(X.shape, FLOAT),) * 3)
    whole = ag.explain(graph, target=TARGETS[2], precision="ieee").cost
    part = ag.explain(graph, target=TARGETS[2], gradients=("q",), precision="tf32").cost
    assert whole is not None
    assert part is not None
    assert whole.backward is not None
    assert part.backward is not None
    assert part.backward.flops < whole.backward.flops
    assert part.forward.flops == whole.forward.flops
    assert (part.forward.compute_seconds or 1) < (whole.forward.compute_seconds or 0)


def test_equal_launches_are_one_line_with_their_count() -> None:
    q, pool = (ag.TensorSpec(x, torch.bfloat16) for x in ((4, 8, 1, 128), (32, 16, 2, 128)))
    graph = ag.attention(
        q, pool, pool, pages=ag.TensorSpec((4, 8), torch.int32),
        kv_lengths=ag.TensorSpec((4,), torch.int32),
    )  # fmt: skip
    notes = ag.explain(graph, target="h200", backends=("triton",)).gradients["backward"].notes
    assert len({*notes}) == len(notes)
    assert any(note.startswith("sum_pages: ") and note.endswith(", 2 times") for note in notes)
