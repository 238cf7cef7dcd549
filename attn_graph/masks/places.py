"""Inputs of masks and modifiers: sets of keys, blocks of queries, and places."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError
from attn_graph.machine.ambient import is_traced

Term = Any  # an operand of Python's operators: an integer, a tensor, or a symbol of generated code


class Untraceable(TypeError):
    """A mask or a modifier uses an operation that generated code does not support."""


def trace_definition(definition: Callable[..., Any], *given: Any) -> Any:  # Any: terms
    """What a method of a mask or a modifier gives for symbols.

    Raises Untraceable if it does with them what only numbers and tensors can.
    """
    try:
        return definition(*given)
    except Untraceable:
        raise
    except (AttributeError, IndexError, TypeError) as error:
        raise Untraceable(f"{definition.__qualname__} can't be traced: {error}") from error


def operation(name: str) -> Callable[..., Any]:  # Any: whatever a class computes with
    """An operator as an operation by name."""
    return lambda term, *operands: term.apply(name, *operands)


class Operators:
    """Abstract: a term that is not a number. Python's operators are operations of `apply`, by their
    names in the module `operator`, with an "r" before the name where the term comes second."""

    __slots__ = ()

    def apply(self, name: str, *operands: Any) -> Any:  # Any: as of operators
        """The result of an operation. Raises Untraceable for an unknown one."""
        raise NotImplementedError

    __add__ = __radd__ = operation("add")
    __sub__, __rsub__ = operation("sub"), operation("rsub")
    __mul__ = __rmul__ = operation("mul")
    __truediv__, __rtruediv__ = operation("truediv"), operation("rtruediv")
    __floordiv__, __rfloordiv__ = operation("floordiv"), operation("rfloordiv")
    __mod__, __rmod__ = operation("mod"), operation("rmod")
    __and__ = __rand__ = operation("and")
    __or__ = __ror__ = operation("or")
    __xor__ = __rxor__ = operation("xor")
    __lt__, __le__ = operation("lt"), operation("le")
    __gt__, __ge__ = operation("gt"), operation("ge")
    __neg__, __abs__, __invert__ = operation("neg"), operation("abs"), operation("invert")
    __hash__ = None  # type: ignore[assignment]  # == makes a term

    def __eq__(self, x: object) -> Any:  # Any: as of operators
        return self.apply("eq", x)

    def __ne__(self, x: object) -> Any:  # Any: as of operators
        return self.apply("ne", x)

    def __bool__(self) -> NoReturn:
        raise Untraceable("a place that stands for many has no single truth value")


def maximum(a: Term, b: Term) -> Term:
    a, b = lead(a, b)
    if isinstance(a, int | float):
        return max(a, b)
    return a.clamp(min=b) if isinstance(a, torch.Tensor) else a.maximum(b)


def minimum(a: Term, b: Term) -> Term:
    a, b = lead(a, b)
    if isinstance(a, int | float):
        return min(a, b)
    return a.clamp(max=b) if isinstance(a, torch.Tensor) else a.minimum(b)


def lead(a: Term, b: Term) -> tuple[Term, Term]:
    """Both, the one first that computes with the other: ranges and symbols, tensors, numbers."""
    ranks = [isinstance(x, torch.Tensor) + 2 * isinstance(x, int | float) for x in (a, b)]
    return (a, b) if ranks[0] <= ranks[1] else (b, a)


@final
@frozen
class Strip:
    """Keys j of query i with low <= j - i <= high, j < keys and i < rows; None: no such bound.

    A bound is a term of the batch entry alone. In closed form the bounds give the tiles of keys
    that a block of queries may keep, and the tiles of queries that may keep a block of keys.
    """

    low: Term | None = None
    high: Term | None = None
    keys: Term | None = None
    rows: Term | None = None

    def __and__(self, other: Strip) -> Strip:
        return Strip(
            tighter(maximum, self.low, other.low),
            tighter(minimum, self.high, other.high),
            tighter(minimum, self.keys, other.keys),
            tighter(minimum, self.rows, other.rows),
        )


def tighter(choose: Callable[[Term, Term], Term], a: Term | None, b: Term | None) -> Term | None:
    """The tighter of two bounds; None means no bound."""
    return b if a is None else a if b is None else choose(a, b)


@final
@frozen
class Keys:
    """A set of key positions, as sorted, disjoint, half-open intervals."""

    intervals: tuple[tuple[int, int], ...] = ()

    @classmethod
    def between(cls, start: int, stop: int) -> Keys:
        """The positions start <= j < stop."""
        return cls(((start, stop),) if start < stop else ())

    @classmethod
    def where(cls, flags: torch.Tensor) -> Keys:
        """The positions of the true elements of a boolean vector."""
        count = int(flags.count_nonzero())
        if count in (0, len(flags)):  # to list edges takes six times as long
            return cls.between(0, count)
        no = flags.new_zeros(1)
        edges = torch.diff(flags, prepend=no, append=no).nonzero().flatten().tolist()
        return cls(tuple(zip(edges[::2], edges[1::2], strict=True)))

    def __or__(self, other: Keys) -> Keys:
        return Keys(join_intervals(sorted(self.intervals + other.intervals), gap=0))

    def __and__(self, other: Keys) -> Keys:
        return Keys(tuple(intersect_intervals(self.intervals, other.intervals)))

    def outside(self, keys: int) -> Keys:
        """The positions below `keys` outside this set."""
        edges = [0, *(edge for interval in self.intervals for edge in interval), keys]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return Keys(tuple((a, b) for a, b in pairs if a < b))

    def bridged(self, gap: int) -> Keys:
        """This set with every hole of at most `gap` positions filled."""
        return Keys(join_intervals(self.intervals, gap))

    @property
    def hull(self) -> Keys:
        """All positions from the first one in this set to the last."""
        return Keys.between(self.intervals[0][0], self.intervals[-1][1]) if self.intervals else self

    def covers(self, start: int, stop: int) -> bool:
        """True if every position start <= j < stop is in this set."""
        at = bisect_right(self.intervals, start, key=itemgetter(0))
        return start >= stop or (at > 0 and stop <= self.intervals[at - 1][1])

    def flags(self, keys: int) -> torch.Tensor:
        """Booleans [keys], true inside this set."""
        inside = torch.zeros(keys, dtype=torch.bool, device="cpu")
        for start, stop in self.intervals:
            inside[start:stop] = True
        return inside

    def __len__(self) -> int:
        return sum(b - a for a, b in self.intervals)

    def __contains__(self, key: int) -> bool:
        return any(a <= key < b for a, b in self.intervals)


def intersect_intervals(
    mine: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The intersection of two sequences of sorted, disjoint intervals, in one walk over both."""
    m = n = 0
    while m < len(mine) and n < len(others):
        (a, b), (c, d) = mine[m], others[n]
        if max(a, c) < min(b, d):
            yield max(a, c), min(b, d)
        m, n = (m + 1, n) if b < d else (m, n + 1)


