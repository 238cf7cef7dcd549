"""Small graphs for self-checks: what a kernel is made for stays, and sizes shrink."""

from __future__ import annotations

import torch
from hypothesis import given, reject
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.instruments.pictures import masks_of
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.packed import Packed
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.problem import Problem, facts_of
from attn_graph.lowering.small_graphs import shrink
from attn_graph.testing.strategies import graphs
from tests.support.ragged import Case, packed_cases

sizes = st.integers(1, 300)


def problem_of(graph: ag.Graph) -> Problem:
    """The attention that a graph is, padded where it is on packed tensors."""
    lying = facts_of(graph).once(Lying.for_libraries)
    if lying is None or lying.stepped.node.dropout or lying.stepped.is_empty:
        reject()  # as backends do
    return lying.stepped


def check_shrunk(graph: ag.Graph, M: int, N: int) -> ag.Graph:
    """A graph with these sizes, few heads and dense tensors, that its text gives back."""
    problem = problem_of(graph)
    small = shrink(graph, problem, M, N)
    after = problem_of(small)
    assert ag.parse(str(small)) == small
    assert (after.node, after.dtype) == (problem.node, problem.dtype)
    batch, heads, group = (min(n, 2) for n in (problem.B, problem.G, problem.H // problem.G))
    few = {"B": batch, "G": heads, "H": heads * group, "D": problem.D, "E": problem.E}
    assert few == {axis: getattr(after, axis) for axis in few}
    read = {n for eqn in small.eqns for n in eqn.args if n < len(small.inputs)}
    specs = [small.inputs[n].spec for n in read]
    assert specs == [ag.TensorSpec(x.shape, x.dtype) for x in specs]  # dense
    assert [(i.name, i.spec.dtype) for i in small.inputs] == [
        (i.name, i.spec.dtype) for i in graph.inputs
    ]
    return small


def passes(graph: ag.Graph) -> list[ag.Graph]:
    """The forward, and the gradient where there is one."""
    back = [ag.vjp(graph)[1]] if graph.has_gradient and graph.inputs else []
    return [*map(simplify, (graph, *back))]


@given(graph=graphs(), M=sizes, N=sizes)
def test_an_attention_and_its_gradient_keep_all_but_their_sizes(
    graph: ag.Graph, M: int, N: int
) -> None:
    for each in passes(graph):
        small = problem_of(check_shrunk(each, M, N))
        assert (small.M, small.N) == (M, N)


def test_what_is_broadcast_stays_so() -> None:
    x = ag.TensorSpec((4, 8, 100, 64), torch.float16)
    bias = ag.TensorSpec((1, 8, 1, 100), torch.float16)
    small = check_shrunk(simplify(ag.attention(x, x, x, bias=bias)), 20, 30)
    assert [i.spec.shape for i in small.inputs] == [
        *((2, 2, 20, 64), (2, 2, 30, 64), (2, 2, 30, 64)),
        (1, 2, 1, 30),
    ]


@given(case=packed_cases(dtype=torch.float16, stats=True), M=sizes, N=sizes)
def test_packed_tensors_have_as_many_rows_together(case: Case, M: int, N: int) -> None:
    for each in passes(case.graph):
        small = check_shrunk(each, M, N)
        (op,) = {eqn.op for eqn in small.eqns if isinstance(eqn.op, Packed)}
        rows = {i.name: i.spec.shape[0] for i in small.inputs if i.name in "qk"}
        assert (rows["q"] if "rows" in op.sides else M) == M
        assert (rows["k"] if "keys" in op.sides else N) == N


@given(case=packed_cases(dtype=torch.float16, stats=True))
def test_axes_of_packed_operands_and_results_have_one_size_each(case: Case) -> None:
    for graph in passes(case.graph):
        for eqn in graph.eqns:
            if not isinstance(eqn.op, Packed):
                continue
            shapes = [graph.types[n].shape for n in eqn.args]
            shapes += [x.shape for x in eqn.outs]
            roles = (*eqn.op.takes, *eqn.op.gives)
            fixed = [x for x in zip(roles, shapes, strict=True) if not x[0].data]
            sizes = {pair for role, n in fixed for pair in zip(role.axes, n, strict=True)}
            assert len({axis for axis, _ in sizes}) == len(sizes)
            assert all(role.rank == len(n) for role, n in fixed)


@given(case=packed_cases(dtype=torch.float16))
def test_a_packed_attention_has_a_picture_of_its_mask(case: Case) -> None:
    *_, eqn = (graph := simplify(case.graph)).eqns
    if isinstance(eqn.op, Packed):
        (type_q, type_k, *_) = eqn.op.padded([graph.types[n] for n in eqn.args])
        shown = [*masks_of(graph, eqn)]
        assert shown == [(eqn.op.attention.mask, type_q.shape[2], type_k.shape[2])]
