"""Forward mode as a graph: the laws that tangents and second derivatives obey."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import pytest
import torch
from attrs import frozen
from hypothesis import given

import attn_graph as ag
from attn_graph.extend import Place
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.storage.packing import Pack, Unpack
from attn_graph.ir.transforms.jvp import push_graph
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.spec import FLOATS, dense_like
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for
from tests.ir.test_text import stepwise_backward

Tensors = list[torch.Tensor]
X = ag.TensorSpec((1, 2, 5, 4), torch.float64)
CLOSE = 1e-9  # of numbers in float64 that two orders of the same sums give, relative to the largest


def floating(graph: ag.Graph) -> list[int]:
    """The inputs that have a tangent."""
    return [n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS]


def draw(graph: ag.Graph, seed: int, numbers: list[int]) -> Tensors:
    """A tangent, in float64, of each of these inputs."""
    random = torch.Generator().manual_seed(seed)
    shapes = [graph.inputs[n].spec.shape for n in numbers]
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding alone."""
    most = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * most)


def moderate(graph: ag.Graph, seed: int) -> Tensors:
    """Inputs with scores near 0: far from it, rounding of one exp outweighs all else."""
    return [*tensors_for(graph, seed - seed % 8)]


def tangents_of(graph: ag.Graph, tensors: Tensors, moves: Tensors) -> Tensors:
    """to and tlse, by the reference."""
    return [*ag.evaluate(ag.jvp(graph), [*tensors, *moves])][-2:]


def with_lse(graph: ag.Graph) -> ag.Graph:
    """The attention of a graph, which returns o and lse."""
    fused, first = ag.vjp(graph)[0], len(graph.inputs)
    return ag.Graph(fused.inputs, fused.eqns, (first, first + 1))


@given(graph=graphs(), seed=seeds)
def test_tangents_are_linear_and_the_transpose_of_gradients(graph: ag.Graph, seed: int) -> None:
    graph, tensors = with_lse(graph), moderate(graph, seed)
    numbers = floating(graph)
    one, two = draw(graph, seed, numbers), draw(graph, seed + 1, numbers)
    both = tangents_of(graph, tensors, [2 * a - b for a, b in zip(one, two, strict=True)])
    apart = (tangents_of(graph, tensors, x) for x in (one, two))
    for x, a, b in zip(both, *apart, strict=True):
        assert same(x, 2 * a - b)
    forward, backward = ag.vjp(graph)
    o, lse = ag.evaluate(forward, tensors)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    gradients = ag.evaluate(backward, [*tensors, o, lse, do, dlse])
    to, tlse = tangents_of(graph, tensors, one)
    pushed = (do * to).sum() + (dlse * tlse).sum()
    pulled = sum(((g * t).sum() for g, t in zip(gradients, one, strict=True)), torch.zeros(()))
    size = sum(float((g * t).abs().sum()) for g, t in zip(gradients, one, strict=True))
    assert abs(float(pushed - pulled)) <= CLOSE * max(1.0, size)


@given(graph=graphs(), seed=seeds)
def test_second_derivatives_are_symmetric_and_those_of_both_modes(
    graph: ag.Graph, seed: int
) -> None:
    """<u, jvp(vjp) t> = <t, jvp(vjp) u>, and vjp(vjp) by u, and vjp(jvp), give the same."""
    graph, tensors = with_lse(graph), moderate(graph, seed)
    numbers = floating(graph)
    t, u = draw(graph, seed, numbers), draw(graph, seed + 1, numbers)
    forward, backward = ag.vjp(graph)
    o, lse = ag.evaluate(forward, tensors)
    point = [*tensors, o, lse, torch.randn_like(o), torch.randn_like(lse)]
    names = tuple(graph.inputs[n].name for n in numbers)
    along = ag.jvp(backward, names)
    count = len(numbers)
    ht, hu = (ag.evaluate(along, [*point, *x])[count:] for x in (t, u))
    uht, thu = (
        sum(float((a * b).sum()) for a, b in zip(*pair, strict=True)) for pair in ((u, ht), (t, hu))
    )
    size = sum(float((a * b).abs().sum()) for a, b in zip(u, ht, strict=True))
    assert abs(uht - thu) <= 1e-7 * max(1.0, size)
    twice = ag.evaluate(ag.vjp(backward)[1], [*point, *t])
    assert all(same(a, b) for a, b in zip(twice, ht, strict=False))
    jvp = ag.jvp(graph)
    _, pulled = ag.vjp(jvp, cotangents=("to", "tlse"))
    values = ag.evaluate(jvp, [*tensors, *t])
    crossed = ag.evaluate(pulled, [*tensors, *t, *values, *point[-2:]])
    assert all(same(a, b) for a, b in zip(crossed, ht, strict=False))


