"""Pictures of the masks in a graph."""

from __future__ import annotations

from collections.abc import Iterator

from attn_graph.ir import ops
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.masks import Mask
from attn_graph.masks.pictures import picture_html
from attn_graph.printing.html import Html


def picture_masks(graph: Graph) -> Iterator[Html]:
    """The tiles of each mask before any data, as HTML; equal ones once."""
    masks = dict.fromkeys(each for eqn in graph.eqns for each in masks_of(graph, eqn))
    yield from (picture_html(*each) for each in masks)


def masks_of(graph: Graph, eqn: Eqn) -> Iterator[tuple[Mask, int, int]]:
    """The mask of an equation, if it has one, with the numbers of queries and keys."""
    op, node = eqn.op, eqn.op.attention
    shapes = [x.shape for x in op.padded([graph.types[i] for i in eqn.args])[:2]]
    if node is not None and node.mask is not None:
        yield node.mask, shapes[0][2], shapes[1][2]
    elif isinstance(op, ops.Mask):
        yield op.mask, shapes[0][2], shapes[0][3]
