"""Functions of Liger Kernel, and the same in PyTorch: tensors to results, some sizes ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from attrs import frozen

Function = Callable[..., Any]  # of tensors, to one or several


@final
@frozen
class Case:
    """Liger's function by name, with other arguments behind the tensors; and PyTorch's.

    shapes: of the tensors, drawn from a normal distribution.
    """

    name: str
    due: Function
    shapes: tuple[tuple[int, ...], ...]
    after: tuple[Any, ...] = ()
    change: Function = lambda *x: x
    trained: int = 9  # so many of the tensors have gradients


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


def turn(q: torch.Tensor, k: torch.Tensor, *by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rotate(q, *by), rotate(k, *by)


def angles(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries and keys as given; cosines and sines of angles, equal in both halves."""
    *given, angle = x
    both = torch.cat([angle, angle], -1)
    return (*(t.detach().clone().requires_grad_() for t in given), both.cos(), both.sin())


def add_norm(
    x: torch.Tensor, r: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms(x + r, w), x + r


def poly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = [x**n * (x**n).pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() for n in (3, 2, 1)]
    return sum(v * p for v, p in zip(w, parts, strict=True)) + b  # type: ignore[no-any-return]


def group(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2, w, b, 1e-6)


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    ordered = x.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1)
    total = ordered.cumsum(-1)
    many = (1 + count * ordered > total).sum(-1, keepdim=True)
    return (x - (total.gather(-1, many - 1) - 1) / many).clamp(min=0)


def labels(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.detach().clone().requires_grad_(), torch.arange(len(x)) % x.shape[-1]


def logs(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.log_softmax(-1).detach().requires_grad_(n == 0) for n, t in enumerate(x))


def chances(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.softmax(-1).detach().requires_grad_(n == 0) for n, t in enumerate(x))


def divergence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    middle = ((x.exp() + y.exp()) / 2).log()
    one, two = (F.kl_div(middle, z, reduction="sum", log_target=True) for z in (x, y))
    return (one + two) / 2 / len(x)


def variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p - q).abs().sum() / 2 / len(p)


ROWS = (5, 100)
CASES = {
    "softmax": Case("LigerSoftmaxFunction", lambda x: x.softmax(-1), (ROWS,)),
    "wide softmax": Case("LigerSoftmaxFunction", lambda x: x.softmax(-1), ((2, 3000),)),
    "sparsemax": Case("LigerSparsemaxFunction", sparsemax, (ROWS,), (-1,)),
    "swiglu": Case("LigerSiLUMulFunction", lambda a, b: F.silu(a) * b, (ROWS, ROWS)),
    "gated swiglu": Case(
        "LigerFusedGateUpSiLUMulFunction",
        lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
        ((5, 200),),
    ),
    "geglu": Case(
        "LigerGELUMulFunction", lambda a, b: F.gelu(a, approximate="tanh") * b, (ROWS, ROWS)
    ),
    "relu squared": Case("LigerReLUSquaredFunction", lambda x: F.relu(x) ** 2, (ROWS,)),
    "rms norm": Case("LigerRMSNormFunction", rms, (ROWS, (100,)), (1e-6,)),
    "rms norm, gemma": Case(
        "LigerRMSNormFunction", lambda x, w: rms(x, w + 1), (ROWS, (100,)), (1e-6, 1.0, "gemma")
    ),
    "rms norm, rows": Case(
        "LigerRMSNormFunction", rms, (ROWS, (100,)), (1e-6, 0.0, "llama", False, True)
    ),
    "rms norm, many rows": Case("LigerRMSNormFunction", rms, ((300, 64), (64,)), (1e-6,)),
    "added rms norm": Case("LigerFusedAddRMSNormFunction", add_norm, (ROWS, ROWS, (100,)), (1e-6,)),
    "layer norm": Case(
        "LigerLayerNormFunction",
        lambda x, w, b: F.layer_norm(x, (100,), w, b, 1e-6),
        (ROWS, (100,), (100,)),
        (1e-6,),
    ),
    "group norm": Case("LigerGroupNormFunction", group, ((2, 4, 30), (4,), (4,)), (4, 2, 1e-6)),
    "poly norm": Case("LigerPolyNormFunction", poly, (ROWS, (3,), ()), (1e-6, False)),
    "dyt": Case(
        "LigerDyTFunction",
        lambda x, a, g, b: g * torch.tanh(a * x) + b,
        (ROWS, (1,), (100,), (100,)),
    ),
    "rope": Case(
        "LigerRopeFunction", turn, ((1, 4, 7, 32), (1, 2, 7, 32), (1, 7, 16)), (), angles, 2
    ),
    "cross entropy": Case(
        "LigerCrossEntropyFunction", F.cross_entropy, (ROWS,), (None,), labels, 1
    ),
    "cross entropy, smooth": Case(
        "LigerCrossEntropyFunction",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        (ROWS,),
        (None, -100, 0.0, 0.1),
        labels,
        1,
    ),
    "kl": Case(
        "LigerKLDivLossFunction",
        lambda x, y: F.kl_div(x, y, reduction="batchmean"),
        (ROWS, ROWS),
        (),
        lambda x, y: (*logs(x), y.softmax(-1)),
        1,
    ),
    "jsd": Case("LigerJSDFunction", divergence, (ROWS, ROWS), (), logs, 1),
    "tvd": Case("LigerTVDLossFunction", variation, (ROWS, ROWS), (), chances, 1),
    "embedding": Case(
        "LigerEmbeddingFunction",
        lambda w, at: F.embedding(at, w),
        ((20, 64),),
        (),
        lambda w: (w.detach().clone().requires_grad_(), torch.tensor([3, 1, 3, 19, 0])),
        1,
    ),
    "linear cross entropy": Case(
        "LigerFusedLinearCrossEntropyFunction",
        lambda x, w, y: F.cross_entropy(x @ w.T, y),
        ((6, 32), (50, 32)),
        (),
        lambda x, w: (x, w, torch.arange(6)),
        2,
    ),
}


def tensors_of(case: Case) -> tuple[torch.Tensor, ...]:
    """New tensors, the same each time."""
    made = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=made) for shape in case.shapes]
    changed = case.change(*(x.requires_grad_() for x in drawn))
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in changed)


def results(function: Function, case: Case, *after: Any) -> list[torch.Tensor]:
    """What a function gives, and the gradients of all of it."""
    tensors = tensors_of(case)
    given = [x * 1 if x.requires_grad else x for x in tensors]  # a function may change its operands
    made = function(*given, *after)
    made = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
    outputs = [x.clone() for x in made if x.is_floating_point()]
    total = sum((x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in outputs)
    total.backward()
    grads = [x.grad for x in tensors[: case.trained] if x.grad is not None]
    return [x.detach() for x in (*outputs, *grads)]
