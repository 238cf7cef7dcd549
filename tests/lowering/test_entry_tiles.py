"""Batch entries that are computed one by one, each of the keys that data leave it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attn_graph as ag
from attn_graph.extend import Options
from attn_graph.lowering.cpu import run_mask, tile_grid
from attn_graph.lowering.cpu.math import plan_tiles
from attn_graph.lowering.cpu.row_tiles import RowTiles
from attn_graph.lowering.request import Request
from attn_graph.machine.target import Target
from attn_graph.testing.agreement import check_outputs
from attn_graph.testing.tensors import tensors_for
from tests.support.planning import forget_plans, prefer_way

# Of a few numbers `low` may be right by luck.
CPU, NAN = Target.of("cpu"), float("nan")
MASKS = {
    "lengths": ag.KeyLengths(),
    "all but the first": ag.KeyLengths() & ~ag.Prefix(3),
    "booleans": None,
    "both": ag.KeyLengths(),
    "all or none": None,
}


@pytest.fixture(scope="module", autouse=True)
def every_entry_is_worth_it() -> Iterator[None]:
    """Small batch entries are computed by themselves too, by either softmax."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_mask, "LEAST_CUT", 0)
        patch.setattr(tile_grid, "FEW_SCORES", 2**8)
        prefer_way(patch, "rows")
        yield
    forget_plans()


def padded(
    q: tuple[int, ...], k: tuple[int, ...], kind: str = "lengths",
    dtype: torch.dtype = torch.float32, layout: str = "bhsd", **options: Any,
) -> ag.Graph:  # fmt: skip
    """Attention of q and k, which is v too in size, where data hide keys of batch entries."""
    if kind not in ("booleans", "all or none"):
        options["kv_lengths"] = ag.TensorSpec(q[:1], torch.int32)
    if kind in ("booleans", "both"):
        options["keep"] = ag.TensorSpec((q[0], 1, 1, k[2]), torch.bool)
    if kind == "all or none":
        options["keep"] = ag.TensorSpec((q[0], 1, 1, 1), torch.bool)
    specs = (ag.TensorSpec(x, dtype, layout=layout) for x in (q, k, k))
    return ag.attention(*specs, mask=MASKS[kind], **options)


def plan_of(graph: ag.Graph) -> ag.Plan:
    """A plan of a graph that runs so."""
    assert reads_spans(tiles_of(graph))
    return ag.compile(graph, backends=("math",))


def tiles_of(graph: ag.Graph) -> object:
    """How a graph of one attention is tiled."""
    (tiles,) = plan_tiles(Request(ag.compile(graph, backends=("math",)).graph, CPU, Options()))
    return tiles


def reads_spans(tiles: object) -> bool:
    """True if tiles are batch entries, each of the keys that count."""
    return isinstance(tiles, RowTiles) and tiles.spans


def test_one_query_that_is_none_sees_no_key() -> None:
    """Of others, which no data of the keys hide, every key counts."""
    q, k = (ag.TensorSpec((3, 4, n, 16), torch.float32) for n in (1, 50))
    lengths = ag.TensorSpec((3,), torch.int32)
    graph = ag.attention(q, k, k, mask=ag.QueryLengths(), q_lengths=lengths)
    tensors = (*tensors_for(graph, 1)[:3], torch.tensor([1, 0, 1], dtype=torch.int32))
    check_outputs(plan_of(graph), graph, tensors)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "all or none"])
@pytest.mark.parametrize("M", [1, 70])
def test_keys_before_and_behind_those_that_count_are_not_read(
    M: int, kind: str, layout: str
) -> None:
    graph = padded((4, 3, M, 16), (4, 3, 50, 16), kind, layout=layout)
    q, k, v, *data = tensors_for(graph, 1)
    seen = torch.zeros(4, 50, dtype=torch.bool)
    for row, (first, behind) in zip(seen, ((3, 50), (9, 10), (4, 33), (0, 0)), strict=True):
        row[first:behind] = True
    for x in data:
        x.copy_(seen.view(x.shape) if x.dtype == torch.bool else torch.tensor([50, 10, 33, 0]))
    if kind == "lengths":
        seen = torch.arange(50) < data[0][:, None]
    elif kind == "all but the first":
        seen = (torch.arange(50) < data[0][:, None]) & (torch.arange(50) >= 3)
    due = plan_of(graph)(q, k, v, *data)
    for x in (k[:3], v[:3]):
        x.masked_fill_(~seen[:3, None, :, None], NAN)
    o = plan_of(graph)(q, k, v, *data)
    assert isinstance(o, torch.Tensor)
    assert isinstance(due, torch.Tensor)
    assert torch.equal(o, due)
    assert not o[3].any()


class NumbersStay(TorchDispatchMode):
    """Refuses to give a tensor's numbers, as a trace does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("sizes", [(3, 4, 1, 16), (3, 4, 70, 16)])
@pytest.mark.parametrize("N", [20, 50])
def test_who_watches_a_computation_sees_no_numbers(
    kind: str, sizes: tuple[int, ...], N: int
) -> None:
    """All keys are read then, and data hide them."""
    graph = padded(sizes, (3, 4, N, 16), kind)
    tiles, tensors = tiles_of(graph), tensors_for(graph, 1)
    assert isinstance(tiles, RowTiles)
    assert tiles.spans
    scratch = {n: torch.empty(x.shape, dtype=x.dtype) for n, x in tiles.buffers.items()}
    check_outputs(plan_of(graph), graph, tensors)
    (due,) = tiles.infer(tensors, scratch)
    with NumbersStay():  # type: ignore[no-untyped-call]  # as above
        (o,) = tiles.infer(tensors, scratch)
    torch.testing.assert_close(o, due)


@pytest.mark.parametrize(
    "options",
    [
        {
            "mask": ag.KeyLengths() & ag.Causal("top_left"),
            "kv_lengths": ag.TensorSpec((3,), torch.int32),
        },
        {"keep": ag.TensorSpec((3, 4, 1, 50), torch.bool)},
        {"keep": ag.TensorSpec((3, 1, 70, 50), torch.bool)},
    ],
)
def test_rows_that_see_other_keys_are_not_cut(options: dict[str, Any]) -> None:
    q, k = (ag.TensorSpec((3, 4, n, 16), torch.float32) for n in (70, 50))
    graph = ag.attention(q, k, k, **options)
    assert not reads_spans(tiles_of(graph))
