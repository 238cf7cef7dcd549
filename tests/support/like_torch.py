"""Whether a model gives by our attention what it gives by PyTorch's, within the latter's errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_graph.testing.rule import allowance, distance

Run = Callable[[torch.nn.Module, Sequence[torch.Tensor]], torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]


def run_step(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], run: Run, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The output, and gradients of a weighted sum of it by all parameters and floating inputs."""
    model = copy.deepcopy(model).to(dtype)
    inputs = [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
    output = run(model, inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=dtype).view(output.shape)
    (output * weights).sum().backward()
    named = {n: p.grad for n, p in model.named_parameters()}
    named |= {f"input {n}": x.grad for n, x in enumerate(inputs) if x.is_floating_point()}
    gradients = {n: x for n, x in named.items() if x is not None}
    return {"output": output.detach(), **gradients}


def check_like_torch(
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    run: Run,
    ours: Run | None = None,
    around: Context = nullcontext,
    other: torch.nn.Module | None = None,
) -> None:
    """Raise AssertionError unless our way is as near float64 as PyTorch's own ways are, twice.

    The rule is that of `attn_graph.testing`; the largest error of PyTorch's two kernels counts, on
    these inputs and on some that are a little larger, for any of them may be near by luck. around:
    the context for our way; ours and other: what runs there, and the model, where those are not
    the same.
    """
    low = [
        (run_step(model, given, run, torch.float64), torch_steps(model, given, run))
        for given in (inputs, [x * 1.0078125 if x.is_floating_point() else x for x in inputs])
    ]
    due, _ = low[0]
    with around():
        result = run_step(other or model, inputs, ours or run, torch.float32)
    assert result.keys() == due.keys()
    for name, x in result.items():
        most = max(
            allowance(exact[name], step[name], torch.float32)
            for exact, steps in low
            for step in steps
        )
        error = distance(x, due[name])
        assert error <= most, f"{name}: error {error:.3g}, allowed {most:.3g}"


def torch_steps(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], run: Run
) -> list[dict[str, torch.Tensor]]:
    """`run_step` in float32 by the kernel that PyTorch chooses, and by its formula."""
    steps = [run_step(model, inputs, run, torch.float32)]
    with sdpa_kernel(SDPBackend.MATH):
        steps.append(run_step(model, inputs, run, torch.float32))
    return steps
