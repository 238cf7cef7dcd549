"""Products of few rows as sums of the rows of v, and the decoding that is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.kernels import row_sums
from attn_graph.lowering.cpu import row_core, row_tiles
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.cpu.tile_grid import lies_flat
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_gradients, check_outputs
from attn_graph.testing.strategies import seeds, strides_of
from attn_graph.testing.tensors import tensors_for
from tests.machine.test_memory import SMALL, allocated
from tests.support.planning import forget_plans, prefer_way

INF = float("inf")
CPU = evolve(Target.of("cpu"), native=("bf16",))
DTYPES = torch.float32, torch.bfloat16, torch.float16
Shape = tuple[int, ...]
sizes = st.tuples(*(st.integers(1, most) for most in (3, 4, 4, 70, 9)))  # B, G, L, S, E


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums of a few rows, and indexes of a few heads."""
    monkeypatch.setattr(row_sums, "PIECE_OF_ONE", 16)
    monkeypatch.setattr(row_sums, "PIECE", 8)
    monkeypatch.setattr(row_sums, "MOST_INDEXED", 128)
    row_sums.list_rows.cache_clear()
    yield
    row_sums.list_rows.cache_clear()


def check_sums(p: torch.Tensor, v: torch.Tensor) -> None:
    """o = p v but for roundings: of each product and sum in float32, and of o in its dtype."""
    o = torch.full((*p.shape[:2], v.shape[2]), torch.nan, dtype=v.dtype)
    row_sums.sum_rows_(o, p, v)
    due, size = p.double() @ v.double(), p.double().abs() @ v.double().abs()
    steps = (p.shape[2] + 2) * torch.finfo(torch.float32).eps
    rounding = torch.finfo(v.dtype)
    assert ((o - due).abs() <= steps * size + rounding.eps * due.abs() + rounding.tiny).all()


@pytest.mark.usefixtures("small_pieces")
@given(data=st.data(), sizes=sizes, seed=seeds, dtype=st.sampled_from(DTYPES))
def test_sums_are_products_in_every_layout_of_whole_rows(
    data: st.DataObject, sizes: tuple[int, ...], seed: int, dtype: torch.dtype
) -> None:
    B, G, L, S, E = sizes
    strides = data.draw(strides_of((B, G, S, E)))
    if data.draw(st.booleans()):
        strides = *(E * x for x in strides[:3]), 1
    spec = ag.TensorSpec((B, G, S, E), dtype, strides)
    assume(lies_flat(spec) and row_sums.has_whole_rows(spec))
    generator = torch.Generator().manual_seed(seed)
    count = sum((n - 1) * x for n, x in zip(spec.shape, strides, strict=True)) + 1
    memory = torch.randn(count, generator=generator).to(dtype)
    v = memory.as_strided(spec.shape, strides).view(B * G, S, E)
    check_sums(torch.rand(B * G, L, S, generator=generator).to(dtype), v)


