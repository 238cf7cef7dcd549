"""Weights that a backward makes again, and delta, are as exact as the formula has them.

Run with TRITON_INTERPRET=1, as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.triton.plan import Flash
from attn_graph.lowering.triton.work import split_graph
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.formula import gradients
from attn_graph.testing.strategies import seeds

CPU = ag.Target.of("cpu")
BACKEND = "triton" if CPU.interprets else "math"
SPEC = ag.TensorSpec
F32, BF16 = torch.float32, torch.bfloat16
UNIT = 2.0**-24
FEW = max(1, settings().max_examples // 30) if CPU.interprets else settings().max_examples
FAR_SLOPE, APART = 2.0**28, 5  # scores of -5 * 2^28: float32 has no logarithm of 2 beside them
AROUND = ag.Window(APART, -APART, "top_left") | ag.Window(-APART, APART, "top_left")
ALONE: dict[str, ag.Mask | None] = {
    "one key": None,
    "its own key": ag.Window(0, 0, "top_left"),
    "its own segment": ag.Formula("i // 1 == j"),
}


def draw(graph: ag.Graph, seed: int) -> dict[str, torch.Tensor]:
    """A tensor for each input."""
    random = torch.Generator().manual_seed(seed)
    return {
        i.name: torch.randn(i.spec.shape, generator=random).to(i.spec.dtype)
        if i.spec.dtype.is_floating_point
        else torch.tensor(seed)
        for i in graph.inputs
    }


def gradients_by(
    graph: ag.Graph, tensors: Sequence[torch.Tensor], names: Sequence[str], do: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of the backend by the inputs of these names."""
    pairs = zip(graph.inputs, tensors, strict=True)
    leaves = [x.detach().requires_grad_(i.name in names) for i, x in pairs]
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    wanted = [x for x in leaves if x.requires_grad]
    return [*torch.autograd.grad(run_plan(plan, leaves)[0], wanted, do)]


# One key leaves no choice