def join_intervals(intervals: Iterable[tuple[int, int]], gap: int) -> tuple[tuple[int, int], ...]:
    """Sorted intervals, merged where they overlap or lie at most `gap` apart."""
    out: list[tuple[int, int]] = []
    for a, b in intervals:
        if out and a <= out[-1][1] + gap:
            out[-1] = out[-1][0], max(out[-1][1], b)
        else:
            out.append((a, b))
    return tuple(out)


@final
@frozen(eq=False)
class Block:
    """Queries `rows` of the heads `heads` of the batch entries `batch`, against N keys.

    `data` has the tensors that the mask reads, by name. It is None while planning: the answer must
    then hold for all values of these tensors.
    """

    batch: range
    heads: range
    rows: range
    H: int
    M: int
    N: int
    data: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def whole(
        cls, sizes: tuple[int, int, int, int], data: Mapping[str, torch.Tensor] | None = None
    ) -> Block:
        """All queries of all heads. sizes: B, H, M, N."""
        B, H, M, N = sizes
        return cls(range(B), range(H), range(M), H, M, N, data)

    def split(self, rows: int) -> Iterator[Block]:
        """Blocks of `rows` of its queries, in order; the last may have fewer."""
        for at in range(0, len(self.rows), rows):
            yield evolve(self, rows=self.rows[at : at + rows])

    @property
    def all(self) -> Keys:
        """All N keys."""
        return Keys.between(0, self.N)

    @property
    def none(self) -> Keys:
        """The empty set of keys."""
        return Keys()

    def load(self, name: str, axes: str) -> torch.Tensor | None:
        """This block's part of a tensor. axes: its axes, letters of "bhij". None without data."""
        if self.data is None:
            return None
        tensor = self.data[name]
        parts = {"b": self.batch, "h": self.heads, "i": self.rows, "j": range(self.N)}
        index = [
            slice(None) if n == 1 or x not in parts else slice(parts[x].start, parts[x].stop)
            for x, n in zip(axes, tensor.shape, strict=True)
        ]
        return tensor[tuple(index)]


