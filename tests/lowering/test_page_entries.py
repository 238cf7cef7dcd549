"""Few rows over pages: some of them are an entry of one batch, and results are those of whole
keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph.ir.attention import Attention
from attn_graph.lowering.cpu import page_entries, sequences
from attn_graph.lowering.cpu.packed import PackedRun
from attn_graph.lowering.cpu.page_entries import PageWay
from attn_graph.lowering.cpu.sequences import gather_pages, lies_by_head
from attn_graph.lowering.lying import Lying
from attn_graph.lowering.rates import cpu_rates
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.nn.functional import attention
from attn_graph.testing.agreement import run_plan
from attn_graph.testing.strategies import (
    Shape,
    addend_specs,
    caps,
    dtypes,
    mask_options,
    maybe,
    score_options,
    seeds,
)
from tests.support.freed_pages import free_hidden
from tests.support.quantised import kinds, quantise_graph, quantise_tensors
from tests.support.ragged import Case, Layout, check_results, make_paged
from tests.support.sequences import Batch, lay_like

CPU = Target.here("cpu")
SPEC = ag.TensorSpec
I32 = torch.int32
FEW = settings(max_examples=max(10, settings().max_examples // 2))


@pytest.fixture(
    scope="module", autouse=True, params=[sequences.BLOCK_BYTES, 1], ids=["whole", "blocks"]
)
def block_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pages gathered all at once, and one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "BLOCK_BYTES", request.param)
        ag.clear_cache()
        yield
    ag.clear_cache()


@st.composite
def batches(draw: DrawFn) -> Batch:
    """Sequences of equally many or of different few rows."""
    B, most = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    rows = tuple(draw(st.sampled_from([most, most, 0, 1])) for _ in range(B - 1))
    keys = tuple(draw(st.integers(0, 40)) for _ in range(B - 1))
    unused = tuple(draw(st.tuples(st.integers(0, 2), st.just(0))) for _ in range(B))
    return Batch((*rows, most), (*keys, draw(st.integers(1, 40))), unused, draw(st.booleans()))


@st.composite
def cases(draw: DrawFn) -> Case:
    """Few rows over pages in any order, with every mask, addends or a soft cap, perhaps with v of
    another head size, NaN where no key is."""
    batch, kind, packed = draw(batches()), draw(dtypes), draw(st.booleans())
    P, D = draw(st.sampled_from([4, 16, 64])), draw(st.sampled_from([4, 8, 16]))
    N = P * (-(-batch.most[1] // P) + draw(st.integers(0, 1)))
    batch = batch if packed else evolve(batch, rows=(batch.most[0],) * len(batch.rows))
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    capped = draw(st.booleans())
    E = draw(st.sampled_from([4, 8, 16])) if capped else D
    shape = Shape(len(batch.rows), G * r, G, batch.most[0], N, D, E)
    options = draw(mask_options(shape))
    if capped:
        options |= {
            "soft_cap": draw(maybe(caps)),
            "sinks": draw(maybe(addend_specs("sinks", shape, kind))),
        }
    else:
        added = draw(score_options(shape, kind))
        options |= {n: x for n, x in added.items() if n not in ("soft_cap", "dropout")}
    options["align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    options["stats"] = draw(st.booleans())
    layout = Layout(P, draw(st.booleans()), True, packed)
    far = draw(st.sampled_from((1.0, 1.0, 1.0, 30.0)))
    return make_paged(batch, layout, shape, kind, options, draw(seeds), far)


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many sequences each call ran on pages."""
    counts, run = list[int](), PageWay.run

    def count(way: PageWay, entries: Any, *more: Any) -> Any:
        counts.append(len(entries.own))
        return run(way, entries, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageWay, "run", count)
        yield counts


@given(cases())
def test_few_rows_on_pages_are_those_on_keys_in_one_piece(case: Case) -> None:
    with counting() as counts:
        check_results(case, run_plan(ag.compile(case.graph, target=CPU), case.inputs))
    assert sum(counts) == sum(n > 0 for n in case.batch.rows)


@given(cases(), seeds)
@FEW
def test_what_is_nobodys_key_changes_no_bit(case: Case, seed: int) -> None:
    """NaN in unused rows, Inf there, and pages that the mask's band freed."""
    plan = ag.compile(case.graph, target=CPU)
    random = torch.Generator().manual_seed(seed)
    given = case.tensors | {n: case.tensors[n].nan_to_num() for n in "kv"}
    given = {n: lay_like(x, SPEC.like(case.tensors[n])) for n, x in given.items()}
    names = [i.name for i in case.graph.inputs]
    due = run_plan(plan, [given[n] for n in names])
    infinite = torch.where(torch.rand(1, generator=random) < 0.5, -torch.inf, torch.inf)
    spoilt = {n: torch.where(case.tensors[n].isnan(), infinite, given[n]) for n in "kv"}
    spoilt = {n: lay_like(x.to(given[n].dtype), SPEC.like(given[n])) for n, x in spoilt.items()}
    for tensors in (case.tensors, given | spoilt, free_hidden(case.graph, given)):
        for x, y in zip(run_plan(plan, [tensors[n] for n in names]), due, strict=True):
            assert torch.equal(x, y)


