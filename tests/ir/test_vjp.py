"""Gradients: the fused formula, the single steps and torch's autograd of the page agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.attention import AttentionGrad
from attn_graph.ir.graph import Op
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.modifiers import Bend, Spread
from attn_graph.ir.passes import canonicalise
from attn_graph.ir.reference import evaluate
from attn_graph.ir.rewrite import prune
from attn_graph.ir.storage.scaling import Quantise
from attn_graph.ir.transforms import parse
from attn_graph.ir.transforms.gradient_ops import (
    SinkGradJvp,
    SoftmaxGrad,
    SoftmaxGradJvp,
    SoftmaxJvp,
)
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.ir.transforms.vjp import (
    backward,
    cotangent_specs,
    main_outputs,
    residuals,
    value_names,
    wanted_inputs,
)
from attn_graph.testing import formula, rule
from attn_graph.testing.strategies import graphs, seeds, shuffled_graphs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.sources import ROOT

F64 = torch.float64
SOME = settings(max_examples=2 * settings().max_examples)
doubles = graphs(dtype=st.just(F64))
shuffled = shuffled_graphs(F64)
Tensors = Sequence[torch.Tensor]
X = ag.TensorSpec((2, 4, 5, 8), F64)


def fused(graph: ag.Graph, tensors: Tensors, cotangents: Tensors) -> dict[str, torch.Tensor]:
    """The gradients by `vjp`, each of its two graphs evaluated by definition."""
    forward, back = ag.vjp(graph)
    return pulled(forward, back, len(graph.outputs), tensors, cotangents)


def pulled(
    forward: ag.Graph, back: ag.Graph, count: int, tensors: Tensors, cotangents: Tensors
) -> dict[str, torch.Tensor]:
    """Run forward, hand the backward all that it names, and name what it gives."""
    names = value_names(forward)
    given = {i.name: x for i, x in zip(forward.inputs, tensors, strict=True)}
    outputs = evaluate(forward, tensors)
    given |= {names[i]: x for i, x in zip(forward.outputs, outputs, strict=True)}
    due = zip(forward.outputs[:count], cotangents, strict=True)
    given |= {f"d{names[i]}": x for i, x in due}
    found = evaluate(back, [given[i.name] for i in back.inputs])
    wanted = [i.name for i in forward.inputs if i.spec.dtype.is_floating_point]
    return dict(zip(wanted, found, strict=True))


def stepwise(graph: ag.Graph, tensors: Tensors, cotangents: Tensors) -> dict[str, torch.Tensor]:
    """The gradients with nothing fused: every step's own `pull`."""
    return as_said(canonicalise(prune(graph)), tensors, cotangents)


def as_said(graph: ag.Graph, tensors: Tensors, cotangents: Tensors) -> dict[str, torch.Tensor]:
    """The gradients with nothing fused, and masks where they were said, which may be first."""
    specs = cotangent_specs(graph, graph.differentiable_outputs)
    back = backward(graph, wanted_inputs(graph, None), specs)
    assert not any(isinstance(eqn.op, AttentionGrad) for eqn in back.eqns)
    return pulled(graph, back, len(graph.outputs), tensors, cotangents)


def check(graph: ag.Graph, tensors: Tensors, cotangents: Tensors) -> None:
    """In rows that see nothing cotangents are NaN or infinite, and count 0."""
    due = rule.expect_gradients(graph, tensors, cotangents)
    poisoned = formula.poison_blind_rows(graph, tensors, cotangents, 0)
    for gradients in (fused, stepwise, as_said):
        found = gradients(graph, tensors, poisoned)
        assert found.keys() == due.keys()
        for name, expected in due.items():
            expected.check(found[name].to(F64))


@SOME
@given(doubles, seeds)
def test_fused_stepwise_and_autograd_gradients_agree(graph: ag.Graph, seed: int) -> None:
    check(graph, tensors_for(graph, seed), cotangents_for(graph, seed))


@SOME
@given(shuffled, seeds)
def test_they_agree_for_steps_in_any_order(graph: ag.Graph, seed: int) -> None:
    check(graph, tensors_for(graph, seed), cotangents_for(graph, seed))