def read_at(x: Term, index: tuple[Term, ...]) -> Term:
    """x[index]; axis by axis where each index varies along axes of its own, in their order.

    PyTorch selects whole rows by one index in a tenth of the time in which it gathers elements.
    """
    if not isinstance(x, torch.Tensor) or not all(
        isinstance(n, torch.Tensor) or n == 0 for n in index
    ):
        return x[index]
    tensors = [n for n in index if isinstance(n, torch.Tensor)]
    long = [[axis - n.ndim for axis, size in enumerate(n.shape) if size > 1] for n in tensors]
    varied = [axis for axes in long for axis in axes]
    if not tensors or varied != sorted({*varied}):
        return x[index]
    shape = tensors[0].shape  # of one index; PyTorch joins shapes by seventy calls
    if len(tensors) > 1:
        shape = torch.broadcast_shapes(*(n.shape for n in tensors))
    for axis, n in enumerate(index):
        x = (
            x.index_select(axis, n.flatten())
            if isinstance(n, torch.Tensor)
            else x.narrow(axis, 0, 1)
        )
    return x.reshape(shape)


def add_columns(total: torch.Tensor, share: torch.Tensor, n: torch.Tensor) -> None:
    """total [H|1, entries] += share [b,H,i,j] at columns n [b|1,1,i,j], in a fixed order."""
    n = n.long() if total.shape[1] > 1 else torch.zeros_like(n, dtype=torch.int64)
    share = share.sum_to_size((n.shape[0], len(total), *share.shape[2:])).to(total.dtype)
    share, n = share.transpose(0, 1).flatten(1), n.flatten().expand(len(total), -1)
    if total.is_cpu:
        total.scatter_add_(1, n, share)
    else:  # on a GPU the order of `scatter_add_` is not fixed
        rows = torch.arange(len(total), device=n.device)[:, None]
        total.index_put_((rows, n), share, accumulate=True)


