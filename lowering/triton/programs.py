"""How many programs a launch has, in what order they begin, and how evenly they fill a GPU.

The model of a GPU: places, as many as its multiprocessors hold programs at once. Programs begin in
order, each on the place that is free first. One takes the time of its tiles, a masked one MIXED
times a full one, and that of START full tiles for what it does once. Time is in full tiles.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import ceil
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Tiling, padded_head_size
from attn_graph.lowering.problem import Problem
from attn_graph.machine.target import Target
from attn_graph.masks.places import Place, Strip
from attn_graph.masks.tiles import most_pairs
from attn_graph.spec.formulas import highest

MIXED = 1.5  # times a full tile, by the instructions of both loops
START = 1.5 * 128 * 128  # scores in whose time a program begins and ends
REGISTERS = 255  # of a thread: what the kernels' tiles are chosen to use up
THREADS = 32  # of a warp
FILE = 65536  # registers of a multiprocessor
FAR = 1 << 30  # beyond every position
L2 = 2**25  # bytes of a cache of unknown size: less than any GPU has whose size is known
WAVES = 4  # of programs that heads walked together have at least, so that long ones come first
MANY = 8  # waves of programs that even out by themselves
INTERPRETED = 2, 2**13  # places and bytes of cache of Triton's interpreter: heads are in groups


@final
@frozen
class Programs:
    """The programs of a launch as they begin.

    costs: of a program of each block, in order. heads: how many have these blocks. together: how
    many of them are walked at a time, see `place_program`. spare: of these costs, what nobody has
    to do: the last part of a block has less than the others.
    """

    costs: tuple[float, ...]
    heads: int
    together: int
    spare: float = 0.0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.costs) * self.heads

    @property
    def total(self) -> float:
        """The time of all, one after another."""
        return sum(self.costs) * self.heads - self.spare

    def in_order(self) -> Iterator[float]:
        """The cost of each, in the order in which they begin."""
        for earlier in range(0, self.heads, self.together):
            heads = min(self.together, self.heads - earlier)
            for cost in self.costs:
                yield from repeat(cost, heads)

    def makespan(self, places: int) -> float:
        """The time from the first program's begin to the last one's end, by simulation."""
        if self.count <= places or min(self.costs) == max(self.costs):
            return max(self.costs) * -(-self.count // places)
        ends = [0.0] * places
        for cost in self.in_order():
            heapq.heapreplace(ends, ends[0] + cost)
        return max(ends)

    def quick_makespan(self, places: int) -> float:
        """The same, estimated where there are so many programs that simulating takes long."""
        if self.count <= MANY * places:
            return self.makespan(places)
        return self.total / places + min(self.costs) / 2

    def balance(self, places: int) -> float:
        """The makespan over the time that as many places need with nothing to wait for."""
        return self.makespan(places) / (self.total / places)

    def figures(self, places: int) -> str:
        """ "3.9 waves, balance 1.02"."""
        waves = self.count / places
        return f"{waves:.{2 if waves < 10 else 0}f} waves, balance {self.balance(places):.2f}"


def static_strip(problem: Problem) -> Strip | None:
    """The mask as a strip of known bounds; None where it is none, or data decide."""
    mask = problem.node.mask
    if mask is None:
        return Strip()
    if mask.needs:
        return None
    return mask.strip(Place(0, 0, 0, 0, problem.H, problem.M, problem.N))


def begins_last(problem: Problem, by_keys: bool) -> bool:
    """Whether the last block has the most to do, of queries or of keys.

    Under a causal mask the last queries have, and the first keys. So it is taken to be where data
    decide; bounded below alone, it is the other way around.
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
    """A bound of a strip, or another where there is none."""
    return far if bound is None else int(bound)  # type: ignore[call-overload]


