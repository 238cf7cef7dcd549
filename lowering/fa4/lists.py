"""The tiles visited by FlashAttention 4's kernels: lists of mixed and of full ones, by the mask.

A list ascends, since kernels for sm_90 compare only the last listed tile with the number of keys. A
tile beyond the last query or key counts as mixed. A mask without tensors has exact lists, made with
the plan. For one with tensors each call makes them on the device, as Triton's kernels get theirs;
where that costs more than it could save, or can't be done, lists valid for all data stay.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Tiling
from attn_graph.lowering.codegen.tile_lists import MOST_TILES as MOST_IN_LIST
from attn_graph.lowering.codegen.tile_lists import DeviceLists, blocks
from attn_graph.lowering.problem import Problem
from attn_graph.lowering.rates import least_seconds, peak_of
from attn_graph.machine.target import Target
from attn_graph.machine.workspace import Scratch
from attn_graph.masks.places import Block, Untraceable
from attn_graph.sparsity.tiles import bound_tiles, classify_tiles, most_pairs

MIXED, FULL = 1, 2
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

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(x.shape) for x in self.tensors)


@final
@frozen(eq=False)
class MadeLists:
    """Such lists made by each call on the device: [B or 1, H or 1, ..]."""

    tile: tuple[int, int]
    made: DeviceLists

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.made.buffers[name].shape for name in self.made.kinds)

    @cached_property
    def scratch(self) -> Scratch:
        """The lists and their sources in the workspace."""
        return Scratch(self.made.buffers)


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
        kinds = classify_tiles(mask, Block(range(1), range(1), range(p.M), p.H, p.M, p.N, {}), tile)
    else:
        kinds = bound_tiles(mask, Block.whole(p.sizes), tile)
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
    if empty == full == 0:
        return None
    lines = kinds if p.grad is None else kinds.mT.contiguous()
    return TileLists(tile, (*list_kind(lines, MIXED), *list_kind(lines, FULL)), empty, total)


def plan_lists(problem: Problem, tile: tuple[int, int]) -> MadeLists | None:
    """The lists of a pass that data decide, in a gradient by keys. None if planning knows the
    tiles, intervals can't follow the mask, or a block has too many tiles."""
    p, mask = problem, problem.node.mask
    assert mask is not None
    by_keys = p.grad is not None
    most = blocks(p.M, tile[0]) if by_keys else blocks(p.N, tile[1])
    if not mask.needs or most > MOST_IN_LIST:
        return None
    names, tiling = tuple(p.by_role.mask), Tiling(*tile, 4, 1)
    try:
        made = DeviceLists.plan("lists", p, tiling, by_keys, names, by_kind=True)
    except Untraceable:
        return None
    return MadeLists(tile, made)


def may_repay(lists: MadeLists, problem: Problem, target: Target) -> bool:
    """True if kernels without lists would take longer than the launches that make them: lists
    can't save more. By published rates; True for a GPU without any."""
    p = problem
    widths = p.D + p.E if p.grad is None else 3 * p.D + 2 * p.E
    backward = p.grad is not None
    peak = peak_of(target, "fa4", p.dtype, max(p.D, p.E), backward=backward)
    bandwidth = target.bandwidth
    if peak is None or bandwidth is None:
        return True
    flops = 2.0 * most_pairs(p.node.mask, (p.B, p.H, p.G, p.M, p.N)) * widths
    read = sum(x.type.bytes for x in p.by_role.mask.values())
    launches = len(lists.made.launches)
    price = least_seconds(0, peak, read, bandwidth, launches=launches)
    return flops / peak > price