def in_cells(pool: torch.Tensor, order: str) -> torch.Tensor:
    """The pool [n,P,G,D] as half of a cache, whose axes lie in this order; c: keys, then values."""
    n, P, G, D = pool.shape
    sizes = {"n": n, "g": G, "p": P, "c": 2, "d": D, "l": 3}
    cells = torch.full([sizes[x] for x in order], torch.nan).to(pool.dtype)
    at = tuple({"c": 1, "l": 1}.get(x, slice(None)) for x in order)
    left = [x for x in order if x not in "cl"]
    half = cells[at].permute([left.index(x) for x in "npgd"])
    half.copy_(pool)
    return half


ORDERS = ("npgd", "ngpd", "ngcpd", "ngpcd", "npgcd", "nglcpd", "nlgpcd", "gnpd", "dnpg")


@given(cases(), st.tuples(*[st.sampled_from(ORDERS)] * 2))
def test_a_cache_of_any_order_changes_no_bit(case: Case, orders: tuple[str, str]) -> None:
    """Halves of blocks that keep keys and values by head, by row, and other layers between; v as k
    or otherwise."""
    moved = {n: in_cells(case.tensors[n], order) for n, order in zip("kv", orders, strict=True)}
    specs = {i.name: i.spec for i in case.graph.inputs} | {n: SPEC.like(moved[n]) for n in "kv"}
    inputs = tuple(evolve(i, spec=specs[i.name]) for i in case.graph.inputs)
    graph = evolve(case.graph, inputs=inputs)
    tensors = case.tensors | moved
    own = run_plan(ag.compile(graph, target=CPU), [tensors[i.name] for i in inputs])
    for x, y in zip(own, run_plan(ag.compile(case.graph, target=CPU), case.inputs), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("order", ORDERS)
@given(P=st.integers(1, 3), G=st.integers(1, 3), count=st.integers(1, 4), seed=seeds)
@FEW
def test_pages_are_gathered_in_the_order_they_lie(
    order: str, P: int, G: int, count: int, seed: int
) -> None:
    """Rows of a head that lie beside each other stay so: to swap axes takes twice the time."""
    random = torch.Generator().manual_seed(seed)
    pool = in_cells(torch.randn(5, P, G, 4, generator=random), order)
    pages = torch.randint(5, (count,), generator=random)
    n = int(torch.randint(count * P + 1, (), generator=random))
    rows = gather_pages(pool, pages[None])[:, :, :n]
    assert torch.equal(rows[0], pool[pages].flatten(0, 1)[:n].transpose(0, 1))
    if lies_by_head(pool) and n > 1 and order != "gnpd":
        assert rows.stride(1) > rows.stride(2)
    if order in ("ngcpd", "ngpcd", "nglcpd", "nlgpcd") and G > 1 and P > 1:
        assert lies_by_head(pool)


@given(cases(), seeds)
@FEW
def test_sequences_may_share_pages(case: Case, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    table, pools = case.tensors["pages"], {n: case.tensors[n].nan_to_num() for n in "kv"}
    few = torch.randint(max(1, len(pools["k"]) // 2), table.shape, generator=random)
    shared = lay_like(few.to(table.dtype), SPEC.like(table))
    laid = {n: lay_like(x, SPEC.like(case.tensors[n])) for n, x in pools.items()}
    other = evolve(case, tensors=case.tensors | laid | {"pages": shared})
    check_results(other, run_plan(ag.compile(case.graph, target=CPU), other.inputs))


@given(cases(), kinds, seeds)
@FEW
def test_quantised_pages_run_so_too(case: Case, kind: torch.dtype, seed: int) -> None:
    graph = quantise_graph(case.graph, kind, seed)
    own, plain = quantise_tensors(graph, case.tensors, seed)
    with counting() as counts:
        results = run_plan(ag.compile(graph, target=CPU), [own[i.name] for i in graph.inputs])
    assert sum(counts)
    check_results(evolve(case, tensors=plain), results)


@given(cases(), seeds)
@FEW
def test_other_sequences_change_no_bit_of_one(case: Case, seed: int) -> None:
    """Whether pages are read in place, or gathered, and after which others."""
    plan, page = ag.compile(case.graph, target=CPU), case.tensors["k"].shape[1]
    due = run_plan(plan, case.inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageWay, "span_of", lambda way, pages: None)
        patch.setattr(page_entries, "PARTS_BYTES", 1)
        patch.setattr(PageWay, "count_pages", lambda way, rows: float("inf"))
        ag.clear_cache()
        alone = run_plan(ag.compile(case.graph, target=CPU), case.inputs)
    ag.clear_cache()
    assert page
    for x, y in zip(alone, due, strict=True):
        assert torch.equal(x, y)


def test_sequences_without_keys_have_the_lse_of_their_sinks() -> None:
    sinks = torch.tensor([-0.53125, 0.0, 3.25, 1.0]).bfloat16()
    q, pool = torch.randn(3, 4, 1, 16).bfloat16(), torch.randn(2, 4, 2, 16).bfloat16()
    table, none = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    lengths = ag.KeyLengths()
    with counting() as counts:
        given: dict[str, Any] = {"mask": lengths, "kv_lengths": none, "pages": table}
        o, lse = attention(q, pool, pool, sinks=sinks, stats=True, **given)
    assert sum(counts)
    assert not o.any()
    torch.testing.assert_close(lse, sinks.float()[:, None].expand_as(lse), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif("bf16" not in CPU.native, reason="this CPU has no products of bfloat16")
@given(P=st.sampled_from([16, 64, 128]), scale=st.sampled_from([0.125, 1.0]), seed=seeds)
@FEW
def test_products_of_bfloat16_have_scores_of_more_bits(P: int, scale: float, seed: int) -> None:
    """One product alone rounds a score of 60 to quarters, and an lse is as far off."""
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, 2, n, 64, generator=random).bfloat16() for n in (4, P, P))
    _, lse = page_entries.attend_by_products(Attention(scale=scale), 2 * q, k, v, None)
    due = torch.logsumexp(scale * (2 * q).double() @ k.double().mT, -1)
    torch.testing.assert_close(lse.double(), due, rtol=1e-4, atol=1e-3)


def test_sequences_in_bfloat16_run_by_products_where_the_cpu_has_some() -> None:
    """PyTorch's kernel packs bfloat16 first: for a single row that takes longer. It gives
    statistics, whose scores have all bits."""
    pool, rows = SPEC((9, 16, 2, 64), torch.bfloat16), SPEC((3, 8, 64), torch.bfloat16)
    for native, stats, due in (((), (), True), (("bf16",), (), False), (("bf16",), ("lse",), True)):
        graph = ag.attention(
            rows, pool, pool, stats=stats, q_starts=SPEC((4,), I32), kv_lengths=SPEC((3,), I32),
            pages=SPEC((3, 4), I32), max_lengths=(1, None),
        )  # fmt: skip
        plan = ag.compile(graph, target=CPU)
        lying = Lying.of(Request(plan.graph, CPU, ag.extend.Options()).facts)
        assert lying is not None
        way = PageWay(lying, cpu_rates("bf16" in native), bool(stats))
        assert way.by_kernel == due
        assert way.width == (1 if due else 8)


@pytest.mark.parametrize("offset", [0.0, -(2.0**20), torch.finfo(torch.float32).min])
def test_rows_of_a_large_offset_are_means_over_all_pages(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An lse too coarse for the weights of pages: these rows are computed by themselves, and these
    sequences are shorter than a block of keys."""
    monkeypatch.setattr(sequences, "BLOCK_BYTES", 2**20)
    ag.clear_cache()
    random = torch.Generator().manual_seed(0)
    q, v = torch.randn(2, 2, 1, 8, generator=random), torch.randn(6, 16, 1, 8, generator=random)
    x: dict[str, Any] = {"pages": torch.arange(6).view(2, 3), "kv_lengths": torch.tensor([40, 23])}
    x["bias"] = torch.full((1, 1, 1, 48), offset)
    o = ag.nn.functional.attention(q, 0 * v, v, **x)
    assert isinstance(o, torch.Tensor)
    rows = v.double().view(2, 48, 8)
    due = torch.stack([rows[b, :n].mean(0) for b, n in enumerate([40, 23])])
    unit = torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        o.double(), due.view(2, 1, 1, 8).expand(o.shape), rtol=4 * unit, atol=unit
    )


def test_new_lengths_plan_nothing() -> None:
    """Each token of each sequence makes a length that no call had before."""
    made, make = list[object](), PackedRun.make_part

    def count(run: PackedRun, *of: Any) -> Any:
        made.append(of)
        return make(run, *of)

    B, P = 8, 16
    k, v = torch.randn(2, B * 4, P, 2, 8)
    table, starts = torch.randperm(B * 4).view(B, 4).to(I32), torch.arange(B + 1, dtype=I32)
    causal, q = ag.Causal("bottom_right"), torch.randn(B, 4, 8)
    window = {"mask": causal & ag.Window(20, 0, "bottom_right")}
    kinds: tuple[dict[str, Any], ...] = ({}, window, {"soft_cap": 5.0}, {"v": v[..., :4]})
    for options in kinds:

        def attend(length: int, given: dict[str, Any] = options) -> object:
            lengths = torch.arange(length, length + B, dtype=I32)
            return ag.nn.functional.attention(
                q, k, given.get("v", v), q_starts=starts, pages=table, kv_lengths=lengths,
                mask=given.get("mask", causal), soft_cap=given.get("soft_cap"),
                max_lengths=(1, None),
            )  # fmt: skip

        attend(5)
        builds = ag.cache_info().builds
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedRun, "make_part", count)
            for length in range(6, 50):
                attend(length)
        assert not made
        assert ag.cache_info().builds == builds
