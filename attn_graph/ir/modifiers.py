"""Score modifiers: pointwise steps s -> s' between scores and mask.

A modifier states its mathematics once, for a block of scores at any place: `change` (the step),
`back` (its derivative) and `collect` (the gradient of its tensors). The reference, the op-by-op
gradient and the blocked lowerings all run these three. An `additive` modifier has the derivative 1,
and fused kernels may read it as a block of bias. Any other without `back` runs forward only; its
gradient is an error.

Forward mode usually needs nothing more: the step is pointwise, so `back` also turns the tangent of
its scores into that of its result. `spread` is the share of the tensors' tangents, `bend` the
derivative of `back`; without them PyTorch differentiates `change` and `back`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError, asks_for_attrs, problems_of, refuse_truth
from attn_graph.ir.graph import (
    Alike,
    Emit,
    Gradients,
    Op,
    Values,
    gives,
    op_name,
    range_problem,
    require_positive,
)
from attn_graph.ir.transforms.sums import add_up, apply
from attn_graph.ir.transforms.tracing import trace_along, trace_along_data
from attn_graph.masks import (
    Align,
    Data,
    as_names,
    diagonal_offset,
    require_alignment,
    require_lengths,
)
from attn_graph.masks.places import Place, Term
from attn_graph.spec import FLOATS, INF, INTEGERS, ValueType, to_number

Names = tuple[str, ...]
MOST_SLOPES = 2**10  # heads; planning writes a slope for each


@gives("s")
@asks_for_attrs
@frozen(init=False)
class Modifier(Alike):
    """s [B,H,M,N], operands -> s' [B,H,M,N]. A score of -inf is masked and stays -inf.

    Your own modifier is a `@final @frozen` subclass. Building a graph checks the promises of its
    fields and methods on a small block. Write `change`, the step, and for a gradient `back`, its
    derivative by its result. These have defaults, as class attributes or properties:

    additive (False): True if the step adds a term that does not depend on s; needs no `back`.
    relative (False): True if it depends on b, h and j - i, not on i itself.
    hides (True): False if it never turns a score into -inf.
    needs ({}): the tensors that it reads, `{"tilt": Data("h", (torch.float32,))}`.
    trains (()): the names in `needs` that have a gradient; `collect` adds it up, from ds alone, so
    a tensor that is added to scores can be trained, not one that multiplies them.
    """

    additive: ClassVar[bool] = False  # s' = s + addend(at)
    hides: ClassVar[bool] = True  # the step may give -inf

    @property
    def relative(self) -> bool:
        """True if the step depends on b, h and j - i, not on i itself."""
        return False

    @property
    def needs(self) -> dict[str, Data]:
        """The tensors read by the step, by name, in the order of the operands."""
        return {}

    @property
    def trains(self) -> tuple[str, ...]:
        """The names in `needs` that have a gradient, which `collect` adds up."""
        return ()

    @property
    def constants(self) -> tuple[int, ...]:
        """The numbers of operands without a gradient, which nobody may differentiate by."""
        pairs = enumerate(self.needs.items(), start=1)
        fixed = [(n, data) for n, (name, data) in pairs if name not in self.trains]
        return tuple([n for n, data in fixed if not {*FLOATS}.isdisjoint(data.dtypes)])

    @property
    def roles(self) -> tuple[str, ...]:
        """The name of each operand: s, then the tensors of `needs`."""
        return ("s", *self.needs)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *(None for _ in self.needs))  # `Data` says how many axes

    def aligned(self, align: Align | None, lengths: Names) -> Modifier:
        """This step in an attention of this alignment that has these lengths."""
        return self

    def resolved(self, M: int, N: int) -> Modifier:
        """This step for M queries and N keys. Raises GraphError for a missing alignment."""
        return self

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        """s' of a block of scores [b,h,i,j], in the memory of s or in new memory."""
        raise GraphError(f"{type(self).__name__} defines no change(self, s, at)")

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        """The gradient of the step's input, from ds, that of its result s. May overwrite both.

        The input is not known here: a step whose derivative does not follow from its result, such
        as swish, has no `back`.
        """
        if not self.additive:
            raise GraphError(*self.gradient_problems())
        return ds

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        """Add this block's share of the gradient of the operands named in `totals`."""
        raise GraphError(*self.gradient_problems())

    def spread(
        self, ts: torch.Tensor, tangents: Mapping[str, torch.Tensor], at: Place
    ) -> torch.Tensor:
        """Add the share of the given tangents of trained tensors to ts; the dual of `collect`.

        ts: the tangent of the result. Returns its memory or new memory.
        """
        data = {n: x for n, x in at.data.items() if isinstance(x, torch.Tensor)}
        zeros = torch.zeros_like(ts)
        return ts.add_(
            trace_along_data(lambda s, x: self.change(s, at.reading(x)), zeros, data, tangents)
        )

    def bend(
        self, ds: torch.Tensor, t: torch.Tensor, s: torch.Tensor, at: Place
    ) -> torch.Tensor | None:
        """The tangent of back(ds, s, at) as s moves by t, with ds fixed; None for 0.

        It is new memory, or that of t, which may be overwritten; ds and s stay unchanged.
        """
        if self.additive:
            return None
        return trace_along(lambda s: self.back(ds.clone(), s, at), s, t)

    def push_problems(self) -> Iterator[str]:
        yield from self.gradient_problems()

    def second_problems(self) -> Iterator[str]:
        """Why it has no second derivative, including why it has no gradient."""
        yield from self.gradient_problems()
        if self.trains and not self.additive and type(self).bend is Modifier.bend:
            read = ", ".join(self.trains)
            who = type(self).__name__
            yield (
                f"{who} has no second derivative: it is not additive, trains {read}, and defines "
                "no bend(ds, t, s, at)"
            )

    def __bool__(self) -> NoReturn:
        """Raises GraphError: `and`, `or` and `not` would silently drop a modifier."""
        refuse_truth(op_name(type(self)), self, "apply modifiers one after another, with then()")

    def gradient_problems(self) -> Iterator[str]:
        who = type(self).__name__
        if not self.additive and type(self).back is Modifier.back:
            yield f"{who} has no gradient: it is not additive, and defines no back(ds, s, at)"
        if self.trains and type(self).collect is Modifier.collect:
            read = ", ".join(self.trains)
            yield f"{who} has no gradient of {read}: it defines no collect(totals, ds, at)"

    def problems(self, *types: ValueType) -> Iterator[str]:
        (B, H, M, N), given = types[0].shape, types[1:]
        sizes = {"b": B, "h": H, "i": M, "j": N}
        for (name, data), type_ in zip(self.needs.items(), given, strict=True):
            yield from data.problems(op_name(type(self)), name, type_, sizes)
        yield from problems_of(lambda: self.resolved(M, N))
        from attn_graph.ir.terms.promises import (
            modifier_promise_problems,  # which imports this module
        )

        yield from modifier_promise_problems(self, (B, H, M, N))

    def run(self, s: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.where(s == -INF, s, self.changed(s, operands)),)

    def changed(self, s: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """s' of scores of which none is masked."""
        data = dict(zip(self.needs, operands, strict=True))
        return self.change(s.clone(), Place.whole(s, data))

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        wanted = [i for i, name in enumerate(self.needs) if name in self.trains]
        gradients: list[Any] = [None] * len(self.needs)
        if wanted:
            for i, total in zip(wanted, emit(Collect(self), grads[0], *operands[1:]), strict=True):
                gradients[i] = total
        return (emit(Back(self), results[0], grads[0], *operands[1:])[0], *gradients)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (s,), (ts, *moved), data = results, tangents, operands[1:]
        pairs = zip(self.needs, moved, strict=True)
        given = {name: x for name, x in pairs if x is not None and name in self.trains}
        through = apply(emit, Back(self), s, ts, *data)
        if not given:
            return (through,)
        added = emit(Spread(self, tuple(given)), s, *data, *given.values())[0]
        return (add_up(emit, through, added),)


def change_(modifier: Modifier, s: torch.Tensor, at: Place) -> None:
    """Change a block of scores s in its own memory, wherever `change` puts its result."""
    changed = modifier.change(s, at)
    if changed is not s:
        s.copy_(changed)


def back_(modifier: Modifier, ds: torch.Tensor, s: torch.Tensor, at: Place) -> None:
    """Turn ds of a step's result s into ds of its input, in the memory of ds. Overwrites s."""
    gradient = modifier.back(ds, s, at)
    if gradient is not ds:
        ds.copy_(gradient)


@final
@frozen
class SoftCap(Modifier):
    """s -> cap * tanh(s / cap): scores stay within (-cap, cap)."""

    hides = False
    cap: float = field(converter=to_number, validator=require_positive)

    @property
    def relative(self) -> bool:
        return True

    def problems(self, *types: ValueType) -> Iterator[str]:
        yield from super().problems(*types)
        if problem := range_problem(self.cap, types[0].dtype):
            yield f"soft_cap: cap {problem}"
        elif problem := range_problem(1 / self.cap, types[0].dtype):
            yield f"soft_cap: 1 / cap {problem}"

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.div_(self.cap).tanh_().mul_(self.cap)

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        """ds * (1 - (s' / cap)^2)."""
        return ds.addcmul_(ds, s.div_(self.cap).square_(), value=-1)

    def bend(self, ds: torch.Tensor, t: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        """-2 ds (s' / cap^2) t."""
        return t.mul_(ds).mul_(s / self.cap).mul_(-2 / self.cap)


@final
@frozen
class Bias(Modifier):
    """s -> s + bias; bias [B,H,M,N], each axis full or 1, in q's dtype or float32."""

    additive = True

    @property
    def needs(self) -> dict[str, Data]:
        return {"bias": Data("bhij", FLOATS, broadcasts=True)}

    @property
    def trains(self) -> tuple[str, ...]:
        return ("bias",)

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.add_(at.load("bias", at.b, at.h, at.i, at.j))

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        share = at.reading(totals).load("bias", at.b, at.h, at.i, at.j)
        share += ds.sum_to_size(share.shape)

    def spread(
        self, ts: torch.Tensor, tangents: Mapping[str, torch.Tensor], at: Place
    ) -> torch.Tensor:
        return self.change(ts, at.reading(tangents))


UNPLACED = (SoftCap, Bias)  # steps that compare no positions


@final
@frozen
class Alibi(Modifier):
    """s -> s - slope[h] * |i' - j|; slopes [H] or [B,H], or the paper's for H heads.

    The operand `alibi` has the slopes, in q's dtype or float32. `default`: the paper's slopes,
    without an operand. i' is the query's position by `align`, moved by the lengths named in
    `ragged`.
    """

    additive = True
    hides = False
    default: bool = field(default=False, converter=bool)
    align: Align | None = field(default=None, validator=require_alignment)
    ragged: tuple[str, ...] = field(default=(), converter=as_names, validator=require_lengths)
    per_batch: bool = field(default=False, converter=bool)

    @property
    def relative(self) -> bool:
        return not self.ragged

    @property
    def needs(self) -> dict[str, Data]:
        slopes = {} if self.default else {"alibi": Data("bh" if self.per_batch else "h", FLOATS)}
        return slopes | {name: Data("b", INTEGERS) for name in self.ragged}

    @property
    def trains(self) -> tuple[str, ...]:
        return () if self.default else ("alibi",)

    def aligned(self, align: Align | None, lengths: Names) -> Alibi:
        own = self.align or align
        return evolve(self, align=own, ragged=known_lengths(own, self.ragged, lengths))

    def resolved(self, M: int, N: int) -> Modifier:
        diagonal_offset(self.align, M, N, "alibi")
        return evolve(self, align="top_left") if M == N and not self.ragged else self

    def problems(self, *types: ValueType) -> Iterator[str]:
        yield from super().problems(*types)
        H = types[0].shape[1]
        if self.default and H > MOST_SLOPES:
            yield f"alibi: {H} heads, and {MOST_SLOPES} is the most without slopes of your own, [H]"

    def distance(self, at: Place) -> Term:
        """|i' - j| at a place."""
        ragged = self.ragged if self.align == "bottom_right" else ()
        moved = at.shift(ragged) if ragged else diagonal_offset(self.align, at.M, at.N, "alibi")
        return (at.i + moved - at.j).abs()

    def slopes(self, at: Place) -> Term:
        """The slope at a place, from its batch entry and head."""
        if self.default:
            return at.among(default_slopes(at.H), at.h)
        return at.load("alibi", at.b, at.h) if self.per_batch else at.load("alibi", at.h)

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.addcmul_(self.slopes(at).to(s.dtype), self.distance(at).to(s.dtype), value=-1)

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        far = (ds * self.distance(at)).sum((2, 3))
        share = at.reading(totals).load("alibi", *((at.b, at.h) if self.per_batch else (at.h,)))
        share -= far[..., None, None].sum_to_size(share.shape)

    def spread(
        self, ts: torch.Tensor, tangents: Mapping[str, torch.Tensor], at: Place
    ) -> torch.Tensor:
        return self.change(ts, at.reading({**at.data, **tangents}))


def known_lengths(align: Align | None, own: Names, lengths: Names) -> Names:
    """The lengths that move a step of an alignment: its own, or, from the bottom right, those of
    the attention, as for masks."""
    return own or (lengths if align == "bottom_right" else ())


def default_slopes(heads: int) -> list[float]:
    """The slopes of "Train Short, Test Long" (Press et al., 2022), for any number of heads.

    For 2^n heads the geometric sequence from 2^(-8/2^n); else that of the power of two below, then
    every other one of the power of two above.
    """
    power = 2 ** int(math.log2(max(1, heads)))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-4 * (2 * h + 1) / power) for h in range(power)]
    return (slopes + between)[:heads]


