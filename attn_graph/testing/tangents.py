"""The right tangents: PyTorch's derivatives of the formula, by the accuracy rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen
from torch.func import jvp, vjp

from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Alibi, Bias, SoftCap
from attn_graph.ir.relative import RelativeBias
from attn_graph.spec import INF
from attn_graph.testing.formula import (
    Chain,
    Evaluation,
    Tensor,
    alibi_penalty,
    attend,
    cast,
    per_head,
    read_chain,
    read_table,
)
from attn_graph.testing.mask_formula import Places
from attn_graph.testing.rule import (
    NOTHING,
    UNIT,
    Expectation,
    add_exp_error,
    low_dtype,
    operand_terms,
    slope,
    sum_groups,
)

Named = Mapping[str, Tensor]
DERIVED = ("o", "lse")  # the results that have a derivative


@frozen
class Directions:
    """Tangents of inputs by name; cotangents of o and lse, and their tangents."""

    tangents: Named
    do: Tensor
    dlse: Tensor
    tdo: Tensor
    tdlse: Tensor

    def to(self, dtype: torch.dtype) -> Directions:
        tangents = {name: x.to(dtype) for name, x in self.tangents.items()}
        rest = (x.to(dtype) for x in (self.do, self.dlse, self.tdo, self.tdlse))
        return Directions(tangents, *rest)


def formula_at(graph: Graph, tensors: Sequence[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """(o, lse) of the formula, as a function of the floating inputs by name."""
    attend(read_chain(graph, tensors))  # draws dropout, which is cached, outside of transforms

    def call(moving: Named) -> tuple[Tensor, Tensor]:
        given = [moving.get(i.name, x) for i, x in zip(graph.inputs, tensors, strict=True)]
        f = attend(read_chain(graph, given))
        blind = f.lse.isinf()
        return f.o, torch.where(blind, f.lse.detach(), f.lse)

    return call


def floating_inputs(graph: Graph, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    pairs = zip(graph.inputs, tensors, strict=True)
    return {i.name: x for i, x in pairs if x.is_floating_point()}


def push_formula(
    graph: Graph, tensors: Sequence[Tensor], tangents: Named, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """o, lse, to and tlse by PyTorch's forward mode over the formula, every step in `dtype`."""
    given = cast(graph, tensors, dtype)
    known = floating_inputs(graph, given)
    moves = {
        n: tangents[n].to(dtype) if n in tangents else torch.zeros_like(x) for n, x in known.items()
    }
    results, moved = jvp(formula_at(graph, given), (known,), (moves,))[:2]
    return (*results, *moved)


