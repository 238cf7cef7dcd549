"""A mapped graph gives what a loop over its entries gives, and so do its derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import assume, given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.layouts import result_spec
from attn_graph.ir.storage.packed import Packed
from attn_graph.spec import FLOATS
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.rule import expect_outputs
from attn_graph.testing.strategies import graphs, seeds
from attn_graph.testing.tensors import tensors_for
from tests.support.quantised import kinds, quantise_graph

F32, F64, I64 = torch.float32, torch.float64, torch.int64
CPU = ag.Target.of("cpu")
CLOSE = 1e-11  # of float64, whose products may add up in another order
Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]


@frozen(repr=False)
class Case:
    """A graph, what is mapped of it, the mapped graph, and tensors for that."""

    graph: ag.Graph
    axes: Mapping[str, int]
    size: int
    mapped: ag.Graph
    tensors: Tensors

    @property
    def entries(self) -> list[Tensors]:
        """The tensors of each entry."""
        pairs = [*zip(self.graph.inputs, self.tensors, strict=True)]
        return [tuple(self.entry(i.name, x, n) for i, x in pairs) for n in range(self.size)]

    def entry(self, name: str, x: Tensor, n: int) -> Tensor:
        """Entry n of an input."""
        return x.select(self.axes[name], n) if name in self.axes else x

    @property
    def moderate(self) -> Case:
        """The same with inputs near 1, where sums in another order differ little."""
        floating = draw_like([x for x in self.tensors if x.is_floating_point()], 0)
        each = iter(floating)
        return evolve(
            self, tensors=tuple(next(each) if x.is_floating_point() else x for x in self.tensors)
        )

    def __repr__(self) -> str:
        return f"map {self.axes} of {self.size}: {self.graph}"


def draw_like(xs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Random tensors in float64, of these shapes."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=random, dtype=F64) for x in xs]


@st.composite
def cases(draw: st.DrawFn, given: st.SearchStrategy[ag.Graph] | None = None) -> Case:
    """Of any graph that can be mapped, or of these."""
    graph = draw(graphs() if given is None else given)
    size, kind = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    names = [i.name for i in graph.inputs if i.spec.shape]
    axes = dict.fromkeys(names, int(kind == 1))
    if kind == 3:
        axes = {n: draw(st.integers(0, 1)) for n in names if draw(st.booleans())}
    assume(axes)
    mapped = attempt(graph, axes, size)
    assume(mapped is not None)
    assert mapped is not None
    return Case(graph, axes, size, mapped, tensors_for(mapped, draw(seeds)))


def attempt(graph: ag.Graph, axes: Mapping[str, int], size: int) -> ag.Graph | None:
    """The mapped graph; None where it is refused, by what is known to be."""
    try:
        return ag.vmap(graph, axes, size=size)
    except ag.GraphError as error:
        problems = error.problems
    known = ["copy", "dropout draws", "your own", "ALiBi", "share a key", "has no axis"]
    known += ["not dense", "one for all"]
    assert all(any(word in text for word in known) for text in problems), problems
    return None


def is_same(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, but for the order of sums in float64."""
    scale = max(1.0, float(y.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if y.numel() else 1.0)
    alike = x.shape == y.shape and x.dtype == y.dtype
    return alike and torch.allclose(x, y, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True)


@given(case=cases())
def test_a_mapped_graph_is_the_loop(case: Case) -> None:
    """And its plan gives what the graph says."""
    every = [ag.evaluate(case.graph, entry) for entry in case.entries]
    results = ag.evaluate(case.mapped, case.tensors)
    for x, each in zip(results, zip(*every, strict=True), strict=True):
        assert is_same(x, torch.stack(each))
    assert ag.parse(str(case.mapped)) == case.mapped
    plan = ag.compile(case.mapped, target=CPU)
    results = run_plan(plan, case.tensors)
    for n, x in zip(plan.graph.outputs, results, strict=True):
        assert ag.TensorSpec.like(x) == result_spec(plan.graph, n)
    for n, entry in enumerate(case.entries):
        for x, due in zip(results, expect_outputs(case.graph, entry), strict=True):
            due.check(x[n])


@st.composite
def quantised(draw: st.DrawFn) -> ag.Graph:
    names = draw(st.sampled_from(["kv", "qkv"]))
    plain = draw(graphs(dtype=st.just(torch.bfloat16)) if "q" in names else graphs())
    return quantise_graph(plain, draw(kinds), draw(seeds), names)


@given(case=cases(quantised()))
def test_mapped_quantised_graphs_give_what_the_graph_says(case: Case) -> None:
    results = run_plan(ag.compile(case.mapped, target=CPU), case.tensors)
    for n, entry in enumerate(case.entries):
        for x, due in zip(results, expect_outputs(case.graph, entry), strict=True):
            due.check(x[n])


def test_scales_are_shared_and_fused_again() -> None:
    q, k = ag.TensorSpec((2, 4, 3, 8), F32), ag.TensorSpec((2, 2, 5, 8), torch.int8)
    scale = ag.TensorSpec((1, 1, 1, 1), F32)
    graph = ag.attention(q, k, k, k_scale=scale, v_scale=scale)
    plan = ag.compile(ag.vmap(graph, {"q": 0, "k": 0, "v": 0}, size=3), target=CPU)
    (fused,) = (eqn.op for eqn in plan.graph.eqns if isinstance(eqn.op, Packed))
    assert fused.scaled
    assert plan.graph.inputs[3].spec == scale


@given(case=cases(), seed=seeds)
def test_gradients_are_those_of_entries_and_sums_for_what_they_share(case: Case, seed: int) -> None:
    case = case.moderate
    forward, backward = ag.vjp(case.mapped)
    values, count = ag.evaluate(forward, case.tensors), len(case.graph.differentiable_outputs)
    cotangents = draw_like(values[:count], seed)
    own_forward, own_backward = ag.vjp(case.graph)
    every = []
    for n, entry in enumerate(case.entries):
        saved = saved_of(own_forward, own_backward, entry)
        moved = (x[n] for x in cotangents)
        every.append(ag.evaluate(own_backward, [*entry, *saved, *moved]))
    saved = saved_of(forward, backward, case.tensors)
    results = ag.evaluate(backward, [*case.tensors, *saved, *cotangents])
    floating = [i.name for i in case.graph.inputs if i.spec.dtype in FLOATS]
    for name, x, each in zip(floating, results, zip(*every, strict=True), strict=True):
        due = torch.stack(each, case.axes[name]) if name in case.axes else torch.stack(each).sum(0)
        assert is_same(x, due)


def saved_of(forward: ag.Graph, backward: ag.Graph, tensors: Tensors) -> list[Tensor]:
    """What a backward reads of its forward, by the shapes that it declares."""
    values = [*ag.evaluate(forward, tensors)]
    first = len(tensors)
    carried = [backward.inputs[n].spec.shape for n in sorted(backward.carried)]
    assert sorted(backward.carried) == [*range(first, first + len(carried))]
    return [next(x for x in reversed(values) if x.shape == shape) for shape in carried]


@given(case=cases(), seed=seeds)
def test_tangents_of_a_mapped_graph_are_those_of_entries(case: Case, seed: int) -> None:
    case = case.moderate
    names = [i.name for i in case.graph.inputs if i.spec.dtype in FLOATS]
    own, whole = ag.jvp(case.graph, names), ag.jvp(case.mapped, names)
    moves = draw_like([x for x in case.tensors if x.is_floating_point()], seed)
    every = []
    for n, entry in enumerate(case.entries):
        pairs = zip(names, moves, strict=True)
        every.append(ag.evaluate(own, [*entry, *(case.entry(name, x, n) for name, x in pairs)]))
    results = ag.evaluate(whole, [*case.tensors, *moves])
    for x, each in zip(results, zip(*every, strict=True), strict=True):
        assert is_same(x, torch.stack(each))


@given(case=cases(), seed=seeds)
def test_a_mapped_gradient_is_the_loop(case: Case, seed: int) -> None:
    """Of a backward whose every input is mapped."""
    case = case.moderate
    forward, backward = ag.vjp(case.graph)
    axes = {i.name: 0 for i in backward.inputs if i.spec.shape}
    mapped = attempt(backward, axes, case.size)
    assume(mapped is not None)
    assert mapped is not None
    entries = []
    for n, entry in enumerate(case.entries):
        saved = saved_of(forward, backward, entry)
        rest = backward.inputs[len(entry) + len(saved) :]
        random = torch.Generator().manual_seed(seed + n)
        moved = (torch.randn(i.spec.shape, generator=random, dtype=F64) for i in rest)
        entries.append([*entry, *saved, *moved])
    stacked = [
        torch.stack(each) if each[0].ndim else each[0] for each in zip(*entries, strict=True)
    ]
    every = [ag.evaluate(backward, entry) for entry in entries]
    for x, each in zip(ag.evaluate(mapped, stacked), zip(*every, strict=True), strict=True):
        assert is_same(x, torch.stack(each))


Q = ag.TensorSpec((2, 4, 16, 8), F32)
K = ag.TensorSpec((2, 2, 16, 8), F32)
LENGTHS = ag.TensorSpec((2,), I64)
PLAIN = ag.attention(Q, K, K, kv_lengths=LENGTHS)


def refusal(graph: ag.Graph, axes: int | Mapping[str, int | None], **more: object) -> str:
    """Why an axis can't be mapped."""
    with pytest.raises(ag.GraphError) as error:
        ag.vmap(graph, axes, **({"size": 3} | more))  # type: ignore[arg-type]  # of any kind
    return str(error.value)


def test_copies_that_would_help_are_named_and_help() -> None:
    assert "bring a copy, kv_lengths.expand(3, *kv_lengths.shape).contiguous(), mapped at 0" in (
        refusal(PLAIN, {"q": 0, "k": 0, "v": 0})
    )
    assert "q.movedim(3, 1).contiguous(), mapped at 1" in refusal(
        PLAIN, {"q": 3, "k": 1, "v": 1, "kv_lengths": 1}
    )
    ag.vmap(PLAIN, {"q": 0, "k": 0, "v": 0, "kv_lengths": 0}, size=3)
    ag.vmap(PLAIN, {"q": 1, "k": 1, "v": 1, "kv_lengths": 1}, size=3)


def test_the_axis_becomes_a_part_of_the_heads_where_the_batch_does_not_take_it() -> None:
    sinks = ag.TensorSpec((4,), F32)
    graph = ag.attention(Q, K, K, sinks=sinks)
    specs = {
        name: ag.TensorSpec((3, *x.shape), F32, (x.shape[1] * 128, 3 * x.shape[1] * 128, 128, 8, 1))
        for name, x in {"q": Q, "k": K, "v": K}.items()
    }
    mapped = ag.vmap(graph, 0, size=3, specs=specs)
    assert "into=1" in str(mapped)
    assert "attention(x, x2, x3, x4," in str(mapped)
    shared = ag.vmap(PLAIN, {"q": 2}, size=3)  # queries of three calls over the same keys
    assert "fold(q, axis=2, into=1, size=3, before=False)" in str(shared)
    assert "fold(k" not in str(shared)


def test_what_a_loop_computes_otherwise_is_refused() -> None:
    drops = ag.attention(Q, K, K, dropout=0.5)
    assert "dropout draws by batch entry and head" in refusal(drops, {"q": 2, "k": 2, "v": 2})
    assert "seed is one number for all entries" in refusal(
        drops, {"q": 0, "k": 0, "v": 0, "seed": 0}
    )
    heads = {"q": 2, "k": 2, "v": 2}
    assert "ALiBi" in refusal(ag.attention(Q, Q, Q, alibi=True), heads)
    mapped = ag.vmap(ag.attention(Q, K, K), 0, size=3)
    assert "only whole attentions are mapped" in refusal(mapped, 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_entries_drop_out_what_each_does_alone(batch: int) -> None:
    x, number = ag.TensorSpec((batch, 2, 7, 4), F64), torch.tensor(3)
    graph = ag.attention(x, x, x, dropout=0.5)
    mapped = ag.vmap(graph, {"q": 0, "k": 0, "v": 0}, size=3)
    one = draw_like([torch.ones(x.shape)] * 3, 0)
    alike = [t.expand(3, *t.shape).contiguous() for t in one]
    o = ag.compile(mapped, target=CPU)(*alike, number, number)
    assert isinstance(o, torch.Tensor)
    assert is_same(o[0], o[2])
    (alone,) = ag.evaluate(graph, (*one, number, number))
    assert is_same(o[1], alone)
    assert ag.parse(str(mapped)) == mapped
    assert f"origin=(0, 0, 0, 0, 2, {batch})" in str(mapped)


def test_wrong_names_places_and_specs_are_refused() -> None:
    assert "no input is named w" in refusal(PLAIN, {"w": 0})
    assert "in_axes 5 of q is not in 0 to 4" in refusal(PLAIN, {"q": 5})
    assert "without the axis there is nothing to map" in refusal(PLAIN, {"q": None})
    assert "not a whole number of at least 1" in refusal(PLAIN, 0, size=0)
    assert "specs name k, which is not mapped" in refusal(PLAIN, {"q": 0}, specs={"k": K})
    assert "q f32[2, 4, 16, 8] should be" in refusal(PLAIN, {"q": 0}, specs={"q": Q})
    odd = ag.TensorSpec(Q.shape, F32, layout="bshd")
    assert "pass its spec in specs=" in refusal(ag.attention(odd, odd, odd), 1)


def test_every_backend_sees_one_call_with_a_larger_batch() -> None:
    x = ag.TensorSpec((2, 4, 128, 64), torch.float16)
    mapped = ag.vmap(ag.attention(x, x, x, mask=ag.Causal()), 0, size=3)
    known = ag.explain(mapped, target="h200")
    plain = ag.TensorSpec((6, 4, 128, 64), torch.float16)
    due = ag.explain(ag.attention(plain, plain, plain, mask=ag.Causal()), target="h200")
    assert known.backend == due.backend
    assert known.cost == due.cost
    assert [r.backend for r in known.refusals] == [r.backend for r in due.refusals]
    assert "q f16[3, 2, 4, 128, 64] is seen as f16[6, 4, 128, 64]" in str(known)


def test_autograd_goes_through_a_mapped_plan() -> None:
    one = ag.TensorSpec((1, 4, 16, 8), F64)
    graph = ag.attention(one, one, one, mask=ag.Causal(), stats=True)
    plan = ag.compile(ag.vmap(graph, {"q": 0}, size=3), target=CPU)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(3, 1, 4, 16, 8, dtype=F64, generator=random, requires_grad=True)
    k, v = (
        torch.randn(1, 4, 16, 8, dtype=F64, generator=random, requires_grad=True) for _ in range(2)
    )
    run = ag.compile(graph, target=CPU)

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        every = [run(x, k, v) for x in q]
        return tuple(torch.stack(x) for x in zip(*every, strict=True))

    assert torch.autograd.gradcheck(lambda *x: plan(*x), (q, k, v), fast_mode=True)
    results = []
    for way in (plan, each):
        o, lse = way(q, k, v)
        (dq,) = torch.autograd.grad(o.square().sum() + lse.sum(), q, create_graph=True)
        (dk,) = torch.autograd.grad(dq.square().sum(), k)
        results.append((o, lse, dq, dk))
    for x, due in zip(*results, strict=True):
        assert is_same(x.detach(), due.detach())


def test_empty_batches_and_heads_are_refused_like_others() -> None:
    empty = ag.TensorSpec((2, 0, 1, 3), F32)
    assert "bring a copy" in refusal(ag.attention(empty, empty, empty), {"k": 2})
    none = ag.TensorSpec((0, 2, 3, 4), F32)
    bias = ag.TensorSpec((1, 1, 3, 3), F32)
    assert "broadcasts" in refusal(ag.attention(none, none, none, bias=bias), 0)
