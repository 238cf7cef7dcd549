"""Models in two processes: each has half of a batch, and gradients are those of one process."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import attn_graph as ag
from attn_graph import SoftCap
from attn_graph.extend import Place
from attn_graph.nn import Attention, MultiheadAttention
from attn_graph.nn.functional import attention, scaled_dot_product_attention
from attn_graph.nn.tracing import KEEPS_CONSTANTS

RANKS = 2
LIMIT = timedelta(seconds=240)  # of a rank: one that stands still says where, and ends
ALL = [f"store.{rank}" for rank in range(RANKS)]
pytestmark = pytest.mark.slow


class Block(torch.nn.Module):
    """Attention by a plan, by a function, and by a layer with heads."""

    def __init__(self) -> None:
        super().__init__()
        x = ag.TensorSpec((2, 4, 6, 8), torch.float32)
        self.project = torch.nn.Linear(32, 32)
        self.plan = ag.compile(ag.attention(x, x, x, mask=ag.Causal()), target="cpu")
        self.attention = Attention(mask=ag.Causal() & ag.Window(2))
        self.heads = MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [2,6,32] -> [2,6,32]."""
        h = self.project(x).unflatten(-1, (4, 8)).transpose(1, 2).contiguous()
        o = self.plan(h, h, h) + self.attention(h, h, h)
        y = o.transpose(1, 2).flatten(2)
        result: torch.Tensor = self.heads(y, y, y, need_weights=False)[0]
        return result


def make() -> tuple[Block, torch.Tensor]:
    """The same model and batch in every process."""
    torch.manual_seed(0)
    return Block(), torch.randn(2 * RANKS, 6, 32)


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (model(x) ** 2).mean()
    return result


def replicate(model: Block) -> torch.nn.Module:
    return DistributedDataParallel(model)


def replicate_compiled(model: Block) -> torch.nn.Module:
    return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


def shard(model: Block) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.heads, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor of one process, or gathered from all."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def join(rank: int, path: str) -> None:
    """Make this process one of RANKS."""
    faulthandler.dump_traceback_later(LIMIT.seconds, exit=True)
    torch.set_num_threads(1)
    store = f"file://{path}"
    dist.init_process_group("gloo", store, timeout=LIMIT / 2, rank=rank, world_size=RANKS)


def leave(rank: int, path: str) -> None:
    """End this process's part, and leave a file that says so."""
    dist.barrier()  # no rank leaves while another still has messages for it
    dist.destroy_process_group()
    Path(f"{path}.{rank}").touch()


def work(rank: int, path: str) -> None:
    """One process. Having compared all gradients and parts, it leaves a file.

    Models go before the group does: the reducer of DistributedDataParallel, if it is the last
    that holds a group, waits for the group's thread, which may wait for the GIL that it holds.
    """
    join(rank, path)
    for wrap in (replicate, replicate_compiled, shard):
        compare_gradients(rank, wrap)
        gc.collect()
    due = compute(draw(), attend)
    for placement in (Shard(0), Shard(1), Replicate()):
        compare_parts([placement], due)
    refuse_parts(draw())
    leave(rank, path)


def compare_gradients(rank: int, wrap: Callable[[Block], torch.nn.Module]) -> None:
    """This process's half of the batch, and the gradients of the whole to compare with."""
    alone, batch = make()
    torch.stack([loss(alone, half) for half in batch.chunk(RANKS)]).mean().backward()
    model, _ = make()
    wrapped = wrap(model)  # it has to outlive the backward
    loss(wrapped, batch.chunk(RANKS)[rank]).backward()
    for (name, p), due in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(whole(p.grad), due.grad, msg=f"{wrap.__name__}, {name}")


# DTensors

INPUTS = ("q", "k", "v", "bias", "lengths")


def draw() -> dict[str, Any]:
    """q [2,4,6,8], k and v of two heads, a bias for all entries, and lengths."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 6, 8, generator=g) for n in (4, 2, 2))
    bias = torch.randn(1, 4, 6, 6, generator=g)
    return dict(zip(INPUTS, (q, k, v, bias, torch.tensor([4, 6])), strict=True))


def attend(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> Any:  # Any: tensors
    """o and lse, of tensors or DTensors."""
    options: dict[str, Any] = {"stats": True}
    return attention(q, k, v, mask=ag.Causal(), bias=bias, kv_lengths=lengths, **options)


def compute(tensors: dict[str, Any], function: Callable[..., Any]) -> list[Any]:
    """o, lse and the gradients of q, k, v and the bias."""
    leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    o, lse = function(**leaves)
    wanted = [t for t in leaves.values() if t.requires_grad]
    loss = (o * o).sum() + (lse * lse).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, wanted)]


def place(tensors: dict[str, Any], places: list[Placement], replicated: tuple[str, ...]) -> Any:
    """The tensors as DTensors, some of them whole in every process."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        name: distribute_tensor(t, mesh, [Replicate()] if name in replicated else places)
        for name, t in tensors.items()
    }


