"""Packed tensors: what every sequence of them gives is what it gives alone, and padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.reference import evaluate
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.packing import Unpack
from attn_graph.lowering.cpu.sequences import is_separable
from attn_graph.machine.target import Target
from attn_graph.nn.functional import attention
from attn_graph.spec import INF
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, dtypes
from tests.support.ragged import (
    check_case,
    check_gradients,
    make_packed,
    sequences,
)
from tests.support.sequences import (
    Batch,
    batches,
)

CPU = Target.here("cpu")
I32 = torch.int32
SPEC = ag.TensorSpec
ALONE: tuple[dict[str, Any], ...] = (  # options with which a sequence is an attention by itself
    {},
    {"mask": ag.Causal("bottom_right")},
    {"mask": ag.Window(3, 2, "bottom_right"), "soft_cap": 2.0},
    {"mask": ag.Causal("top_left") | ag.Prefix(2)},
)


@pytest.mark.parametrize("options", ALONE, ids=str)
@given(batch=batches(), dtype=dtypes)
def test_packed_is_a_loop_over_sequences(
    options: dict[str, Any], batch: Batch, dtype: torch.dtype
) -> None:
    """To the bit: so those before and after change nothing of one."""
    case = sequences(batch, options, dtype)
    o, lse = run_plan(ag.compile(case.graph, target=CPU), case.inputs)
    starts = [batch.starts(side).tolist() for side in (0, 1)]
    for b, (M, N) in enumerate(zip(batch.rows, batch.keys, strict=True)):
        q, k, v = (
            case.tensors[n][starts[s][b] :][:size].transpose(0, 1)[None]
            for n, s, size in (("q", 0, M), ("k", 1, N), ("v", 1, N))
        )
        graph = ag.attention(*map(SPEC.like, (q, k, v)), **options, stats=True)
        due, due_lse = run_plan(ag.compile(graph, target=CPU), (q, k, v))
        first = starts[0][b]
        assert torch.equal(o[first : first + M].transpose(0, 1), due[0])
        assert torch.equal(lse[:, first : first + M], due_lse[0])


def make_small(**options: Any) -> tuple[ag.Graph, list[torch.Tensor]]:
    """Queries and keys of three sequences in float64, one of them without queries."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, h, 3, generator=random, dtype=torch.float64)
        for n, h in ((6, 2), (8, 1), (8, 1))
    )
    starts = [torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 8])]
    specs = map(SPEC.like, (q, k, v))
    where = dict(zip(("q_starts", "kv_starts"), map(SPEC.like, starts), strict=True))
    given: dict[str, Any] = {**where, **options}  # Any: options of `attention`
    return ag.attention(*specs, **given), [q, k, v, *starts]


@pytest.mark.parametrize("options", ALONE[1:3], ids=str)
def test_every_second_derivative_is_right(options: dict[str, Any]) -> None:
    graph, (q, k, v, *starts) = make_small(**options, stats=True)
    plan = ag.compile(graph, target=CPU)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        o, lse = run_plan(plan, (*x, *starts))
        return o, lse[:, :5]  # -inf of the last row, which is of no sequence, has no difference

    assert torch.autograd.gradcheck(attend, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)


def test_queries_alone_or_keys_alone_may_be_packed() -> None:
    random = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, 1, 8, generator=random)
    k, v = torch.randn(2, 9, 2, 8, generator=random).unbind()
    starts = torch.tensor([0, 4, 4, 9], dtype=I32)
    graph = ag.attention(*map(SPEC.like, (q, k, v)), kv_starts=SPEC.like(starts), stats=True)
    o, lse = run_plan(ag.compile(graph, target=CPU), (q, k, v, starts))
    assert o.shape == (3, 4, 1, 8)
    assert lse[1].eq(-INF).all()
    keys, values = (Unpack(5).run(x, starts, starts.diff())[0] for x in (k, v))
    specs = map(SPEC.like, (q, keys, values))
    whole = ag.attention(*specs, kv_lengths=SPEC((3,), I32), stats=True)
    dues = expect_outputs(whole, (q, keys, values, starts.diff()))
    for x, due in zip((o, lse), dues, strict=True):
        due.check(x)
    rows, each = q[:, :, 0], torch.tensor([0, 1, 2, 3], dtype=I32)
    specs = map(SPEC.like, (rows, keys, values))
    where: dict[str, Any] = {"q_starts": SPEC.like(each), "kv_lengths": SPEC((3,), I32)}
    plan = ag.compile(ag.attention(*specs, **where, max_lengths=(1, None)), target=CPU)
    (again,) = run_plan(plan, (rows, keys, values, starts.diff().to(I32), each))
    torch.testing.assert_close(again, o[:, :, 0])


