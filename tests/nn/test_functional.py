"""`attention` of tensors: what a plan of their specs gives, remembered by their looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given

import attn_graph as ag
from attn_graph.nn import Attention
from attn_graph.nn.functional import attention
from attn_graph.plan.cache import cache
from attn_graph.testing.strategies import seeds

CPU = ag.Target.of("cpu")


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One for each option that takes a tensor: B 2, H 4, G 2, M 6, N 7, D 8, E 5."""
    g = torch.Generator().manual_seed(seed)
    sizes = {
        "q": (2, 4, 6, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 5), "bias": (1, 4, 6, 7),
        "alibi": (4,), "sinks": (4,),
    }  # fmt: skip
    floats = {n: torch.randn(s, generator=g).to(dtype) for n, s in sizes.items()}
    return floats | {
        "keep": torch.rand(2, 1, 6, 7, generator=g) < 0.7,
        "q_lengths": torch.tensor([5, 6]),
        "kv_lengths": torch.tensor([7, 3]),
        "q_segments": torch.tensor([[0, 0, 1, 1, 1, 2]] * 2),
        "kv_segments": torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2),
    }


# Options, and the names of the tensors that they read beside q, k and v.
CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "scale": ({"scale": -0.5}, ()),
    "mask": ({"mask": ag.Causal("bottom_right") & ag.Window(3, align="top_left")}, ()),
    "align": ({"mask": ag.Causal(), "align": "bottom_right"}, ()),
    "soft cap": ({"soft_cap": 2.0}, ()),
    "bias": ({}, ("bias",)),
    "paper's slopes": ({"alibi": True, "align": "top_left"}, ()),
    "slopes": ({"align": "top_left"}, ("alibi",)),
    "keep": ({}, ("keep",)),
    "lengths": ({"mask": ag.Causal("bottom_right")}, ("q_lengths", "kv_lengths")),
    "segments": ({}, ("q_segments", "kv_segments")),
    "sinks": ({}, ("sinks",)),
    "leaves of data": ({"mask": ag.Keep("one") | ag.Prefix(2)}, ("keep",)),
    "all": ({"soft_cap": 3.0, "mask": ag.Causal("top_left")}, ("bias", "keep", "sinks")),
}


def o_of(*leaves: Any, **options: Any) -> torch.Tensor:  # Any: whatever `attention` takes
    o = attention(*leaves, **options)
    assert isinstance(o, torch.Tensor)
    return o


