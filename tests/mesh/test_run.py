"""Several processes compute what one does: o, lse and every gradient, by all methods."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.mesh.layout import SEQUENCES, Method, Placement
from attn_graph.mesh.plan import RankPlan
from attn_graph.mesh.ring import Guest, travel
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.totals import lay_out_as
from attn_graph.mesh.traffic import flow_between
from attn_graph.spec import FLOATS
from attn_graph.testing import strategies
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.ranks import TIMEOUT, Crew, count_bytes, start_crew

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


# Faults


def small(mask: ag.Mask | None = None) -> ag.Graph:
    x = ag.TensorSpec((1, 2, 12, 4), torch.float32)
    return ag.attention(x, x, x, mask=mask, stats=True)


def attend_twice(rank: int, group: Any, graphs: list[Sharded]) -> tuple[str, bool]:
    """What the first graph's error says, and whether a plan runs after it."""
    try:
        run_plan(rank, group, graphs[rank])
        said = "nothing"
    except ag.GraphError as error:
        said = str(error)
    return said, bool(run_plan(rank, group, graphs[0]).isfinite().all())


def run_plan(rank: int, group: Any, sharded: Sharded) -> torch.Tensor:
    """o of a rank, of ones."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.ones(spec.shape) for spec in plan.specs.values()]
    o: torch.Tensor = plan(*shards)[0]
    return o


def test_ranks_that_disagree_say_both(crew: Crew) -> None:
    causal, window = (
        ag.shard(small(mask), ag.Mesh(2), "contiguous") for mask in (ag.Causal(), ag.Window(3))
    )
    for said, runs in crew.run(2, attend_twice, [causal, window]):
        assert "ranks disagree" in said
        assert "rank 0: def graph(" in said
        assert "mask=Band(high=0)" in said
        assert "mask=Band(low=-3, high=0)" in said
        assert runs  # no message is left


class Stumble(Exception):
    """A fault of a rank's own."""


def stop_at_first(guests: Generator[Guest]) -> None:
    """Fail at the first visit, when the next is under way."""
    with closing(guests):
        for _ in guests:
            raise Stumble


def stumble(rank: int, group: Any, sharded: Sharded) -> bool:
    """Fail while a hop is under way, in all ranks; then run as if nothing had been."""
    plan = ag.compile(sharded, group=group, target="cpu")
    assert isinstance(plan, RankPlan)
    _, k, v = (torch.randn(spec.shape) for spec in plan.specs.values())
    with pytest.raises(Stumble):
        stop_at_first(travel(plan.site, k, v))
    return bool(run_plan(rank, group, sharded).isfinite().all())


def test_a_fault_within_a_hop_leaves_no_message(crew: Crew) -> None:
    for method in ("ring", "gather"):
        sharded = ag.shard(small(), ag.Mesh(3), "contiguous", method=method)
        assert all(crew.run(3, stumble, sharded))


def misuse(rank: int, group: Any, sharded: Sharded) -> list[str]:
    """What the errors of wrong calls say; none of them sends a message."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape) for spec in plan.specs.values())
    faults = []
    for call in (
        lambda: plan(q[:, :, 1:], k, v),
        lambda: plan(q, k),
        lambda: ag.compile(ag.shard(small(), ag.Mesh(5), "batch"), group=group),
    ):
        with pytest.raises((ag.GraphError, ag.PlanMismatchError)) as caught:
            call()
        faults.append(str(caught.value))
    return faults


def test_wrong_calls_say_what_was_expected(crew: Crew) -> None:
    shape, missing, size = crew.run(2, misuse, ag.shard(small(), ag.Mesh(2), "zigzag"))[0]
    assert "q: expected f32[1, 2, 6, 4], got f32[1, 2, 5, 4]" in shape
    assert "v: expected f32[1, 2, 6, 4], got nothing" in missing
    assert "a mesh of 5 ranks, and a group of 2; say ag.Mesh(2)" in size


def differentiate_twice(rank: int, group: Any, sharded: Sharded) -> list[str]:
    """What the errors of a second derivative and of forward mode say."""
    plan = ag.compile(sharded, group=group, target="cpu")
    q, k, v = (torch.ones(spec.shape).requires_grad_() for spec in plan.specs.values())
    outputs = plan(q, k, v)
    o = outputs[0] if isinstance(outputs, tuple) else outputs
    faults = []
    with pytest.raises(ag.GraphError) as second:
        torch.autograd.grad(o.sum(), q, create_graph=True)
    faults.append(str(second.value))
    with pytest.raises(ag.GraphError) as forward:
        torch.func.jvp(lambda q: plan(q, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
    return [*faults, str(forward.value)]


def test_other_derivatives_than_the_first_are_refused(crew: Crew) -> None:
    for said in crew.run(2, differentiate_twice, ag.shard(small(), ag.Mesh(2), "zigzag")):
        assert all("ranks differentiate once, in reverse mode" in fault for fault in said)


def die(rank: int, group: Any, sharded: Sharded) -> str:
    """The last rank ends at once; what the others' error says."""
    if rank == group.size() - 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        run_plan(rank, group, sharded)
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    with start_crew(2, tmp_path) as crew:
        crew.pipes[1].send_bytes(pickle.dumps((2, die, (ag.shard(small(), ag.Mesh(2), "zigzag"),))))
        began = time.monotonic()
        crew.pipes[0].send_bytes(pickle.dumps((2, die, (ag.shard(small(), ag.Mesh(2), "zigzag"),))))
        fault, said = pickle.loads(crew.pipes[0].recv_bytes())
        assert fault is None, fault
        assert said
        assert time.monotonic() - began < TIMEOUT.seconds


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.data())
def test_four_ranks_too(four: Crew, data: st.DataObject) -> None:
    check(four, *data.draw(sharded_graphs(4)))
