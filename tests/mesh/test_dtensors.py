"""Plans of sharded graphs on DTensors: results are DTensors, and nothing is gathered."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import attn_graph as ag
from attn_graph.mesh.layout import Placement
from tests.support.ranks import Crew, count_bytes

PLACED: list[tuple[Placement, int]] = [("batch", 0), ("heads", 1), ("contiguous", 2)]


def graph(B: int = 2) -> ag.Graph:
    """Causal attention with sinks, of 4 heads in memory order BSHD."""
    q, k = (ag.TensorSpec((B, n, 8, 4), torch.float32, layout="bshd") for n in (4, 2))
    sinks = ag.TensorSpec((4,), torch.float32)
    return ag.attention(q, k, k, mask=ag.Causal(), sinks=sinks, stats=True)


def draw() -> dict[str, torch.Tensor]:
    """The tensors of the whole."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 8, n, 4, generator=g).transpose(1, 2) for n in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "sinks": torch.randn(4, generator=g)}


def compute(tensors: dict[str, Any], plan: Any) -> list[Any]:
    """o, lse and all gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    o, lse = plan(**leaves)
    loss = (o * o).sum() + (lse * lse).sum()
    return [o, lse, *torch.autograd.grad(loss, [*leaves.values()])]


def place(mesh: DeviceMesh, axis: int) -> dict[str, torch.Tensor]:
    """The tensors as DTensors, divided along an axis of q, k and v."""
    q, k, v, sinks = draw().values()
    stored = Shard((0, 2, 1)[axis])
    each = [distribute_tensor(x.transpose(1, 2), mesh, [stored]).transpose(1, 2) for x in (q, k, v)]
    one = distribute_tensor(sinks, mesh, [Shard(0) if axis == 1 else Replicate()])
    return dict(zip(("q", "k", "v", "sinks"), (*each, one), strict=True))


def compare(rank: int, group: Any, placement: Placement, axis: int) -> int:
    """Compare with one device; how many collectives the forward needed."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = ag.compile(ag.shard(graph(), ag.Mesh(2), placement), group=group, target="cpu")
    shards = place(mesh, axis)
    compute(shards, plan)  # at the first call ranks compare what they compute
    with CommDebugMode() as communication:
        plan(**shards)
    due = compute(draw(), ag.compile(graph(), target="cpu"))
    for x, ref in zip(compute(shards, plan), due, strict=True):
        assert isinstance(x, DTensor)
        torch.testing.assert_close(x.full_tensor(), ref)
    o = plan(**shards)[0]
    assert isinstance(o, DTensor)
    assert o.stride() == due[0].stride()
    assert o.placements == (Shard(axis),)
    return int(communication.get_total_counts())


@pytest.mark.parametrize(("placement", "axis"), PLACED)
def test_dtensors_give_dtensors(crew: Crew, placement: Placement, axis: int) -> None:
    assert crew.run(2, compare, placement, axis) == [0, 0]


