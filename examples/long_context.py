"""Train the GPT of train_gpt.py with its context divided over several processes.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py

Each process has some of the positions of every sequence: embeddings, norms and MLPs need no others,
and attention fetches the keys that its queries see. Then the first process trains the same model
alone: the losses differ by rounding alone.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from train_gpt import (
    BATCH,
    CONTEXT,
    DEVICE,
    HELD_OUT,
    MASKS,
    STEEPEST,
    TOLERANCE,
    Attend,
    Run,
    batches,
    by_attn_graph,
    encode,
    specs,
)

import attn_graph as ag

STEPS = int(os.environ.get("STEPS", "20"))


def shard_masks(ranks: int) -> list[ag.types.Sharded]:
    """The attention of even and of odd layers, divided alike: zigzag evens causal masks out."""
    q, k, _ = specs(BATCH, CONTEXT)
    graphs = [ag.attention(q, k, k, mask=mask) for mask in MASKS]
    return [ag.shard(graph, ag.Mesh(ranks), "zigzag") for graph in graphs]


def attend_together(sharded: ag.types.Sharded) -> Attend:
    """This process's plan. Shards are dense, and the model's v is a view of its projection."""
    plan = ag.compile(sharded)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:  # Any: one tensor
        return plan(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))

    return attend


def step(run: Run, divided: ag.types.Sharded, rank: int, text: Tensor, rate: float) -> None:
    """Train on this process's positions of text [B,S+1]; gradients and losses are added up."""
    tokens, targets = (divided.split(x, "bi")[rank] for x in (text[:, :-1], text[:, 1:]))
    run.optimizer.param_groups[0]["lr"] = rate
    run.optimizer.zero_grad()
    logits = run.model(tokens, run.attends).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / (BATCH * CONTEXT)
    loss.backward()
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    total = torch.cat([x.flatten() for x in (loss.detach(), *gradients)])
    distributed.all_reduce(total)
    for gradient, part in zip(gradients, parts_of(total[1:], gradients), strict=True):
        gradient.copy_(part)
    nn.utils.clip_grad_norm_(run.model.parameters(), STEEPEST)
    run.optimizer.step()
    run.losses.append(total[0].item())


def parts_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor cut into the shapes of others."""
    parts = flat.split([x.numel() for x in like])
    return [part.view_as(x) for part, x in zip(parts, like, strict=True)]


def overlap(events: Sequence[Any]) -> str:  # Any: PyTorch's averages of events
    """How long attention took in a step, and how much of that it waited for messages."""
    times = {event.key: event.cpu_time_total / 1e3 for event in events}
    whole = sum(times.get(f"attn_graph.mesh {side}", 0.0) for side in ("forward", "backward"))
    waits = times.get("attn_graph.mesh wait", 0.0)
    return (
        f"attention took {whole:.0f} ms of a step, {waits:.1f} ms of them waiting for messages: "
        f"{100 * (1 - waits / whole):.0f} % overlapped"
    )


def main() -> None:
    distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    text, characters = encode()
    train_text, both = text[:-HELD_OUT], shard_masks(ranks)

    together = Run.start([attend_together(sharded) for sharded in both], len(characters))
    together.model.phases = both[0].split(together.model.phases, "i--")[rank]
    pieces = [*batches(train_text, STEPS)]
    for piece, rate in pieces:
        step(together, both[0], rank, piece, rate)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(together, both[0], rank, *pieces[-1])

    if rank == 0:
        alone = Run.start(by_attn_graph(), len(characters))
        for piece, rate in pieces:
            alone.step(piece, rate)
        for sharded, mask in zip(both, MASKS, strict=True):
            outlook = ag.explain(sharded, target="cpu")
            sent = f"{outlook.sent.forward:,} bytes forward, {outlook.sent.backward:,} backward"
            print(f"{mask}: {sent}, balance {outlook.balance:.3f}")
        print(overlap(profiled.key_averages()))
        losses = [*zip(together.losses[:STEPS], alone.losses, strict=True)]
        differences = [abs(a - b) for a, b in losses]
        print("loss {:.4f} by {ranks} processes, {:.4f} by one".format(*losses[-1], ranks=ranks))
        print(f"losses of {STEPS} steps differ by {max(differences):.1e} at most")
        assert max(differences) <= TOLERANCE
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
