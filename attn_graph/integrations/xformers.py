"""xformers' attn_bias in this library's terms: `from_xformers`.

Classes are recognised by name, so xformers need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.errors import GraphError
from attn_graph.ir.terms.formulas import Formula
from attn_graph.masks import Align, Mask, SameSegment
from attn_graph.masks.canonical import diagonal_mask

Tensors = dict[str, torch.Tensor]
Bias = Any  # a tensor, or a value of one of xformers' classes


@final
@frozen
class Reach:
    """The reach of a block's queries, as of `Window`, and the start of the block's diagonal."""

    left: int | None
    right: int | None
    align: Align


def from_xformers(attn_bias: Bias) -> tuple[Mask | None, Tensors]:
    """Translate an attn_bias of xformers: a mask, and its tensors by their names here.

    A tensor is a bias, without a mask. Blocks become documents in one row, numbered by `q_segments`
    and `kv_segments` [1,T]; positions outside all blocks see nothing. If blocks lie on different
    diagonals, `diagonal` [T] gives each query its own. Lengths are read from the lists on the host.
    Raises GraphError for paged keys and for unknown classes.
    """
    name = type(attn_bias).__name__
    if isinstance(attn_bias, torch.Tensor):
        return None, {"bias": attn_bias}
    if name not in REACHES:
        known = ", ".join(REACHES)
        raise GraphError(f"from_xformers: {name} is not known; known are {known}, and tensors")
    align = REACHES[name]
    if align is None:  # every key
        reach = Reach(None, None, "top_left")
    elif hasattr(attn_bias, "window_left"):
        reach = Reach(attn_bias.window_left, attn_bias.window_right, align)
    else:  # the keys before a query, all or some
        window = getattr(attn_bias, "_window_size", 0)
        reach = Reach(window - 1 if window else None, 0, align)
    if hasattr(attn_bias, "q_seqinfo"):
        return join_blocks(attn_bias, reach)
    bias = {"bias": attn_bias._bias} if hasattr(attn_bias, "_bias") else {}
    return place_reach(reach, reach.align), bias


REACHES: dict[str, Align | None] = {  # where diagonals begin; None without one
    "LowerTriangularMask": "top_left",
    "LowerTriangularMaskWithTensorBias": "top_left",
    "LowerTriangularFromBottomRightMask": "bottom_right",
    "LowerTriangularFromBottomRightLocalAttentionMask": "bottom_right",
    "LocalAttentionFromBottomRightMask": "bottom_right",
    "BlockDiagonalMask": None,
    "BlockDiagonalCausalMask": "top_left",
    "BlockDiagonalCausalFromBottomRightMask": "bottom_right",
    "BlockDiagonalCausalLocalAttentionMask": "top_left",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "bottom_right",
    "BlockDiagonalPaddedKeysMask": None,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": "bottom_right",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "bottom_right",
    "BlockDiagonalLocalAttentionPaddedKeysMask": "bottom_right",
    "BlockDiagonalGappyKeysMask": None,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "bottom_right",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": "bottom_right",
}


def join_blocks(bias: Bias, reach: Reach) -> tuple[Mask, Tensors]:
    """The mask of blocks, each of them seen so far."""
    queries, keys = ([*intervals(info)] for info in (bias.q_seqinfo, bias.k_seqinfo))
    M, N = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    device = bias.q_seqinfo.seqstart.device
    tensors = {
        "q_segments": number_blocks(queries, M, device),
        "kv_segments": number_blocks(keys, N, device),
    }
    mask: Mask = SameSegment()
    offsets = [
        k0 - q0 + ((k1 - k0) - (q1 - q0) if reach.align == "bottom_right" else 0)
        for (q0, q1), (k0, k1) in zip(queries, keys, strict=True)
    ]
    if reach.left is None and reach.right is None:
        return mask, tensors
    if len({*offsets}) <= 1:
        return mask & place_reach(reach, "top_left", *offsets[:1]), tensors
    diagonal = [i + c for c, block in zip(offsets, queries, strict=True) for i in range(*block)]
    tensors["diagonal"] = torch.tensor(diagonal, dtype=torch.int32, device=device)
    where = (("diagonal", "i"),)
    if reach.right is not None:
        mask &= Formula(f"j <= diagonal + {reach.right}", where)
    if reach.left is not None:
        mask &= Formula(f"j >= diagonal - {reach.left}", where)
    return mask, tensors


def place_reach(reach: Reach, align: Align, offset: int = 0) -> Mask:
    """The reach on a diagonal `offset` to the right of the one named by `align`."""
    low = None if reach.left is None else offset - reach.left
    return diagonal_mask(low, None if reach.right is None else offset + reach.right, align)


def intervals(info: Any) -> Iterator[tuple[int, int]]:  # Any: xformers' description of lengths
    """The start and the end of each sequence; with padding and gaps it ends before the next
    begins.
    """
    lengths = getattr(info, "seqlen_py", None)
    for n, (start, stop) in enumerate(pairwise(info.seqstart_py)):
        yield start, start + lengths[n] if lengths is not None else stop


def number_blocks(blocks: list[tuple[int, int]], total: int, device: torch.device) -> torch.Tensor:
    """The block number of each of `total` positions, int32 [1,T]; -1 in none."""
    numbers = [-1] * total
    for n, (start, stop) in enumerate(blocks):
        numbers[start:stop] = [n] * (stop - start)
    return torch.tensor([numbers], dtype=torch.int32, device=device)
