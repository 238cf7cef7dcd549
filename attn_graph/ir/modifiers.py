"""Score modifiers: pointwise steps s -> s' between scores and mask.

A modifier states its mathematics once, on a block of scores wherever that block lies: `change`
(the step), `back` (its derivative) and `collect` (the gradient of its tensors). The reference,
the op-by-op gradient and the blocked lowerings all run these three. A modifier that only adds
(`additive`) may be handed to fused kernels as a block of bias, and has the derivative 1. Any other
one without `back` runs forward alone, and its gradient is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from attrs import Attribute, evolve, field, frozen, validators

from attn_graph.errors import GraphError, problems_of
from attn_graph.ir.graph import Emit, Gradients, Op, Values, op_name
from attn_graph.masks import LENGTHS, Align, Data, alignment, as_names, offset
from attn_graph.masks.places import Block, Place, Term
from attn_graph.spec import FLOATS, INF, INTEGERS, NAMES, ValueType, number


def positive(_: object, attribute: Attribute[float], value: float) -> None:
    if not (isinstance(value, float) and 0 < value < INF):
        raise GraphError(f"{attribute.name} {value!r} must be a number, positive and finite")


def finite(_: object, attribute: Attribute[float], value: float) -> None:
    if not (isinstance(value, float) and math.isfinite(value)):
        raise GraphError(f"{attribute.name} {value!r} must be a finite number")


def beyond(value: float, dtype: torch.dtype) -> str:
    """Why scores of a dtype can't be computed with a number; "" where they can.

    Its inverse and its multiple by log2(e), which kernels use, are to be normal numbers as well.
    """
    most = 2.0**1022 if dtype == torch.float64 else 2.0**126
    if abs(value) <= most:
        return ""
    return (
        f"{value:g} is beyond {most:.3g}, the most that scores of {NAMES[dtype]} are computed with"
    )


@frozen
class Modifier(Op):
    """s [B,H,M,N], operands -> s' [B,H,M,N]. A place at -inf is masked, and stays so.

    One of your own is a `@final @frozen` subclass. What it says of itself is checked on a small
    block when a graph is built with it.
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
        """Those of them that have a gradient."""
        return ()

    @property
    def roles(self) -> tuple[str, ...]:
        return ("s", *self.needs)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *(None for _ in self.needs))  # `Data` says how many axes

    def resolved(self, M: int, N: int) -> Modifier:
        """This step with its alignment turned into an offset."""
        return self

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        """s', in the memory of s or in memory of its own."""
        raise NotImplementedError

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        """The gradient of the step's input; s is the step's result. May use the memory of both."""
        if not self.additive:
            raise GraphError(*self.gradient_problems())
        return ds

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        """Add this block's share of the gradient of the operands named in `totals`."""
        raise GraphError(*self.gradient_problems())

    def gradient_problems(self) -> Iterator[str]:
        """Parts of the gradient that are not defined."""
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
            from attn_graph.ir.promises import modifier_problems  # above this floor

            yield from modifier_problems(self, (B, H, M, N))

    def infer(self, s: ValueType, *_: ValueType) -> tuple[ValueType, ...]:
        return (s,)

    def run(self, s: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = self.change(
            s.clone(), every_place(s, dict(zip(self.needs, operands, strict=True)))
        )
        return (torch.where(s == -INF, s, changed),)

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        wanted = [i for i, name in enumerate(self.needs) if name in self.trains]
        found: list[Any] = [None] * len(self.needs)
        if wanted:
            for i, total in zip(wanted, emit(Collect(self), grads[0], *operands[1:]), strict=True):
                found[i] = total
        return (emit(Back(self), results[0], grads[0], *operands[1:])[0], *found)


def change_(modifier: Modifier, s: torch.Tensor, at: Place) -> None:
    """s -> s' in the memory of s, wherever `change` puts its result."""
    changed = modifier.change(s, at)
    if changed is not s:
        s.copy_(changed)


def back_(modifier: Modifier, ds: torch.Tensor, s: torch.Tensor, at: Place) -> None:
    """ds of a step's result s -> ds of what it changed, in the memory of ds. Uses up s."""
    given = modifier.back(ds, s, at)
    if given is not ds:
        ds.copy_(given)


def restoring(modifiers: Sequence[Modifier]) -> tuple[bool, ...]:
    """For each step, whether -inf has to be put back after it: at places that an earlier step hid.

    Adding a finite number leaves -inf where it is.
    """
    hidden = [any(m.hides for m in modifiers[:n]) for n in range(len(modifiers))]
    return tuple(
        before and (m.hides or not m.additive) for m, before in zip(modifiers, hidden, strict=True)
    )


def every_place(s: torch.Tensor, data: Mapping[str, torch.Tensor]) -> Place:
    """Every place of a full score array."""
    B, H, M, N = s.shape
    block = Block(range(B), range(H), range(M), H, M, N, data)
    return Place.of(block, range(N), s.device)


@final
@frozen
class SoftCap(Modifier):
    """s -> cap * tanh(s / cap): scores never leave (-cap, cap)."""

    hides = False
    cap: float = field(converter=number, validator=positive)

    @property
    def relative(self) -> bool:
        return True

    def problems(self, *types: ValueType) -> Iterator[str]:
        yield from super().problems(*types)
        if told := beyond(self.cap, types[0].dtype):
            yield f"soft_cap: cap {told}"
        elif told := beyond(1 / self.cap, types[0].dtype):
            yield f"soft_cap: 1 / cap {told}"

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

    The operand `alibi` holds the slopes, in q's dtype or float32; `default` asks for the paper's,
    and there is then no operand. i' is the query's place by `align`.
    """

    additive = True
    hides = False
    default: bool = field(default=False, converter=bool)
    align: Align | None = field(default=None, validator=alignment)
    ragged: tuple[str, ...] = field(
        default=(), converter=as_names, validator=validators.deep_iterable(validators.in_(LENGTHS))
    )
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

    def resolved(self, M: int, N: int) -> Modifier:
        offset(self.align, M, N, "alibi")
        return evolve(self, align="top_left") if M == N and not self.ragged else self

    def distance(self, at: Place) -> Term:
        ragged = self.ragged if self.align == "bottom_right" else ()
        moved = at.shift(ragged) if ragged else offset(self.align, at.M, at.N, "alibi")
        return (at.i + moved - at.j).abs()

    def slopes(self, at: Place) -> Term:
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


@final
@frozen
class Back(Op):
    """s', ds', operands -> ds: a modifier's derivative; 0 at masked places."""

    modifier: Modifier
    is_gradient = True

    @property
    def names(self) -> tuple[str, ...]:
        return ("ds",)

    @property
    def reads(self) -> int:
        return 2

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return (4, *self.modifier.ranks)

    def infer(self, s: ValueType, ds: ValueType, *_: ValueType) -> tuple[ValueType, ...]:
        return (ds,)

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
        return len(self.ranks)

    @property
    def names(self) -> tuple[str, ...]:
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
