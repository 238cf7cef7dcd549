"""An attention that keeps its weights is the same attention, with the same derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.modifiers import SoftCap
from attn_graph.ir.passes import keep_weights, simplify
from attn_graph.ir.reference import evaluate
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.ir.transforms.vjp import backward, cotangent_specs
from attn_graph.testing.strategies import Shape, masks, seeds, shapes
from attn_graph.testing.tensors import tensors_for

RATES = st.sampled_from((0.0, 0.3, 0.9))
BARE = shapes(most=12).filter(lambda s: 0 not in (s.B, s.H, s.M, s.N))


@st.composite
def bare_graphs(draw: st.DrawFn) -> ag.Graph:
    """Attention under a mask that reads no tensor, or under none, with a bias or none, and with
    dropout or none, in float64."""
    size: Shape = draw(BARE)
    mask = draw(st.one_of(st.none(), masks(size).filter(lambda mask: not mask.needs)))
    q, k, v = (ag.TensorSpec(x, torch.float64) for x in (size.q, size.k, size.v))
    full = (size.B, size.H, size.M, size.N)
    axes = draw(st.none() | st.tuples(*(st.sampled_from((1, n)) for n in full)))
    bias = None if axes is None else ag.TensorSpec(axes, torch.float64)
    return ag.attention(q, k, v, mask=mask, bias=bias, dropout=draw(RATES))


def kept(graph: ag.Graph) -> ag.Graph:
    """The graph that keeps its weights."""
    made = keep_weights(simplify(graph))
    assert made is not None
    return made


@given(graph=bare_graphs(), seed=seeds)
def test_weights_are_those_of_the_softmax(graph: ag.Graph, seed: int) -> None:
    tensors = tensors_for(graph, seed)
    (eqn,) = kept(graph).eqns
    o, weights = eqn.op.run(*tensors)
    due, lse = simplify(graph).eqns[0].op.run(*tensors)
    torch.testing.assert_close(o, due)
    seen = (lse != -torch.inf).to(weights.dtype)
    torch.testing.assert_close(weights.abs().sum(-1), seen)
    heads = tensors[2].repeat_interleave(o.shape[1] // tensors[2].shape[1], 1)
    rate = simplify(graph).eqns[0].op.dropout  # type: ignore[attr-defined]  # of an Attention
    torch.testing.assert_close(weights.clamp(min=0) @ heads / (1 - rate), due)


@given(graph=bare_graphs(), seed=seeds)
def test_gradients_by_weights_are_those_by_lse(graph: ag.Graph, seed: int) -> None:
    """Also where do is not finite in rows that see nothing."""
    tensors = tensors_for(graph, seed)
    (by_lse,), (eqn,) = simplify(graph).eqns, kept(graph).eqns
    assert isinstance(by_lse.op, Attention)
    assert isinstance(eqn.op, Attention)
    o, lse = by_lse.op.run(*tensors)
    do = torch.randn_like(o).masked_fill((lse == -torch.inf)[..., None], torch.nan)
    wants = eqn.op.trains
    _, weights = eqn.op.run(*tensors)
    made = AttentionGrad(eqn.op, wants).run(*tensors, weights, do)
    dues = AttentionGrad(by_lse.op, wants).run(*tensors, o, lse, do)
    for gradient, due in zip(made, dues, strict=True):
        torch.testing.assert_close(gradient, due)


def names_of(graph: ag.Graph) -> tuple[str, ...]:
    """The inputs that have a gradient: q, k, v and a bias."""
    return tuple(i.name for i in graph.inputs if i.spec.dtype.is_floating_point)


def gradient_of(graph: ag.Graph) -> ag.Graph:
    """The gradient's graph by all of `names_of`."""
    wants = [n for n, i in enumerate(graph.inputs) if i.spec.dtype.is_floating_point]
    return backward(graph, wants, cotangent_specs(graph, graph.outputs))


def test_a_gradient_reads_weights_and_no_attention_again() -> None:
    graph = kept(ag.attention(*[ag.TensorSpec((1, 2, 8, 4), torch.float32)] * 3))
    gradient = gradient_of(graph)
    assert [i.name for i in gradient.inputs] == ["q", "k", "v", "weights", "do"]
    assert [type(eqn.op) for eqn in gradient.eqns] == [AttentionGrad]
    assert gradient.carried == {3}


@given(graph=bare_graphs(), seed=seeds)
def test_second_derivatives_are_those_of_the_same_without_weights(
    graph: ag.Graph, seed: int
) -> None:
    """Reverse over reverse, and forward over reverse."""
    tensors, simple = tensors_for(graph, seed), simplify(graph)
    eqn = kept(graph).eqns[0]
    o, lse = simple.eqns[0].op.run(*tensors)
    _, weights = eqn.op.run(*tensors)
    do, *moved = (torch.randn_like(x) for x in (o, *tensors) if x.is_floating_point())
    plain, own = gradient_of(simple), gradient_of(kept(graph))
    given_plain, given_own = (*tensors, o, lse, do), (*tensors, weights, do)

    def run(graph: ag.Graph, *operands: torch.Tensor) -> list[torch.Tensor]:
        return [*evaluate(graph, operands)]

    names = names_of(simple)
    second = [ag.vjp(x, (*names, "do"))[1] for x in (plain, own)]
    pairs = zip(
        run(second[0], *given_plain, *moved), run(second[1], *given_own, *moved), strict=True
    )
    for due, made in pairs:
        torch.testing.assert_close(made, due)
    pushed = [ag.jvp(x, names) for x in (plain, own)]
    pairs = zip(
        run(pushed[0], *given_plain, *moved), run(pushed[1], *given_own, *moved), strict=True
    )
    for due, made in pairs:
        torch.testing.assert_close(made, due)


def test_more_than_a_softmax_under_a_mask_keeps_no_weights() -> None:
    x = ag.TensorSpec((1, 2, 8, 4), torch.float32)
    assert keep_weights(simplify(ag.attention(x, x, x, soft_cap=3.0))) is None
    assert keep_weights(simplify(ag.attention(x, x, x, stats=True))) is None
    bias = ag.TensorSpec((1, 2, 8, 8), torch.float32)
    assert keep_weights(simplify(ag.attention(x, x, x, bias=bias, soft_cap=3.0))) is None
    assert keep_weights(gradient_of(simplify(ag.attention(x, x, x)))) is None
    with pytest.raises(
        ag.GraphError, match="weights of a softmax of scores and a bias under a mas"
    ):
        Attention(modifiers=(SoftCap(3.0),), keeps=True)
    with pytest.raises(ag.GraphError, match="by kept weights it takes do and no dlse"):
        AttentionGrad(Attention(keeps=True), (True,) * 3, with_dlse=True)
    with pytest.raises(ag.GraphError, match="which have no tangent"):
        AttentionJvp(Attention(keeps=True), (True,) * 3)


def test_wrong_types_are_named() -> None:
    q = ag.TensorSpec((1, 2, 8, 4), torch.float32).type
    weights = ag.TensorSpec((1, 2, 8, 9), torch.float32).type
    op = AttentionGrad(Attention(keeps=True), (True,) * 3)
    assert [*op.problems(q, q, q, weights, q)] == [
        "attention_grad: weights f32[1, 2, 8, 9] should be f32[1, 2, 8, 8]"
    ]


def test_a_graph_that_keeps_weights_is_read_back_from_its_text() -> None:
    graph = kept(ag.attention(*[ag.TensorSpec((1, 2, 8, 4), torch.float32)] * 3, mask=ag.Causal()))
    for each in (graph, gradient_of(graph)):
        assert ag.parse(str(each)) == each
