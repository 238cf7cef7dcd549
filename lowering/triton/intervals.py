"""What an expression may be over a whole tile: interval arithmetic on symbols.

A mask's `keep`, evaluated on ranges of i and j and on the least and greatest of what it reads,
says whether a tile may keep a place and whether it surely keeps all: never wrong, at times too
careful. So tiles are found on the device, where data decides, from the same one definition.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, final

from attrs import frozen

from attn_graph.lowering.triton.symbols import Symbol, Untraceable
from attn_graph.masks.places import maximum, minimum

Operand = Any  # a range, a symbol, or a number
WIDEST = 2**62  # integers beyond it are not expected anywhere


@final
@frozen(eq=False)
class Range:
    """Every value from `least` to `most`. Of booleans: true everywhere, and true somewhere."""

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
        return Range(same.where(self.least % x, 0), same.where(self.most % x, x - 1))

    def abs(self) -> Range:
        straddles = (self.least <= 0) & (self.most >= 0)
        far = maximum(-self.least, self.most)
        return Range(straddles.where(0, minimum(abs(self.least), abs(self.most))), far)

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
            raise Untraceable("tiles are found for masks of &, | and ~, and there is another ^")
        return Range(self.most ^ True, self.least ^ True)

    def __invert__(self) -> Range:
        return self ^ True

    def __getattr__(self, name: str) -> Operand:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Untraceable(f"tiles are not found through {name}()")

    def __bool__(self) -> bool:
        raise Untraceable("a range of a tile has no single value")


def lower_end(x: Operand) -> Operand:
    return x.least if isinstance(x, Range) else x


def upper_end(x: Operand) -> Operand:
    return x.most if isinstance(x, Range) else x


def ends_of(x: Operand) -> tuple[Operand, ...]:
    return (x.least, x.most) if isinstance(x, Range) else (x,)


@final
@frozen(eq=False)
class Extremes:
    """A tensor as the least and the greatest of each of its blocks, for `Place.load`."""

    shape: tuple[int, ...]
    least: Any  # an Array of blocks, or the tensor's own
    most: Any
    blocks: dict[int, Symbol]  # the place among the blocks, by the identity of i's and j's ranges
    is_bool: bool

    def __getitem__(self, index: tuple[Operand, ...]) -> Range:
        if any(isinstance(x, Range) and id(x) not in self.blocks for x in index):
            raise Untraceable("tiles are found where a mask reads at i and j themselves")
        at = tuple(self.blocks[id(x)] if isinstance(x, Range) else x for x in index)
        found = Range(self.least[at], self.most[at])
        if self.is_bool and found.least.kind != "bool":
            return Range(found.least != 0, found.most != 0)
        return found
