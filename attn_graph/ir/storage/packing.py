"""Packed tensors: the sequences of a batch one after another along one axis, without padding.

A packed x is [T,H,D], and a statistic of its rows [H,T]. Sequence b is the lengths[b] rows from
starts[b] on; rows between sequences, and past the last, belong to none. Padded they are
[B,H,length,D] and [B,H,length], sequence b in the first rows of batch entry b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError, PlanMismatchError, show
from attn_graph.ir.graph import Emit, Gradients, Op, Values, gives, takes
from attn_graph.ir.transforms.sums import Linear
from attn_graph.spec import INF, INTEGERS, MOST_INT64, ValueType, to_integer

ASCENDING = "pass the first row of each sequence, in order, then the end of the last one"


def to_size(value: object) -> int:
    """A number of rows. Raises GraphError for anything but a whole number of at least 0."""
    size = to_integer(value)
    if size is None or size < 0:
        raise GraphError(f"pack: {show(value)} is not a whole number of at least 0")
    if isinstance(size, int) and size > MOST_INT64:
        raise GraphError(f"pack: {size} rows: no tensor goes beyond {MOST_INT64}")
    return size


def to_most(value: object) -> int | None:
    """A converter: the most rows of a sequence; None for a side that is not packed."""
    return None if value is None else to_size(value)


def integer_problems(who: str, **given: ValueType) -> Iterator[str]:
    for name, type_ in given.items():
        if type_.dtype not in INTEGERS:
            yield f"{who}: {name} {type_} must be of {' or '.join(map(str, INTEGERS))}"


def count_sequences(starts: ValueType | torch.Tensor) -> int:
    return max(0, starts.shape[0] - 1)


def sequence_problems(who: str, starts: ValueType, lengths: ValueType) -> Iterator[str]:
    """Starts [B+1] and lengths [B] that do not fit together."""
    yield from integer_problems(who, starts=starts, lengths=lengths)
    if starts.shape[0] != lengths.shape[0] + 1:
        yield (
            f"{who}: starts {starts} and lengths {lengths} disagree: B sequences have B + 1 starts;"
            " the last one is the end of the last sequence"
        )


def list_sequences(
    starts: torch.Tensor, lengths: torch.Tensor, total: int, most: int, side: str = ""
) -> list[tuple[int, int]]:
    """The first row and the length of each sequence, reading the tensors on the host.

    total: rows of the packed tensor. most: of one sequence. side: "q" or "kv", for messages. Raises
    PlanMismatchError if starts descend or go past the rows, and for lengths that are negative,
    above `most`, or reach into the next sequence.
    """
    given, counts = starts.tolist(), lengths.tolist()
    who = f"{side}_" * bool(side)
    if given and not 0 <= given[0] <= given[-1] <= total:
        extent = f"from {given[0]} to {given[-1]}, of {total} rows"
        raise PlanMismatchError(f"{who}starts: {extent}", way_out=ASCENDING)
    for b, ((start, stop), count) in enumerate(zip(pairwise(given), counts, strict=True)):
        if stop < start:
            both = f"expected ascending ones, got {start}, {stop}"
            raise PlanMismatchError(f"{who}starts: {both}", way_out=ASCENDING)
        free = min(most, stop - start)
        if not 0 <= count <= free:
            more = ", or a larger max_lengths=" * (most < count <= stop - start)
            limit = f"{stop - start} rows before the next one, of at most {most}"
            raise PlanMismatchError(
                f"{who}lengths: sequence {b} has {count}, and {limit}",
                way_out=f"give 0 to {free}{more}",
            )
    return [*zip(given, counts, strict=False)]


def require_first(name: str, starts: torch.Tensor) -> None:
    """Raise PlanMismatchError for starts of sequences without gaps that do not begin with 0."""
    if len(starts) and (first := int(starts[0])):
        way_out = f"{ASCENDING}; or lengths too, if rows before the first one are unused"
        raise PlanMismatchError(f"{name}: expected 0 first, got {first}", way_out=way_out)


def require_last(name: str, starts: torch.Tensor, total: int) -> None:
    """Raise PlanMismatchError for starts that end before the last of `total` rows, or beyond, where
    the graph declares that sequences take all rows."""
    if len(starts) and (last := int(starts[-1])) != total:
        raise PlanMismatchError(
            f"{name}: ends with {last}, and all_rows=True declares sequences of all {total} rows",
            way_out="end the last sequence with the last row, or leave out all_rows=True",
        )


def require_fitting(name: str, counts: Sequence[int], most: int) -> None:
    """Raise PlanMismatchError for lengths of padded tensors outside 0 to `most`."""
    if counts and not 0 <= min(counts) <= max(counts) <= most:
        b, wrong = next((b, n) for b, n in enumerate(counts) if not 0 <= n <= most)
        raise PlanMismatchError(
            f"{name}: entry {b} has {wrong}, of {most} rows", way_out=f"give 0 to {most}"
        )


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[T,H,D] -> [H,T,D], a view, and back; a statistic [H,T] as is."""
    return x.transpose(0, 1) if x.ndim == 3 else x


