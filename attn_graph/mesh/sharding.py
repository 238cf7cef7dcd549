"""shard: divide an attention over the ranks of a mesh."""

from __future__ import annotations

from typing import get_args

import torch
from attrs import evolve

from attn_graph.errors import GraphError
from attn_graph.ir.binding import require_numbers
from attn_graph.ir.graph import Graph, check_graph
from attn_graph.ir.passes import simplify
from attn_graph.masks.moving import Box
from attn_graph.mesh.layout import SEQUENCES, Mesh, Method, Placement
from attn_graph.mesh.placing import place_ranks
from attn_graph.mesh.sharded import (
    Known,
    Sharded,
    check_attention,
    check_choice,
    check_known,
)
from attn_graph.mesh.traffic import heads_problem, sum_bytes


def shard(
    graph: Graph,
    mesh: Mesh,
    placements: Placement,
    *,
    method: Method | None = None,
    **known: torch.Tensor,
) -> Sharded:
    """One attention, divided over the ranks of a mesh. Nothing runs, and no process is needed.

    placements: what ranks divide. "batch" and "heads" need no messages. Of the sequence, queries
    and keys alike: "contiguous", rank r has the r-th part; "zigzag", of twice as many parts the
    r-th and the r-th from the end; "balanced", chunks by the pairs that the mask keeps of each, so
    that all ranks have the same work. Parts may differ by one where sizes don't divide, and by four
    under dropout, whose bits are those of one device.
    method: "ring": ranks send keys and values to those whose queries see them, one neighbour after
    the other; "gather": to all at once; "heads": the sequence is exchanged for heads and back. By
    default the one that sends the fewest bytes, in this order.
    known: tensors that the mask reads, by name, whole: documents, lengths. The plan has them then,
    and doesn't take them; what they empty is never sent.

    Raises GraphError for a graph that is not one attention, and for what can't be divided so.
    """
    check_graph(graph, "shard")
    require_numbers(graph, "shard")
    check_choice("placements", placements, get_args(Placement))
    if not isinstance(mesh, Mesh):
        raise GraphError(f"shard: mesh {mesh!r} is no Mesh; say ag.Mesh(8)")
    simple = simplify(graph)
    check_attention(simple)
    constants = tuple(Known.of(name, x) for name, x in sorted(known.items()))
    whole = Sharded(simple, mesh, placements, None, constants, ())
    check_known(whole, known)
    whole.piece(Box.whole(*whole.sizes))  # raises for what can't be moved
    placed = evolve(whole, holdings=tuple(place_ranks(whole)))
    return evolve(placed, method=choose_method(placed, method))


def choose_method(placed: Sharded, method: Method | None) -> Method | None:
    """The method that is wanted, or the one that sends least; None where nothing is sent.

    Raises GraphError for one that can't be.
    """
    if placed.placement not in SEQUENCES:
        if method is not None:
            raise GraphError(
                f"shard: method {method!r} is for a divided sequence, and placements "
                f"{placed.placement!r} leave it whole; leave method out"
            )
        return None
    if method is not None:
        check_choice("method", method, get_args(Method))
    problem = heads_problem(placed)
    if method == "heads" and problem:
        raise GraphError(f"shard: method 'heads' {problem}; say method='ring'")
    if method is None:
        known: list[Method] = ["ring"] if problem else ["ring", "heads"]
        return min(known, key=lambda name: sum_bytes(evolve(placed, method=name)))
    return method