def test_padded_queries_beside_packed_keys_see_their_sinks() -> None:
    random = torch.Generator().manual_seed(4)
    q, sinks = torch.randn(2, 2, 3, 4, generator=random), torch.randn(2, generator=random)
    k, v = torch.randn(2, 5, 2, 4, generator=random).unbind()
    starts, rows = torch.tensor([0, 3, 5]), torch.tensor([1, 2])
    options: dict[str, Any] = {"sinks": SPEC.like(sinks), "q_lengths": SPEC.like(rows)}
    graph = ag.attention(
        *map(SPEC.like, (q, k, v)), kv_starts=SPEC.like(starts), stats=True, **options
    )
    keys, values = (Unpack(3).run(x, starts, starts.diff())[0] for x in (k, v))
    specs = map(SPEC.like, (q, keys, values))
    whole = ag.attention(*specs, kv_lengths=SPEC.like(rows), stats=True, **options)
    plan = ag.compile(graph, target=CPU)
    given_tensors = {"q": q, "q_lengths": rows, "sinks": sinks, "kv_starts": starts}
    tensors = [(given_tensors | {"k": k, "v": v})[i.name] for i in graph.inputs]
    padded = given_tensors | {"k": keys, "v": values, "kv_lengths": starts.diff()}
    padded_tensors = [padded[i.name] for i in whole.inputs]
    for x, due in zip(run_plan(plan, tensors), expect_outputs(whole, padded_tensors), strict=True):
        due.check(x)
    cotangents = [torch.randn(t.shape, generator=random) for t in plan.graph.output_types]
    due = expect_gradients(whole, padded_tensors, cotangents)["sinks"]
    due.check(run_gradients(plan, tensors, cotangents)["sinks"])


def test_keys_lie_as_queries_where_nothing_else_is_given() -> None:
    x, starts = torch.randn(7, 2, 4), torch.tensor([0, 3, 7])
    graph = ag.attention(*[SPEC.like(x)] * 3, q_starts=SPEC.like(starts), mask=ag.Causal())
    (o,) = run_plan(ag.compile(graph, target=CPU), (x, x, x, starts))
    alone = ag.compile(ag.attention(*[SPEC((1, 2, 3, 4), torch.float32)] * 3, mask=ag.Causal()))
    first = x[:3].transpose(0, 1)[None].contiguous()
    torch.testing.assert_close((o[:3].transpose(0, 1)[None],), run_plan(alone, [first] * 3))


@pytest.mark.parametrize("stats", [False, True])
def test_sequences_multiply_in_bfloat16_where_no_statistics_are_given(stats: bool) -> None:
    batch = Batch((130, 200), (130, 200), ((0, 0), (0, 0)), gaps=False)
    dims = {"q": (0, 8, 64), "k": (1, 8, 64), "v": (1, 8, 64)}
    options = {"mask": ag.Causal("bottom_right"), "stats": stats}
    shape = Shape(2, 8, 8, *batch.most, 64, 64)
    case = make_packed(batch, shape, torch.bfloat16, dims, options, 3)
    plan = ag.compile(case.graph, target=evolve(CPU, native=("bf16",)))
    assert ("bf16 products" in plan.executable.notes[0]) != stats
    check_case(case, plan)
    check_gradients(case, plan, 3)
    outputs, _ = plan.executable.run(*case.inputs)
    assert torch.equal(run_plan(plan, case.inputs)[0], outputs[0])


def test_a_step_that_knows_the_batch_runs_padded() -> None:
    graph, _ = make_small(mask=ag.Formula("(b + i + j) % 2 == 0"))
    (node,) = (e.op for e in simplify(graph).eqns if isinstance(e.op, Packed))
    assert not is_separable(node)
    assert "padded to the longest" in str(ag.compile(graph, target=CPU).explain())
    for options in ({}, {"dropout": 0.5}):
        graph, _ = make_small(**options)
        (node,) = (e.op for e in simplify(graph).eqns if isinstance(e.op, Packed))
        assert is_separable(node)


