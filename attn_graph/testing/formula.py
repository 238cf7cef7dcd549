"""The formula of docs/semantics.md for one attention, in plain PyTorch on whole arrays.

Written from that page alone: it reads the library's graphs, but none of its ops' code. Everything
is out of place, so `torch.autograd` gives the gradients. Your own modifier has no formula besides
its definition: its `change` is used, and PyTorch differentiates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from attrs import evolve, frozen
from torch.autograd.graph import allow_mutation_on_saved_tensors

from attn_graph import masks
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.storage.scaling import Dequantise, Quantise
from attn_graph.ir.storage.views import Leading
from attn_graph.ir.terms.relative import RelativeBias
from attn_graph.masks.places import Place
from attn_graph.spec import IN_PAIRS, INF
from attn_graph.testing.mask_formula import Data, Places, evaluate_mask

Tensor = torch.Tensor
DENSE = torch.contiguous_format


# The attention in a graph.


@frozen
class Chain:
    """One attention: its tensors by role, and the steps on its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    modifiers: tuple[tuple[Modifier, Data], ...] = ()
    masks: tuple[tuple[masks.Mask, Data], ...] = ()
    sinks: Tensor | None = None
    rate: float = 0.0
    seed: int = 0
    offset: int = 0
    origin: tuple[int, ...] = ()
    narrow: torch.dtype | None = None  # weights are rounded to it
    o_scale: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M, N."""
        B, H, M, _ = self.q.shape
        return B, H, M, self.k.shape[2]


def read_chain(graph: Graph, tensors: Sequence[Tensor]) -> Chain:
    """The attention of a graph, in single steps or as one op."""
    values: dict[int, Tensor] = dict(enumerate(tensors))
    fields: dict[str, Any] = {}  # Any: those of a Chain
    for eqn, outs in graph.numbered:
        if isinstance(eqn.op, Leading):
            values[outs[0]] = values[eqn.args[0]][..., : eqn.op.size]
            continue
        if isinstance(eqn.op, Dequantise):  # `cast` has multiplied it
            values[outs[0]] = values[eqn.args[0]]
            continue
        if isinstance(eqn.op, Quantise):
            fields["o_scale"] = values[eqn.args[1]]
            continue
        fields |= read_step(eqn.op, [values.get(i, torch.empty(0)) for i in eqn.args], fields)
    return Chain(**fields)


def read_step(
    op: Op,
    given: list[Tensor],
    before: dict[str, Any],  # Any: fields of a Chain
) -> dict[str, Any]:  # Any: as above
    """The fields that one equation adds to a chain.

    Operands that are not inputs of the graph are not read.
    """
    match op:
        case ops.Scores(scale):
            return {"q": given[0], "k": given[1], "scale": scale}
        case Modifier():
            data = dict(zip(op.needs, given[1:], strict=True))
            return {"modifiers": (*before.get("modifiers", ()), (op, data))}
        case ops.Mask(mask):
            data = dict(zip(mask.needs, given[1:], strict=True))
            return {"masks": (*before.get("masks", ()), (mask, data))}
        case ops.Softmax():
            return {"sinks": given[1] if op.sinks else None}
        case ops.MaxScores():
            return {}
        case ops.Dropout(rate, origin):
            drawn = {"seed": int(given[1]), "offset": int(given[2]), "origin": origin}
            return {"rate": rate, **drawn}
        case ops.Weigh():
            return {"v": given[1]}
        case Attention():
            return read_attention(op, given)
        case _:
            raise NotImplementedError(f"{op} is not a part of one attention")


def read_attention(op: Attention, given: list[Tensor]) -> dict[str, Any]:  # Any: as above
    """All fields of a chain, from the operands q, k, v, modifiers', mask's, sinks, dropout's."""
    q, k, v, *rest = given
    more = iter(rest)
    modifiers = tuple((m, {name: next(more) for name in m.needs}) for m in op.modifiers)
    under = [op.mask] if op.mask is not None else []
    return {
        "q": q,
        "k": k,
        "v": v,
        "scale": op.scale,
        "modifiers": modifiers,
        "masks": tuple((m, {name: next(more) for name in m.needs}) for m in under),
        "sinks": next(more) if op.sinks else None,
        "rate": op.dropout,
        "seed": int(next(more)) if op.dropout else 0,
        "offset": int(next(more)) if op.dropout else 0,
        "origin": op.origin,
    }


