"""Quantised keys and values: an attention over k * k_scale and v * v_scale."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.scaling import Dequantise
from attn_graph.lowering.cpu import sequences
from attn_graph.machine.target import Target
from attn_graph.planner.cost import cost
from attn_graph.spec import IN_PAIRS, QUANTISED
from tests.support.quantised import Named, quantise_graph
from tests.support.tracing import Watch

CPU = Target.here("cpu")


@pytest.mark.parametrize("kind", QUANTISED)
def test_o_beyond_its_dtype_is_the_largest_number(kind: torch.dtype) -> None:
    q = torch.zeros(1, 1, 1, 16, dtype=kind)
    one, signs = torch.ones(1, 1, 1, 1), torch.ones(16)
    signs[0] = -1
    v = (100 * signs).reshape(1, 1, 1, 16).to(kind)
    scales = {"q_scale": one, "k_scale": one, "v_scale": 8 * one, "o_scale": one / 1000}
    tensors = {"q": q, "k": q, "v": v, **scales}
    graph = declare(tensors)
    plan = ag.compile(graph, target=CPU)
    o, amax = plan(**tensors)
    end = 127 if kind == torch.int8 else torch.finfo(kind).max
    assert o.double().flatten().tolist() == [-end, *[end] * 15]
    assert amax == 8 * v.double().abs().max()
    assert plan.verify(*tensors.values()).ok
    with pytest.raises(ag.GraphError, match="o in 8 bits has no gradient; leave o_scale out"):
        ag.vjp(graph)
    with pytest.raises(ag.GraphError, match="o in 8 bits has no tangent; leave o_scale out"):
        ag.jvp(graph)
    sinks = torch.zeros(1, requires_grad=True)
    trained = ag.compile(declare(tensors | {"sinks": sinks.detach()}), target=CPU)
    _, amax = trained(**tensors, sinks=sinks)
    with pytest.raises(ag.GraphError, match="o in 8 bits has no gradient"):
        torch.autograd.backward(amax)


def test_numbers_in_pairs_lie_in_the_order_of_their_bytes() -> None:
    pairs = torch.zeros(2, 5, 4, 8, dtype=IN_PAIRS).transpose(1, 2)  # [B,H,N,D/2] as [B,N,H,D/2]
    (x,) = Dequantise().run(pairs, torch.ones(1, 1, 1, 1), torch.zeros(1))
    assert ag.TensorSpec.like(x) == ag.TensorSpec((2, 4, 5, 16), torch.float32, (320, 16, 64, 1))


def declare(tensors: Named) -> ag.Graph:
    specs: dict[str, Any] = {name: ag.TensorSpec.like(x) for name, x in tensors.items()}
    return ag.attention(**specs)


class Sizes(Watch):
    """Remembers the most bytes of a result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        x = func(*args, **(kwargs or {}))
        if isinstance(x, torch.Tensor):
            self.most = max(self.most, x.untyped_storage().nbytes() * (func in ALLOCATE))
        return x


ALLOCATE = {torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor}