def refusals(graph: ag.Graph, target: str) -> dict[str, list[str]]:
    """Every reason of each backend that refuses, by its name."""
    said = ag.explain(graph, target=target, gradients=())
    return {r.backend: [str(x) for x in r.reasons] for r in said.refusals}


OTHERS = {
    "h200": ("torch_efficient", "torch_cudnn"),
    "cpu": ("torch_sdpa",),
}


@pytest.mark.parametrize("target", OTHERS)
def test_every_other_backend_says_why_not(target: str) -> None:
    """It names no other: the explanation lists those that are able, on this target."""
    readers = "triton", "cudnn", "torch_flash"
    reason = "reads no packed tensors, and the graph has some"
    x, starts = SPEC((16, 2, 64), torch.bfloat16), SPEC((4,), I32)
    texts = refusals(ag.attention(x, x, x, q_starts=starts, max_lengths=(8, 8)), target)
    assert all(reason in texts[name] for name in OTHERS[target])
    assert "math" not in texts
    assert not any(reason in texts.get(name, ()) for name in readers)
    if target == "h200":
        assert "triton" not in texts


def test_what_only_math_takes_is_said_of_no_other() -> None:
    """Steps that pack by themselves, and tangents of packed tensors."""
    graph, _ = make_small()
    pushed = refusals(ag.jvp(graph), "h200")
    tangents = "and the graph has AttentionJvp"
    for name in (*OTHERS["h200"], "cudnn"):
        assert f"computes no tangents, {tangents}" in pushed[name]
    assert f"computes no tangents of packed tensors, {tangents}" in pushed["triton"]

    def step(x: ag.Value, starts: ag.Value, lengths: ag.Value) -> ag.Value:
        return x.then(Unpack(8), starts, lengths)

    x, starts, lengths = SPEC((16, 2, 64), torch.bfloat16), SPEC((4,), I32), SPEC((3,), I32)
    alone = refusals(ag.graph(step, x=x, starts=starts, lengths=lengths), "h200")
    reason = "reads no packed tensors, and the graph has some"
    assert all(reason in alone[name] for name in OTHERS["h200"])
    for name in ("triton", "cudnn"):
        assert "supports one attention, and the graph has 1 equations: Unpack" in alone[name]


def test_a_limit_that_lengths_decide_about_is_refused() -> None:
    graph, _ = make_small()
    with pytest.raises(ag.NoBackendError, match="depends on their lengths"):
        ag.compile(graph, target=CPU, max_workspace="1GiB")


def test_pairs_are_counted_once_starts_are_known() -> None:
    graph, (*_, q_starts, kv_starts) = make_small(mask=ag.Causal("bottom_right"))
    plan = ag.compile(graph, target=CPU)
    assert not plan.cost().exact
    exact = plan.cost(q_starts=q_starts, kv_starts=kv_starts)
    assert exact.exact
    assert exact.pairs == 2 * ((2 + 3) + (2 + 3 + 4))  # of two heads


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize(("rows", "keys"), [(0, 9), (9, 0), (0, 0)])
def test_sides_without_rows_are_left_to_math(gpu: str, rows: int, keys: int) -> None:
    q, k = (SPEC((n, 2, 16), torch.float16) for n in (rows, keys))
    starts = SPEC((3,), I32)
    graph = ag.attention(q, k, k, max_lengths=(4, 4), q_starts=starts, kv_starts=starts)
    for each in (graph, ag.vjp(graph)[1]):
        assert ag.compile(each, target=gpu).backend == "math"
        refused = refusals(each, gpu)
        for name in ("triton", "torch_flash", "cudnn"):
            (reason,) = (x for x in refused[name] if "needs sizes of at least 1" in x)
            assert reason.endswith(f"{rows} packed rows, {keys} packed keys")


