"""Causal masks in steps, and small corners as parts: which problems, and what they give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.kernels import fused_cpu
from attn_graph.lowering.cpu import corners
from attn_graph.lowering.cpu.fused_tiles import FusedTiles
from attn_graph.lowering.cpu.schedule import Part, Tile
from attn_graph.lowering.problem import Problem, sole
from attn_graph.testing.agreement import as_leaves, check_gradients, check_outputs, run_plan
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans

CPU = ag.Target.of("cpu")
PLAIN = evolve(CPU, native=(), interprets=False)
CAUSAL = ag.Causal("top_left")
flash = fused_cpu.flash
SIZES = (4, 12, 512, 64)


def causal(
    sizes: tuple[int, int, int, int] = SIZES, N: int | None = None, G: int | None = None,
    dtype: torch.dtype = torch.float32, layout: str = "bhsd", mask: ag.Mask | None = CAUSAL,
    **options: Any,
) -> ag.Graph:  # fmt: skip
    """Attention of sizes B, H, M, D under a causal mask."""
    B, H, M, D = sizes
    q = ag.TensorSpec(sizes, dtype, layout=layout)
    k = ag.TensorSpec((B, G or H, N or M, D), dtype, layout=layout)
    return ag.attention(q, k, k, mask=mask, **options)


def problem_of(graph: ag.Graph) -> Problem:
    """The attention that a graph is."""
    problem = sole(simplify(graph))
    assert problem is not None
    return problem


@pytest.fixture
def any_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of however little work."""
    monkeypatch.setattr(corners, "LEAST_LEFT_OUT", 0)
    forget_plans()
    yield
    forget_plans()


