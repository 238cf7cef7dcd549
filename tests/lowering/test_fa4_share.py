"""How many graphs of the kernels' tests FlashAttention 4 takes, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attrs import evolve

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.lowering.fa4.backend import BACKEND, PACKAGE
from attn_graph.lowering.request import Options, Request
from tests.lowering.test_gpu_sequences import FEW, PACKED, PAGED, packed_case, paged_case
from tests.support.virtual_cases import CASES

LEAST, WIDEST = 0.85, 256
HALF = (torch.float16, torch.bfloat16)


def half_graphs() -> Iterator[tuple[str, ag.Graph]]:
    """Those graphs, in half precision and of heads that its kernels have sizes for."""
    sequences = {f"packed, {n}": packed_case(n, FEW, stats=True).graph for n in PACKED}
    sequences |= {f"pages, {n}": paged_case(n, FEW, finite=True).graph for n in PAGED}
    for name, graph in ({n: make() for n, make in CASES.items()} | sequences).items():
        q = graph.inputs[0].spec
        if q.dtype in HALF and q.shape[-1] <= WIDEST:
            yield name, graph


def passes(graph: ag.Graph) -> Iterator[tuple[str, ag.Graph]]:
    """The attention and its gradient."""
    yield "", simplify(graph)
    if graph.has_gradient:
        yield ", gradient", simplify(ag.vjp(graph)[1])


def refuse(name: str) -> Iterator[tuple[str, str, tuple[ag.extend.Reason, ...]]]:
    """Each graph's name and pass, and every reason against it."""
    target = evolve(ag.Target.of(name), libraries=((PACKAGE, "4.0.0b36"),))
    for title, graph in half_graphs():
        for way, each in passes(graph):
            yield title, way, BACKEND.reasons(Request(each, target, Options()))


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_graphs_in_half_precision_and_why_some_are_refused(
    name: str, golden: Callable[[object], None]
) -> None:
    lines, taken = [], {"": [0, 0], ", gradient": [0, 0]}
    for title, way, against in refuse(name):
        taken[way][0] += not against
        taken[way][1] += 1
        lines += [f"{title}{way}: {reason}" for reason in against]
    counts = [f"{yes} of {every}{way}" for way, (yes, every) in taken.items()]
    golden("\n".join([", ".join(counts), *lines]))


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_most_graphs_in_half_precision_are_supported(name: str) -> None:
    supported = [not against for *_, against in refuse(name)]
    assert sum(supported) >= LEAST * len(supported)
