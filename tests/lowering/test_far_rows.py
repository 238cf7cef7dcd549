"""Scores with a common offset, however large, give what they give without it, in every pass.

Products are whole numbers of a step that the offset holds exactly, so that scores with it are the
same scores: what is due is what the formula says of them without it. Run with TRITON_INTERPRET=1,
as `make test` does too, these tests are Triton's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp
from typing import Any, final

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.rule import Expectation, expect_gradients, expect_outputs
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tangents import (
    Directions,
    expect_gradient_tangents,
    expect_tangents,
)
from tests.lowering.test_tangents import only_derived

CPU = ag.Target.of("cpu")
NAMES = ("triton",) if CPU.interprets else ("torch_sdpa", "math")
BACKEND = NAMES[-1]
SPEC = ag.TensorSpec
LOWEST = -1.75 * 2.0**127  # times log2(e), beyond what float32 has
OFFSETS = (-100.0, -(2.0**13), -(2.0**20), 2.0**20, -(2.0**30), 2.0**30, LOWEST, -LOWEST)
MASKS: tuple[ag.Mask | None, ...] = (
    *(None, ag.Causal("bottom_right"), ag.Window(40, 3, "bottom_right")),
    ag.Causal("bottom_right") | ag.Prefix(5),
)
EXAMPLES = settings().max_examples
FEW = max(1, EXAMPLES // 5) if CPU.interprets else EXAMPLES  # each is interpreted for seconds
BATCH = 1 if CPU.interprets else 2
LENGTHS = st.sampled_from([1, 17, 70]) if CPU.interprets else st.integers(1, 200)


@final
@frozen
class Far:
    """An attention whose scores all have an offset. names: of the inputs that train."""

    offset: float
    graph: ag.Graph
    names: tuple[str, ...]

    def tensors(self, seed: int, *, far: bool) -> list[torch.Tensor]:
        """The inputs, with the offset or without it."""
        random = torch.Generator().manual_seed(seed)
        specs = {i.name: i.spec for i in self.graph.inputs}
        made: dict[str, torch.Tensor] = {}
        for name, x in specs.items():
            if name in ("seed", "offset"):
                made[name] = torch.tensor(seed)
            elif name in ("bias", "sinks"):
                steps = torch.randint(-3, 4, x.shape, generator=random)
                made[name] = (steps * step_of(self.offset) + self.offset * far).to(x.dtype)
            elif name == "v":
                made[name] = torch.randn(x.shape, generator=random).to(x.dtype)
            else:
                made[name] = torch.randint(-1, 2, x.shape, generator=random).to(x.dtype)
        return [made[name] for name in specs]


def step_of(offset: float) -> float:
    """What scores are whole numbers of, so that float32 has them beside the offset."""
    return max(0.25, 2.0 ** (frexp(abs(offset))[1] - 20))


@st.composite
def far_rows(draw: DrawFn, backend: str = BACKEND, most: float = -LOWEST) -> Far:
    """Attentions of what a backend takes. most: of offsets."""
    M, N, G, r = draw(LENGTHS), draw(LENGTHS), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    offset = draw(st.sampled_from([x for x in OFFSETS if abs(x) <= most]))
    dtypes = [torch.float32, torch.bfloat16] + [torch.float64] * (not CPU.interprets)
    dtypes += [torch.float16] * (abs(offset) <= 2**20)  # gradients grow with `step_of` beyond it
    dtype = draw(st.sampled_from(dtypes))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape, bias = (BATCH, G * r, M, 8), [draw(st.sampled_from([1, n])) for n in (BATCH, G * r)]
    more: dict[str, Any] = {"bias": SPEC((*bias, M, N), wide), "mask": draw(st.sampled_from(MASKS))}
    names = ["q", "k", "v"]
    if backend == "torch_sdpa":
        more["mask"], G, shape = None, G * r, (BATCH, G * r, M, 8)
    else:
        if draw(st.booleans()):
            more["sinks"] = SPEC((G * r,), wide)
            names.append("sinks")
        if draw(st.booleans()):
            more["dropout"] = 0.5
        names += ["bias"] * draw(st.booleans())
    q, k = SPEC(shape, dtype), SPEC((BATCH, G, N, 8), dtype)
    graph = ag.attention(q, k, k, scale=step_of(offset), stats=True, **more)
    return Far(offset, graph, tuple(i.name for i in graph.inputs if i.name in names))


def gradients_of(
    plan: ag.Plan, tensors: Sequence[torch.Tensor], names: Sequence[str], given: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """The gradients by the inputs of these names. given: a cotangent of each output, or None."""
    pairs = zip(plan.graph.inputs, tensors, strict=True)
    leaves = [x.detach().requires_grad_(i.name in names) for i, x in pairs]
    wanted = [x for x in leaves if x.requires_grad]
    outputs = [(o, d) for o, d in zip(run_plan(plan, leaves), given, strict=True) if d is not None]
    dues = [d for _, d in outputs]
    made = torch.autograd.grad([o for o, _ in outputs], wanted, dues)
    ordered = [i.name for i in plan.graph.inputs if i.name in names]
    return dict(zip(ordered, made, strict=True))


def check_far(far: Far, backend: str, seed: int, by_lse: bool) -> None:
    """Hold outputs and gradients to the formula without the offset."""
    plan = ag.compile(far.graph, target=CPU, backends=(backend,))
    near, tensors = (far.tensors(seed, far=x) for x in (False, True))
    o, lse = expect_outputs(far.graph, near)
    results = run_plan(plan, tensors)
    o.check(results[0])
    check_lse(lse, results[1], far.offset)
    random = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=random).to(x.dtype) for x in results]
    given = [cotangents[0], cotangents[1] if by_lse else None]
    dues = expect_gradients(far.graph, near, given)
    for name, x in gradients_of(plan, tensors, far.names, given).items():
        dues[name].check(x)


def check_lse(due: Expectation, lse: torch.Tensor, offset: float) -> None:
    """Within the rule, and what float32 or float64 rounds beside the offset."""
    sees = lse != -torch.inf
    assert torch.equal(sees, due.ref != -torch.inf)
    unit = torch.finfo(lse.dtype).eps
    apart = (lse.double() - (due.ref + offset))[sees].abs()
    assert not apart.numel() or apart.max() <= due.allowance(lse.dtype) + 2 * unit * abs(offset)


@pytest.mark.parametrize("backend", NAMES)
@given(data=st.data(), seed=seeds, by_lse=st.booleans())
@settings(max_examples=FEW)
def test_an_offset_of_all_scores_changes_nothing(
    backend: str, data: st.DataObject, seed: int, by_lse: bool
) -> None:
    check_far(data.draw(far_rows(backend)), backend, seed, by_lse)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("keys", [64, 1100])
def test_long_rows_are_joined_of_parts_as_without_their_offset(
    backend: str, offset: float, keys: int
) -> None:
    keys = min(keys, 150) if CPU.interprets else keys
    x = SPEC((1, 1, keys, 16), torch.float32)
    mask = ag.Causal("top_left") if backend != "torch_sdpa" else None
    bias = SPEC((1, 1, keys, keys), torch.float32)
    graph = ag.attention(x, x, x, mask=mask, bias=bias, scale=step_of(offset), stats=True)
    check_far(Far(offset, graph, ("q", "k", "v")), backend, 0, False)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("bare", [True, False])
def test_few_queries_are_joined_of_parts_as_without_their_offset(offset: float, bare: bool) -> None:
    q, k = (SPEC((1, 1, n, 16), torch.float32) for n in (1, 300))
    more: dict[str, Any] = {} if bare else {"sinks": SPEC((1,), torch.float32)}
    bias = SPEC((1, 1, 1, 300), torch.float32)
    graph = ag.attention(q, k, k, bias=bias, scale=step_of(offset), stats=True, **more)
    check_far(Far(offset, graph, ("q", "k", "v", *more)), BACKEND, 0, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("paged", [False, True])
def test_rows_of_the_lowest_number_are_means_of_packed_values_and_of_pages(
    paged: bool, dtype: torch.dtype
) -> None:
    """An additive mask, as models make it, that hides all keys of a query hides none."""
    lowest, B, N = torch.finfo(torch.float32).min, 2, 16
    random = torch.Generator().manual_seed(0)
    q, v = (torch.randn(B * N, 1, 8, generator=random).to(dtype) for _ in range(2))
    starts = torch.tensor([0, N, 2 * N], dtype=torch.int32)
    lowest_bias = torch.full((1, 1, N, 1), lowest)
    places: dict[str, Any] = {"q_starts": starts, "kv_starts": starts}
    keys = v
    if paged:
        keys, table = v.view(B, N, 1, 8), torch.tensor([[1], [0]], dtype=torch.int32)
        places = {"q_starts": starts, "pages": table}
    given_ = {"bias": lowest_bias, **places}
    most = N, None if paged else N
    options: dict[str, Any] = {n: SPEC.like(x) for n, x in given_.items()}
    graph = ag.attention(
        SPEC.like(q), SPEC.like(keys), SPEC.like(keys), max_lengths=most, **options
    )
    plan = ag.compile(graph, target=CPU, backends=(BACKEND,))
    tensors = {"q": q, "k": 0 * keys, "v": keys, **given_}
    (o,) = run_plan(plan, [tensors[i.name] for i in graph.inputs])
    means = v.double().view(B, N, 1, 8).mean(1, keepdim=True)
    due = (means.flip(0) if paged else means).expand(B, N, 1, 8).reshape(o.shape)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(o.double(), due, rtol=2 * unit, atol=unit)


@given(far=far_rows(most=2.0**30), seed=seeds)
@settings(max_examples=FEW)
def test_tangents_are_those_without_the_offset(far: Far, seed: int) -> None:
    near, tensors = (far.tensors(seed, far=x) for x in (False, True))
    graph = only_derived(far.graph)
    random = torch.Generator().manual_seed(seed)
    pairs = {i.name: x for i, x in zip(graph.inputs, near, strict=True)}
    moves = {
        name: torch.randn(pairs[name].shape, generator=random).to(pairs[name].dtype)
        for name in far.names
    }
    forward = ag.compile(ag.jvp(graph, far.names), target=CPU, backends=(BACKEND,))
    o, lse, to, tlse = forward(*tensors, *moves.values())
    for x, due in zip((to, tlse), expect_tangents(graph, near, moves), strict=True):
        due.check(x)
    do, tdo, dlse, tdlse = (
        torch.randn(x.shape, generator=random).to(x.dtype) for x in (o, o, lse, lse)
    )
    named = {**moves, "o": to, "lse": tlse, "do": tdo, "dlse": tdlse}
    _, backward = ag.vjp(graph, far.names)
    pushed = ag.jvp(backward, tuple(named))
    plan = ag.compile(pushed, target=CPU, backends=(BACKEND,))
    results = run_plan(plan, (*tensors, o, lse, do, dlse, *named.values()))
    dues = expect_gradient_tangents(graph, near, Directions(moves, do, dlse, tdo, tdlse))
    half = len(pushed.outputs) // 2
    for x, name in zip(results[half:], far.names, strict=True):
        dues[name].check(x)
