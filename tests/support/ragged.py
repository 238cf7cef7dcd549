"""Attention over packed tensors and over pages, beside the same on padded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from operator import and_
from typing import Any, final

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir.storage.paging import SumPages, Unpage
from attn_graph.spec import INF
from attn_graph.testing.agreement import run_gradients, run_plan
from attn_graph.testing.rule import expect_gradients, expect_outputs
from attn_graph.testing.strategies import Shape, dtypes, mask_options, score_options, seeds
from tests.support.sequences import (
    FAR,
    Batch,
    attend,
    batches,
    by_padding,
    draw_cotangents,
    gradients_on,
    lay_like,
    lay_places,
    numbers,
)

SPEC = ag.TensorSpec
GARBAGE = torch.tensor([-7, 10**6], dtype=torch.int32)  # in entries of a table that nobody reads
POISON = torch.tensor([float("nan"), float("inf"), -float("inf")])
STATISTICS = st.sampled_from([False, True, ("lse", "max")])
Tensor = torch.Tensor


@final
@frozen
class Layout:
    """Rows of a page, whether a pool lies [n,G,P,D], whether kv_lengths are given, and q packed."""

    page: int
    heads_first: bool
    ended: bool
    packed: bool

    def pool(self, x: Tensor) -> Tensor:
        """A pool [n,P,G,D], lying so."""
        return x.transpose(1, 2).contiguous().transpose(1, 2) if self.heads_first else x


@final
@frozen
class Case:
    """The same attention on packed tensors or over pages, and on padded tensors. batch: rows of q,
    and keys. layout: of pages; None if keys are packed."""

    batch: Batch
    graph: ag.Graph
    padded: ag.Graph
    tensors: dict[str, Tensor]
    layout: Layout | None = None

    @property
    def inputs(self) -> list[Tensor]:
        """Those of the graph."""
        return [self.tensors[i.name] for i in self.graph.inputs]

    @property
    def padded_inputs(self) -> list[Tensor]:
        """Those of the padded graph."""
        given = self.tensors | {n: self.pad(self.tensors[n], n) for n in "qkv"}
        return [given[i.name] for i in self.padded.inputs]

    @property
    def packs_rows(self) -> bool:
        """True if q is packed."""
        return self.layout is None or self.layout.packed

    @property
    def places(self) -> list[Tensor]:
        """The table of pages, and the lengths if keys end by them."""
        names = ("pages", "kv_lengths") if self.layout and self.layout.ended else ("pages",)
        return [self.tensors[n] for n in names]

    def pad(self, x: Tensor, name: str = "o") -> Tensor:
        """A tensor, a gradient of one by its name, or a result, padded."""
        if name in ("q", "o"):
            return self.batch.pad(x) if self.packs_rows else x
        if name not in ("k", "v"):
            return x
        if self.layout is None:
            return self.batch.pad(x, 1)
        return Unpage(self.layout.ended).run(x, *self.places)[0]

    def nobodys(self, x: Tensor, name: str = "o") -> Tensor:
        """What is no query's and no key's of a tensor, a gradient by its name, or a result."""
        if name in ("q", "o"):
            return self.batch.outside(x) if self.packs_rows else x[:0]
        if name not in ("k", "v"):
            return x[:0]
        return self.batch.outside(x, 1) if self.layout is None else x.masked_select(self.unused(x))

    def unused(self, pool: Tensor) -> Tensor:
        """Which rows of a pool are nobody's keys, [n,P,1,1]."""
        assert self.layout is not None
        ones = torch.ones_like(self.pad(pool, "k"))[:, :1, :, :1]
        sums = SumPages(len(pool), self.layout.page, self.layout.ended)
        return sums.run(ones, *self.places)[0] == 0

    def real(self, x: Tensor) -> Tensor:
        """Which rows of a padded result there are."""
        return self.batch.real(x) if self.packs_rows else torch.ones_like(x, dtype=torch.bool)

    def cotangents(self, seed: int) -> list[Tensor | None]:
        """Of the results; None of those that take none."""
        batch = self.batch if self.packs_rows else None
        return draw_cotangents(self.graph, batch, seed)


@st.composite
def packed_cases(draw: DrawFn, dtype: torch.dtype | None = None, stats: Any = None) -> Case:
    """Any masks, modifiers, sinks, dropout, statistics; NaN in rows of no sequence."""
    batch, kind = draw(batches()), dtype or draw(dtypes)
    G, r = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    D, E = draw(st.sampled_from([4, 8, 3])), draw(st.sampled_from([4, 8, 3]))
    shape = Shape(len(batch.rows), G * r, G, *batch.most, D, E)
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    options: dict[str, Any] = draw(mask_options(shape)) | draw(score_options(shape, kind))
    options["align"] = align
    options |= {"stats": draw(STATISTICS) if stats is None else stats}
    options = {n: x for n, x in options.items() if n not in m.LENGTHS}
    options["mask"] = draw(by_padding(options["mask"]))
    dims = {"q": (0, shape.H, D), "k": (1, G, D), "v": (1, G, E)}
    return make_packed(batch, shape, kind, dims, options, draw(seeds), far=draw(FAR))


