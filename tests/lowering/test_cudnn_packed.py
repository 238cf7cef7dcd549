"""All that leads to cuDNN and back of packed tensors, with what it is documented to do in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.errors import Reason
from attn_graph.ir.graph import Graph
from attn_graph.ir.passes import simplify
from attn_graph.ir.vjp import backward, result_spec
from attn_graph.lowering.backend import Options
from attn_graph.lowering.cudnn.backend import describe_problem, read_problem, request_case
from attn_graph.lowering.cudnn.limits import reasons
from attn_graph.lowering.cudnn.packed_run import PackedRun
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Workspace
from attn_graph.spec import FLOATS, INF
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, seeds
from tests.lowering.test_cudnn_run import H200
from tests.lowering.test_packed import SPEC, Case, batches, make_case, spoil
from tests.support.cudnn_graphs import aligned, cudnn_options
from tests.support.cudnn_model import Model

LATEST = Target("h200", "cuda", 90, (), (*H200.libraries[:2], ("nvidia-cudnn-cu13", "9.26.0")))


def refusals(graph: Graph, target: Target = LATEST) -> list[Reason]:
    read = read_problem(graph)
    assert read is not None
    problem, sequences = read
    return [*reasons(request_case(problem, target, Options(), sequences))]


def modelled(graph: Graph, *, stats: bool = True) -> PackedRun:
    """How a simplified graph on packed tensors, one that cuDNN takes, would run."""
    case, call = describe_problem(graph, LATEST, Options(), stats=stats)
    assert case.sequences is not None
    return PackedRun.of(call, case.problem, case.sequences, graph, Workspace(), 128, Model(call))


def gradient_of(graph: Graph, do: torch.Tensor) -> tuple[Graph, list[str]]:
    """The backward graph by every floating input, and their names."""
    wants = [n for n, i in enumerate(graph.inputs) if i.spec.dtype in FLOATS]
    return backward(graph, wants, [SPEC.like(do)]), [graph.inputs[n].name for n in wants]


@st.composite
def cases(draw: DrawFn) -> Case:
    """Sequences with gaps or not, 0 and 1 rows included, NaN in rows of no sequence."""
    batch, dtype = draw(batches()), draw(st.sampled_from([torch.float16, torch.bfloat16]))
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    D, E = draw(st.sampled_from([(8, 8), (16, 16), (24, 8), (8, 16)]))
    shape = Shape(len(batch.rows), G * r, G, *batch.most, D, E)
    options = {n: x for n, x in draw(cudnn_options(shape, dtype)).items() if n not in m.LENGTHS}
    options["align"] = options["align"] or draw(st.sampled_from(["top_left", "bottom_right"]))
    options["stats"] = draw(st.booleans())
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return make_case(batch, shape, dtype, dims, options, draw(seeds))


def check_forward(case: Case, outputs: Sequence[torch.Tensor]) -> None:
    """The outputs are those of the padded graph, and empty in rows of no sequence."""
    dues = expect_outputs(case.padded, case.padded_tensors)
    for x, due in zip(outputs, dues, strict=True):
        padded = case.pad(x)
        due.check(torch.where(case.real(padded), padded, due.ref.to(padded.dtype)))
        assert (case.outside(x) == (-INF if x.ndim == 2 else 0.0)).all()


@given(case=cases(), seed=seeds)
def test_what_cudnn_is_told_of_packed_tensors_means_what_the_graph_means(
    case: Case, seed: int
) -> None:
    simple = simplify(case.packed)
    assume(not refusals(simple))
    tensors = [*map(aligned, case.packed_tensors)]
    outputs, (o, lse) = modelled(simple).forward(*tensors)
    check_forward(case, outputs)
    for found, i in zip(outputs, simple.outputs, strict=True):
        assert SPEC.like(found) == result_spec(simple, i)
    random = torch.Generator().manual_seed(seed)
    do = spoil(case, torch.randn(o.shape, generator=random).to(o.dtype), 0)
    trained = evolve(simple, outputs=simple.outputs[:1])
    back, names = gradient_of(trained, do)
    assume(not refusals(back))
    gradients, _ = modelled(back).backward(*tensors, o, lse, do)
    cotangents = [case.pad(do), *(None for _ in outputs[1:])]
    dues = expect_gradients(case.padded, case.padded_tensors, cotangents)
    for name, x in zip(names, gradients, strict=True):
        side = {"q": 0, "k": 1, "v": 1}.get(name)
        dues[name].check(x if side is None else case.pad(x, side))
        if side is not None:
            assert (case.outside(x, side) == 0).all()
