"""Interval arithmetic: the least and greatest value of an expression over a tile.

A mask's `keep` is evaluated on the ranges of i and j in a tile, and on the ranges of the tensors it
reads there. The result tells if the tile is surely empty or surely full; it is never wrong, but may
call an empty or full tile mixed. So one definition of a mask also lists its tiles on the device,
from the data. With tensors as ends it does so for many tiles at once.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, final

import torch
from attrs import frozen

from attn_graph.masks.places import Untraceable, maximum, minimum

Operand = Any  # a range, a symbol, or a number
WIDEST = 2**62  # no integer in a mask is expected to be larger


@final
@frozen(eq=False)
class Range:
    """The values from `least` to `most`. Of booleans: true everywhere, and true anywhere."""

    least: Operand
    most: Operand

    def __add__(self, x: Operand) -> Range:
        return Range(self.least + lower_end(x), self.most + upper_end(x))

    __radd__ = __add__

    def __sub__(self, x: Operand) -> Range:
        return Range(self.least - upper_end(x), self.most - lower_end(x))

    def __rsub__(self, x: Operand) -> Range:
        return Range(lower_end(x) - self.most, upper_end(x) - self.least)

    def __neg__(self) -> Range:
        return Range(-self.most, -self.least)

    def __mul__(self, x: Operand) -> Range:
        ends = [a * b for a in (self.least, self.most) for b in ends_of(x)]
        return Range(reduce(minimum, ends), reduce(maximum, ends))

    __rmul__ = __mul__

    def __floordiv__(self, x: Operand) -> Range:
        if not isinstance(x, int) or x <= 0:
            return Range(-WIDEST, WIDEST)
        return Range(self.least // x, self.most // x)

    def __mod__(self, x: Operand) -> Range:
        if not isinstance(x, int) or x <= 0:
            return Range(-WIDEST, WIDEST)
        same = self.least // x == self.most // x
        return Range(select(same, self.least % x, 0), select(same, self.most % x, x - 1))

    def abs(self) -> Range:
        straddles = (self.least <= 0) & (self.most >= 0)
        far = maximum(-self.least, self.most)
        return Range(select(straddles, 0, minimum(abs(self.least), abs(self.most))), far)

    __abs__ = abs

    def __lt__(self, x: Operand) -> Range:
        return Range(self.most < lower_end(x), self.least < upper_end(x))

    def __le__(self, x: Operand) -> Range:
        return Range(self.most <= lower_end(x), self.least <= upper_end(x))

    def __gt__(self, x: Operand) -> Range:
        return Range(self.least > upper_end(x), self.most > lower_end(x))

    def __ge__(self, x: Operand) -> Range:
        return Range(self.least >= upper_end(x), self.most >= lower_end(x))

    def __eq__(self, x: object) -> Range:  # type: ignore[override]  # as tensors do
        one = (self.least == lower_end(x)) & (self.most == upper_end(x)) & (self.least == self.most)
        return Range(one, (self.least <= upper_end(x)) & (self.most >= lower_end(x)))

    def __ne__(self, x: object) -> Range:  # type: ignore[override]  # as tensors do
        return (self == x) ^ True

    __hash__ = None  # type: ignore[assignment]  # == makes a range

    def __and__(self, x: Operand) -> Range:
        return Range(self.least & lower_end(x), self.most & upper_end(x))

    __rand__ = __and__

    def __or__(self, x: Operand) -> Range:
        return Range(self.least | lower_end(x), self.most | upper_end(x))

    __ror__ = __or__

    def __xor__(self, x: Operand) -> Range:
        if x is not True:
            raise Untraceable("tile lists support masks of &, | and ~, and this one has another ^")
        return Range(self.most ^ True, self.least ^ True)

    def __invert__(self) -> Range:
        return self ^ True

    def __getattr__(self, name: str) -> Operand:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(f"tile lists do not support {name}()")

    def __bool__(self) -> bool:
        raise Untraceable("the values of a tile have no single truth value")


def select(condition: Operand, yes: Operand, no: Operand) -> Operand:
    """`yes` if the condition holds, else `no`; of tensors or symbols."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, yes, no)
    return condition.where(yes, no)


def lower_end(x: Operand) -> Operand:
    return x.least if isinstance(x, Range) else x


def upper_end(x: Operand) -> Operand:
    return x.most if isinstance(x, Range) else x


def ends_of(x: Operand) -> tuple[Operand, ...]:
    return (x.least, x.most) if isinstance(x, Range) else (x,)