@given(graphs(dtype=st.just(F64), stats=True), seeds, st.sampled_from([0, 1]))
def test_an_output_without_a_cotangent_has_a_cotangent_of_zero(
    graph: ag.Graph, seed: int, without: int
) -> None:
    tensors, cotangents = tensors_for(graph, seed), [*cotangents_for(graph, seed)]
    forward, _ = ag.vjp(graph)
    specs: list[ag.TensorSpec | None] = [result_spec(graph, i) for i in graph.outputs]
    specs[without] = None
    back = backward(
        forward, wanted_inputs(graph, None), [*specs, None, None][: len(forward.outputs)]
    )
    cotangents[without] = torch.zeros_like(cotangents[without])
    due = rule.expect_gradients(graph, tensors, cotangents)
    for name, found in pulled(forward, back, 2, tensors, cotangents).items():
        due[name].check(found.to(F64))


@given(doubles, seeds, st.data())
def test_wanting_some_gradients_gives_the_same_ones_alone(
    graph: ag.Graph, seed: int, data: st.DataObject
) -> None:
    tensors, cotangents = tensors_for(graph, seed), cotangents_for(graph, seed)
    floating = [i.name for i in graph.inputs if i.spec.dtype.is_floating_point]
    wants = data.draw(st.lists(st.sampled_from(floating), min_size=1, unique=True))
    forward, back = ag.vjp(graph, wants=wants)
    names = value_names(forward)
    given = dict(zip([i.name for i in graph.inputs], tensors, strict=True))
    given |= {names[i]: x for i, x in zip(forward.outputs, evaluate(forward, tensors), strict=True)}
    given |= {f"d{names[i]}": x for i, x in zip(forward.outputs, cotangents, strict=False)}
    found = evaluate(back, [given[i.name] for i in back.inputs])
    everything = fused(graph, tensors, cotangents)
    assert len(found) == len(wants)
    assert all(torch.equal(x, everything[name]) for name, x in zip(wants, found, strict=True))


@given(graphs())
def test_a_gradient_has_the_type_of_its_input(graph: ag.Graph) -> None:
    forward, back = ag.vjp(graph)
    floating = [i.spec.type for i in graph.inputs if i.spec.dtype.is_floating_point]
    assert [*back.output_types] == floating
    assert back.inputs[: len(graph.inputs)] == graph.inputs
    assert forward.output_types[: len(graph.outputs)] == graph.output_types
    assert set(residuals(forward)) <= set(forward.outputs)


@given(graphs(), seeds)
def test_a_gradient_in_the_graphs_own_dtypes_gives_what_it_infers(
    graph: ag.Graph, seed: int
) -> None:
    _, back = ag.vjp(graph)
    found = evaluate(back, tensors_for(back, seed), dtype=None)
    assert [(tuple(x.shape), x.dtype) for x in found] == [
        (t.shape, t.dtype) for t in back.output_types
    ]


def test_a_sink_of_minus_infinity_takes_nothing_from_a_row_that_sees_nothing() -> None:
    sinks = ag.TensorSpec((4,), F64)
    graph = ag.attention(
        *(X, X, X), q_lengths=ag.TensorSpec((2,), torch.int64), sinks=sinks, stats=True
    )
    assert [i.name for i in graph.inputs[3:]] == ["q_lengths", "sinks"]
    lengths = torch.tensor([2, 0])
    tensors = (
        *tensors_for(graph, 0)[:3],
        lengths,
        torch.tensor([0.5, -torch.inf, 1.0, 0.0]).to(F64),
    )
    check(graph, tensors, cotangents_for(graph, 0))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none(sinks: bool) -> None:
    graph = ag.attention(
        *(X, X, X),
        mask=ag.Keep(),
        keep=ag.TensorSpec((1, 1, 5, 5), torch.bool),
        soft_cap=5.0,
        bias=ag.TensorSpec((2, 4, 5, 5), F64),
        sinks=ag.TensorSpec((4,), torch.float32) if sinks else None,
        stats=True,
    )
    tensors, cotangents = tensors_for(graph, 0), cotangents_for(graph, 0)
    place = [i.name for i in graph.inputs].index("keep")
    keep = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    keep[:, :, 2] = False
    given = [keep if n == place else x for n, x in enumerate(tensors)]
    check(graph, given, cotangents)
    found = fused(graph, given, cotangents)
    assert (found["q"][:, :, 2] == 0).all()
    assert (found["bias"][:, :, 2] == 0).all()
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("fill", [0.0, 7.0, torch.nan])
def test_a_masked_score_that_is_handed_out_has_no_gradient(fill: float) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(q, k).mask(ag.Causal())
        return s.softmax()[0].weigh(v), s

    graph = ag.graph(attend, q=X, k=X, v=X)
    tensors, (do, ds) = tensors_for(graph, 0), cotangents_for(graph, 0)
    found = [
        fused(graph, tensors, (do, torch.where(torch.ones(5, 5).tril() > 0, ds, x)))
        for x in (fill, 0.0)
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in "qkv")