def make_packed(
    batch: Batch, shape: Shape, kind: torch.dtype, dims: dict[str, tuple[int, int, int]],
    options: dict[str, Any], seed: int, *, anyhow: bool = True, far: float = 1.0,
) -> Case:  # fmt: skip
    """The two graphs, and tensors for both. anyhow: whether starts and lengths have gaps. far:
    times q."""
    random = torch.Generator().manual_seed(seed)
    B = len(batch.rows)
    packed = [SPEC((batch.total(s), h, d), kind) for s, h, d in dims.values()]
    padded = [SPEC((B, h, batch.most[s], d), kind) for s, h, d in dims.values()]
    places = {"q_starts": batch.starts(0), "kv_starts": batch.starts(1)}
    places |= {"q_lengths": batch.lengths(0), "kv_lengths": batch.lengths(1)}
    places = lay_places(places, seed) if anyhow else places
    ends: dict[str, Any] = {name: SPEC.like(places[name]) for name in m.LENGTHS}
    named = ("q_starts",) if batch.is_alike else ("q_starts", "kv_starts")
    where = {name: SPEC.like(places[name]) for name in named}
    mask = options.get("mask")
    ended = m.KeyLengths() & m.QueryLengths()
    both: dict[str, Any] = {**options, "mask": ended if mask is None else mask & ended, **ends}
    own: dict[str, Any] = {
        **options,
        **where,
        **(ends if batch.gaps else {}),
        "all_rows": batch.full,
    }
    whole, graph = attend(padded, both), attend(packed, {**own, "max_lengths": batch.most})
    tensors = {i.name: numbers(i.spec, random) for i in graph.inputs}
    tensors |= places
    tensors["q"] = tensors["q"] * far
    for name, (side, _, _) in dims.items():
        tensors[name] = batch.spoil(tensors[name], side)
    return Case(batch, graph, whole, tensors)


def sequences(
    batch: Batch, options: dict[str, Any], dtype: torch.dtype, *, anyhow: bool = True
) -> Case:
    """A batch of 4/2 heads of size 8."""
    shape = Shape(len(batch.rows), 4, 2, *batch.most, 8, 8)
    dims = {"q": (0, 4, 8), "k": (1, 2, 8), "v": (1, 2, 8)}
    return make_packed(batch, shape, dtype, dims, {**options, "stats": True}, 3, anyhow=anyhow)


@st.composite
def paged_cases(draw: DrawFn, dtype: torch.dtype | None = None, stats: Any = None) -> Case:
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
    options["stats"] = draw(STATISTICS) if stats is None else stats
    ended = draw(st.booleans()) or "kv_lengths" in options
    batch = evolve(batch, rows=batch.rows if packed else (M,) * shape.B)
    batch = evolve(batch, keys=batch.keys if ended else (N,) * shape.B)
    layout = Layout(P, draw(st.booleans()), ended, packed)
    options["mask"] = draw(by_padding(options["mask"]))
    return make_paged(batch, layout, shape, kind, options, draw(seeds), draw(FAR))


def make_paged(
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
    case = Case(batch, graph, padded, tensors, layout)
    for x in (k, v):
        x.masked_fill_(case.unused(x), torch.nan)
    return case


def check_case(case: Case, plan: ag.Plan, device: str = "cpu") -> None:
    """Assert that a plan gives what padded tensors give."""
    check_results(case, [x.cpu() for x in run_plan(plan, [x.to(device) for x in case.inputs])])


def check_results(case: Case, results: Sequence[Tensor]) -> None:
    """Assert that results are those of padded tensors, and empty in rows of no sequence."""
    dues = expect_outputs(case.padded, case.padded_inputs)
    for x, due in zip(results, dues, strict=True):
        padded = case.pad(x)
        there = torch.where(case.real(padded), padded, due.ref.to(padded.dtype))
        due.check(there, f"{case.graph}\n")
        empty = 0.0 if due.name == "o" else -INF
        assert (case.nobodys(x) == empty).all(), "rows of no sequence are written"


def check_gradients(case: Case, plan: ag.Plan, seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """A plan's gradients, which are those of padded tensors."""
    cotangents = case.cotangents(seed)
    grads = gradients_on(device, plan, case.inputs, cotangents)
    check_pulled(case, grads, cotangents)
    return grads


def check_pulled(
    case: Case, grads: Mapping[str, Tensor], cotangents: Sequence[Tensor | None], but: str = ""
) -> None:
    """Assert that gradients are those of padded tensors, and 0 in rows that are nobody's.
    cotangents: of the results as they lie. but: letters of inputs that have none."""
    padded = [None if x is None else case.pad(x) for x in cotangents]
    dues = expect_gradients(case.padded, case.padded_inputs, padded)
    for name, due in ((name, due) for name, due in dues.items() if name not in [*but]):
        due.check(case.pad(grads[name], name), f"{case.graph}\n")
        assert (case.nobodys(grads[name], name) == 0).all(), "nobody's rows have a gradient"


# What nobody is to see


def poison(shape: Sequence[int]) -> Tensor:
    """NaN, Inf and -Inf by turns, one in each row: any that is seen changes a result."""
    rows = torch.arange(prod(shape[:-1])).view(*shape[:-1], 1)
    return POISON[rows % len(POISON)].expand(shape)


def are_same(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether all have the same bits; one NaN is any other."""
    pairs = zip(xs, ys, strict=True)
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in pairs) and all(
        torch.equal(x.isnan(), y.isnan()) for x, y in zip(xs, ys, strict=True)
    )


def fill(x: Tensor, spoilt: bool) -> Tensor:
    """A tensor with poison or 0 where it is NaN, laid out alike."""
    if not x.is_floating_point():
        return x
    values = poison(x.shape).to(x.dtype) if spoilt else torch.zeros_like(x)
    return lay_like(x.where(~x.isnan(), values), SPEC.like(x))


def check_spoilt(plan: ag.Plan, tensors: Sequence[Tensor], cotangents: Sequence[Any]) -> None:
    """Poison in rows of none gives the bits that zeros give."""
    results = list[list[Tensor]]()
    for spoilt in (False, True):
        given = [fill(x, spoilt) for x in tensors]
        do = [None if x is None else fill(x, spoilt) for x in cotangents]
        results.append([*run_plan(plan, given), *run_gradients(plan, given, do).values()])
    assert are_same(*results)
