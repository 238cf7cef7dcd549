"""What each equation of a graph computes and moves, from its masks and shapes.

Flops count matrix products over the pairs of query and key kept by the mask, 2 flops for a product
and a sum. Forward, q k^T and p v: 2 (D + E) a pair. Backward, q k^T computed again, dp = do v^T,
dv, dq and dk: 2 (3 D + 2 E) a pair, 2.5 times the forward if D = E. Forward mode with tangents of
q, k and v: 2 (3 D + 3 E), three times the forward. This is the count of FlashAttention's papers
(arXiv 2307.08691, section 4.1) and of its benchmarks, with the mask exact; they take half for
causal. Softmax and modifiers are not counted.

Bytes count each operand and result of an attention once: of q, and tensors with its rows, only rows
that see a key; of k and v only keys that are seen; of a bias [B,H,M,N] at most one element a pair.
No kernel can move less, whatever its caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.storage.packing import Lengths, row_count
from attn_graph.ir.transforms.gradient_ops import WeighT
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.lowering.problem import Facts, facts_of, operand_specs
from attn_graph.machine.cache import remember
from attn_graph.masks import Mask
from attn_graph.sparsity.tiles import Coverage, Sizes, count_pairs
from attn_graph.spec import TensorSpec, ValueType

Tensors = Mapping[str, torch.Tensor]


def mask_sources(graph: Graph, eqn: Eqn) -> dict[str, tuple[str, bool]]:
    """The input behind each tensor of an attention's mask, by its name there; True if the input has
    the starts of sequences, and the mask reads their lengths."""
    node: Attention | None = eqn.op.attention
    if node is None:
        return {}
    starts = {outs[0]: e.args[0] for e, outs in graph.numbered if isinstance(e.op, Lengths)}
    own = node.split(eqn.args[: len(node.takes)]).mask
    sources = {name: (starts.get(i, i), i in starts) for name, i in own.items()}
    names = [i.name for i in graph.inputs]
    return {name: (names[i], diff) for name, (i, diff) in sources.items() if i < len(names)}


def mask_data(graph: Graph, eqn: Eqn, given: Tensors) -> Tensors:
    """The tensors read by an attention's mask, by name there, if their inputs are given."""
    sources = mask_sources(graph, eqn) if given else {}
    return {
        name: given[source].diff() if diff else given[source]
        for name, (source, diff) in sources.items()
        if source in given
    }


@final
@frozen
class Share:
    """One equation's part of the cost; pairs and places if it is an attention."""

    flops: int
    bytes: int
    pairs: int = 0
    places: int = 0
    exact: bool = True
    estimated: bool = False


def known_shares(facts: Facts) -> tuple[Share, ...]:
    """Flops of the products that masks leave, and bytes of each operand and result once: of each
    equation, before any data."""
    return tuple(shares_of(facts.graph, {}))


def count_shares(graph: Graph, given: Tensors) -> tuple[Share, ...]:
    return tuple(shares_of(graph, given)) if given else facts_of(graph).once(known_shares)


def shares_of(graph: Graph, given: Tensors) -> Iterator[Share]:
    """Each equation's part of the cost. An unread result is not written."""
    read, types = {*graph.outputs, *(i for eqn in graph.eqns for i in eqn.args)}, graph.types
    for eqn, outs in graph.numbered:
        operands = operand_specs(graph, eqn)
        written = sum([types[i].bytes for i in outs if i in read])
        if isinstance(eqn.op, Fused):
            data = mask_data(graph, eqn, given)
            yield attention_share(eqn.op, operands, data, written)
        else:
            moved = sum(distinct_elements(x) * x.dtype.itemsize for x in operands) + written
            yield Share(product_flops(eqn, [x.type for x in operands]), moved)


