"""Generate text for requests that come and go, from keys and values in pages.

A small GPT, trained as in train_gpt.py, serves up to SLOTS requests at a time. Each step is one
batch of packed rows: chunks of prompts, and one row of each request that is being answered. All
begin with the same words, whose pages they share: even layers attend to those once for all rows,
and join the rest by lse; odd layers, which see a window, name them in every table. Beside it each
answer is computed again without a cache: it has to come out the same.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from train_gpt import (  # the model, in the same folder
    DEVICE,
    HEAD_DIM,
    HEADS,
    HELD_OUT,
    KV_HEADS,
    LAYERS,
    WINDOW,
    Attend,
    Run,
    by_attn_graph,
    encode,
    now,
    train,
)

import attn_graph as ag

PAGE, PAGES = 16, 96  # rows of a page, and pages of a pool
SLOTS, ROWS, CHUNK = 6, 64, 24  # requests at a time, rows of a step, and most of one prompt in it
SHARED, MOST = 64, 256  # characters that all prompts begin with, and of prompt and answer
NEW = 24  # characters of an answer
BOTTOM = (
    ag.Causal("bottom_right"),
    ag.Causal("bottom_right") & ag.Window(WINDOW - 1, 0, "bottom_right"),
)


@dataclass
class Request:
    """A prompt, what was answered, how much of both is cached, and the pages that it is in."""

    text: list[int]
    prompt: int
    cached: int = SHARED
    pages: list[int] = field(default_factory=list)

    def due(self, budget: int) -> int:
        """How many rows it has for a step: a chunk of the prompt, or the last character."""
        return min(len(self.text) - self.cached, CHUNK, budget)

    @property
    def done(self) -> bool:
        """Whether the answer is long enough."""
        return len(self.text) == self.prompt + NEW


@dataclass
class Batch:
    """The rows of a step: where each sequence begins, its length and pages, where keys go."""

    tokens: Tensor
    positions: Tensor
    places: Tensor  # rows of the pool, of the rows that there are
    starts: Tensor
    lengths: Tensor
    pages: Tensor


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ag.TensorSpec:
    """A dense tensor."""
    return ag.TensorSpec(shape, dtype)


class Server:
    """The pools of all layers, the pages of the shared words, and a plan for each kind of layer."""

    def __init__(self, run: Run, shared: list[int]) -> None:
        self.model = run.model
        self.pools = torch.zeros(LAYERS, 2, PAGES, PAGE, KV_HEADS, HEAD_DIM, device=DEVICE)
        self.free = deque(range(SHARED // PAGE, PAGES))
        self.common = [*range(SHARED // PAGE)]
        q, pool, i32 = spec(ROWS, HEADS, HEAD_DIM), spec(*self.pools.shape[2:]), torch.int32
        starts, lengths = spec(SLOTS + 1, dtype=i32), spec(SLOTS, dtype=i32)
        more: dict[str, Any] = {
            "q_starts": starts,
            "kv_lengths": lengths,
            "max_lengths": (ROWS, None),
            "stats": True,
        }
        whole, own = (spec(SLOTS, n // PAGE, dtype=i32) for n in (MOST, MOST - SHARED))
        self.window = ag.compile(ag.attention(q, pool, pool, mask=BOTTOM[1], pages=whole, **more))
        self.own = ag.compile(ag.attention(q, pool, pool, mask=BOTTOM[0], pages=own, **more))
        one: dict[str, Any] = {
            "q_starts": spec(2, dtype=i32),
            "pages": spec(1, SHARED // PAGE, dtype=i32),
        }
        self.prefix = ag.compile(
            ag.attention(q, pool, pool, max_lengths=(ROWS, None), stats=True, **one)
        )
        self.most_pages = len(self.common)
        self.fill(shared)

    def fill(self, shared: list[int]) -> None:
        """Compute the keys of the shared words, once."""
        attends = by_attn_graph(1, SHARED)

        def keep(layer: int) -> Attend:
            def attend(*qkv: Tensor) -> Tensor:
                self.write(layer, torch.arange(SHARED, device=DEVICE), *qkv[1:])
                o: Tensor = attends[layer % 2](*qkv)
                return o

            return attend

        self.model(torch.tensor([shared], device=DEVICE), [keep(n) for n in range(LAYERS)])

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Put keys and values [1,G,T,D] of the first rows into a layer's pools."""
        for pool, x in zip(self.pools[layer], (k, v), strict=True):
            pool.flatten(0, 1)[places] = x[0].transpose(0, 1)[: len(places)]

    def attend(self, layer: int, batch: Batch) -> Attend:
        """The attention of a layer in a step."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, batch.places, k, v)
            rows, pools = q[0].transpose(0, 1), self.pools[layer].unbind()
            where = {"q_starts": batch.starts}
            if layer % 2:
                o, _ = self.window(
                    rows, *pools, **where, pages=batch.pages, kv_lengths=batch.lengths
                )
                return o.transpose(0, 1)[None]
            own = (batch.lengths - SHARED).clamp(0)
            rest = batch.pages[:, SHARED // PAGE :].contiguous()
            first = self.own(rows, *pools, **where, pages=rest, kv_lengths=own)
            ends = torch.stack([batch.starts[0], batch.starts[-1]])
            common = torch.tensor([self.common], dtype=torch.int32, device=DEVICE)
            second = self.prefix(rows, *pools, q_starts=ends, pages=common)
            return join(*first, *second).transpose(0, 1)[None]

        return attend

    def gather(self, requests: list[Request]) -> tuple[Batch, list[int]]:
        """The rows of a step, and how many each request has in it."""
        counts, budget = [], ROWS
        for request in requests:
            counts.append(request.due(budget))
            budget -= counts[-1]
        tokens, positions, places = list[int](), list[int](), list[int]()
        table = torch.zeros(SLOTS, MOST // PAGE, dtype=torch.int32)
        lengths = torch.zeros(SLOTS, dtype=torch.int32)
        for slot, (request, n) in enumerate(zip(requests, counts, strict=True)):
            stop = request.cached + n
            while (len(request.pages) + len(self.common)) * PAGE < stop:
                request.pages.append(self.free.popleft())
            pages = [*self.common, *request.pages]
            tokens += request.text[request.cached : stop]
            positions += range(request.cached, stop)
            places += (pages[i // PAGE] * PAGE + i % PAGE for i in range(request.cached, stop))
            table[slot, : len(pages)], lengths[slot] = torch.tensor(pages), stop
        self.most_pages = max(self.most_pages, PAGES - len(self.free))
        starts = torch.tensor([0, *counts, *[0] * (SLOTS - len(counts))]).cumsum(0).int()
        padding = [0] * (ROWS - len(tokens))
        rows = (
            torch.tensor(x, device=DEVICE) for x in (tokens + padding, positions + padding, places)
        )
        return Batch(*rows, *(x.to(DEVICE) for x in (starts, lengths, table))), counts

    def step(self, requests: list[Request]) -> None:
        """Answer one character of each request whose prompt is cached by then."""
        batch, counts = self.gather(requests)
        attends = [self.attend(n, batch) for n in range(LAYERS)]
        guesses = self.model(batch.tokens[None], attends, batch.positions)[0].argmax(-1).tolist()
        for request, n, stop in zip(requests, counts, batch.starts[1:].tolist(), strict=False):
            request.cached += n
            if n and request.cached == len(request.text):
                request.text.append(guesses[stop - 1])

    def serve(self, waiting: list[Request]) -> int:
        """Answer all; two come with each step while there is room. Returns the steps taken."""
        queue, active, steps = deque(waiting), list[Request](), 0
        while queue or active:
            for _ in range(min(2, len(queue), SLOTS - len(active))):
                active.append(queue.popleft())
            self.step(active)
            for request in [x for x in active if x.done]:
                self.free.extend(request.pages)
                active.remove(request)
            steps += 1
        return steps


def join(o: Tensor, lse: Tensor, o2: Tensor, lse2: Tensor) -> Tensor:
    """Attention over two sets of keys, o [T,H,D], by the lse [H,T] over each."""
    both = torch.logaddexp(lse, lse2)
    finite = both.masked_fill(both == -torch.inf, 0.0)  # rows of no request have seen nothing
    first, second = (torch.exp(x - finite).T[..., None] for x in (lse, lse2))
    return o * first + o2 * second


def recompute(run: Run, text: list[int]) -> list[int]:
    """The answer to a prompt, all rows computed anew for each character: 32, 64, ... of them."""
    for _ in range(NEW):
        padding = [0] * (-len(text) % 32)
        attends = by_attn_graph(1, len(text) + len(padding))
        logits = run.model(torch.tensor([text + padding], device=DEVICE), attends)
        text = [*text, int(logits[0, len(text) - 1].argmax())]
    return text


def main(steps: int = 30, requests: int = 16) -> None:
    console = Console()
    text, characters = encode()
    run = Run.start(by_attn_graph(), len(characters))
    train([run], text[:-HELD_OUT], steps, console)
    shared, rest = text[:SHARED].tolist(), text[-HELD_OUT:].tolist()
    prompts = [shared + rest[200 * n : 200 * n + 7 + 11 * n % 97] for n in range(requests)]
    with torch.no_grad():
        server = Server(run, shared)
        answers = [Request([*prompt], len(prompt)) for prompt in prompts]
        start = now()
        batches = server.serve(answers)
        middle = now()
        again = [recompute(run, prompt) for prompt in prompts]
        seconds = middle - start, now() - middle
    count = requests * NEW
    print(
        f"{requests} requests, {count} characters in {batches} steps: "
        f"{count / seconds[0]:,.0f} tokens/s; without a cache {count / seconds[1]:,.0f}"
    )
    a_page = server.pools.nbytes // PAGES
    print(
        f"{server.most_pages} pages in use at most, {server.most_pages * a_page:,} bytes; "
        f"a cache of {SLOTS} x {MOST} rows has {SLOTS * MOST // PAGE * a_page:,}"
    )
    same = sum(x.text == y for x, y in zip(answers, again, strict=True))
    print(f"{same} of {requests} answers are those without a cache")
    assert same == requests
    assert len(server.free) + len(server.common) == PAGES


if __name__ == "__main__":
    main()