@given(graph=graphs(), seed=seeds)
def test_single_steps_push_as_the_whole_does(graph: ag.Graph, seed: int) -> None:
    tensors = moderate(graph, seed)
    specs = [dense_like(graph.inputs[n].spec) for n in floating(graph)]
    steps = push_graph(graph, floating(graph), specs)
    assert not any(isinstance(eqn.op, AttentionJvp) for eqn in steps.eqns)
    inputs = [*tensors, *draw(graph, seed, floating(graph))]
    for a, b in zip(ag.evaluate(steps, inputs), ag.evaluate(ag.jvp(graph), inputs), strict=True):
        assert same(a.nan_to_num(), b.nan_to_num())
    assert ag.parse(str(steps)) == steps


@given(graph=graphs(), seed=seeds)
def test_a_gradient_in_single_steps_pushes_as_the_whole_does(graph: ag.Graph, seed: int) -> None:
    stepwise, tensors = stepwise_backward(graph), moderate(graph, seed)
    backward, results = ag.vjp(graph)[1], ag.evaluate(with_lse(graph), tensors)
    known = dict(zip((i.name for i in graph.inputs), tensors, strict=True))
    known |= zip(("o", "lse"), results, strict=True)
    random = torch.Generator().manual_seed(seed)
    moved = [i.name for i in stepwise.inputs if i.spec.dtype in FLOATS]
    for i in (*stepwise.inputs, *backward.inputs):
        if i.name not in known:
            known[i.name] = torch.randn(i.spec.shape, generator=random, dtype=torch.float64)
    tangents = {
        f"t{name}": torch.randn(known[name].shape, generator=random, dtype=torch.float64)
        for name in moved
    }
    numbers = [n for n, i in enumerate(stepwise.inputs) if i.name in moved]
    one = push_graph(stepwise, numbers, [stepwise.inputs[n].spec for n in numbers])
    two = ag.jvp(backward, [name for name in moved if name not in ("o", "lse")])
    a, b = (ag.evaluate(g, [(known | tangents)[i.name] for i in g.inputs]) for g in (one, two))
    assert all(same(x, y) for x, y in zip(a, b, strict=True))


def test_a_jvp_computes_what_the_forward_computes_once() -> None:
    graph = ag.jvp(ag.attention(X, X, X, mask=ag.Causal(), stats=("lse", "max")), ("q",))
    assert [type(eqn.op) for eqn in graph.eqns] == [AttentionJvp]
    assert [i.name for i in graph.inputs] == ["q", "k", "v", "tq"]
    assert len(graph.outputs) == 5  # o, lse, max, to, tlse


@pytest.mark.parametrize("T", [0, 5])
def test_a_maximum_of_packed_rows_has_no_tangent(T: int) -> None:
    x, starts = ag.TensorSpec((T, 2, 8), torch.float32), ag.TensorSpec((3,), torch.int32)

    def step(q: ag.Value, starts: ag.Value, lengths: ag.Value) -> tuple[ag.Value, ...]:
        x = q.then(Unpack(T), starts, lengths)
        s = ag.scores(x, x)
        return tuple(y.then(Pack(T), starts, lengths) for y in (s.softmax()[1], s.max_scores()))

    lengths = ag.TensorSpec((2,), torch.int32)
    graph = ag.graph(step, q=x, starts=starts, lengths=lengths)
    assert graph.constant_places == (1,)
    assert len(ag.jvp(graph, ("q",)).outputs) == 3


