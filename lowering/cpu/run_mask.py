"""A mask's caps for runs of whole heads, held for the next call if little decides them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.kernels.hiding import caps_of
from attn_graph.lowering.cpu.product_slots import (
    HELD,
    TileGrid,
    count_row_scores,
    has_few_scores,
)
from attn_graph.lowering.cpu.row_core import Change
from attn_graph.lowering.folding import tells_rows_apart
from attn_graph.lowering.problem import Problem
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.places import Place
from attn_graph.spec import TensorSpec

MOST_NUMBERS = 64  # of a tensor read as numbers by a call
RECENT, MOST_HELD_CAPS = 8, 2**20  # lengths with held caps, with plans; bytes of each
MOST_CAPS = 2**23  # bytes of caps made by a call
FEW_ROWS, MOST_CAPPED = 64, 2**16  # of a key/value head; scores of a query head
ROUND = 16  # keys: of sizes between, products take longer
COPIED = 4  # times as long as a dense product: oneDNN copies operands with gaps
# The least multiplications of q k^T of a batch entry computed by itself; a number of k is read in
# the time of PER_NUMBER. With fewer, one product of many entries is faster.
LEAST_CUT, PER_NUMBER = 2**21, 16
Numbers = tuple[tuple[int, ...], ...]
Span = tuple[slice, torch.Tensor | None]


@final
@frozen(eq=False)
class Hiding:
    """Hides places of a run's scores.

    caps: upper bounds of the scores; they broadcast, viewed as `shape` unless it is None. reach:
    how many keys count. blind: True if a row may see none. spans: for each batch entry its keys
    from the first to the last counting one, with bounds of their scores, None if all count; empty
    if all keys are read.
    """

    caps: torch.Tensor
    shape: tuple[int, ...] | None
    reach: int
    blind: bool
    spans: Sequence[Span] = ()

    def hide(self, s: torch.Tensor) -> None:
        """Hide places of s [n,L,S]."""
        (s if self.shape is None else s.view(self.shape)).clamp_(max=self.caps)

    def entries(self, batch: int) -> Iterable[tuple[Change | None, slice | None]]:
        """For runs of `batch` entries, one after the other, the function to hide their scores, and
        their keys; None: all."""
        if self.spans:
            return [(caps if caps is None else partial(limit_, caps), k) for k, caps in self.spans]
        each = self.caps.split(batch) if len(self.caps) > 1 else repeat(self.caps)
        return ((evolve(self, caps=caps).hide, None) for caps in each)


@final
@frozen(eq=False)
class RunMask:
    """The mask of a bare attention, for runs of whole heads.

    cuts: True if runs may be of the first keys alone. spans: True if each batch entry reads its own
    keys alone, if they are known. blind: True if it may hide all of a row. holds: True if the caps
    are held: the mask is one of ours, and reads no tensors, or lengths of few batch entries, shared
    by the layers of a model in turn.
    """

    tiles: TileGrid
    cuts: bool
    spans: bool
    blind: bool
    holds: bool

    @classmethod
    def of(cls, tiles: TileGrid, cuts: bool = False, spans: bool = False) -> RunMask | None:
        """None without a mask."""
        p, mask = tiles.problem, tiles.problem.node.mask
        if mask is None:
            return None
        few = not mask.needs or count_caps(p) * p.dtype.itemsize <= MOST_HELD_CAPS
        return cls(tiles, cuts, spans, p.has_blind_rows, few and reads_numbers(p))

    def read(self, operands: Sequence[torch.Tensor]) -> Hiding:
        """The hiding of a call. operands: the attention's own."""
        plain, data = self.is_plain(operands[0]), operands[3:]
        if plain and self.holds:
            if not data:
                return held_hiding(self, ())
            if not is_traced():
                return recent_hiding(self, tuple([(*x.tolist(),) for x in data]))
        keep = self.keep_of(operands)
        if plain and not is_traced():
            return self.hiding(keep, self.tiles.problem.N, self.hides_rows(keep), self.spans)
        return self.hiding(keep, self.tiles.problem.N, self.blind)

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
        return self.keep(self.tiles.places(self.by_name(operands[3:]), operands[0]))

    def by_name(self, data: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.tiles.problem.node.data_names[1], data, strict=True))

    def keep(self, at: Place) -> torch.Tensor:
        """The mask at all places: booleans that broadcast to [B,H,M,N]."""
        mask = self.tiles.problem.node.mask
        assert mask is not None
        return torch.as_tensor(mask.keep(at), dtype=torch.bool, device=at.j.device)

    def hiding(self, keep: torch.Tensor, reach: int, blind: bool, spans: bool = False) -> Hiding:
        """Hides the places not kept. spans: True if each batch entry reads its own keys alone."""
        p, caps = self.tiles.problem, caps_of(keep, self.tiles.problem.dtype)
        shape: tuple[int, ...] | None = None
        if has_few_scores(p) and not self.spans:
            caps = caps.expand(p.B, p.H, p.M, reach).reshape(p.B * p.G, -1, reach).contiguous()
        elif caps_entries(p):
            shape = -1, p.H, p.M, reach
        else:
            caps = caps.view(caps.shape[-2:])
            shape = None if p.H == p.G else (-1, p.M, reach)
        own = tuple(find_spans(keep, caps, p.B, p.N)) if spans else ()
        return Hiding(caps, shape, reach, blind, own)


