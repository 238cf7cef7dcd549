"""Reasons as values: their keys, and the remedies that a change of result sets apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, final

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.instruments.explanation import Refusal, format_lifts
from attn_graph.instruments.remedies import Question, Remedy
from attn_graph.ir.ops import Dropout
from attn_graph.lowering.request import Options, Request
from attn_graph.planner.choose import BACKENDS
from attn_graph.testing.strategies import graphs, shapes
from tests.planner.test_explain import TARGETS
from tests.support.cudnn_graphs import cudnn_graphs
from tests.support.reasons import skeleton

HALF = torch.bfloat16
X = ag.TensorSpec((2, 8, 512, 64), HALF)
OLD = ag.Target("v100", "cuda", 70)
DRAWN = st.one_of(graphs(shapes(most=40, heads=8)), cudnn_graphs())
SENTENCES: dict[tuple[str, str], str] = {}  # by backend and key, over all examples


def passes(question: Question) -> Iterator[ag.Graph]:
    yield question.forward()
    if question.wants and question.forward().has_gradient:
        yield question.backward()
        yield evolve(question, through_lse=True).backward()


@given(
    graph=DRAWN,
    target=st.sampled_from([*TARGETS, OLD]),
    deterministic=st.booleans(),
    most=st.sampled_from([None, 0]),
)
def test_a_key_stands_for_one_sentence_of_its_backend(
    graph: ag.Graph, target: ag.Target, deterministic: bool, most: int | None
) -> None:
    options = Options(deterministic, most, avoid=("triton",))
    for each in passes(Question.of(Request(graph, target, options))):
        for backend in BACKENDS:
            reasons = backend.reasons(Request(each, target, options))
            assert len({reason.key for reason in reasons}) == len(reasons), reasons
            assert len({*map(str, reasons)}) == len(reasons), reasons
            for reason in reasons:
                assert isinstance(reason, ag.extend.Reason)
                assert reason.limit
                assert reason.actual
                assert reason.actual in str(reason)
                sentence = skeleton(reason.limit) + reason.sentence
                assert SENTENCES.setdefault((backend.name, reason.key), sentence) == sentence


ODD: dict[str, ag.Graph] = {
    "sizes": ag.attention(ag.TensorSpec((2, 8, 0, 64), HALF), X, X),
    "head_multiple": ag.attention(*(ag.TensorSpec((2, 8, 512, 20), HALF),) * 3),
    "head_widest": ag.attention(*(ag.TensorSpec((2, 8, 512, 1024), HALF),) * 3),
    "equations": ag.graph(lambda q, k: ag.scores(q, k).softmax()[1], q=X, k=X),
}


@pytest.mark.parametrize("key", ODD)
def test_backends_with_the_same_limit_say_the_same(key: str) -> None:
    graph = Question.of(Request(ODD[key], TARGETS[2], Options())).forward()
    reasons = [r for b in BACKENDS for r in b.reasons(Request(graph, TARGETS[2], Options()))]
    texts = [skeleton(reason) for reason in reasons if reason.key == key]
    assert len(texts) >= 2
    assert len({*texts}) == 1


def test_a_plain_text_is_a_reason_by_its_own_key() -> None:
    """Whatever it contains, braces too."""

    def why_not(*_: object) -> Iterator[str]:
        yield "needs {nothing}, and there is {0}"

    own = ag.extend.Backend("own", why_not, lambda *_: ag.extend.Executable(lambda *_: ((), ())))
    with pytest.raises(ag.NoBackendError) as error:
        ag.compile(ag.attention(X, X, X), target="cpu", backends=(own,))
    ((_, (reason,)),) = error.value.refusals
    assert str(reason) == reason.key == "needs {nothing}, and there is {0}"
    assert "\nown can't: needs {nothing}, and there is {0}\n" in str(error.value)


def test_a_late_refusal_keeps_its_key_and_takes_plain_texts_too() -> None:
    reason = ag.extend.Reason("licence", "needs a licence", "there is none")
    error = ag.extend.RefusedError(reason, "needs luck")
    assert error.reasons == (reason, ag.extend.Reason.of("needs luck"))
    assert str(error) == "needs a licence, and there is none; needs luck"


def test_keys_reach_dicts_and_stay_where_nobody_takes_the_graph() -> None:
    graph = ag.attention(X, X, X, mask=ag.Prefix(3), dropout=0.1)
    found = ag.explain(graph, target=TARGETS[2], backends=("cudnn", "torch_flash"))
    for refusal, each in zip(found.refusals, found.to_dict()["refusals"], strict=True):
        assert json.loads(json.dumps(each)) == each
        assert each["reasons"] == [*map(str, refusal.reasons)]
        assert each["keys"] == [reason.key for reason in refusal.reasons]
        assert each["lifts_changing_result"] == each["lifts"]
        assert each["smallest_changes_result"] is True
    assert [r.key for r in found.refusals[0].reasons] == ["dropout", "mask_leaves"]
    assert [r.key for r in found.refusals[1].reasons] == ["causal_alone", "no_dropout"]
    with pytest.raises(ag.NoBackendError) as error:
        ag.compile(graph, target=TARGETS[2], backends=("cudnn",))
    ((_, reasons),) = error.value.refusals
    assert [reason.key for reason in reasons] == ["dropout", "mask_leaves"]


# Remedies


@given(graph=DRAWN, deterministic=st.booleans())
def test_remedies_that_do_not_change_the_result_leave_every_step_and_every_number(
    graph: ag.Graph, deterministic: bool
) -> None:
    question = Question.of(Request(graph, TARGETS[2], Options(deterministic)))
    for edit in question.edits:
        remedy, after = edit.remedy, edit.after
        if after is None or edit.kind == "pack":
            continue
        given = {i.name: i.spec.dtype for i in graph.inputs}
        now = {i.name: i.spec.dtype for i in after.graph.inputs}
        same_steps = [e.op for e in after.graph.eqns] == [e.op for e in graph.eqns]
        exact = all(torch.promote_types(given[name], now[name]) == now[name] for name in now)
        assert remedy.changes_result != (same_steps and exact), remedy


def test_remedies_that_change_the_result_stand_apart() -> None:
    same, other = Remedy("make k dense"), Remedy("drop the mask", instead="without the mask")
    assert format_lifts((same,)) == "fix: make k dense"
    assert format_lifts((other,)) == "not a limit without the mask, which changes the result"
    both = "fix: make k dense; not a limit without the mask, which changes the result"
    assert format_lifts((other, same)) == both


def test_two_changes_that_keep_the_result_come_before_one_that_does_not() -> None:
    strided = ag.TensorSpec(X.shape, HALF, (2**19, 2**16, 128, 2))
    few = ag.TensorSpec((2, 2, 512, 64), HALF)
    graph = ag.attention(strided, few, few, mask=ag.Prefix(3))
    backend = ag.extend.Backend(
        "own", refuses_masks_over_odd_tensors, lambda *_: ag.extend.Executable(lambda *_: ((), ()))
    )
    (refusal,) = ag.explain(graph, target="cpu", backends=(backend,), gradients=()).refusals
    assert refusal.lifts == (
        (Remedy("make q dense"), Remedy("drop the mask", instead="without the mask")),
        (
            Remedy("repeat k and v for all 8 heads"),
            Remedy("drop the mask", instead="without the mask"),
        ),
    )
    assert refusal.way_out == "fix: make q dense, repeat k and v for all 8 heads"


def refuses_masks_over_odd_tensors(
    graph: ag.Graph, target: ag.Target, options: ag.extend.Options
) -> Iterator[ag.extend.Reason]:
    q, k, *_ = (i.spec for i in graph.inputs)
    if "mask=" in str(graph) and not q.unit_last:
        yield ag.extend.Reason("odd_q", "masks a dense q", "it is not")
    if "mask=" in str(graph) and q.shape[1] != k.shape[1]:
        yield ag.extend.Reason("odd_heads", "masks all heads", "some are shared")


def test_the_way_out_says_when_the_result_would_be_another() -> None:
    graph = ag.attention(X, X, X, dropout=0.1)
    (refusal,) = ag.explain(graph, target=TARGETS[2], backends=("cudnn",), gradients=()).refusals
    assert any(isinstance(eqn.op, Dropout) for eqn in graph.eqns)
    assert refusal.way_out == "would run without dropout, which changes the result"
    assert str(refusal).endswith(" (would run without dropout, which changes the result)")
    few = ag.TensorSpec((2, 2, 512, 64), HALF)
    grouped = ag.attention(X, few, few, mask=ag.Prefix(3))
    (other,) = ag.explain(
        grouped, target=TARGETS[2], backends=("torch_cudnn",), gradients=()
    ).refusals
    assert other.way_out == (
        "would run without the mask, which changes the result, "
        "if you also repeat k and v for all 8 heads"
    )
    assert str(Refusal("own", (ag.extend.Reason.of("never runs"),))) == "own can't: never runs"


STEPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "operator": (lambda s: s.div(2), lambda ds, s: ds * 2 ** (s * 0 - 1)),
    "keyword": (lambda s: s.mul(2).add(s, alpha=0), lambda ds, s: ds * 2),
    "method": (lambda s: s * 2, lambda ds, s: ds * 2 + s.digamma() * 0),
    "attribute": (lambda s: s * s.ndim, lambda ds, s: ds * 4),
    "function": (lambda s: s + torch.special.i0(s * 0) - 1, lambda ds, s: ds),
    "power": (lambda s: s * 2 ** (s * 0 + 1), lambda ds, s: ds * 2),
}


@final
@frozen
class Own(ag.Modifier):
    kind: str

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return STEPS[self.kind][0](s)  # type: ignore[no-any-return]  # a tensor

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        return STEPS[self.kind][1](ds, s)  # type: ignore[no-any-return]  # a tensor


@final
@frozen
class Near(ag.Mask):
    def keep(self, at: Place) -> Any:
        return abs(at.j - at.i) ** 0.5 < 4


@pytest.mark.parametrize("steps", [(), *((Own(kind),) for kind in STEPS)], ids=str)
def test_what_symbols_lack_is_a_reason_against_kernels(steps: tuple[Own, ...]) -> None:
    """Definitions are written for tensors; an explanation never fails at one."""
    mask = None if steps else Near()
    explanation = ag.explain(ag.attention(X, X, X, mask=mask, modifiers=steps), target="h200")
    sides = (explanation, explanation.backward)
    told = {
        (each.backend, r.key)
        for side in sides
        if side
        for each in side.refusals
        for r in each.reasons
    }
    assert ("triton", "trace") in told