def test_tangents_of_what_the_forward_hands_over_are_computed_or_given() -> None:
    _, backward = ag.vjp(ag.attention(X, X, X))
    kinds = [type(getattr(eqn.op, "of", None)) for eqn in ag.jvp(backward, ("q",)).eqns]
    assert kinds == [type(None), Attention, AttentionGrad]
    kinds = [type(getattr(eqn.op, "of", None)) for eqn in ag.jvp(backward, ("q", "o", "lse")).eqns]
    assert kinds == [type(None), AttentionGrad]
    assert [type(eqn.op) for eqn in ag.jvp(backward, ("do",)).eqns] == [AttentionGrad] * 2
    with pytest.raises(ag.GraphError, match="not lse; name all of them"):
        ag.jvp(backward, ("q", "o"))
    with pytest.raises(ag.GraphError, match="no gradient by o"):
        ag.vjp(backward, wants=("q", "o"))


def test_what_has_no_derivative_is_refused_by_name() -> None:
    graph = ag.attention(X, X, X)
    with pytest.raises(ag.GraphError, match="jvp of a jvp"):
        ag.jvp(ag.jvp(graph))
    second = ag.vjp(ag.vjp(graph)[1])[1]
    for again in (ag.jvp, ag.vjp):
        with pytest.raises(ag.GraphError, match="third derivatives"):
            again(second)
    with pytest.raises(ag.GraphError, match="no floating input is named x; there are q, k, v"):
        ag.jvp(graph, ("x",))
    with pytest.raises(ag.GraphError, match="2 tangents for 3 operands"):
        AttentionJvp(Attention(), (True, True))
    with pytest.raises(ag.GraphError, match="go with a gradient, not a forward"):
        AttentionJvp(Attention(), (True,) * 3, with_tdo=True)


@final
@frozen
class Slanted(ag.Modifier):
    """s -> s + slope[h] * (j - i), with the slope trained; PyTorch makes its tangents."""

    additive = True
    hides = False
    detached: bool = False
    squared: bool = False

    @property
    def needs(self) -> dict[str, ag.Data]:
        return {"slope": ag.Data("h", FLOATS)}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("slope",)

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        slope = at.load("slope", at.h)
        slope = slope**2 if self.squared else slope
        moved: torch.Tensor = s + (slope.detach() if self.detached else slope) * (at.j - at.i)
        return moved

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        far = (ds * (at.j - at.i)).sum((0, 2, 3), keepdim=True)
        slope = 2 * at.load("slope", at.h) if self.squared else 1.0
        at.reading(totals).load("slope", at.h).add_(far * slope)


@final
@frozen
class Softened(ag.Modifier):
    """s -> s + tanh(s) / 2, of whose second derivative it says nothing."""

    hides = False

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s + s.tanh() / 2

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        x = s.clone()  # the inverse of change, by Newton's method
        for _ in range(30):
            x = x - (x + x.tanh() / 2 - s) / (1.5 - x.tanh() ** 2 / 2)
        return ds * (1.5 - x.tanh() ** 2 / 2)


def own(modifier: ag.Modifier) -> ag.Graph:
    """Attention with a step of one's own."""

    def attend(**x: ag.Value) -> tuple[ag.Value, ag.Value]:
        p, lse = ag.scores(x["q"], x["k"]).then(modifier, *(x[n] for n in modifier.needs)).softmax()
        return p.weigh(x["v"]), lse

    slopes = {name: ag.TensorSpec((2,), torch.float64) for name in modifier.needs}
    return ag.graph(attend, q=X, k=X, v=X, **slopes)


@pytest.mark.parametrize("modifier", [Slanted(), Softened()], ids=["slanted", "softened"])
def test_a_step_of_ones_own_is_differentiated_by_pytorch(modifier: ag.Modifier) -> None:
    plan = ag.compile(own(modifier), target="cpu")
    leaves = tuple(torch.randn(i.spec.shape, dtype=torch.float64) for i in plan.graph.inputs)
    leaves = tuple(x.requires_grad_() for x in leaves)
    assert torch.autograd.gradcheck(plan, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(plan, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_a_step_that_pytorch_differentiates_wrongly_is_refused_by_name() -> None:
    with pytest.raises(
        ag.GraphError, match=r"Slanted.spread and Slanted.collect are not derivatives of one step"
    ):
        ag.jvp(own(Slanted(detached=True)))
    with pytest.raises(ag.GraphError, match=r"change has to be linear"):
        ag.jvp(own(Slanted(squared=True)))
