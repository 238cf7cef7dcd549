"""Three ways to compute an attention on CPUs: each is right, and the cheapest one runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import evolve, fields
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.passes import keeps_weights
from attn_graph.lowering.cpu import ways
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.cpu.tile_grid import share_evenly
from attn_graph.lowering.problem import sole
from attn_graph.lowering.rates import CpuRates, cpu_rates
from attn_graph.lowering.request import Request
from attn_graph.machine.overlap import overlaps_itself
from attn_graph.machine.target import Target
from attn_graph.testing import strategies as drawn
from attn_graph.testing.agreement import check_gradients, check_outputs, run_gradients
from attn_graph.testing.formula import gradients
from attn_graph.testing.rule import allowance, distance
from attn_graph.testing.strategies import graphs, seeds, shapes
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans, prefer_kept_weights, prefer_way, shrink_limits
from tests.support.ragged import are_same

NATIVE = evolve(Target.of("cpu"), native=("bf16",))
OTHER = evolve(NATIVE, native=())
BF16, F32 = torch.bfloat16, torch.float32
NAMES = [way.name for way in ways.WAYS]
DTYPES = st.sampled_from((torch.bfloat16, torch.float32, torch.float64))
# Of a few numbers `low` may be right by luck.
DRAWN = graphs(shapes(most=40).filter(lambda s: s.B * s.H * s.M * s.N >= 256), DTYPES)


LEAVES: st.SearchStrategy[ag.Mask] = st.one_of(
    st.builds(m.Band, st.none() | st.integers(-60, 20), st.none() | st.integers(-20, 60)),
    st.builds(m.Band, st.none(), st.integers(-9, 9), st.just(m.LENGTHS)),
    st.builds(ag.Prefix, st.integers(0, 90)),
    st.sampled_from((ag.KeyLengths(), ag.QueryLengths(), ag.SameSegment(), ag.Keep())),
    st.builds(drawn.keep_blocks, *2 * [st.sampled_from((1, 7, 32, 64))]),
)
MASKS: st.SearchStrategy[ag.Mask | None] = st.one_of(
    st.sampled_from((None, ag.KeyLengths(), ag.Keep(), ag.KeyLengths() & ag.Keep())),
    LEAVES,
    st.builds(lambda x, y: x & y, LEAVES, LEAVES),
    st.builds(lambda x, y: x & ~y, LEAVES, LEAVES),
    st.builds(lambda x, y: x | y, LEAVES, LEAVES),
)


@st.composite
def attentions(draw: st.DrawFn) -> ag.Graph:
    """Attention of few queries or many under any mask, mostly without other options."""
    B, G, r = (draw(st.integers(1, most)) for most in (5, 3, 2))
    D, E = (draw(st.sampled_from((5, 8, 24, 40))) for _ in range(2))
    M = draw(st.integers(1, 2) | st.integers(3, 90))
    N = draw(st.integers(1, 48) | st.integers(49, 150))
    assume(B * G * r * M * N >= 256)
    size = drawn.Shape(B, G * r, G, M, N, D, E)
    dtype, mask = draw(DTYPES | st.sampled_from((F32, torch.float16))), draw(MASKS)
    kind = draw(st.sampled_from((*4 * ["bare"], *2 * ["dropped"], "biased", "any")))
    options: dict[str, Any] = draw(drawn.data_specs({} if mask is None else mask.needs, size))
    if kind in ("biased", "dropped"):
        options["dropout"] = draw(st.sampled_from((0.0, 0.4)))
    if kind == "biased":
        options["bias"] = draw(drawn.addend_specs("bias", size, dtype))
    if kind == "any":
        options |= draw(drawn.score_options(size, dtype))
    layout = draw(st.sampled_from(("bhsd", "bshd", None)))
    q, k, v = (
        draw(drawn.specs(x, dtype)) if layout is None else ag.TensorSpec(x, dtype, layout=layout)
        for x in (size.q, size.k, size.v)
    )
    stats = draw(st.sampled_from((False, False, True)))
    options.setdefault("align", "top_left")
    return ag.attention(q, k, v, **options, mask=mask, stats=stats)


def fill_data(graph: ag.Graph, tensors: Sequence[torch.Tensor], kind: str) -> None:
    """Make lengths and booleans hide no key, most keys, or all keys of an entry."""
    most = {"q_lengths": tensors[0].shape[2], "kv_lengths": tensors[1].shape[2]}
    for i, x in zip(graph.inputs, tensors, strict=True):
        if overlaps_itself(x) or not (i.name in most or x.dtype == torch.bool):
            continue
        if kind == "all":
            x.fill_(most.get(i.name, 1))
        elif kind == "few":
            x.copy_(x // 5 if i.name in most else x & x.roll(1, -1))
        elif kind == "none of an entry":
            x[:1] = 0


@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("name", [*NAMES, "kept"])
@given(
    graph=attentions() | attentions() | DRAWN,
    seed=seeds,
    kind=st.sampled_from(("drawn", "all", "few", "none of an entry")),
    skip=st.sampled_from((None, 0, 1)),
)
@settings(max_examples=2 * settings().max_examples)
def test_every_way_is_within_the_rule(
    name: str, small: bool, graph: ag.Graph, seed: int, kind: str, skip: int | None
) -> None:
    """On every problem that it does not refuse, each draw in new plans.

    kept: weights of the forward are. small: small problems are computed as large ones are.
    """
    with pytest.MonkeyPatch.context() as patch:
        if small:
            shrink_limits(patch)
        prefer_kept_weights(patch) if name == "kept" else prefer_way(patch, name)
        tensors = tensors_for(graph, seed)
        fill_data(graph, tensors, kind)
        try:
            check_plan(graph, tensors, seed, skip)
        finally:
            forget_plans()


def check_plan(
    graph: ag.Graph, tensors: Sequence[torch.Tensor], seed: int, skip: int | None
) -> None:
    """Both passes by the formula, in the memory that is told, with the same bits again."""
    workspace = ag.Workspace()
    plan = ag.compile(graph, target=NATIVE, backends=("math",), workspace=workspace)
    outputs = check_outputs(plan, graph, tensors)
    if seed % 8 < 6:  # rows of far scores run again, on tiles of whole rows
        assert workspace.bytes <= plan.memory().workspace_forward
    assert are_same(plan.infer(*tensors)[0], outputs)
    if BF16 not in (x.dtype for x in tensors) or all(i.name != "q_lengths" for i in graph.inputs):
        assert are_same(plan.run(*tensors)[0], outputs)  # oneDNN rounds by the number of rows
    try:
        gradients = check_gradients(plan, graph, tensors, seed, skip=skip)
    except ag.NoBackendError:  # there is no gradient of what it returns
        return
    again = check_gradients(plan, graph, tensors, seed, skip=skip)
    assert are_same([*gradients.values()], [*again.values()])


ONE_KEY: dict[str, dict[str, Any]] = {  # what leaves each query one key, with or without others
    "no other": {},
    "its own": {"mask": ag.Window(0, 0, "top_left")},
    "its own segment": {"mask": ag.Formula("i // 1 == j")},
    "one by length": {"kv_lengths": ag.TensorSpec((2,), torch.int32)},
}


@pytest.mark.parametrize("kind", ONE_KEY)
@pytest.mark.parametrize("name", [*NAMES, "kept"])
@given(
    dtype=st.sampled_from((BF16, torch.float16, F32, torch.float64)),
    native=st.sampled_from((NATIVE, OTHER)),
    soft_cap=st.sampled_from((None, 5.0)),
    rate=st.sampled_from((0.0, 0.3)),
    M=st.sampled_from((1, 7, 300)),
    seed=seeds,
)
@settings(max_examples=max(4, settings().max_examples // 4))
def test_one_visible_key_leaves_queries_and_keys_no_gradient(
    name: str, kind: str, dtype: torch.dtype, native: Target, soft_cap: float | None, rate: float,
    M: int, seed: int,
) -> None:  # fmt: skip
    """Exactly 0 where weights and dp round: by products, and by whole rows in half precision.
    Elsewhere dp and delta are two sums of E products in the dtype of scores."""
    E, N = 16, {"no other": 1, "one by length": 9}.get(kind, M)
    options = {**ONE_KEY[kind], "soft_cap": soft_cap, "dropout": rate, "scale": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        prefer_kept_weights(patch) if name == "kept" else prefer_way(patch, name)
        q, k = (ag.TensorSpec((2, 2, n, E), dtype) for n in (M, N))
        graph = ag.attention(q, k, k, **options)
        tensors = tensors_for(graph, seed)
        for i, x in zip(graph.inputs, tensors, strict=True):
            x.fill_(1) if i.name == "kv_lengths" else None
        try:
            plan = ag.compile(graph, target=native, backends=("math",))
            random = torch.Generator().manual_seed(seed)
            do = torch.randn(q.shape, generator=random).to(dtype)
            leaves = [x.requires_grad_() for x in tensors[:3]]
            o = plan(*tensors)
            assert isinstance(o, torch.Tensor)
            dq, dk, _ = torch.autograd.grad(o, leaves, do)
            how = " ".join(plan.training_vjp.executable.notes)
        finally:
            forget_plans()
    unit = torch.finfo(torch.promote_types(dtype, F32)).eps
    sizes = do.double().abs() @ leaves[2].detach().double().abs().mT
    most = 4 * E * unit * sizes.max() / (1 - rate)
    if dtype in (BF16, torch.float16) and "product" in how:
        most = 0.0 * most
    assert dq.abs().max() <= most * leaves[1].abs().max(), how
    assert dk.abs().max() <= most * leaves[0].abs().sum(2).max(), how


@pytest.mark.parametrize("name", ["rows", "products"])
@given(seed=seeds, soft_cap=st.sampled_from((None, 100.0)))
@settings(max_examples=max(4, settings().max_examples // 4))
def test_rows_with_nearly_all_weight_on_one_key_are_within_the_rule_itself(
    name: str, seed: int, soft_cap: float | None
) -> None:
    """Without the term for a delta of rounded o: scores to 80 beside a float mask [3, 6]."""
    q, k = (ag.TensorSpec((2, 4, n, 8), BF16) for n in (3, 6))
    graph = ag.attention(q, k, k, bias=ag.TensorSpec((1, 1, 3, 6), BF16), soft_cap=soft_cap)
    random = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(i.spec.shape, generator=random) * 6).to(BF16) for i in graph.inputs]
    do = (torch.randn(q.shape, generator=random) * 6).to(BF16)
    with pytest.MonkeyPatch.context() as patch:
        prefer_way(patch, name)
        try:
            plan = ag.compile(graph, target=NATIVE, backends=("math",))
            made = run_gradients(plan, tensors, [do])
        finally:
            forget_plans()
    for x in ("q", "k"):
        ref, low = (gradients(graph, tensors, [do], t)[x] for t in (torch.float64, BF16))
        assert distance(made[x], ref) <= allowance(ref, low, BF16, gradient=True)


@given(graph=DRAWN, native=st.sampled_from((NATIVE, OTHER)))
def test_the_cheapest_way_that_does_not_refuse_runs(graph: ag.Graph, native: Target) -> None:
    plan = ag.compile(graph, target=native, backends=("math",))
    problem = sole(plan.graph)
    if problem is None or problem.is_empty:
        return
    case = ways.CpuCase(problem, ways.own_products(native))
    chosen, seconds = case.cheapest
    assert chosen.refuses(case) is None
    assert all(seconds <= x.seconds(case) or x.refuses(case) for x in ways.WAYS)


def problem_of(dtype: torch.dtype, *sizes: int, **options: Any) -> ways.CpuCase:
    """The case of B, H, G, M and N of heads of 64."""
    B, H, G, M, N = sizes
    q, k = (ag.TensorSpec((B, *x, 64), dtype) for x in ((H, M), (G, N)))
    graph = ag.compile(ag.attention(q, k, k, **options), target=NATIVE, backends=("math",)).graph
    problem = sole(graph)
    assert problem is not None
    return ways.CpuCase(problem, ways.own_products(NATIVE))


@given(
    dtype=DTYPES,
    sizes=st.tuples(*(st.integers(1, most) for most in (8, 8, 64, 256))),
    mask=st.sampled_from((None, ag.Causal("bottom_right"), ag.KeyLengths())),
)
def test_more_batch_entries_cost_more(
    dtype: torch.dtype, sizes: tuple[int, int, int, int], mask: ag.Mask | None
) -> None:
    B, H, M, N = sizes
    prices = []
    for entries in (B, 2 * B):
        lengths = {"kv_lengths": ag.TensorSpec((entries,), torch.int32)}
        more = lengths if isinstance(mask, ag.KeyLengths) else {}
        case = problem_of(dtype, entries, H, H, M, N, mask=mask, **more)
        prices.append([way.seconds(case) for way in ways.WAYS])
    assert all(0 < few < many for few, many in zip(*prices, strict=True))


@pytest.mark.parametrize(
    ("dtype", "sizes", "name"),
    [
        (BF16, (1, 32, 8, 1, 8192), "rows"),
        (BF16, (16, 12, 12, 128, 128), "rows"),
        (BF16, (1, 1, 1, 1, 8), "kernel"),
        (F32, (1, 32, 32, 1, 8192), "rows"),  # k and v are read once
        (F32, (2, 16, 16, 256, 256), "kernel"),
        (torch.float16, (8, 12, 12, 1, 1024), "rows"),
        (torch.float16, (8, 12, 12, 256, 256), "kernel"),
    ],
)
def test_jobs_of_the_benchmark_run_the_fastest_way(
    dtype: torch.dtype, sizes: tuple[int, ...], name: str
) -> None:
    assert problem_of(dtype, *sizes).cheapest[0].name == name


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_window_of_few_keys_makes_the_kernel_cheaper(dtype: torch.dtype) -> None:
    mask = ag.Window(63, align="bottom_right")
    case = problem_of(dtype, 3, 16, 16, 64, 4096, mask=mask)
    assert case.cheapest[1] < evolve_mask(case).cheapest[1] / 4


@pytest.mark.parametrize("key_heads", [4, 16])
@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize("mask", [ag.Causal(), None], ids=str)
def test_training_on_documents_copies_no_operands_for_a_little_time(
    mask: ag.Mask | None, tokens: int, key_heads: int
) -> None:
    """Only sums of the gradients of keys are in float32."""
    q, k = (ag.TensorSpec((1, heads, tokens, 128), BF16) for heads in (16, key_heads))
    document, of = ag.SameSegment(), ag.TensorSpec((1, tokens), torch.int64)
    mask = document if mask is None else mask & document
    graph = ag.attention(q, k, k, mask=mask, q_segments=of, kv_segments=of)
    needed = ag.compile(graph, target=NATIVE, backends=("math",)).memory().workspace_backward
    sums, tile = 2 * 2 * k.type.bytes, 2**26
    assert needed is not None
    assert needed <= sums + tile


def evolve_mask(case: ways.CpuCase) -> ways.CpuCase:
    p = case.problem
    return evolve(case, problem=evolve(p, node=evolve(p.node, mask=None)))


@pytest.mark.parametrize("mask", [None, ag.Causal("top_left")], ids=str)
@pytest.mark.parametrize("sizes", [(8, 4, 128, 64), (16, 12, 128, 64), (32, 8, 16, 64)])
def test_short_rows_with_gaps_are_read_as_they_lie(
    sizes: tuple[int, ...], mask: ag.Mask | None
) -> None:
    """As layers of models bring heads: one call of the kernel, forward and in training."""
    _, H, M, D = sizes
    for step in (H * D, 3 * H * D):  # q alone, or beside k and v
        x = ag.TensorSpec(sizes, F32, (M * step, D, step, 1))
        plan = ag.compile(ag.attention(x, x, x, mask=mask))
        assert {plan.backend, plan.recorded.backend} == {"torch_sdpa"}
        assert not keeps_weights(plan.recorded.graph)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("rows", [1, 128])
def test_short_sequences_with_a_mask_of_booleans_keep_weights(
    dtype: torch.dtype, rows: int
) -> None:
    x = ag.TensorSpec((16, 12, 128, 64), dtype)
    keep = ag.TensorSpec((16, 1, rows, 128), torch.bool)
    plan = ag.compile(ag.attention(x, x, x, keep=keep), target=NATIVE)
    assert keeps_weights(plan.recorded.graph)
    (tiles,) = plan_tiles(Request(plan.recorded.graph, NATIVE, ag.extend.Options()))
    assert isinstance(tiles, RowTiles)
    assert tiles.by_entries


@pytest.mark.parametrize(
    ("dtype", "keys", "keeps"),
    [(BF16, 16, True), (BF16, 256, True), (F32, 16, True), (F32, 256, True), (F32, 1024, False)],
)
def test_a_mask_of_booleans_keeps_weights_where_the_graph_without_it_does(
    dtype: torch.dtype, keys: int, keeps: bool
) -> None:
    """A call that keeps all places runs without the mask, and gives the same bits."""
    x, keep = ag.TensorSpec((8, 12, keys, 64), dtype), ag.TensorSpec((8, 1, 1, keys), torch.bool)
    graphs = ag.attention(x, x, x, keep=keep), ag.attention(x, x, x)
    recorded = [ag.compile(graph, target=NATIVE).recorded for graph in graphs]
    assert [keeps_weights(each.graph) for each in recorded] == [keeps, keeps]


@pytest.mark.parametrize("sizes", [(160, 16, 256, 64), (2, 130, 520, 130)])
def test_a_backward_of_many_tiles_reads_kept_weights_too(sizes: tuple[int, ...]) -> None:
    x, side = ag.TensorSpec(sizes, F32), sizes[2]
    graph = ag.attention(x, x, x, bias=ag.TensorSpec((1, 1, side, side), F32))
    plan = ag.compile(graph, target=OTHER)
    assert keeps_weights(plan.recorded.graph)
    for each in (plan.recorded, plan.training_vjp):
        (tiles,) = plan_tiles(Request(each.graph, OTHER, ag.extend.Options()))
        assert isinstance(tiles, RowTiles)


@pytest.mark.parametrize("sizes", [(2, 2, 16, 256), (3, 1, 16, 256), (4, 2, 16, 1024)])
def test_the_choice_for_grouped_heads_is_that_of_rows_of_one(sizes: tuple[int, ...]) -> None:
    """So a call takes no more memory than a limit of the workspace counts."""
    B, G, r, N = sizes
    q, k = (ag.TensorSpec(x, F32) for x in ((B, G * r, 1, 64), (B, G, N, 64)))
    workspace = ag.Workspace()
    options: dict[str, Any] = {"backends": ("math",), "workspace": workspace}
    plan = ag.compile(ag.attention(q, k, k), max_workspace=2**22, **options)
    plan(torch.randn(q.shape), *(torch.randn(k.shape) for _ in range(2)))
    assert workspace.bytes == plan.memory().workspace_forward


def test_heads_that_share_keys_are_cut_where_their_scores_are_many() -> None:
    tiles = {2**14: "128 heads x 1 queries", 2**15: "1 x 1 heads x 64 queries"}
    for keys, size in tiles.items():
        q, k = (ag.TensorSpec((1, *s, 64), BF16) for s in ((128, 1), (1, keys)))
        plan = ag.compile(ag.attention(q, k, k), target=NATIVE, backends=("math",))
        assert f"products on tiles of {size}" in str(plan.explain())
        assert "rows of one: q is [1, 1, 128, 64]" in str(plan.explain())


def test_each_kind_of_cpu_has_at_most_twelve_rates() -> None:
    assert {cpu_rates(half).native_half for half in (True, False)} == {True, False}
    assert len(fields(CpuRates)) <= 13  # and the kind


@given(count=st.integers(1, 300), most=st.integers(1, 300))
def test_even_shares_are_as_many_as_full_ones(count: int, most: int) -> None:
    share = share_evenly(count, most)
    shares = -(-count // share)
    assert share <= most
    assert shares == -(-count // most)
    assert share == 1 or -(-count // (share - 1)) > shares
