"""Pages that a cache has freed, since the mask's band hides their keys from all queries."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import attn_graph as ag
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.packed import LEAVES, LENGTHS, and_parts
from attn_graph.ir.storage.packing import Lengths
from attn_graph.masks.places import Block, Place

Tensors = Mapping[str, torch.Tensor]
GARBAGE = torch.tensor([-1, 10**6])  # in the table, for pages of hidden keys


def free_hidden(graph: ag.Graph, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of an attention over pages, with NaN in all rows of the pools whose keys the
    strips of the mask hide from every query, and no page of the pool for pages of such keys."""
    seen, table = seen_places(graph, tensors), tensors["pages"]
    n, page = tensors["k"].shape[:2]
    by_page = seen.unflatten(1, (-1, page))
    there = by_page.any(2)
    garbage = GARBAGE.to(table.dtype)[torch.arange(table.numel()).view(table.shape) % 2]
    used = torch.zeros(n, page, dtype=torch.bool)
    used.index_put_((table.where(there, 0).long(),), by_page, accumulate=True)
    pools = {name: spoil(tensors[name], ~used) for name in "kv" if name in tensors}
    freed = torch.empty_strided(table.shape, table.stride(), dtype=table.dtype)
    return {**tensors, **pools, "pages": freed.copy_(table.where(there, garbage))}


def spoil(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A pool lying alike, with NaN in some rows [n,P]."""
    return pool.clone().masked_fill_(rows[:, :, None, None], torch.nan)


def seen_places(graph: ag.Graph, tensors: Tensors) -> torch.Tensor:
    """The keys [B,N] that some query sees through all strips of the mask, place by place."""
    simple = simplify(graph)
    op, types = simple.eqns[-1].op, [simple.types[i] for i in simple.eqns[-1].args]
    q, k, *_ = op.packed.padded(types)
    (B, _, M, _), N = q.shape, k.shape[2]
    data = {name: x for name, x in tensors.items() if name in op.attention.slots.mask}
    if LENGTHS["rows"] in op.attention.slots.mask and LENGTHS["rows"] not in data:
        (data[LENGTHS["rows"]],) = Lengths().run(tensors["q_starts"])
    block = Block(range(B), range(1), range(M), 1, M, N, data)
    kept, entry = torch.ones(B, 1, M, N, dtype=torch.bool), Place(0, 0, 0, 0, 1, M, N, data)
    queries = torch.ones(B, 1, M, 1, dtype=torch.bool)
    for part in and_parts(op.attention.mask):
        if part == LEAVES["rows"]:
            queries = part.keep(Place.of(block, range(1)))
        elif part.strip(entry) is not None:
            kept = kept & part.keep(Place.of(block, range(N)))
    queries = queries | ~queries.any(2, keepdim=True)  # an entry without any hides nothing by that
    return (kept & queries).any(2)[:, 0]
