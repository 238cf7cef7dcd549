"""Masks in cuDNN's terms: one band along a diagonal, and lengths beyond which all is padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from attrs import frozen

from attn_graph.masks import LENGTHS, Align, And, Band, KeyLengths, Mask, QueryLengths

ENDS = {KeyLengths(): "kv_lengths", QueryLengths(): "q_lengths"}


@final
@frozen
class CudnnBand:
    """Query i' keeps keys i' - left < j <= i' + right: `left` counts the query's own place.

    i' is i for "top_left". For "bottom_right" it is i + N - M, or, where lengths are given,
    i + kv_lengths[b] - q_lengths[b], with M or N for the length that is not given. None: unbounded.
    """

    align: Align = "top_left"
    left: int | None = None
    right: int | None = None

    @property
    def is_sane(self) -> bool:
        """Whether the diagonal lies within both bounds, as cuDNN needs."""
        return (self.left is None or self.left >= 1) and (self.right is None or self.right >= 0)


@final
@frozen
class CudnnMask:
    """A mask that cuDNN can express: its band, and the names of the lengths that it reads."""

    diagonal: CudnnBand = CudnnBand()
    lengths: tuple[str, ...] = ()

    @classmethod
    def of(cls, mask: Mask | None, M: int, N: int, *, plain: bool = False) -> CudnnMask | None:
        """The exact translation of a canonical mask; None if there is none.

        plain: measure from the top left corner if that means the same, since cuDNN adds biases
        under no other alignment.
        """
        if mask_problems(mask):
            return None
        leaves = conjuncts(mask)
        lengths = tuple(name for name in LENGTHS if name in {ENDS.get(x) for x in leaves})
        band = next((x for x in leaves if isinstance(x, Band)), Band())
        return cls(translate_band(band, M, N, plain=plain or bool(lengths)), lengths)


def conjuncts(mask: Mask | None) -> tuple[Mask, ...]:
    """The parts that all have to keep a place."""
    if isinstance(mask, And):
        return *conjuncts(mask.a), *conjuncts(mask.b)
    return () if mask is None else (mask,)


def mask_problems(mask: Mask | None) -> tuple[str, ...]:
    """Why cuDNN cannot express a mask; empty if it can."""
    return tuple(leaf_problems(conjuncts(mask)))


def leaf_problems(leaves: tuple[Mask, ...]) -> Iterator[str]:
    """The reasons against the parts of a mask."""
    bands = [x for x in leaves if isinstance(x, Band)]
    for leaf in leaves:
        if leaf not in bands and leaf not in ENDS:
            yield f"masks by one band and by lengths, joined with &, and the mask has {leaf}"
    if len(bands) > 1:
        yield f"masks by one band, and the mask has {' & '.join(map(str, bands))}"
    ends = {ENDS[x] for x in leaves if x in ENDS}
    for band in bands:
        if band.ragged and set(band.ragged) != ends:
            names = " and ".join(sorted(ends)) or "nothing"
            yield f"aligns a band by the lengths that end the sequences, {names}, and has {band}"


def translate_band(band: Band, M: int, N: int, *, plain: bool) -> CudnnBand:
    """A band in cuDNN's terms, measured from the corner that allows it."""
    if band.ragged:
        return shift_band(band, "bottom_right", 0)
    at_left, at_right = shift_band(band, "top_left", 0), shift_band(band, "bottom_right", N - M)
    prefers_right = band.high == N - M != 0
    tries = [at_left] if plain else [at_right, at_left] if prefers_right else [at_left, at_right]
    return next((x for x in tries if x.is_sane), tries[0])


def shift_band(band: Band, align: Align, shift: int) -> CudnnBand:
    """A band measured from the diagonal that lies `shift` right of the top left corner."""
    left = None if band.low is None else 1 + shift - band.low
    return CudnnBand(align, left, None if band.high is None else band.high - shift)