@final
@takes(starts=1)
@gives("n")
@frozen
class Lengths(Op):
    """starts [B+1] -> lengths [B], of sequences without gaps: starts[b + 1] - starts[b].

    all_rows: the sequences are declared to take all rows, so that the last start is their number.
    """

    all_rows: bool = field(default=False, converter=bool)

    def problems(self, starts: ValueType) -> Iterator[str]:
        yield from integer_problems("lengths", starts=starts)
        if not starts.shape[0]:
            yield f"lengths: starts {starts} are empty; B sequences have B + 1 starts"

    def infer(self, starts: ValueType) -> tuple[ValueType]:
        return (ValueType((count_sequences(starts),), starts.dtype),)

    def run(self, starts: torch.Tensor) -> tuple[torch.Tensor]:
        return (starts.diff(),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        return (None,)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        return (None,)


@takes(x=None, starts=1, lengths=1)
@frozen
class OfSequences(Linear):
    """An op on x and the starts and lengths of its sequences."""

    moves_rows = True


@final
@frozen
class Unpack(OfSequences):
    """x [T,H,D], starts [B+1], lengths [B] -> [B,H,length,D], 0 past the end of each sequence.

    A statistic x [H,T] -> [B,H,length]; with `blind` -inf past the ends, as Pack has it.
    """

    length: int = field(converter=to_size)
    blind: bool = field(default=False, converter=bool)

    def problems(self, x: ValueType, starts: ValueType, lengths: ValueType) -> Iterator[str]:
        yield from sequence_problems("unpack", starts, lengths)
        if len(x.shape) not in (2, 3):
            yield f"unpack: x {x} is neither [T,H,D] nor a statistic [H,T]"
        elif prod(n for n in self.infer(x, starts)[0].shape if isinstance(n, int)) > MOST_INT64:
            yield (
                f"unpack: sequences of {self.length} rows, padded, have more than {MOST_INT64} "
                "elements, and no tensor goes beyond; pass the longest length in max_lengths"
            )

    def infer(self, x: ValueType, starts: ValueType, *_: ValueType) -> tuple[ValueType]:
        H, *last = x.shape[1:] if len(x.shape) > 2 else (x.shape or (0,))[:1]
        return (ValueType((count_sequences(starts), H, self.length, *last), x.dtype),)

    def run(
        self, x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor]:
        rows = heads_first(x)
        H, total, *last = rows.shape
        shape = (len(lengths), H, self.length, *last)
        padded = x.new_full(shape, -INF if self.blind else 0.0)
        for b, (start, n) in enumerate(list_sequences(starts, lengths, total, self.length)):
            padded[b, :, :n] = rows[:, start : start + n]
        return (padded,)

    def transposed(self, x: ValueType) -> Op:
        return Pack(row_count(x.shape))

    @property
    def moved(self) -> Op:
        return evolve(self, blind=False)


@final
@frozen
class Pack(OfSequences):
    """x [B,H,M,D], starts [B+1], lengths [B] -> [total,H,D]; x [B,H,M] -> [H,total].

    Rows outside sequences are 0; with `blind` -inf, as lse is for a row that sees nothing.
    """

    total: int = field(converter=to_size)
    blind: bool = field(default=False, converter=bool)

    def problems(self, x: ValueType, starts: ValueType, lengths: ValueType) -> Iterator[str]:
        yield from sequence_problems("pack", starts, lengths)
        if len(x.shape) not in (3, 4):
            yield f"pack: x {x} is neither [B,H,M,D] nor a statistic [B,H,M]"
        elif x.shape[0] != lengths.shape[0]:
            yield f"pack: x {x} and lengths {lengths} disagree in batch"

    def infer(self, x: ValueType, *_: ValueType) -> tuple[ValueType]:
        H = x.shape[1] if len(x.shape) > 1 else 0
        shape = (self.total, H, *x.shape[3:]) if len(x.shape) > 3 else (H, self.total)
        return (ValueType(shape, x.dtype),)

    def run(
        self, x: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor]:
        (due,) = self.infer(ValueType(tuple(x.shape), x.dtype))
        packed = x.new_full(due.shape, -INF if self.blind else 0.0)
        rows = heads_first(packed)
        for b, (start, n) in enumerate(list_sequences(starts, lengths, self.total, x.shape[2])):
            rows[:, start : start + n] = x[b, :, :n]
        return (packed,)

    def transposed(self, x: ValueType) -> Op:
        return Unpack(x.shape[2])

    @property
    def moved(self) -> Op:
        return evolve(self, blind=False)


def row_count(shape: Sequence[int]) -> int:
    """T, of a packed tensor [T,H,D] or a statistic [H,T]."""
    return shape[0 if len(shape) == 3 else 1]
