"""One sequence of a packed batch: its place, and its form as an attention of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.packed import LEAVES, LENGTHS, Packed, and_parts
from attn_graph.ir.relative import RelativeBias
from attn_graph.masks import LEAVES as KNOWN_LEAVES
from attn_graph.masks import Band, Join, KeyLengths, Mask, Prefix, QueryLengths
from attn_graph.masks.canonical import EVERYTHING
from attn_graph.masks.joins import leaves


@final
@frozen
class Sizes:
    """The queries and keys of a sequence, and its lengths as the mask reads them."""

    rows: int
    keys: int
    q_length: int
    kv_length: int


@final
@frozen
class Span:
    """The place of one sequence: its batch entry, first row and first key, 0 in padded tensors.
    pages: of its keys."""

    entry: int
    row: int
    key: int
    sizes: Sizes
    pages: torch.Tensor | None = None


def is_separable(op: Packed) -> bool:
    """True if a sequence is an attention of its own: no step depends on its number in the batch, or
    on the longest sequence."""
    node = op.attention
    masks = () if node.mask is None else leaves(node.mask)
    known = all(type(leaf) in KNOWN_LEAVES for leaf in masks)
    return known and all(is_relative(m, op) for m in node.modifiers)


def is_relative(modifier: Modifier, op: Packed) -> bool:
    if isinstance(modifier, Alibi | RelativeBias):
        fixed = modifier.align == "top_left" or getattr(modifier, "places", False)
        named = {LENGTHS[side] for side in ending_sides(op)} <= {*modifier.ragged}
        return fixed or (modifier.align == "bottom_right" and named)
    return isinstance(modifier, SoftCap | Bias)


def ending_sides(op: Packed) -> tuple[str, ...]:
    """The sides with sequences ended by the mask: no more of them is read. Not queries [B,H,M,D]
    beside sinks: a row without keys has the sink for its lse."""
    parts, sinks = and_parts(op.attention.mask), op.attention.sinks
    ended = [side for side, leaf in LEAVES.items() if leaf in parts]
    return tuple(side for side in ended if side == "keys" or side in op.sides or not sinks)


def replace_lengths(mask: Mask, sizes: Sizes, ending: Sequence[str], most: dict[str, int]) -> Mask:
    """A mask with one sequence's lengths as numbers; the sides `ending` have no more rows and keys
    than these. most: the sizes without lengths."""
    match mask:
        case KeyLengths():
            return EVERYTHING if "keys" in ending else Prefix(max(0, sizes.kv_length))
        case QueryLengths() if "rows" in ending:
            return EVERYTHING
        case Band(low, high, ragged) if ragged:
            keys = sizes.kv_length if LENGTHS["keys"] in ragged else most["keys"]
            rows = sizes.q_length if LENGTHS["rows"] in ragged else most["rows"]
            low, high = (None if edge is None else edge + keys - rows for edge in (low, high))
            return Band(low, high)
        case Join():
            return type(mask)(*(replace_lengths(x, sizes, ending, most) for x in mask.parts))
    return mask


def expand_scales(op: Packed, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The operands, with a scale for each row of quantised ones."""
    x, first = [*operands], len(op.op.ranks)
    for n, scale in op.scales(operands).items():
        x[first + n - 1] = scale.expand(*x[n].shape[:-1], 1)
    return x


def cut_rows(x: torch.Tensor, first: int, n: int) -> torch.Tensor:
    """Rows of a packed tensor [T,H,D] as [1,H,n,D], or of a statistic [H,T] as [1,H,n], in one
    step: a short sequence takes little longer than views of it."""
    if x.ndim == 2:
        head, row = x.stride()
        return x.as_strided((1, x.shape[0], n), (0, head, row), x.storage_offset() + first * row)
    (_, H, D), (row, head, each) = x.shape, x.stride()
    return x.as_strided((1, H, n, D), (0, head, row, each), x.storage_offset() + first * row)
