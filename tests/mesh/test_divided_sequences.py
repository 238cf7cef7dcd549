"""Packed sequences divided by their parts: layouts, calls, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import attn_graph as ag
from attn_graph.mesh.layout import SEQUENCES, Method, Placement
from attn_graph.mesh.schedule import visits_of
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.site import BoxRun, Site
from attn_graph.spec import FLOATS
from attn_graph.testing.tensors import tensors_for
from tests.mesh.test_run import run_ranks
from tests.support.ranks import Crew


def divide(
    lengths: Sequence[int],
    ranks: int,
    placement: Placement,
    method: Method | None = None,
    mask: ag.Mask | None = None,
    unused: int = 0,
) -> tuple[Sharded, torch.Tensor]:
    """Sequences of some lengths over ranks, under a causal mask by default, and their starts."""
    starts = torch.tensor([*accumulate(lengths, initial=0)])
    row = ag.TensorSpec((int(starts[-1]) + unused, 4, 8), torch.float32)
    graph = ag.attention(
        row, row, row, mask=mask or ag.Causal(), q_starts=ag.TensorSpec.like(starts), stats=True
    )
    return ag.shard(graph, ag.Mesh(ranks), placement, method=method, q_starts=starts), starts


def partition(starts: torch.Tensor, ranks: int, rank: int) -> list[int]:
    """Transformer Engine's thd_get_partitioned_indices, as documented there: of 2 R chunks of each
    sequence the one of the rank's number, and the one of this number from the end."""
    rows: list[int] = []
    for first, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        size = (stop - first) // (2 * ranks)
        for n in (rank, 2 * ranks - 1 - rank):
            rows += range(first + n * size, first + (n + 1) * size)
    return rows


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_zigzag_rows_are_those_of_transformer_engine(sizes: list[int], ranks: int) -> None:
    sharded, starts = divide([2 * ranks * n for n in sizes], ranks, "zigzag")
    rows = sharded.split(torch.arange(int(starts[-1])), "i")
    assert [x.tolist() for x in rows] == [partition(starts, ranks, r) for r in range(ranks)]
    for own in sharded.split(starts, "q_starts"):
        assert torch.equal(own, starts // ranks)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(SEQUENCES),
    st.integers(0, 3),
)
def test_parts_of_sequences_are_all_there(
    lengths: list[int], ranks: int, placement: Placement, unused: int
) -> None:
    """Each row has one rank; a rank's starts count its own rows; no pair is lost, none is twice."""
    sharded, starts = divide(lengths, ranks, placement, unused=unused)
    places = torch.arange(sum(lengths) + unused)
    each = sharded.split(places, "i")
    assert torch.equal(torch.cat(each).sort()[0], places)
    assert torch.equal(sharded.join(each, "i"), places)
    own_starts = sharded.split(starts, "q_starts")
    for rows, own in zip(each, own_starts, strict=True):
        assert own.tolist() == [int((rows < at).sum()) for at in starts]
    assert torch.equal(sharded.join(own_starts, "q_starts"), starts)
    outlook = ag.explain(sharded, target="cpu")
    assert sum(rank.pairs for rank in outlook.ranks) == 4 * sum(n * (n + 1) // 2 for n in lengths)


def test_balanced_parts_of_uneven_sequences_have_equal_work() -> None:
    lengths = [4096, 17, 900, 1, 2500, 333, 7000, 64]
    for ranks in (2, 4, 8):
        each = {p: divide(lengths, ranks, p)[0] for p in SEQUENCES}
        found = {p: ag.explain(x, target="h200").balance for p, x in each.items()}
        assert found["balanced"] <= 1.02
        assert found["zigzag"] <= 1.02
        assert found["contiguous"] > 1.3


def test_sequences_within_a_rank_send_nothing() -> None:
    sharded, _ = divide([64, 64, 128], 4, "contiguous")
    outlook = ag.explain(sharded, target="h200")
    assert [rank.sent.forward for rank in outlook.ranks] == [0, 0, 64 * 4 * (8 + 8) * 4, 0]


def count_calls(rank: int, group: Any, sharded: Sharded) -> list[int]:
    """How many attentions a rank computes in each pass."""
    plan = ag.compile(sharded, group=group, target="cpu")
    shards = [torch.randn(spec.shape).requires_grad_() for spec in plan.specs.values()]
    calls, forward, backward = [0, 0], BoxRun.forward, BoxRun.backward

    def count_forward(box: BoxRun) -> Any:
        calls[0] += 1
        return forward(box)

    def count_backward(box: BoxRun, *args: Any) -> Any:
        calls[1] += 1
        return backward(box, *args)

    with patch.multiple(BoxRun, forward=count_forward, backward=count_backward):
        o, _ = plan(*shards)
        torch.autograd.grad(o.sum(), shards)
    return calls


@pytest.mark.parametrize(("method", "most"), [("ring", 2 + 1), ("gather", 2 + 1), ("heads", 1)])
def test_calls_do_not_grow_with_the_number_of_sequences(
    crew: Crew, method: Method, most: int
) -> None:
    """Parts of one mask are one packed batch: all diagonals, all full parts of a hop."""
    for lengths in ([64, 32], [8, 16, 24, 32, 40, 48, 56, 64] * 2):
        sharded, _ = divide(lengths, 2, "zigzag", method)
        first, last = crew.run(2, count_calls, sharded)
        assert (first, last) == ([most] * 2, [min(most, 2)] * 2)  # its two parts are neighbours


def compare_dtensors(rank: int, group: Any, sharded: Sharded) -> bool:
    """DTensors of packed rows, in and out, against one device."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = ag.compile(sharded, group=group, target="cpu")
    alone: Any = ag.compile(sharded.graph, target="cpu")
    random = torch.Generator().manual_seed(0)
    whole = [torch.randn(i.spec.shape, generator=random) for i in sharded.graph.inputs[:3]]
    placed = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in whole]
    leaves = [x.requires_grad_() for x in whole]
    o, lse = plan(*placed)
    due = alone(*leaves, *(x.tensor for x in sharded.known))
    assert isinstance(o, DTensor)
    assert isinstance(lse, DTensor)
    assert (o.placements, lse.placements) == ((Shard(0),), (Shard(1),))
    each = zip(
        (o, lse, *torch.autograd.grad((o * o).sum() + lse.sum(), placed)),
        (*due, *torch.autograd.grad((due[0] * due[0]).sum() + due[1].sum(), leaves)),
        strict=True,
    )
    for x, ref in each:
        torch.testing.assert_close(x.full_tensor(), ref)  # type: ignore[attr-defined]
    return True


def test_dtensors_of_packed_rows_give_dtensors(crew: Crew) -> None:
    sharded, _ = divide([5, 0, 11, 4], 2, "contiguous")
    assert all(crew.run(2, compare_dtensors, sharded))


def test_batches_lie_as_libraries_of_gpus_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN and FlashAttention take packed rows with heads side by side, and starts in int32."""
    sharded, _ = divide([64, 32, 48], 2, "zigzag", "ring")
    nothing: Any = None  # neither a group nor a request is needed without plans
    site = Site(sharded, 0, nothing, nothing)
    monkeypatch.setattr(Site, "plan", lambda *_: None)
    inputs = site.unpack_all(site.empty_inputs())
    own = visits_of(sharded, 0)[0].jobs
    for jobs in site.batches(own):
        q, k, v, *starts = site.attend(jobs, inputs[:3], inputs).tensors
        assert len(jobs) > 1
        assert all(x.is_contiguous() for x in (q, k, v))
        assert [x.dtype for x in starts] == [torch.int32] * 2


@pytest.mark.parametrize("placement", ["batch", "heads", *SEQUENCES])
def test_sinks_and_dropout_of_packed_sequences_are_those_of_one_device(
    crew: Crew, placement: Placement
) -> None:
    starts = torch.tensor([0, 9, 9, 23, 28])
    row, sinks = (ag.TensorSpec(shape, torch.float32) for shape in ((30, 4, 8), (4,)))
    graph = ag.attention(
        row, row, row, mask=ag.Causal(), q_starts=ag.TensorSpec.like(starts), sinks=sinks,
        dropout=0.5, stats=True,
    )  # fmt: skip
    sharded = ag.shard(graph, ag.Mesh(2), placement, q_starts=starts)
    names = [i.name for i in graph.inputs]
    tensors = dict(zip(names, tensors_for(graph, 0), strict=True)) | {"q_starts": starts}
    leaves = {n: x.requires_grad_(x.dtype in FLOATS) for n, x in tensors.items()}
    due: Any = ag.compile(graph, target="cpu")(**leaves)
    cotangents = [torch.ones_like(x) for x in due]
    wanted = [x for x in leaves.values() if x.requires_grad]
    gradients = torch.autograd.grad(due, wanted, cotangents)
    plain = {n: x.detach() for n, x in leaves.items()}
    outputs, each = run_ranks(crew, sharded, plain, cotangents)
    for x, ref in zip((*outputs, *each.values()), (*due, *gradients), strict=True):
        torch.testing.assert_close(x, ref)
