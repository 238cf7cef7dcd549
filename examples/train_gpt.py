"""Train a small GPT twice, step by step: attention by attn_graph, and by PyTorch's own function.

Even layers see every position before them, odd layers a window. PyTorch needs the window as a dense
mask and computes every score; a plan computes only those near the window. Both models start equal
and read one text, English from Python's own help, so their losses differ by rounding alone.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import attn_graph as ag

BATCH, CONTEXT, WINDOW = 1, 2048, 64  # sequences, positions, and positions that odd layers see
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 2, 16
WIDTH = HEADS * HEAD_DIM
MASKS = (ag.Causal(), ag.Causal() & ag.Window(WINDOW - 1))  # of even and of odd layers

RATE, WARMUP = 3e-3, 20  # the highest learning rate, and the steps that lead to it
STEEPEST = 1.0  # a longer gradient is cut to this length
HELD_OUT = 8 * CONTEXT  # characters at the end of the text, for the validation loss
EVERY = 10  # steps between two lines, where the output is not a terminal
PICTURE = Path("train_gpt.png")

# Training amplifies rounding, the more the higher the learning rate. At this one a model whose
# weights are all moved by one rounding stays within 3e-6 of itself (160 steps, a CPU); a factor of
# 300 is left for other machines. At twice the rate it strays by 5e-2, whoever computes attention.
TOLERANCE = 1e-3

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Attend = Callable[..., Any]  # q [B,H,S,D], k and v [B,G,S,D] -> o [B,H,S,D]


def specs(batch: int, length: int) -> tuple[ag.TensorSpec, ag.TensorSpec, ag.TensorSpec]:
    """q, k, v as the model makes them: q and k turned by RoPE, v a view of the projection."""
    row = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    few = (batch, KV_HEADS, length, HEAD_DIM)
    q = ag.TensorSpec((batch, HEADS, length, HEAD_DIM), torch.float32, layout="bshd")
    k = ag.TensorSpec(few, torch.float32, layout="bshd")
    v = ag.TensorSpec(few, torch.float32, strides=(length * row, HEAD_DIM, row, 1))
    return q, k, v


def by_attn_graph(batch: int = BATCH, length: int = CONTEXT) -> list[Attend]:
    """One plan for each kind of layer; the layers of a kind share it."""
    q, k, v = specs(batch, length)
    return [ag.compile(ag.attention(q, k, v, mask=mask)) for mask in MASKS]


def by_pytorch() -> list[Attend]:
    """The same by `scaled_dot_product_attention`."""
    i, j = torch.arange(CONTEXT, device=DEVICE)[:, None], torch.arange(CONTEXT, device=DEVICE)
    near = (j <= i) & (j > i - WINDOW)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near, enable_gqa=True)

    return [causal, windowed]


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """RoPE: turn each pair of numbers of x [B,S,H,D] by an angle that grows with the position."""
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * phases).flatten(-2)


class Block(nn.Module):
    """One layer: grouped-query attention, then an MLP, each behind a norm; x [B,S,W]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.gather = nn.Linear(WIDTH, WIDTH, bias=False)
        inner, outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), inner, nn.GELU(), outer)
        nn.init.zeros_(self.gather.weight)  # a new layer hands x on as it is
        nn.init.zeros_(outer.weight)

    def forward(self, x: Tensor, phases: Tensor, attend: Attend) -> Tensor:
        """x [B,S,W] -> the same shape; attend: of this layer."""
        heads = self.project(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        q, k = rotate(q, phases), rotate(k, phases)
        o: Tensor = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.gather(o.transpose(1, 2).flatten(2))
        changed: Tensor = x + self.mlp(x)
        return changed


class GPT(nn.Module):
    """Characters [B,S] -> logits of the next one [B,S,vocabulary]."""

    phases: Tensor

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        angles = torch.arange(CONTEXT)[:, None] * 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        self.register_buffer("phases", torch.polar(torch.ones_like(angles), angles)[:, None])
        self.guess = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.zeros_(self.guess.weight)  # at first every character is as likely

    def forward(
        self, tokens: Tensor, attends: Sequence[Attend], positions: Tensor | None = None
    ) -> Tensor:
        """attends: of even and of odd layers, or of each. positions [S]: by default 0, 1, ..."""
        x = self.embed(tokens)
        phases = self.phases[: tokens.shape[1]] if positions is None else self.phases[positions]
        for layer, block in enumerate(self.blocks):
            x = block(x, phases, attends[layer % len(attends)])
        logits: Tensor = self.guess(self.norm(x))
        return logits

    def loss(self, text: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Mean cross entropy of each character of text [B,S+1] given those before it, in nats."""
        logits = self(text[:, :-1], attends)
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


@dataclass
class Run:
    """A model in training: its attention, and the loss and the seconds of each step."""

    name: str
    attends: list[Attend]
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, attends: list[Attend], vocabulary: int, name: str = "attn_graph") -> "Run":
        """A new model; all start equal."""
        torch.manual_seed(0)
        model = GPT(vocabulary).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
        return cls(name, attends, model, optimizer)

    def step(self, text: Tensor, rate: float) -> None:
        """Train on text [B,S+1] at a learning rate."""
        start = now()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.model.loss(text, self.attends)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), STEEPEST)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(now() - start)

    @property
    def speed(self) -> float:
        """Characters a second, in the median step."""
        return BATCH * CONTEXT / median(self.seconds)

    def state(self) -> str:
        return f"loss {self.losses[-1]:.3f}, {self.speed:,.0f} tokens/s"

    def validation(self, held_out: Tensor) -> float:
        """The mean loss over held-out text, in nats a character."""
        with torch.no_grad():
            parts = torch.split(held_out.unfold(0, CONTEXT + 1, CONTEXT), BATCH)
            return sum(self.model.loss(text, self.attends).item() for text in parts) / len(parts)


def now() -> float:
    """The time in seconds, once the device has finished its work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def encode() -> tuple[Tensor, list[str]]:
    """Python's help topics as numbers, and the characters that these stand for."""
    text = "\n".join(topics.values())
    characters = sorted(set(text))
    number = {c: n for n, c in enumerate(characters)}
    return torch.tensor([number[c] for c in text], device=DEVICE), characters


def batches(text: Tensor, steps: int) -> Iterator[tuple[Tensor, float]]:
    """For each step random pieces of the text [B,S+1], and the learning rate."""
    random = torch.Generator().manual_seed(0)
    pieces = text.unfold(0, CONTEXT + 1, 1)
    for step in range(steps):
        rate = RATE * min((step + 1) / WARMUP, 1 - step / steps)
        yield pieces[torch.randint(len(pieces), (BATCH,), generator=random)], rate


def train(runs: Sequence[Run], text: Tensor, steps: int, console: Console) -> int:
    """Let the runs take turns, step by step. Plans built after the first step: should be none."""
    name, state = TextColumn("{task.description}"), TextColumn("{task.fields[state]}")
    columns = (name, BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), state)
    builds, drawn = 0, console.is_terminal
    with Progress(*columns, console=console, disable=not drawn) as progress:
        tasks = [progress.add_task(run.name, total=steps, state="") for run in runs]
        for step, (piece, rate) in enumerate(batches(text, steps)):
            for run, task in zip(runs, tasks, strict=True):
                run.step(piece, rate)
                progress.update(task, advance=1, state=run.state())
            builds = builds if step else ag.cache_info().builds
            if not drawn and step % EVERY == 0:  # a pipe or a file gets lines, no bar
                both = "; ".join(f"{run.name} {run.state()}" for run in runs)
                console.print(f"step {step + 1} of {steps}: {both}", soft_wrap=True)
    return ag.cache_info().builds - builds


def attention_seconds(runs: Sequence[Run], times: int = 5) -> list[float]:
    """Seconds of attention in a step, forward and backward, for each run; medians, in turn."""
    operands = [
        torch.empty_strided(s.shape, s.strides, device=DEVICE) for s in specs(BATCH, CONTEXT)
    ]
    q, k, v = (x.normal_().requires_grad_() for x in operands)
    times_of: list[list[float]] = [[] for _ in runs]
    for _ in range(times):
        for run, seconds in zip(runs, times_of, strict=True):
            start = now()
            for attend in run.attends:
                attend(q, k, v).sum().backward()
            seconds.append((now() - start) * LAYERS / len(MASKS))
    return [median(seconds) for seconds in times_of]


def table(ours: Run, theirs: Run, held_out: Tensor) -> Table:
    """Both runs side by side."""
    runs = ours, theirs
    rows = {
        "loss, last step": [f"{run.losses[-1]:.4f}" for run in runs],
        "validation loss": [f"{run.validation(held_out):.4f}" for run in runs],
        "step, median": [f"{1e3 * median(run.seconds):.0f} ms" for run in runs],
        "of which attention": [f"{1e3 * s:.0f} ms" for s in attention_seconds(runs)],
        "tokens/s": [f"{run.speed:,.0f}" for run in runs],
    }
    result = Table("", *(run.name for run in runs))
    for name, (mine, other) in rows.items():
        result.add_row(name, mine, other)
    return result


def draw(ours: Run, theirs: Run, differences: list[float]) -> None:
    """Write both loss curves, and by how much they differ."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(theirs.losses, label=theirs.name, linewidth=3, alpha=0.4)
    above.plot(ours.losses, label=ours.name, linewidth=1)
    above.set_ylabel("loss, nats a character")
    above.legend()
    below.plot(differences, color="grey")
    below.set(xlabel="step", ylabel="difference")
    figure.savefig(PICTURE)


def opening(steps: int) -> str:
    return (
        f"Two equal GPTs of {LAYERS} layers train on English text, {steps} steps of "
        f"{BATCH * CONTEXT:,} characters each, on {DEVICE}: one computes attention with attn_graph,"
        " one with PyTorch's scaled_dot_product_attention. 160 steps take about 3 minutes on two "
        "CPU cores. Ctrl-C stops."
    )


def main(steps: int = 160) -> None:
    console = Console()
    text, characters = encode()
    console.print(opening(steps))
    train_text, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    ours = Run.start(by_attn_graph(), len(characters))
    theirs = Run.start(by_pytorch(), len(characters), "PyTorch")
    builds = train((ours, theirs), train_text, steps, console)

    differences = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    console.print(f"a step is {ours.speed / theirs.speed:.2f} times as fast")
    console.print(f"losses differ by {max(differences):.1e} at most, {differences[-1]:.1e} at last")
    console.print(f"plans built after the first step: {builds}; {ag.cache_info()}")
    console.print(f"workspace: {ag.default_workspace().bytes:,} bytes, shared by all layers")
    draw(ours, theirs, differences)
    console.print(f"both loss curves: {PICTURE.resolve()}", soft_wrap=True)
    console.print(table(ours, theirs, held_out))
    assert max(differences) <= TOLERANCE
    assert builds == 0


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