@given(M=st.integers(192, 767), more=st.integers(0, 700))
@example(M=512, more=0)
@example(M=512, more=1)
@example(M=513, more=0)
def test_the_kernel_computes_whole_blocks_of_keys(M: int, more: int) -> None:
    """What it computes and hides shows where a value is NaN, which no weight of 0 hides."""
    N = M + more
    problem = problem_of(causal((1, 1, M, 1), N))
    seen = 0
    for j in {0, M // 3, 511, 512, M - 1, N - 1} & {*range(N)}:
        q, k, v = torch.zeros(1, 1, M, 1), torch.zeros(1, 1, N, 1), torch.zeros(1, 1, N, 1)
        v[0, 0, j] = torch.nan
        reached = flash(q, k, v, 0.0, True)[0].isnan().sum()
        stops = [min(at + 64, M) for at in range(0, M, 64)]
        due = [n for n, stop in enumerate(stops) if j < min(-(-stop // 512) * 512, N)]
        assert reached == sum(stops[n] - 64 * n for n in due)
        seen += int(reached)
    assert seen
    assert corners.count_scores(problem, 64, 512) >= corners.count_scores(problem, 64)


def test_scores_are_counted_by_blocks() -> None:
    problem = problem_of(causal((1, 1, 500, 1), 600))
    assert corners.count_scores(problem, 500) == 500 * 500
    assert corners.count_scores(problem, 192) == 192 * (192 + 384) + 116 * 500
    assert corners.count_scores(problem, 64, 512) == 500 * 512
    assert corners.count_scores(problem, 300, 256) == 300 * 512 + 200 * 512


@given(M=st.integers(1, 900), start=st.integers(0, 40), first=st.integers(0, 9))
def test_steps_have_each_score_that_is_kept(M: int, start: int, first: int) -> None:
    part = Part(start, start + M + 7, "causal")
    steps = [*corners.cut_steps(Tile(range(2), range(first, first + M), (part,)))]
    rows = [i for step in reversed(steps) for i in step.rows]
    assert rows == [*range(first, first + M)]
    for step in steps:
        (cut,) = step.parts
        assert cut.start == start
        assert cut.stop == start + step.rows.stop - first
        assert cut.kind == ("causal" if step.rows.start == first else "mixed")


@pytest.mark.parametrize(
    ("graph", "due"),
    [
        (causal(), True),
        (causal((4, 12, 384, 64)), True),
        (causal((4, 12, 576, 64)), True),
        (causal(N=700), True),
        (causal(dtype=torch.float16), True),
        (causal(stats=True), True),
        (causal((4, 12, 383, 64)), False),  # less than two steps
        (causal((4, 12, 577, 64)), False),
        (causal(N=400), False),  # queries that see all keys
        (causal((1, 3, 512, 64)), False),  # little work
        (causal(scale=-1.0), False),  # the kernel masks before it scales
        (causal(soft_cap=9.0), False),
        (causal(mask=ag.Causal() & ag.Window(600)), True),  # which is no other mask
        (causal(mask=ag.Causal() & ag.Window(60)), False),
        (causal(mask=None), False),
        (causal(N=513, mask=ag.Causal("bottom_right")), False),
    ],
)
def test_problems_with_enough_to_leave_out_take_steps(graph: ag.Graph, due: bool) -> None:
    assert corners.takes_steps(problem_of(graph)) is due


def test_steps_run_instead_of_one_call_in_both_passes() -> None:
    plan = ag.compile(causal(), target=PLAIN)
    for each in (plan, plan.vjp):
        assert each.backend == "math"
        assert "3 calls of PyTorch's fused CPU kernel" in str(each.explain())
    other = ag.compile(causal((4, 12, 640, 64)), target=PLAIN)
    assert other.backend == other.vjp.backend == "torch_sdpa"


def test_what_hides_keys_is_held_once_for_all_steps() -> None:
    tiles = FusedTiles.plan(problem_of(causal((4, 12, 576, 64))))
    assert tiles.common == (192, range(-384, 192))
    assert tiles.holds
    assert tiles.addends == 0


@given(M=st.integers(2 * corners.STEP + 1, 3 * corners.STEP))
def test_what_hides_keys_is_the_same_for_all_lengths(M: int) -> None:
    assert FusedTiles.plan(problem_of(causal((4, 12, M, 64)))).common == (192, range(-384, 192))


def test_what_hides_keys_far_apart_is_held_apart() -> None:
    mask = ag.Window(20, 0) | ag.Window(900, -880)
    tiles = FusedTiles.plan(problem_of(causal((4, 12, 1000, 64), mask=mask)))
    assert tiles.common is None
    assert tiles.holds


@settings(
    max_examples=settings().max_examples // 2,  # each takes a second
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    M=st.integers(corners.FEWEST, corners.MOST),
    more=st.just(0) | st.integers(1, 90),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    layout=st.sampled_from(("bhsd", "bshd", "sbhd")),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    stats=st.booleans(),
    seed=st.integers(0, 9),
)
@pytest.mark.usefixtures("any_work")
def test_they_agree_with_the_formula(
    M: int, more: int, heads: tuple[int, int], layout: str, dtype: torch.dtype, stats: bool,
    seed: int,
) -> None:  # fmt: skip
    H, G = heads
    graph = causal((2, H, M, 4), M + more, G, dtype, layout, stats=stats)
    assert corners.takes_steps(problem_of(graph))
    plan, tensors = ag.compile(graph, target=PLAIN), tensors_for(graph, seed)
    assert plan.backend == "math"
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed)


def after_keys(M: int, N: int, **options: Any) -> ag.Graph:
    """Few queries, at the last of the keys."""
    return causal((2, 4, M, 8), N, mask=ag.Causal("bottom_right"), **options)


@pytest.mark.parametrize(
    ("graph", "calls"),
    [
        (after_keys(4, 512), 1),
        (after_keys(64, 256), 1),
        (after_keys(64, 257), 2),  # too many numbers to hold for it
        (after_keys(4, 512, scale=-1.0), 1),  # whole rows of the mask
        (after_keys(8, 512, layout="bshd"), 1),
    ],
)
def test_a_small_corner_is_one_call_with_the_keys_before_it(graph: ag.Graph, calls: int) -> None:
    for each in ag.vjp(graph):
        tiles = FusedTiles.plan(problem_of(each))
        assert tiles.summary().startswith(f"{calls} call")
        assert tiles.holds


def test_keys_that_are_copied_in_parts_keep_the_corner_apart() -> None:
    tiles = FusedTiles.plan(problem_of(causal((8, 32, 4, 64), 512, 32, torch.float16,
        mask=ag.Causal("bottom_right"))))  # fmt: skip
    assert tiles.static is not None
    assert {part.kind for tile in tiles.static for part in tile.parts} == {"full", "causal"}


@given(
    M=st.integers(2, 9), before=st.integers(1, 60), heads=st.sampled_from([(1, 1), (4, 2)]),
    layout=st.sampled_from(("bhsd", "sbhd")), stats=st.booleans(), seed=st.integers(0, 9),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
)  # fmt: skip
def test_small_corners_agree_with_the_formula(
    M: int, before: int, heads: tuple[int, int], layout: str, stats: bool, seed: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    H, G = heads
    mask = ag.Causal("bottom_right")
    graph = causal((2, H, M, 4), M + before, G, dtype, layout, mask, stats=stats)
    plan = ag.compile(graph, target=PLAIN, backends=("math",))
    tensors = tensors_for(graph, seed)
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, seed)


@pytest.mark.usefixtures("any_work")
@pytest.mark.parametrize("mask", [CAUSAL, ag.Causal() & ag.Window(70), ag.Causal() | ag.Prefix(9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_lie_as_their_inputs_do(mask: ag.Mask, dtype: torch.dtype) -> None:
    graph = causal((2, 3, 400, 8), layout="bshd", dtype=dtype, mask=mask)
    plan, leaves = ag.compile(graph, target=PLAIN), as_leaves(tensors_for(graph, 1))
    (o,) = run_plan(plan, leaves)
    grads = torch.autograd.grad(o, leaves, torch.randn_like(o))
    assert [x.stride() for x in grads] == [x.stride() for x in leaves]


@pytest.mark.usefixtures("any_work")
def test_packed_sequences_take_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = ag.TensorSpec((900, 2, 8), torch.float32)
    starts = ag.TensorSpec((3,), torch.int32)
    graph = ag.attention(packed, packed, packed, mask=CAUSAL, q_starts=starts, kv_starts=starts)
    plan = ag.compile(graph, target=PLAIN, backends=("math",))
    x, at = torch.randn(3, 900, 2, 8).unbind(), torch.tensor([0, 400, 900], dtype=torch.int32)
    calls: list[int] = []

    def count(q: torch.Tensor, *more: Any, **named: Any) -> Any:
        calls.append(q.shape[2])
        return flash(q, *more, **named)

    monkeypatch.setattr(fused_cpu, "flash", count)
    (o,) = run_plan(plan, x, q_starts=at, kv_starts=at)
    assert sorted(calls) == [16, 116, 192, 192, 192, 192]
    for a, b in ((0, 400), (400, 900)):
        q, k, v = (each[None, a:b].transpose(1, 2) for each in x)
        due, _ = flash(q, k, v, 0.0, True)
        torch.testing.assert_close(o[None, a:b].transpose(1, 2), due)