def limit_(caps: torch.Tensor, s: torch.Tensor) -> None:
    s.clamp_(max=caps)


def find_spans(keep: torch.Tensor, caps: torch.Tensor, B: int, N: int) -> Iterator[Span]:
    """`Hiding.spans` of B batch entries; of an entry without counting keys, the first key.

    keep, caps: True for the counting ones of N keys, and bounds of scores; both broadcast to
    [B,1,1,N].
    """
    keep, caps = (x.expand(B, 1, 1, N).flatten(0, 2) for x in (keep, caps))
    counts, first = keep.sum(-1), keep.view(torch.uint8).argmax(-1)
    behind = N - keep.flip(-1).view(torch.uint8).argmax(-1)
    for start, stop, count, own in zip(
        first.tolist(), behind.tolist(), counts.tolist(), caps, strict=True
    ):
        keys = slice(start, stop if count else 1)
        yield keys, None if count == keys.stop - start else own[keys]


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
    if not p.node.is_bare or p.node.mask is None or not p.node.mask.needs:
        return False
    few = rows < FEW_ROWS and (p.dtype != p.wide or is_worth_cutting(p))
    suits = few or p.M * p.N <= MOST_CAPPED
    fits = count_row_scores(p) >= p.H * p.M * p.N
    return suits and fits and count_caps(p) * p.dtype.itemsize <= MOST_CAPS


def runs_by_entries(problem: Problem) -> bool:
    return not has_few_scores(problem) and caps_entries(problem)


def cuts_entries(problem: Problem) -> bool:
    """True if a forward computes each batch entry by itself, of the keys left by data."""
    p, (shape, strides) = problem, problem.layout_of_o
    if p.is_empty or p.grad is not None or not (caps_entries(p) and is_worth_cutting(p)):
        return False
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
    data, p = mask.by_name([torch.tensor(x) for x in numbers]), mask.tiles.problem
    keep = mask.keep(mask.tiles.make_places(data, torch.device("cpu")))
    blind = mask.hides_rows(keep)
    if mask.spans:
        return mask.hiding(keep, p.N, blind, spans=True)
    if not (mask.cuts and numbers) or keep.shape[3] < p.N:
        return mask.hiding(keep, p.N, blind)
    seen = keep.flatten(0, 2).any(0).nonzero().amax() + 1 if keep.any() else torch.tensor(1)
    reach = min(-(-int(seen) // ROUND) * ROUND, p.N)
    reach = reach if p.dtype == p.wide or COPIED * reach <= p.N else p.N
    return mask.hiding(keep[..., :reach], reach, blind)


held_hiding, recent_hiding = lru_cache(HELD)(hide_by_numbers), lru_cache(RECENT)(hide_by_numbers)
