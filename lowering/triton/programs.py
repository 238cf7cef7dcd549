"""Programs of a launch: their work, their order, and how they fill a GPU."""

from __future__ import annotations

from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Pass, Tiling
from attn_graph.lowering.problem import Problem
from attn_graph.machine.target import Target
from attn_graph.masks.places import Place, Strip
from attn_graph.masks.tiles import most_pairs
from attn_graph.spec.formulas import highest

FAR = 1 << 30  # beyond every position
WAVES = 8  # programs of a multiprocessor: with as many, long ones first, loads even out
INTERPRETED = 2, 2**13  # multiprocessors and bytes of cache of Triton's interpreter


@final
@frozen
class Programs:
    """The programs of a launch: for each of `heads` heads one of each block.

    costs: the tiles of each block.
    """

    costs: tuple[float, ...]
    heads: int

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.costs) * self.heads

    @property
    def total(self) -> float:
        """The tiles of all."""
        return self.heads * sum(self.costs)

    def makespan(self, processors: int) -> float:
        """The time from the first program's begin to the last one's end, if long ones come first:
        no order takes less than the mean, the longest program, or a whole number of waves."""
        waves = -(-self.count // processors)
        return max(self.total / processors, max(self.costs), waves * min(self.costs))


def static_strip(problem: Problem) -> Strip | None:
    """The mask as a strip of known bounds; None for other masks, or if data decide."""
    mask = problem.node.mask
    if mask is None:
        return Strip()
    if mask.needs:
        return None
    return mask.strip(Place(0, 0, 0, 0, problem.H, problem.M, problem.N))


def begins_last(problem: Problem, by_keys: bool) -> bool:
    """True if the last block has the most to do, of queries or of keys.

    Under a causal mask the last queries have, and the first keys. This is assumed if data decide. A
    mask bounded below alone is the other way around.
    """
    strip = static_strip(problem)
    below = strip is not None and strip.low is not None and strip.high is None
    return by_keys == below


def count_strip_tiles(
    strip: Strip, problem: Problem, tiling: Tiling, by_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of full and of mixed tiles of each block, of queries or of keys.

    As `key_tiles` and `query_tiles` of kernels/common.py count them; a key j sees query i if
    -high <= i - j <= -low.
    """
    low, high = or_far(strip.low, -FAR), or_far(strip.high, FAR)
    columns, rows = or_far(strip.keys, problem.N), or_far(strip.rows, problem.M)
    columns, rows = min(columns, problem.N), min(rows, problem.M)
    length, size, width = problem.M, tiling.block_m, tiling.block_n
    if by_keys:
        low, high, columns, rows = -high, -low, rows, columns
        length, size, width = problem.N, tiling.block_n, tiling.block_m
    first = torch.arange(0, length, size, device="cpu")
    end = (first + size).clamp(max=length)
    live = (first < rows) & (high >= low)
    start = (first + low).clamp(min=0)
    stop = (end.clamp(max=rows) + high).clamp(max=columns).where(live, start)
    stop = torch.maximum(stop, start)
    tiles = torch.where(stop > start, (stop + width - 1) // width - start // width, 0)
    sure = (end - 1 + low).clamp(min=0)
    surely = (first + high + 1).clamp(max=columns).where(live & (end <= rows), sure)
    full = surely.clamp(min=0) // width - torch.maximum(sure + width - 1, start) // width
    full = torch.minimum(full.clamp(min=0), tiles)
    return full, tiles - full


def or_far(bound: object, far: int) -> int:
    """A bound of a strip, or another if it has none."""
    return far if bound is None else int(bound)  # type: ignore[call-overload]


def estimate_tiles(
    flat: Problem, padded: Problem, tiling: Tiling, by_keys: bool, lists: torch.Tensor | None = None
) -> list[float]:
    """The tiles of each block of queries, or of keys.

    flat: all packed sequences as one. padded: each as long as the longest may be. lists: the tiles
    listed for a mask. If data decide, all blocks count as many tiles: enough for the most pairs
    kept by the mask.
    """
    strip = static_strip(padded)
    if flat != padded or (lists is None and strip is None):
        return mean_tiles(flat, padded, tiling, by_keys)
    if lists is not None:
        full, mixed = lists[:, 1], lists[:, 2]
    else:
        assert strip is not None
        full, mixed = count_strip_tiles(strip, padded, tiling, by_keys)
    tiles: list[float] = (full + mixed).tolist()
    return tiles


def mean_tiles(flat: Problem, padded: Problem, tiling: Tiling, by_keys: bool) -> list[float]:
    """The tiles of each block if all have as many."""
    p = padded
    length, size, other, width = flat.M, tiling.block_m, p.N, tiling.block_n
    if by_keys:
        length, size, other, width = flat.N, width, p.M, size
    pairs = most_pairs(p.node.mask, (p.B, p.H, p.G, p.M, p.N))
    seen = -(-other // width) * pairs / (p.B * p.H * p.M * p.N)
    return [max(1.0, seen)] * -(-length // size)


def count_programs(problem: Problem, tile: Tiling, by_keys: bool) -> int:
    """The number of programs without divided work."""
    p = problem
    if by_keys:
        return p.B * p.G * -(-p.N // tile.block_n)
    return p.B * p.H * -(-p.M // tile.block_m)


def processors_of(target: Target) -> int | None:
    """How many multiprocessors there are; None: not known."""
    return INTERPRETED[0] if target.interprets else target.multiprocessors


def describe_waves(count: int, target: Target) -> str:
    """ "3.9 waves": how often all multiprocessors are filled; "" for a GPU of unknown size."""
    processors = processors_of(target)
    return "" if processors is None else f"{count / processors:.3g} waves"


def heads_together(
    problem: Problem, target: Target, tiling: Tiling, pass_: Pass, splits: int, parts: int = 1
) -> int:
    """How many heads are walked at a time: their tensors fill half of the L2 cache.

    Programs read keys and values. Programs of dk and dv read the queries and the gradient of o of
    their share of a group, and of these one of `parts` walked side by side. At least about WAVES of
    programs run. Heads are shared out evenly.
    """
    p, group, by_keys = problem, problem.H // problem.G, pass_ == "key_gradient"
    heads, each, length = p.B * p.H * parts, group, -(-p.N // parts)
    other, block = p.M, tiling.block_m
    if by_keys:
        heads, each = p.B * p.G * splits * parts, -(-group // splits)
        length, other, block = -(-p.M // parts), p.N, tiling.block_n
    blocks, processors = -(-other // block), processors_of(target) or 0
    size = length * (p.D + p.E) * p.dtype.itemsize
    cache = INTERPRETED[1] if target.interprets else target.l2 or 0
    fit = cache // 2 // (size * each) if by_keys else cache // 2 * each // size
    groups = -(-heads // highest(1, fit, -(-WAVES * processors // blocks)))
    return -(-heads // groups)
