"""Specs describe real tensors, whatever their strides, and say no more than matters."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.spec import DTYPES, NAMES, accumulator, memory_order
from attn_graph.testing.strategies import dtypes, graphs, seeds, specs
from attn_graph.testing.tensors import lay_out, tensors_for

small = st.lists(st.integers(0, 4), max_size=5).map(tuple)
any_specs = st.tuples(small, dtypes).flatmap(lambda drawn: specs(*drawn))


def ones(count: int) -> torch.Tensor:
    return torch.ones(count)


@given(any_specs, seeds)
def test_the_spec_of_a_tensor_laid_out_by_a_spec_is_that_spec(
    spec: ag.TensorSpec, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    made = lay_out(spec, lambda count: ones(count).to(spec.dtype), random)
    assert ag.TensorSpec.like(made) == spec


@given(any_specs)
def test_dense_and_unit_last_mean_what_torch_means(spec: ag.TensorSpec) -> None:
    made = torch.empty_strided(spec.shape, spec.strides)
    assert spec.is_dense == made.is_contiguous()
    assert spec.unit_last or spec.strides[-1] != 1


@given(any_specs)
def test_memory_order_lists_every_axis_once_and_strides_fall_along_it(spec: ag.TensorSpec) -> None:
    order = memory_order(spec)
    assert sorted(order) == [*range(len(spec.shape))]
    told = [spec.strides[a] for a in order if spec.shape[a] > 1]
    assert 0 in told or told == sorted(told, reverse=True)


@given(any_specs)
def test_parsing_what_repr_shows_gives_the_spec(spec: ag.TensorSpec) -> None:
    assert eval(repr(spec), {"TensorSpec": ag.TensorSpec, "torch": torch}) == spec


@given(graphs(), seeds)
def test_tensors_for_a_graph_meet_its_inputs(graph: ag.Graph, seed: int) -> None:
    found = [ag.TensorSpec.like(tensor) for tensor in tensors_for(graph, seed)]
    assert found == [i.spec for i in graph.inputs]


@pytest.mark.parametrize("layout", ["".join(p) for p in permutations("bhsd")])
def test_a_layout_is_the_strides_of_a_permuted_dense_tensor(layout: str) -> None:
    sizes = dict(zip("bhsd", (2, 3, 4, 5), strict=True))
    dense = torch.empty([sizes[x] for x in layout])
    logical = dense.permute(*map(layout.index, "bhsd"))
    spec = ag.TensorSpec((2, 3, 4, 5), torch.float32, layout=layout)
    assert spec == ag.TensorSpec.like(logical)
    assert memory_order(spec) == tuple(map("bhsd".index, layout))


def test_strides_of_axes_of_size_one_mean_nothing() -> None:
    a = ag.TensorSpec((1, 4, 1, 8), torch.float16, (7, 8, 99, 1))
    b = ag.TensorSpec((1, 4, 1, 8), torch.float16)
    assert a == b
    assert hash(a) == hash(b)
    assert str(a) == str(b) == "f16[1, 4, 1, 8]"


def test_strides_of_a_tensor_without_elements_mean_nothing() -> None:
    assert ag.TensorSpec((0, 3), torch.int32, (17, 4)) == ag.TensorSpec((0, 3), torch.int32)


def test_sizes_that_are_tensors_or_torch_sizes_become_plain_numbers() -> None:
    shape = torch.empty(2, 3).shape
    assert type(ag.TensorSpec(shape, torch.float32).shape) is tuple
    sizes: Any = torch.tensor(2), torch.tensor(3)  # Any: whole numbers of any kind
    assert ag.TensorSpec(sizes, torch.float32) == ag.TensorSpec((2, 3), torch.float32)
    assert {type(n) for n in ag.TensorSpec(sizes, torch.float32).shape} == {int}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_one_name(name: str) -> None:
    assert NAMES[DTYPES[name]] == name
    assert str(ag.TensorSpec((2,), DTYPES[name])) == f"{name}[2]"


def test_scores_of_half_precision_are_kept_in_float32() -> None:
    assert [*map(accumulator, (torch.float16, torch.bfloat16, torch.float32))] == [
        torch.float32
    ] * 3
    assert accumulator(torch.float64) == torch.float64


def test_a_bad_spec_says_everything_that_is_wrong_with_it() -> None:
    with pytest.raises(ag.GraphError) as caught:
        ag.TensorSpec((2, -3), torch.complex64, (1, 2, -1), layout="bhs")
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 6
    for part in ("torch.complex64", "(2, -3)", "3 strides", "(1, 2, -1)", "both given", "'bhs'"):
        assert part in told
