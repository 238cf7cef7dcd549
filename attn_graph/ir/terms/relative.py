"""Biases read from a trained table: by distance, or by the numbers of places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from attrs import evolve, field, frozen
from attrs.converters import optional

from attn_graph.errors import GraphError
from attn_graph.ir.modifiers import UNPLACED, Alibi, Modifier, Names, known_lengths
from attn_graph.ir.transforms.moving import WHOLE
from attn_graph.masks import (
    LEAVES,
    Align,
    Data,
    Mask,
    as_names,
    diagonal_offset,
    require_alignment,
    require_lengths,
)
from attn_graph.masks.joins import leaves
from attn_graph.masks.leaves import as_pair, to_length
from attn_graph.masks.places import Place, Term, maximum, minimum
from attn_graph.spec import FLOATS, INTEGERS


@final
@frozen
class RelativeBias(Modifier):
    """s -> s + table[h, clamp(n, 0, entries - 1)]; table [H|1, entries], in q's dtype or float32.

    n is the distance j - i' + R, with entries = 2 R + 1 and i' the query's position by `align`,
    moved by the lengths named in `ragged`. With `places` it is places[i, j], of an integer operand
    [M,N], and positions don't count. start, whole: for a part of all queries and keys, as in
    `Data`; it reads the lengths of the whole.
    """

    additive = True
    entries: int = field(converter=to_length)
    align: Align | None = field(default=None, validator=require_alignment)
    ragged: tuple[str, ...] = field(default=(), converter=as_names, validator=require_lengths)
    places: bool = field(default=False, converter=bool)
    start: tuple[int, int] = field(default=(0, 0), converter=as_pair, kw_only=True)
    whole: tuple[int, int] | None = field(default=None, converter=optional(as_pair), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.entries < 1 or not (self.places or self.entries % 2):
            least = "a positive number" if self.places else "2 R + 1, for distances up to R"
            raise GraphError(f"relative_bias: entries {self.entries} must be {least}")
        if self.places and (self.align or self.ragged):
            raise GraphError("relative_bias: places have no alignment; drop align= and ragged=")

    @property
    def relative(self) -> bool:
        return not (self.places or self.ragged)

    @property
    def needs(self) -> dict[str, Data]:
        table = {"table": Data("hn", FLOATS, broadcasts=True, entries=self.entries)}
        numbers = {"places": Data("ij", INTEGERS)} if self.places else {}
        return table | numbers | {self.name_of(x): Data("b", INTEGERS) for x in self.ragged}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("table",)

    def name_of(self, lengths: str) -> str:
        """The operand that has the lengths of a side."""
        return WHOLE + lengths if self.whole else lengths

    def aligned(self, align: Align | None, lengths: Names) -> RelativeBias:
        if self.places or self.whole:
            return self
        own = self.align or align
        return evolve(self, align=own, ragged=known_lengths(own, self.ragged, lengths))

    def resolved(self, M: int, N: int) -> Modifier:
        if self.places or self.whole:
            return self
        diagonal_offset(self.align, M, N, "relative_bias")
        return evolve(self, align="top_left") if M == N and not self.ragged else self

    def column(self, at: Place) -> Term:
        """The table's column at a place; of a block, along its diagonals by distance.

        These are [b|1,1,1,rows + keys - 1], the lowest j - i first.
        """
        if self.places:
            n = at.load("places", at.i, at.j)
        else:
            block = at.ranges if at.has_numbers else None
            apart = at.j - at.i if block is None else diagonals(block, at.j.device)
            n = apart + (self.entries // 2 + self.start[1] - self.start[0]) - self.moved(at)
        return minimum(maximum(n, 0), self.entries - 1)

    def moved(self, at: Place) -> Term:
        """i' - i, of positions in the whole."""
        if self.align != "bottom_right":
            return 0
        sizes = zip(("q_lengths", "kv_lengths"), self.whole or (at.M, at.N), strict=True)
        queries, keys = (
            at.load(self.name_of(x), at.b) if x in self.ragged else size for x, size in sizes
        )
        return keys - queries

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        if at.has_numbers and not s.numel():
            return s
        bias = at.load("table", at.h, self.column(at))
        if self.places or not at.has_numbers or bias.shape[-1:].numel() == 1:  # one for all places
            return s.add_(bias)
        lines = bias[:, :, 0].expand(-1, s.shape[1], -1)
        for h in range(s.shape[1]):  # the last query has the first keys of its head's line
            s[:, h].add_(lines[:, h].unfold(-1, s.shape[-1], 1).flip(-2))
        return s

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        if not self.places and at.has_numbers:
            if not ds.numel():
                return
            apart = self.ragged or len(ds) == 1
            ds = sum_diagonals(ds if apart else ds.sum(0, keepdim=True))
        at.add(totals["table"], ds, at.h, self.column(at))

    def spread(
        self, ts: torch.Tensor, tangents: Mapping[str, torch.Tensor], at: Place
    ) -> torch.Tensor:
        return self.change(ts, at.reading({**at.data, **tangents}))


def diagonals(ranges: Sequence[range], device: torch.device) -> torch.Tensor:
    """j - i of each diagonal of a block of places, lowest first: [1,1,1,rows + keys - 1]."""
    _, _, rows, keys = ranges
    apart = torch.arange(keys.start - rows.stop + 1, keys.stop - rows.start, device=device)
    return apart.reshape(1, 1, 1, -1)


def sum_diagonals(x: torch.Tensor) -> torch.Tensor:
    """x [b,h,rows,keys] -> its sums over equal j - i, lowest first: [b,h,1,rows + keys - 1]."""
    b, h, rows, keys = x.shape
    width = rows + keys - 1
    lines = x.new_zeros(b, h, rows, width)
    strides = (*lines.stride()[:2], width - 1, 1)  # each row one place to the left of that above
    lines.as_strided(x.shape, strides, rows - 1).copy_(x)
    return lines.sum(2, keepdim=True)


MODIFIERS = (*UNPLACED, Alibi, RelativeBias)


def counting_parts(
    mask: Mask | None, modifiers: Iterable[Modifier] = ()
) -> tuple[Mask | Modifier, ...]:
    """The parts that may count batch entries or heads, so differ if these have other numbers."""
    own = [m for m in modifiers if not isinstance(m, MODIFIERS)]
    every = () if mask is None else leaves(mask)
    return (*own, *[leaf for leaf in every if not isinstance(leaf, LEAVES)])