class Layer(torch.nn.Module):
    """Self attention of 4 heads of 4; x [B,S,16]."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q", "k", "v", "out")
        self.parts = torch.nn.ModuleDict({n: torch.nn.Linear(16, 16, bias=False) for n in names})
        self.attention = ag.nn.Attention(mask=ag.Causal())

    def forward(self, x: Any) -> Any:
        each = (self.parts[n](x) for n in ("q", "k", "v"))
        o: Any = self.attention(*(y.unflatten(-1, (4, 4)).transpose(1, 2) for y in each))
        return self.parts["out"](o.transpose(1, 2).flatten(2))


def run_parallel(rank: int, group: Any) -> bool:
    """A layer whose projections are divided by columns, then by rows: what it communicates."""
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 8, 16)
    due = layer(x)
    columns = ColwiseParallel(use_local_output=False)
    plan = {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()}
    parallelize_module(layer.parts, mesh, plan)
    with CommDebugMode() as communication:
        o = layer(x)
    torch.testing.assert_close(o, due)
    counts = communication.get_comm_counts()
    assert counts == {torch.ops.c10d_functional.all_reduce: 1}, counts  # of the rows at the end
    o.sum().backward()
    return True


def test_a_tensor_parallel_layer_gathers_nothing(crew: Crew) -> None:
    assert all(crew.run(2, run_parallel))


def refuse(rank: int, group: Any) -> list[str]:
    """What the errors of wrong DTensors say."""
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = ag.compile(ag.shard(graph(), ag.Mesh(2), "heads"), group=group, target="cpu")
    right = place(mesh, 1)
    plain = draw()
    long = distribute_tensor(torch.zeros(2, 4, 16, 4), mesh, [Shard(1)])
    said = []
    for wrong in (
        place(mesh, 2),
        {**right, "k": distribute_tensor(plain["k"], mesh, [Replicate()])},
        {**right, "v": plain["v"]},
        {**right, "q": long},
    ):
        with pytest.raises(ag.PlanMismatchError) as error:
            plan(**wrong)
        said.append(str(error.value))
    return said


def test_a_mismatch_names_both_placements(crew: Crew) -> None:
    for divided, whole, plain, long in crew.run(2, refuse):
        text = r"q: expected placements \(Shard\(dim=1\),\), got \(Shard\(dim=2\),\); redistribute"
        assert re.search(text, divided)
        assert "k: expected placements (Shard(dim=1),), got (Replicate(),)" in whole
        assert "v: expected a DTensor, as others are, got a plain tensor" in plain
        assert "q: expected [2, 4, 8, 4] in all, got [2, 4, 16, 4]" in long


def divide_odd_sizes(rank: int, group: Any, placement: Placement, axis: int) -> int:
    """Compare with one device, sizes that ranks don't divide evenly; what this rank has of them."""
    sizes = [[4, 4, 8], [4, 5, 8], [4, 4, 23]][axis]
    x = torch.randn(*sizes, 4, generator=torch.Generator().manual_seed(0))
    spec = ag.TensorSpec.like(x)
    graph = ag.attention(spec, spec, spec, mask=ag.Causal())
    mesh = DeviceMesh.from_group(group, "cpu")
    plan = ag.compile(ag.shard(graph, ag.Mesh(3), placement), group=group, target="cpu")
    part = distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_()
    o: Any = plan(part, part.detach(), part.detach())
    leaf = x.clone().requires_grad_()
    due: Any = ag.compile(graph, target="cpu")(leaf, x, x)
    torch.testing.assert_close(o.full_tensor(), due)
    o.sum().backward()
    due.sum().backward()
    assert isinstance(part.grad, DTensor)
    torch.testing.assert_close(part.grad.full_tensor(), leaf.grad)
    assert isinstance(part, DTensor)
    return int(part.to_local().shape[axis])


@pytest.mark.parametrize(("placement", "axis"), PLACED)
def test_sizes_are_divided_as_dtensors_are(crew: Crew, placement: Placement, axis: int) -> None:
    """PyTorch gives 23 positions to three ranks as 8, 8 and 7; five heads as 2, 2 and 1."""
    lengths = crew.run(3, divide_odd_sizes, placement, axis)
    assert lengths == [[2, 2, 0], [2, 2, 1], [8, 8, 7]][axis]


def refuse_divisions(rank: int, group: Any) -> list[str]:
    """What the errors of DTensors say that the plan cuts elsewhere; nothing is sent."""
    mesh, said = DeviceMesh.from_group(group, "cpu"), []
    graphs = {
        "heads": ((1, 6, 8, 4), (1, 2, 8, 4), 1, {}),  # of three groups whose heads are shared
        "zigzag": ((1, 6, 12, 4), (1, 6, 12, 4), 2, {}),  # whose parts have another order
        "contiguous": ((1, 1, 9, 4), (1, 1, 9, 4), 2, {"dropout": 0.5}),  # by fours
    }
    for placement, (q, k, axis, more) in graphs.items():
        specs: list[Any] = [ag.TensorSpec(x, torch.float32) for x in (q, k, k)]
        sharded = ag.shard(ag.attention(*specs, **more), ag.Mesh(3), placement)  # type: ignore[arg-type]
        plan = ag.compile(sharded, group=group, target="cpu")
        tensors = [distribute_tensor(torch.zeros(x), mesh, [Shard(axis)]) for x in (q, k, k)]
        whole = [distribute_tensor(torch.tensor(1), mesh, [Replicate()])] * (2 * len(more))
        with count_bytes() as sent, pytest.raises(ag.PlanMismatchError) as error:
            plan(*tensors, *whole)
        assert sent == [0, 0]
        said.append(str(error.value))
    return said


def test_dtensors_that_lie_otherwise_are_refused_by_all_ranks(crew: Crew) -> None:
    heads, order, fours = (set(each) for each in zip(*crew.run(3, refuse_divisions), strict=True))
    assert len(heads) == len(order) == len(fours) == 1
    assert "k: of 2 key/value heads rank 2 has 1:2 by 'heads', and none of a DTensor" in heads.pop()
    assert "q: of 12 queries rank 0 has 0:2 10:12 by 'zigzag', and 0:4 of a DTensor" in order.pop()
    assert "q: of 9 queries rank 0 has 0:4 by 'contiguous'" in fours.pop()
