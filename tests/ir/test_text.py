"""Text: what a graph prints is Python, and reading it gives the graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import final

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir import modifiers, ops
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Op
from attn_graph.ir.passes import canonicalise, simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.storage import packed, packing, paging, scaling, views
from attn_graph.ir.terms import addends, relative
from attn_graph.ir.transforms import gradient_ops, parse, sums, tangents
from attn_graph.ir.transforms.vjp import backward, cotangent_specs, wanted_inputs
from attn_graph.testing.strategies import graphs, masks, shapes

SPEC = ag.TensorSpec((2, 4, 6, 8), torch.float16, layout="bshd")
GRAPH = ag.attention(
    SPEC,
    ag.TensorSpec((2, 2, 9, 8), torch.float16),
    ag.TensorSpec((2, 2, 9, 8), torch.float16),
    mask=ag.Causal() & ag.Window(4) | ~ag.Keep("global_"),
    align="bottom_right",
    soft_cap=30,
    sinks=ag.TensorSpec((4,), torch.float32),
    dropout=0.1,
    stats=True,
    global_=ag.TensorSpec((1, 1, 6, 9), torch.bool),
)


def check(graph: ag.Graph) -> None:
    """Reading the text gives the graph, and the text is Python."""
    told = str(graph)
    assert ag.parse(told) == graph
    assert str(ag.parse(told)) == told
    ast.parse(told)


def stepwise_backward(graph: ag.Graph) -> ag.Graph:
    """The gradient by every single step, with nothing fused."""
    graph = canonicalise(prune(graph))
    specs = cotangent_specs(graph, graph.differentiable_outputs)
    return backward(graph, wanted_inputs(graph, None), specs)


@given(graphs(), st.sampled_from("qkv"))
def test_reading_a_printed_graph_gives_the_graph(graph: ag.Graph, wanted: str) -> None:
    """As it is and simplified, and those of its gradient: fused, in steps, and one alone."""
    for each in (graph, canonicalise(graph), simplify(graph), *ag.vjp(graph)):
        check(each)
    check(stepwise_backward(graph))
    check(ag.vjp(graph, wants=[wanted])[1])


def test_every_op_can_be_read() -> None:
    homes = (
        ops,
        modifiers,
        relative,
        addends,
        gradient_ops,
        sums,
        tangents,
        packed,
        packing,
        paging,
        scaling,
        views,
    )
    declared = {
        kind
        for home in homes
        for kind in vars(home).values()
        if isinstance(kind, type) and issubclass(kind, Op) and getattr(kind, "__final__", False)
    }
    assert declared | {Attention} == set(parse.OPS)


def test_a_graph_prints_its_steps_with_their_types(golden: Callable[[object], None]) -> None:
    golden(GRAPH)


def test_a_gradient_prints_as_one_step(golden: Callable[[object], None]) -> None:
    golden(ag.vjp(GRAPH)[1])


def test_a_leaf_of_ones_own_is_read_when_it_is_named() -> None:
    @final
    @frozen
    class Stripe(ag.Mask):
        """Every `step`-th key."""

        step: int

        def keep(self, at: ag.extend.Place) -> object:
            return at.j % self.step == 0

    x = ag.TensorSpec((1, 1, 4, 4), torch.float32)
    graph = ag.attention(x, x, x, mask=Stripe(2) & ag.Causal())
    assert ag.parse(str(graph), known=[Stripe]) == graph
    with pytest.raises(ag.GraphError, match="Stripe"):
        ag.parse(str(graph))


def test_inputs_may_be_called_like_the_results_of_steps() -> None:
    def attend(s: ag.Value, p: ag.Value, o: ag.Value, lse: ag.Value) -> tuple[ag.Value, ag.Value]:
        weights, stats = ag.scores(s, p).bias(lse).softmax()
        return weights.weigh(o), stats

    x = ag.TensorSpec((1, 2, 3, 3), torch.float32)
    graph = ag.graph(attend, s=x, p=x, o=x, lse=x)
    check(graph)
    check(ag.vjp(graph)[1])


Edit = tuple[str, str, int, str]  # what stands in the text, what instead, which line, what is told

EDITS: list[Edit] = [
    ("scores(q, k", "scores(q, kk", 10, "kk"),
    ("soft_cap(s", "soft_hat(s", 11, "known op"),
    ("cap=30.0", "cup=30.0", 11, "cup"),
    ("(s, cap=30.0)", "(s)", 11, "cap"),
    ("cap=30.0", "cap=-30.0", 11, "-30.0"),
    ("cap=30.0", "cap='x'", 11, "x"),
    ("cap=30.0", "cap=open('x')", 11, "open"),
    ("cap=30.0", "cap=(1,)", 11, "cap (1,)"),
    ("q: f16[2, 4, 6, 8](strides=(192, 8, 32, 1))", "q", 2, "no type"),
    ("k: f16[2, 2, 9, 8]", "k: f17[2, 2, 9, 8]", 3, "f17"),
    ("k: f16[2, 2, 9, 8]", "k: f16[2, 2, -9, 8]", 3, "negative"),
    ("k: f16[2, 2, 9, 8]", "k: f16[2, 2, 9, x]", 3, "x"),
    ("k: f16[2, 2, 9, 8]", "k: f16[2, 2, 9, 7]", 10, "head size"),
    ("k: f16[2, 2, 9, 8]", "q: f16[2, 2, 9, 8]", 3, "q"),
    ("left=4", "left=-4", 12, "no key"),
    ("Causal(", "Casual(", 12, "Casual"),
    ("~Keep(name='global_')", "3", 12, "3"),
    ("~Keep(name='global_')", "+Keep(name='global_')", 12, "+Keep"),
    ("p, lse = softmax", "p, lse, x = softmax", 13, "3"),
    ("p, lse = softmax", "p = softmax", 13, "1"),
    ("return o, lse", "return q, lse", 16, "q"),
    ("return o, lse", "return lse, lse", 16, "one value"),
    ("return o, lse", "return o, lse + 1", 16, "lse + 1"),
    ("return o, lse", "return", 16, "nothing"),
    ("return o, lse", "x = o", 1, "return"),
    ("return o, lse", "return o, lse)", 16, "line 16"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: re.sub(r"\W+", "-", edit[1]))
def test_what_cannot_be_read_is_told_with_its_line(edit: Edit) -> None:
    old, new, line, told = edit
    before = str(GRAPH)
    assert old in before
    with pytest.raises(ag.GraphError) as caught:
        ag.parse(before.replace(old, new))
    assert all(problem.startswith(f"line {line}:") for problem in caught.value.problems)
    assert told in str(caught.value)


@pytest.mark.parametrize("words", ["", "x = 3", "def graph(): pass", "import os", "def f(:", "\0"])
def test_what_is_no_graph_at_all_is_refused(words: str) -> None:
    with pytest.raises(ag.GraphError, match="line 1"):
        ag.parse(words)


@given(shapes().flatmap(masks))
def test_reading_a_printed_mask_gives_the_mask(mask: m.Mask) -> None:
    assert parse.parse_mask(str(mask)) == mask


def test_a_mask_written_by_hand_may_leave_out_names_of_fields() -> None:
    written = " Causal() & (Window(64, right=3) | Prefix(4)) & ~Causal('bottom_right')"
    due = ag.Causal() & (ag.Window(64, 3) | ag.Prefix(4)) & ~ag.Causal("bottom_right")
    assert parse.parse_mask(written) == due


NO_MASKS = {
    "": "invalid syntax",
    "Causal(": "line 1: '(' was never closed",
    "Causal() and Window(3)": "is not a known value",
    "__import__('os').system('true')": "is not a known value",
    "Scores(0.5)": "Scores(0.5) is not a known value",
    "{[]: 1}": "is not a known value",
    "3": "3 is 3, not a mask such as Causal() & Window(64)",
    "1 & Causal()": "mask: 1 is not a mask",
    "Window()": "Window needs left",
    "Window(1, 2, None, 4)": "Window takes left, right, align, each once",
    "Window(1, left=2)": "Window takes left, right, align, each once",
    "KeyLengths(3)": "KeyLengths takes nothing, each once",
    "Window('x')": "the bound 'x' is not a whole number",
    "Causal()\0": "null bytes",
    "~" * 5000 + "Causal()": "read",
    "(" * 5000: "too many nested parentheses",
}


@pytest.mark.parametrize("written", ["causal", "Causal", "Causal() and Window(3)", "not Causal()"])
def test_who_writes_a_mask_wrongly_is_told_the_leaves_and_the_joints(written: str) -> None:
    with pytest.raises(ag.GraphError) as caught:
        parse.parse_mask(written)
    told = str(caught.value)
    assert told.startswith(f"{written} is not a known value; a mask is made of ")
    assert all(f"{leaf.__name__}(" in told for leaf in m.LEAVES)
    assert "Window(left, right, align)" in told
    assert told.endswith("joined with & (not `and`), | (not `or`) and ~ (not `not`)")


@pytest.mark.parametrize("spec", ["f16[(2, 3), (1, 2)]", "f16[2, 3](strides=(1, 'x'))", "f16[2.5]"])
def test_sizes_and_strides_are_integers_by_name(spec: str) -> None:
    words = str(GRAPH).replace("k: f16[2, 2, 9, 8]", f"k: {spec}")
    with pytest.raises(ag.GraphError, match=r"not integers; .* f16\[2, 3\]\(strides=\(1, 2\)\)"):
        ag.parse(words)


@pytest.mark.parametrize("written", NO_MASKS)
def test_what_is_no_mask_is_refused_in_words(written: str) -> None:
    with pytest.raises(ag.GraphError, match=re.escape(NO_MASKS[written])):
        parse.parse_mask(written)