def product_flops(eqn: Eqn, operands: Sequence[ValueType]) -> int:
    """Flops of an equation outside attentions; 0 unless it is a matrix product."""
    match eqn.op:
        case ops.Scores():
            return 2 * prod(eqn.outs[0].shape) * operands[0].shape[-1]
        case ops.Weigh() | WeighT():
            return 2 * prod(operands[0].shape) * operands[1].shape[-1]
        case _:
            return 0


def distinct_elements(spec: TensorSpec) -> int:
    """The number of memory elements read by a spec: an axis of stride 0 has one."""
    if 0 in spec.shape:
        return 0
    pairs = [*zip(spec.shape, spec.strides, strict=True)]
    reach = 1 + sum([(n - 1) * stride for n, stride in pairs])  # less if axes overlap
    return min(reach, prod([n for n, stride in pairs if stride]))


def attention_share(
    whole: Fused, operands: Sequence[TensorSpec], data: Tensors, written: int
) -> Share:
    """An attention's part of the cost, or its gradient's. written: bytes of the results."""
    given, packed, node = [x.type for x in operands], whole.packed, whole.attention
    op: Fused = packed.op if packed else whole
    types = whole.padded(given)
    (B, H, M, D), (_, G, N, _), E = types[0].shape, types[1].shape, types[2].shape[3]
    rows = B * M
    if packed and "rows" in packed.sides:
        rows = row_count(given[0].shape)
        M = min(M, rows)
    places = H * rows * N
    sizes = (packed.fewest(given) if packed else B, H, G, M, N)
    coverage = count_pairs_once(node.mask, sizes)
    if data:
        own = count_pairs(node.mask, (B, H, G, M, N), data)
        coverage = own if own.exact or own.pairs <= coverage.pairs else coverage
    most: list[int | None] = [coverage.queries * D, coverage.keys * D, coverage.keys * E]
    most[2] = 0 if node.v_in_k else most[2]  # read with k
    read = [data for modifier in node.modifiers for data in modifier.needs.values()]
    most += [coverage.pairs if {"i", "j"} <= {*data.axes} else None for data in read]
    most += [None] * (len(node.takes) - len(most))
    each = {"bhie": coverage.queries * E, "bhi": coverage.queries, "bhij": coverage.pairs}
    more = op.takes[len(most) :]
    most += [each[role.axes] if role.like is None else most[role.like] for role in more]
    moved = sum(
        (distinct_elements(x) if cap is None else min(distinct_elements(x), cap)) * x.dtype.itemsize
        for x, cap in zip_longest(operands, most)
    )
    flops = 2 * coverage.pairs * summed_widths(op, D, E)
    counts = min(coverage.pairs, places), places, coverage.exact, coverage.estimated
    return Share(flops, moved + written, *counts)


@remember
def count_pairs_once(mask: Mask | None, sizes: Sizes) -> Coverage:
    """The pairs kept by a mask without its data, cached for all passes and targets."""
    return count_pairs(mask, sizes, {})


def summed_widths(op: Op, D: int, E: int) -> int:
    """The sum of the head sizes of all matrix products of an attention or a derivative of it."""
    match op:
        case AttentionGrad():
            return gradient_widths(op, D, E) - D * op.attention.keeps
        case AttentionJvp(tangents=(tq, tk, tv, *_), grad=None):
            return D * (1 + tq + tk) + E * (2 + tv)
        case AttentionJvp(tangents=(tq, tk, tv, *_), grad=AttentionGrad() as grad):
            cotangents = E * (2 * grad.with_do + 2 * op.with_tdo + (tv and grad.with_do))
            return D * (1 + tq + tk) + cotangents + D * (2 + tk + tq)
        case _:
            return D + E


def gradient_widths(op: AttentionGrad, D: int, E: int) -> int:
    """The sum of head sizes over a gradient's products; unwanted gradients have none."""
    wants = dict(zip(op.attention.roles, op.wants, strict=True))
    dv = E if wants["v"] and op.with_do else 0
    others = any(wanted for role, wanted in wants.items() if role != "v")
    dp = E if others and op.with_do else 0
    return D + dp + dv + D * wants["q"] + D * wants["k"]
