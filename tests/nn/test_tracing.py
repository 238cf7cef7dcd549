"""torch.compile traces calls where it keeps masks and plans as constants, and else goes around."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import attn_graph as ag
from attn_graph.nn import varlen_attn
from attn_graph.nn.functional import attention
from attn_graph.nn.tracing import KEEPS_CONSTANTS, call_after_import
from tests.support.tracing import traces

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
X = ag.TensorSpec((1, 2, 16, 8), torch.float32)


def test_which_versions_keep_constants() -> None:
    assert (VERSION >= (2, 12)) == KEEPS_CONSTANTS


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of 2.11
def test_code_compiles_with_a_call_in_it_whichever_torch_this_is() -> None:
    """Both forms of a call, with a mask that is made inside, and their gradients."""
    plan = ag.compile(ag.attention(X, X, X, mask=ag.Causal()), target="cpu")
    leaves = [torch.randn(1, 2, 16, 8).requires_grad_() for _ in "qkv"]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = plan(2 * q, k, v)
        windowed = attention(q, k, v, mask=ag.Causal() & ag.Window(4))
        assert isinstance(o, torch.Tensor)
        assert isinstance(windowed, torch.Tensor)
        return o + windowed.exp()

    torch._dynamo.reset()
    outputs = [run(*leaves) for run in (torch.compile(attend, backend="aot_eager"), attend)]
    gradients = [torch.autograd.grad(o.sum(), leaves) for o in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(KEEPS_CONSTANTS, reason="torch.compile traces calls from torch 2.12 on")
def test_where_calls_are_not_traced_a_whole_graph_is_refused() -> None:
    plan = ag.compile(ag.attention(X, X, X), target="cpu")
    compiled = torch.compile(lambda x: plan(x, x, x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="marked as skipped"):
        compiled(torch.randn(1, 2, 16, 8))


# Sizes and arguments that torch.compile makes symbols of


@frozen
class Between(ag.Mask):
    """Keys from one position to another one."""

    bounds: tuple[int, int]

    def keep(self, at: ag.extend.Place) -> Any:  # Any: a tensor, or a number
        return (at.j >= self.bounds[0]) & (at.j < self.bounds[1])


Sized = Callable[
    [Tensor, int], Any
]  # of a tensor [1,H,N,D] and a number; Any: what attention gives


def with_mask(make: Callable[[int, int], ag.Mask]) -> Sized:
    """Attention under a mask of the number of keys and another number."""
    return lambda x, n: attention(x, x, x, mask=make(x.shape[2], n))


def pack(x: Tensor) -> Tensor:
    """One head's rows of x [1,H,N,D] as a packed tensor [N,H,D]."""
    return x[0].transpose(0, 1)


def packed(most: Callable[[int, int], tuple[int, int | None]]) -> Sized:
    """Packed attention with the most rows that numbers say."""

    def attend(x: Tensor, n: int) -> Any:
        rows = pack(x)
        starts = torch.tensor([0, 3, rows.shape[0]])
        return attention(rows, rows, rows, q_starts=starts, max_lengths=most(rows.shape[0], n))

    return attend


def varlen(window: Callable[[int, int], tuple[int, int]]) -> Sized:
    """PyTorch's words for packed attention, with a window."""

    def attend(x: Tensor, n: int) -> Any:
        rows = pack(x)
        N = rows.shape[0]
        starts = torch.tensor([0, 3, N])
        return varlen_attn(rows, rows, rows, starts, starts, N, N + n, window_size=window(N, n))

    return attend


SIZED: dict[str, Sized] = {
    "window of a size": with_mask(lambda N, n: ag.Causal() & ag.Window(N // 2)),
    "window": with_mask(lambda N, n: ag.Window(left=n, right=N - n, align="top_left")),
    "prefix": with_mask(lambda N, n: ag.Causal() | ag.Prefix(n)),
    "own": with_mask(lambda N, n: Between((n // 2, N))),
    "max_lengths": packed(lambda N, n: (N, None)),
    "max_lengths of a number": packed(lambda N, n: (N + n, N)),
    "varlen": varlen(lambda N, n: (n, 0)),
    "varlen of a size": varlen(lambda N, n: (N // 4, n)),
    "workspace": lambda x, n: attention(x, x, x, max_workspace=x.numel() * n * 1000),
    "flags": lambda x, n: attention(x, x, x, deterministic=n > 6, stats=x.shape[2] > 18),
    "numbers": lambda x, n: attention(x, x, x, scale=1 / x.shape[2], soft_cap=n),
}


@pytest.mark.parametrize(
    ("kind", "dynamic"),  # symbols when they change, or from the first call on
    [*((kind, None) for kind in SIZED), ("own", True)],
)
@traces
def test_numbers_of_options_may_be_symbols(kind: str, dynamic: bool | None) -> None:
    """They are constants of the code, and another number compiles anew."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    call, sizes = SIZED[kind], ((16, 5), (20, 6), (24, 7))
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for N, n in sizes:
        x = torch.randn(1, 2, N, 8)
        due, outputs = (
            each if isinstance(each, tuple) else (each,) for each in (call(x, n), compiled(x, n))
        )
        assert all(torch.equal(a, b) for a, b in zip(due, outputs, strict=True))
    assert counter.frame_count <= 3


def test_a_module_is_seen_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and at once where it has been."""
    seen: list[ModuleType] = []
    call_after_import("json", seen.append)
    assert seen == [json]
    (tmp_path / "imported_later.py").write_text("number = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    call_after_import("imported_later", seen.append)
    assert seen == [json]
    module = __import__("imported_later")
    assert seen == [json, module]
    assert module.number == 7
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is an old way
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"mask": ag.Causal() & ag.Window(4)}, {"soft_cap": 2.0}, {"mask": ag.Window(2, 3)}],
    ids=["window", "cap", "both sides"],
)
def test_what_torch_jit_traces_gives_what_a_call_gives(
    options: dict[str, Any], trains: bool
) -> None:
    """Of a plan and of `attention`, on other numbers than those that were traced."""
    plan = ag.compile(ag.attention(X, X, X, **options), target="cpu")
    calls: tuple[Callable[..., Any], ...] = (
        lambda q, k, v: plan(q, k, v),
        lambda q, k, v: attention(q, k, v, **options),
    )
    for call in calls:
        first, q = (torch.randn(X.shape).requires_grad_(trains) for _ in range(2))
        traced: Any = torch.jit.trace(call, (first, first, first))
        results: list[Any] = [each(q, q + 1, q) for each in (traced, call)]
        torch.testing.assert_close(*results)
        if trains:
            made = [torch.autograd.grad(o.sum(), q)[0] for o in results]
            torch.testing.assert_close(*made)
