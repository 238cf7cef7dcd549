"""Pages: what a pool and a table give is what the same keys and values give in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.packed import Packed
from attn_graph.ir.paging import SumPages, Unpage
from attn_graph.ir.passes import simplify
from attn_graph.ir.reference import evaluate
from attn_graph.lowering.cpu import sequences
from attn_graph.lowering.cpu.packed import PackedRun
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, dtypes, mask_options, score_options, seeds
from tests.support.sequences import (
    FAR,
    Batch,
    attend,
    batches,
    by_padding,
    gradients_on,
    lay_like,
    lay_places,
    numbers,
)

CPU = Target.here("cpu")
SPEC = ag.TensorSpec
I32 = torch.int32
GARBAGE = torch.tensor([-7, 10**6], dtype=I32)  # in entries of a table that nobody is to read


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


@frozen
class Layout:
    """Rows of a page, whether a pool lies [n,G,P,D], whether kv_lengths are given, and q packed."""

    page: int
    heads_first: bool
    ended: bool
    packed: bool

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """A pool [n,P,G,D], lying so."""
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.heads_first else x


@frozen
class Case:
    """The same attention over pages, and over keys in one piece. batch: rows of q, and keys."""

    batch: Batch
    layout: Layout
    graph: ag.Graph
    padded: ag.Graph
    tensors: dict[str, torch.Tensor]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Those of the paged graph."""
        return [self.tensors[i.name] for i in self.graph.inputs]

    @property
    def padded_inputs(self) -> list[torch.Tensor]:
        """Those of the other."""
        given = self.tensors | {n: self.gather(self.tensors[n]) for n in "kv"}
        given["q"] = self.pad(given["q"])
        return [given[i.name] for i in self.padded.inputs]

    @property
    def where(self) -> list[torch.Tensor]:
        """The table, and the lengths if keys end by them."""
        return [self.tensors[n] for n in ("pages", "kv_lengths")[: 1 + self.layout.ended]]

    def gather(self, pool: torch.Tensor) -> torch.Tensor:
        """The keys in one piece, [B,G,N,D]."""
        return Unpage(self.layout.ended).run(pool, *self.where)[0]

    def unused(self, pool: torch.Tensor) -> torch.Tensor:
        """Which rows of a pool are nobody's keys, [n,P,1,1]."""
        ones = torch.ones_like(self.gather(pool))[:, :1, :, :1]
        (counts,) = SumPages(len(pool), self.layout.page, self.layout.ended).run(ones, *self.where)
        return counts == 0

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """What has the rows of q, padded."""
        return self.batch.pad(x) if self.layout.packed else x

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Which rows of a padded result there are."""
        return self.batch.real(x) if self.layout.packed else torch.ones_like(x, dtype=torch.bool)


@st.composite
def cases(draw: DrawFn, dtype: torch.dtype | None = None, stats: Any = None) -> Case:
    """Pages of 1 to 64 rows in any order, q padded or packed, any options, NaN where no key is."""
    batch, kind, packed = draw(batches()), dtype or draw(dtypes), draw(st.booleans())
    P = draw(st.sampled_from([1, 2, 3, 5, 16, 64]))
    N = P * (-(-batch.most[1] // P) + draw(st.integers(0, 1)))
    M = batch.most[0] if packed else draw(st.sampled_from([1, 2, 5]))
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    D, E = draw(st.sampled_from([4, 8, 3])), draw(st.sampled_from([4, 8, 3]))
    shape = Shape(len(batch.rows), G * r, G, M, N, D, E)
    options = draw(mask_options(shape)) | draw(score_options(shape, kind))
    options["align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    options["stats"] = (
        draw(st.sampled_from([False, True, ("lse", "max")])) if stats is None else stats
    )
    ended = draw(st.booleans()) or "kv_lengths" in options
    batch = evolve(batch, rows=batch.rows if packed else (M,) * shape.B)
    batch = evolve(batch, keys=batch.keys if ended else (N,) * shape.B)
    layout = Layout(P, draw(st.booleans()), ended, packed)
    options["mask"] = draw(by_padding(options["mask"]))
    return make_case(batch, layout, shape, kind, options, draw(seeds), draw(FAR))


def make_case(
    batch: Batch, layout: Layout, shape: Shape, kind: torch.dtype, options: dict[str, Any],
    seed: int, far: float = 1.0, finite: bool = False,
) -> Case:  # fmt: skip
    """The two graphs, and tensors for both. far: times q. finite: the pools are declared so."""
    random, B, pages = torch.Generator().manual_seed(seed), shape.B, shape.N // layout.page
    pool = B * pages + 2, layout.page, shape.G
    k, v = (
        layout.pool(torch.randn(*pool, d, generator=random).to(kind)) for d in (shape.D, shape.E)
    )
    q = SPEC((batch.total(0), shape.H, shape.D) if layout.packed else shape.q, kind)
    order = torch.randperm(pool[0], generator=random)[: B * pages].view(B, pages).int()
    used = torch.arange(pages) * layout.page < batch.lengths(1)[:, None]
    garbage = GARBAGE[torch.randint(2, order.shape, generator=random)]
    places = {"q_starts": batch.starts(0), "q_lengths": batch.lengths(0)}
    places |= {"kv_lengths": batch.lengths(1), "pages": order.where(used, garbage)}
    places = lay_places(places, seed)
    ends: dict[str, Any] = {n: SPEC.like(places[n]) for n in m.LENGTHS}
    options = options | {n: x for n, x in ends.items() if n in options}
    own = options | {"pages": SPEC.like(places["pages"]), "finite_pages": finite}
    own |= {"kv_lengths": ends["kv_lengths"]} if layout.ended else {}
    if layout.packed:
        own |= {"q_starts": SPEC.like(places["q_starts"]), "max_lengths": (shape.M, None)}
        own |= {"q_lengths": ends["q_lengths"]} if batch.gaps else {}
    graph = attend([q, SPEC.like(k), SPEC.like(v)], own)
    both = {n: x for n, x in ends.items() if n in own or (layout.packed and n == "q_lengths")}
    leaves = [m.KeyLengths()] * layout.ended + [m.QueryLengths()] * layout.packed
    parts = leaves if options["mask"] is None else [options["mask"], *leaves]
    mask = reduce(and_, parts) if parts else None
    whole = [SPEC(s, kind) for s in (shape.q, shape.k, shape.v)]
    padded = attend(whole, {**options, **both, "mask": mask})
    tensors = {i.name: numbers(i.spec, random) for i in graph.inputs}
    tensors |= places | {"k": k, "v": v, "q": tensors["q"] * far}
    tensors |= {"q": batch.spoil(tensors["q"], 0)} if layout.packed else {}
    case = Case(batch, layout, graph, padded, tensors)
    for x in (k, v):
        x.masked_fill_(case.unused(x), torch.nan)
    return case


@given(cases())
def test_pages_are_keys_in_one_piece(case: Case) -> None:
    check_case(case, ag.compile(case.graph, target=CPU))


def check_case(case: Case, plan: ag.Plan, device: str = "cpu") -> None:
    """A plan's results are those of keys in one piece."""
    check_results(case, [x.cpu() for x in run_plan(plan, [x.to(device) for x in case.inputs])])