def test_scores_without_weight_have_no_gradient_whatever_cotangents_hold() -> None:
    p = torch.tensor([[0.5, 0.5], [0.0, 0.0]])[None, None]
    dp, dlse = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf]]), torch.tensor([3.0, torch.nan])
    (ds,) = SoftmaxGrad().run(p, dp[None, None], dlse[None, None])
    assert torch.equal(ds[0, 0], torch.tensor([[1.25, 1.75], [0.0, 0.0]]))


def test_an_input_that_no_output_depends_on_has_zeros() -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value, spare: ag.Value) -> ag.Value:
        return ag.scores(q, k).softmax()[1]

    graph = ag.graph(attend, q=X, k=X, v=X, spare=ag.TensorSpec((3, 0), torch.float16))
    found = fused(graph, tensors_for(graph, 1), cotangents_for(graph, 1))
    assert torch.equal(found["v"], torch.zeros_like(found["v"]))
    assert found["spare"].shape == (3, 0)
    assert found["q"].abs().sum() > 0


@pytest.mark.parametrize(("q", "k", "v"), [*product("xy", repeat=3)])
def test_an_input_read_twice_has_the_sum_of_its_gradients(q: str, k: str, v: str) -> None:
    def attend(**x: ag.Value) -> tuple[ag.Value, ag.Value]:
        p, lse = ag.scores(x[q], x[k]).mask(ag.Causal()).softmax()
        return p.weigh(x[v]), lse

    graph = ag.graph(attend, x=X, y=X)
    check(graph, tensors_for(graph, 2), cotangents_for(graph, 2))


def two_layers(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ag.Value]:
    first, stats = ag.scores(q, k).soft_cap(2.0).softmax()
    o = first.weigh(v)
    second, _ = ag.scores(o, k).mask(ag.Causal()).softmax()
    return second.weigh(v), stats


def test_the_gradient_of_two_layers_is_that_of_their_composition() -> None:
    graph = ag.graph(two_layers, q=X, k=X, v=X)
    tensors, (do, dstats) = tensors_for(graph, 4), cotangents_for(graph, 4)
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    s = 2 * torch.tanh(q @ k.mT / 8**0.5 / 2)
    o = torch.softmax(s, -1) @ v
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    o2 = torch.softmax((o @ k.mT / 8**0.5).masked_fill(~causal, -torch.inf), -1) @ v
    due = torch.autograd.grad([o2, torch.logsumexp(s, -1)], [q, k, v], [do, dstats])
    for found in (fused, stepwise):
        for x, y in zip(found(graph, tensors, [do, dstats]).values(), due, strict=True):
            torch.testing.assert_close(x, y, rtol=2.0**-40, atol=2.0**-40)  # 2^13 roundings


def test_inputs_may_be_called_like_cotangents_and_residuals() -> None:
    def attend(o: ag.Value, do: ag.Value, lse: ag.Value) -> ag.Value:
        return ag.scores(o, do).softmax()[0].weigh(lse)

    graph = ag.graph(attend, o=X, do=X, lse=X)
    _, back = ag.vjp(graph)
    names = [i.name for i in back.inputs]
    assert len(set(names)) == len(names)
    check(graph, tensors_for(graph, 3), cotangents_for(graph, 3))


def test_only_wanted_gradients_are_computed() -> None:
    graph = ag.attention(X, X, X, sinks=ag.TensorSpec((4,), torch.float32))
    (eqn,) = ag.vjp(graph, wants=["sinks", "k"])[1].eqns
    assert isinstance(eqn.op, AttentionGrad)
    assert eqn.op.wants == (False, True, False, True)
    assert eqn.op.names == ("dk", "dsinks")


def test_o_and_its_cotangent_are_laid_out_as_q_is() -> None:
    q = ag.TensorSpec((2, 4, 5, 8), torch.float16, layout="sbhd")
    k = ag.TensorSpec((2, 2, 7, 8), torch.float16)
    v = ag.TensorSpec((2, 2, 7, 3), torch.float16)
    _, back = ag.vjp(ag.attention(q, k, v))
    specs = {i.name: i.spec for i in back.inputs}
    assert specs["o"] == specs["do"] == ag.TensorSpec((2, 4, 5, 3), torch.float16, layout="sbhd")
    assert specs["lse"] == ag.TensorSpec((2, 4, 5), torch.float32)


