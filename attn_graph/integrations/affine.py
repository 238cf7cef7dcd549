"""Comparisons of integers affine in positions, as bounds of j - i or of j.

The readers of FlexAttention's mods and of transformers' mask functions share it. The latter run
under torch.compile, which can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from attn_graph.masks import Align, Causal, Mask, Window

Affine = Mapping[str, int]  # the coefficient of each axis; of "" the constant
Kind = Literal["band", "keys", "all"]
Shape = Literal["band", "keys", "queries", "constant"]
SHAPES: dict[Shape, Affine] = {  # where the coefficient of j, or else of i, is 1
    "band": {"i": -1, "j": 1},
    "keys": {"j": 1},
    "queries": {"i": 1},
    "constant": {},
}
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class Bounds(NamedTuple):
    """Places with j - i, of a band, or j, of keys, from `low` to `high`, both included.

    None means no bound. outside: the other places. Kind "all" is all places, or none if `outside`.
    """

    kind: Kind
    low: int | None = None
    high: int | None = None
    outside: bool = False


def coefficients(affine: Affine) -> dict[str, int]:
    """Those that are not 0."""
    return {x: c for x, c in affine.items() if c}


def add_affine(a: Affine, b: Affine, times: int = 1) -> Affine:
    """a + times * b."""
    return {x: a.get(x, 0) + times * b.get(x, 0) for x in {**a, **b}}


def bound_difference(name: str, difference: Affine) -> Bounds | None:
    """The places at which an affine integer compares to 0 as `name` says; None if they depend on i
    alone.

    name: of a comparison in the module `operator`. None also for sums of i and j other than their
    difference, and for b and h.
    """
    place = locate(difference)
    if place is None:
        return None
    shape, sign, constant = place
    low, high = interval(name if sign > 0 else MIRRORED[name], -sign * constant)
    if shape == "band" or shape == "keys":
        return Bounds(shape, low, high, name == "ne")
    last = math.inf if shape == "queries" else 0  # of the numbers from 0 that it may be
    if (low or 0) <= 0 and (high is None or high >= last):
        return Bounds("all", outside=name == "ne")
    empty = (high is not None and high < 0) or (low or 0) > last
    return Bounds("all", outside=name != "ne") if empty else None


def bound_distance(name: str, inner: Affine, reach: int) -> Bounds | None:
    """The places at which an affine integer's absolute value compares to a number; None: as above.

    None for == and != as well.
    """
    place = locate(inner)
    if place is None or name in ("eq", "ne"):
        return None
    shape, sign, constant = place
    if shape == "queries" or shape == "constant":
        return None
    most, outside = reach - (name in ("lt", "ge")), name in ("ge", "gt")
    if most < 0:
        return Bounds("all", outside=not outside)
    return Bounds(shape, -most - sign * constant, most - sign * constant, outside)


def locate(affine: Affine) -> tuple[Shape, int, int] | None:
    """The shape of an affine integer, its sign, and the number added to it."""
    axes = {x: c for x, c in affine.items() if x and c}
    sign = axes.get("j") or axes.get("i") or 1
    signed = {x: sign * c for x, c in axes.items()}
    for shape, known in SHAPES.items():
        if signed == known:
            return shape, sign, affine.get("", 0)
    return None


def interval(name: str, t: int) -> tuple[int | None, int | None]:
    """The least and the greatest integer comparing to t as `name` says; for `ne`, the
    complement's.
    """
    match name:
        case "le" | "lt":
            return None, t - (name == "lt")
        case "ge" | "gt":
            return t + (name == "gt"), None
        case _:
            return t, t


def diagonal_mask(low: int | None, high: int | None, align: Align) -> Mask:
    """The mask low <= j - i' <= high, i' being the query on the diagonal of the alignment."""
    if low is None and high == 0:
        return Causal(align)
    return Window(None if low is None else -low, high, align)
