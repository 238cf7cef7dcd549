"""Interval arithmetic: the least and greatest value of an expression over a tile.

A mask's `keep` is evaluated on the ranges of i and j in a tile, and on the ranges of the tensors it
reads there. The result tells if the tile is surely empty or surely full; it is never wrong, but may
call an empty or full tile mixed. So one definition of a mask also lists its tiles on the device,
from the data. With tensors as ends it does so for many tiles at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NoReturn, final

import torch
from attrs import field, frozen

from attn_graph.masks.places import (
    Block,
    Keys,
    Operators,
    Place,
    Strip,
    Untraceable,
    maximum,
    minimum,
    trace_definition,
)

Operand = Any  # a range, a symbol, or a number
WIDEST = 2**62  # no integer in a mask is expected to be larger
MOST_KEYS = 2**14  # bounded one by one; of more, as many runs of keys


ENDS: dict[str, Callable[..., tuple[Operand, Operand]]] = {  # of a to b and, if any, c to d
    "add": lambda a, b, c, d: (a + c, b + d),
    "sub": lambda a, b, c, d: (a - d, b - c),
    "rsub": lambda a, b, c, d: (c - b, d - a),
    "neg": lambda a, b, *_: (-b, -a),
    "maximum": lambda a, b, c, d: (maximum(a, c), maximum(b, d)),
    "minimum": lambda a, b, c, d: (minimum(a, c), minimum(b, d)),
    "lt": lambda a, b, c, d: (b < c, a < d),
    "le": lambda a, b, c, d: (b <= c, a <= d),
    "gt": lambda a, b, c, d: (a > d, b > c),
    "ge": lambda a, b, c, d: (a >= d, b >= c),
    "and": lambda a, b, c, d: (a & c, b & d),
    "or": lambda a, b, c, d: (a | c, b | d),
    "invert": lambda a, b, *_: (b ^ True, a ^ True),
}


@final
@frozen(eq=False)
class Range(Operators):
    """The values from `least` to `most`. Of booleans: true everywhere, and true anywhere.

    ends: the first and the last, of queries or of keys in steps of one: nothing looks for them.
    """

    least: Operand
    most: Operand
    ends: tuple[int, int] | None = field(default=None, kw_only=True)

    def apply(self, name: str, *operands: Operand) -> Range:
        x = operands[0] if operands else None
        if type(x) is int and x == 0 and name in ("add", "sub"):
            return self
        name = "invert" if name == "xor" and x is True else name
        if name not in ENDS:
            raise Untraceable(f"tile lists do not support {name}()")
        low, high = (x.least, x.most) if isinstance(x, Range) else (x, x)
        return Range(*ENDS[name](self.least, self.most, low, high))

    def __mul__(self, x: Operand) -> Range:
        others = (x.least, x.most) if isinstance(x, Range) else (x,)
        ends = [a * b for a in (self.least, self.most) for b in others]
        return Range(reduce(minimum, ends), reduce(maximum, ends))

    __rmul__ = __mul__

    def __floordiv__(self, x: Operand) -> Range:
        if not isinstance(x, int) or x <= 0:
            return Range(-WIDEST, WIDEST)
        least = self.least // x
        return Range(least, least if self.most is self.least else self.most // x)

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

    def __eq__(self, x: object) -> Range:  # type: ignore[override]  # as tensors do
        if x is self:
            return Range(self.least == self.least, self.most == self.most)
        one = (self.least == lower_end(x)) & (self.most == upper_end(x)) & (self.least == self.most)
        return Range(one, (self.least <= upper_end(x)) & (self.most >= lower_end(x)))

    def __ne__(self, x: object) -> Range:  # type: ignore[override]  # as tensors do
        return (self == x).apply("invert")

    __hash__ = None  # == makes a range

    def __getattr__(self, name: str) -> Operand:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self.apply, name)


def select(condition: Operand, yes: Operand, no: Operand) -> Operand:
    """`yes` if the condition holds, else `no`; of tensors or symbols."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, yes, no)
    return condition.where(yes, no)


def lower_end(x: Operand) -> Operand:
    return x.least if isinstance(x, Range) else x


def upper_end(x: Operand) -> Operand:
    return x.most if isinstance(x, Range) else x


@final
@frozen(eq=False)
class Entries:
    """The batch entries or the heads of a block: they index tensors, and are not numbers."""

    cells: range

    def __eq__(self, x: object) -> NoReturn:  # other operators raise TypeError by themselves
        raise Untraceable("a block may stand for several batch entries and heads")

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]  # as of everything that compares by other than value


