"""A mask's caps for runs of whole heads, held for the next call if little decides them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import repeat
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.hiding import caps_of
from attn_graph.lowering.cpu.row_core import Change
from attn_graph.lowering.cpu.tile_grid import (
    TileGrid,
    count_row_scores,
    has_few_scores,
)
from attn_graph.lowering.folding import tells_rows_apart
from attn_graph.lowering.problem import Problem
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.masks import Keep
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.places import Place
from attn_graph.spec import TensorSpec

MOST_NUMBERS = 64  # of a tensor read as numbers by a call
RECENT, MOST_HELD_CAPS = 16, 2**20  # masks with held caps, with plans; bytes of each
MOST_CAPS = 2**23  # bytes of caps made by a call
FEW_ROWS, MOST_CAPPED = 64, 2**16  # of a key/value head; scores of a query head
ROUND = 16  # keys: of sizes between, products in half precision take longer
COPIED = 4  # times as long as a dense product: oneDNN copies operands with gaps
# The least multiplications of q k^T of a batch entry computed by itself; a number of k is read in
# the time of PER_NUMBER. With fewer, one product of many entries is faster.
LEAST_CUT, PER_NUMBER = 2**21, 16
Numbers = tuple[tuple[int, ...], ...]


@final
@frozen(eq=False)
class Hiding:
    """Hides places of a run's scores.

    caps: upper bounds of the scores; they broadcast, viewed as `shape` unless it is None. blind:
    True if a row may see no key. keys: for each run of batch entries its keys from the first to the
    last that counts, and True if some of them do not count for some row; empty if all are read.
    """

    caps: torch.Tensor
    shape: tuple[int, ...] | None
    blind: bool
    keys: Sequence[tuple[slice, bool]] = ()

    def hide(self, s: torch.Tensor) -> None:
        """Hide places of s [n,L,S]."""
        (s if self.shape is None else s.view(self.shape)).clamp_(max=self.caps)

    def entries(self, batch: int) -> Iterable[tuple[Change | None, slice | None]]:
        """For runs of `batch` entries, one after the other, the function to hide their scores, and
        their keys; None: all."""
        each = self.caps.split(batch) if len(self.caps) > 1 else repeat(self.caps)
        if not self.keys:
            return ((evolve(self, caps=caps).hide, None) for caps in each)
        pairs = zip(self.keys, each, strict=False)
        return [(self.cut(caps, keys) if hides else None, keys) for (keys, hides), caps in pairs]

    def cut(self, caps: torch.Tensor, keys: slice) -> Change:
        """The function to hide the scores of some keys."""
        assert self.shape is not None
        shape = (*self.shape[:3], keys.stop - keys.start)
        own = caps[..., keys] if caps.shape[3] > 1 else caps
        return evolve(self, caps=own, shape=shape).hide

    @property
    def reach(self) -> int | None:
        """How many keys are read at most; None: all."""
        return max((keys.stop for keys, _ in self.keys), default=None)


@final
@frozen(eq=False)
class RunMask:
    """The mask of a bare attention, for runs of whole heads.

    batch: the batch entries of a run that reads its own keys alone, if they are known; 0: runs read
    all keys. blind: True if the mask may hide all of a row. holds: True if the caps are held: the
    mask is one of ours, and reads no tensors, or lengths of few batch entries, shared by the layers
    of a model in turn.
    """

    tiles: TileGrid
    batch: int
    blind: bool
    holds: bool

    @classmethod
    def of(cls, tiles: TileGrid, batch: int = 0) -> RunMask | None:
        """None without a mask."""
        p, mask = tiles.problem, tiles.problem.node.mask
        if mask is None:
            return None
        few = not p.mask_reads or count_caps(p) * p.dtype.itemsize <= MOST_HELD_CAPS
        return cls(tiles, batch, p.has_blind_rows, few and reads_numbers(p))

    # What calls ask of the problem, answered once

    @cached_property
    def caps(self) -> bool:
        return caps_entries(self.tiles.problem)

    @cached_property
    def cuts(self) -> bool:
        return cuts_entries(self.tiles.problem)

    @cached_property
    def few(self) -> bool:
        return has_few_scores(self.tiles.problem)

    @cached_property
    def lone(self) -> bool:
        """True if a tensor of the call is the mask."""
        return isinstance(self.tiles.problem.node.mask, Keep)

    def read(self, operands: Sequence[torch.Tensor]) -> Hiding:
        """The hiding of a call. operands: the attention's own."""
        plain, data = self.is_plain(operands[0]), operands[3:]
        if plain and self.holds and not (data and is_traced()):
            return recent_hiding(self, tuple([(*x.tolist(),) for x in data]))
        keep = self.keep_of(operands)
        if plain and not is_traced():
            return self.hiding(keep, self.hides_rows(keep), self.cuts)
        return self.hiding(keep, self.blind)

    def blinds(self, operands: Sequence[torch.Tensor]) -> bool:
        if not self.blind:
            return False
        if self.holds:
            return self.read(operands).blind
        known = self.is_plain(operands[0]) and not is_traced()
        return not known or self.hides_rows(self.keep_of(operands))

    def is_plain(self, q: torch.Tensor) -> bool:
        return type(q) is torch.Tensor and q.is_cpu

    def hides_rows(self, keep: torch.Tensor) -> bool:
        """True if all of a row is hidden. keep: of all places, broadcasting. PyTorch's `any` takes
        up to ten times as long as its largest byte."""
        return self.blind and not bool(keep.view(torch.uint8).amax(-1).all())

    def keep_of(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.lone:
            return operands[3]
        return self.keep(self.tiles.places(self.by_name(operands[3:]), operands[0]))

    def by_name(self, data: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.tiles.problem.node.data_names[1], data, strict=True))

    def keep(self, at: Place) -> torch.Tensor:
        """The mask at all places: booleans that broadcast to [B,H,M,N]."""
        mask = self.tiles.problem.node.mask
        assert mask is not None
        keep = torch.as_tensor(mask.keep(at), dtype=torch.bool, device=at.j.device)
        return keep[(None,) * (4 - keep.ndim)]  # of one block it has no axes

    def hiding(self, keep: torch.Tensor, blind: bool, cuts: bool = False) -> Hiding:
        """Hides the places not kept. cuts: True if runs read their own keys alone."""
        p, caps = self.tiles.problem, caps_of(keep, self.tiles.problem.dtype)
        keys = tuple(find_hulls(p, keep, self.batch)) if cuts and self.batch else ()
        if self.caps and (self.batch or not self.few):
            return Hiding(caps, (-1, p.H, p.M, p.N), blind, keys)
        if self.few:
            caps = caps.expand(p.B, p.H, p.M, p.N).reshape(p.B * p.G, -1, p.N).contiguous()
            return Hiding(caps, None, blind)
        shape = None if p.H == p.G else (-1, p.M, p.N)
        return Hiding(caps.view(caps.shape[-2:]), shape, blind)


