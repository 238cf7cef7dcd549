"""Jagged nested tensors [B,H,j,D] in place of dense ones: attention of their packed rows."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged

from attn_graph.errors import GraphError
from attn_graph.ir.arguments import order_inputs
from attn_graph.nn.calls import GRAPH_OPTIONS, Named, Options, Outputs, Values, attend_as
from attn_graph.nn.packed_sizes import PACKING

LAYOUTS, ALIGN = map(GRAPH_OPTIONS.index, ("outputs", "align"))
RAGGED = 2  # the axis of lengths in [B,H,j,D]
FORMS = {  # by the axis of lengths: how many axes, and what to pass
    RAGGED: (4, "[B,H,lengths,D], x.transpose(1, 2) of [B,lengths,H,D], or x.values() [T,H,D] with "
    "x.offsets() as q_starts"),
    1: (3, "[B,lengths,E]"),
}  # fmt: skip


def attend_jagged(q: Tensor, k: Tensor, v: Values, named: Named, options: Options) -> Outputs:
    """Attention of jagged q, k and v, each [B,H,j,D]: o [B,H,j,E] and statistics [B,H,j], with the
    lengths of q. Raises GraphError for other tensors."""
    if options[LAYOUTS] is not None:
        raise GraphError(
            "attention: outputs= is given with nested tensors, whose results lie as they do; leave "
            "it out, or pass x.values() [T,H,D]"
        )
    packed = pack_jagged(q, k, v, named)
    if options[ALIGN] is None and "q_lengths" in packed[3] and q.shape[RAGGED] == k.shape[RAGGED]:
        # lengths are alike, so that both alignments are one
        options = *options[:ALIGN], "top_left", *options[ALIGN + 1 :]
    outputs = attend_as(*packed, options)
    if isinstance(outputs, Tensor):
        return as_jagged(outputs, q)
    o, *more = outputs  # amax has no axis
    return as_jagged(o, q), *(as_jagged(x.transpose(0, 1), q) if x.ndim else x for x in more)


def pack_jagged(
    q: Tensor, k: Tensor, v: Values, named: Named
) -> tuple[Tensor, Tensor, Values, Named]:
    """The rows [T,H,D] of jagged tensors, as views, with their starts [B+1]. Raises GraphError."""
    if problem := jagged_problem(q, k, k if v is None else v):
        raise GraphError(f"attention: {problem}")
    if given := PACKING & named.keys():
        raise GraphError(
            f"attention: {min(given)} is given with nested tensors, which have their own lengths; "
            "leave it out, or pass x.values() [T,H,D]"
        )
    rows = None if v is None else jagged_rows(v)
    return jagged_rows(q), jagged_rows(k), rows, order_inputs({**named, **row_places(q, k)})


def row_places(q: Tensor, k: Tensor, axis: int = RAGGED) -> dict[str, Tensor]:
    """The starts of the rows of jagged tensors, and their lengths where there are holes."""
    places = {"q_starts": offsets_of(q)}
    if q.shape[axis] != k.shape[axis]:
        places["kv_starts"] = offsets_of(k)
    lengths = {"q_lengths": lengths_of(q), "kv_lengths": lengths_of(k)}
    return places | {name: x for name, x in lengths.items() if x is not None}


def jagged_problem(q: Tensor, k: Tensor, v: Tensor, axis: int = RAGGED) -> str | None:
    """Why these are not jagged tensors to attend with, and what to pass; None if so. axis: theirs
    of lengths, by FORMS."""
    axes, form = FORMS[axis]
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not x.is_nested:
            return f"{name} is dense {[*x.shape]} beside nested tensors; pass q, k and v nested"
        if x.layout != torch.jagged:
            return (
                f"{name} is nested with layout=torch.strided; pass "
                "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged)"
            )
        if x.ndim != axes or ragged_axis(x) != axis:
            return (
                f"{name} is nested with {x.ndim} axes and has its lengths on axis "
                f"{ragged_axis(x)}; pass {form}"
            )
    if k.shape[axis] != v.shape[axis]:
        return (
            "k and v have lengths of their own; build v with "
            "torch.nested.nested_tensor_from_jagged(values, offsets=k.offsets())"
        )
    return None


def require_pytorchs(query: Tensor, key: Tensor, named: Named, enable_gqa: bool) -> None:
    """Raise GraphError for a mask tensor and, as PyTorch, for other heads without `enable_gqa`."""
    if named.keys() & {"keep", "bias"}:
        raise GraphError(
            "attention: attn_mask does not fit nested tensors, which have lengths of their own; "
            "pass is_causal=True, or mask= to attn_graph.nn.functional.attention"
        )
    jagged = query.layout == key.layout == torch.jagged
    if jagged and not enable_gqa and query.shape[1] != key.shape[1]:
        raise GraphError(
            f"attention: query has {query.shape[1]} heads and key {key.shape[1]}; pass "
            "enable_gqa=True to share heads"
        )


def ragged_axis(x: Tensor) -> int:
    return cast(Any, x)._ragged_idx  # type: ignore[no-any-return]  # Any: of a private class


def offsets_of(x: Tensor) -> Tensor:
    return cast(Any, x).offsets()  # type: ignore[no-any-return]  # Any: as above


def lengths_of(x: Tensor) -> Tensor | None:
    """The lengths [B] of a jagged tensor with holes between its rows; None without holes."""
    return cast(Any, x).lengths()  # type: ignore[no-any-return]  # Any: as above


def rows_without_holes(x: Tensor) -> Tensor:
    """The rows [T,E] of a jagged tensor [B,j,E]: a view, or a copy with zeros in its holes."""
    rows, lengths, starts = x.values(), lengths_of(x), offsets_of(x)
    if lengths is None:
        return rows
    places = torch.arange(len(rows), device=rows.device)
    entries = torch.searchsorted(starts, places, right=True) - 1
    own = entries.clamp(0, len(lengths) - 1)
    inside = (entries == own) & (places < starts[own] + lengths[own])
    return rows.masked_fill(~inside[:, None], 0)


def jagged_rows(x: Tensor) -> Tensor:
    """The rows [T,H,D] of a jagged tensor [B,H,j,D], as a view."""
    return x.values().transpose(0, 1)


def as_jagged(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [T,H,...] as a jagged tensor [B,H,j,...] with the lengths of `like`, and its holes."""
    return nested_tensor_from_jagged(rows, offsets_of(like), lengths_of(like)).transpose(1, RAGGED)
