"""Keys and values in another float than the queries: converted as they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_graph as ag
from attn_graph.nn.functional import attention
from tests.support.kernels import interpreted

B, H, G, M, N, D = 2, 4, 2, 5, 37, 16
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS = [(q, k) for q in (F16, BF16, F32, F64) for k in (F16, BF16, F32) if q != k]
ONE = {"k_scale": torch.ones(1, 1, 1, 1), "v_scale": torch.ones(1, 1, 1, 1)}
LAST = ag.Causal("bottom_right")
attend: Any = attention


def inputs(q: torch.dtype, k: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = (B, H, M, D), (B, G, N, D), (B, G, N, D)
    kinds = (q, k, k)
    return [
        torch.randn(shape, generator=random).to(kind)
        for shape, kind in zip(shapes, kinds, strict=True)
    ]


def converted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    o: Tensor = attend(q, k, v, mask=LAST, **ONE, **options)
    return o


def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o: Tensor = attend(q, k.to(q.dtype), v.to(q.dtype), mask=LAST)
    return o


@pytest.mark.parametrize(("q", "k"), PAIRS)
def test_keys_in_another_float_give_what_their_copies_give(q: torch.dtype, k: torch.dtype) -> None:
    tensors = inputs(q, k)
    graph = ag.attention(
        *map(ag.TensorSpec.like, tensors),
        mask=LAST,
        k_scale=ag.TensorSpec.like(ONE["k_scale"]),
        v_scale=ag.TensorSpec.like(ONE["v_scale"]),
    )
    plan = ag.compile(graph)
    assert plan.graph.inputs[1].spec.dtype == k
    o = plan(*tensors, **ONE)
    assert isinstance(o, Tensor)
    unit = torch.finfo(q).eps
    torch.testing.assert_close(o, copied(*tensors), rtol=8 * unit, atol=8 * unit)


@pytest.mark.parametrize(("q", "k"), [(BF16, F16), (BF16, F32), (F32, F16), (F32, BF16)])
def test_a_cache_in_another_float_is_read_in_pages_and_packed(
    q: torch.dtype, k: torch.dtype
) -> None:
    pool = torch.randn(6, 4, G, D).to(k)
    pages = torch.tensor([[5, 1, -1], [0, 2, 4]], dtype=torch.int32)
    given = {"pages": pages, "kv_lengths": torch.tensor([7, 11]), "mask": LAST}
    x = torch.randn(2, H, 1, D).to(q)
    due = attend(x, pool.to(q), pool.to(q), **given)
    unit = torch.finfo(q).eps
    o = attend(x, pool, pool, **given, **ONE)
    torch.testing.assert_close(o, due, rtol=8 * unit, atol=8 * unit)
    starts = torch.arange(3, dtype=torch.int32)
    packed = attend(x[:, :, 0], pool, pool, **given, **ONE, q_starts=starts, max_lengths=(1, None))
    torch.testing.assert_close(packed, due[:, :, 0], rtol=8 * unit, atol=8 * unit)


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda q, k, v: f(q, k, v).float().pow(2).sum()),
    "jvp": lambda f: lambda q, k, v: torch.func.jvp(lambda q: f(q, k, v), (q,), (q.flip(2),)),
    "vmap": lambda f: (
        lambda q, k, v: torch.func.vmap(f)(*(torch.stack([x, x.flip(1)]) for x in (q, k, v)))
    ),
    "compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_by_queries_are_those_of_copies(name: str) -> None:
    tensors = inputs(F32, F16)
    due, out = (TRANSFORMS[name](f)(*tensors) for f in (copied, converted))
    torch.testing.assert_close(out, due, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("q", "k"), [(BF16, F16), (BF16, F32), (F32, F16), (F32, BF16)])
def test_kernels_convert_keys_as_they_load_them(q: torch.dtype, k: torch.dtype) -> None:
    tensors = inputs(q, k)
    unit = torch.finfo(q).eps
    o = converted(*tensors, backends=("triton",))
    torch.testing.assert_close(o, copied(*tensors), rtol=8 * unit, atol=8 * unit)


@pytest.mark.parametrize("target", ["a100", "h100", "b200"])
def test_gpus_read_keys_in_another_float_as_they_lie(target: str) -> None:
    q = ag.TensorSpec((2, 32, 1, 128), BF16)
    one = ag.TensorSpec((1, 1, 1, 1), F32)
    for kind in (F16, F32):
        k = ag.TensorSpec((2, 8, 4096, 128), kind)
        graph = ag.attention(q, k, k, k_scale=one, v_scale=one)
        told = ag.explain(graph, target=target, gradients=())
        assert told.backend == "triton"
        assert "copies" not in "".join(told.notes)
    half = ag.TensorSpec((2, 32, 1, 128), F16)
    graph = ag.attention(half, k, k, k_scale=one, v_scale=one)
    told = ag.explain(graph, target=target, gradients=())
    assert "float16 ends at 65504" in str(told)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, F16, r"k_scale= and v_scale= of 1.0 have kernels convert both\); write k.float\(\)"),
        (ONE, F32, "leave it out"),
        ({}, F64, r"write k.float\(\)"),
    ],
)
def test_other_floats_are_refused_with_both_ways_out(
    options: dict[str, Any], kind: torch.dtype, words: str
) -> None:
    with pytest.raises(ag.GraphError, match=words):
        attend(*inputs(F32, kind), **options)


def test_converted_keys_have_no_gradient_and_say_so() -> None:
    q, k, v = inputs(F32, F16)
    with pytest.raises(ag.GraphError, match="quantised tensors, scales"):
        converted(q, k.requires_grad_(), v).sum().backward()