@pytest.mark.parametrize("layout", ["padded", "packed", "pages"])
def test_a_long_quantised_cache_is_dequantised_a_block_at_a_time(layout: str) -> None:
    B, G, N, D = 1, 2, 2**15, 64
    shape: tuple[int, ...] = (B, G, N, D)
    where: Named = {}
    if layout == "packed":
        starts = torch.tensor([[0, 1], [0, N]], dtype=torch.int32)
        shape, where = (N, G, D), {"q_starts": starts[0], "kv_starts": starts[1]}
    if layout == "pages":
        shape, where = (N // 16, 16, G, D), {"pages": torch.arange(N // 16)[None]}
    k = torch.randint(-127, 128, shape, dtype=torch.int8)
    scale = torch.full((1,) * k.ndim, 1 / 64)
    q = torch.randn(B, 4, 1, D) if layout != "packed" else torch.randn(1, 4, D)
    tensors = {"q": q, "k": k, "v": k, "k_scale": scale, "v_scale": scale, **where}
    plan = ag.compile(declare(tensors), target=CPU)
    whole = 2 * 4 * k.numel()  # bytes of k and v in float32
    needs = plan.memory()
    told = needs.workspace_forward + needs.temporary_forward
    assert sequences.BLOCK_BYTES < told < whole
    with Sizes() as sizes:
        plan(**tensors)
    assert sizes.most <= sequences.BLOCK_BYTES


def test_scales_and_quantised_tensors_have_no_derivative() -> None:
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.ones(1, 2, 5, 4, dtype=torch.int8)
    scale = torch.full((1, 1, 1, 1), 0.5, requires_grad=True)
    attend = partial(ag.nn.functional.attention, q, k, k)
    o = attend(k_scale=scale.detach(), v_scale=scale.detach())
    torch.autograd.backward(o, [torch.ones(1, 2, 3, 4)])
    assert q.grad is not None
    with pytest.raises(ag.GraphError, match="vjp: no derivative by k_scale, v_scale: quantised"):
        torch.autograd.backward(attend(k_scale=scale, v_scale=scale), [torch.ones(1, 2, 3, 4)])
    names = {"q": q, "k": k, "v": k, "k_scale": scale, "v_scale": scale}
    graph = declare(names)
    with pytest.raises(ag.GraphError, match="jvp: no derivative by k: quantised"):
        ag.jvp(graph, ("k",))
    assert ag.vjp(graph)[1].result_names == ("dq",)
    assert [i.name for i in ag.jvp(graph).inputs][-1] == "tq"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "k and v are quantised; pass k_scale= and v_scale= in torch.float32"),
        ({"q_scale": (1, 1, 1, 1)}, "q_scale is given, and k_scale is not; k and v are quantised"),
        (
            dict.fromkeys(("q_scale", "k_scale", "v_scale"), (1, 1, 1, 1)),
            "q_scale is for a tensor in 8 bits, and its own is torch.bfloat16; leave it out",
        ),
        ({"o_scale": (1, 1, 1, 1)}, "o_scale is given, and q_scale is not; o is quantised like q"),
        ({"k_scale": (1, 1, 1, 1)}, "k_scale is given, and v_scale is not; k and v are quantised"),
        (
            dict.fromkeys(("k_scale", "v_scale"), (2,)),
            "have shape [2], and a tensor [1, 2, 5, 4] needs",
        ),
    ],
)
def test_wrong_scales_are_refused_in_words(options: dict[str, Any], message: str) -> None:
    scales = {n: torch.ones(shape) for n, shape in options.items()}
    q, k = torch.ones(1, 2, 3, 4).bfloat16(), torch.ones(1, 2, 5, 4, dtype=torch.int8)
    with pytest.raises(ag.GraphError, match=re.escape(message)):
        declare({"q": q, "k": k, "v": k, **scales})


def test_bytes_of_quantised_keys_are_halved_in_cost_and_explanation() -> None:
    q, k = (ag.TensorSpec((1, 8, n, 64), torch.bfloat16) for n in (1, 4096))
    plain = ag.attention(q, k, k)
    graph = quantise_graph(plain, torch.float8_e5m2, 15)
    costs = [cost(simplify(x), Target.of("h100")).forward for x in (plain, graph)]
    assert costs[1].bytes / costs[0].bytes < 0.51
    assert (costs[1].seconds or 1) < 0.51 * (costs[0].seconds or 0)
    explained = str(ag.explain(graph, target="h100"))
    assert explained.startswith("triton runs this")
    assert (
        "cudnn can't: reads no keys with scales beside another q, packed or in pages" in explained
    )
    for name in ("torch_flash", "torch_efficient", "torch_cudnn"):
        assert f"{name}" in explained.split("can't: reads no keys with scales, and")[0]


SOFTWARE = "k and v: float8_e4m3fn becomes float16 by integer arithmetic"


@pytest.mark.parametrize("name", ["a100", "rtx4090", "h100"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gpus_before_float8_convert_it_and_say_so(kind: torch.dtype, name: str) -> None:
    q, k = (ag.TensorSpec((1, 8, n, 64), torch.bfloat16) for n in (1, 4096))
    told = str(ag.explain(quantise_graph(ag.attention(q, k, k), kind, 15), target=name))
    assert told.startswith("triton runs this")
    assert (SOFTWARE in told) == (name == "a100" and kind == torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["a100", "rtx4090", "h100", "h200", "b200"])
def test_triton_runs_both_passes_of_quantised_tensors(name: str) -> None:
    q, k = (ag.TensorSpec((1, 8, n, 64), torch.bfloat16) for n in (300, 4096))
    plain = ag.attention(q, k, k, bias=ag.TensorSpec((1, 8, 300, 4096), torch.bfloat16))
    for names in ("kv", "qkv", "qkvo"):  # the gradients of q and of the bias, or of the bias alone
        text = str(ag.explain(quantise_graph(plain, torch.int8, 15, names), target=name))
        assert text.startswith("triton runs this")
        if "o" in names:
            assert "o is quantised by a pass of its own, which reads 300 KiB" in text
            continue
        assert "backward: triton runs this" in text
