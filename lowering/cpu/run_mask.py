"""What a mask hides in runs of whole heads: held for the next call, where little decides it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import final

import torch
from attrs import frozen

from attn_graph.kernels.hiding import caps_of
from attn_graph.lowering.cpu.product_slots import HELD, TileGrid, has_few_scores
from attn_graph.lowering.problem import Problem
from attn_graph.machine.ambient import is_traced, neutral_state
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.places import Place

MOST_NUMBERS = 64  # of a tensor that a call reads as numbers
RECENT = 16  # lengths, with plans, of which what they hide is held, up to 512 KiB each
ROUND = 16  # keys: of sizes between, products take longer
COPIED = 4  # times as long a product takes whose operands have gaps, which oneDNN copies
Numbers = tuple[tuple[int, ...], ...]


@final
@frozen(eq=False)
class Hiding:
    """Hides places of a run's scores.

    caps: the largest that scores may be, which broadcast to them; as they lie, where shape is None,
    else viewed as that. reach: how many keys count. blind: whether it may hide all of a row. whole:
    whether all keys count, and it hides all of no row.
    """

    caps: torch.Tensor
    shape: tuple[int, int, int] | None
    reach: int
    blind: bool
    whole: bool

    def hide(self, s: torch.Tensor) -> None:
        """Hide places of s [n,L,S]."""
        (s if self.shape is None else s.view(self.shape)).clamp_(max=self.caps)


@final
@frozen(eq=False)
class RunMask:
    """The mask of a bare attention, for runs of whole heads.

    cuts: whether runs may be of the first keys alone. blind: whether it may hide all of a row.
    holds: whether it is one of ours, and reads no tensors or lengths of few batch entries, as the
    layers of a model do in turn: what it hides is held.
    """

    tiles: TileGrid
    cuts: bool
    blind: bool
    holds: bool

    @classmethod
    def of(cls, tiles: TileGrid, cuts: bool) -> RunMask | None:
        """None where there is no mask."""
        p = tiles.problem
        return None if p.node.mask is None else cls(tiles, cuts, p.has_blind_rows, reads_numbers(p))

    def read(self, operands: Sequence[torch.Tensor]) -> Hiding:
        """What a call hides. operands: the attention's own."""
        q, data = operands[0], operands[3:]
        if self.holds and type(q) is torch.Tensor and q.is_cpu:
            if not data:
                return held_hiding(self, ())
            if not is_traced():
                return recent_hiding(self, tuple([(*x.tolist(),) for x in data]))
        keep = self.keep(self.tiles.places(self.by_name(data), q))
        return self.hiding(keep, self.tiles.problem.N, self.blind)

    def by_name(self, data: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the mask reads, by name."""
        return dict(zip(self.tiles.problem.node.data_names[1], data, strict=True))

    def keep(self, at: Place) -> torch.Tensor:
        """Which of all places the mask keeps: booleans that broadcast to [B,H,M,N]."""
        mask = self.tiles.problem.node.mask
        assert mask is not None
        return torch.as_tensor(mask.keep(at), device=at.j.device)

    def hiding(self, keep: torch.Tensor, reach: int, blind: bool) -> Hiding:
        """What hides the others."""
        p, shape = self.tiles.problem, None
        caps = caps_of(keep, p.dtype)
        if has_few_scores(p):
            caps = caps.expand(p.B, p.H, p.M, reach).reshape(p.B * p.G, -1, reach).contiguous()
        else:
            caps = caps.view(caps.shape[-2:])
            shape = None if p.H == p.G else (-1, p.M, reach)
        return Hiding(caps, shape, reach, blind, not blind and reach == p.N)


def reads_numbers(problem: Problem) -> bool:
    """Whether the mask of a bare attention is one of ours that reads few numbers, or none."""
    p, mask = problem, problem.node.mask
    data = p.specs[3 : len(p.node.ranks)]
    few = all(len(x.shape) == 1 and x.shape[0] <= MOST_NUMBERS for x in data)
    return few and mask is not None and is_ours(mask)


@neutral_state()
def hide_by_numbers(mask: RunMask, numbers: Numbers) -> Hiding:
    """What a mask hides on a CPU, where it reads tensors of these numbers."""
    data, p = mask.by_name([torch.tensor(x) for x in numbers]), mask.tiles.problem
    keep = mask.keep(mask.tiles.make_places(data, torch.device("cpu")))
    blind = mask.blind and not bool(keep.any(-1).all())
    if not (mask.cuts and numbers) or keep.shape[3] < p.N:
        return mask.hiding(keep, p.N, blind)
    seen = keep.flatten(0, 2).any(0).nonzero().amax() + 1 if keep.any() else torch.tensor(1)
    reach = min(-(-int(seen) // ROUND) * ROUND, p.N)
    reach = reach if p.dtype == p.wide or COPIED * reach <= p.N else p.N
    return mask.hiding(keep[..., :reach], reach, blind)


held_hiding, recent_hiding = lru_cache(HELD)(hide_by_numbers), lru_cache(RECENT)(hide_by_numbers)
