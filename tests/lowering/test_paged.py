"""Pages: what a pool and a table give is what the same keys and values give in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.storage.paging import SumPages
from attn_graph.lowering.cpu import sequences
from attn_graph.lowering.cpu.packed import PackedRun
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.strategies import Shape, dtypes, seeds
from tests.support.ragged import (
    GARBAGE,
    Case,
    Layout,
    check_gradients,
    make_paged,
    paged_cases,
)
from tests.support.sequences import (
    Batch,
    attend,
    batches,
    lay_like,
)

CPU = Target.here("cpu")
SPEC = ag.TensorSpec
I32 = torch.int32


@pytest.fixture(
    scope="module", autouse=True, params=[sequences.BLOCK_BYTES, 1], ids=["whole", "blocks"]
)
def block_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sequences gathered as usual, all these being short, and one page at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_BYTES", request.param)
        ag.clear_cache()
        yield
    ag.clear_cache()


@given(paged_cases(), seeds)
def test_the_order_of_pages_changes_no_bit(case: Case, seed: int) -> None:
    k, v, pages = (case.tensors[n] for n in ("k", "v", "pages"))
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed))
    moved = torch.empty_like(order, dtype=I32)
    moved[order] = torch.arange(len(k), dtype=I32)  # page n is now page moved[n]
    there = (pages >= 0) & (pages < len(k))
    renamed = pages.where(~there, moved[pages.where(there, 0)])
    tensors = case.tensors | {"pages": lay_like(renamed, SPEC.like(pages))}
    tensors |= {n: lay_like(x[order], SPEC.like(x)) for n, x in (("k", k), ("v", v))}
    plan = ag.compile(case.graph, target=CPU)
    again = run_plan(plan, [tensors[i.name] for i in case.graph.inputs])
    for x, y in zip(run_plan(plan, case.inputs), again, strict=True):
        assert torch.equal(x, y)


def cut_entries(case: Case, order: list[int]) -> Case:
    """The same attention of some entries in another order; dense queries, no data beside."""
    rows = case.batch.rows[0], case.tensors["q"]
    take = torch.tensor(order)
    names = ("q", "pages", "kv_lengths")
    tensors = case.tensors | {n: case.tensors[n][take] for n in names}
    keys = tuple(case.batch.keys[n] for n in order)
    batch = evolve(case.batch, rows=(rows[0],) * len(order), keys=keys)
    specs = {i.name: SPEC.like(tensors[i.name]) for i in case.graph.inputs}
    options = {"mask": m.Causal("bottom_right"), "soft_cap": 3.0, "stats": True}
    graph = attend(
        [specs[n] for n in "qkv"],
        {**options, "pages": specs["pages"], "kv_lengths": specs["kv_lengths"]},
    )
    return evolve(case, batch=batch, graph=graph, tensors=tensors)


@given(batches(2), dtypes, st.sampled_from([1, 3, 16]), seeds)
def test_the_order_and_number_of_sequences_change_no_bit_of_one(
    batch: Batch, dtype: torch.dtype, page: int, seed: int
) -> None:
    batch = evolve(batch, rows=(2,) * len(batch.keys))
    N = page * -(-batch.most[1] // page)
    shape, layout = Shape(len(batch.keys), 4, 2, 2, N, 8, 8), Layout(page, False, True, False)
    options: dict[str, Any] = {"mask": None, "align": "bottom_right", "stats": True}
    case = make_paged(batch, layout, shape, dtype, options, seed)
    whole = cut_entries(case, [*range(shape.B)])
    do = torch.ones(shape.B, 4, 2, 8, dtype=dtype)
    plan = ag.compile(whole.graph, target=CPU)
    o, lse = run_plan(plan, whole.inputs)
    grads = run_gradients(plan, whole.inputs, [do, None])
    again = run_gradients(plan, whole.inputs, [do, None])
    assert all(torch.equal(grads[n], again[n]) for n in grads)
    for order in ([*range(shape.B)][::-1], [0]):
        other = cut_entries(case, order)
        x, y = run_plan(plan := ag.compile(other.graph, target=CPU), other.inputs)
        assert torch.equal(x, o[order])
        assert torch.equal(y, lse[order])
        moved = run_gradients(plan, other.inputs, [do[order], None])
        assert torch.equal(moved["q"], grads["q"][order])
        for name in ("k", "v"):
            assert torch.equal(other.pad(moved[name], name), case.pad(grads[name], name)[order])


def test_sinks_have_a_gradient_through_lse_by_blocks_too() -> None:
    shape, layout = Shape(2, 4, 2, 2, 48, 8, 8), Layout(16, False, True, False)
    sinks, batch = SPEC((4,), torch.float32), Batch((2, 2), (48, 30), ((0, 0), (0, 0)), False)
    options = {"mask": None, "align": "bottom_right", "stats": True, "sinks": sinks}
    case = make_paged(batch, layout, shape, torch.float32, options, 0)
    check_gradients(case, ag.compile(case.graph, target=CPU), 0)


def test_a_page_that_many_name_gets_the_sum() -> None:
    table = torch.tensor([[0, 2], [2, 2]])
    x = torch.arange(4.0).view(2, 1, 2, 1)
    (pool,) = SumPages(3, 1).run(x, table)
    assert pool.flatten().tolist() == [0.0, 0.0, 1.0 + 2.0 + 3.0]
    pool = torch.randn(3, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    spec, pages = SPEC.like(pool), SPEC.like(table)

    def attend(q: ag.Value, pool: ag.Value, table: ag.Value) -> ag.Value:
        return ag.scores(q, pool.unpage(table)).softmax()[0].weigh(pool.unpage(table))

    q = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    plan: Any = ag.compile(ag.graph(attend, q=SPEC.like(q), pool=spec, table=pages), target=CPU)

    def run(q: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = plan(q, pool, table)
        return out

    assert torch.autograd.gradcheck(run, (q, pool), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, pool), fast_mode=True)


def test_pages_that_are_not_there_are_an_error_and_others_say_why_not() -> None:
    pool, q = SPEC((3, 2, 1, 4), torch.float32), SPEC((1, 1, 1, 4), torch.float32)

    def attend(q: ag.Value, pool: ag.Value, table: ag.Value) -> ag.Value:
        return ag.scores(q, pool.unpage(table)).softmax()[0].weigh(pool.unpage(table))

    graph = ag.graph(attend, q=q, pool=pool, table=SPEC((1, 2), torch.int32))
    with pytest.raises(ag.PlanMismatchError, match="pages from 0 to 3, of a pool of 3"):
        ag.compile(graph, target=CPU)(
            torch.randn(1, 1, 1, 4),
            torch.randn(3, 2, 1, 4),
            torch.tensor([[0, 3]], dtype=torch.int32),
        )
    reasons = {r.backend: r.reasons for r in ag.explain(graph, target="h200").refusals}
    assert any("reads no pages" in str(x) for x in reasons["torch_flash"])
    with pytest.raises(ag.GraphError, match="table"):
        ag.graph(attend, q=q, pool=pool, table=SPEC((1, 2), torch.float32))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_a_token_more_plans_the_last_block_of_keys_alone(
    soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks without a mask are one plan, whatever the length is. A head size of 3 keeps few
    rows from running on pages."""
    q, pool, pages = torch.randn(1, 2, 1, 3), torch.randn(8, 2, 2, 3), torch.arange(8)[None]
    lengths, like, made = torch.tensor([9]), ag.TensorSpec.like, list[int]()
    monkeypatch.setattr(sequences, "BLOCK_BYTES", 1)
    graph = ag.attention(
        *map(like, (q, pool, pool)), soft_cap=soft_cap, pages=like(pages), kv_lengths=like(lengths),
        mask=ag.Causal("bottom_right"),
    )  # fmt: skip
    make = PackedRun.make_part

    def count(run: PackedRun, *of: Any) -> Any:
        made.append(1)
        return make(run, *of)

    monkeypatch.setattr(PackedRun, "make_part", count)
    ag.clear_cache()
    plan = ag.compile(graph, backends=("math",))
    for n in range(9, 15):
        made.clear()
        lengths[0] = n
        plan(q, pool, pool, pages=pages, kv_lengths=lengths)
        assert len(made) == 1 if n > 9 else len(made) > 1


