"""Masks of a box of places, counted from the box's first query and key.

Some queries against some keys are attention too, under a mask moved to their place: bands shift by
the difference of the offsets, tensors are cut. So many devices share one attention, and each
computes an ordinary graph.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.terms.formulas import Formula, read_formula
from attn_graph.masks.joins import And, Join, Mask, join_masks
from attn_graph.masks.leaves import (
    LENGTHS,
    Band,
    Keep,
    KeepBlocks,
    KeyLengths,
    Prefix,
    QueryLengths,
    SameSegment,
)

WHOLE = "whole_"  # prefix of lengths that a box reads unchanged, counted from the start


@final
@frozen
class Box:
    """A box of places: some batch entries, heads, queries and keys of [B,H,M,N].

    sizes: B, H, M and N. lengths: of queries and keys of its one entry, if they are known; the box
    then ends within them.
    """

    batch: range
    heads: range
    rows: range
    keys: range
    sizes: tuple[int, int, int, int]
    lengths: tuple[int, int] | None = None

    @classmethod
    def whole(cls, B: int, H: int, M: int, N: int) -> Box:
        return cls(range(B), range(H), range(M), range(N), (B, H, M, N))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.batch), len(self.heads), len(self.rows), len(self.keys)

    @property
    def has_all_positions(self) -> bool:
        """True if it has all queries and keys: its positions are those of the whole."""
        _, _, M, N = self.sizes
        return self.rows == range(M) and self.keys == range(N)

    def ends(self, ragged: Sequence[str]) -> tuple[int, int]:
        """M and N, or the known lengths in their place, if `ragged` names those."""
        (m, n), (_, _, M, N) = self.lengths or self.sizes[2:], self.sizes
        return (m if "q_lengths" in ragged else M), (n if "kv_lengths" in ragged else N)

    def cut(self, x: torch.Tensor, axes: str) -> torch.Tensor:
        """A tensor's view of this box; an axis of size 1 stays, and one of no letter of "bhij"."""
        full = dict(zip("bhij", self.sizes, strict=True))
        for axis, letter in enumerate(axes):
            if letter in full and x.shape[axis] == full[letter]:
                own = self.ranges[letter]
                x = x.narrow(axis, own.start, len(own))
        return x

    @property
    def ranges(self) -> dict[str, range]:
        return {"b": self.batch, "h": self.heads, "i": self.rows, "j": self.keys}


def move_mask(mask: Mask, box: Box) -> Mask:
    """The mask of a box: at [i,j] it keeps what `mask`, in canonical form, keeps there.

    It reads tensors from `cut_data`. Raises GraphError for a user's own leaf.
    """
    shift = box.rows.start - box.keys.start
    match mask:
        case Join():
            return type(mask)(*(move_mask(x, box) for x in mask.parts))
        case KeyLengths() | QueryLengths() if box.lengths:
            return Band()
        case Band() if box.has_all_positions and not box.lengths:
            return mask
        case Band(low, high, ()):
            return Band(move_bound(low, shift), move_bound(high, shift))
        case Band():
            return move_ragged(mask, box)
        case Prefix(length):
            return Prefix(min(max(0, length - box.keys.start), len(box.keys)))
        case Formula():
            return move_formula(mask, box)
        case KeepBlocks(start=(i, j)):
            _, _, M, N = box.sizes
            own = (i + box.rows.start, j + box.keys.start)
            return evolve(mask, start=own, whole=mask.whole or (M, N))
        case KeyLengths() | QueryLengths() | SameSegment() | Keep():
            return mask
    raise GraphError(
        f"shard: {mask} is your own leaf and can't be moved to a part of the places; "
        "write it as an ag.Formula, or pass a boolean tensor by Keep()"
    )


def move_bound(bound: int | None, shift: int) -> int | None:
    return None if bound is None else bound + shift


def move_ragged(band: Band, box: Box) -> Mask:
    """A band that lengths move: by known ones, or as comparisons with those of whole sequences."""
    M, N = box.ends(band.ragged)
    shift = box.rows.start - box.keys.start
    if box.lengths:
        shift += N - M
        return Band(move_bound(band.low, shift), move_bound(band.high, shift))
    shift += (0 if "kv_lengths" in band.ragged else N) - (0 if "q_lengths" in band.ragged else M)
    signs = {"kv_lengths": "-", "q_lengths": "+"}
    gap = " ".join(["j - i", *(f"{signs[name]} {WHOLE}{name}" for name in band.ragged)])
    bounds = {">=": move_bound(band.low, shift), "<=": move_bound(band.high, shift)}
    elements = tuple((f"{WHOLE}{name}", "b") for name in band.ragged)
    limits = [Formula(f"{gap} {x} {n}", elements) for x, n in bounds.items() if n is not None]
    return join_masks(And, limits) if limits else Band()


@final
class Shift(ast.NodeTransformer):
    """Adds the start of a box to each of b, h, i and j."""

    def __init__(self, box: Box) -> None:
        self.starts = {x: own.start for x, own in box.ranges.items() if own.start}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        start = self.starts.get(node.id)
        return node if start is None else ast.BinOp(node, ast.Add(), ast.Constant(start))


def move_text(text: str, box: Box) -> str:
    """A formula of b, h, i and j, rewritten for positions in a box."""
    return ast.unparse(ast.fix_missing_locations(Shift(box).visit(read_formula(text))))


def move_formula(mask: Formula, box: Box) -> Formula:
    """The formula of a box. Raises GraphError if it names lengths, which parts count anew."""
    refuse_lengths(dict(mask.elements))
    return evolve(mask, text=move_text(mask.text, box))


def refuse_lengths(elements: Mapping[str, str]) -> None:
    """Raise GraphError if a formula's tensor has the name of lengths."""
    if names := [name for name in elements if name.removeprefix(WHOLE) in LENGTHS]:
        raise GraphError(
            f"shard: a formula reads {names[0]}, a name reserved for lengths, which each part "
            "counts from its own start; rename that tensor"
        )


def cut_data(
    needs: Mapping[str, str],
    box: Box,
    data: Mapping[str, torch.Tensor],
    here: Box | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors read by a box's mask or modifiers, cut from those of all places.

    needs: the axes of each tensor, by its name in the box. here: the box's place in `data`, if
    these are parts themselves.
    """
    return {name: cut_tensor(name, axes, box, data, here or box) for name, axes in needs.items()}


def cut_tensor(
    name: str, axes: str, box: Box, data: Mapping[str, torch.Tensor], here: Box
) -> torch.Tensor:
    """One tensor of `cut_data`. Lengths count from the box's start and end at its end."""
    if name not in data:
        return here.cut(data[name.removeprefix(WHOLE)], axes)
    x = here.cut(data[name], axes)
    if name not in LENGTHS:
        return x
    own = box.keys if name == "kv_lengths" else box.rows
    return x.sub(own.start).clamp(0, len(own))
