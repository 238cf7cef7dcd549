"""Conditions of transformers' mask functions: kept places, joined by `&`, `|` and `~`.

A join is exact, or it is unreadable and raises. torch.compile can trace all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from attrs import define
from torch import Tensor

from attn_graph.machine.ambient import is_traced
from attn_graph.masks import Mask, Prefix, SameSegment
from attn_graph.masks.canonical import MIRRORED
from attn_graph.masks.places import Operators

Kind = tuple[Tensor, Tensor]  # numbers of queries [B,M] and keys [B,N], which are equal or not


class UnreadableMaskError(Exception):
    """A mask function has no equivalent here. The text names the obstacle."""


class MaskSymbol(Operators):
    """Abstract: an argument of a mask function, or an intermediate value, without a value to branch
    on.
    """

    __slots__ = ()
    device = torch.device("cpu")  # nothing need be moved to where it lies

    def __bool__(self) -> NoReturn:
        raise UnreadableMaskError("branches on a position")

    def apply(self, name: str, *operands: Any) -> Any:  # Any: symbols, or numbers
        """The result of an operation. Raises UnreadableMaskError if no mask expresses it."""
        if name in MIRRORED:
            raise UnreadableMaskError("compares something that is not a position")
        raise UnreadableMaskError(f"does more than compare positions: it computes {name}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: object) -> NoReturn:  # Any: of PyTorch
        raise UnreadableMaskError(f"calls {getattr(func, '__name__', func)} on a position")


@define(eq=False)
class Nowhere(MaskSymbol):
    """False everywhere, the start of transformers' joins by |."""

    def __or__(self, other: object) -> Condition:
        return as_condition(other)


@define(eq=False)
class Condition(MaskSymbol):
    """Places kept by a mask, None for all, at which query and key have one number of each kind.

    segments: the numbers compared by the mask's `SameSegment`. lengths: True if the mask reads
    kv_lengths, the frame's. within: tables of positions in a sequence: the places are right if
    query and key lie in one sequence, and may be wrong elsewhere. separates: tables with equal
    numbers for the query and the key of every place. ends: True if it hides all keys after the last
    query's token.
    """

    mask: Mask | None = None
    kinds: tuple[Kind, ...] = ()
    segments: Kind | None = None
    lengths: bool = False
    within: tuple[Tensor, ...] = ()
    separates: tuple[Tensor, ...] = ()
    ends: bool = False

    def to(self, *_: object) -> Condition:
        """Itself: there is nothing to move."""
        return self

    @property
    def is_everywhere(self) -> bool:
        return self.mask is None and len(self.kinds) == len(self.within) == 0

    def ending(self) -> Condition:
        """This condition, with all keys after the last query's token hidden."""
        return Condition(
            *(self.mask, self.kinds, self.segments, self.lengths, self.within, self.separates),
            ends=True,
        )

    def closed(self) -> Condition:
        """This condition without kinds: the mask compares their numbers, as those of one kind.

        Raises UnreadableMaskError if the mask compares others already.
        """
        if not self.kinds:
            return self
        mask = SameSegment() if self.mask is None else self.mask & SameSegment()
        segments = one_kind(self.segments, pair_kinds(self.kinds))
        return Condition(mask, (), segments, self.lengths, self.within, self.separates, self.ends)

    def __and__(self, other: object) -> Condition:
        other = as_condition(other)
        if self.is_everywhere or other.is_everywhere:
            kept = other if self.is_everywhere else self
            return kept.ending() if self.ends or other.ends else kept
        if self.mask is None or other.mask is None:
            mask = other.mask if self.mask is None else self.mask
        else:
            mask = self.mask & other.mask
        separates = (*self.separates, *other.separates)
        within = tuple(  # of sequences that it does not separate
            positions
            for positions in (*self.within, *other.within)
            if not any(count_within(positions, table) for table in separates)
        )
        return Condition(
            mask,
            (*self.kinds, *other.kinds),
            one_kind(self.segments, other.segments),
            self.lengths or other.lengths,
            within,
            separates,
            self.ends or other.ends,
        )

    def __or__(self, other: object) -> Condition:
        a, b = self.closed(), as_condition(other).closed()
        if a.is_everywhere or b.is_everywhere:
            return Condition(ends=a.ends and b.ends)
        within = (*a.within, *b.within)
        if a.mask is None or b.mask is None:  # all places within a sequence
            return Condition(within=within)
        segments, lengths = one_kind(a.segments, b.segments), a.lengths or b.lengths
        ends = a.ends and b.ends
        return Condition(a.mask | b.mask, (), segments, lengths, within, ends=ends)

    def __invert__(self) -> Condition:
        a = self.closed()
        mask = Prefix(0) if a.mask is None else ~a.mask
        return Condition(mask, (), a.segments, a.lengths, a.within)


def as_condition(value: object) -> Condition:
    """A condition, also of a boolean of PyTorch. Raises UnreadableMaskError for others."""
    if isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1:
        return Condition(None if value else Prefix(0))
    if not isinstance(value, Condition):
        raise UnreadableMaskError(f"joins a condition with a {type(value).__name__}")
    return value


def count_within(positions: Tensor, segments: Tensor) -> bool:
    """True if numbers [B,N] count the positions within each segment, one run of tokens.

    Unreadable tensors are believed to, unless they are the segments: transformers makes one of the
    other.
    """
    if not is_readable_now(segments, segments.shape[1]):
        return positions is not segments
    if positions.shape != segments.shape:
        return False
    here, next_ = segments[:, :-1], segments[:, 1:]
    first, second = positions[:, :-1], positions[:, 1:]
    counted = (here == next_) & (first < second) & (second - first == 1)
    return bool(((here < next_) | counted).all())


def is_readable_now(tensor: Tensor, M: int) -> bool:
    """True if the host may read a tensor now, for a call of M tokens."""
    if torch.compiler.is_compiling() or is_traced():
        return False
    return tensor.device.type == "cpu" or (M > 1 and not torch.cuda.is_current_stream_capturing())


def one_kind(a: Kind | None, b: Kind | None) -> Kind | None:
    """The existing one of two kinds. Raises UnreadableMaskError for two, and for `not` of one."""
    if a is None or b is None:
        return b if a is None else a
    if a[0] is not b[0] or a[1] is not b[1]:
        raise UnreadableMaskError("joins several kinds of segments")
    return a


def pair_kinds(kinds: Sequence[Kind]) -> Kind:
    """Numbers equal only if those of every kind are equal."""
    q, kv = kinds[0]
    for more in kinds[1:]:
        (a, b), (c, d) = rank_numbers(q, kv), rank_numbers(*more)
        ranks = q.shape[1] + kv.shape[1]
        q, kv = a * ranks + c, b * ranks + d
    return q, kv


def rank_numbers(q: Tensor, kv: Tensor) -> Kind:
    """Numbers from 0, fewer than M + N, with the equalities of these [B,M] and [B,N]: counts of
    lesser numbers.

    A product of two fits into int64.
    """
    both = torch.cat((q.long(), kv.long()), 1)
    ranks = torch.searchsorted(both.sort(1).values, both)
    return ranks[:, : q.shape[1]], ranks[:, q.shape[1] :]