@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [255, 2048, 2500])
def test_sums_of_long_rows_of_many_heads_are_products(L: int, S: int, dtype: torch.dtype) -> None:
    """Of more heads than one index has."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(70, S, 8, generator=generator).to(dtype)
    check_sums(torch.rand(70, L, S, generator=generator).to(dtype), v)
    check_sums(torch.rand(70, L, 9, generator=generator).to(dtype), v[:, 5:14])


@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [255, 2048, 2500])
def test_sums_are_rounded_once(L: int, S: int, dtype: torch.dtype) -> None:
    """Of small whole numbers, whose sums float32 has: by half a step at most, ties either way."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randint(0, 3, (5, L, S), generator=generator).to(dtype)
    v = torch.randint(-9, 9, (5, S, 8), generator=generator).to(dtype)
    o = torch.empty(5, L, 8, dtype=dtype)
    row_sums.sum_rows_(o, p, v)
    due = p.double() @ v.double()
    step = torch.finfo(dtype).eps * torch.exp2(torch.frexp(due).exponent - 1.0)
    assert ((o - due).abs() <= step / 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_what_is_no_number_stays_so(bad: float, dtype: torch.dtype) -> None:
    v = torch.ones(2, 40, 8, dtype=dtype)
    v[0, 3, 2] = v[1, 7] = bad
    p = torch.full((2, 2, 40), 0.5, dtype=dtype)
    o = torch.empty(2, 2, 8, dtype=dtype)
    row_sums.sum_rows_(o, p, v)
    assert torch.equal(o.nan_to_num(7.0), (p @ v).nan_to_num(7.0))


def test_an_index_lies_as_it_is_read() -> None:
    """PyTorch reads it without a look at its strides."""
    index, starts = row_sums.list_rows(1, 3, 1, 1, 7, 5)
    assert index.is_contiguous()
    assert index.tolist() == [0, 0, 0]
    assert starts.tolist() == [0, 1, 2]
    index, _ = row_sums.list_rows(2, 2, 2, 3, 100, 5)
    rows = [[h + 15 * piece + 5 * j for j in range(3)] for h in (0, 100) for piece in (0, 1)]
    assert index.tolist() == [x for each in rows for x in (*each, *each)]


def test_long_indexes_are_not_held() -> None:
    row_sums.list_rows.cache_clear()
    for size in (row_sums.MOST_INDEXED, row_sums.MOST_INDEXED + 1):
        row_sums.index_rows(1, 1, 1, size, size, 1)
    assert row_sums.list_rows.cache_info().currsize == 1


@pytest.mark.parametrize(
    ("strides", "has"),
    [
        ((512, 128, 8, 1), True),
        ((512, 8, 64, 1), True),  # heads side by side
        ((0, 128, 8, 1), True),
        ((516, 128, 8, 1), False),
        ((512, 128, 12, 1), False),
        ((1024, 256, 16, 2), False),
    ],
)
def test_rows_of_a_table_are_whole_and_a_multiple_apart(
    strides: tuple[int, ...], has: bool
) -> None:
    assert row_sums.has_whole_rows(ag.TensorSpec((2, 4, 16, 8), torch.float32, strides)) == has


def test_what_is_traced_is_a_product() -> None:
    """Whose index must not outlive the trace, nor be someone else's tensor."""
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    p, v, o = torch.rand(2, 1, 6), torch.rand(2, 6, 4), torch.empty(2, 1, 4)
    with Names():  # type: ignore[no-untyped-call]  # torch's own
        row_sums.sum_rows_(o, p, v)
    assert "bmm.out" in names
    assert not any("embedding_bag" in name for name in names)
    torch.testing.assert_close(o, p @ v)


# Plans

PATCHED = {"LEAST_SUMMED": 0, "LONG_NUMBERS": 0, "MOST_CAST": 64, "LEAST_KEYS": 3}


@pytest.fixture
def small_problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small problems run so too, and casts are of few keys of few heads."""
    for name, number in PATCHED.items():
        monkeypatch.setattr(row_core, name, number)
    monkeypatch.setattr(row_tiles, "LEAST_READ", 0)
    prefer_way(monkeypatch, "rows")
    yield
    forget_plans()


def make_graph(dtype: torch.dtype, *sizes: int, **options: Any) -> ag.Graph:
    """Attention of q [B,H,M,D], k [B,G,N,D] and v [B,G,N,E]."""
    q, k, v = (ag.TensorSpec(shape, dtype) for shape in shapes_of(*sizes))
    return ag.attention(q, k, v, **options)


def shapes_of(B: int, H: int, G: int, M: int, N: int, D: int, E: int) -> tuple[Shape, ...]:
    """Of q, k and v."""
    return (B, H, M, D), (B, G, N, D), (B, G, N, E)


def tiles_of(graph: ag.Graph) -> RowTiles | None:
    """How a graph of one attention is tiled, if in whole rows."""
    plan = ag.compile(graph, target=CPU, backends=("math",))
    (tiles,) = plan_tiles(Request(plan.graph, CPU, ag.extend.Options()))
    return tiles if isinstance(tiles, RowTiles) else None


def check(graph: ag.Graph, tensors: Sequence[torch.Tensor]) -> None:
    """By the accuracy rule; and o is the same whether or not a gradient may be wanted."""
    plan = ag.compile(graph, target=CPU, backends=("math",))
    check_outputs(plan, graph, tensors)
    quick, whole = plan.infer(*tensors)[0][0], plan.run(*tensors)[0][0]
    assert torch.equal(quick, whole)


few = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2),
    st.integers(16, 90), st.sampled_from((8, 16, 5)), st.sampled_from((8, 16, 5)),
)  # fmt: skip


@pytest.mark.usefixtures("small_problems", "small_pieces")
@given(
    sizes=few, dtype=st.sampled_from(DTYPES), seed=seeds, bounded=st.booleans(), stats=st.booleans()
)
def test_decoding_is_within_the_rule(
    sizes: tuple[int, ...], dtype: torch.dtype, seed: int, bounded: bool, stats: bool
) -> None:
    B, G, r, M, N, D, E = sizes
    options: dict[str, Any] = {"stats": True} if stats else {}
    if bounded:
        options |= {"mask": ag.KeyLengths(), "kv_lengths": ag.TensorSpec((B,), torch.int32)}
    graph = make_graph(dtype, B, G * r, G, M, N, D, E, **options)
    tensors = tensors_for(graph, seed)
    check(graph, tensors)
    check_gradients(ag.compile(graph, target=CPU, backends=("math",)), graph, tensors, seed)


@pytest.mark.usefixtures("small_problems")
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_decoding_sums_rows(dtype: torch.dtype) -> None:
    """Which the test above draws."""
    tiles = tiles_of(make_graph(dtype, 2, 4, 4, 1, 64, 16, 16))
    assert isinstance(tiles, RowTiles)
    assert tiles.sums_rows
    assert tiles.casts == (dtype == torch.float16)
    assert tiles.turns == (dtype == torch.float32)
    assert "and sums of rows of v" in tiles.summary()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("scale", [1, 8, 30, 250])  # of q and k: 250 passes 65504
@pytest.mark.parametrize("sizes", [(1, 8, 8, 1, 2048, 64, 64), (1, 4, 2, 1, 9000, 64, 64)])
def test_scores_of_float16_are_those_of_float32(
    sizes: tuple[int, ...], scale: int, layout: str
) -> None:
    """In pieces of keys, lse and gradients too."""
    q, k, v = shapes_of(*sizes)
    specs = (ag.TensorSpec(x, torch.float16, layout=layout) for x in (q, k, v))
    graph = ag.attention(*specs, stats=True)
    assert isinstance(tiles_of(graph), RowTiles)
    tensors = tensors_for(graph, 1)
    for x in tensors[:2]:
        x *= scale
    plan = ag.compile(graph, target=CPU, backends=("math",))
    check_outputs(plan, graph, tensors)
    check_gradients(plan, graph, tensors, 1)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float32, (1, 32, 16, 1, 1100, 128, 128)),
        (torch.bfloat16, (2, 8, 8, 1, 2000, 64, 64)),
        (torch.float16, (1, 64, 64, 1, 1000, 64, 64)),
        (torch.float16, (1, 8, 8, 1, 2049, 64, 64)),
        (torch.float16, (16, 16, 16, 1, 1000, 64, 64)),  # bshd: parts of keys, merged
    ],
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_decoding_allocates_what_is_said(
    dtype: torch.dtype, sizes: tuple[int, ...], layout: str
) -> None:
    specs = (ag.TensorSpec(x, dtype, layout=layout) for x in shapes_of(*sizes))
    graph = ag.attention(*specs)
    plan = ag.compile(graph, target=CPU, backends=("math",), workspace=ag.Workspace())
    tensors = tensors_for(graph, 1)
    check(graph, tensors)
    need = plan.memory()
    plan(*tensors)
    row_sums.list_rows.cache_clear()
    with torch.no_grad():
        *_, most = allocated(lambda: plan(*tensors))
    assert most <= need.outputs + need.temporary_forward + SMALL


@pytest.mark.parametrize("N", [2**14 - 5, 2**15 + 1, 10**5 + 1])
def test_equal_weights_of_float16_keep_their_digits(N: int) -> None:
    """Each is 1 / N: where float16 has fewer digits for that, they are not rounded to it."""
    graph = make_graph(torch.float16, 1, 2, 2, 1, N, 64, 64)
    q, k, v = (torch.ones(i.spec.shape).half() for i in graph.inputs)
    o = ag.compile(graph, target=CPU)(q * 0, k, v)
    torch.testing.assert_close(o, torch.ones(1, 2, 1, 64).half(), rtol=2**-11, atol=0)


def test_lengths_cut_what_is_read_of_long_keys() -> None:
    lengths = {"mask": ag.KeyLengths(), "kv_lengths": ag.TensorSpec((4,), torch.int32)}
    graph = make_graph(torch.float32, 4, 16, 16, 1, 2048, 128, 128, **lengths)
    tiles = tiles_of(graph)
    assert tiles is not None
    assert tiles.spans
    assert tiles.steps.turns
    assert tiles.steps.sums
    q, k, v, _ = tensors_for(graph, 1)
    check(graph, [q, k, v, torch.tensor([2048, 0, 1500, 3], dtype=torch.int32)])


def test_decoding_of_values_with_gaps_is_products() -> None:
    """Which are not rows of a table."""
    sizes = (1, 16, 1, 128), (1, 16, 1024, 128)
    q, k = (ag.TensorSpec(x, torch.float32) for x in sizes)
    v = ag.TensorSpec(k.shape, torch.float32, (16 * 133120, 133120, 130, 1))
    graph = ag.attention(q, k, v)
    tiles = tiles_of(graph)
    assert isinstance(tiles, RowTiles)
    assert not tiles.sums_rows
    check(graph, tensors_for(graph, 1))
