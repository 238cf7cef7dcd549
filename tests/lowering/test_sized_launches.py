"""Triton's launches for sizes by name: planned once, and what plans of numbers launch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from attrs import asdict
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.binding import bind_graph, largest, replace_sizes
from attn_graph.ir.passes import simplify
from attn_graph.lowering.backend import Options
from attn_graph.lowering.triton.backend import BACKEND
from attn_graph.lowering.triton.launches import Launch, load_kernel
from attn_graph.lowering.triton.layout import Layout
from attn_graph.lowering.triton.plan import Flash
from attn_graph.lowering.triton.sized import MOST_RECORDINGS, SizedCalls
from attn_graph.lowering.triton.symbols import SPECIAL
from attn_graph.lowering.triton.work import work_of
from attn_graph.spec import TensorSpec
from attn_graph.spec.dims import bind
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.ir.test_dims import named_graphs
from tests.support.calls import check_same_bits, is_same
from tests.support.kernels import CPU, interpreted

H200 = ag.Target.of("h200")
F16, I32 = torch.float16, torch.int32
BATCH = "BATCH"  # packed sequences that a program reads at once: here as many as there may be
BOTTOM = ag.Causal("bottom_right")


def dense(H: int = 8, G: int = 8, D: int = 64, most: int = 4096, **options: Any) -> ag.Graph:
    """Attention of B entries, M queries and N keys."""
    B, M, N = ag.Dim("B", most=8), ag.Dim("M", most=most), ag.Dim("N", most=most)
    lies = {"layout": options.pop("layout", None)}
    M = options.pop("M", M)
    for name, shape in options.pop("reads", {}).items():
        axes = {"B": B, "M": M, "N": N}
        spec = [TensorSpec([axes.get(x, x) for x in each], t) for *each, t in shape]
        options[name] = tuple(spec) if len(spec) > 1 else spec[0]
    q, k = (TensorSpec((B, h, n, D), F16, **lies) for h, n in ((H, M), (G, N)))
    return ag.attention(q, k, k, **options)


def packed(H: int = 8, G: int = 8, D: int = 64, **options: Any) -> ag.Graph:
    """Attention of B sequences of up to 1024 rows, T rows in all."""
    B, T = ag.Dim("B", most=200), ag.Dim("T", most=65536)
    q, k = (TensorSpec((T, h, D), F16) for h in (H, G))
    starts = TensorSpec((B + 1,), I32)
    return ag.attention(q, k, k, q_starts=starts, max_lengths=(1024, 1024), **options)


def paged(**options: Any) -> ag.Graph:
    """One query of each of B sequences, against keys in n pages of 16."""
    B, n, P = ag.Dim("B", most=64), ag.Dim("n", most=9999), ag.Dim("P", most=2048)
    q, pool = TensorSpec((B, 8, 1, 128), F16), TensorSpec((n, 16, 2, 128), F16)
    lengths, pages = TensorSpec((B,), I32), TensorSpec((B, P), I32)
    return ag.attention(q, pool, pool, pages=pages, kv_lengths=lengths, **options)


SEGMENTS = {"segments": [("B", "M", I32), ("B", "N", I32)]}
GRAPHS = {
    "plain": dense(),
    "causal": dense(mask=BOTTOM),
    "causal, grouped heads": dense(G=2, mask=BOTTOM, stats=True),
    "window, soft cap": dense(mask=ag.Window(100, align="bottom_right"), soft_cap=30.0, D=128),
    "positions interleaved": dense(layout="bshd", mask=ag.Causal("top_left"), D=40),
    "few queries or many": dense(G=2, most=300),
    "bias": dense(reads={"bias": [("B", 8, "M", "N", F16)]}),
    "lengths, alibi": dense(
        mask=BOTTOM, alibi=True, align="bottom_right", reads={"kv_lengths": [("B", I32)]}
    ),
    "segments": dense(reads=SEGMENTS, mask=ag.Causal("top_left")),
    "no strip": dense(mask=ag.Window(64, align="top_left") | ag.Prefix(16), most=1000),
    "dropout": dense(dropout=0.1, mask=BOTTOM),
    "decode": dense(G=2, M=1, most=32768),
    "packed": packed(mask=BOTTOM),
    "packed, grouped heads": packed(G=2, mask=ag.Window(100)),
    "paged": paged(mask=BOTTOM),
}
COSTLY = {  # of which fewer sizes: lists of tiles, and programs, are counted for each
    **dict.fromkeys(("causal, grouped heads", "packed, grouped heads", "few queries or many"), 4),
    "no strip": 10,
}
LISTED = ("segments", "no strip")
COUNT = 8 * settings().max_examples // 5  # sizes
STEPS = settings().max_examples // 8  # each is interpreted
EACH = 10  # steps, after which results are compared
MOST_KERNELS = 6  # of one kernel: `delta`, by what the strides of the gradient of lse are


def passes(name: str) -> Iterator[ag.Graph]:
    """The passes of a graph, simplified; of pages the forward alone."""
    graph = GRAPHS[name]
    both = (graph,) if name in ("paged", "decode") else ag.vjp(graph)
    yield from map(simplify, both)


def sized_calls(graph: ag.Graph, target: ag.Target = H200) -> tuple[SizedCalls, Layout]:
    """Calls in whatever sizes, and what they are of."""
    work = work_of(graph)
    assert isinstance(work, Layout)
    return SizedCalls.of(graph, work, target, Options()), work


def draw_sizes(name: str, graph: ag.Graph, count: int) -> Iterator[dict[str, int]]:
    """Sizes of a graph, of all magnitudes: from 2, or, of lists of tiles, from two tiles, since
    plans of numbers know where there is one."""
    rng, least = random.Random(0), 257 if name in LISTED else 2
    for _ in range(count):
        most = {s.name: rng.choice((s.most, s.most, min(s.most, 80))) for s in graph.symbols}
        yield {
            x: rng.randrange(least, max(n, 2 * least)) if x in "MN" else rng.randrange(2, n + 1)
            for x, n in most.items()
        }


def check_flash(ours: Flash, due: Flash) -> None:
    """Assert that two plans launch the same, in the same scratch, with the same results."""
    assert ours.launches == due.launches or [*map(comparable, ours.launches)] == [
        *map(comparable, due.launches)
    ]
    assert ours.buffers == due.buffers
    assert ours.results == due.results
    assert ours.tables.keys() == due.tables.keys()
    assert all(torch.equal(x, ours.tables[name]) for name, x in due.tables.items())


def comparable(launch: Launch) -> dict[str, Any]:
    """All of a launch, with what BATCH is told apart by: whether it is 0."""
    return asdict(launch) | {"fixed": {**launch.fixed, BATCH: bool(launch.fixed.get(BATCH))}}


def check_sizes(calls: SizedCalls, work: Layout, target: ag.Target, sizes: dict[str, int]) -> None:
    """Assert that launches of these sizes are those of the plan of numbers."""
    check_flash(calls.plan_at(tuple(sizes.values())), Flash.plan(bind(work, sizes), target))


# What is launched


@pytest.mark.skipif(CPU.interprets, reason="launches for an H200 are the same, interpreted")
@pytest.mark.parametrize("name", GRAPHS)
def test_launches_of_any_sizes_are_those_of_plans_of_numbers(name: str) -> None:
    for graph in passes(name):
        calls, work = sized_calls(graph)
        for sizes in draw_sizes(name, graph, COUNT // COSTLY.get(name, 1)):
            check_sizes(calls, work, H200, sizes)
        assert len(calls.recorded) < MOST_RECORDINGS, "none is forgotten"


def test_a_plan_says_that_it_is_one_build() -> None:
    plan = ag.compile(GRAPHS["packed"], target=H200, backends=("triton",))
    assert "T, B are sizes of the call, all in one executable" in str(plan.explain())


# What is compiled


def variant(launch: Launch) -> tuple[object, ...]:
    """All that the machine code of a launch depends on: constants, and what Triton makes of
    integers, which are 1, multiples of 16, or others, of 32 bits or 64."""
    given = [
        (p.name, x if p.is_constexpr else kind_of(x, p.do_not_specialize))
        for p in load_kernel(launch.kernel).params
        if (x := launch.fixed.get(p.name, p.name)) is not None
    ]
    return launch.kernel, tuple(launch.texts.values()), launch.warps, launch.stages, *given


def kind_of(x: object, plain: bool) -> object:
    """What machine code is made for, of an argument."""
    if isinstance(x, tuple):
        return tuple(kind_of(part, plain) for part in x)
    if type(x) is not int:
        return type(x)
    special = "" if plain else "one" if x == 1 else "many" if x % SPECIAL == 0 else ""
    return special, x >= 2**31


@pytest.mark.skipif(CPU.interprets, reason="interpreted kernels have no parameters to look at")
@pytest.mark.parametrize("name", GRAPHS)
def test_no_size_is_compiled_for(name: str) -> None:
    """40 sizes are few kernels: of whole tiles or halves, keys in multiples of 16 or not, ..."""
    for graph in passes(name):
        calls, _ = sized_calls(graph)
        plans = [calls.plan_at(tuple(x.values())) for x in draw_sizes(name, graph, 40)]
        kernels = Counter(key[0] for key in {variant(x) for flash in plans for x in flash.launches})
        assert max(kernels.values()) <= MOST_KERNELS, kernels


# What it gives


@interpreted
@pytest.mark.parametrize("name", ["dense", "packed"])
def test_steps_of_random_sizes_are_one_build_for_each_pass(name: str) -> None:
    rng = random.Random(0)
    small: dict[str, Any] = {"H": 2, "G": 1, "D": 16, "mask": BOTTOM}
    graph = dense(**small, most=40) if name == "dense" else packed(**small)
    ag.clear_cache()
    plan = ag.compile(graph, target=CPU, backends=("triton",))
    assert plan.sized is not None
    assert plan.sized.whole is not None
    for step in range(STEPS):
        starts = [0, *accumulate(rng.randrange(30) for _ in range(rng.randrange(1, 4)))]
        sizes = {"B": len(starts) - 1, "T": starts[-1] + 2}
        sizes |= {s.name: rng.randrange(1, s.most + 1) for s in graph.symbols if s.name in "MN"}
        inputs = {i.name: i.spec.bind(sizes) for i in graph.inputs}
        tensors = [
            torch.tensor(starts, dtype=I32) if x.dtype == I32 else torch.randn(x.shape).to(x.dtype)
            for x in inputs.values()
        ]
        ours = pull(plan, tensors)
        if step % EACH == 0:
            builds = ag.cache_info().builds
            assert builds == 2 * (1 + step // EACH)
            exact = ag.compile(replace_sizes(graph, sizes), target=CPU, backends=("triton",))
            assert all(map(is_same, ours, pull(exact, tensors)))
    assert plan.sized.at.cache_info().misses == 0  # type: ignore[attr-defined]  # of lru_cache


def pull(plan: ag.Plan, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """o and the gradients of what has one, by a cotangent of ones."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    (o,) = run_plan(plan, leaves)
    wanted = [t for t in leaves if t.requires_grad]
    return [o.detach(), *torch.autograd.grad(o, wanted, torch.ones_like(o))]


@interpreted
@pytest.mark.slow
@given(named_graphs(), st.data(), seeds)
@settings(max_examples=settings().max_examples // 4)
def test_a_plan_gives_the_bits_of_the_plan_of_numbers(
    graph: ag.Graph, data: st.DataObject, seed: int
) -> None:
    numbers = bind_graph(simplify(graph), largest(graph))
    assume(not BACKEND.reasons(numbers, CPU, Options()))
    assume(all(n for i in numbers.inputs for n in i.spec.shape))
    plan = ag.compile(graph, target=CPU, backends=("triton",))
    for _ in range(2):
        sizes = {s.name: data.draw(st.integers(1, s.most), label=s.name) for s in graph.symbols}
        exact = ag.compile(replace_sizes(graph, sizes), target=CPU, backends=("triton",))
        check_same_bits(plan, exact, tensors_for(exact.graph, seed), seed)