def find_hulls(problem: Problem, keep: torch.Tensor, batch: int) -> Iterator[tuple[slice, bool]]:
    """`Hiding.keys` of runs of `batch` entries; the first key if none counts. keep: broadcasts to
    [B,H,M,N]. Products copy operands with gaps in half precision, which pays for few keys."""
    p, half = problem, problem.dtype != problem.wide
    flags = keep.view(torch.uint8).expand(p.B, -1, -1, p.N)
    some, every = flags.amax((1, 2)), flags.amin((1, 2))
    if batch > 1:
        some = torch.stack([x.amax(0) for x in some.split(batch)])
        every = torch.stack([x.amin(0) for x in every.split(batch)])
    first, behind = some.argmax(-1), p.N - some.flip(-1).argmax(-1)
    found = zip(*(x.tolist() for x in (first, behind, some.amax(-1), every.sum(-1))), strict=True)
    for start, stop, counts, count in found:
        end = stop if counts else 1
        if half:
            start, end = start // ROUND * ROUND, min(-(-end // ROUND) * ROUND, p.N)
            start, end = (start, end) if COPIED * (end - start) <= p.N else (0, p.N)
        yield slice(start, end), count < end - start


def reads_numbers(problem: Problem) -> bool:
    """True if a bare attention's mask is one of ours and reads few numbers, or none."""
    p, mask = problem, problem.node.mask
    data = p.specs[3 : len(p.node.ranks)]
    few = all(len(x.shape) == 1 and x.shape[0] <= MOST_NUMBERS for x in data)
    return few and mask is not None and is_ours(mask)


def caps_entries(problem: Problem) -> bool:
    """True if data cap runs of whole batch entries: with short rows, or few in half precision,
    reading all keys takes less time than copying or skipping some."""
    p, rows = problem, problem.lines
    if not p.mask_reads or not p.node.is_bare:
        return False
    few = rows < FEW_ROWS and (p.dtype != p.wide or is_worth_cutting(p))
    suits = few or p.M * p.N <= MOST_CAPPED
    fits = count_row_scores(p) >= p.H * p.M * p.N
    return suits and fits and count_caps(p) * p.dtype.itemsize <= MOST_CAPS


def runs_by_entries(problem: Problem) -> bool:
    return not has_few_scores(problem) and caps_entries(problem)


def cuts_entries(problem: Problem) -> bool:
    """True if a forward computes each batch entry by itself, of the keys left by data."""
    p = problem
    if p.is_empty or p.grad is not None or not (caps_entries(p) and is_worth_cutting(p)):
        return False
    shape, strides = p.layout_of_o
    rows = p.specs[0], TensorSpec(shape, p.dtype, strides)
    viewed = p.H == p.G or all(x.is_dense for x in rows)
    return viewed and all(map(lies_in_rows, p.specs[:3]))


def is_worth_cutting(problem: Problem) -> bool:
    """True if a batch entry, with equal keys for all its rows, has much to compute or to read. Not
    in half precision: oneDNN copies operands with gaps."""
    p = problem
    if p.dtype != p.wide or count_caps(p) > p.B * p.N:
        return False
    return p.N * p.D * (p.H * p.M + PER_NUMBER * p.G) >= LEAST_CUT


def lies_in_rows(spec: TensorSpec) -> bool:
    """True if products take x [B,H,M,D] in place: whole rows, one after the other."""
    return spec.unit_last and (spec.shape[2] <= 1 or spec.strides[2] >= spec.shape[3])


def count_caps(problem: Problem) -> int:
    """The number of caps of a mask with data, at most."""
    p, mask = problem, problem.node.mask
    alike = mask is not None and is_ours(mask)
    for data in p.by_role.mask.values():
        alike &= data.shape[1:2] == (1,) or len(data.shape) < len(p.sizes)
    return p.B * (1 if alike else p.H) * (p.M if tells_rows_apart(p) else 1) * p.N


@neutral_state()
def hide_by_numbers(mask: RunMask, numbers: Numbers) -> Hiding:
    """The hiding of a mask on a CPU, with tensors of these numbers."""
    data = mask.by_name([torch.tensor(x) for x in numbers])
    keep = mask.keep(mask.tiles.make_places(data, torch.device("cpu")))
    return mask.hiding(keep, mask.hides_rows(keep), cuts=bool(numbers))


recent_hiding = lru_cache(RECENT)(hide_by_numbers)
