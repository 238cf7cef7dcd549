"""Booleans are no numbers: wherever a number is taken, True is refused, not read as 1."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import attrs
import pytest
import torch

import attn_graph as ag
from attn_graph import nn
from attn_graph.ir.attention import Attention
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.views import VIEW_OPS
from attn_graph.nn import functional as F

X = ag.TensorSpec((2, 2, 4, 8), torch.float32)
Q = torch.randn(2, 2, 4, 8)
ROWS, STARTS = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
B = ag.Dim("B", 8)
GRAPH = ag.attention(
    ag.TensorSpec((B, 2, 4, 8), torch.float32), *[X.__class__((B, 2, 4, 8), X.dtype)] * 2
)
PLAIN = ag.attention(X, X, X)
Take = Callable[[Any], object]  # Any: a number, or a boolean in its place


def times(n: Any, by: float) -> Any:  # Any: as above
    """A number times another; a boolean as it is."""
    return n if isinstance(n, bool) else n * by


PLACES: dict[str, Take] = {
    "a window's left": lambda n: ag.Window(n, 2),
    "a window's right": lambda n: ag.Window(2, n),
    "a band's ends": lambda n: ag.Band(0, n),
    "a band's other end": lambda n: ag.Band(n, 4),
    "a prefix": ag.Prefix,
    "rows of blocks": lambda n: ag.KeepBlocks(n, 2),
    "keys of blocks": lambda n: ag.KeepBlocks(2, n),
    "a soft cap": ag.SoftCap,
    "entries of a table": ag.RelativeBias,
    "a start": lambda n: ag.RelativeBias(3, start=(0, n)),
    "a scale": lambda n: ag.attention(X, X, X, scale=n),
    "a scale of scores": lambda n: ag.graph(
        lambda q, k: ag.scores(q, k, scale=n).softmax(), q=X, k=X
    ),
    "a cap": lambda n: ag.attention(X, X, X, soft_cap=n),
    "a rate": lambda n: ag.attention(X, X, X, dropout=times(n, 0.25)),
    "columns of keys": lambda n: ag.attention(X, X, n),
    "the longest": lambda n: F.attention(
        ROWS, ROWS, ROWS, q_starts=STARTS, max_lengths=(times(n, 4), 4)
    ),
    "a size": lambda n: ag.TensorSpec((2, n), torch.float32),
    "a stride": lambda n: ag.TensorSpec((2, 3), torch.float32, (3, n)),
    "a size by name": lambda n: ag.Dim("N", n),
    "a class": lambda n: ag.Dim("N", classes=(n, 2)),
    "doubling": lambda n: ag.doubling(n, 8),
    "the most of doubling": lambda n: ag.doubling(1, n),
    "a size that fits": lambda n: B.fit(n),
    "a quotient": lambda n: B // n,
    "a size of a plan": lambda n: ag.compile(GRAPH, target="cpu").at(B=n),
    "ranks": ag.Mesh,
    "queries of tiles": lambda n: ag.tiles(ag.Causal("top_left"), n, 4),
    "keys of tiles": lambda n: ag.tiles(ag.Causal("top_left"), 4, n),
    "heads of tiles": lambda n: ag.tiles(ag.Causal("top_left"), 4, 4, H=n),
    "a block of tiles": lambda n: ag.tiles(ag.Causal("top_left"), 4, 4, block=(n, 2)),
    "blocks": lambda n: ag.select_blocks(torch.zeros(1, 1, 1, 1, dtype=torch.int64), n),
    "a mapped axis": lambda n: ag.vmap(PLAIN, n, size=2),
    "places of mapped axes": lambda n: ag.vmap(PLAIN, dict.fromkeys("qkv", n), size=2),
    "a mapped size": lambda n: ag.vmap(PLAIN, 0, size=n),
    "bytes": lambda n: ag.compile(
        PLAIN, target="cpu", max_workspace=2**40 * n if type(n) is int else n
    ),
    "a link": lambda n: ag.explain(ag.shard(PLAIN, ag.Mesh(2), "batch"), target="h100", link=n),
    "plans in a store": lambda n: ag.extend.Store("/tmp", most=n),
    "a scale of tensors": lambda n: F.attention(Q, Q, Q, scale=n),
    "a cap of tensors": lambda n: F.attention(Q, Q, Q, soft_cap=n),
    "a rate of tensors": lambda n: F.attention(Q, Q, Q, dropout=times(n, 0.25)),
    "a seed": lambda n: F.attention(Q, Q, Q, dropout=0.5, seed=n, offset=1),
    "a scale like PyTorch's": lambda n: F.scaled_dot_product_attention(Q, Q, Q, scale=n),
    "a rate like PyTorch's": lambda n: F.scaled_dot_product_attention(
        Q, Q, Q, dropout_p=times(n, 0.25)
    ),
    "a longest sequence": lambda n: nn.varlen_attn(
        ROWS, ROWS, ROWS, STARTS, STARTS, times(n, 4), 4
    ),
    "a window's bound": lambda n: nn.varlen_attn(
        ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4, window_size=(n, 0)
    ),
    "a scale of sequences": lambda n: nn.varlen_attn(
        ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4, scale=n
    ),
    "a scale of a module": lambda n: nn.Attention(scale=n)(Q, Q, Q),
    "a cap of a module": lambda n: nn.Attention(soft_cap=n)(Q, Q, Q),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_boolean_is_refused_where_a_number_is_taken(place: str) -> None:
    """After the number 1, which is equal and may be remembered."""
    PLACES[place](1)
    with pytest.raises((ag.GraphError, ag.PlanMismatchError)):
        PLACES[place](True)


def numbers_of(kind: type) -> list[str]:
    """The fields of a class that are declared as numbers."""
    hints = get_type_hints(kind)
    return [
        field.name
        for field in attrs.fields(kind)
        if field.init and hints[field.name] in (int, float, int | None, float | None)
    ]


def public_kinds() -> list[type]:
    """The classes that users make, and ops in texts."""
    every = {getattr(ag, name) for name in ag.__all__} - {ag.Value, ag.Plan}
    known = {x for x in every if inspect.isclass(x) and attrs.has(x)}
    return sorted(known | {*VIEW_OPS, Attention, Packed}, key=lambda kind: kind.__name__)


KINDS = [(kind, name) for kind in public_kinds() for name in numbers_of(kind)]


@pytest.mark.parametrize(("kind", "name"), KINDS, ids=lambda x: getattr(x, "__name__", x))
def test_no_field_of_a_public_class_takes_a_boolean_for_a_number(kind: type, name: str) -> None:
    given = {
        field.name: 1
        for field in attrs.fields(kind)
        if field.init and field.default is attrs.NOTHING and field.name != name
    }
    with pytest.raises(ag.GraphError):
        kind(**given, **{name: True})
