"""Plans whose sizes have names: one build for all sizes, and what plans of numbers give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.graph import Input
from attn_graph.ir.transforms.binding import bind_graph, replace_sizes
from attn_graph.testing.agreement import check_gradients, check_outputs, run_plan
from attn_graph.testing.strategies import seeds
from attn_graph.testing.tensors import tensors_for
from tests.ir.test_dims import draw_sizes, named_graphs
from tests.support.calls import check_same_bits

CPU = ag.Target.of("cpu")
I32 = torch.int32
B, M, N, T = ag.Dim("B", most=4), ag.Dim("M", most=24), ag.Dim("N", most=48), ag.Dim("T", most=90)
LONG, ROOM = ag.Dim("N", most=3000), ag.Dim("N", classes=ag.doubling(8, 64))
PAGES, COUNT, PAGE = ag.Dim("P", most=40), ag.Dim("C", most=9), 4
BOTTOM = ag.Causal("bottom_right")
CORNER = ag.Causal("top_left")
STEPS = settings().max_examples  # ten times as many by `make deep`
EACH = 10  # steps, after which results are compared


def spec(*shape: int, dtype: torch.dtype = torch.float32, **more: Any) -> ag.TensorSpec:
    return ag.TensorSpec(shape, dtype, **more)


def dense(
    M: int, N: int, B: int = B, G: int = 4, layout: str | None = None,
    dtype: torch.dtype = torch.float32, **options: Any,
) -> ag.Graph:  # fmt: skip
    k = spec(B, G, N, 16, dtype=dtype, layout=layout)
    return ag.attention(spec(B, 4, M, 16, dtype=dtype, layout=layout), k, k, **options)


def decode(dtype: torch.dtype = torch.float32, keys: int = N, **options: Any) -> ag.Graph:
    """One query for each of four heads, on two key/value heads of a growing cache."""
    k = spec(B, 2, keys, 16, dtype=dtype)
    return ag.attention(spec(B, 4, 1, 16, dtype=dtype), k, k, **options)


def packed(T: int, B: int, **options: Any) -> ag.Graph:
    k = spec(T, 2, 16)
    starts = spec(B + 1, dtype=I32)
    return ag.attention(spec(T, 4, 16), k, k, q_starts=starts, max_lengths=(30, 30), **options)


def paged(M: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> ag.Graph:
    """Four heads on keys in pages of four rows, of a pool and a table that grow."""
    pool = spec(PAGES, PAGE, 2, 16, dtype=dtype)
    table, lengths = spec(B, COUNT, dtype=I32), spec(B, dtype=I32)
    q = spec(B, 4, M, 16, dtype=dtype)
    return ag.attention(q, pool, pool, pages=table, kv_lengths=lengths, **options)


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    ag.clear_cache()


def call(plan: ag.Plan, *tensors: torch.Tensor) -> torch.Tensor:
    """The first output of a plan."""
    return run_plan(plan, tensors)[0]


def draw_starts(rng: random.Random) -> torch.Tensor:
    """Where up to four sequences begin, of up to 20 rows."""
    counts = [rng.randrange(21) for _ in range(rng.randrange(1, 5))]
    return torch.tensor([0, *counts], dtype=I32).cumsum(0).to(I32)


# What a plan gives


@given(named_graphs(), st.data(), seeds)
def test_a_plan_gives_what_the_plan_of_numbers_gives(
    graph: ag.Graph, data: st.DataObject, seed: int
) -> None:
    plan = ag.compile(graph, target=CPU)
    for _ in range(2):
        sizes = draw_sizes(data, graph)
        exact = replace_sizes(graph, sizes)
        tensors = tensors_for(exact, seed)
        bound = plan.at(**sizes)
        assert bound.graph == ag.compile(exact, target=CPU).graph
        check_outputs(evolve_graph(plan, bound), exact, tensors)
        check_gradients(evolve_graph(plan, bound), exact, tensors, seed)


def evolve_graph(plan: ag.Plan, bound: ag.Plan) -> ag.Plan:
    """The plan with names, for checks that read the sizes of its graph."""

    class Seen:
        """Calls go to one plan, questions to the other."""

        def __call__(self, *tensors: torch.Tensor) -> Any:
            return plan(*tensors)

        def __getattr__(self, name: str) -> Any:
            return getattr(bound, name)

    return Seen()  # type: ignore[return-value]  # as far as checks look


CASES = {
    "causal": (dense(M, M, mask=ag.Causal()), "torch_sdpa"),
    "causal, lse too": (dense(M, M, mask=ag.Causal(), stats=True), "torch_sdpa"),
    "keys apart": (dense(M, N), "torch_sdpa"),
    "grouped heads": (dense(M, N, G=2), "torch_sdpa"),
    "decode, grouped heads": (dense(1, N, G=2, mask=BOTTOM), "torch_sdpa"),
    "decode by math": (decode(mask=BOTTOM), "math"),
    "decode, bf16": (decode(torch.bfloat16, LONG, mask=BOTTOM), "math"),
    "decode, f16": (decode(torch.float16, mask=BOTTOM), "math"),
    "decode in classes": (decode(keys=ROOM, kv_lengths=spec(B, dtype=I32)), "math"),
    "decode, lengths": (decode(torch.bfloat16, kv_lengths=spec(B, dtype=I32)), "math"),
    "decode, a window": (decode(mask=ag.Window(9, align="bottom_right")), "math"),
    "decode, a cap": (decode(soft_cap=3.0, mask=BOTTOM), "math"),
    "one query or several": (dense(M, N, G=2, mask=BOTTOM, stats=True), "math"),
    "a window": (dense(M, M, mask=ag.Window(5)), "math"),
    "a window, bf16": (dense(M, M, dtype=torch.bfloat16, mask=ag.Window(5)), "math"),
    "a window and a cap": (dense(M, M, mask=ag.Window(5), soft_cap=3.0), "math"),
    "a bias": (dense(M, N, bias=spec(1, 4, M, N), mask=BOTTOM), "math"),
    "slopes": (dense(M, N, alibi=True, align="bottom_right", mask=BOTTOM), "math"),
    "segments": (dense(M, N, segments=(spec(B, M, dtype=I32), spec(B, N, dtype=I32))), "math"),
    "lengths of both": (
        dense(M, N, mask=BOTTOM, q_lengths=spec(B, dtype=I32), kv_lengths=spec(B, dtype=I32)),
        "math",
    ),
    "sinks": (dense(M, N, sinks=spec(4), mask=BOTTOM), "math"),
    "heads of two sizes": (
        ag.attention(spec(B, 4, M, 16), spec(B, 2, N, 16), spec(B, 2, N, 8), mask=BOTTOM),
        "math",
    ),
    "rows beside heads": (dense(M, N, G=2, layout="bshd", mask=BOTTOM), "math"),
    "decode from pages": (paged(mask=BOTTOM), "math"),
    "decode from pages, bf16": (paged(dtype=torch.bfloat16, mask=BOTTOM), "math"),
    "three rows from pages, a window and a cap": (
        paged(3, mask=ag.Window(5, align="bottom_right"), soft_cap=3.0),
        "math",
    ),
    "packed": (packed(T, B, mask=BOTTOM), "math"),
    "packed, a window and a cap": (packed(T, B, mask=ag.Window(5), soft_cap=3.0), "math"),
}


def steps(graph: ag.Graph, count: int) -> Iterator[tuple[dict[str, int], tuple[torch.Tensor, ...]]]:
    """Sizes and tensors of a graph, drawn at random, all of one storage."""
    rng, room = random.Random(0), torch.randn(2**19)
    for _ in range(count):
        sizes = {
            s.name: rng.choice(s.classes) if s.classes else rng.randrange(1, s.most + 1)
            for s in graph.symbols
        }
        starts = draw_starts(rng)
        if "T" in sizes:
            sizes |= {"B": len(starts) - 1, "T": int(starts[-1]) + rng.randrange(1, 4)}
        yield sizes, tuple(draw_input(rng, i, sizes, starts, room) for i in graph.inputs)


def draw_input(
    rng: random.Random,
    given: Input,
    sizes: dict[str, int],
    starts: torch.Tensor,
    room: torch.Tensor,
) -> torch.Tensor:
    """An input in these sizes: of integers starts, lengths or segments, else a view of `room`."""
    x = given.spec.bind(sizes)
    if given.name == "q_starts":
        return starts
    if given.name == "pages":
        pages = rng.choices(range(sizes["P"]), k=prod(x.shape))
        return torch.tensor(pages, dtype=x.dtype).view(x.shape)
    if given.name.endswith("lengths"):
        most = sizes["C"] * PAGE if "C" in sizes else sizes[{"q": "M", "k": "N"}[given.name[0]]]
        return torch.tensor([rng.randrange(most + 1) for _ in range(x.shape[0])], dtype=x.dtype)
    if x.dtype == I32:
        return torch.tensor(rng.choices(range(3), k=prod(x.shape)), dtype=I32).view(x.shape)
    return room.to(x.dtype).as_strided(x.shape, x.strides, rng.randrange(999))


@pytest.mark.parametrize("case", CASES)
def test_steps_of_random_sizes_are_one_build_for_each_pass(case: str) -> None:
    graph, backend = CASES[case]
    plan = ag.compile(graph, target=CPU, backends=(backend,))
    assert plan.sized is not None
    assert plan.sized.whole is not None
    kept = []
    for n, (sizes, tensors) in enumerate(steps(graph, STEPS)):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = plan(*leaves)
        o = outputs[0] if isinstance(outputs, tuple) else outputs
        grads = torch.autograd.grad(o, [t for t in leaves if t.requires_grad], torch.ones_like(o))
        if n % EACH == 0:
            kept.append((sizes, tensors, o.detach(), grads))
    assert ag.cache_info().builds == 2
    assert plan.sized.at.cache_info().misses == 0  # type: ignore[attr-defined]  # of lru_cache
    for sizes, tensors, o, grads in kept:
        numbers = replace_sizes(graph, sizes)  # deterministic: sizes as numbers keep no weights
        exact = ag.compile(numbers, target=CPU, backends=(backend,), deterministic=True)
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        outputs = exact(*leaves)
        due = outputs[0] if isinstance(outputs, tuple) else outputs
        assert torch.equal(o, due)
        wanted = [t for t in leaves if t.requires_grad]
        dues = torch.autograd.grad(due, wanted, torch.ones_like(due))
        assert all(map(torch.equal, grads, dues))


@pytest.mark.parametrize(
    "graph",
    [
        dense(M, N, mask=BOTTOM, stats=True),
        dense(M, M, mask=ag.Window(3), soft_cap=2.0),
        dense(M, N, G=2, layout="bshd"),  # in PyTorch's kernel, which folds one query's heads
        packed(T, B, dropout=0.5),
    ],
)
def test_the_bits_are_the_same_in_the_backend_that_is_chosen(graph: ag.Graph) -> None:
    plan = ag.compile(graph, target=CPU)
    assert plan.sized is not None
    assert (plan.sized.whole is None) == (plan.backend == "torch_sdpa")
    for sizes in ({"M": 5, "N": 9}, {"M": 1, "N": 7}, {"M": 24, "N": 48}, {"M": 3, "N": 0}):
        known = {s.name: sizes.get(s.name, 3) for s in graph.symbols}
        who = plan.at(**known).backend
        exact = ag.compile(replace_sizes(graph, known), target=CPU, backends=(who,))
        tensors = [*tensors_for(exact.graph, 5)]
        for n, i in enumerate(exact.graph.inputs):
            if i.name == "q_starts":
                tensors[n] = torch.tensor([0, 1, 1, 3], dtype=I32)
        check_same_bits(plan, exact, tensors)


def test_data_are_checked_in_any_size() -> None:
    plan = ag.compile(packed(T, B), target=CPU)
    for starts in ([0, 5, 13], [0, 13], [0, 0, 2, 13]):
        tensors = torch.randn(13, 4, 16), *torch.randn(2, 13, 2, 16).unbind()
        plan.check(*tensors, torch.tensor(starts, dtype=I32))
        with pytest.raises(ag.PlanMismatchError, match="q_starts"):
            plan.check(*tensors, torch.tensor([9, *starts], dtype=I32)[:2])


def test_sizes_of_none_run_too() -> None:
    plan = ag.compile(dense(M, N), target=CPU)
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 0, 16)
    assert torch.equal(call(plan, q, k, k), torch.zeros(2, 4, 3, 16))
    assert call(plan, q[:0], k[:0], k[:0]).shape == (0, 4, 3, 16)


def test_masks_of_no_query_are_the_same_with_names_and_without() -> None:
    graph = dense(M, 1, mask=CORNER & ~ag.Window(-1, None, align="top_left"))
    exact = ag.compile(replace_sizes(graph, {"B": 1, "M": 0}), target=CPU)
    assert ag.compile(graph, target=CPU).at(B=1, M=0).graph == exact.graph


def test_strides_follow_the_sizes_or_are_those_of_a_buffer() -> None:
    buffer = spec(1, 4, N, 16, strides=(48 * 64, 16, 64, 1))
    plan = ag.compile(ag.attention(spec(1, 4, 1, 16), buffer, buffer), target=CPU)
    room, q = torch.randn(1, 48, 4, 16), torch.randn(1, 4, 1, 16)
    for n in (1, 7, 48):
        k = room[:, :n].transpose(1, 2)
        assert torch.equal(call(plan, q, k, k), call(plan.at(N=n), q, k, k))
    dense_k = k.contiguous()
    for others in ((dense_k, k), (dense_k, dense_k)):
        with pytest.raises(ag.PlanMismatchError, match="k: expected"):
            plan(q, *others)


# Forward mode, torch.func, double backward


def test_derivatives_of_other_kinds_run_as_plans_of_numbers() -> None:
    plan = ag.compile(dense(M, M, mask=ag.Causal()), target=CPU)
    q = torch.randn(2, 4, 5, 16, dtype=torch.float32)
    exact = plan.at(B=2, M=5)
    vhp: Any = torch.autograd.functional.vhp
    transforms: tuple[Callable[[Any], torch.Tensor], ...] = (
        lambda call: torch.func.jvp(lambda x: call(x, x, q), (q,), (q,))[1],
        lambda call: torch.func.grad(lambda x: call(x, q, q).sum())(q),
        lambda call: vhp(lambda x: call(x, q, q).sum(), q, q)[1],
    )
    for transform in transforms:
        assert torch.allclose(transform(plan), transform(exact), atol=1e-5)


# What is wrong


def test_a_mismatch_lists_every_size_with_both_values_and_the_way_out() -> None:
    plan = ag.compile(dense(M, N), target=CPU)
    with pytest.raises(ag.PlanMismatchError) as error:
        plan(torch.randn(5, 4, 30, 16), torch.randn(5, 4, 7, 16), torch.randn(3, 4, 8, 16))
    text = str(error.value)
    one = "expected one size wherever it stands, got"
    assert f"B: {one} 5 by q.shape[0], 5 by k.shape[0], 3 by v.shape[0]" in text
    assert f"N: {one} 7 by k.shape[2], 8 by v.shape[2]" in text
    assert 'M: expected at most 24, got 30; declare Dim("M", most=30)' in text
    with pytest.raises(ag.PlanMismatchError, match=r"k: expected f32\[2, 4, 7, 16\], got f64"):
        plan(torch.randn(2, 4, 3, 16), torch.randn(2, 4, 7, 16).double(), torch.randn(2, 4, 7, 16))
    with pytest.raises(ag.PlanMismatchError, match=r"q: expected f32\[0, 4, 0, 16\], got"):
        plan(torch.randn(3), torch.randn(3), torch.randn(3))
    with pytest.raises(ag.PlanMismatchError, match="expected a tensor"):
        plan(None, torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16))  # type: ignore[arg-type]  # on purpose


def test_what_does_not_fit_is_refused_after_what_did() -> None:
    plan = ag.compile(dense(M, M), target=CPU)
    good, *others = torch.randn(3, 2, 4, 5, 16)
    plan(good, *others)
    for bad in (good[:, :, :4], good.double(), good.transpose(2, 3).contiguous(), good[0]):
        for place in range(3):
            tensors = [good, *others]
            tensors[place] = bad
            with pytest.raises(ag.PlanMismatchError):
                plan(*tensors)


def test_a_dim_with_classes_takes_these_sizes_alone() -> None:
    n = ag.Dim("N", classes=ag.doubling(4, 16))
    plan = ag.compile(dense(1, n), target=CPU)
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 16, 16)
    for size in (4, 8, 16):
        part = k[:, :, :size].contiguous()
        assert torch.equal(call(plan, q, part, part), call(plan.at(B=2, N=size), q, part, part))
    part = k[:, :, :5].contiguous()
    with pytest.raises(ag.PlanMismatchError, match=r"one of 4, 8, 16, got 5; .* of 8 rows"):
        plan(q, part, part)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: dense(M, ag.Dim("M", most=3)), 'has M = Dim.*"M", most=3.*another input M = Dim'),
        (
            lambda: ag.attention(*(spec(B, M, N, 16),) * 3),
            "have names for heads or head sizes",
        ),
        (lambda: ag.compile(dense(M, M, ag.Dim("q", most=2))), "q names a size and an input"),
        (
            lambda: ag.compile(
                ag.attention(
                    *(spec(9, 4, 16),) * 3, q_starts=spec(3, dtype=I32), max_lengths=(M, M)
                )
            ),
            r"max_lengths \(M, M\) is not a pair",
        ),
        (lambda: ag.compile(dense(M, M), tune=True), "tune=True measures one size"),
        (lambda: ag.vmap(dense(M, M), size=2), "vmap: sizes B, M have names"),
        (lambda: ag.compile(dense(M, M)).memory(K=2), "K is not a size of the graph; .* B, M"),
        (lambda: ag.compile(dense(M, M)).at(M=99), "M: expected at most 24, got 99"),
        (lambda: ag.compile(dense(M, M)).cost(M=-1), "M = -1 is not a whole number of at least 0"),
        (lambda: ag.compile(dense(2, 2, 1)).memory(M=2), "no size has a name"),
        (lambda: dense(M, N, mask=ag.Causal()), "M queries and N keys"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(make: Any, problem: str) -> None:
    with pytest.raises(ag.GraphError, match=problem):
        make()


def test_a_backend_that_plans_for_one_size_says_so() -> None:
    graph = dense(M, M)
    said = "plans for one size, and Dims without classes stand for any"
    assert said in str(ag.explain(graph, target="h200"))
    classes = dense(ag.Dim("M", classes=(2, 4)), ag.Dim("M", classes=(2, 4)), 2)
    assert said not in str(ag.explain(classes, target="h200"))


def test_a_maximum_neither_requires_grad_nor_moves() -> None:
    """As of a plan of numbers; a cotangent for it has nowhere to go, and PyTorch says so."""
    plan = ag.compile(dense(M, N, mask=BOTTOM, stats=("max",)), target=CPU)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16)
    o, most = plan(q.clone().requires_grad_(), k, k)
    assert o.requires_grad
    assert not most.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        most.sum().backward()
    assert not torch.func.jvp(lambda q: plan(q, k, k)[1], (q,), (q,))[1].any()


# What is known ahead


@pytest.mark.parametrize("graph", [dense(M, N, mask=BOTTOM, stats=True), packed(T, B)])
def test_memory_and_cost_of_sizes_are_those_of_the_plan_of_numbers(graph: ag.Graph) -> None:
    plan = ag.compile(graph, target=CPU)
    some = {"B": 3, "M": 7, "N": 9, "T": 30}
    known = {s.name: some[s.name] for s in graph.symbols}
    largest = {s.name: s.most for s in graph.symbols}
    cases: tuple[tuple[dict[str, Any], dict[str, int]], ...] = ((known, known), ({}, largest))
    for sizes, all_ in cases:
        exact = ag.compile(replace_sizes(graph, all_), target=CPU, backends=(plan.backend,))
        assert plan.memory(**sizes) == exact.memory()
        assert plan.cost(**sizes) == exact.cost()
        assert plan.explain(**sizes).memory == exact.explain().memory
        explain: Any = ag.explain  # overloads take no dict of sizes
        assert explain(graph, target=CPU, **sizes).cost == exact.explain().cost


def test_a_plan_says_how_it_takes_sizes() -> None:
    assert "B, M are sizes of the call, all in one executable" in str(
        ag.compile(dense(M, M), target=CPU, backends=("torch_sdpa",)).explain()
    )
    assert "B, M, N are sizes of the call, each as a graph of its own" in str(
        ag.compile(dense(M, N, G=2, layout="bshd"), target=CPU).explain()
    )


# Growing lengths without names


def test_growing_lengths_drop_their_own_plans_alone() -> None:
    others = [dense(9, 9, 1, mask=ag.Window(n)) for n in range(5)]
    plans = [ag.compile(graph, target=CPU) for graph in others]
    for n in range(1, 1101):
        ag.compile(dense(1, n, 1), target=CPU)
    assert all(ag.compile(g, target=CPU) is p for g, p in zip(others, plans, strict=True))
    info = ag.cache_info()
    assert info.builds == 1105
    assert info.evictions == 1100 - info.capacity // 2


def test_a_bound_graph_without_names_is_itself() -> None:
    graph = dense(3, 4, 2)
    assert bind_graph(graph, {}) is graph