@pytest.mark.parametrize("name", ALONE)
@given(seed=seeds, dtype=st.sampled_from([torch.float16, BF16]), rate=st.sampled_from([0.1, 0.5]))
@settings(max_examples=FEW)
def test_what_one_key_leaves_no_choice_has_no_gradient_with_dropout_too(
    name: str, seed: int, dtype: torch.dtype, rate: float
) -> None:
    """dp and delta are two sums of the same products, each off by E u of their sizes at most."""
    M, E, N = 19, 16, 1 if name == "one key" else 19
    q, k = SPEC((1, 2, M, E), dtype), SPEC((1, 2, N, E), dtype)
    graph = ag.attention(q, k, k, dropout=rate, mask=ALONE[name], scale=1.0)
    tensors = draw(graph, seed)
    do = torch.randn(1, 2, M, E, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    dq, dk = gradients_by(graph, [*tensors.values()], ["q", "k"], do)
    sizes = torch.einsum("bhie,bhje->bhij", do.double().abs(), tensors["v"].double().abs())
    ds = 4 * E * UNIT * sizes.max() / (1 - rate)
    assert dq.abs().max() <= ds * tensors["k"].double().abs().max()
    assert dk.abs().max() <= ds * tensors["q"].double().abs().sum(2).max()


@pytest.mark.parametrize("N", [8, 64, 200])
def test_what_gathers_a_row_is_as_exact_as_plain_float32(N: int) -> None:
    """A bias that is the same for all keys has the gradient 0: what is left is rounding, of 256
    rows in the root mean square, which tells it to 5 %."""
    x, k = SPEC((1, 8, 32, 16), F32), SPEC((1, 8, N, 16), F32)
    graph = ag.attention(x, k, k, bias=SPEC((1, 8, 32, 1), F32))
    tensors = [*draw(graph, N).values()]
    do = torch.randn(1, 8, 32, 16, generator=torch.Generator().manual_seed(1))
    (dbias,) = gradients_by(graph, tensors, ["bias"], do)
    low = gradients(graph, tensors, [do], F32)["bias"]
    assert dbias.square().mean().sqrt() <= 1.4 * low.square().mean().sqrt()


@pytest.mark.skipif(CPU.interprets, reason="heads are many, and each is interpreted for seconds")
def test_gradients_of_slopes_are_as_exact_as_plain_float32() -> None:
    """Over 200 rows, in the root mean square over heads, which tells it to 9 %."""
    H, M = 64, 200
    x = SPEC((1, H, M, 16), F32)
    graph = ag.attention(x, x, x, alibi=SPEC((H,), F32))
    tensors = [*draw(graph, 0).values()]
    do = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (dslopes,) = gradients_by(graph, tensors, ["alibi"], do)
    ref, low = (gradients(graph, tensors, [do], t)["alibi"] for t in (torch.float64, F32))
    off, allowed = ((x.double() - ref).square().mean().sqrt() for x in (dslopes, low))
    assert off <= 1.4 * allowed, (off, allowed)


# Far rows of packed tensors and of pages; dense ones are in test_far_rows.py


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("length", [[40, 7, 0, 23], [13]])
def test_far_rows_of_sequences_and_of_pages_weigh_their_keys(
    length: list[int], paged: bool
) -> None:
    """Two keys at one distance, or one, of a score that is far: the mean of their values."""
    B, P, most, random = len(length), 16, max(length), torch.Generator().manual_seed(0)
    more: dict[str, Any] = {"mask": AROUND, "scale": 0.0, "align": "top_left"}
    slopes, unused = torch.full((2,), FAR_SLOPE), 2
    starts = torch.tensor([0, *length]).add(unused).cumsum(0).to(torch.int32)
    T, lengths = int(starts[-1]) + 1, torch.tensor(length, dtype=torch.int32)
    pages = torch.randperm(B * -(-most // P), generator=random).view(B, -1).to(torch.int32)
    shape = (pages.numel(), P, 2, 8) if paged else (T, 2, 8)
    places = {"q_starts": starts, "q_lengths": lengths, "kv_lengths": lengths}
    places |= {"pages": pages} if paged else {"kv_starts": starts}
    q, v = (torch.randn(s, generator=random) for s in ((T, 2, 8), shape))
    longest = most, None if paged else most
    more |= {name: SPEC.like(x) for name, x in places.items()} | {"alibi": SPEC.like(slopes)}
    graph = ag.attention(SPEC.like(q), SPEC.like(v), SPEC.like(v), max_lengths=longest, **more)
    given_ = {"q": q, "k": v, "v": v, "alibi": slopes, **places}
    do = torch.randn(T, 2, 8, generator=random)
    (dv,) = gradients_by(graph, [given_[i.name] for i in graph.inputs], ["v"], do)
    due = torch.zeros_like(v, dtype=torch.float64)
    for b, n in enumerate(length):
        for i in range(n):
            keys = [j for j in (i - APART, i + APART) if 0 <= j < n]
            for j in keys:
                at = (int(pages[b, j // P]), j % P) if paged else (int(starts[b]) + j,)
                due[at] += do[int(starts[b]) + i].double() / len(keys)
    torch.testing.assert_close(dv.double(), due, rtol=4 * UNIT, atol=4 * UNIT)


# The launch


def launched(dtype: torch.dtype = BF16, **options: Any) -> list[Any]:
    """The launches that sum rows again, of a gradient for an H200."""
    x = SPEC((2, 8, 512, 64), dtype)
    _, backward = ag.vjp(ag.attention(x, x, x, **options))
    flash = Flash.plan(split_graph(facts_of(backward))[-1].work, ag.Target.of("h200"))
    return [launch for launch in flash.launches if launch.kernel == "sum_weights"]


def test_rows_are_summed_again_where_lse_or_o_may_not_tell_their_weights() -> None:
    slopes = SPEC((8,), F32)
    assert not launched()
    assert not launched(mask=ag.Causal())
    assert not launched(soft_cap=30.0)  # holds every |lse| below what bfloat16 notices
    assert not launched(torch.float32, dropout=0.5)
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"alibi": True, "align": "top_left"}, 0),
        ({"soft_cap": 30.0, "sinks": slopes}, 0),
        ({"dropout": 0.5}, 1),
        ({"alibi": slopes, "align": "top_left"}, 2),
    )
    for options, weighed in cases:
        (launch,) = launched(**options)
        assert launch.fixed["WEIGHED"] == weighed
    assert launched(torch.float32, soft_cap=30.0)
