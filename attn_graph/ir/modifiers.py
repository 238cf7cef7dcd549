"""Score modifiers: pointwise steps s -> s' between scores and mask.

A modifier states its mathematics once, for a block of scores at any place: `change` (the step),
`back` (its derivative) and `collect` (the gradient of its tensors). The reference, the op-by-op
gradient and the blocked lowerings all run these three. A modifier that only adds (`additive`) has
the derivative 1, and fused kernels may take it as a block of bias. Any other
without `back` runs forward alone, and its gradient is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from attrs import Attribute, evolve, field, frozen

from attn_graph.errors import GraphError, problems_of
from attn_graph.ir.graph import Emit, Gradients, Op, Values, op_name
from attn_graph.masks import (
    Align,
    Data,
    as_names,
    diagonal_offset,
    require_alignment,
    require_lengths,
)
from attn_graph.masks.places import Block, Place, Term
from attn_graph.spec import FLOATS, INF, INTEGERS, NAMES, ValueType, to_number


def require_positive(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError for what is no positive, finite number."""
    if not (isinstance(value, float) and 0 < value < INF):
        raise GraphError(f"{attribute.name} {value!r} must be a number, positive and finite")


def require_finite(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError for what is no finite number."""
    if not (isinstance(value, float) and math.isfinite(value)):
        raise GraphError(f"{attribute.name} {value!r} must be a finite number")


def range_problem(value: float, dtype: torch.dtype) -> str:
    """Why scores of a dtype cannot be computed with a number; "" where they can.

    Kernels also use its inverse and log2(e) times it, and these have to be normal numbers too.
    """
    most = 2.0**1022 if dtype == torch.float64 else 2.0**126
    if abs(value) <= most:
        return ""
    return (
        f"{value:g} is beyond {most:.3g}, the most that scores of {NAMES[dtype]} are computed with"
    )


@frozen
class Modifier(Op):
    """s [B,H,M,N], operands -> s' [B,H,M,N]. A score of -inf is masked and stays -inf.

    A modifier of your own is a `@final @frozen` subclass. What it promises, by its fields and
    methods, is checked on a small block when a graph is built with it.
    """

    additive: ClassVar[bool] = False  # s' = s + addend(at)
    hides: ClassVar[bool] = True  # the step may give -inf

    @property
    def names(self) -> tuple[str, ...]:
        return ("s",)

    @property
    def relative(self) -> bool:
        """Whether the step depends on b, h and j - i, not on i itself."""
        return False

    @property
    def needs(self) -> dict[str, Data]:
        """The tensors that the step reads, by name, in the order of the operands."""
        return {}

    @property
    def trains(self) -> tuple[str, ...]:
        """Those of `needs` that have a gradient, which `collect` adds up."""
        return ()

    @property
    def roles(self) -> tuple[str, ...]:
        """The name of each operand: s, then the tensors that the step reads."""
        return ("s", *self.needs)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *(None for _ in self.needs))  # `Data` says how many axes

    def resolved(self, M: int, N: int) -> Modifier:
        """This step for M queries and N keys. Raises GraphError where an alignment is missing."""
        return self

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        """s' of a block of scores [b,h,i,j], in the memory of s or in new memory."""
        raise NotImplementedError

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        """The gradient of the step's input. ds: that of its result s. May overwrite both."""
        if not self.additive:
            raise GraphError(*self.gradient_problems())
        return ds

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        """Add this block's share of the gradient of the operands named in `totals`."""
        raise GraphError(*self.gradient_problems())

    def gradient_problems(self) -> Iterator[str]:
        """The parts of the gradient that the class does not define."""
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
        if type(self) not in MODIFIERS:
            from attn_graph.ir.promises import (
                modifier_promise_problems,  # which imports this module
            )

            yield from modifier_promise_problems(self, (B, H, M, N))

    def infer(self, s: ValueType, *_: ValueType) -> tuple[ValueType, ...]:
        return (s,)

    def run(self, s: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = self.change(
            s.clone(), every_place(s, dict(zip(self.needs, operands, strict=True)))
        )
        return (torch.where(s == -INF, s, changed),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        wanted = [i for i, name in enumerate(self.needs) if name in self.trains]
        gradients: list[Any] = [None] * len(self.needs)
        if wanted:
            for i, total in zip(wanted, emit(Collect(self), grads[0], *operands[1:]), strict=True):
                gradients[i] = total
        return (emit(Back(self), results[0], grads[0], *operands[1:])[0], *gradients)


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


def find_restores(modifiers: Sequence[Modifier]) -> tuple[bool, ...]:
    """For each step, whether -inf has to be restored after it, at places that an earlier step hid.

    A step that adds finite numbers leaves -inf as it is.
    """
    hidden = [any(m.hides for m in modifiers[:n]) for n in range(len(modifiers))]
    return tuple(
        before and (m.hides or not m.additive) for m, before in zip(modifiers, hidden, strict=True)
    )


def every_place(s: torch.Tensor, data: Mapping[str, torch.Tensor]) -> Place:
    """The places of a whole array of scores s [B,H,M,N]. data: the tensors to read there."""
    B, H, M, N = s.shape
    block = Block(range(B), range(H), range(M), H, M, N, data)
    return Place.of(block, range(N), s.device)


@final
@frozen
class SoftCap(Modifier):
    """s -> cap * tanh(s / cap): scores never leave (-cap, cap)."""

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


@final
@frozen
class Alibi(Modifier):
    """s -> s - slope[h] * |i' - j|; slopes [H] or [B,H], or the paper's for H heads.

    The operand `alibi` has the slopes, in q's dtype or float32. `default`: the paper's slopes, and
    no operand. i' is the query's position by `align`, moved by the lengths that `ragged` names.
    """

    additive = True
    hides = False
    default: bool = field(default=False, converter=bool)
    align: Align | None = field(default=None, validator=require_alignment)
    ragged: tuple[str, ...] = field(default=(), converter=as_names, validator=require_lengths)
    per_batch: bool = field(default=False, converter=bool)

    @property
    def relative(self) -> bool:
        """Whether the step depends on j - i alone: unless lengths move it."""
        return not self.ragged

    @property
    def needs(self) -> dict[str, Data]:
        slopes = {} if self.default else {"alibi": Data("bh" if self.per_batch else "h", FLOATS)}
        return slopes | {name: Data("b", INTEGERS) for name in self.ragged}

    @property
    def trains(self) -> tuple[str, ...]:
        return () if self.default else ("alibi",)

    def resolved(self, M: int, N: int) -> Modifier:
        diagonal_offset(self.align, M, N, "alibi")
        return evolve(self, align="top_left") if M == N and not self.ragged else self

    def distance(self, at: Place) -> Term:
        """|i' - j| at a place."""
        ragged = self.ragged if self.align == "bottom_right" else ()
        moved = at.shift(ragged) if ragged else diagonal_offset(self.align, at.M, at.N, "alibi")
        return (at.i + moved - at.j).abs()

    def slopes(self, at: Place) -> Term:
        """The slope at a place, of its batch entry and head."""
        if self.default:
            return at.among(default_slopes(at.H), at.h)
        return at.load("alibi", at.b, at.h) if self.per_batch else at.load("alibi", at.h)

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        return s.addcmul_(self.slopes(at).to(s.dtype), self.distance(at).to(s.dtype), value=-1)

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        far = (ds * self.distance(at)).sum((2, 3))
        share = at.reading(totals).load("alibi", *((at.b, at.h) if self.per_batch else (at.h,)))
        share -= far[..., None, None].sum_to_size(share.shape)


def default_slopes(heads: int) -> list[float]:
    """The slopes of "Train Short, Test Long" (Press et al., 2022), for any number of heads.

    For 2^n heads the geometric sequence from 2^(-8/2^n); else that of the power of two below,
    then every other one of the power of two above.
    """
    power = 2 ** int(math.log2(max(1, heads)))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-4 * (2 * h + 1) / power) for h in range(power)]
    return (slopes + between)[:heads]


MODIFIERS = (SoftCap, Bias, Alibi)


@frozen
class ScoreGradient(Op):
    """s, ds', operands -> ds: from the gradient by scores after a step, that before it."""

    is_gradient = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("ds",)

    @property
    def reads(self) -> int:
        return 2

    def infer(self, s: ValueType, ds: ValueType, *_: ValueType) -> tuple[ValueType, ...]:
        return (ds,)


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
        at = every_place(s, dict(zip(self.modifier.needs, operands, strict=True)))
        return (torch.where(s == -INF, 0.0, self.modifier.back(ds.clone(), s.clone(), at)),)


@final
@frozen
class Collect(Op):
    """ds', operands -> the gradients of those operands of a modifier that have one."""

    modifier: Modifier
    is_gradient = True

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return self.modifier.ranks

    @property
    def reads(self) -> int:
        """How many operands `infer` reads: all."""
        return len(self.ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each gradient: dbias of bias."""
        return tuple(f"d{name}" for name in self.modifier.trains)

    def infer(self, ds: ValueType, *types: ValueType) -> tuple[ValueType, ...]:
        named = zip(self.modifier.needs, types, strict=True)
        return tuple(type_ for name, type_ in named if name in self.modifier.trains)

    def run(self, ds: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data = dict(zip(self.modifier.needs, operands, strict=True))
        trained = self.modifier.trains
        totals = {
            name: torch.zeros(data[name].shape, dtype=ds.dtype, device=ds.device)
            for name in trained
        }
        self.modifier.collect(totals, ds, every_place(ds, data))
        return tuple(totals[name].to(data[name].dtype) for name in trained)