@gives("ds")
@frozen
class ScoreGradient(Alike):
    """s or p, ds' or dp, operands -> ds: the gradient by scores, from that by a step's result."""

    is_gradient = True


@final
@frozen
class Back(ScoreGradient):
    """s', ds', operands -> ds: a modifier's derivative; 0 at masked places."""

    modifier: Modifier

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *self.modifier.ranks)

    def run(
        self, s: torch.Tensor, ds: torch.Tensor, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        at = Place.whole(s, dict(zip(self.modifier.needs, operands, strict=True)))
        nothing = (s == -INF) | (ds == 0)  # there s may be NaN, from rows beyond the lengths
        return (torch.where(nothing, 0.0, self.modifier.back(ds.clone(), s.clone(), at)),)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        (s, ds, *data), (ts, tds, *_) = operands, tangents
        bent = (
            None if self.modifier.additive else apply(emit, Bend(self.modifier), s, ds, ts, *data)
        )
        return (add_up(emit, apply(emit, self, s, tds, *data), bent),)

    def push_problems(self) -> Iterator[str]:
        yield from self.modifier.second_problems()


@final
@gives("tds")
@frozen
class Bend(Alike):
    """s', ds', ts', operands -> the tangent of `Back` as s' moves by ts'; 0 at masked places."""

    modifier: Modifier
    is_gradient = True

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, 4, *self.modifier.ranks)

    def run(
        self, s: torch.Tensor, ds: torch.Tensor, ts: torch.Tensor, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        at = Place.whole(s, dict(zip(self.modifier.needs, operands, strict=True)))
        bent = self.modifier.bend(ds, ts.clone(), s, at)
        bent = torch.zeros_like(ds) if bent is None else bent
        return (torch.where((s == -INF) | (ds == 0), 0.0, bent),)


@final
@gives("ts")
@frozen
class Spread(Alike):
    """s', operands, tangents of the `given` ones -> their share in the tangent of s'."""

    modifier: Modifier
    given: tuple[str, ...] = field(converter=as_names)
    is_gradient = True

    @property
    def ranks(self) -> tuple[int | None, ...]:
        known = dict(zip(self.modifier.needs, self.modifier.ranks[1:], strict=True))
        return (*self.modifier.ranks, *(known[name] for name in self.given))

    def run(self, s: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.modifier.needs)
        at = Place.whole(s, dict(zip(self.modifier.needs, operands[:count], strict=True)))
        moved = dict(zip(self.given, operands[count:], strict=True))
        added = self.modifier.spread(torch.zeros_like(s), moved, at)
        return (torch.where(s == -INF, 0.0, added),)


@final
@frozen
class Collect(Op):
    """ds', operands -> the gradients of a modifier's trained operands."""

    modifier: Modifier
    is_gradient = True

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return self.modifier.ranks

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"d{name}" for name in self.modifier.trains)

    def infer(self, *types: ValueType) -> tuple[ValueType, ...]:
        named = zip(self.modifier.needs, types[1:], strict=True)
        return tuple(type_ for name, type_ in named if name in self.modifier.trains)

    def run(self, ds: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data = dict(zip(self.modifier.needs, operands, strict=True))
        trained = self.modifier.trains
        totals = {
            name: torch.zeros(data[name].shape, dtype=ds.dtype, device=ds.device)
            for name in trained
        }
        self.modifier.collect(totals, ds, Place.whole(ds, data))
        return tuple(totals[name].to(data[name].dtype) for name in trained)

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        """The sums are linear in ds and contain no trained tensor: see `promises`."""
        if tangents[0] is None:
            return (None,) * len(results)
        return emit(self, tangents[0], *operands[1:])
