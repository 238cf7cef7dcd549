"""Laws that hold whatever the numbers are: two graphs, or two calls, that must agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.kernels.merging import merge_
from attn_graph.machine.workspace import Buffer, Scratch
from attn_graph.testing import rule
from attn_graph.testing.strategies import seeds
from tests.support.planning import one_way

CPU = ag.Target.of("cpu")
INF, NAN = float("inf"), float("nan")
B, H, G, M, N, D = 2, 4, 2, 24, 40, 8


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(seed: int, keys: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        normal(seed, B, H, M, D),
        normal(seed + 1, B, G, keys, D),
        normal(seed + 2, B, G, keys, D),
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **options: Any,  # Any: as `attention` has them
) -> tuple[torch.Tensor, torch.Tensor]:
    """o, lse; tensors among the options are both declared and passed."""
    tensors = {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    specs: Options = {n: ag.TensorSpec.like(x) for n, x in tensors.items()}
    backends = options.pop("backends", None)
    q_spec, k_spec, v_spec = map(ag.TensorSpec.like, (q, k, v))
    graph = ag.attention(q_spec, k_spec, v_spec, stats=True, **(options | specs))
    o, lse = ag.compile(graph, target=CPU, backends=backends)(q, k, v, **tensors)
    return o, lse


def apart(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> list[str]:
    """Where they differ by more than float32 rounds away: the rule's floor, and 16 roundings."""
    found = []
    for n, (x, y) in enumerate(zip(a, b, strict=True)):
        largest = float(torch.where(y.isinf(), 0.0, y.abs()).max())
        floor = 2 * rule.distance((y + 0.3) - 0.3, y) + 16 * 2.0**-24 * largest
        if not rule.distance(x, y) <= floor:
            found.append(f"{n}: {rule.distance(x, y):.3g} apart, allowed {floor:.3g}")
    return found


Options = dict[str, Any]  # Any: options of `attention`
OPTIONS: tuple[Options, ...] = (
    {},
    {"mask": ag.Causal("bottom_right")},
    {"mask": ag.Window(5, 3, "top_left") | ag.Prefix(2)},
    {"soft_cap": 2.0},
)
options = st.sampled_from(OPTIONS)


@given(seed=seeds, more=st.integers(1, 70))
def test_appending_masked_keys_changes_nothing(seed: int, more: int) -> None:
    q, k, v = qkv(seed)
    lengths = torch.tensor([N, N])
    longer = [torch.cat([x, 100 * normal(seed + 9, B, G, more, D)], 2) for x in (k, v)]
    assert not apart(attend(q, *longer, kv_lengths=lengths), attend(q, k, v))


@given(seed=seeds, cut=st.integers(0, N))
def test_keys_in_two_parts_merged_by_lse_are_the_whole(seed: int, cut: int) -> None:
    q, k, v = qkv(seed)
    o, lse = attend(q, k[:, :, :cut], v[:, :, :cut])
    merge_(o, lse, *attend(q, k[:, :, cut:], v[:, :, cut:]))
    assert not apart((o, lse), attend(q, k, v))


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("more", [INF, NAN, 3.0])
def test_what_is_added_to_a_masked_score_changes_nothing(cap: float | None, more: float) -> None:
    """A bias of -inf masks, whatever the next bias holds there."""
    x, bias = ag.TensorSpec((1, 2, 6, 8), torch.float32), torch.zeros(1, 1, 6, 6)
    spec = ag.TensorSpec.like(bias)

    def attend(**x: ag.Value) -> tuple[ag.Value, ag.Value]:
        s = ag.scores(x["q"], x["k"]).bias(x["first"]).bias(x["second"])
        p, lse = (s if cap is None else s.soft_cap(cap)).softmax()
        return p.weigh(x["v"]), lse

    graph = ag.graph(attend, q=x, k=x, v=x, first=spec, second=spec)
    plan = ag.compile(graph, target=CPU)
    hidden = torch.arange(6) > torch.tensor([[0], [3], [2], [5], [-1], [1]])
    q, k, v = (normal(n, *x.shape).requires_grad_() for n in range(3))
    results = []
    for y in (0.0, more):
        given = (q, k, v, bias.masked_fill(hidden, -INF), bias.masked_fill(hidden, y))
        o, lse = plan(*given)
        gradients = torch.autograd.grad((o.sum(), lse[lse > -INF].sum()), (q, k, v))
        results.append((o.detach(), lse.detach(), *gradients))
    assert not apart(results[0], results[1])


