"""Pages: what a pool and a table give is what the same keys and values give in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.ir.paging import SumPages, Unpage
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import dtypes, seeds

CPU = Target.here("cpu")
SPEC = ag.TensorSpec
MASKS: tuple[ag.Mask, ...] = (
    ag.KeyLengths(),
    ag.KeyLengths() & ag.Causal("bottom_right"),
    ag.KeyLengths() & ag.Window(3, 1, "top_left"),
)


@frozen
class Cache:
    """A pool of pages in any order, the table of each entry, and queries."""

    mask: ag.Mask
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The inputs of the paged graph."""
        return [self.q, self.k, self.v, self.table, self.lengths]

    @property
    def graph(self) -> ag.Graph:
        """Attention over pages."""
        specs = dict(zip(("q", "k", "v", "table", "n"), map(SPEC.like, self.tensors), strict=True))

        def attend(q: ag.Value, k: ag.Value, v: ag.Value, table: ag.Value, n: ag.Value) -> Any:
            s = ag.scores(q, k.unpage(table)).mask(self.mask, kv_lengths=n)
            p, lse = s.softmax()
            return p.weigh(v.unpage(table)), lse

        return ag.graph(attend, **specs)

    @property
    def whole(self) -> list[torch.Tensor]:
        """The inputs of the same attention over keys and values in one piece."""
        k, v = (Unpage().run(x, self.table)[0].contiguous() for x in (self.k, self.v))
        return [self.q, k, v, self.lengths]

    @property
    def dense(self) -> ag.Graph:
        """That attention."""
        q, k, v, n = map(SPEC.like, self.whole)
        return ag.attention(q, k, v, mask=self.mask, kv_lengths=n, stats=True)


@st.composite
def caches(draw: DrawFn) -> Cache:
    """One to three entries of up to three pages of one to five rows, some pages in no table."""
    B, pages, P = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    G, r, M = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3])), draw(st.integers(1, 3))
    kind, random = draw(dtypes), torch.Generator().manual_seed(draw(seeds))
    count, D = B * pages + 2, 4
    order = torch.randperm(count, generator=random)[: B * pages].view(B, pages).int()
    k, v = (torch.randn(count, P, G, D, generator=random).to(kind) for _ in "kv")
    for x in (k, v):
        x[[n for n in range(count) if n not in order]] = torch.nan  # of no entry
    q = torch.randn(B, G * r, M, D, generator=random).to(kind)
    lengths = torch.randint(pages * P + 1, (B,), generator=random)
    return Cache(draw(st.sampled_from(MASKS)), q, k, v, order, lengths)


@given(caches())
def test_pages_are_keys_in_one_piece(cache: Cache) -> None:
    plan = ag.compile(cache.graph, target=CPU)
    dues = expect_outputs(cache.dense, cache.whole)
    for x, due in zip(run_plan(plan, cache.tensors), dues, strict=True):
        due.check(x)
    assert ag.parse(str(cache.graph)) == cache.graph
    for graph in ag.vjp(cache.graph):
        assert ag.parse(str(graph)) == graph


@given(caches(), seeds)
def test_gradients_of_pages_are_those_of_their_rows(cache: Cache, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    plan = ag.compile(cache.graph, target=CPU)
    cotangents = [
        torch.randn(t.shape, generator=random).to(t.dtype) for t in plan.graph.output_types
    ]
    grads = run_gradients(plan, cache.tensors, cotangents)
    dues = expect_gradients(cache.dense, cache.whole, cotangents)
    dues["q"].check(grads["q"])
    for name in ("k", "v"):
        dues[name].check(Unpage().run(grads[name], cache.table)[0])
        unused = [n for n in range(len(grads[name])) if n not in cache.table]
        assert (grads[name][unused] == 0).all()


@given(caches(), seeds)
def test_the_order_of_pages_changes_no_bit(cache: Cache, seed: int) -> None:
    count = len(cache.k)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    moved = torch.empty_like(order)
    moved[order] = torch.arange(count)  # page n is now page moved[n]
    plan = ag.compile(cache.graph, target=CPU)
    tensors = [cache.q, cache.k[order], cache.v[order], moved[cache.table.long()].int()]
    for x, y in zip(
        run_plan(plan, cache.tensors), run_plan(plan, [*tensors, cache.lengths]), strict=True
    ):
        assert torch.equal(x, y)


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
    assert any("reads no pages" in str(x) for x in reasons["triton"])
    with pytest.raises(ag.GraphError, match="table"):
        ag.graph(attend, q=q, pool=pool, table=SPEC((1, 2), torch.float32))