def block_costs(
    problem: Problem, tiling: Tiling, by_keys: bool, lists: torch.Tensor | None
) -> list[float] | None:
    """The tiles of each block in the order in which blocks begin, a mixed one as MIXED of them.

    lists: the tiles that a mask was listed to leave. None where data decide.
    """
    strip = static_strip(problem)
    if lists is not None:
        full, mixed = lists[:, 1], lists[:, 2]
    elif strip is not None:
        full, mixed = count_strip_tiles(strip, problem, tiling, by_keys)
    else:
        return None
    costs: list[float] = (full + MIXED * mixed).tolist()
    reverse = lists is None and begins_last(problem, by_keys)
    return costs[::-1] if reverse else costs


def expected_costs(
    flat: Problem, padded: Problem, tiling: Tiling, by_keys: bool, lists: torch.Tensor | None
) -> list[float]:
    """The same, and where data decide the most that blocks have to do on average.

    flat: with all packed sequences as one. padded: with each as long as the longest may be.
    """
    costs = block_costs(padded, tiling, by_keys, lists) if flat == padded else None
    return costs or mean_costs(flat, padded, tiling, by_keys)


def mean_costs(flat: Problem, padded: Problem, tiling: Tiling, by_keys: bool) -> list[float]:
    """What each block has to do if all do as much: as many pairs as the mask keeps at most."""
    p = padded
    length, size, other, width = flat.M, tiling.block_m, p.N, tiling.block_n
    if by_keys:
        length, size, other, width = flat.N, width, p.M, size
    pairs = most_pairs(p.node.mask, (p.B, p.H, p.G, p.M, p.N))
    seen = -(-other // width) * pairs / (p.B * p.H * p.M * p.N)
    return [max(1.0, seen)] * -(-length // size)


def schedule_programs(
    costs: Sequence[float], tiling: Tiling, heads: int, each: int, together: int, parts: int = 1
) -> Programs:
    """Programs that each walk the tiles of `each` heads, or one of `parts` of these.

    costs: of one head's blocks, in order. heads: as many as there are programs of each block.
    """
    start = START / (tiling.block_m * tiling.block_n)
    walked = [each * (cost if parts == 1 else ceil(cost / parts)) for cost in costs]
    spare = sum(walked) - each * sum(costs) / parts
    return Programs(tuple(x + start for x in walked), heads, together, spare * heads)


def places_of(problem: Problem, target: Target, tiling: Tiling) -> int | None:
    """How many programs run at once, estimated; None for a GPU of unknown size.

    Each thread is taken to use all REGISTERS, and shared memory to hold a tile of one side and as
    many of the other as there are stages.
    """
    if target.interprets:
        return INTERPRETED[0]
    if target.multiprocessors is None:
        return None
    width = padded_head_size(problem.D) + padded_head_size(problem.E)
    sides = sorted((tiling.block_m, tiling.block_n))
    shared = problem.dtype.itemsize * width * (sides[1] // 2 + tiling.stages * sides[0])
    fit = (target.shared_memory_per_sm or 0) // shared
    held = FILE // (REGISTERS * THREADS * tiling.warps)
    return target.multiprocessors * max(1, min(fit, held))


def heads_together(
    problem: Problem, target: Target, tiling: Tiling, by_keys: bool, splits: int, parts: int = 1
) -> int:
    """How many heads are walked at a time: those whose tensors half of the L2 cache holds.

    Programs read keys and values, or, by_keys, queries and the gradient of o of their share of a
    group, and of these one of `parts` that are walked side by side. At least WAVES of programs; no
    heads are left over that are much fewer.
    """
    p, group = problem, problem.H // problem.G
    heads, each, length = p.B * p.H * parts, group, -(-p.N // parts)
    other, block = p.M, tiling.block_m
    if by_keys:
        heads, each = p.B * p.G * splits * parts, -(-group // splits)
        length, other, block = -(-p.M // parts), p.N, tiling.block_n
    blocks = -(-other // block)
    size = length * (p.D + p.E) * p.dtype.itemsize
    cache = INTERPRETED[1] if target.interprets else target.l2 or L2
    fit = cache // 2 // (size * each) if by_keys else cache // 2 * each // size
    least = -(-WAVES * (places_of(p, target, tiling) or 0) // blocks)
    groups = -(-heads // highest(1, fit, least))
    return -(-heads // groups)
