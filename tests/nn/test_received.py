"""The statistic "received": the sums of weights by key, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attn_graph as ag
from attn_graph.nn.functional import attention
from attn_graph.testing.rule import allowance, distance
from tests.support.kernels import CPU, interpreted

B, H, G, M, N, D = 2, 6, 2, 5, 7, 8
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAST = ag.Causal("bottom_right")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": LAST},
    "window": {"mask": ag.Window(2, 0, "bottom_right"), "soft_cap": 2.0},
    "alibi": {"alibi": True, "align": "bottom_right", "scale": 0.5},
    "bias": {"bias": torch.randn(1, H, M, N)},
    "keep": {"keep": torch.rand(B, 1, M, N) > 0.4},
    "lengths": {"kv_lengths": torch.tensor([3, 7]), "q_lengths": torch.tensor([5, 2])},
    "sinks": {"sinks": torch.randn(H), "mask": LAST},
    "a row that sees nothing": {"mask": ag.Window(0, 0, "top_left") & ag.Window(-1, 2, "top_left")},
    "segments": {
        "segments": (torch.arange(M).expand(B, M) // 2, torch.arange(N).expand(B, N) // 3)
    },
}
attend: Any = attention


def inputs(dtype: torch.dtype = F32, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (B, H, M, D), (B, G, N, D), (B, G, N, D)
    return [torch.randn(shape, generator=random, dtype=F64).to(dtype) for shape in shapes]


def weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights [B,H,M,N] in float64: o of values that are each key's own axis."""
    wide = {n: x.double() if n in ("bias", "sinks") else x for n, x in options.items()}
    own = torch.eye(k.shape[2], dtype=F64).expand(*k.shape[:3], -1)
    p: Tensor = attend(q.double(), k.double(), own, **wide, backends=("math",))
    return p


