"""Train a small GPT on documents of all lengths twice: packed without padding, and padded.

Both models start equal and read the same documents, the help topics that come with Python. Packed,
they lie one after another, q [T,H,D], and no row is computed that is not text.
"""

from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from train_gpt import (  # the model, in the same folder
    DEVICE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MASKS,
    TOLERANCE,
    Attend,
    Run,
    by_attn_graph,
    encode,
    now,
)

import attn_graph as ag

DOCUMENTS, LONGEST = 4, 2047  # in a step, and of one, in characters
RATE = 1e-3


def attend_packed(lengths: list[int]) -> list[Attend]:
    """One plan for each kind of layer, of documents that lie one after another."""
    total, row = sum(lengths), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q = ag.TensorSpec((total, HEADS, HEAD_DIM), torch.float32)
    k = ag.TensorSpec((total, KV_HEADS, HEAD_DIM), torch.float32)
    v = ag.TensorSpec(k.shape, torch.float32, strides=(row, HEAD_DIM, 1))  # of the projection
    where: dict[str, Any] = {
        "q_starts": ag.TensorSpec.like(starts),
        "max_lengths": (LONGEST, LONGEST),
    }
    plans = [ag.compile(ag.attention(q, k, v, mask=mask, **where)) for mask in MASKS]

    def pack(plan: ag.Plan) -> Attend:
        def attend(*qkv: Tensor) -> Tensor:
            o = plan(*(x[0].transpose(0, 1) for x in qkv), q_starts=starts)
            assert isinstance(o, Tensor)
            return o.transpose(0, 1)[None]

        return attend

    return [pack(plan) for plan in plans]


def packed_loss(run: Run, documents: list[Tensor]) -> Tensor:
    """Mean cross entropy of all characters, the documents one after another."""
    text, due = (torch.cat([x[part] for x in documents]) for part in (slice(-1), slice(1, None)))
    lengths = [len(x) - 1 for x in documents]
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    logits = run.model(text[None], attend_packed(lengths), positions)
    return F.cross_entropy(logits[0], due)


def padded_loss(run: Run, documents: list[Tensor]) -> Tensor:
    """The same, every document padded to the longest that there can be."""
    rows = [F.pad(x, (0, LONGEST + 1 - len(x)), value=-1) for x in documents]
    text, due = torch.stack(rows)[:, :-1], torch.stack(rows)[:, 1:]
    logits = run.model(text.clamp(0), run.attends)
    return F.cross_entropy(logits.flatten(0, 1), due.flatten(), ignore_index=-1)


def steps_of(text: Tensor, steps: int) -> Iterator[list[Tensor]]:
    """For each step random documents, each cut to the longest that there can be."""
    random = torch.Generator().manual_seed(0)
    *others, last = map(len, topics.values())
    documents = text.split([*(n + 1 for n in others), last])  # a line break ends each but the last
    for _ in range(steps):
        picks = torch.randint(len(documents), (DOCUMENTS,), generator=random).tolist()
        yield [documents[n][: LONGEST + 1] for n in picks]


def main(steps: int = 10) -> None:
    text, characters = encode()
    packed, padded = (
        Run.start(x, len(characters)) for x in ([], by_attn_graph(DOCUMENTS, LONGEST))
    )
    count = 0
    for documents in steps_of(text, steps):
        count += sum(len(x) - 1 for x in documents)
        for run, loss_of in ((packed, packed_loss), (padded, padded_loss)):
            start = now()
            run.optimizer.param_groups[0]["lr"] = RATE
            run.optimizer.zero_grad()
            loss = loss_of(run, documents)
            torch.autograd.backward(loss)
            run.optimizer.step()
            run.losses.append(loss.item())
            run.seconds.append(now() - start)
    fill = count / (steps * DOCUMENTS * LONGEST)
    print(f"{steps} steps of {DOCUMENTS} documents, which fill {fill:.0%} of a padded batch")
    for name, run in (("packed", packed), ("padded", padded)):
        print(f"{name}: loss {run.losses[-1]:.4f}, {count / sum(run.seconds):,.0f} tokens/s")
    differences = [abs(a - b) for a, b in zip(packed.losses, padded.losses, strict=True)]
    print(f"losses differ by {max(differences):.1e} at most")
    assert max(differences) <= TOLERANCE


if __name__ == "__main__":
    main()
