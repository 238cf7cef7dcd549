"""Passes write the same thing in one form: no result changes, and equal graphs become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir import builder, ops
from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Value
from attn_graph.ir.graph import Op
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.passes import PASSES, canonicalise, simplify
from attn_graph.ir.reference import evaluate
from attn_graph.ir.rewrite import prune, replay
from attn_graph.spec import TensorSpec, ValueType
from attn_graph.testing import rule
from attn_graph.testing.strategies import graphs, seeds, shuffled_graphs
from attn_graph.testing.tensors import tensors_for

SOME = settings(max_examples=2 * settings().max_examples)
F32, BOOL = torch.float32, torch.bool
X = ag.TensorSpec((2, 4, 5, 8), F32)


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> list[str]:
    """Where they differ by more than roundings: passes reorder steps, the operations stay the same.

    Within 2^-40 of the largest, since a score may be 2^13 times that and lose as many bits.
    """
    found = []
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            found.append(f"{n}: {x.dtype}{[*x.shape]} is not {y.dtype}{[*y.shape]}")
            continue
        size = float(y.abs().nan_to_num(posinf=0.0).max()) if y.numel() else 0.0
        most = 2.0**-40 * max(1.0, size)
        if not rule.distance(x, y) <= most:
            found.append(f"{n}: {rule.distance(x, y):.3g} apart, allowed {most:.3g}")
    return found


@given(graphs(), seeds)
def test_no_pass_changes_what_a_graph_means(graph: ag.Graph, seed: int) -> None:
    tensors = tensors_for(graph, seed)
    due = evaluate(graph, tensors)
    for run in (*PASSES, simplify):
        graph = run(graph)
        assert not apart(evaluate(graph, tensors), due)


def check(graph: ag.Graph, tensors: Sequence[torch.Tensor]) -> None:
    """The graph, as it is and simplified, gives what the page says."""
    for run in (prune, simplify):
        found = evaluate(run(graph), tensors)
        for x, due in zip(found, rule.expect_outputs(graph, tensors), strict=True):
            due.check(x.to(torch.float64))


@SOME
@given(graphs(), seeds)
def test_a_simplified_graph_means_what_the_page_says(graph: ag.Graph, seed: int) -> None:
    tensors = tensors_for(graph, seed)
    check(graph, tensors)


@SOME
@given(shuffled_graphs(), seeds)
def test_a_masked_place_stays_masked_whatever_comes_after(graph: ag.Graph, seed: int) -> None:
    check(graph, tensors_for(graph, seed))


@given(shuffled_graphs())
def test_masks_come_after_modifiers_and_all_scores_into_one_op(graph: ag.Graph) -> None:
    kinds = [type(eqn.op) for eqn in canonicalise(graph).eqns]
    masked = [place for place, kind in enumerate(kinds) if kind is ops.Mask]
    modified = [place for place, kind in enumerate(kinds) if issubclass(kind, Modifier)]
    assert max(modified, default=0) <= min(masked, default=len(kinds))
    assert len(masked) > 1 or [type(e.op) for e in simplify(graph).eqns] == [Attention]


@given(graphs())
def test_what_attention_says_becomes_one_op(graph: ag.Graph) -> None:
    (eqn,) = simplify(graph).eqns
    assert isinstance(eqn.op, Attention)
    types = [graph.inputs[i].spec.type for i in eqn.args]
    assert eqn.op.unfold(lambda op, *given: op.infer(*given), types) == eqn.outs


@given(graphs())
def test_every_step_gives_what_it_infers(graph: ag.Graph) -> None:
    values = [*tensors_for(graph, 0)]
    for eqn in graph.eqns:
        found = eqn.op.run(*(values[i] for i in eqn.args))
        assert [(tuple(x.shape), x.dtype) for x in found] == [(t.shape, t.dtype) for t in eqn.outs]
        values += found


@given(graphs())
def test_replaying_without_a_rule_copies(graph: ag.Graph) -> None:
    assert replay(graph, lambda *_: None) == prune(graph) == graph


def test_what_no_output_needs_is_pruned_and_inputs_stay() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        s = ag.scores(q, k)
        s.soft_cap(3.0).softmax()[0].weigh(v)
        return s.softmax()[1]

    graph = ag.graph(attend, q=X, k=X, v=X)
    assert [type(e.op) for e in graph.eqns][3:] == [ops.Weigh, ops.Softmax]
    assert [type(e.op) for e in prune(graph).eqns] == [ops.Scores, ops.Softmax]
    assert prune(graph).inputs == graph.inputs


def returning(*names: str) -> ag.Graph:
    """A chain that returns some of its values."""

    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ...]:
        s = ag.scores(q, k)
        p, lse = s.mask(ag.Causal()).softmax()
        values = {"s": s, "p": p, "lse": lse, "o": p.weigh(v)}
        return tuple(values[name] for name in names)

    return ag.graph(attend, q=X, k=X, v=X)


@pytest.mark.parametrize("names", ["o", "lse o", "o lse"])
def test_a_chain_is_fused_whatever_order_it_returns(names: str) -> None:
    graph = returning(*names.split())
    assert [type(e.op) for e in simplify(graph).eqns] == [Attention]
    tensors = tensors_for(graph, 0)
    assert not apart(evaluate(simplify(graph), tensors), evaluate(graph, tensors))


@pytest.mark.parametrize("names", ["o s", "p o", "lse", "s", "p lse"])
def test_a_chain_whose_inner_values_are_wanted_stays_in_steps(names: str) -> None:
    graph = returning(*names.split())
    assert Attention not in {type(e.op) for e in simplify(graph).eqns}
    tensors = tensors_for(graph, 0)
    assert not apart(evaluate(simplify(graph), tensors), evaluate(graph, tensors))


def test_two_attentions_in_a_row_become_two_ops() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        first = ag.scores(q, k).softmax()[0].weigh(v)
        return ag.scores(first, k).mask(ag.Causal()).softmax()[0].weigh(v)

    graph = ag.graph(attend, q=X, k=X, v=X)
    assert [type(e.op) for e in simplify(graph).eqns] == [Attention, Attention]
    tensors = tensors_for(graph, 0)
    assert not apart(evaluate(simplify(graph), tensors), evaluate(graph, tensors))


def test_values_of_another_dtype_are_not_fused() -> None:
    half = ag.TensorSpec((2, 4, 5, 8), torch.float16)
    graph = ag.graph(lambda q, k, v: ag.scores(q, k).softmax()[0].weigh(v), q=half, k=half, v=X)
    assert Attention not in {type(e.op) for e in simplify(graph).eqns}


def test_weights_that_are_scaled_are_not_fused_away() -> None:
    said = str(ag.attention(X, X, X)).replace("weigh(p, v)", "weigh(p, v, scale=2.0)")
    graph = ag.parse(said)
    tensors = tensors_for(graph, 0)
    assert not apart(evaluate(simplify(graph), tensors), evaluate(graph, tensors))


def test_dropout_of_nothing_is_fused_into_nothing() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, seed: ag.Value, offset: ag.Value) -> ag.Value:
        return ag.scores(q, k).softmax()[0].dropout(0.0, seed, offset).weigh(v)

    number = ag.TensorSpec((), torch.int64)
    graph = simplify(ag.graph(attend, q=X, k=X, v=X, seed=number, offset=number))
    (eqn,) = graph.eqns
    assert eqn.op == simplify(ag.attention(X, X, X)).eqns[0].op
    assert len(eqn.args) == 3
    assert ag.parse(str(graph)) == graph


def test_masks_that_read_two_tensors_of_one_name_are_not_joined() -> None:
    flags = ag.TensorSpec((1, 1, 5, 5), torch.bool)

    def attend(q: ag.Value, k: ag.Value, v: ag.Value, a: ag.Value, b: ag.Value) -> ag.Value:
        return ag.scores(q, k).mask(m.Keep(), keep=a).mask(m.Keep(), keep=b).softmax()[0].weigh(v)

    graph = ag.graph(attend, q=X, k=X, v=X, a=flags, b=flags)
    assert [type(e.op) for e in canonicalise(graph).eqns].count(ops.Mask) == 2
    tensors = tensors_for(graph, 3)
    assert not apart(evaluate(simplify(graph), tensors), evaluate(graph, tensors))


# Goldens: what a person should read


def test_canonicalised(golden: Callable[[object], None]) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, local: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(q, k).mask(ag.Causal("bottom_right")).soft_cap(30.0)
        s = s.mask(ag.Window(3, 3) | ag.Keep("local"), local=local).alibi()
        p, lse = s.mask(ag.Window(4)).softmax()
        return p.weigh(v), lse

    flags = ag.TensorSpec((1, 1, 5, 5), torch.bool)
    golden(canonicalise(ag.graph(attend, q=X, k=X, v=X, local=flags)))


def test_simplified(golden: Callable[[object], None]) -> None:
    graph = ag.attention(
        *(X, X, X),
        mask=ag.Causal() & ag.Window(3),
        align="bottom_right",
        soft_cap=30.0,
        alibi=True,
        kv_lengths=ag.TensorSpec((2,), torch.int32),
        sinks=ag.TensorSpec((4,), F32),
        dropout=0.1,
        stats=True,
    )
    golden(simplify(graph))


def test_simplified_gradient_of_two_layers(golden: Callable[[object], None]) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> ag.Value:
        first = ag.scores(q, k).softmax()[0].weigh(v)
        return ag.scores(first, k).mask(ag.Causal()).softmax()[0].weigh(v)

    golden("\n\n".join(map(str, ag.vjp(ag.graph(attend, q=X, k=X, v=X)))))


@final
@frozen
class Doubled(Op):
    """x -> 2 x, of any shape."""

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (None,)

    def infer(self, x: ValueType) -> tuple[ValueType]:
        return (x,)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * x,)


@pytest.mark.parametrize("early", [True, False])
def test_a_chain_fuses_where_its_lse_is_read_after_it_alone(early: bool) -> None:
    """Before o there is no Attention yet that could give it."""

    def attend(q: Value, k: Value, v: Value) -> tuple[Value, Value]:
        p, lse = builder.scores(q, k).softmax()
        if early:
            (twice,) = q.builder.emit(Doubled(), lse)
            return p.weigh(v), twice
        o = p.weigh(v)
        return o, q.builder.emit(Doubled(), lse)[0]

    x = TensorSpec((1, 2, 5, 4), torch.float32)
    graph = builder.graph(attend, q=x, k=x, v=x)
    simple = simplify(graph)
    assert any(isinstance(eqn.op, Attention) for eqn in simple.eqns) is not early
    tensors = tensors_for(graph, 1)
    for a, b in zip(evaluate(graph, tensors), evaluate(simple, tensors), strict=True):
        torch.testing.assert_close(a, b)
