"""Masks in cuDNN's terms: one band along a diagonal, and lengths with padding beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from attrs import frozen

from attn_graph.errors import Reason
from attn_graph.lowering.problem import Problem
from attn_graph.masks import LENGTHS, Align, And, Band, KeyLengths, Mask, QueryLengths

ENDS = {KeyLengths(): "kv_lengths", QueryLengths(): "q_lengths"}


@final
@frozen
class CudnnBand:
    """Query i' keeps keys i' - left < j <= i' + right: `left` counts the query's own place.

    i' is i for "top_left". For "bottom_right" it is i + N - M, or, with lengths, i + kv_lengths[b]
    - q_lengths[b], with M or N for a missing length. None: unbounded.
    """

    align: Align = "top_left"
    left: int | None = None
    right: int | None = None

    @property
    def is_sane(self) -> bool:
        """True if the diagonal lies within both bounds, as cuDNN needs."""
        return (self.left is None or self.left >= 1) and (self.right is None or self.right >= 0)


@final
@frozen
class CudnnMask:
    """A mask in cuDNN's terms: its band, and the names of its lengths."""

    diagonal: CudnnBand = CudnnBand()
    lengths: tuple[str, ...] = ()

    @classmethod
    def of(cls, mask: Mask | None, M: int, N: int, *, plain: bool = False) -> CudnnMask | None:
        """The exact translation of a canonical mask; None if there is none.

        plain: measure from the top left corner if this is equivalent, since cuDNN adds biases under
        no other alignment.
        """
        if mask_problems(mask):
            return None
        leaves = conjuncts(mask)
        lengths = tuple(name for name in LENGTHS if name in {ENDS.get(x) for x in leaves})
        band = next((x for x in leaves if isinstance(x, Band)), Band())
        return cls(translate_band(band, M, N, plain=plain or bool(lengths)), lengths)


def conjuncts(mask: Mask | None) -> tuple[Mask, ...]:
    """The parts joined by &."""
    if isinstance(mask, And):
        return *conjuncts(mask.a), *conjuncts(mask.b)
    return () if mask is None else (mask,)


def mask_problems(mask: Mask | None) -> tuple[Reason, ...]:
    """Reasons against stating a mask in cuDNN's terms."""
    leaves, against = conjuncts(mask), list[Reason]()
    bands = [x for x in leaves if isinstance(x, Band)]
    if foreign := [x for x in leaves if x not in bands and x not in ENDS]:
        limit = "supports at most one band & lengths"
        against.append(Reason("mask_leaves", limit, f"the mask has {join_leaves(foreign)}"))
    if len(bands) > 1:
        actual = f"the mask has {join_leaves(bands)}"
        against.append(Reason("mask_bands", "supports one band", actual))
    given = {ENDS[x] for x in leaves if x in ENDS}
    if stray := [x for x in bands if x.ragged and set(x.ragged) != given]:
        names = " and ".join(sorted(given)) or "nothing"
        limit = "aligns a band by the lengths that end the sequences"
        actual = f"{names}, and has {join_leaves(stray)}"
        against.append(Reason("mask_alignment", limit, actual, "{limit}, {actual}"))
    return tuple(against)


def join_leaves(leaves: Sequence[Mask]) -> str:
    """Parts of a mask as one text."""
    return " & ".join(str(leaf.written()) for leaf in leaves)


def translate_band(band: Band, M: int, N: int, *, plain: bool) -> CudnnBand:
    """A band in cuDNN's terms, measured from a corner cuDNN accepts for it."""
    if band.ragged:
        return shift_band(band, "bottom_right", 0)
    at_left, at_right = shift_band(band, "top_left", 0), shift_band(band, "bottom_right", N - M)
    prefers_right = band.high == N - M != 0
    tries = [at_left] if plain else [at_right, at_left] if prefers_right else [at_left, at_right]
    return next((x for x in tries if x.is_sane), tries[0])


def shift_band(band: Band, align: Align, shift: int) -> CudnnBand:
    """A band measured from the diagonal `shift` places right of the top left corner."""
    left = None if band.low is None else 1 + shift - band.low
    return CudnnBand(align, left, None if band.high is None else band.high - shift)


def translate_mask(problem: Problem) -> CudnnMask | None:
    """The problem's mask in cuDNN's terms; None if cuDNN cannot express it."""
    plain = bool(problem.node.modifiers)
    return CudnnMask.of(problem.node.mask, problem.M, problem.N, plain=plain)