def options_of(name: str, t: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a call of CALLS for the functional form, and those of its graph."""
    options, names = CALLS[name]
    if name == "leaves of data":
        return options | {"one": t["keep"]}, options | {"one": ag.TensorSpec.like(t["keep"])}
    read = {n: t[n] for n in names}
    specs: dict[str, Any] = {n: ag.TensorSpec.like(x) for n, x in read.items()}
    if name == "segments":
        return {"segments": tuple(read.values())}, {"segments": tuple(specs.values())}
    return options | read, options | specs


@pytest.mark.parametrize("name", CALLS)
@given(seed=seeds)
def test_it_is_the_plan_of_the_specs(name: str, seed: int) -> None:
    t = tensors(seed)
    options, graph_options = options_of(name, t)
    q, k, v = leaves = [t[n].requires_grad_() for n in "qkv"]
    graph = ag.attention(*map(ag.TensorSpec.like, leaves), **graph_options, stats=True)
    plan: Any = ag.compile(graph, target=CPU)
    named = {i.name: t.get(i.name, t["keep"]) for i in graph.inputs[3:]}
    due = plan(q, k, v, **named)
    attention(q, k, v, **options, stats=["lse"])  # planned, then remembered
    o, lse = attention(q, k, v, **options, stats=["lse"])
    assert torch.equal(o, due[0])
    assert torch.equal(lse, due[1])
    for a, b in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (o, due[0])), strict=True):
        assert torch.equal(a, b)


def entries(call: Callable[[], object]) -> int:
    """How many looks a call adds."""
    before = len(cache.looks)
    call()
    return len(cache.looks) - before


def test_calls_that_look_alike_are_planned_once() -> None:
    ag.clear_cache()
    t = tensors()
    q, k, v = (t[n] for n in "qkv")
    assert entries(lambda: attention(q, k, v)) == 1
    assert entries(lambda: attention(q.clone(), k, v, scale=None)) == 0
    assert entries(lambda: attention(q, k, v, stats=["lse"])) == 1
    assert entries(lambda: attention(q, k, v, stats=("lse",))) == 0
    for change in (
        lambda: attention(q[:, :, :5], k, v),
        lambda: attention(q.mT.contiguous().mT, k, v),
        lambda: attention(*(x.double() for x in (q, k, v))),
        lambda: attention(q, k, v, scale=2.0),
        lambda: attention(q, k, v, backends=("math",)),
        lambda: attention(q, k, v, kv_lengths=t["kv_lengths"]),
    ):
        assert entries(change) == 1
        assert entries(change) == 0
    ag.clear_cache()
    assert not cache.looks


@frozen
class Even(ag.Mask):
    """Keys at even places."""

    def keep(self, at: ag.extend.Place) -> Any:  # Any: a tensor, or a number
        return at.j % 2 == 0


def test_prefer_avoid_and_the_switches_count_as_for_compile() -> None:
    q, k, v = (tensors()[n] for n in "qkv")
    with ag.avoid("torch_sdpa", "math", "triton"), pytest.raises(ag.NoBackendError):
        attention(q, k, v)
    attention(q, k, v)
    with ag.avoid("torch_sdpa", "math", "triton"), pytest.raises(ag.NoBackendError):
        attention(q, k, v)
    with ag.prefer("cudnn"), pytest.raises(ag.NoBackendError):
        attention(q, k, v)
    with pytest.raises(ag.NoBackendError):
        attention(q, k, v, mask=Even(), backends=("torch_sdpa", "math"), on_fallback="raise")


def test_autocast_casts_as_for_pytorch_s_own() -> None:
    t = tensors()
    q, k, v, bias, sinks = (t[n].requires_grad_() for n in ("q", "k", "v", "bias", "sinks"))
    with torch.autocast("cpu", torch.bfloat16):
        o = o_of(q, k, v, bias=bias, sinks=sinks)
        assert o_of(*(x.double() for x in (q, k, v))).dtype == torch.float64
    assert o.dtype == torch.bfloat16
    due = o_of(*(x.bfloat16() for x in (q, k, v)), bias=bias.bfloat16(), sinks=sinks)
    assert torch.equal(o, due)
    o.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_the_dtype_of_autocast_counts_at_every_call() -> None:
    q, k, v = (tensors(dtype=torch.bfloat16)[n] for n in "qkv")
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert o_of(q, k, v).dtype == dtype
        assert o_of(q, k, v).dtype == torch.bfloat16


def test_whether_autograd_records_is_asked_at_every_call() -> None:
    q, k, v = (tensors()[n] for n in "qkv")
    leaf = q.clone().requires_grad_()
    for _ in range(3):
        assert not o_of(q, k, v).requires_grad
        assert o_of(leaf, k, v).requires_grad
        with torch.no_grad():
            assert not o_of(leaf, k, v).requires_grad
        with torch.inference_mode():
            assert o_of(leaf, k, v).is_inference()


def test_calls_that_alternate_get_what_each_of_them_gets_alone() -> None:
    t = tensors()
    q, k, v = (t[n] for n in "qkv")
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: o_of(q, k, v),
        lambda: o_of(q[:, :, 1:], k, v),
        lambda: o_of(q.double(), k.double(), v.double()),
        lambda: o_of(q.mT.contiguous().mT, k, v),
        lambda: o_of(q, k, v, mask=ag.Causal("top_left")),
        lambda: o_of(q, k, v, keep=t["keep"]),
    ]
    dues = []
    for call in calls:
        ag.clear_cache()
        dues.append(call())
    for _ in range(3):
        for call, due in zip(calls, dues, strict=True):
            assert torch.equal(call(), due)


def test_dropout_draws_from_the_default_generator_once_a_call() -> None:
    q, k, v = (tensors()[n] for n in "qkv")
    torch.manual_seed(3)
    a, b = o_of(q, k, v, dropout=0.5), o_of(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(o_of(q, k, v, dropout=0.5), a)
    assert not torch.equal(a, b)
    number = {"seed": torch.tensor(5), "offset": torch.tensor(0)}
    state = torch.get_rng_state()
    one, two = (o_of(q, k, v, dropout=0.5, **number) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_not_read_where_nothing_is_dropped() -> None:
    """So that training and evaluation are called alike."""
    q, k, v = (tensors()[n] for n in "qkv")
    due, number = o_of(q, k, v), torch.tensor(3)
    assert torch.equal(o_of(q, k, v, dropout=0.0, seed=number, offset=number), due)
    module = Attention(dropout=0.1).eval()
    assert torch.equal(module(q, k, v, seed=number, offset=number), due)
    flags = torch.rand(1, 1, 1, k.shape[2]) > 0.5
    named = o_of(q, k, v, mask=ag.Keep("seed"), seed=flags)
    among = o_of(q, k, v, modifiers=(ag.Keep("seed"),), seed=flags)
    assert torch.equal(named, o_of(q, k, v, keep=flags))
    assert torch.equal(among, named)


def test_inputs_of_masks_are_read_by_name_in_any_order() -> None:
    """Twice each: remembered calls read tensors by position."""
    rows, starts = torch.randn(5, 2, 8), torch.tensor([0, 3, 5])
    q_segments, kv_segments = torch.randint(2, (2, 3)), torch.randint(2, (2, 3))
    options: Any = {"q_starts": starts, "max_lengths": (3, 3)}
    due = o_of(rows, rows, rows, segments=(q_segments, kv_segments), **options)
    named: Any = {"kv_segments": kv_segments, "q_segments": q_segments, "mask": ag.SameSegment()}
    for _ in range(2):
        assert torch.equal(o_of(rows, rows, rows, **options, **named), due)
        assert torch.equal(o_of(rows, rows, rows, **named, **options), due)


def test_a_view_that_holds_numbers_negated_is_resolved() -> None:
    q, k, v = (tensors()[n] for n in "qkv")
    negated = torch._neg_view(-q)  # pyright: ignore[reportPrivateImportUsage]  # no public name
    for _ in range(2):
        assert torch.equal(o_of(negated, k, v), o_of(q, k, v))


WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "no tensor": (lambda q, k, v: o_of(q.tolist(), k, v), "q is a list, not a tensor"),
    "dtypes": (
        lambda q, k, v: o_of(q.double(), k, v),
        "k and v are torch.float32, and q",
    ),
    "bias's dtype": (
        lambda q, k, v: o_of(q, k, v, bias=q.new_zeros((1, 1, 1, 1)).half()),
        r"bias is torch.float16, and needs torch.float32; write bias.float\(\)",
    ),
    "shapes": (lambda q, k, v: o_of(q, k[..., 1:], v), "k has head size 7 .axis 3., and q has 8"),
    "data": (
        lambda q, k, v: o_of(q, k, v, other=q),
        "has no argument other",
    ),
    "segments": (lambda q, k, v: o_of(q, k, v, segments=q[0]), "is not a pair of Tensor"),
    "option": (lambda q, k, v: o_of(q, k, v, on_fallback="no"), "on_fallback"),
    "no hash": (lambda q, k, v: o_of(q, k, v, backends={}), "backends|no backend"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_raises_and_is_not_remembered(name: str) -> None:
    q, k, v = (tensors()[n] for n in "qkv")
    call, text = WRONG[name]
    before = len(cache.looks)
    for _ in range(2):
        with pytest.raises((ag.GraphError, ag.NoBackendError), match=text):
            call(q, k, v)
    assert len(cache.looks) == before


def test_o_in_8_bits_comes_with_amax_and_refuses_gradients() -> None:
    scale, bias = torch.full((1, 1, 1, 1), 0.01), torch.randn(1, 1, 4, 4)
    given: dict[str, Any] = {f"{name}_scale": scale for name in "qkvo"} | {"bias": bias}
    given |= {n: torch.randint(-99, 99, (1, 2, 4, 8), dtype=torch.int8) for n in "qkv"}
    o, lse, amax = attention(**given, stats=True)
    assert (o.dtype, lse.dtype, amax.shape) == (torch.int8, torch.float32, ())
    wide = attention(**{n: x for n, x in given.items() if n != "o_scale"})
    assert isinstance(wide, torch.Tensor)
    assert torch.equal(amax, wide.abs().max().float())
    bias.requires_grad_()
    for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        with pytest.raises(ag.GraphError, match="o in 8 bits has no gradient; leave o_scale out"):
            call(**given, stats=True)[1].sum().backward()
    with pytest.raises(ag.GraphError, match="o in 8 bits has no tangent; leave o_scale out"):
        torch.func.jvp(lambda x: attention(**{**given, "bias": x})[1], (bias,), (bias,))


def test_values_within_keys_are_read_once_and_equal_a_view_of_them() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8)
    once, twice = (k.clone().requires_grad_() for _ in range(2))
    o, due = o_of(q, once, 5), o_of(q, twice, twice[..., :5])
    torch.testing.assert_close(o, due)
    o.square().sum().backward()
    due.square().sum().backward()
    torch.testing.assert_close(once.grad, twice.grad)
    inputs = [[i.name for i in plan.graph.inputs] for plan in cache.recent.values()]
    assert ["q", "k"] in inputs
    assert o_of(torch.randn(2, 4, 6, 8), k, 4).shape[-1] == 4  # another number, another plan


def test_values_may_be_a_symbol_of_compiled_code() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 7, 8)
    half = torch.compile(
        lambda q, k: attention(q, k, k.shape[3] // 2), backend="eager", fullgraph=True, dynamic=True
    )
    torch.testing.assert_close(half(q, k), o_of(q, k, 4))


def test_nested_tensors_have_layouts_of_their_own() -> None:
    rows = torch.nested.nested_tensor([torch.randn(3, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ag.GraphError, match="outputs= is given with nested tensors"):
        attention(rows, rows, rows, outputs={"o": "bshd"})
