"""Several processes compute what one does: o, lse and every gradient, by all methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.mesh.layout import SEQUENCES, Method, Placement
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.totals import lay_out_as
from attn_graph.mesh.traffic import flow_between
from attn_graph.spec import FLOATS
from attn_graph.testing import strategies
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.ranks import Crew, count_bytes, start_crew

LETTERS = {"o": "bhie", "lse": "bhi", "max": "bhi"}
PLACEMENTS: tuple[Placement, ...] = ("batch", "heads", *SEQUENCES)
METHODS: tuple[Method | None, ...] = ("ring", "gather", "heads", None)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with start_crew(3, tmp_path_factory.mktemp("ranks")) as crew:
        yield crew


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with start_crew(4, tmp_path_factory.mktemp("four")) as crew:
        yield crew


@frozen(eq=False)
class Answer:
    """What a rank gives: outputs, gradients by name, and bytes sent and received in each pass."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    forward: list[int]
    backward: list[int]


def compute(
    rank: int, group: Any, sharded: Sharded, shards: list[Any], cotangents: list[Any], **more: Any
) -> Answer:
    """One rank's part, both passes, twice: the bits have to be the same."""
    first, second = (
        compute_once(rank, group, sharded, shards[rank], cotangents[rank]) for _ in range(2)
    )
    for a, b in zip(
        (*first.outputs, *first.gradients.values()),
        (*second.outputs, *second.gradients.values()),
        strict=True,
    ):
        assert torch.equal(a, b)
    return first


def compute_once(
    rank: int, group: Any, sharded: Sharded, shards: dict[str, Any], cotangents: list[Any]
) -> Answer:
    plan = ag.compile(sharded, group=group, target="cpu")
    inputs = {
        name: lay_out_as(x, x.dtype, plan.specs[name]).requires_grad_(x.dtype in FLOATS)
        for name, x in shards.items()
    }
    with count_bytes() as forward:
        outputs = plan(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(x, g) for x, g in zip(outputs, cotangents, strict=True) if g is not None]
    wanted = {name: x for name, x in inputs.items() if x.requires_grad}
    with count_bytes() as backward:
        gradients = torch.autograd.grad(
            [x for x, _ in pairs], [*wanted.values()], [g for _, g in pairs]
        )
    named = dict(zip(wanted, gradients, strict=True))
    return Answer([x.detach() for x in outputs], named, forward, backward)


def check(crew: Crew, sharded: Sharded, graph: ag.Graph, seed: int) -> None:
    """Compare with one device by the accuracy rule, and bytes with those that were foreseen."""
    tensors, cotangents = tensors_for(graph, seed), cotangents_for(graph, seed)
    names = [i.name for i in graph.inputs]
    known = {x.name for x in sharded.known}
    ranks = range(sharded.mesh.ranks)
    split = {n: sharded.split(x, n) for n, x in zip(names, tensors, strict=True) if n not in known}
    roles = output_names(sharded)
    parts = [
        [None] * len(ranks) if g is None else sharded.split(g, LETTERS[role])
        for role, g in zip(roles, cotangents, strict=True)
    ]
    answers: list[Answer] = crew.run(
        len(ranks),
        compute,
        sharded,
        [{n: x[r] for n, x in split.items()} for r in ranks],
        [[part[r] for part in parts] for r in ranks],
    )
    for n, expected in enumerate(expect_outputs(graph, tensors)):
        expected.check(sharded.join([a.outputs[n] for a in answers], LETTERS[roles[n]]))
    due = expect_gradients(graph, tensors, cotangents)
    for name in answers[0].gradients:
        due[name].check(sharded.join([a.gradients[name] for a in answers], name))
    for r, answer in enumerate(answers):
        assert answer.forward == [flow(sharded, r, "forward"), flow(sharded, r, "forward", True)]
        assert answer.backward == [flow(sharded, r, "backward"), flow(sharded, r, "backward", True)]


def output_names(sharded: Sharded) -> list[str]:
    first = len(sharded.graph.inputs)
    return [sharded.node.names[i - first] for i in sharded.graph.outputs]


def flow(sharded: Sharded, rank: int, side: str, received: bool = False) -> int:
    """Bytes that a rank sends, or receives, by the plan."""
    others = [r for r in range(sharded.mesh.ranks) if r != rank]
    pairs = [(r, rank) if received else (rank, r) for r in others]
    return sum(getattr(flow_between(sharded, *pair), side) for pair in pairs)


@st.composite
def sharded_graphs(draw: st.DrawFn, ranks: int) -> tuple[Sharded, ag.Graph, int]:
    """Any attention over ranks: the sharded graph, the graph, and a seed for its tensors."""
    dtype = st.sampled_from([torch.float32, torch.bfloat16])
    graph = draw(strategies.graphs(strategies.shapes(20), dtype))
    seed = draw(strategies.seeds)
    placement = draw(st.sampled_from(PLACEMENTS))
    method = draw(st.sampled_from(METHODS)) if placement in SEQUENCES else None
    readable = {i.name for i in graph.inputs if i.spec.dtype not in FLOATS}
    known = dict(zip([i.name for i in graph.inputs], tensors_for(graph, seed), strict=True))
    chosen = draw(st.sets(st.sampled_from(sorted(readable)))) if readable else set()
    try:
        sharded = ag.shard(
            graph, ag.Mesh(ranks), placement, method=method, **{n: known[n] for n in chosen}
        )
    except ag.GraphError as error:
        assume(not any(x in str(error) for x in ("method 'heads'", "no mask reads")))
        raise
    return sharded, graph, seed


@settings(max_examples=settings().max_examples * 4 // 5)
@given(st.data())
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_compute_what_one_device_does(crew: Crew, ranks: int, data: st.DataObject) -> None:
    check(crew, *data.draw(sharded_graphs(ranks)))


@given(st.data())
def test_the_text_of_any_sharded_graph_makes_it_again(data: st.DataObject) -> None:
    sharded, _, _ = data.draw(sharded_graphs(data.draw(st.integers(1, 5))))
    assert ag.Sharded.parse(str(sharded)) == sharded


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.data())
def test_four_ranks_too(four: Crew, data: st.DataObject) -> None:
    check(four, *data.draw(sharded_graphs(4)))