@final
@frozen(eq=False)
class Bounded:
    """A tensor of integers or booleans, read at ranges of indices.

    A reading is the range of its elements there, for each key if an index has one for each key.
    """

    tensor: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def __getitem__(self, index: tuple[Operand, ...]) -> Range:
        """Raises Untraceable for an index that differs from query to query within a key, or lies
        outside of the tensor, and for numbers that have no order (NaN) or are cut off as int64."""
        part, by_key = self.tensor, None
        if part.dtype.is_floating_point or part.dtype == torch.uint64:
            raise Untraceable(f"elements of {part.dtype} have no bounds in int64")
        for axis, at in enumerate(index):
            first, last = end_points(at)
            if first < 0 or last >= part.shape[axis] or last < first:
                raise Untraceable(f"elements {first} to {last} of {part.shape[axis]} are read")
            if isinstance(at, Range) and isinstance(at.least, torch.Tensor) and at.least.ndim:
                one = at.most is at.least or torch.equal(at.least, at.most)
                if by_key is not None or not one:
                    raise Untraceable("a tensor is read at another place for each query and key")
                by_key = axis
                if at.ends is None:  # else a view: to copy elements takes most of a look
                    part = part.index_select(axis, at.least)
                    continue
            part = part.narrow(axis, first, last + 1 - first)
        flags = part.dtype == torch.bool
        part = part.view(torch.uint8) if flags else part  # its extremes take a twentieth of `any`
        others = [axis for axis, n in enumerate(part.shape) if axis != by_key and n > 1]
        ends = [part.amin(others), part.amax(others)] if others else [part]
        ends = [x.flatten() if by_key is not None else x.reshape(()) for x in ends]
        ends = [x.view(torch.bool) if flags else x.long() for x in ends]
        return Range(ends[0], ends[-1])


def end_points(at: Operand) -> tuple[int, int]:
    """The first and the last index of entries, of ranges, one or many, or of a number."""
    if isinstance(at, Entries):
        return at.cells.start, at.cells.stop - 1
    if isinstance(at, Range) and at.ends is not None:
        return at.ends
    least, most = (torch.as_tensor(x, device="cpu") for x in (lower_end(at), upper_end(at)))
    return int(least.amin()), int(most.amax())


def ranged_place(block: Block, run: int) -> Place:
    """All places of a block: the range of its queries, and each run of `run` keys by itself."""
    first = torch.arange(0, block.N, run, device="cpu")
    keys = Range(first, first, ends=(0, block.N - 1))
    if run > 1:
        keys = Range(first, (first + run - 1).clamp(max=block.N - 1))
    i = block.rows.start, block.rows[-1]
    rows = Range(*(torch.tensor(x, device="cpu") for x in i), ends=i)
    data = {name: Bounded(x.cpu()) for name, x in (block.data or {}).items()}
    sizes = block.H, block.M, block.N
    return Place(Entries(block.batch), Entries(block.heads), rows, keys, *sizes, data)


def bound_keys(mask: Any, block: Block) -> tuple[Keys, Keys]:  # Any: a Mask, which imports this
    """The keys that all queries of the block keep, never too many, and those that any may keep,
    never too few: by a leaf's strip, or else by its `keep`.

    No keys and all keys if it cannot be evaluated at ranges, or reads tensors yet unknown.
    """
    unknown = mask.needs and block.data is None
    if unknown or not (block.rows and block.N and block.batch and block.heads):
        return block.none, block.all
    run = -(-block.N // MOST_KEYS)
    try:
        place = ranged_place(block, run)
        strip = mask.strip(place)
        if strip is not None:
            return bound_strip(strip, block, surely=True), bound_strip(strip, block, surely=False)
        kept = trace_definition(mask.keep, place)
    except Untraceable:
        return block.none, block.all
    least, most = lower_end(kept), upper_end(kept)
    every = keys_of_runs(least, run, block.N)
    return every, every if most is least else keys_of_runs(most, run, block.N)


def keys_of_runs(kept: torch.Tensor | bool, run: int, N: int) -> Keys:
    """The keys of those runs of `run` keys, out of N, that are kept."""
    flags = torch.as_tensor(kept, device="cpu").expand(-(-N // run))
    return Keys(tuple([(a * run, min(b * run, N)) for a, b in Keys.where(flags).intervals]))


def bound_strip(strip: Strip, block: Block, *, surely: bool) -> Keys:
    """The keys that some batch entry and query of the block keep; with `surely`, that all keep."""
    first, last = block.rows.start, block.rows.stop - 1
    early, late = (last, first) if surely else (first, last)
    near, far = (upper_end, lower_end) if surely else (lower_end, upper_end)
    if strip.rows is not None and early >= int(far(strip.rows)):
        return block.none
    start = 0 if strip.low is None else max(0, early + int(near(strip.low)))
    stop = block.N if strip.high is None else min(block.N, late + 1 + int(far(strip.high)))
    return Keys.between(start, stop if strip.keys is None else min(stop, int(far(strip.keys))))
