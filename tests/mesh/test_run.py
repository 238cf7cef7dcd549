"""Several processes compute what one does: o, lse and every gradient, by all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.mesh.layout import SEQUENCES, Method, Placement
from attn_graph.mesh.schedule import flow_between
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.totals import lay_out_as
from attn_graph.nn.tracing import KEEPS_CONSTANTS
from attn_graph.spec import FLOATS
from attn_graph.testing import strategies
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.tensors import cotangents_for, tensors_for
from tests.support.ragged import Case, check_pulled, check_results, packed_cases
from tests.support.ranks import Crew, count_bytes
from tests.support.sequences import draw_cotangents

PLACEMENTS: tuple[Placement, ...] = ("batch", "heads", *SEQUENCES)
METHODS: tuple[Method | None, ...] = ("ring", "gather", "heads", None)


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
    """Compare with one device by the accuracy rule."""
    tensors, cotangents = tensors_for(graph, seed), cotangents_for(graph, seed)
    named = dict(zip([i.name for i in graph.inputs], tensors, strict=True))
    outputs, gradients = run_ranks(crew, sharded, named, cotangents)
    for x, expected in zip(outputs, expect_outputs(graph, tensors), strict=True):
        expected.check(x)
    due = expect_gradients(graph, tensors, cotangents)
    for name, x in gradients.items():
        due[name].check(x)


def run_ranks(
    crew: Crew,
    sharded: Sharded,
    tensors: Mapping[str, torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """What ranks give, joined: outputs, and gradients by name. Bytes are those foreseen."""
    known = {x.name for x in sharded.known}
    ranks = range(sharded.mesh.ranks)
    split = {n: sharded.split(x, n) for n, x in tensors.items() if n not in known}
    letters = [sharded.result_axes[role != "o"] for role in sharded.output_names]
    parts = [
        [None] * len(ranks) if g is None else sharded.split(g, own)
        for own, g in zip(letters, cotangents, strict=True)
    ]
    answers: list[Answer] = crew.run(
        len(ranks),
        compute,
        sharded,
        [{n: x[r] for n, x in split.items()} for r in ranks],
        [[part[r] for part in parts] for r in ranks],
    )
    for r, answer in enumerate(answers):
        assert answer.forward == [flow(sharded, r, "forward"), flow(sharded, r, "forward", True)]
        assert answer.backward == [flow(sharded, r, "backward"), flow(sharded, r, "backward", True)]
    return (
        [sharded.join([a.outputs[n] for a in answers], own) for n, own in enumerate(letters)],
        {n: sharded.join([a.gradients[n] for a in answers], n) for n in answers[0].gradients},
    )


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


@st.composite
def packed_graphs(
    draw: st.DrawFn, ranks: int, placements: Sequence[Placement]
) -> tuple[Sharded, Case]:
    """Any attention of packed sequences over ranks."""
    case = draw(packed_cases(draw(st.sampled_from([torch.float32, torch.bfloat16]))))
    placement = draw(st.sampled_from(placements))
    readable = [n for n, x in case.tensors.items() if x.dtype not in FLOATS]
    names = draw(st.sets(st.sampled_from(readable)))
    names |= {"q_starts", "kv_starts"} if placement != "heads" else set()
    names |= {"q_lengths", "kv_lengths"} if placement in SEQUENCES else set()
    has = {i.name for i in case.graph.inputs}
    known: dict[str, Any] = {n: case.tensors[n] for n in names & has}
    method = draw(st.sampled_from(METHODS)) if placement in SEQUENCES else None
    try:
        return ag.shard(case.graph, ag.Mesh(ranks), placement, method=method, **known), case
    except ag.GraphError as error:
        assume(not any(x in str(error) for x in ("method 'heads'", "no mask reads")))
        raise


@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.data())
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_divide_packed_sequences(crew: Crew, ranks: int, data: st.DataObject) -> None:
    check_packed(crew, data, *data.draw(packed_graphs(ranks, ("batch", "heads"))))


@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.data())
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_divide_parts_of_packed_sequences(
    crew: Crew, ranks: int, data: st.DataObject
) -> None:
    check_packed(crew, data, *data.draw(packed_graphs(ranks, SEQUENCES)))


def check_packed(crew: Crew, data: st.DataObject, sharded: Sharded, case: Case) -> None:
    """Compare with one device, both passes."""
    assert ag.types.Sharded.parse(str(sharded)) == sharded
    cotangents = draw_cotangents(sharded.graph, case.batch, data.draw(strategies.seeds))
    tensors = {i.name: case.tensors[i.name] for i in case.graph.inputs}
    outputs, gradients = run_ranks(crew, sharded, tensors, cotangents)
    check_results(case, outputs)
    check_pulled(case, gradients, cotangents)


def test_an_explanation_of_packed_sequences_counts_their_pairs() -> None:
    row, starts = ag.TensorSpec((40, 2, 8), torch.float32), torch.tensor([0, 10, 13, 20, 40])
    graph = ag.attention(row, row, row, mask=ag.Causal(), q_starts=ag.TensorSpec.like(starts))
    placements: tuple[Placement, ...] = ("batch", "heads")
    each = [ag.shard(graph, ag.Mesh(2), p, q_starts=starts) for p in placements]
    pairs = [[rank.pairs for rank in ag.explain(x, target="cpu").ranks] for x in each]
    due = [n * (n + 1) // 2 for n in (10, 3, 7, 20)]
    assert pairs == [[2 * sum(due[:3]), 2 * due[3]], [sum(due)] * 2]
    assert each[0].split(starts, "q_starts")[1].tolist() == [0, 20]
    assert torch.equal(each[0].join(each[0].split(starts, "q_starts"), "q_starts"), starts)


@pytest.mark.parametrize("placement", ["batch", "heads"])
@pytest.mark.parametrize("packs", [False, True])
def test_ranks_divide_attention_on_pages(crew: Crew, placement: Placement, packs: bool) -> None:
    """Pools are whole on each rank that has some sequences; their gradients are added up."""
    q = ag.TensorSpec((7, 4, 8) if packs else (3, 4, 5, 8), torch.float32)
    pool, where = ag.TensorSpec((6, 4, 2, 8), torch.float32), torch.tensor([[2, 0], [1, 1], [5, 4]])
    starts = {"q_starts": torch.tensor([0, 3, 3, 7])} if packs else {}
    options: Any = {name: ag.TensorSpec.like(x) for name, x in starts.items()}
    graph = ag.attention(
        q, pool, pool, mask=ag.Causal("bottom_right"), pages=ag.TensorSpec.like(where),
        kv_lengths=ag.TensorSpec((3,), torch.int64), stats=True, **options,
    )  # fmt: skip
    known: Any = starts if placement == "batch" else {}
    sharded = ag.shard(graph, ag.Mesh(2), placement, **known)
    tensors = dict(zip([i.name for i in graph.inputs], tensors_for(graph, 3), strict=True))
    tensors |= {"pages": where, "kv_lengths": torch.tensor([8, 5, 6]), **starts}
    alone = ag.compile(graph, target="cpu")
    leaves = {n: x.detach().requires_grad_(x.dtype in FLOATS) for n, x in tensors.items()}
    due: Any = alone(**leaves)
    cotangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) for x in due]
    outputs, gradients = run_ranks(crew, sharded, tensors, cotangents)
    for x, ref in zip(outputs, due, strict=True):
        torch.testing.assert_close(x, ref)
    wanted = torch.autograd.grad(due, [leaves[n] for n in "qkv"], cotangents)
    for name, ref in zip("qkv", wanted, strict=True):
        torch.testing.assert_close(gradients[name], ref)


def compile_calls(rank: int, group: Any, graphs: list[Sharded]) -> bool:
    """Call plans in one function that torch.compile traces whole: exactly as without it."""
    torch._dynamo.reset()

    def train(plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, lse = plan(2 * q, k, v=v)
        loss: torch.Tensor = o.sin().sum() + lse.sum()
        return loss

    compiled = torch.compile(train, fullgraph=True, backend="aot_eager")
    for sharded in graphs:
        plan = ag.compile(sharded, group=group, target="cpu")
        qkv = [torch.randn(spec.shape).requires_grad_() for spec in plan.specs.values()]
        losses = [f(plan, *qkv) for f in (train, compiled)]
        assert torch.equal(*losses)
        first, second = (torch.autograd.grad(loss, qkv) for loss in losses)
        for x, y in zip(first, second, strict=True):
            assert torch.equal(x, y)
    return True


@pytest.mark.skipif(not KEEPS_CONSTANTS, reason="there torch.compile leaves the library out")
def test_compiled_code_calls_plans_of_ranks(crew: Crew) -> None:
    x = ag.TensorSpec((2, 4, 8, 4), torch.float32)
    ways: list[tuple[Placement, Method | None]] = [
        *(("batch", None), ("zigzag", "ring"), ("zigzag", "heads")),
    ]
    graphs = [
        ag.shard(ag.attention(x, x, x, mask=mask, stats=True), ag.Mesh(2), placement, method=method)
        for mask in (ag.Causal(), ag.Window(2))
        for placement, method in ways
    ]
    row, starts = ag.TensorSpec((16, 4, 4), torch.float32), torch.tensor([0, 6, 16])
    packed = ag.attention(
        row, row, row, mask=ag.Causal(), q_starts=ag.TensorSpec.like(starts), stats=True
    )
    graphs += [
        ag.shard(packed, ag.Mesh(2), "zigzag", method=method, q_starts=starts)
        for method in ("ring", "heads")
    ]
    assert all(crew.run(2, compile_calls, graphs))


@given(st.data())
def test_the_text_of_any_sharded_graph_makes_it_again(data: st.DataObject) -> None:
    sharded, _, _ = data.draw(sharded_graphs(data.draw(st.integers(1, 5))))
    assert ag.types.Sharded.parse(str(sharded)) == sharded


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5)
@given(st.data())
def test_four_ranks_too(crew: Crew, data: st.DataObject) -> None:
    check(crew, *data.draw(sharded_graphs(4)))