def output_roles(graph: Graph) -> list[str]:
    """The role of each output: "p", "lse", "max", "pz" (p with dropout) or "o"."""
    names: dict[int, str] = {}
    for eqn, outs in graph.numbered:
        match eqn.op:
            case ops.Softmax():
                names |= zip(outs, ("p", "lse"), strict=True)
            case ops.MaxScores():
                names[outs[0]] = "max"
            case ops.Dropout():
                names[outs[0]] = "pz"
            case ops.Weigh():
                names[outs[0]] = "o"
            case Attention():
                names |= zip(outs, eqn.op.names, strict=True)
            case Quantise():
                names |= zip(outs, ("o8", "amax"), strict=True)
    return [names[i] for i in graph.outputs]


# The modifiers, each one step of the scores.


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of the ALiBi paper, as its authors' code computes them."""
    power = math.log2(heads) if heads else 0
    if power == int(power):
        first = 2 ** (-(2 ** -(power - 3)))
        return [first ** (n + 1) for n in range(heads)]
    below = 2 ** int(power)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: heads - below]


def alibi_penalty(op: Alibi, s: Tensor, at: Places) -> Tensor:
    """slope[h] * |i' - j|."""
    slopes = torch.tensor(alibi_slopes(at.sizes[1])) if op.default else at.data["alibi"]
    slopes = slopes.to(s.dtype)[..., None, None]
    ragged = op.ragged if op.align == "bottom_right" else ()
    return slopes * (at.aligned_rows(op.align, ragged) - at.axis("j")).abs().to(s.dtype)


def read_table(op: RelativeBias, table: Tensor, at: Places) -> Tensor:
    """table [H|1, entries] at the column of each place, [B|1,H|1,M,N]."""
    if op.places:
        column = at.data["places"]
    else:
        ragged = op.ragged if op.align == "bottom_right" else ()
        column = at.axis("j") - at.aligned_rows(op.align, ragged) + op.entries // 2
    everywhere = torch.zeros(1, 1, *at.sizes[2:], dtype=torch.int64)
    columns = (everywhere + column.clamp(0, op.entries - 1))[:, 0]
    return table.expand(-1, op.entries)[:, columns].transpose(0, 1)


STEPS: dict[type[Modifier], Callable[[Any, Tensor, Places], Tensor]] = {
    SoftCap: lambda op, s, at: op.cap * torch.tanh(s / op.cap),
    Bias: lambda op, s, at: s + at.data["bias"].to(s.dtype),
    Alibi: lambda op, s, at: s - alibi_penalty(op, s, at),
    RelativeBias: lambda op, s, at: s + read_table(op, at.data["table"].to(s.dtype), at),
}


def apply_modifier(op: Modifier, s: Tensor, at: Places) -> Tensor:
    if type(op) in STEPS:
        return STEPS[type(op)](op, s, at)
    changed: Tensor = OwnStep.apply(op, tuple(at.data), s, *at.data.values())  # type: ignore[no-untyped-call]  # of PyTorch
    return changed


class OwnStep(torch.autograd.Function):
    """The step of your own modifier, with a gradient by `change` alone."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: PyTorch's, with the tensors saved for backward
        op: Modifier,
        names: tuple[str, ...],
        s: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.op, ctx.names = op, names
        ctx.save_for_backward(s, *tensors)
        return op.change(s.clone(), Place.whole(s, dict(zip(names, tensors, strict=True)))).to(s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # Any: PyTorch's; None or gradients
        s, *tensors = ctx.saved_tensors
        data = dict(zip(ctx.names, tensors, strict=True))
        ds, more = differentiate(ctx.op, s, data, grads[0])
        return None, None, ds, *(more.get(name) for name in ctx.names)


def differentiate(
    op: Modifier, s: Tensor, data: Data, ds: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of s and of each floating operand of a step, given that of s'.

    They follow from `change` alone, which may work in place.
    """
    with torch.enable_grad(), allow_mutation_on_saved_tensors():
        x = s.detach().clone().requires_grad_()
        read = {name: t.detach().clone(memory_format=DENSE) for name, t in data.items()}
        leaves = {n: t.requires_grad_() for n, t in read.items() if t.is_floating_point()}
        changed = op.change(x.clone(), Place.whole(x, read))
        wanted = [x, *leaves.values()]
        grads = torch.autograd.grad(
            [changed + 0 * x], wanted, [ds], allow_unused=True, materialize_grads=True
        )
    return torch.where(ds == 0, 0.0, grads[0]), dict(zip(leaves, grads[1:], strict=True))