def test_memory_does_not_grow_with_the_padding() -> None:
    x, starts = SPEC((4096, 4, 64), torch.float32), SPEC((65,), I32)
    plan = ag.compile(ag.attention(x, x, x, q_starts=starts, mask=ag.Causal()), target=CPU)
    padded = 64 * 4096 * 4 * 64 * 4
    assert plan.memory().peak < padded  # of one operand; there are eight


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no starts": (
        lambda: ag.attention(*[SPEC((5, 2, 4), torch.float32)] * 3),
        "have 3 axes and need 4",
    ),
    "starts of a dense q": (
        lambda: ag.attention(*[SPEC((1, 2, 5, 4), torch.float32)] * 3, q_starts=SPEC((2,), I32)),
        "with q_starts it is [T,H,D]",
    ),
    "starts of floats": (
        lambda: ag.attention(
            *[SPEC((5, 2, 4), torch.float32)] * 3, q_starts=SPEC((2,), torch.float32)
        ),
        "torch.int32",
    ),
    "an alignment is missing": (lambda: make_small(mask=ag.Causal()), "needs an alignment"),
    "no pair": (lambda: make_small(max_lengths=7), "max_lengths 7 is not a pair"),
    "a size below 0": (
        lambda: make_small(max_lengths=(-1, None)),
        "-1 is not a whole number of at least 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_an_error(name: str) -> None:
    attempt, words = BAD[name]
    with pytest.raises(ag.GraphError) as caught:
        attempt()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("q_starts", "words"),
    [
        ([0, 3, 2, 5], "ascending"),
        ([0, 2, 3, 9], "of 6 rows"),
        ([-1, 2, 3, 5], "expected 0 first, got -1"),
        ([0, 0, 0, 6], "sequence 2 has 6, and 6 rows before the next one, of at most 5"),
    ],
)
def test_starts_that_are_none_are_an_error(q_starts: Sequence[int], words: str) -> None:
    graph, (q, k, v, _, kv_starts) = make_small(max_lengths=(5, None))
    with pytest.raises(ag.PlanMismatchError, match=words):
        ag.compile(graph, target=CPU)(q, k, v, torch.tensor(q_starts), kv_starts)


NO_ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": ag.Causal("bottom_right"), "stats": True},
    "alibi": {"alibi": True, "align": "top_left", "soft_cap": 2.0},
    "sinks": {"sinks": SPEC((4,), torch.float32), "stats": ("max", "lse")},
}


@pytest.mark.parametrize("options", NO_ROWS.values(), ids=NO_ROWS)
@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_batch_may_have_no_row_of_queries_or_of_keys(
    rows: int, keys: int, paged: bool, options: dict[str, Any]
) -> None:
    """What a rank has that gets no tokens, where nothing says how long sequences are."""
    q = SPEC((rows, 4, 8), torch.float32)
    table: dict[str, Any] = {"kv_starts": SPEC((3,), torch.int64)}
    k = SPEC((keys, 2, 8), torch.float32)
    if paged:
        k = SPEC((keys, 4, 2, 8), torch.float32)
        table = {
            "pages": SPEC((2, keys and 1), torch.int64), "kv_lengths": SPEC((2,), torch.int64)
        }  # fmt: skip
    graph = ag.attention(q, k, k, q_starts=SPEC((3,), torch.int64), **table, **options)
    where = {
        "q_starts": torch.tensor([0, 0, rows]), "kv_starts": torch.tensor([0, keys, keys]),
        "pages": torch.zeros(2, keys and 1, dtype=torch.int64),
        "kv_lengths": torch.tensor([4, 0] if keys else [0, 0]),
    }  # fmt: skip
    tensors = {i.name: torch.randn(i.spec.shape).to(i.spec.dtype) for i in graph.inputs}
    tensors |= {name: x for name, x in where.items() if name in tensors}
    leaves = [tensors["q"].requires_grad_(), tensors["k"].requires_grad_()]
    plan = ag.compile(graph, target=CPU)
    o, *_ = outputs = run_plan(plan, [*tensors.values()])
    assert [x.shape for x in outputs] == [type_.shape for type_ in plan.graph.output_types]
    given = [x.detach() for x in tensors.values()]
    for x, due in zip(outputs, evaluate(graph, given), strict=True):
        torch.testing.assert_close(x, due.to(x.dtype))
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), leaves, torch.zeros(())))
    assert plan.memory().outputs == sum(x.nbytes for x in outputs)
    names: dict[str, Any] = {name: x for name, x in tensors.items() if name not in "qkv"}
    said = {name: x for name, x in options.items() if name != "sinks"}
    again = attention(tensors["q"], tensors["k"], tensors["v"], **names, **said)
    torch.testing.assert_close(again, outputs if isinstance(again, tuple) else o)


