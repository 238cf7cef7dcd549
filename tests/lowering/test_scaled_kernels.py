"""Triton's kernels on quantised keys: wherever they take a graph, they take it quantised."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import Options
from attn_graph.lowering.triton.backend import BACKEND
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_outputs, run_plan
from attn_graph.testing.strategies import graphs, seeds, shapes
from attn_graph.testing.tensors import tensors_for
from tests.lowering import test_packed, test_paged
from tests.support.quantised import Named, Own, kinds, quantise_graph, quantise_tensors

CPU = Target.here("cpu")
pytestmark = pytest.mark.skipif(
    not CPU.interprets, reason="needs TRITON_INTERPRET=1 before Python starts, as in `make test`"
)
TRITON = ("triton",)


def assume_kernels(graph: ag.Graph) -> None:
    assume(not BACKEND.reasons(simplify(graph), CPU, Options()))


@given(graphs(shapes(8, 6)), kinds, seeds)
def test_kernels_read_quantised_keys(plain: ag.Graph, kind: torch.dtype, seed: int) -> None:
    assume_kernels(plain)
    graph = quantise_graph(plain, kind, seed)
    check_outputs(ag.compile(graph, target=CPU, backends=TRITON), graph, tensors_for(graph, seed))


@given(test_packed.cases(), kinds, seeds)
def test_kernels_read_packed_quantised_keys(
    case: test_packed.Case, kind: torch.dtype, seed: int
) -> None:
    results, plain = run_kernels(case.packed, case.tensors, kind, seed)
    test_packed.check_results(evolve(case, tensors=plain), results)


@given(test_paged.cases(), kinds, seeds)
def test_kernels_read_quantised_pages(case: test_paged.Case, kind: torch.dtype, seed: int) -> None:
    results, plain = run_kernels(case.graph, case.tensors, kind, seed)
    test_paged.check_results(evolve(case, tensors=plain), results)


def run_kernels(
    graph: ag.Graph, tensors: Named, kind: torch.dtype, seed: int
) -> tuple[tuple[torch.Tensor, ...], Own]:
    """The results of quantised keys, and the tensors with the same keys in the graph's dtype."""
    assume_kernels(graph)
    quantised = quantise_graph(graph, kind, seed)
    own, plain = quantise_tensors(quantised, tensors, seed)
    plan = ag.compile(quantised, target=CPU, backends=TRITON)
    return run_plan(plan, [own[i.name] for i in quantised.inputs]), plain