@pytest.mark.parametrize(("given", "told"), [("o", "do"), ("lse", "dlse")])
def test_cotangents_are_of_the_named_outputs_alone(given: str, told: str) -> None:
    graph = ag.attention(X, X, X, stats=True)
    forward, back = ag.vjp(graph, cotangents=(given,))
    assert [i.name for i in back.inputs] == ["q", "k", "v", "o", "lse", told]
    tensors, cotangents = tensors_for(graph, 5), cotangents_for(graph, 5)
    named: dict[str, torch.Tensor | None] = dict(zip(("o", "lse"), cotangents, strict=True))
    kept = named[given]
    assert kept is not None
    found = evaluate(back, [*tensors, *evaluate(forward, tensors), kept])
    due = rule.expect_gradients(
        graph, tensors, [d if d is kept else torch.zeros_like(d) for d in cotangents]
    )
    for name, x in zip("qkv", found, strict=True):
        due[name].check(x.to(F64))


def test_all_outputs_have_cotangents_unless_some_are_named() -> None:
    graph = ag.attention(X, X, X, stats=True)
    assert ag.vjp(graph, cotangents=("lse", "o")) == ag.vjp(graph)
    assert ag.vjp(ag.attention(X, X, X), cotangents=("o",)) == ag.vjp(ag.attention(X, X, X))


@pytest.mark.parametrize("strange", [5, [5], "o"])
def test_cotangents_are_a_sequence_of_names(strange: Any) -> None:
    x = ag.TensorSpec((1, 2, 4, 8), torch.float32)
    with pytest.raises(ag.GraphError, match=r"5|write \('o',\)"):
        ag.vjp(ag.attention(x, x, x), cotangents=strange)


def test_a_cotangent_of_no_output_means_nothing() -> None:
    with pytest.raises(ag.GraphError, match="no output is named lse; there are o"):
        ag.vjp(ag.attention(X, X, X), cotangents=("o", "lse"))
    with pytest.raises(ag.GraphError, match="cotangents 'lse' is one name"):
        ag.vjp(ag.attention(X, X, X, stats=True), cotangents="lse")


@pytest.mark.parametrize(
    ("outputs", "due"),
    [(("o", "lse"), ["o"]), (("lse",), ["lse"]), (("lse", "p", "o"), ["p", "o"])],
)
def test_a_training_step_has_gradients_of_all_outputs_but_lse(
    outputs: tuple[str, ...], due: list[str]
) -> None:
    def attend(q: ag.Value, k: ag.Value, v: ag.Value) -> tuple[ag.Value, ...]:
        p, lse = ag.scores(q, k).softmax()
        values = {"p": p, "lse": lse, "o": p.weigh(v)}
        return tuple(values[name] for name in outputs)

    graph = ag.graph(attend, q=X, k=X, v=X)
    names = value_names(graph)
    assert [names[i] for i in main_outputs(graph)] == due


def test_the_page_on_gradients_runs_and_both_ways_agree() -> None:
    """By hand as by autograd, bit for bit: the same plans run."""
    text = (ROOT / "docs" / "gradients.md").read_text(encoding="utf-8")
    said: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, said)
    by_hand = (said["dq"], said["dk"], said["dv"])
    assert all(torch.equal(x, due) for x, due in zip(by_hand, said["due"], strict=True))
    assert said["found"].through_lse is not None


@pytest.mark.parametrize("op", parse.OPS)
def test_every_op_has_forward_mode_and_every_step_of_a_forward_reverse_mode(op: type[Op]) -> None:
    jvps = (AttentionJvp, SoftmaxJvp, SoftmaxGradJvp, SinkGradJvp, Bend, Spread)
    says_why = op is Quantise  # which rounds to 8 bits
    assert (op.push is Op.push) == (op in jvps or says_why)
    assert (op.push_problems is not Op.push_problems) >= says_why
    if not op.is_gradient and not says_why:
        assert op.pull is not Op.pull


@given(graph=st.one_of(graphs(), shuffled_graphs()))
def test_a_gradient_is_explained_without_one_of_its_own(graph: ag.Graph) -> None:
    _, backward = ag.vjp(graph)
    assert backward.is_gradient
    assert not backward.has_gradient
    assert ag.explain(backward, target="cpu").backward is None
    assert ag.compile(backward, target="cpu").explain().backward is None