def check_results(case: Case, results: Sequence[torch.Tensor]) -> None:
    dues = expect_outputs(case.padded, case.padded_inputs)
    for x, due in zip(results, dues, strict=True):
        padded = case.pad(x)
        there = torch.where(case.real(padded), padded, due.ref.to(padded.dtype))
        due.check(there, f"{case.graph}\n")


@given(cases(), seeds)
def test_gradients_of_pages_are_those_of_their_rows(case: Case, seed: int) -> None:
    check_gradients(case, ag.compile(case.graph, target=CPU), seed)


def check_gradients(
    case: Case, plan: ag.Plan, seed: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """A plan's gradients, which are those of keys in one piece, and 0 in rows that are nobody's
    keys."""
    cotangents = draw_cotangents(plan, seed)
    grads = gradients_on(device, plan, case.inputs, cotangents)
    check_paged_gradients(case, grads, cotangents)
    return grads


def check_paged_gradients(
    case: Case, grads: Mapping[str, torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> None:
    """The same of gradients by name."""
    padded = [None if x is None else case.pad(x) for x in cotangents]
    for name, due in expect_gradients(case.padded, case.padded_inputs, padded).items():
        x = grads[name]
        if name in ("k", "v"):
            assert (x.masked_select(case.unused(x)) == 0).all(), "nobody's rows have a gradient"
            x = case.gather(x)
        due.check(case.pad(x) if name == "q" else x, f"{case.graph}\n")


def draw_cotangents(plan: ag.Plan, seed: int) -> list[torch.Tensor | None]:
    """A cotangent for each output that has a gradient."""
    random, places = torch.Generator().manual_seed(seed), dict(enumerate(plan.graph.outputs))
    return [
        torch.randn(t.shape, generator=random).to(t.dtype)
        if places[n] in plan.graph.differentiable_outputs
        else None
        for n, t in enumerate(plan.graph.output_types)
    ]


@given(cases(dtype=torch.float64))
def test_the_slow_meaning_of_a_fused_graph_is_that_of_its_steps(case: Case) -> None:
    tensors = [x.nan_to_num() if x.is_floating_point() else x for x in case.inputs]
    fused = simplify(case.graph)
    assert [type(e.op) for e in fused.eqns if isinstance(e.op, Packed)] == [Packed]
    for a, b in zip(evaluate(case.graph, tensors), evaluate(fused, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for graph in (case.graph, fused, *ag.vjp(case.graph)):
        assert ag.parse(str(graph)) == graph
        assert not {type(e.op) for e in graph.eqns if graph is not case.graph} & {Unpage, SumPages}


@given(cases(), seeds)
def test_the_order_of_pages_changes_no_bit(case: Case, seed: int) -> None:
    k, v, pages = (case.tensors[n] for n in ("k", "v", "pages"))
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed))
    moved = torch.empty_like(order, dtype=I32)
    moved[order] = torch.arange(len(k), dtype=I32)  # page n is now page moved[n]
    there = (pages >= 0) & (pages < len(k))
    renamed = pages.where(~there, moved[pages.where(there, 0)])
    tensors = case.tensors | {"pages": lay_like(renamed, SPEC.like(pages))}
    tensors |= {n: case.layout.pool(x[order]) for n, x in (("k", k), ("v", v))}
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
    case = make_case(batch, layout, shape, dtype, options, seed)
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
            assert torch.equal(other.gather(moved[name]), case.gather(grads[name])[order])


def test_sinks_have_a_gradient_through_lse_by_blocks_too() -> None:
    shape, layout = Shape(2, 4, 2, 2, 48, 8, 8), Layout(16, False, True, False)
    sinks, batch = SPEC((4,), torch.float32), Batch((2, 2), (48, 30), ((0, 0), (0, 0)), False)
    options = {"mask": None, "align": "bottom_right", "stats": True, "sinks": sinks}
    case = make_case(batch, layout, shape, torch.float32, options, 0)
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
