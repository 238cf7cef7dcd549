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

LAYOUTS = GRAPH_OPTIONS.index("outputs")
RAGGED = 2  # the axis of lengths in [B,H,j,D]


def attend_jagged(q: Tensor, k: Tensor, v: Values, named: Named, options: Options) -> Outputs:
    """Attention of jagged q, k and v, each [B,H,j,D]: o [B,H,j,E] and statistics [B,H,j], with the
    lengths of q. Raises GraphError for other tensors."""
    if options[LAYOUTS] is not None:
        raise GraphError(
            "attention: outputs= is given with nested tensors, whose results lie as they do; leave "
            "it out, or pass x.values() [T,H,D]"
        )
    outputs = attend_as(*pack_jagged(q, k, v, named), options)
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
    starts = {"q_starts": offsets_of(q)}
    if q.shape[RAGGED] != k.shape[RAGGED]:
        starts["kv_starts"] = offsets_of(k)
    rows = None if v is None else jagged_rows(v)
    return jagged_rows(q), jagged_rows(k), rows, order_inputs({**named, **starts})


def jagged_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these are not jagged tensors [B,H,j,D] to attend with, and what to pass; None if so."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not x.is_nested:
            return f"{name} is dense {[*x.shape]} beside nested tensors; pass q, k and v nested"
        if x.layout != torch.jagged:
            return (
                f"{name} is nested with layout=torch.strided; pass "
                "torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged)"
            )
        if x.ndim != 4 or ragged_axis(x) != RAGGED:
            return (
                f"{name} is nested with {x.ndim} axes and has its lengths on axis "
                f"{ragged_axis(x)}; pass [B,H,lengths,D], x.transpose(1, 2) of [B,lengths,H,D], or "
                "x.values() [T,H,D] with x.offsets() as q_starts"
            )
        if cast(Any, x).lengths() is not None:
            return f"{name} is nested with holes between its rows; pass x.contiguous()"
    if k.shape[RAGGED] != v.shape[RAGGED]:
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


def jagged_rows(x: Tensor) -> Tensor:
    """The rows [T,H,D] of a jagged tensor [B,H,j,D], as a view."""
    return x.values().transpose(0, 1)


def as_jagged(rows: Tensor, like: Tensor) -> Tensor:
    """Rows [T,H,...] as a jagged tensor [B,H,j,...] with the lengths of `like`."""
    return nested_tensor_from_jagged(rows, offsets_of(like)).transpose(1, RAGGED)
