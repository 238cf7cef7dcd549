"""On a real GPU: cuDNN's plans on packed tensors and pages agree with the formula, and replay."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, reject, settings

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import seeds
from tests.lowering.test_cudnn_packed import (
    KEYLESS,
    TIGHT,
    cases,
    is_declared,
    make_plain,
    noise,
    paged_cases,
    refusals,
)
from tests.support import ragged
from tests.support.ragged import Case, check_pulled, check_results
from tests.support.sequences import Batch

pytestmark = pytest.mark.gpu
LONG = make_plain(
    Batch((130, 0, 257, 1), (64, 9, 300, 0), ((0, 0), (3, 1), (0, 2), (1, 0)), gaps=True),
    mask=ag.Causal("bottom_right"),
    stats=True,
)


def compiled(graph: ag.Graph) -> ag.Plan:
    try:
        return ag.compile(graph, backends=("cudnn",))
    except ag.NoBackendError:
        reject()


def on_gpu(graph: ag.Graph, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[i.name].cuda() for i in graph.inputs]


@given(case=cases(), seed=seeds)
@settings(max_examples=50)
def test_packed_tensors_agree_with_the_formula(case: Case, seed: int) -> None:
    """With NaN in rows of no sequence, which are not read; in results they are empty."""
    check_case(case, seed)


@pytest.mark.parametrize("case", [KEYLESS, TIGHT, LONG])
def test_sequences_of_all_lengths_agree_with_the_formula(case: Case) -> None:
    check_case(case, 0)


def check_case(case: Case, seed: int) -> None:
    plan = compiled(case.graph)
    leaves = [x.requires_grad_(x.is_floating_point()) for x in on_gpu(case.graph, case.tensors)]
    outputs = run_plan(plan, leaves)
    check_results(case, [x.detach().cpu() for x in outputs])
    do = case.batch.spoil(noise(outputs[0], seed), 0)
    named = {i.name: x for i, x in zip(case.graph.inputs, leaves, strict=True) if x.requires_grad}
    grads = torch.autograd.grad(outputs[0], [*named.values()], do.cuda())
    found = dict(zip(named, (g.cpu() for g in grads), strict=True))
    check_pulled(case, found, [do, *(None for _ in outputs[1:])])


@given(case=paged_cases())
@settings(max_examples=50)
def test_pages_agree_with_the_formula(case: ragged.Case) -> None:
    assume(not refusals(simplify(case.graph)))
    if is_declared(simplify(case.graph)):
        pools = {n: case.tensors[n].nan_to_num(3.0) for n in "kv"}
        case = evolve(case, tensors=case.tensors | pools)
    ragged.check_case(case, compiled(case.graph), "cuda")


def test_starts_that_change_between_replays_are_read_anew() -> None:
    """Everything that depends on them is computed by what was captured."""
    plan, tensors = compiled(LONG.graph), on_gpu(LONG.graph, LONG.tensors)
    before = run_plan(plan, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        replayed = run_plan(plan, tensors)
    for i, x in zip(LONG.graph.inputs, tensors, strict=True):
        if i.name.endswith("starts"):
            x[1] = 40
        elif i.name.endswith("lengths"):
            x[:2] = 30
    graph.replay()
    for x, y, old in zip(replayed, run_plan(plan, tensors), before, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, old)
