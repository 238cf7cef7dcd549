"""How many programs a launch has, in what order they begin, and how evenly they fill a GPU.

The model of a GPU: places, as many as its multiprocessors hold programs at once. Programs begin in
order, each on the place that is free first, those of other multiprocessors before the second one of
each. One takes the time of its tiles, a masked one MIXED times a full one, and that of START scores
for what it does once. Time is in full tiles of a place, while all places of the multiprocessor are
taken; a program that is left alone on one that holds two is faster, see `LONE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import ceil
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.tilings import Pass, Tiling, padded_head_size, table_arch
from attn_graph.lowering.problem import Problem
from attn_graph.machine.target import Target
from attn_graph.masks.places import Place, Strip
from attn_graph.masks.tiles import most_pairs
from attn_graph.spec.formulas import highest

MIXED = 1.5  # times a full tile, by the instructions of both loops
# Scores in whose time a program begins and ends, by row of the table: by lowering/triton/predict.py
# 0.2 to 0.6 tiles of 128 x 128 on sm_80, 0.3 to 0.9 on 90, 1.6 to 3.2 on 100, 0.2 to 0.5 on 120.
START = {80: 7 * 2**10, 90: 3 * 2**12, 100: 2**15, 120: 3 * 2**11}
# Of START, what each further head costs a program that copies tiles ahead: its first scores, its
# last sums and its results, by machine code 0.3 tiles.
AGAIN = 0.4
# Times as long takes a multiprocessor for a score that has four warps as one that has eight, by the
# same: 1.25 to 1.35 where one of two programs is left, 1.17 to 1.53 where just one fits.
LONE = 1.3
FULL = 8  # warps with which a multiprocessor is at full speed
REGISTERS = 255  # of a thread: what the kernels' tiles are chosen to use up
THREADS = 32  # of a warp
FILE = 65536  # registers of a multiprocessor
SYSTEM = 1024  # bytes of shared memory that CUDA adds to a program's
FAR = 1 << 30  # beyond every position
L2 = 2**25  # bytes of a cache of unknown size: less than any GPU has whose size is known
WAVES = 4  # of programs that heads walked together have at least, so that long ones come first
MANY = 8  # waves of programs that even out by themselves
INTERPRETED = 2, 2**13  # places and bytes of cache of Triton's interpreter: heads are in groups


Range = tuple[float, int, int]  # when places are free, the first of them, and how many they are


@final
@frozen
class Places:
    """Where programs run: so many multiprocessors that hold one program each, or two.

    Place n and, of two, place n + processors are on one multiprocessor.
    """

    processors: int
    each: int = 1

    @property
    def count(self) -> int:
        """How many programs run at once."""
        return self.processors * self.each

    def last_end(self, ranges: Sequence[Range]) -> float:
        """When the last program ends. ranges: by place, when its programs would end if the place
        beside it stayed taken.

        It does until no program is left to begin; then one that is alone takes LONE / 2 of the time
        for what is left of it, and goes on from the other's end.
        """
        if self.each == 1:
            return max(end for end, _, _ in ranges)
        ends = [0.0] * self.count
        for end, first, number in ranges:
            ends[first : first + number] = [end] * number
        pairs = {*zip(ends[: self.processors], ends[self.processors :], strict=True)}
        return max(min(pair) + LONE / 2 * abs(pair[0] - pair[1]) for pair in pairs)


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

    def in_order(self) -> Iterator[tuple[float, int]]:
        """Costs in the order in which programs begin, and how many in a row have each."""
        if min(self.costs) == max(self.costs):
            yield self.costs[0], self.count
            return
        for earlier in range(0, self.heads, self.together):
            heads = min(self.together, self.heads - earlier)
            for cost in self.costs:
                yield cost, heads

    def makespan(self, places: Places) -> float:
        """The time from the first program's begin to the last one's end, by simulation: of places
        that are free at the same time, the first is taken."""
        free: list[Range] = [(0.0, 0, places.count)]
        for cost, number in self.in_order():
            while number:
                time, first, count = heappop(free)
                taken = min(count, number)
                if taken < count:
                    heappush(free, (time, first + taken, count - taken))
                heappush(free, (time + cost, first, taken))
                number -= taken
        return places.last_end(free)

    def quick_makespan(self, places: Places) -> float:
        """The same, estimated where there are so many programs that simulating takes long."""
        if self.count <= MANY * places.count:
            return self.makespan(places)
        return self.total / places.count + min(self.costs) / 2

    def least_makespan(self, places: Places) -> float:
        """What the makespan is not below, without simulation."""
        alone = LONE / 2 if places.each > 1 else 1.0
        return max(self.total / places.count, alone * max(self.costs))

    def balance(self, places: Places) -> float:
        """The makespan over the time that as many places need with nothing to wait for."""
        return self.makespan(places) / (self.total / places.count)

    def figures(self, places: Places) -> str:
        """ "3.9 waves, balance 1.02"."""
        waves = self.count / places.count
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


def start_of(target: Target, tiling: Tiling) -> float:
    """What a program does once, in full tiles."""
    return START[table_arch(target.sm)] / (tiling.block_m * tiling.block_n)


def schedule_programs(
    costs: Sequence[float], start: float, heads: int, each: int, together: int, parts: int = 1,
    again: float = 0.0,
) -> Programs:  # fmt: skip
    """Programs that each walk the tiles of `each` heads, or one of `parts` of these.

    costs: of one head's blocks, in order. start: see `start_of`; again: the same of each further
    head. heads: as many as there are programs of each block.
    """
    start += (each - 1) * again
    walked = [each * (cost if parts == 1 else ceil(cost / parts)) for cost in costs]
    spare = sum(walked) - each * sum(costs) / parts
    return Programs(tuple([x + start for x in walked]), heads, together, spare * heads)


def places_of(problem: Problem, target: Target, tiling: Tiling, pass_: Pass) -> Places | None:
    """Where its programs run, estimated; None for a GPU of unknown size.

    Each thread is taken to use all REGISTERS, and shared memory to hold a tile of what a program
    reads once, q, q and do, or k and v, and as many of what it walks as there are stages.
    """
    if target.interprets:
        return Places(INTERPRETED[0])
    if target.multiprocessors is None:
        return None
    width = padded_head_size(problem.D) + padded_head_size(problem.E)
    own, other = tiling.block_m, tiling.block_n
    if pass_ == "key_gradient":
        own, other = other, own
    once = padded_head_size(problem.D) if pass_ == "forward" else width
    shared = problem.dtype.itemsize * (own * once + tiling.stages * other * width) + SYSTEM
    fit = (target.shared_memory_per_sm or 0) // shared
    held = FILE // (REGISTERS * THREADS * tiling.warps)
    return Places(target.multiprocessors, max(1, min(fit, held)))


def heads_together(
    problem: Problem, target: Target, tiling: Tiling, pass_: Pass, splits: int, parts: int = 1
) -> int:
    """How many heads are walked at a time: those whose tensors half of the L2 cache holds.

    Programs read keys and values, or, of dk and dv, queries and the gradient of o of their share of
    a group, and of these one of `parts` that are walked side by side. About WAVES of programs at
    least; no heads are left over that are much fewer.
    """
    p, group, by_keys = problem, problem.H // problem.G, pass_ == "key_gradient"
    heads, each, length = p.B * p.H * parts, group, -(-p.N // parts)
    other, block = p.M, tiling.block_m
    if by_keys:
        heads, each = p.B * p.G * splits * parts, -(-group // splits)
        length, other, block = -(-p.M // parts), p.N, tiling.block_n
    blocks, places = -(-other // block), places_of(p, target, tiling, pass_)
    size = length * (p.D + p.E) * p.dtype.itemsize
    cache = INTERPRETED[1] if target.interprets else target.l2 or L2
    fit = cache // 2 // (size * each) if by_keys else cache // 2 * each // size
    least = -(-WAVES * places.count // blocks) if places else 0
    groups = -(-heads // highest(1, fit, least))
    return -(-heads // groups)