@pytest.mark.parametrize("sinks", [None, -100.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_far_rows_of_sequences_padded_to_the_longest_have_gradients(
    dtype: torch.dtype, sinks: float | None
) -> None:
    """Of keys all alike the gradient is known: dv sums weights of 1 / (i + 1), dq and dk are 0."""
    options: dict[str, Any] = {"q_starts": torch.tensor([0, 2, 6]), "max_lengths": (4, 4)}
    if sinks is not None:
        options["sinks"] = torch.full((1,), sinks, dtype=dtype, requires_grad=True)
    q, k, v = (torch.full((6, 1, 4), 6.0, dtype=dtype, requires_grad=True) for _ in "qkv")
    o = attention(q, k, v, mask=ag.Formula("i >= j"), scale=1.0, **options)
    assert isinstance(o, torch.Tensor)
    leaves = [q, k, v, *([] if sinks is None else [options["sinks"]])]
    dq, dk, dv, *dsinks = torch.autograd.grad(o.sum(), leaves, create_graph=True)
    due = torch.tensor([3 / 2, 1 / 2, 25 / 12, 13 / 12, 7 / 12, 1 / 4], dtype=torch.float64)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(dv[:, 0, 0].double(), due, rtol=4 * unit, atol=0.0)
    assert all(x.isfinite().all() for x in (dq, dk, *dsinks))
    again = torch.autograd.grad(dv.sum() + dq.sum(), [q, k, v])
    assert all(x.isfinite().all() for x in again)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_vjp_of_padded_far_rows_is_finite_where_a_sequence_is_short(sinks: bool) -> None:
    x, starts = SPEC((6, 1, 4), torch.float32), SPEC((3,), torch.int64)
    more: dict[str, Any] = {"sinks": SPEC((1,), torch.float32)} if sinks else {}
    graph = ag.attention(
        x, x, x, q_starts=starts, mask=ag.Formula("i >= j"), max_lengths=(4, 4), **more
    )
    forward, backward = (ag.compile(g, target=CPU) for g in ag.vjp(graph))
    far = {i.name: torch.full(i.spec.shape, 12.0) for i in graph.inputs if i.name != "q_starts"}
    tensors = [{**far, "q_starts": torch.tensor([0, 2, 6])}[i.name] for i in graph.inputs]
    results = run_plan(forward, tensors)
    grads = run_plan(backward, [*tensors, *results, torch.ones(6, 1, 4)])
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("mask", [ag.Causal("bottom_right"), ag.Formula("i + b != j")])
@pytest.mark.parametrize("side", ["q_starts", "kv_starts"])
def test_starts_that_leave_rows_out_raise_where_all_rows_are_declared(
    mask: ag.Mask, side: str
) -> None:
    """In a call on a CPU, also one of sequences padded to the longest, and in a check."""
    x, starts = SPEC((9, 2, 4), torch.float32), SPEC((3,), I32)
    graph = ag.attention(x, x, x, mask=mask, q_starts=starts, kv_starts=starts, all_rows=True)
    tensors = {n: torch.randn(9, 2, 4) for n in "qkv"}
    tensors |= {n: torch.tensor([0, 4, 9], dtype=I32) for n in ("q_starts", "kv_starts")}
    plan = ag.compile(graph, target=CPU)
    calls = plan, plan.check
    for call in calls:
        call(**tensors)
    for last in (8, 0):
        wrong = tensors | {side: torch.tensor([0, min(4, last), last], dtype=I32)}
        for call in calls:
            with pytest.raises(
                ag.PlanMismatchError, match=f"{side}: ends with {last}, and all_rows"
            ):
                call(**wrong)


def test_all_rows_speaks_of_packed_rows_without_lengths() -> None:
    x, starts = SPEC((9, 2, 4), torch.float32), SPEC((3,), I32)
    ends = SPEC((2,), I32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"q_starts": starts, "q_lengths": ends}, "q_lengths may leave some"),
        ({"q_starts": starts, "kv_lengths": ends}, "kv_lengths may leave some"),
        ({}, "speaks of packed rows"),
    ]
    for options, words in wrong:
        dense = x if options else SPEC((1, 2, 9, 4), torch.float32)
        with pytest.raises(ag.GraphError, match=words):
            ag.attention(dense, dense, dense, all_rows=True, **options)
    with pytest.raises(ag.GraphError, match="all_rows 1 is neither True nor False"):
        ag.attention(x, x, x, q_starts=starts, all_rows=1)  # type: ignore[arg-type]  # a mistake
