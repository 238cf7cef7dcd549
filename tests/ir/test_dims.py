"""Sizes by name: what Dims are, and that what is made of a graph with them binds as it should."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.errors import GraphError
from attn_graph.ir.passes import simplify
from attn_graph.ir.transforms.binding import bind_graph, replace_sizes
from attn_graph.spec import memory_order
from attn_graph.spec.dims import are_numbers, surely_least
from attn_graph.testing.strategies import Shape, graphs, shapes

B, M, N, T = ag.Dim("B", most=8), ag.Dim("M", most=40), ag.Dim("N", most=60), ag.Dim("T", most=99)


@st.composite
def named_shapes(draw: DrawFn) -> Shape:
    """Shapes whose B, M and N may have names; M and N one name where they are equal."""
    shape = draw(shapes(20))
    known = {"B": shape.B, "M": shape.M, "N": shape.N}
    dims = {name: ag.Dim(name, most=max(1, n)) for name, n in known.items() if draw(st.booleans())}
    if shape.M == shape.N and draw(st.booleans()):
        dims |= dict.fromkeys(("M", "N"), ag.Dim("S", most=max(1, shape.M)))
    return evolve(shape, **dims)


@st.composite
def named_graphs(draw: DrawFn) -> ag.Graph:
    """Graphs of all that `attention` takes, in which some sizes have names."""
    graph = draw(graphs(shape=named_shapes()))
    assume(graph.symbols)
    return graph


def draw_sizes(data: st.DataObject, graph: ag.Graph) -> dict[str, int]:
    """Numbers for the names of a graph."""
    return {x.name: data.draw(st.integers(0, x.most), label=x.name) for x in graph.symbols}


# Dims

numbers = st.one_of(st.integers(-3, 3), st.sampled_from([B, M, N]))
SIZES = {"B": 3, "M": 11, "N": 7, "T": 5}


def number(x: int, sizes: Mapping[str, int] = SIZES) -> int:
    """What a size is."""
    return x.bind(sizes) if isinstance(x, ag.Dim) else x


@given(numbers, numbers, numbers, st.integers(1, 9))
def test_dims_add_multiply_and_divide_as_what_they_stand_for(
    a: int, b: int, c: int, d: int
) -> None:
    for x, due in (
        ((a - b) // d * c, (number(a) - number(b)) // d * number(c)),
        (-(-(a * d + b) // d), number(a) - -number(b) // d),
        ((a // d + b) // 3 % d, (number(a) // d + number(b)) // 3 % d),
        (a + b - c, number(a) + number(b) - number(c)),
        (a * b + c, number(a) * number(b) + number(c)),
        ((a - b) * (a + c), (number(a) - number(b)) * (number(a) + number(c))),
        (-a * 4 - 1, -number(a) * 4 - 1),
    ):
        assert number(x) == due
        assert surely_least(x) <= due
        assert eval(str(x), {}, SIZES) == due
    assert a - a == 0
    assert (a + b) * c == c * b + a * c
    assert (a + 1) - 1 == a


def test_a_dim_is_equal_to_itself_alone() -> None:
    assert ag.Dim("B", most=8) == B
    assert ag.Dim("B", most=9) != B
    assert B != 8
    assert len({B, 8, ag.Dim("B", most=8), B + 1}) == 3
    assert pickle.loads(pickle.dumps(B + 1)) == B + 1
    assert copy.deepcopy(B) is B
    assert int(B) == 8
    assert are_numbers(8)
    assert not are_numbers(8, B)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (B, "B"),
        (B + 1, "B + 1"),
        (1 - M, "1 - M"),
        (N - M, "N - M"),
        (16 * M * N + 2 * B - 3, "16*M*N + 2*B - 3"),
        (-(-M // 64), "-(-M // 64)"),
        ((64 * N + B + 1) // 64 * B, "((B + 1) // 64)*B + B*N"),
    ],
)
def test_dims_print_as_python(size: int, text: str) -> None:
    assert str(size) == repr(size) == f"{size}" == text


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ag.Dim("no name", most=3), "'no name' is not a name"),
        (lambda: ag.Dim("B"), "its largest size is missing; write Dim"),
        (lambda: ag.Dim("B", most=0), "most 0 is not a whole number"),
        (lambda: ag.Dim("B", classes=(4, 2)), "are ascending sizes"),
        (lambda: ag.Dim("B", most=4, classes=(2, 4)), "in place of most"),
        (lambda: B // 0, r"\(B\) // 0: sizes divide by whole numbers of at least 1"),
        (lambda: N // B, r"\(N\) // B: sizes divide by whole numbers of at least 1"),
        (lambda: ag.doubling(8, 4), "1 <= least <= most, got 8 and 4"),
        (lambda: ag.doubling(1, float("inf")), "whole numbers, .* got 1 and inf"),  # type: ignore[arg-type]  # is wrong
        (lambda: ag.doubling(1.5, 4), "whole numbers"),  # type: ignore[arg-type]  # is wrong
        (lambda: ag.Dim("__debug__", most=3), "'__debug__' is not a name"),
        (lambda: ag.Dim("\N{LATIN SMALL LIGATURE FI}", most=3), "is not a name"),
        (lambda: ag.Dim("B", classes=(1.5, 2)), "are not whole numbers"),  # type: ignore[arg-type]  # is wrong
        (lambda: B.fit("x"), "is not a whole number"),  # type: ignore[arg-type]  # is wrong
        (lambda: B.fit(9), "no size up to 8 is at least 9"),
    ],
)
def test_wrong_dims_are_refused(make: object, problem: str) -> None:
    assert callable(make)
    with pytest.raises(GraphError, match=problem):
        make()


def test_classes_are_the_sizes_that_a_dim_stands_for() -> None:
    n = ag.Dim("N", classes=ag.doubling(256, 3000))
    assert n.symbols[0].classes == (256, 512, 1024, 2048, 3000)
    assert [n.fit(size) for size in (1, 256, 257, 2049, 3000)] == [256, 256, 512, 3000, 3000]
    assert int(n) == 3000


# Graphs


@given(named_graphs())
def test_graphs_with_dims_print_and_parse(graph: ag.Graph) -> None:
    assert ag.parse(str(graph)) == graph
    for each in (simplify(graph), *ag.vjp(graph)):
        assert ag.parse(str(each)) == each
    assert pickle.loads(pickle.dumps(graph)) == graph


@given(named_graphs(), st.data())
def test_what_is_made_of_a_graph_binds_to_what_is_made_of_the_bound_one(
    graph: ag.Graph, data: st.DataObject
) -> None:
    """But for the memory order of results like inputs that broadcast an axis bound to 1."""
    sizes = draw_sizes(data, graph)
    exact = replace_sizes(graph, sizes)
    assert not exact.symbols
    assert bind_graph(simplify(graph), sizes) == simplify(exact)
    pairs = zip(graph.inputs, exact.inputs, strict=True)
    assume(all(memory_order(a.spec) == memory_order(b.spec) for a, b in pairs))
    for named, due in zip(ag.vjp(graph), ag.vjp(exact), strict=True):
        assert bind_graph(named, sizes) == due
    assert bind_graph(ag.jvp(graph), sizes) == ag.jvp(exact)