# Dropout's generator, in Python's integers.


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 (Salmon et al., SC 2011), one block."""
    word = 2**32
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, word)
        high1, low1 = divmod(0xCD9E8D57 * c2, word)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % word, (k1 + 0xBB67AE85) % word
    return c0, c1, c2, c3


@lru_cache(maxsize=16)  # float64 and the graph's dtype need the same dropout
def draw_dropout(
    rate: float,
    seed: int,
    offset: int,
    sizes: tuple[int, int, int, int],
    origin: tuple[int, ...] = (),
) -> Tensor:
    """z [B,H,M,N] in {0, 1}: place (b,h,i,j) draws word j % 4 at (j // 4, i, b H + h, offset).

    origin: of a part, b, h, i, j of its first place in the whole, the whole's H, and perhaps the
    number of batch entries after which draws repeat.
    """
    B, H, M, N = sizes
    b0, h0, i0, j0, heads, *more = origin or (0, 0, 0, 0, H)
    (period,) = more or (b0 + B + 1,)
    key = (seed % 2**32, seed // 2**32 % 2**32)
    rows = [
        [
            word
            for block in range(-(-(j0 + N) // 4))
            for word in philox(key, (block, i, b % period * heads + h, offset % 2**32))
        ][j0 : j0 + N]
        for b, h, i in product(range(b0, b0 + B), range(h0, h0 + H), range(i0, i0 + M))
    ]
    words = torch.tensor(rows, dtype=torch.int64).reshape(sizes)
    return (words >= round(rate * 2**32)).double()


# The formula.


@frozen
class Evaluation:
    """Every value of one attention that a graph may return or its gradient needs."""

    steps: tuple[Tensor, ...]  # scores, then the result of each modifier
    p: Tensor
    z: Tensor  # of dropout, over 1 - rate
    lse: Tensor
    max: Tensor
    pz: Tensor
    o: Tensor
    o8: Tensor  # before it is rounded to 8 bits

    @property
    def finite_steps(self) -> tuple[Tensor, ...]:
        """The steps with 0 at places of -inf, where p is 0 however large the terms are."""
        return tuple(s.masked_fill(self.steps[-1] == -INF, 0.0) for s in self.steps)

    @property
    def amax(self) -> Tensor:
        return self.o.abs().amax() if self.o.numel() else self.o.new_zeros(())

    def __getitem__(self, role: str) -> Tensor:
        value: Tensor = getattr(self, role)
        return value


def per_head(x: Tensor, heads: int) -> Tensor:
    """Query head h reads key/value head h // r."""
    r = heads // max(1, x.shape[1])
    return x[:, [h // r for h in range(heads)]]


def attend(c: Chain) -> Evaluation:
    """The page's seven steps. Rows that see neither a key nor a sink have o = 0 and lse = -inf."""
    B, H, M, N = c.sizes
    s = c.scale * torch.einsum("bhid,bhjd->bhij", c.q, per_head(c.k, H))
    steps = [s]
    for op, data in c.modifiers:
        hidden = s == -INF  # stays hidden
        s = apply_modifier(op, torch.where(hidden, 0.0, s), Places(c.sizes, data))
        s = torch.where(hidden, -INF, s)
        steps.append(s)
    keep = torch.ones((), dtype=torch.bool)
    for mask, data in c.masks:
        keep = keep & evaluate_mask(mask, Places(c.sizes, data))
    keep = keep.expand(B, H, M, N)
    sinks = c.sinks.to(s.dtype)[:, None, None] if c.sinks is not None else None
    p, lse = softmax(s, keep, sinks)
    z = torch.ones_like(s)
    if c.rate:
        z = draw_dropout(c.rate, c.seed, c.offset, c.sizes, c.origin).to(s.dtype) / (1 - c.rate)
    weights = p * z if c.narrow is None else round_to_eight(p, c.narrow)
    o = torch.einsum("bhij,bhje->bhie", weights, per_head(c.v, H))
    largest = torch.where(keep, s, -INF).amax(-1) if N else s.new_full((B, H, M), -INF)
    o8 = o if c.o_scale is None else o / expand_blocks(c.o_scale, o.shape).to(o.dtype)
    return Evaluation(tuple(steps), p, z, lse, largest.detach(), p * z, o, o8)


def softmax(s: Tensor, keep: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """p and lse. It never divides by 0 or takes the log of 0, so no gradient is NaN."""
    shown = torch.where(keep, s, -INF)
    columns = torch.cat([shown, sinks.expand(*s.shape[:3], 1)], -1) if sinks is not None else shown
    blind = (columns == -INF).all(-1, keepdim=True)
    if not columns.shape[-1]:
        return shown, s.new_full(s.shape[:3], -INF)
    sums = torch.logsumexp(torch.where(blind, 0.0, columns), -1, keepdim=True)
    p = torch.softmax(torch.where(blind, 0.0, columns), -1)[..., : shown.shape[-1]]
    return torch.where(blind, 0.0, p), torch.where(blind, -INF, sums)[..., 0]


def round_to_eight(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights rounded to 8 bits, 16 times their share of the largest in a row."""
    most = p.amax(-1, keepdim=True) if p.shape[-1] else p
    shares = torch.where(most > 0, 16 * p / most, 0.0)
    return shares.to(dtype).to(p.dtype) * most / 16


def cast(graph: Graph, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Inputs of the formula: floats in `dtype`, as leaves of a new autograd graph.

    Quantised tensors are multiplied by their scales in float64, and rounded once; values within
    keys are multiplied with these.
    """
    tensors, count = [*tensors], len(tensors)
    for eqn in graph.eqns:
        if isinstance(eqn.op, Dequantise) and eqn.args[0] < count:
            n, scale, _ = eqn.args
            x = halves_of(tensors[n]) if tensors[n].dtype == IN_PAIRS else tensors[n].double()
            tensors[n] = x * expand_blocks(tensors[scale], x.shape)
    return [
        x.detach().to("cpu", dtype).clone() if x.is_floating_point() else x.detach().cpu()
        for x in tensors
    ]


def halves_of(x: Tensor) -> Tensor:
    """The integers in the lower and the upper half of each byte, less 8, side by side."""
    halves = torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=torch.float64, device=x.device)
    halves[..., ::2], halves[..., 1::2] = x % 16, x // 16
    return halves - 8


def expand_blocks(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """A scale for each number of a tensor of this shape, in float64: that of its block."""
    for axis, n in enumerate(shape):
        block = n // max(1, scale.shape[axis])
        scale = scale.index_select(axis, torch.arange(n, device=scale.device) // max(1, block))
    return scale.double()


def evaluate(
    graph: Graph,
    tensors: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
    narrow: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The outputs, every step of the formula in `dtype`, and weights in `narrow`."""
    values = attend(evolve(read_chain(graph, cast(graph, tensors, dtype)), narrow=narrow))
    return tuple(values[role] for role in output_roles(graph))


def gradients(
    graph: Graph,
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """The gradient of every floating input, by its name; a cotangent of None is zero."""
    given = cast(graph, tensors, dtype)
    leaves = {
        i.name: x.requires_grad_()
        for n, (i, x) in enumerate(zip(graph.inputs, given, strict=True))
        if x.is_floating_point() and n not in graph.constants
    }
    values = attend(read_chain(graph, given))
    pairs = [
        (values[role], d.detach().to("cpu", dtype))
        for role, d in zip(output_roles(graph), cotangents, strict=True)
        if d is not None and values[role].requires_grad
    ]
    if not pairs:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    outputs, dues = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, [*leaves.values()], dues, allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }


def poison_blind_rows(
    graph: Graph,
    tensors: Sequence[Tensor],
    cotangents: Sequence[Any],  # Any: tensors, and None
    seed: int,
) -> tuple[Any, ...]:  # Any: tensors, None for a missing cotangent
    """The cotangents with NaN and infinities in rows that see nothing, where they count 0."""
    blind = attend(read_chain(graph, cast(graph, tensors, torch.float64))).lse == -INF
    random = torch.Generator().manual_seed(seed)
    poison = torch.tensor([math.nan, INF, -INF])[torch.randint(3, blind.shape, generator=random)]

    def poison_rows(x: Tensor) -> Tensor:
        shape = (*blind.shape, *[1] * (x.dim() - blind.dim()))
        return torch.where(blind.view(shape).to(x.device), poison.view(shape).to(x), x)

    return tuple(None if x is None else poison_rows(x) for x in cotangents)
