"""Three training steps that fused attention is refused for elsewhere, beside SDPA's math path.

A MeanFlow step (a jvp through a transformer), the gradient penalty of a WGAN (double backward), and
a Hessian-vector product (forward over reverse): the same numbers, with the time and memory of each.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from attn_graph.nn.functional import scaled_dot_product_attention

TOKENS, WIDTH, HEADS = 1024, 128, 4
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile prints two lines
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What PyTorch has for such steps: all scores in memory, at once."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what it reads [B,M,WIDTH]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.norm = attend, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(x)  # type: ignore[no-any-return]  # of torch


class Flow(nn.Module):
    """u(z, r, t) [B,M,WIDTH]: the mean velocity between the times r and t of each sample [B]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.times = nn.Linear(2, WIDTH)
        self.blocks = nn.Sequential(Block(attend), Block(attend))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return self.blocks(z + self.times(torch.stack([r, t], -1))[:, None])  # type: ignore[no-any-return]


def meanflow_step(attend: Attend) -> list[Tensor]:
    """The gradients of MeanFlow's loss (arXiv 2505.13447): u should be v - (t - r) du/dt."""
    torch.manual_seed(0)
    flow, x, noise = Flow(attend), *torch.randn(2, 2, TOKENS, WIDTH).unbind()
    r, t = torch.rand(2, 2).sort(0).values
    z, velocity = torch.lerp(x, noise, t[:, None, None]), noise - x
    moves = (velocity, torch.zeros_like(r), torch.ones_like(t))
    u, slope, *_ = torch.func.jvp(flow, (z, r, t), moves)
    target = velocity - (t - r)[:, None, None] * slope
    return gradients((u - target.detach()).square().mean(), flow)


def gradient_penalty(attend: Attend) -> list[Tensor]:
    """The gradients of a critic's penalty (|d critic / d x| - 1)^2 (arXiv 1704.00028)."""
    torch.manual_seed(0)
    critic = nn.Sequential(Block(attend), Block(attend), nn.Linear(WIDTH, 1))
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad(critic(x).mean((1, 2)).sum(), x, create_graph=True)
    return gradients((slope.flatten(1).norm(dim=1) - 1).square().mean(), critic)


def hessian_product(attend: Attend) -> list[Tensor]:
    """The Hessian of a loss by the block's input, times a direction."""
    torch.manual_seed(0)
    block, x, direction = Block(attend), *torch.randn(2, 1, TOKENS, WIDTH).unbind()
    gradient = torch.func.grad(lambda x: block(x).square().mean())
    return [torch.func.jvp(gradient, (x,), (direction,))[1].detach()]


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """The gradient of each parameter that the loss depends on."""
    given = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    return [g for g in given if g is not None]


def measure(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and the most MiB that PyTorch allocates at once in another."""
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()
    profiler: Any = seen.profiler  # Any: PyTorch's stubs leave out bytes of an event
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return seconds, max(accumulate(sizes, initial=0)) / 2**20


def main() -> None:
    for step in (meanflow_step, gradient_penalty, hessian_product):
        ours, theirs = step(scaled_dot_product_attention), step(attend_by_math)
        for x, due in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, due, rtol=1e-3, atol=1e-6 + 1e-4 * float(due.abs().max()))
        for name, attend in (("ours", scaled_dot_product_attention), ("math", attend_by_math)):
            seconds, most = measure(partial(step, attend))
            print(f"{step.__name__}, {name}: {seconds:.2f} s, {most:.0f} MiB at most")


if __name__ == "__main__":
    main()