@pytest.mark.parametrize("backend", ["torch_sdpa", "math"])
@given(seed=seeds, order=st.permutations(range(3)), chosen=st.sampled_from(OPTIONS[:1]))
def test_layout_changes_nothing_bitwise(
    backend: str, seed: int, order: list[int], chosen: Options
) -> None:
    q, k, v = qkv(seed)
    back = [order.index(a) for a in range(3)] + [3]
    laid = [x.permute(*order, 3).contiguous().permute(back) for x in (q, k, v)]
    for a, b in zip(
        attend(*laid, backends=(backend,), **chosen),
        attend(q, k, v, backends=(backend,), **chosen),
        strict=True,
    ):
        assert torch.equal(a, b)


@given(seed=seeds, chosen=options, rate=st.sampled_from((0.0, 0.3)))
def test_deterministic_plans_repeat_bitwise(seed: int, chosen: Options, rate: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(seed))
    specs = map(ag.TensorSpec.like, (q, k, v))
    plan = ag.compile(ag.attention(*specs, dropout=rate, **chosen), target=CPU, deterministic=True)
    more = {n: torch.tensor(seed) for n in ("seed", "offset")} if rate else {}

    def once() -> tuple[torch.Tensor, ...]:
        o = plan(q, k, v, **more)
        assert isinstance(o, torch.Tensor)
        return (o, *torch.autograd.grad(o.square().sum(), (q, k, v)))

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def test_a_value_that_is_returned_twice_is_two_tensors() -> None:
    x = ag.TensorSpec((B, H, M, D), torch.float32)
    graph = ag.attention(x, x, x)
    twice = ag.Graph(graph.inputs, graph.eqns, graph.outputs * 2)
    plan = ag.compile(twice, target=CPU, backends=("math",))
    one, two = plan(*(normal(n, *x.shape) for n in range(3)))
    assert torch.equal(one, two)
    assert one.data_ptr() != two.data_ptr()


@pytest.mark.parametrize(("cap", "way"), [(None, "kernel"), (None, "products"), (2.0, "products")])
def test_a_cotangent_is_left_as_it_was(cap: float | None, way: str) -> None:
    """Where rows see nothing, a copy of it is cleared there."""
    x, lengths = ag.TensorSpec((B, H, M, D), torch.float32), torch.tensor([3, 0])
    graph = ag.attention(x, x, x, soft_cap=cap, q_lengths=ag.TensorSpec.like(lengths))
    q, k, v, do = (normal(n, *x.shape) for n in range(4))
    before = do.clone()
    with one_way(way):
        o = ag.compile(graph, target=CPU)(q.requires_grad_(), k, v, lengths)
        assert isinstance(o, torch.Tensor)
        o.backward(do)
    assert torch.equal(do, before)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_lay_in_the_workspace_before_reaches_no_result(
    cap: float | None, dtype: torch.dtype
) -> None:
    """Nor a gradient: where head sizes differ, and where rows see nothing."""
    q, k, _ = qkv(0)
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, normal(2, B, G, N, 5))]
    lengths, whole = torch.tensor([3, 0]), Scratch({"room": Buffer((2**20,), torch.uint8)})
    specs = map(ag.TensorSpec.like, tensors)
    graph = ag.attention(*specs, soft_cap=cap, q_lengths=ag.TensorSpec.like(lengths))
    results = []
    for number in (0, 255):  # of which bytes are all of NaN
        ag.clear_cache()
        workspace = ag.Workspace()
        with workspace.lease(whole, torch.device("cpu")) as rooms:
            rooms["room"].fill_(number)
        plan = ag.compile(graph, target=CPU, backends=("math",), workspace=workspace)
        o = plan(*tensors, lengths)
        assert isinstance(o, torch.Tensor)
        results.append((o.detach(), *torch.autograd.grad(o.float().square().sum(), tensors)))
        assert workspace.bytes == 2**20
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][0][0, :, 3:] == 0).all()
    assert (results[0][0][1] == 0).all()
