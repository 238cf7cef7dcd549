"""The tiles visited by FlashAttention 4's kernels: lists of mixed and of full ones, by the mask.

A list ascends, since kernels for sm_90 compare only the last listed tile with the number of keys. A
tile beyond the last query or key counts as mixed. A mask without tensors has exact lists; others
have lists valid for all data.
"""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.triton.tile_lists import blocks, classify_blocks
from attn_graph.masks.places import Block
from attn_graph.masks.tiles import classify_tiles

MIXED, FULL = 1, 2
WORTH = 0.05  # of all tiles: with fewer empty or full ones, kernels without lists are as fast
MOST_TILES = 2**24  # of one problem: their lists are made on a CPU, in seconds


@final
@frozen(eq=False)
class TileLists:
    """The tiles of each block of queries, or of keys: counts [1,1,blocks] and numbers
    [1,1,blocks,most], first of mixed ones and then of full ones; int32.

    tile: queries and keys of one tile. empty, total: how many tiles are empty, of how many.
    """

    tile: tuple[int, int]
    tensors: tuple[torch.Tensor, ...]
    empty: int
    total: int


def forward_tile(sm: int, problem: Problem) -> tuple[int, int]:
    """Queries and keys of a tile of the forward's lists: interface.py, _get_fwd_config."""
    p = problem
    if sm // 10 == 9:
        wide = p.D > 128 and p.E > 128
        return 128, (80 if p.D > 192 else 112) if wide else 128 if p.D <= 192 else 80
    two = p.M * (p.H // p.G) > 128 and p.E != 256
    return 256 if two else 128, 128


def backward_tile(sm: int, problem: Problem) -> tuple[int, int]:
    """The backward's tile; on sm_100 the programs run in pairs from D = 128 on."""
    p = problem
    if sm // 10 == 9:
        return 128, 128 if p.D <= 128 else 96 if p.D <= 192 else 64
    return 128, 256 if p.D >= 128 else 128


def classify(problem: Problem, tile: tuple[int, int], *, exact: bool) -> torch.Tensor:
    """0 for each empty tile, MIXED or FULL; int8 [blocks of queries, blocks of keys].

    exact: True if the mask is equal for all heads and batch entries, and reads no tensors.
    """
    p, mask = problem, problem.node.mask
    assert mask is not None
    if exact:
        whole = Block(range(1), range(1), range(p.M), p.H, p.M, p.N, {})
        kinds = classify_tiles(mask, whole, tile)
    else:
        kinds = classify_blocks(mask, p, Tiling(*tile, 4, 1))
    if p.M % tile[0]:
        kinds[-1] = kinds[-1].clamp(max=MIXED)
    if p.N % tile[1]:
        kinds[:, -1] = kinds[:, -1].clamp(max=MIXED)
    return kinds


def list_kind(kinds: torch.Tensor, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of tiles of a kind in each line, and their indices, ascending. The last axis has
    stride 1 even with size 1, as the package needs."""
    found = kinds == kind
    count = found.sum(1, dtype=torch.int32)
    most = max(1, int(count.max()))
    order = torch.argsort((~found).to(torch.int8), dim=1, stable=True)[:, :most]
    return count[None, None], order.to(torch.int32).contiguous().view(1, 1, -1, most)


def make_lists(problem: Problem, tile: tuple[int, int], *, exact: bool) -> TileLists | None:
    """The lists of a pass, in a gradient by keys; None if they would save nothing."""
    p = problem
    total = blocks(p.M, tile[0]) * blocks(p.N, tile[1])
    if total > MOST_TILES:
        return None
    kinds = classify(p, tile, exact=exact)
    empty, full = int((kinds == 0).sum()), int((kinds == FULL).sum())
    if empty + full < WORTH * total:
        return None
    lines = kinds if p.grad is None else kinds.mT.contiguous()
    return TileLists(tile, (*list_kind(lines, MIXED), *list_kind(lines, FULL)), empty, total)
