"""Models in two processes: each has half of a batch, and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attn_graph as ag
from attn_graph.nn import Attention, MultiheadAttention

RANKS = 2
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
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def work(rank: int, path: str, wrap: Callable[[Block], torch.nn.Module]) -> None:
    """One process: its half of the batch, and the gradients of the whole to compare with."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    alone, batch = make()
    torch.stack([loss(alone, half) for half in batch.chunk(RANKS)]).mean().backward()
    model, _ = make()
    wrapped = wrap(model)  # it has to outlive the backward
    loss(wrapped, batch.chunk(RANKS)[rank]).backward()
    for (name, p), due in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(whole(p.grad), due.grad, msg=f"the gradient of {name}")
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [replicate, replicate_compiled, shard])
def test_gradients_are_those_of_one_process(
    wrap: Callable[[Block], torch.nn.Module], tmp_path: Path
) -> None:
    spawn: Any = multiprocessing.spawn  # type: ignore[attr-defined]  # PyTorch lists it nowhere
    spawn(work, (str(tmp_path / "store"), wrap), nprocs=RANKS)