def check(x: Tensor, p: Tensor, dtype: torch.dtype) -> None:
    ref = p.sum(-2)
    low = p.to(dtype).sum(-2).double()
    assert x.dtype == dtype
    assert distance(x, ref) <= allowance(ref, low, dtype, gradient=True) + 16 * 2.0**-24


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_received_is_the_sum_of_the_weights_of_each_key(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    options = dict(OPTIONS[name])
    for each in {"bias", "sinks"} & options.keys():
        options[each] = options[each].to(dtype)
    o, received, lse = attend(q, k, v, **options, stats=("received", "lse"))
    alone, due = attend(q, k, v, **options, stats=True)
    assert o.equal(alone)
    assert lse.equal(due)
    check(received, weights(q, k, options), dtype)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_received_in_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    _, received = attend(q, k, v, stats=("received",))
    p = weights(q, k, {})
    s = (q @ k.repeat_interleave(H // G, 1).mT) * D**-0.5
    low = torch.softmax(s, -1).sum(-2).double()
    assert distance(received, p.sum(-2)) <= allowance(p.sum(-2), low, dtype, gradient=True)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.integers(1, 9), st.booleans())
@settings(max_examples=settings().max_examples * 6 // 5)
def test_all_keys_together_receive_one_from_each_row_that_sees_one(
    heads: int, shared: int, rows: int, keys: int, causal: bool
) -> None:
    q, k = torch.randn(1, heads * shared, rows, D), torch.randn(1, heads, keys, D)
    mask = LAST if causal else None
    _, received, lse = attend(q, k, k, mask=mask, stats=("received", "lse"))
    assert received.shape == (1, heads * shared, keys)
    due = lse.isfinite().sum(-1).float()
    torch.testing.assert_close(received.sum(-1), due, rtol=1e-5, atol=1e-5)


def parts() -> tuple[list[int], list[int], Tensor, Tensor]:
    rows, keys = [4, 0, 3], [5, 2, 6]
    starts = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in (rows, keys)]
    return rows, keys, starts[0], starts[1]


def test_received_of_packed_rows_is_that_of_each_sequence() -> None:
    rows, keys, q_starts, kv_starts = parts()
    q, k = torch.randn(sum(rows), H, D), torch.randn(sum(keys), G, D)
    _, received, lse = attend(
        q, k, k, q_starts=q_starts, kv_starts=kv_starts, mask=LAST, max_lengths=(4, 6),
        stats=("received", "lse"),
    )  # fmt: skip
    assert received.shape == (H, sum(keys))
    assert lse.shape == (H, sum(rows))
    for b, n in enumerate(keys):
        own = slice(int(kv_starts[b]), int(kv_starts[b + 1]))
        x = q[q_starts[b] : q_starts[b + 1]].transpose(0, 1)[None]
        p = weights(x, k[own].transpose(0, 1)[None], {"mask": LAST})
        assert p.shape[-1] == n
        check(received[:, own][None], p, F32)


@pytest.mark.parametrize("packed", [True, False])
def test_received_in_pages_lies_as_the_pool_does(packed: bool) -> None:
    P, lengths = 3, [5, 2, 6]
    table = torch.tensor([[4, 1], [0, -1], [2, 5]], dtype=torch.int32)
    pool = torch.full((7, P, G, D), torch.nan)
    for pages, n in zip(table.tolist(), lengths, strict=True):
        for j in range(n):
            pool[pages[j // P], j % P] = torch.randn(G, D)
    q = torch.randn(3, H, 1, D)
    given: dict[str, Any] = {"pages": table, "kv_lengths": torch.tensor(lengths), "mask": LAST}
    if packed:
        given |= {"q_starts": torch.arange(4, dtype=torch.int32), "max_lengths": (1, None)}
    x = q[:, :, 0] if packed else q
    _, received = attend(x, pool, pool, **given, stats=("received",))
    assert received.shape == (H, 7, P)
    for b, n in enumerate(lengths):
        own = pool[table[b].long().clamp(min=0)].flatten(0, 1)[:n]
        p = weights(q[b : b + 1], own.transpose(0, 1)[None], {})
        rows = received[:, table[b].long().clamp(min=0)].flatten(1, 2)[:, :n]
        check(rows[None], p, F32)
    assert not received[:, [3, 6]].any()
    assert not received[:, 0, 2:].any()


def plain(q: Tensor, k: Tensor) -> Tensor:
    s = (q @ k.repeat_interleave(H // G, 1).mT) * D**-0.5
    kept = torch.ones(M, N).bool().tril(N - M)
    return torch.softmax(s.masked_fill(~kept, -torch.inf), -1).sum(-2)


def ours(q: Tensor, k: Tensor) -> Tensor:
    received: Tensor = attend(q, k, k, mask=LAST, stats=("received",))[1]
    return received


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda q, k: (f(q, k) ** 2).sum(), (0, 1)),
    "jvp": lambda f: lambda q, k: torch.func.jvp(f, (q, k), (k.repeat(1, 3, 1, 1)[:, :, :M], k)),
    "vmap": lambda f: lambda q, k: torch.func.vmap(f)(torch.stack([q, -q]), torch.stack([k, k])),
    "compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "autograd": lambda f: (
        lambda q, k: torch.autograd.grad(
            (f(a := q.clone().requires_grad_(), b := k.clone().requires_grad_()) ** 2).sum(), (a, b)
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_received_are_those_of_the_formula(name: str) -> None:
    q, k, _ = inputs(F64)
    due, out = (TRANSFORMS[name](f)(q, k) for f in (plain, ours))
    torch.testing.assert_close(out, due, rtol=1e-12, atol=1e-12)


def test_fake_results_are_as_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = ours(*inputs()[:2])
    with FakeTensorMode() as mode:
        fake = ours(*map(mode.from_tensor, inputs()[:2]))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_the_pass_is_explained_as_a_gradient_by_eight_values() -> None:
    q, k = ag.TensorSpec((1, 8, 512, 64), F16), ag.TensorSpec((1, 2, 512, 64), F16)
    few = ag.TensorSpec((1, 2, 512, 8), F16)
    graph = ag.attention(q, k, few, mask=LAST, stats=True)
    _, second = ag.vjp(graph, wants=("v",), cotangents=("o",))
    for target, backend in (("cpu", "math"), ("h100", "cudnn")):
        told = ag.explain(second, target=target, gradients=())
        assert told.backend == backend
        assert told.cost is not None


@interpreted
@pytest.mark.parametrize("name", ["plain", "causal", "sinks"])
def test_triton_gives_received_too(name: str) -> None:
    q, k, v = inputs()
    assert CPU.interprets
    _, received = attend(q, k, v, **OPTIONS[name], stats=("received",), backends=("triton",))
    check(received, weights(q, k, OPTIONS[name]), F32)


def jagged() -> object:
    x = torch.nested.nested_tensor(
        [torch.randn(3, 2, D), torch.randn(2, 2, D)], layout=torch.jagged
    )
    rows = x.transpose(1, 2)
    return attend(rows, rows, rows, stats=("received",))


def quantised() -> object:
    q, k, v = inputs()
    scale = torch.ones(1, 1, 1, 1)
    scales = {"k_scale": scale, "v_scale": scale}
    return attend(q, k.to(torch.int8), v.to(torch.int8), **scales, stats=("received",))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (jagged, "pass packed rows with q_starts="),
        (quantised, r"pass k \* k_scale and v \* v_scale"),
        (lambda: attend(*inputs(), stats=("received",), out=(inputs()[0],) * 2), "leave out= out"),
        (lambda: attend(*inputs(), stats=("recieved",)), "is none of lse, max, received"),
        (
            lambda: ag.attention(*map(ag.TensorSpec.like, inputs()), stats=("received",)),
            "ask attn_graph.nn.functional.attention for it",
        ),
    ],
)
def test_what_has_no_received_says_why(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ag.GraphError, match=words):
        call()