def push_gradient_formula(
    graph: Graph, tensors: Sequence[Tensor], along: Directions, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tangent of each floating input's gradient: forward over reverse, in `dtype`."""
    given, along = cast(graph, tensors, dtype), along.to(dtype)
    known, call = floating_inputs(graph, given), formula_at(graph, given)
    zeros = {n: torch.zeros_like(x) for n, x in known.items()}

    def gradient(moving: Named, do: Tensor, dlse: Tensor) -> Named:
        found: Named = vjp(call, moving)[1]((do, dlse))[0]
        return found

    point = (known, along.do, along.dlse)
    direction = (zeros | dict(along.tangents), along.tdo, along.tdlse)
    moved: dict[str, Tensor] = jvp(gradient, point, direction)[1]
    return moved


def expect_tangents(
    graph: Graph, tensors: Sequence[Tensor], tangents: Named
) -> tuple[Expectation, ...]:
    """The right tangents of o and lse, within the accuracy rule."""
    refs = push_formula(graph, tensors, tangents, torch.float64)[2:]
    lows = push_formula(graph, tensors, tangents, low_dtype(graph))[2:]
    sizes = Sizes.of(graph, tensors, tangents)
    terms = zip(("to", "tlse"), refs, lows, sizes.pushed(), strict=True)
    return tuple(Expectation(name, ref, low, size, True) for name, ref, low, size in terms)


def expect_gradient_tangents(
    graph: Graph, tensors: Sequence[Tensor], along: Directions
) -> dict[str, Expectation]:
    """The right tangent of each floating input's gradient, within the accuracy rule."""
    refs = push_gradient_formula(graph, tensors, along, torch.float64)
    lows = push_gradient_formula(graph, tensors, along, low_dtype(graph))
    sizes = Sizes.of(graph, tensors, along.tangents)
    rounding = UNIT[low_dtype(graph)] / UNIT[torch.float32]
    terms = sizes.pulled(along.to(torch.float64), rounding)
    return {
        name: Expectation(f"td{name}", ref, lows[name], terms.get(name, NOTHING), True)
        for name, ref in refs.items()
    }


@frozen
class Sizes:
    """sum|terms| of tangents: their formulas with every minus a plus.

    names: of the tensors of a chain, by their id. moves: the size of each tangent, by name.
    """

    c: Chain
    f: Evaluation
    names: dict[int, str]
    moves: dict[str, Tensor]

    @classmethod
    def of(cls, graph: Graph, tensors: Sequence[Tensor], tangents: Named) -> Sizes:
        exact = cast(graph, tensors, torch.float64)
        c = read_chain(graph, exact)
        names = {id(x): i.name for i, x in zip(graph.inputs, exact, strict=True)}
        return cls(c, attend(c), names, {n: x.double().abs() for n, x in tangents.items()})

    def move(self, x: Tensor) -> Tensor:
        return self.moves.get(self.names[id(x)], torch.zeros_like(x))

    def scores(self) -> list[Tensor]:
        """The size of the tangent of the products, and after each modifier."""
        c, f, H = self.c, self.f, self.c.sizes[1]
        k, tk = per_head(c.k.abs(), H), per_head(self.move(c.k), H)
        dot = "bhid,bhjd->bhij"
        both = torch.einsum(dot, self.move(c.q), k) + torch.einsum(dot, c.q.abs(), tk)
        ts = [abs(c.scale) * both]
        steps = zip(c.modifiers, f.finite_steps, f.finite_steps[1:], strict=False)
        for (op, data), before, after in steps:
            moved = ts[-1] * slope(op, data, before, after)
            if isinstance(op, Bias):
                moved = moved + self.move(data["bias"])
            if isinstance(op, Alibi) and not op.default:
                slopes = self.move(data["alibi"])[..., None, None]
                ones = Places(c.sizes, {**data, "alibi": torch.ones(1, 1, dtype=torch.float64)})
                moved = moved + slopes * alibi_penalty(op, after, ones)
            if isinstance(op, RelativeBias):
                moved = moved + read_table(op, self.move(data["table"]), Places(c.sizes, data))
            ts.append(moved.masked_fill(f.steps[-1] == -INF, 0.0))
        return ts

    def pushed(self) -> tuple[Tensor, Tensor]:
        """Of to and tlse."""
        c, f, H, ts = self.c, self.f, self.c.sizes[1], self.scores()[-1]
        w, z = add_exp_error(c, f, f.p), add_exp_error(c, f, f.pz)
        tlse = (w * ts).sum(-1)
        if c.sinks is not None:
            share = torch.exp(c.sinks[:, None] - f.lse).nan_to_num(0.0)
            tlse = (
                tlse
                + share * (1 + 2 * f.lse.abs().nan_to_num(posinf=0.0)) * self.move(c.sinks)[:, None]
            )
        weigh = "bhij,bhje->bhie"
        to = torch.einsum(weigh, z * ts, per_head(c.v.abs(), H))
        to = to + torch.einsum(weigh, z, per_head(self.move(c.v), H))
        return to + tlse[..., None] * torch.einsum(weigh, z, per_head(c.v.abs(), H)), tlse

    def pulled(self, along: Directions, rounding: float) -> dict[str, Tensor]:
        """Of the tangents of gradients, by input. rounding: of o and to."""
        c, f, H = self.c, self.f, self.c.sizes[1]
        do, dlse, tdo, tdlse = (x.abs() for x in (along.do, along.dlse, along.tdo, along.tdlse))
        ts, (to, tlse) = self.scores(), self.pushed()
        v, tv = per_head(c.v.abs(), H), per_head(self.move(c.v), H)
        dot = "bhie,bhje->bhij"
        dp = torch.einsum(dot, do, v) * f.z
        tdp = (torch.einsum(dot, tdo, v) + torch.einsum(dot, do, tv)) * f.z
        w, z, u = add_exp_error(c, f, f.p), add_exp_error(c, f, f.pz), ts[-1] + tlse[..., None]
        coarse = (rounding - 1) * (do * f.o.abs()).sum(-1)
        moved = (rounding - 1) * (tdo * f.o.abs() + do * to).sum(-1)
        g = (f.p * dp).sum(-1) + dlse + coarse
        tg = (f.p * (u * dp + tdp)).sum(-1) + tdlse + moved
        ds, tds = w * (dp + g[..., None]), w * (u * (dp + g[..., None]) + tdp + tg[..., None])
        sizes: dict[str, Tensor] = {}

        def add(x: Tensor, terms: Tensor) -> None:
            name = self.names[id(x)]
            sizes[name] = sizes.get(name, NOTHING) + terms

        back = "bhij,bhie->bhje"
        add(c.v, sum_groups(torch.einsum(back, z * u, do) + torch.einsum(back, z, tdo), c.v))
        if c.sinks is not None:
            share = torch.exp(c.sinks[:, None] - f.lse).nan_to_num(0.0)
            share = share * (
                1
                + 2
                * (
                    f.lse.abs().nan_to_num(posinf=0.0)
                    + c.sinks.abs()[:, None].nan_to_num(posinf=0.0)
                )
            )
            add(c.sinks, (share * ((self.move(c.sinks)[:, None] + tlse) * g + tg)).sum((0, 2)))
        steps = zip(c.modifiers, f.finite_steps, f.finite_steps[1:], ts[1:], strict=False)
        for (op, data), before, after, t in reversed([*steps]):
            for name in op.trains:
                add(data[name], operand_terms(c, op, data, before, name, tds))
            bent = 2 * ds * after.abs() / op.cap**2 * t if isinstance(op, SoftCap) else 0.0
            tds = tds * slope(op, data, before, after) + bent
            ds = ds * slope(op, data, before, after)
        dot, back = "bhij,bhjd->bhid", "bhij,bhid->bhjd"
        k, tk = per_head(c.k.abs(), H), per_head(self.move(c.k), H)
        tdq = torch.einsum(dot, tds, k) + torch.einsum(dot, ds, tk)
        tdk = torch.einsum(back, tds, c.q.abs()) + torch.einsum(back, ds, self.move(c.q))
        add(c.q, abs(c.scale) * tdq)
        add(c.k, abs(c.scale) * sum_groups(tdk, c.k))
        return sizes