def test_memory_does_not_grow_with_the_cache() -> None:
    pool, q = SPEC((2**14, 16, 8, 64), torch.float32), SPEC((4, 32, 1, 64), torch.float32)
    table, lengths = SPEC((4, 2**12), I32), SPEC((4,), I32)
    graph = ag.attention(q, pool, pool, pages=table, kv_lengths=lengths)
    memory = ag.compile(graph, target=CPU).memory()
    forward = memory.workspace_forward + memory.temporary_forward
    backward = memory.workspace_backward + memory.temporary_backward
    assert max(forward, backward) < 2**24 < pool.type.bytes / 16


BEHIND = (
    {"mask": ag.Window(5, 0, "bottom_right")},
    {"mask": ag.Window(5, 0, "bottom_right"), "soft_cap": 3.0},
    {"mask": ag.Window(5, 0, "bottom_right") & ag.Formula("j >= 0")},
)


@pytest.mark.parametrize("options", BEHIND, ids=str)
@given(
    page=st.sampled_from([1, 4, 16]),
    dtype=dtypes,
    lengths=st.lists(st.integers(4, 64), min_size=1, max_size=3),
    seed=seeds,
)
@settings(max_examples=max(3, settings().max_examples // 5))
def test_keys_behind_a_window_are_neither_checked_nor_read(
    options: dict[str, Any], page: int, dtype: torch.dtype, lengths: list[int], seed: int
) -> None:
    """To the bit, in both passes: what the table and the pool hold there changes nothing."""
    B, M, pages, random = len(lengths), 4, 64 // page, torch.Generator().manual_seed(seed)
    table = torch.arange(B * pages, dtype=I32).view(B, pages)
    q = torch.randn(B, 4, M, 8, generator=random).to(dtype)
    pool = torch.randn(B * pages, page, 2, 8, generator=random).to(dtype)
    counts = torch.tensor(lengths, dtype=I32)
    freed, holes = table.clone(), pool.clone()
    for b, n in enumerate(lengths):
        first = max(0, n - M - 5)
        freed[b, : first // page] = GARBAGE[0]
        holes[table[b].long()] = pool[table[b].long()].masked_fill(
            (torch.arange(64) < first).view(pages, page, 1, 1), torch.nan
        )
    k, t = SPEC.like(pool), SPEC.like(table)
    graph = ag.attention(
        SPEC.like(q), k, k, pages=t, kv_lengths=SPEC.like(counts), stats=True, **options
    )
    plan = ag.compile(graph, target=CPU)
    made = []
    for rows, places in ((pool, table), (holes, freed)):
        named = {"q": q, "k": rows, "v": rows, "pages": places, "kv_lengths": counts}
        plan.check(**named)
        leaves = {n: named[n].detach().requires_grad_() for n in "qkv"}
        results = run_plan(plan, [(named | leaves)[i.name] for i in graph.inputs])
        made.append([*results, *torch.autograd.grad(results[0].sum(), [*leaves.values()])])
    for x, due in zip(*reversed(made), strict=True):
        assert torch.equal(x, due)
    named = {"q": q, "k": pool, "v": pool, "pages": freed, "kv_lengths": counts}
    assert plan.verify(**named).errors[0] < torch.inf
    wrong = table.clone()
    wrong[0, (lengths[0] - 1) // page] = GARBAGE[0]
    for run in (plan, plan.check):
        with pytest.raises(ag.PlanMismatchError, match="pages from -7"):
            run(**named | {"pages": wrong})
