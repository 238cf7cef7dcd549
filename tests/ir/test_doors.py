"""Odd input at every door is a GraphError in words, never an error of some line inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.transforms.parse import parse_mask
from attn_graph.testing import rule
from attn_graph.testing.tensors import tensors_for

F32, I64 = torch.float32, torch.int64
X = ag.TensorSpec((1, 2, 6, 8), F32)
GRAPH = ag.attention(X, X, X)
BACKWARD = ag.vjp(GRAPH)[1]
CPU = ag.Target.of("cpu")


def attend(**options: Any) -> Callable[[], object]:  # Any: options of `attention`, wrong ones
    return lambda: ag.attention(X, X, X, **options)


def compile_(**options: Any) -> Callable[[], object]:  # Any: options of `compile`, wrong ones
    return lambda: ag.compile(GRAPH, **options)


def parse(type_: str, step: str = "s = scores(q, q)") -> Callable[[], object]:
    return lambda: ag.parse(f"def graph(\n    q: {type_},\n):\n    {step}\n    return s")


def wants(given: str) -> Callable[[], object]:
    return lambda: ag.parse(str(BACKWARD).replace("wants=(True, True, True)", f"wants={given}"))


# What is called, and a word that must be in what is told. tests/test_hostile.py passes anything as
# each argument; here are parts of arguments, and ways out.
STARTS = ag.TensorSpec((3,), I64)
LONGEST: Any = {"q_starts": STARTS, "kv_starts": STARTS, "max_lengths": (2**62, 2**62)}
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "a size None in text": (parse("f32[None, 2]"), "line 2: (None, 2) are not integers"),
    "a size beyond all in text": (parse("f32[1e999, 2]"), "line 2: (1e309, 2) are not integers"),
    "an operand too many": (
        parse("f32[1, 2, 6, 8]", "s = scores(q, q, q)"),
        "line 4: scores: 3 operands given, 2 needed",
    ),
    "no operand": (parse("f32[1, 2, 6, 8]", "s = scores()"), "0 operands given, 2 needed"),
    "wants too short": (wants("(True,)"), "1 wants for 3 operands"),
    "wants too long": (wants("(True, True, True, True)"), "4 wants for 3 operands"),
    "None among backends": (compile_(backends=[None]), "None is not a Backend"),
    "one backend": (compile_(backends="math"), "write ('math',)"),
    "a workspace beyond all": (compile_(max_workspace="9" * 400 + "GiB"), "size 999999999..."),
    "a scale beyond all": (attend(scale=10**400), "must be a finite number"),
    "no v": (lambda: ag.attention(X, X, None), "'v' is a NoneType"),  # type: ignore[arg-type]  # is wrong
    "segments of one kind": (
        attend(segments=ag.TensorSpec((1, 6), I64)),
        "(q_segments, kv_segments)",
    ),
    "a bound beyond all tensors": (lambda: ag.Window(None, -(2**70)), "farther than"),
    "part of a size": (lambda: ag.TensorSpec((2.9, 3), F32), "(2.9, 3)"),  # type: ignore[arg-type]  # is wrong
    "a size beyond all": (lambda: ag.TensorSpec((2**70, 2), F32), "no tensor goes beyond"),
    "elements beyond all": (lambda: ag.TensorSpec((2**40, 2**40), F32), "no tensor goes beyond"),
    "rows beyond all, padded": (
        lambda: ag.attention(*[ag.TensorSpec((6, 2, 8), F32)] * 3, **LONGEST),
        "pass the longest length in max_lengths",
    ),
    "outputs that nothing makes": (lambda: ag.Graph((), (), (3,)), "outputs (3,) of 0 values"),
    "operands that nothing makes": (
        lambda: ag.Graph(GRAPH.inputs, GRAPH.eqns[1:], (3,)),
        "reads (3,) of 3 values",
    ),
    "axes that there are not": (lambda: ag.Data("bz"), "axes 'bz'"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_told_in_words(name: str) -> None:
    attempt, words = ODD[name]
    with pytest.raises(ag.GraphError) as caught:
        attempt()
    assert words in str(caught.value)


def test_wants_may_come_from_anything_that_gives_names() -> None:
    names: Any = (name for name in ("q", "v"))
    assert ag.vjp(GRAPH, wants=names) == ag.vjp(GRAPH, wants=["q", "v"])


@pytest.mark.parametrize("name", ["self", "fn", "mask", "tensors", "named"])
def test_inputs_may_be_called_like_what_the_library_calls_its_own(name: str) -> None:
    flags = ag.TensorSpec((1, 1, 6, 6), torch.bool)

    def attend(**x: ag.Value) -> ag.Value:
        s = ag.scores(x["q"], x["q"]).mask(ag.Keep(name), **{name: x[name]})
        return s.softmax()[0].weigh(x["q"])

    graph = ag.graph(attend, **{"q": X, name: flags})
    assert ag.parse(str(graph)) == graph
    q, keep = tensors_for(graph, 1)
    plan = ag.compile(graph, target=CPU)
    named = {"q": q, name: keep}
    assert torch.equal(plan(**named), plan(q, keep))  # type: ignore[arg-type]  # has one output
    assert plan.verify(**named).ok
    assert plan.cost(**{name: keep}).forward.flops > 0
    assert ag.Keep(name).picture(6, 6, **{name: keep})


# Advice


@given(
    st.tuples(*[st.integers(1, 3)] * 4),
    st.sets(st.sampled_from("bhi"), max_size=2),
    st.sampled_from(["keep", "bias"]),
)
@example((2, 1, 3, 3), {"b"}, "keep")
@example((2, 1, 2, 3), {"b"}, "keep")
@example((2, 1, 3, 3), {"b", "i"}, "bias")
def test_advice_for_a_mask_of_fewer_axes_has_the_meaning_that_it_says(
    four: tuple[int, int, int, int], rows: set[str], name: str
) -> None:
    """Each reading that fits is told, with the index that gives the four axes that it names."""
    meant = [x for x in "bhij" if x in {*rows, "j"}]
    (B, H, M, N), sizes = four, dict(zip("bhij", four, strict=True))
    q, k = ag.TensorSpec((B, H, M, 8), F32), ag.TensorSpec((B, H, N, 8), F32)
    given = torch.zeros([sizes[x] for x in meant], dtype=torch.bool if name == "keep" else F32)
    with pytest.raises(ag.GraphError) as caught:
        ag.attention(q, k, k, **{name: ag.TensorSpec.like(given)})  # type: ignore[arg-type]  # one of two
    ways = re.findall(rf"{name}(\[[^\]]*\]) if it is \[([A-Z1,]*)\]", str(caught.value))
    shapes = {axes: eval(f"given{index}", {"given": given}).shape for index, axes in ways}
    names = dict(zip("BHMN", "bhij", strict=True))
    for axes, shape in shapes.items():
        letters = [names[x] for x in axes.split(",") if x != "1"]
        assert [*shape] == [sizes[x] if x in letters else 1 for x in "bhij"]
    due = [sizes[x] if x in meant else 1 for x in "bhij"]
    assert due in [[*shape] for shape in shapes.values()]


# Joins of many


@pytest.mark.parametrize("kind", ["&", "|"])
def test_hundreds_of_leaves_are_joined_planned_and_read_again(kind: str) -> None:
    names = [f"keep{n}" for n in range(400)]
    leaves: list[m.Mask] = [ag.Keep(name) for name in names]
    mask = reduce(lambda a, b: a & b if kind == "&" else a | b, leaves)
    flags = ag.TensorSpec((1, 1, 1, 6), torch.bool)
    more: dict[str, Any] = dict.fromkeys(names, flags)
    graph = ag.attention(X, X, X, mask=mask, **more)
    assert ag.parse(str(graph)) == graph
    assert parse_mask(str(mask)) == mask
    tensors = tensors_for(graph, 3)
    o = ag.compile(graph, target=CPU)(*tensors)
    rule.expect_outputs(graph, tensors)[0].check(o)  # type: ignore[arg-type]  # has one output


def test_joins_of_one_kind_are_one_whatever_the_brackets() -> None:
    a, b, c, d = (ag.Keep(name) for name in "abcd")
    assert (a & b) & (c & d) == a & (b & (c & d)) == ((a & b) & c) & d
    assert str(a & b & c & d).count("(") == 1 + 4
    assert (a & b | c) & d != a & (b | c & d)
    assert ~~a == a


def nested(depth: int) -> m.Mask:
    mask: m.Mask = ag.Keep()
    for n in range(depth):
        mask = mask | ag.Window(n, 0) if n % 2 else mask & ~ag.Prefix(n)
    return mask


def test_joins_within_joins_are_planned_to_a_depth_and_refused_beyond() -> None:
    with pytest.raises(ag.GraphError, match="more than 128 deep"):
        nested(129)
    graph = ag.attention(X, X, X, mask=nested(127), keep=ag.TensorSpec((1, 1, 6, 6), torch.bool))
    assert ag.parse(str(graph)) == graph
    assert ag.compile(graph, target=CPU).verify(*tensors_for(graph, 1)).ok


@pytest.mark.parametrize("bound", [2**63 - 1, 2**62, 10**9])
@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_far_beyond_all_keys_keep_what_they_say(bound: int, sign: int) -> None:
    def bounded(bound: int) -> ag.Graph:
        far = ag.Window(None, sign * bound), ag.Window(-sign * bound, None)
        mask = far[0] & ~ag.Causal() | far[1] & ag.Prefix(2) | ag.Window(bound, 0) & ag.Prefix(1)
        return ag.attention(X, X, X, mask=mask)

    graph = bounded(bound)
    tensors = tensors_for(graph, 1)
    due = rule.expect_outputs(bounded(1000), tensors)[0]
    due.check(ag.compile(graph, target=CPU)(*tensors))  # type: ignore[arg-type]  # has one output
    due.check(ag.evaluate(graph, tensors)[0].float())
