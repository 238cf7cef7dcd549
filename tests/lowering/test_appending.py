"""Rows appended to pages: rotated, in 8 bits, by PyTorch's operations and by Triton's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

import attn_graph as ag
from attn_graph.ir.storage.scaling import to_eight
from attn_graph.nn import append_to_pages, appending
from attn_graph.nn.functional import attention
from attn_graph.spec import QUANTISED
from attn_graph.testing.formula import expand_blocks
from attn_graph.testing.rule import allowance, distance, expect_outputs
from attn_graph.testing.strategies import seeds
from tests.support.kernels import CPU

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KINDS = (F16, BF16, F32, F64)
LONGEST = 40  # positions of the tables of a rotation
any_append: Any = append_to_pages  # Any: called wrongly


@pytest.fixture(
    scope="module",
    autouse=True,
    params=["torch", "triton"] if CPU.interprets else ["torch"],
)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs by PyTorch's operations and, where Triton interprets, by the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "triton":
            from attn_graph.kernels.appending import launch

            patch.setattr(appending, "write_on_host", partial(launch, interprets=True))
        yield


@frozen
class Case:
    """Sequences of `before` rows, which get `more` of their own. R: elements that turn."""

    before: tuple[int, ...]
    more: tuple[int, ...]
    page: int
    heads: tuple[int, int]
    sizes: tuple[int, int]
    dtype: torch.dtype
    R: int
    interleaved: bool
    seed: int

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([a + b for a, b in zip(self.before, self.more, strict=True)])

    @property
    def table(self) -> Tensor:
        """Pages in any order, one unused before each sequence's own."""
        most = max(1, -(-int(self.lengths.max()) // self.page))
        count = len(self.more) * most + 2
        order = torch.randperm(count, generator=self.random())[: len(self.more) * most]
        return order.view(len(self.more), most).int()

    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def pools(self, dtype: torch.dtype, heads_first: bool = False) -> tuple[Tensor, Tensor]:
        """Halves of one cache, full of a number that is not a key."""
        n, (_, G), (D, E) = self.table.numel() + 2, self.heads, self.sizes
        shape = (n, G, self.page) if heads_first else (n, self.page, G)
        cache = torch.full((*shape, D + E), 7.0).to(dtype)
        halves = cache[..., :D], cache[..., D:]
        return tuple(x.transpose(1, 2) if heads_first else x for x in halves)  # type: ignore[return-value]

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all rows of all sequences, packed."""
        total, random = int(self.lengths.sum()), self.random()
        sizes = zip((self.heads[0], *self.heads[1:] * 2), (self.sizes[0], *self.sizes), strict=True)
        q, k, v = (torch.randn(total, h, d, generator=random, dtype=F64) for h, d in sizes)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def turns(self) -> dict[str, Any]:
        if not self.R:
            return {}
        angle = torch.rand(LONGEST, self.R // 2, generator=self.random(), dtype=F64) * 6
        tables = {"cos": angle.cos().to(self.dtype), "sin": angle.sin().to(self.dtype)}
        return tables | {"interleaved": self.interleaved}

    def starts(self, counts: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *counts]).cumsum(0)

    def parts(self) -> tuple[Tensor, Tensor]:
        """The numbers of rows that sequences had, and of those that they get."""
        whole = self.starts(tuple(self.lengths.tolist())).tolist()
        pairs = [*zip(whole, self.before, self.more, strict=False)]
        old = [r for first, a, _ in pairs for r in range(first, first + a)]
        return torch.tensor(old).long(), torch.tensor(
            [r for first, a, b in pairs for r in range(first + a, first + a + b)]
        ).long()


@st.composite
def cases(draw: DrawFn) -> Case:
    B = draw(st.integers(1, 4))
    count = st.integers(0, 6)
    G, (D, E) = draw(st.integers(1, 3)), draw(st.sampled_from([(8, 8), (6, 4), (16, 3)]))
    return Case(
        tuple(draw(count) for _ in range(B)),
        tuple(draw(count) for _ in range(B)),
        draw(st.sampled_from([1, 3, 4])),
        (G * draw(st.integers(1, 3)), G),
        (D, E),
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from([0, 2, 4, D])),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


def turn(x: Tensor, at: Tensor, case: Case) -> Tensor:
    """Rows [T,heads,D] in float64, rotated as complex numbers."""
    x, named = x.double(), case.turns()
    if not named:
        return x
    by = torch.complex(named["cos"].double()[at], named["sin"].double()[at])[:, None]
    half = case.R // 2
    pairs = (
        x[..., : case.R].unflatten(-1, (half, 2))
        if case.interleaved
        else x[..., : case.R].unflatten(-1, (2, half)).mT
    )
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * by)
    turned = turned if case.interleaved else turned.mT
    return torch.cat([turned.flatten(-2), x[..., case.R :]], -1)


def places(case: Case) -> tuple[Tensor, Tensor]:
    """The slot and the position of every row of every sequence, one after another."""
    slots: list[int] = []
    at: list[int] = []
    for pages, count in zip(case.table.tolist(), case.lengths.tolist(), strict=True):
        at += range(count)
        slots += [pages[i // case.page] * case.page + i % case.page for i in range(count)]
    return torch.tensor(slots).long(), torch.tensor(at).long()


def near(x: Tensor, ref: Tensor, dtype: torch.dtype) -> None:
    """A rotation is held to the rule, with `low` as of rounded products."""
    low = ref.to(dtype if dtype != F64 else F32).double()
    assert distance(x, ref) <= allowance(ref, low, dtype) + 4 * 2.0**-24 * (dtype != F64)


@given(cases(), st.booleans())
@settings(max_examples=settings().max_examples * 8 // 5)
def test_appending_then_attending_equals_attending_to_the_whole(case: Case, first: bool) -> None:
    q, k, v = case.rows()
    pools, table = case.pools(case.dtype, first), case.table
    old, new = case.parts()
    starts, named = case.starts(case.more), case.turns()
    before = torch.tensor(case.before)
    append_to_pages(
        k[old], v[old], *pools, table, before, q_starts=case.starts(case.before), **named
    )
    turned = append_to_pages(
        k[new], v[new], *pools, table, case.lengths, q_starts=starts, q=q[new], **named
    )
    slots, at = places(case)
    page, line = slots // case.page, slots % case.page
    assert pools[1][page, line].equal(v)
    near(pools[0][page, line], turn(k, at, case), case.dtype)
    assert turned is not None
    near(turned, turn(q, at, case)[new], case.dtype)
    used = torch.zeros(pools[0].shape[:2], dtype=torch.bool).index_put(
        (page, line), torch.tensor(True)
    )
    for pool in pools:
        assert (pool[~used] == 7).all()
    o = attention(
        turned, *pools, q_starts=starts, pages=table, kv_lengths=case.lengths,
        mask=ag.Causal("bottom_right"), max_lengths=(8, None),
    )  # fmt: skip
    assert isinstance(o, Tensor)
    begin = case.starts(tuple(case.lengths.tolist())).tolist()
    for b, (count, more) in enumerate(zip(case.lengths.tolist(), case.more, strict=True)):
        if more:
            keys = slice(begin[b], begin[b] + count)
            own = [x[page, line][keys].transpose(0, 1)[None] for x in pools]
            rows = slice(int(starts[b]), int(starts[b + 1]))
            tensors = turned[rows].transpose(0, 1)[None], *own
            specs = map(ag.TensorSpec.like, tensors)
            graph = ag.attention(*specs, mask=ag.Causal("bottom_right"))
            expect_outputs(graph, tensors)[0].check(o[rows].transpose(0, 1)[None])


@given(cases(), st.sampled_from([*QUANTISED, None]), st.booleans())
@settings(max_examples=settings().max_examples * 8 // 5)
def test_slots_and_padded_rows_write_what_tables_and_starts_write(
    case: Case, kind: torch.dtype | None, number: bool
) -> None:
    q, k, v = case.rows()
    dtype, scales = kind or case.dtype, dict[str, Any]()
    if kind:
        by_head = torch.rand(1, 1, case.heads[1], 1, generator=case.random()) * 0.02 + 0.01
        scales = {"k_scale": by_head, "v_scale": 0.02 if number else by_head * 2}
    lengths, table, named = case.lengths, case.table, case.turns() | scales
    starts = case.starts(tuple(lengths.tolist()))
    due, pools = case.pools(dtype), case.pools(dtype)
    turned = append_to_pages(k, v, *due, table, lengths, q_starts=starts, q=q, **named)
    assert turned is not None
    slots, at = places(case)
    gap = torch.zeros(1, dtype=torch.int64)  # a row of padding first
    padded = [torch.cat([x[:1] if len(x) else x.new_zeros(1, *x.shape[1:]), x]) for x in (q, k, v)]
    result = any_append(
        *padded[1:], *pools, slot_mapping=torch.cat([gap - 1, slots]), q=padded[0],
        positions=torch.cat([gap, at]), **named,
    )  # fmt: skip
    assert result is not None
    assert result[1:].equal(turned)
    assert not result[0].any()
    for pool, other in zip(pools, due, strict=True):
        assert pool.view(torch.int8).equal(other.view(torch.int8)) if kind else pool.equal(other)
    each = case.pools(dtype)
    for b, (first, count) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=False)):
        own = [x[first : first + count].transpose(0, 1)[None] for x in (q, k, v)]
        one = any_append(*own[1:], *each, table[b : b + 1], lengths[b : b + 1], q=own[0], **named)
        assert one is not None
        assert one[0].transpose(0, 1).equal(turned[first : first + count])
    for pool, other in zip(each, due, strict=True):
        assert pool.view(torch.int8).equal(other.view(torch.int8)) if kind else pool.equal(other)


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_number_is_rounded_as_pytorch_rounds_it(kind: torch.dtype) -> None:
    grid = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(kind).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    both = [ties.nextafter(torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    x = torch.cat([grid, ties, *both, torch.tensor([-0.0, 1e-30])])[None, None]
    pool = torch.zeros(1, 1, 1, x.shape[-1]).to(kind)
    append_to_pages(x, None, pool, None, slot_mapping=torch.tensor([0]), k_scale=1.0)
    due = x[0, 0].clamp(-127, 127).round() if kind == torch.int8 else x[0, 0].to(kind).float()
    assert pool[0, 0, 0].float().equal(due)


def test_a_scale_for_each_row_is_that_of_its_place() -> None:
    x, by_row = torch.full((1, 1, 4), 6.0), torch.tensor([2.0, 3.0, 4.0, 6.0]).view(2, 2, 1, 1)
    pool = torch.zeros(2, 2, 1, 4).to(torch.float8_e5m2)
    for slot, due in enumerate((3.0, 2.0, 1.5, 1.0)):
        append_to_pages(x, None, pool, None, slot_mapping=torch.tensor([slot]), k_scale=by_row)
        assert (pool[slot // 2, slot % 2].float() == due).all()


@given(
    st.sampled_from(QUANTISED),
    *(st.sampled_from(sizes) for sizes in ((1, 3), (1, 2, 4), (1, 2), (1, 3, 12))),
    seeds,
)
def test_a_row_is_written_by_the_scales_of_its_blocks(
    kind: torch.dtype, n: int, P: int, G: int, D: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 12, generator=random)
    slots = torch.randperm(12, generator=random)[:3]
    scale = torch.exp2(torch.randint(-6, 0, (n, P, G, D), generator=random).float())
    pool = torch.zeros(3, 4, 2, 12).to(kind)
    append_to_pages(x, None, pool, None, slot_mapping=slots, k_scale=scale)
    by_row = expand_blocks(scale, pool.shape).flatten(0, 1)[slots]
    due = to_eight(x.double() / by_row, kind)
    assert pool.flatten(0, 1).view(torch.int8)[slots].equal(due.view(torch.int8))


ROWS, POOL = torch.randn(3, 2, 8), torch.zeros(4, 2, 2, 8)
SLOTS, TABLE = torch.tensor([0, 3, 5]), torch.tensor([[0, 1], [2, 3]])
STARTS, LENGTHS = torch.tensor([0, 1, 3]), torch.tensor([2, 4])
COS = torch.ones(4, 4)
BYTES = POOL.to(torch.int8)
BY_TABLE = {"pages": TABLE, "kv_lengths": LENGTHS, "q_starts": STARTS}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "with q_starts or slot_mapping"),
        ({"q_starts": STARTS}, "pass pages= and kv_lengths=, or slot_mapping="),
        ({"slot_mapping": SLOTS[:2]}, "must have one slot of each row, \\[3\\]"),
        ({"slot_mapping": SLOTS, "pages": TABLE}, "leave these out"),
        ({"slot_mapping": SLOTS.float()}, "must be torch.int32 or torch.int64"),
        ({"slot_mapping": SLOTS, "cos": COS, "sin": COS}, "pass positions="),
        ({"slot_mapping": SLOTS, "cos": COS}, "pass both"),
        ({**BY_TABLE, "cos": COS.repeat(1, 2), "sin": COS.repeat(1, 2)}, "half that they repeat"),
        ({**BY_TABLE, "kv_lengths": LENGTHS[:1]}, "for 2 sequences"),
        ({"slot_mapping": SLOTS, "positions": SLOTS[:2]}, "must have one of each row"),
        ({"slot_mapping": SLOTS, "k_scale": 1.0}, "leave k_scale out"),
        ({"slot_mapping": SLOTS, "q": ROWS[..., :4]}, "do not fit"),
        ({"slot_mapping": SLOTS, "q": ROWS[:2]}, "different rows"),
    ],
)
def test_what_does_not_fit_is_named_with_the_edit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ag.TensorError, match=words):
        any_append(ROWS, ROWS, POOL.clone(), POOL.clone(), **options)


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ((ROWS, None, POOL, POOL), {}, "pass both, or None for both"),
        ((ROWS, ROWS[:2], POOL, POOL), {}, "v .* and k .* differ in heads or rows"),
        ((ROWS, ROWS, POOL, POOL[..., :4]), {}, "differ in heads or head size"),
        ((ROWS, ROWS, POOL, POOL[:2]), {}, "differ in pages or heads"),
        ((ROWS, ROWS, BYTES, BYTES), {}, "pass k_scale="),
        ((ROWS, None, BYTES, None), {"k_scale": torch.ones(3, 1, 1, 1)}, "each a divisor"),
        ((ROWS.int(), None, POOL, None), {}, "new rows must be floats"),
        ((ROWS[None], None, POOL, None), {}, r"must be \[T,G,D\] with q_starts or slot_mapping"),
        ((ROWS, None, POOL[:, :0], None), {}, "pages of 0 rows"),
    ],
)
def test_rows_and_pools_that_do_not_fit_are_named(
    tensors: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ag.TensorError, match=words):
        any_append(*tensors, slot_mapping=SLOTS, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slot_mapping": SLOTS + 3}, "slot_mapping: row 2 has slot 8, of 8 slots"),
        ({**BY_TABLE, "kv_lengths": LENGTHS - 2}, "count the new rows in kv_lengths"),
        ({**BY_TABLE, "kv_lengths": LENGTHS + 1}, "a table of enough pages"),
        ({**BY_TABLE, "pages": TABLE - 1}, "entry 0 has page -1 at position 1"),
        ({**BY_TABLE, "q_starts": STARTS + 1}, "q_starts: from 1 to 4, of 3 rows"),
        ({"slot_mapping": SLOTS, "cos": COS, "sin": COS, "positions": SLOTS}, "pass longer tables"),
    ],
)
def test_places_outside_write_nothing(
    options: dict[str, Any], words: str, way: None, request: pytest.FixtureRequest
) -> None:
    k, v = POOL.clone(), POOL.clone()
    if "triton" in request.node.name:
        return  # as on GPUs nothing is read on the host
    with pytest.raises(ag.PlanMismatchError, match=words):
        any_append(ROWS, ROWS, k, v, **options)
    assert k.equal(POOL)
    assert v.equal(POOL)


def test_derivatives_and_maps_of_appending_are_refused() -> None:
    def append(x: Tensor) -> Tensor:
        append_to_pages(x, x, POOL.clone(), POOL.clone(), slot_mapping=SLOTS)
        return x.sum()

    with pytest.raises(ag.GraphError, match=r"call it under torch.no_grad\(\)"):
        append(ROWS.clone().requires_grad_())
    with torch.no_grad():
        append(ROWS.clone().requires_grad_())
    transforms: list[Callable[[], object]] = [
        lambda: torch.func.vmap(append)(ROWS[None]),
        lambda: torch.func.grad(append)(ROWS),
        lambda: torch.func.jvp(append, (ROWS,), (ROWS,)),
    ]
    for transform in transforms:
        with pytest.raises(ag.GraphError, match=r"append_to_pages (writes to|has no gradient)"):
            transform()


def test_traced_and_compiled_calls_write_what_calls_write() -> None:
    turns = {"cos": COS.cos(), "sin": COS.sin(), "positions": torch.tensor([0, 3, 1])}

    def step(q: Tensor, pool: Tensor) -> Tensor:
        turned: Tensor = any_append(ROWS, None, pool, None, slot_mapping=SLOTS, q=q, **turns)
        return turned + pool.sum()

    pool, other = POOL.clone(), POOL.clone()
    due = step(ROWS, pool)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert compiled(ROWS, other).equal(due)
    assert other.equal(pool)
    given = (ROWS, None, POOL.clone(), None, ROWS, None, None, None, SLOTS, turns["positions"])
    more = (COS, COS, None, None, 1.0, 1.0, False)
    torch.library.opcheck(torch.ops.attn_graph.append_to_pages.default, (*given, *more))