@final
@frozen(eq=False)
class Place:
    """Where a mask or a modifier is evaluated: b, h, i, j broadcast to [B,H,M,N].

    They are integers, tensors, or symbols of generated code; `load` reads a tensor there.
    """

    b: Term
    h: Term
    i: Term
    j: Term
    H: int
    M: int
    N: int
    data: Mapping[str, Term] = field(factory=dict)
    ranges: tuple[range, range, range, range] | None = None

    @classmethod
    def of(cls, block: Block, keys: range, device: torch.device | None = None) -> Place:
        """The places of a block's queries and `keys`, as tensors."""
        ranges = (block.batch, block.heads, block.rows, keys)
        b, h, i, j = (
            torch.arange(r.start, r.stop, device=device).reshape([-1] + [1] * (3 - axis))
            for axis, r in enumerate(ranges)
        )
        return cls(b, h, i, j, block.H, block.M, block.N, block.data or {}, ranges)

    @classmethod
    def whole(cls, s: torch.Tensor, data: Mapping[str, torch.Tensor]) -> Place:
        """All places of scores s [B,H,M,N], whose sizes may be symbols of traced code."""
        axes = (torch.arange(n, device=s.device) for n in s.shape)
        b, h, i, j = (x.reshape([-1] + [1] * (3 - axis)) for axis, x in enumerate(axes))
        ranges: Any = tuple([range(n) if type(n) is int else slice(0, n) for n in s.shape])
        _, H, M, N = s.shape
        return cls(b, h, i, j, H, M, N, data, ranges)

    @property
    def has_numbers(self) -> bool:
        """True for the places of a block whose sizes are numbers."""
        return self.ranges is not None and all(type(r) is range for r in self.ranges)

    def load(self, name: str, *index: Term) -> Term:
        """The element of a tensor at `index`: some of b, h, i, j, or terms computed from them.

        An axis of size 1 is broadcast. Indices that are this place's own b, h, i, j become slices;
        others gather. Raises GraphError for a tensor missing from `needs`.
        """
        tensor = self.data.get(name)
        if tensor is None or len(index) != len(tensor.shape):
            raise self.refusal(name, len(index))
        slots, n = list[slice | None](), 0
        for own, r in zip((self.b, self.h, self.i, self.j), self.ranges or (), strict=False):
            if n == len(index) or index[n] is not own:
                slots.append(None)
                continue
            slots.append(slice(None) if tensor.shape[n] == 1 else slice(r.start, r.stop))
            n += 1
        if n == len(index):
            return tensor[tuple(slots)]
        pairs = zip(index, tensor.shape, strict=True)
        return read_at(tensor, tuple(0 if n == 1 else x for x, n in pairs))

    def add(self, total: Term, share: Term, h: Term, n: Term) -> None:
        """Add each place's share [b,h,i,j] to total [H|1, entries] at (h, n), in a fixed order.

        h: this place's own; n [b|1,1,i,j]: integers below `entries`.
        """
        if not isinstance(total, torch.Tensor):
            total.add_at(share, h, n)
        elif self.ranges is not None:
            own = self.ranges[1]
            add_columns(total if len(total) == 1 else total[own.start : own.stop], share, n)

    def refusal(self, name: str, indices: int) -> GraphError:
        """The error for a missing tensor or a wrong number of indices."""
        if name not in self.data:
            known = ", ".join(self.data) or "nothing"
            return GraphError(f"load: {name!r} is not in `needs`, which has {known}")
        return GraphError(
            f"load: {name!r} has {len(self.data[name].shape)} axes but got {indices} indices; "
            f"write at.load({name!r}, at.b, at.h) for one [B,H]"
        )

    def among(self, values: Sequence[float], index: Term) -> Term:
        """values[index] in float32; the index is an integer, a tensor or a symbol."""
        if isinstance(index, torch.Tensor) and is_traced():  # by operations, which a trace records
            each = [torch.full((1,), x, device=index.device) for x in values]
            return torch.cat(each)[index]
        if isinstance(index, torch.Tensor):
            return torch.tensor(values, dtype=torch.float32, device=index.device)[index]
        return values[index] if isinstance(index, int) else index.among(values)

    def within(self, b: range, h: range, i: range, j: range) -> Place:
        """The places of these batch entries, heads, queries and keys, out of all; as views."""
        if self.ranges == (b, h, i, j):
            return self
        return Place(
            self.b[b.start : b.stop],
            self.h[h.start : h.stop],
            self.i[i.start : i.stop],
            self.j[j.start : j.stop],
            *(self.H, self.M, self.N, self.data),
            (b, h, i, j),
        )

    def reading(self, data: Mapping[str, Term]) -> Place:
        """This place with other tensors to read."""
        return Place(self.b, self.h, self.i, self.j, self.H, self.M, self.N, data, self.ranges)

    @property
    def axes(self) -> tuple[Term, Term, Term, Term]:
        """b, h, i and j."""
        return self.b, self.h, self.i, self.j

    def shift(self, ragged: tuple[str, ...]) -> Term:
        """kv_lengths[b] - q_lengths[b]: how far lengths move a bottom-right diagonal.

        ragged: the lengths that exist; N or M stands for a missing one. 0 without both.
        """
        if not ragged:
            return 0
        keys = self.load("kv_lengths", self.b) if "kv_lengths" in ragged else self.N
        queries = self.load("q_lengths", self.b) if "q_lengths" in ragged else self.M
        return keys - queries
