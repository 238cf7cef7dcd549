"""Few queries on Triton: parts of the keys are the whole, in a batch as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels.tilings import MERGE
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.parts import LEAST, MOST_QUERIES, MOST_ROWS
from attn_graph.lowering.problem import facts_of
from attn_graph.lowering.rates import FILLS
from attn_graph.lowering.triton.divisions import FIXED_KEYS, divide_keys
from attn_graph.lowering.triton.plan import Flash
from attn_graph.masks import LENGTHS
from attn_graph.testing.agreement import check_outputs, run_plan
from attn_graph.testing.strategies import Shape, dtypes, mask_options, score_options
from attn_graph.testing.tensors import tensors_for
from tests.support import ragged
from tests.support.equipped import equip
from tests.support.kernels import interpreted, problem_of
from tests.support.sequences import Batch

CPU = ag.Target.of("cpu")
SPEC = ag.TensorSpec
NAN = float("nan")
EMPTY: st.SearchStrategy[int] = st.nothing()
PROMPTS = st.integers(MOST_QUERIES + 1, MOST_QUERIES + 6)  # rows of what is no step


def lying(graph: ag.Graph) -> Lying:
    return Lying.dense(problem_of(graph))


def decoding(B: int, H: int, G: int, M: int, N: int, D: int = 128, **options: Any) -> ag.Graph:
    """Some queries of a cache in bfloat16."""
    q, k = (SPEC((B, *n, D), torch.bfloat16) for n in ((H, M), (G, N)))
    return ag.attention(q, k, k, **options)


# Planning


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((1, 32, 8, 1, 32768), 32),  # two programs for each of 132 multiprocessors
        ((4, 32, 8, 1, 4096), 8),
        ((1, 32, 8, 1, 512), 2),  # parts of LEAST
        ((64, 32, 8, 1, 4096), 1),  # enough programs; heads are rows of one tile all the same
        ((1, 8, 8, 16, 32768), 32),
    ],
)
def test_parts_fill_the_gpu(sizes: tuple[int, ...], parts: int) -> None:
    H200 = ag.Target.of("h200")
    division = divide_keys(lying(decoding(*sizes)), H200, None, None, False)
    assert division is not None
    assert division.parts == parts
    assert (parts - 1) * sizes[0] * sizes[2] < FILLS * 132
    assert parts == 1 or sizes[4] >= parts * LEAST
    # A larger batch changes the parts, unless its entries are to be as they are alone.
    alone, many = (
        divide_keys(lying(decoding(B, *sizes[1:])), H200, None, None, True) for B in (1, 32)
    )
    assert alone == many
    assert alone is not None
    assert alone.parts == -(-sizes[4] // FIXED_KEYS)


@pytest.mark.parametrize(("T", "short"), [(4096, 16), (1088, 4), (200, 1)])
@pytest.mark.parametrize("invariant", [False, True])
def test_sums_of_steps_beside_prompts_have_at_most_the_rows_of_q(
    T: int, short: int, invariant: bool
) -> None:
    q, pool = SPEC((T, 32, 128), torch.bfloat16), SPEC((8, 2048, 8, 128), torch.bfloat16)
    graph = ag.attention(
        q, pool, pool, q_starts=SPEC((257,), torch.int32), max_lengths=(150, None),
        pages=SPEC((256, 8), torch.int32), kv_lengths=SPEC((256,), torch.int32),
    )  # fmt: skip
    layout = Lying.of(facts_of(simplify(graph)))
    assert layout is not None
    division = divide_keys(layout, ag.Target.of("h200"), None, None, invariant)
    assert division is not None
    assert (division.short, division.parts) == (short, 1)
    assert division.scratch(layout) <= 4 * max(T, 256) * 32 * (128 + 2)


@pytest.mark.parametrize(
    "options",
    [{"stats": ("max",)}, {"dropout": 0.1}, {"M": MOST_QUERIES + 1}, {"r": MOST_ROWS + 1}],
    ids=str,
)
def test_what_is_not_divided(options: dict[str, Any]) -> None:
    M, r = options.pop("M", 1), options.pop("r", 1)
    graph = decoding(1, r, 1, M, 4096, 64, **options)
    assert divide_keys(lying(graph), ag.Target.of("h200"), None, None, False) is None
    flash = Flash.plan(problem_of(graph), ag.Target.of("h200"))
    assert "forward" in [launch.kernel for launch in flash.launches]


def test_explain_says_how_keys_are_divided_and_what_that_takes() -> None:
    text = str(
        ag.explain(decoding(1, 32, 8, 1, 32768), target="h200", backends=("triton",), gradients=())
    )
    assert (
        "4 heads that share keys are rows of one tile; 32 parts of 1024 keys, joined by "
        "merge_parts; 520 KiB of partial sums; 129 MiB moved, 28.2 µs at its bandwidth"
    ) in text
    assert "split_forward: 256 programs, tiles of 16 x 64, 4 warps, 3 stages" in text
    assert "workspace 520 KiB forward" in text


def test_parts_are_fewer_where_the_workspace_is_small() -> None:
    graph = decoding(1, 32, 8, 1, 32768)
    plan = ag.compile(graph, target="h200", backends=("triton",), max_workspace="300KiB")
    assert 0 < plan.memory().workspace_forward <= 300 * 2**10
    least = ag.compile(graph, target="h200", backends=("triton",), max_workspace=1024)
    assert least.memory().workspace_forward == 0
    with pytest.raises(ag.NoBackendError, match="needs a workspace of"):
        ag.compile(
            graph, target="h200", backends=("triton",), batch_invariant=True, max_workspace=1024
        )


# Who is batch invariant


@pytest.mark.parametrize("name", ["cudnn", "torch_flash", "torch_efficient", "torch_cudnn", "math"])
def test_who_divides_by_the_batch_refuses(name: str) -> None:
    with pytest.raises(ag.NoBackendError, match="batch_invariant=True"):
        ag.compile(
            decoding(2, 8, 8, 1, 4096), target="h200", backends=(name,), batch_invariant=True
        )


def test_triton_comes_first_whatever_the_batch() -> None:
    for B in (1, 64):
        graph = decoding(B, 32, 32, 1, 4096)
        said = ag.explain(graph, target=equip("h200"), batch_invariant=True, gradients=())
        assert said.backend == "triton"
    assert ag.explain(graph, target=equip("h200"), gradients=()).backend == "cudnn"


def test_prefill_is_the_same_for_every_batch_too() -> None:
    """Neither tiles nor the division of a group may depend on how many programs there are."""
    for backward in (0, 1):
        plans = []
        for B in (1, 64):
            graph = ag.vjp(decoding(B, 32, 8, 512, 512, mask=ag.Causal()))[backward]
            flash = Flash.plan(problem_of(graph), ag.Target.of("h200"), invariant=True)
            names = ("BLOCK_M", "BLOCK_N", "SPLITS")
            plans.append([[x.fixed.get(n) for n in names] for x in flash.launches])
        assert plans[0] == plans[1]


# Results


@st.composite
def steps(draw: st.DrawFn) -> tuple[ag.Graph, int]:
    """Few queries against up to 200 keys, with any mask and modifier; and a seed."""
    G, r, M = (draw(st.sampled_from(x)) for x in ([1, 2], [1, 2, 3, 5], [1, 1, 2, 5]))
    N = draw(st.sampled_from([1, 31, 64, 98, 130, 200]))
    D, E = draw(st.sampled_from([16, 8])), draw(st.sampled_from([16, 5]))
    shape, dtype = Shape(2, G * r, G, M, N, D, E), draw(dtypes.filter(lambda x: x.itemsize < 8))
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    options: dict[str, Any] = {"align": align}
    options |= draw(mask_options(shape)) | draw(score_options(shape, dtype))
    options = {n: x for n, x in options.items() if n not in ("dropout", "seed", "offset")}
    specs = (SPEC(x, dtype) for x in (shape.q, shape.k, shape.v))
    graph = ag.attention(*specs, **options, stats=True)
    return graph, draw(st.integers(0, 99))


@interpreted
@given(step=steps())
@settings(max_examples=2 * settings().max_examples // 5)  # each is interpreted
def test_the_parts_are_the_whole(step: tuple[ag.Graph, int]) -> None:
    graph, seed = step
    plan = ag.compile(graph, backends=("triton",), batch_invariant=True)
    assert "partial sums" in str(plan.explain())
    check_outputs(plan, graph, tensors_for(graph, seed))


@st.composite
def batches(draw: st.DrawFn, prompts: st.SearchStrategy[int] = EMPTY) -> tuple[Batch, int]:
    """Sequences of 0 to 16 rows, most of them of one, and the query heads of a group: up to 64 rows
    of a tile of 16 or more. prompts: lengths of others."""
    most = draw(st.sampled_from([1, 1, 2, 5, 16]))
    lengths = st.one_of(st.just(1), st.integers(0, most))
    rows = draw(st.lists(lengths, min_size=1, max_size=4))
    if not prompts.is_empty:
        rows = draw(st.permutations([*rows, draw(prompts)]))
    keys = tuple(draw(st.sampled_from([0, 1, 31, 64, 98, 130, 200])) for _ in rows)
    unused = tuple(draw(st.tuples(st.integers(0, 40), st.integers(0, 2))) for _ in rows)
    least = 1 if prompts.is_empty else 130  # of keys: for fewer, steps have no launch of their own
    batch = Batch((*rows[1:], max(1, rows[0])), (*keys[1:], max(least, keys[0])), unused, True)
    return evolve(batch, gaps=draw(st.booleans())), draw(st.sampled_from([1, 3, 4, 8]))


@st.composite
def packed_steps(
    draw: st.DrawFn, in_pages: bool, prompts: st.SearchStrategy[int] = EMPTY
) -> ragged.Case:
    """Few packed queries against packed keys or pages, with any mask and modifier."""
    (batch, r), seed = draw(batches(prompts)), draw(st.integers(0, 99))
    G, dtype = draw(st.sampled_from([1, 2])), draw(dtypes.filter(lambda x: x.itemsize < 8))
    D, E = draw(st.sampled_from([16, 8])), draw(st.sampled_from([16, 5]))
    page = draw(st.sampled_from([1, 3, 16, 64])) if in_pages else 1
    shape = Shape(len(batch.rows), G * r, G, batch.most[0], -(-batch.most[1] // page) * page, D, E)
    options: dict[str, Any] = draw(mask_options(shape)) | draw(score_options(shape, dtype))
    options |= {"align": draw(st.sampled_from(["top_left", "bottom_right"])), "stats": True}
    left_out = ("dropout", "seed", "offset", *LENGTHS)
    options = {n: x for n, x in options.items() if n not in left_out}
    if in_pages:
        layout = ragged.Layout(page, draw(st.booleans()), ended=True, packed=True)
        return ragged.make_paged(batch, layout, shape, dtype, options, seed)
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return ragged.make_packed(batch, shape, dtype, dims, options, seed)


@interpreted
@given(case=st.booleans().flatmap(packed_steps), invariant=st.booleans())
@settings(max_examples=3 * settings().max_examples // 5)  # each is interpreted
def test_packed_rows_are_divided_as_padded_ones(case: ragged.Case, invariant: bool) -> None:
    """And rows of no sequence are 0, and -inf in lse, also beside sinks."""
    plan = ag.compile(case.graph, backends=("triton",), batch_invariant=invariant)
    assert not invariant or "partial sums" in str(plan.explain())
    ag.default_workspace().release()  # scratch is new, and so nothing is written there
    ragged.check_case(case, plan)


@interpreted
@given(case=packed_steps(True, PROMPTS), invariant=st.booleans())
@settings(max_examples=3 * settings().max_examples // 5)  # each is interpreted
def test_steps_beside_prompts_are_divided_as_those_alone(
    case: ragged.Case, invariant: bool
) -> None:
    """And no row of a prompt, of a step, or of no sequence is left out."""
    plan = ag.compile(case.graph, backends=("triton",), batch_invariant=invariant)
    said = str(plan.explain())
    batch = case.batch  # all of its sequences may be prompts if there are rows for that
    assert ("split_forward" in said) == (batch.total(0) <= (len(batch.rows) - 1) * batch.most[0])
    ag.default_workspace().release()
    results = run_plan(plan, case.inputs)
    ragged.check_results(case, results)


@interpreted
def test_steps_of_some_rows_beside_a_prompt_have_their_places_and_sinks() -> None:
    batch = Batch((5, 66, 1, 7), (130, 64, 31, 98), ((3, 0), (0, 1), (2, 0), (1, 1)), True)
    layout = ragged.Layout(16, heads_first=False, ended=True, packed=True)
    shape = Shape(4, 2, 1, 66, 144, 16, 16)
    sinks = SPEC((2,), torch.float32)
    options = {"mask": ag.Causal("bottom_right"), "stats": True, "sinks": sinks}
    case = ragged.make_paged(batch, layout, shape, torch.float32, options, 5)
    results = run_plan(ag.compile(case.graph, backends=("triton",)), case.inputs)
    ragged.check_results(case, results)


@interpreted
def test_rows_of_no_sequence_have_no_sink_and_no_scratch() -> None:
    """Between sequences, and after the last."""
    batch = Batch((1, 0, 3), (150, 9, 40), ((2, 1), (0, 0), (35, 2)), True)
    options = {"mask": ag.Causal("bottom_right"), "sinks": SPEC((4,), torch.float32)}
    case = ragged.sequences(batch, options, torch.float32)
    plan = ag.compile(case.graph, backends=("triton",), batch_invariant=True)
    ag.default_workspace().release()
    ragged.check_case(case, plan)


def cache(capacity: int, lengths: list[int], H: int = 4, M: int = 1) -> tuple[ag.Graph, Any]:
    """Queries against a cache, with NaN past each length."""
    random = torch.Generator().manual_seed(5)
    B, longest = len(lengths), 200
    q = torch.randn(4, H, M, 16, generator=random)[:B]
    kv = torch.full((2, 4, 2, capacity, 16), NAN)
    kv[..., :longest, :] = torch.randn(2, 4, 2, longest, 16, generator=random)
    for b, n in enumerate(lengths):
        kv[:, b, :, n:] = NAN
    tensors = (q, *kv[:, :B].contiguous(), torch.tensor(lengths, dtype=torch.int32))
    specs = map(SPEC.like, tensors[:3])
    options: dict[str, Any] = {"mask": ag.Causal("bottom_right"), "stats": True}
    return ag.attention(*specs, kv_lengths=SPEC.like(tensors[3]), **options), tensors


@interpreted
@pytest.mark.parametrize("M", [1, 3])
def test_bits_are_the_same_alone_in_a_batch_and_in_a_longer_cache(M: int) -> None:
    lengths = [150, 0, 1, 200]
    graph, tensors = cache(200, lengths, M=M)
    plan = ag.compile(graph, backends=("triton",), batch_invariant=True)
    whole = run_plan(plan, tensors)
    assert all(not x[b].isnan().any() for x in whole for b in range(4))
    assert whole[0][1].eq(0).all()
    assert whole[1][1].eq(-torch.inf).all()
    for capacity, count in ((200, 1), (64 * MERGE.block_n + 200, 2)):
        graph, tensors = cache(capacity, lengths[:count], M=M)
        other = ag.compile(graph, backends=("triton",), batch_invariant=True)
        for x, y in zip(run_plan(other, tensors), whole, strict=True):
            assert torch.equal(x, y[:count])


@interpreted
def test_bits_of_prefill_and_of_gradients_are_the_same_alone_and_in_a_batch() -> None:
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, h, 40, 8, generator=random) for h in (2, 1, 1))
    results = []
    for B in (1, 2):
        leaves = [x[:B].clone().requires_grad_() for x in (q, k, v)]
        graph = ag.attention(*map(SPEC.like, leaves), mask=ag.Causal())
        (o,) = run_plan(ag.compile(graph, backends=("triton",), batch_invariant=True), leaves)
        results.append((o, *torch.autograd.grad(o.sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y[:1])


@interpreted
def test_a_lost_row_stays_lost() -> None:
    """NaN in one part of the keys, and a score of +inf: the row is NaN, as without parts."""
    q, k, v = torch.ones(1, 2, 1, 16), torch.ones(1, 1, 200, 16), torch.ones(1, 1, 200, 16)
    k[0, 0, 100] = NAN
    graph = ag.attention(*map(SPEC.like, (q, k, v)), stats=True)
    plan = ag.compile(graph, backends=("triton",), batch_invariant=True)
    o, lse = run_plan(plan, (q, k, v))
    assert o.isnan().all()
    assert lse.isnan().all()


@interpreted
def test_each_row_has_its_head_and_its_query() -> None:
    """Slopes by head, a bias by head and query, and sinks: of grouped heads, which are rows."""
    graph = ag.attention(
        *(SPEC(x, torch.float32) for x in ((2, 6, 3, 16), (2, 2, 98, 16), (2, 2, 98, 16))),
        bias=SPEC((2, 6, 3, 98), torch.float32),
        keep=SPEC((1, 6, 3, 98), torch.bool),
        sinks=SPEC((6,), torch.float32),
        alibi=SPEC((6,), torch.float32),
        align="bottom_right",
        mask=ag.Window(80, 0, "bottom_right"),
        stats=True,
    )
    plan = ag.compile(graph, backends=("triton",), batch_invariant=True)
    check_outputs(plan, graph, tensors_for(graph, 3))
