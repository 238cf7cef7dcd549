"""Comparisons of integers that are affine in positions, as bounds of j - i or of j.

What reads FlexAttention's mods and what reads mask functions of transformers share it. The latter
read while torch.compile traces, which can trace all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from attn_graph.masks import Align, Causal, Mask, Window

Affine = Mapping[str, int]  # the coefficient of each axis; of "" the constant
Kind = Literal["band", "keys", "all"]
MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class Region(NamedTuple):
    """Where j - i (a band) or j (of keys) is from `low` to `high`, both included; None: no bound.

    outside: the other places instead. Of kind "all" it is all places, and none if `outside`.
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


def bound_difference(name: str, difference: Affine) -> Region | None:
    """Where an affine integer compares so to 0; None where that selects some of the queries.

    name: of a comparison, as the module `operator` has it. Sums of i and j other than their
    difference, and b and h, give None as well.
    """
    place = locate(difference)
    if place is None:
        return None
    kind, sign, constant = place
    low, high = interval(name if sign > 0 else MIRRORED[name], -sign * constant)
    if kind == "band" or kind == "keys":
        return Region(kind, low, high, name == "ne")
    last = math.inf if kind == "queries" else 0  # of the numbers from 0 that it may be
    if (low or 0) <= 0 and (high is None or high >= last):
        return Region("all", outside=name == "ne")
    empty = (high is not None and high < 0) or (low or 0) > last
    return Region("all", outside=name != "ne") if empty else None


def bound_distance(name: str, inner: Affine, reach: int) -> Region | None:
    """Where the absolute value of an affine integer compares so to a number; None: as above.

    None for == and != as well.
    """
    place = locate(inner)
    if place is None or name in ("eq", "ne"):
        return None
    kind, sign, constant = place
    if kind == "queries" or kind == "constant":
        return None
    most, outside = reach - (name in ("lt", "ge")), name in ("ge", "gt")
    if most < 0:
        return Region("all", outside=not outside)
    return Region(kind, -most - sign * constant, most - sign * constant, outside)


def locate(
    affine: Affine,
) -> tuple[Literal["band", "keys", "queries", "constant"], int, int] | None:
    """What is bounded (j - i, j, i, or no axis), the sign before it, and what is added to it."""
    axes, constant = {x: c for x, c in affine.items() if x and c}, affine.get("", 0)
    sign = axes.get("j") or axes.get("i") or 1
    if axes == {"i": -sign, "j": sign} and abs(sign) == 1:
        return "band", sign, constant
    if axes == {"j": sign} and abs(sign) == 1:
        return "keys", sign, constant
    if axes == {"i": sign} and abs(sign) == 1:
        return "queries", sign, constant
    return None if axes else ("constant", 1, constant)


def interval(name: str, t: int) -> tuple[int | None, int | None]:
    """The least and the greatest integer that compares so to t; for `ne`, that does not."""
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