def compare_parts(places: list[Placement], due: list[Any]) -> None:
    """Results of parts are those of the whole, and nothing is communicated for them; compiled too,
    where torch.compile traces calls."""
    sharded = place(draw(), places, ("bias", "lengths"))
    with CommDebugMode() as communication:
        attend(**sharded)
    assert not communication.get_total_counts()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, compiled) if KEEPS_CONSTANTS else (attend,):
        results = compute(sharded, function)
        assert results[0].placements == results[2].placements == tuple(places)
        for x, ref in zip(results, due, strict=True):
            torch.testing.assert_close(x.full_tensor(), ref)
    o = scaled_dot_product_attention(*(sharded[n] for n in "qkv"), enable_gqa=True)
    assert o.placements == tuple(places)  # type: ignore[attr-defined]  # a DTensor


@frozen
class Odd(ag.Mask):
    """A mask of a user's own."""

    def keep(self, at: Place) -> Any:
        return at.i % 2 == at.j % 2


def refuse_parts(tensors: dict[str, Any]) -> None:
    """What parts can't compute is refused with both placements and the way out."""
    mesh = init_device_mesh("cpu", (RANKS,))
    qkv = [tensors[n] for n in "qkv"]
    others: list[Placement] = [Shard(2), Partial()]
    queries, sums = ([DTensor.from_local(x, mesh, [p]) for x in qkv] for p in others)
    heads, batch = ([distribute_tensor(x, mesh, [Shard(n)]) for x in qkv] for n in (1, 0))
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in qkv]
    single = [distribute_tensor(x[:, :1], mesh, [Shard(0)]) for x in qkv[1:]]
    three = [distribute_tensor(torch.zeros(3, 1, 2, 2), mesh, [Shard(0)])] * 3
    spec = ag.TensorSpec.like(qkv[0])
    plan = ag.compile(ag.attention(spec, spec, spec))
    plan(qkv[0], qkv[0], qkv[0])  # it compares each call's tensors with these
    calls: dict[str, Callable[[], object]] = {
        r"q is S\(2\), k is S\(2\).*redistribute": lambda: attention(*queries),
        r"q is P\(sum\)": lambda: attention(*sums),
        r"q is S\(1\), k is S\(0\), v is S\(0\)": lambda: attention(heads[0], *batch[1:]),
        "bias is a plain tensor": lambda: attention(*heads, bias=tensors["bias"]),
        "modifiers= of DTensors are not divided": lambda: attention(
            *heads, modifiers=[SoftCap(2.0)]
        ),
        "outputs= is given, but results of DTensors": lambda: attention(
            *heads, outputs={"o": "bshd"}
        ),
        r"write k\[..., :4\]": lambda: attention(heads[0], heads[1], 4),
        "dropout does not support DTensors": lambda: attention(*heads, dropout=0.5),
        "slopes are those of all heads": lambda: attention(*heads, alibi=True),
        "Odd may keep others": lambda: attention(*batch, mask=Odd()),
        "can't be divided into 2 equal parts": lambda: attention(*three),
        "to_local": lambda: plan(heads[0], heads[0], heads[0]),
    }
    for text, call in calls.items():
        with pytest.raises(ValueError, match=text):
            call()
    o: Any = attention(batch[0], *single)
    assert o.placements == (Shard(0),)
    due: Any = attention(qkv[0], *(x[:, :1] for x in qkv[1:]))
    assert torch.equal(o.full_tensor(), due)
    assert attention(*whole, mask=Odd()).placements == (Replicate(),)  # type: ignore[union-attr]  # a DTensor


def test_gradients_are_those_of_one_process_and_parts_need_no_other(tmp_path: Path) -> None:
    """In one group, whose start takes longer than what is asked of it."""
    start: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # PyTorch lists it nowhere
    start(work, (str(tmp_path / "store"),), nprocs=RANKS)
    assert sorted(file.name for file in tmp_path.glob("store.*")) == ALL
