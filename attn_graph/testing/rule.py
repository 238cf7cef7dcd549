"""The accuracy rule of docs/semantics.md: the allowed distance of a result from the formula.

`expect_outputs` and `expect_gradients` give the right results; `check` of each raises
AssertionError with the error and the allowance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch.func import jvp

from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Modifier, SoftCap
from attn_graph.ir.reference import round_twice
from attn_graph.ir.storage.scaling import saturate, stands_in, weights_dtype
from attn_graph.ir.transforms.tracing import trace_along_data
from attn_graph.masks.places import Place
from attn_graph.spec import INF
from attn_graph.testing.formula import (
    STEPS,
    Chain,
    Evaluation,
    Tensor,
    apply_modifier,
    attend,
    cast,
    differentiate,
    evaluate,
    expand_blocks,
    gradients,
    output_roles,
    per_head,
    read_chain,
)
from attn_graph.testing.mask_formula import Data, Places

NOTHING = torch.zeros(1, dtype=torch.float64)
HALF = (torch.float16, torch.bfloat16)
UNIT = {  # the largest relative error of one rounding
    torch.float8_e5m2: 2.0**-3,
    torch.float8_e4m3fn: 2.0**-4,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
EXP_ERROR = 2.0**-13  # of PyTorch's fused CPU kernel in half precision: see docs/semantics.md


def distance(x: Tensor, ref: Tensor) -> float:
    """max|x - ref|: equal infinities have distance 0, one NaN or infinity has distance inf."""
    a, b = x.detach().to("cpu", torch.float64), ref.to(torch.float64)
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=INF, posinf=INF)
    return float(apart.max()) if apart.numel() else 0.0


def allowance(ref: Tensor, low: Tensor, dtype: torch.dtype, *, gradient: bool = False) -> float:
    """The allowed distance of a result of `dtype`: 2 max|low - ref| + 2 max|ref's rounding|.

    Rounding is the change by adding and subtracting 0.3 in `dtype`. Gradients in half precision
    have 3 for the first 2. For float64, with the page's `low` equal to `ref`, `low` is float32's
    and counts 2^-29: rounding errors are, to first order, linear in the unit roundoff.
    """
    shrink = 2.0**-29 if dtype == torch.float64 else 1.0
    times = 3 if gradient and dtype in HALF else 2
    return shrink * times * distance(low, ref) + 2 * distance(round_twice(ref, dtype), ref)


@frozen
class Expectation:
    """The right result, and `terms`: the size of the terms that add up to it.

    `low` may be exact by luck, or if terms cancel to 0 while another order of operations leaves a
    rounding error: a row that sees one key has ds = p (dp - delta) = 0. So max|low - ref| counts as
    at least the first term of the a-priori bound of any sum of rounded terms, u * sum|terms|, with
    u the unit roundoff of accumulated sums.
    """

    name: str
    ref: Tensor
    low: Tensor
    terms: Tensor
    gradient: bool = False

    def allowance(self, dtype: torch.dtype) -> float:
        """The allowed distance of a result of `dtype` from `ref`."""
        rule = allowance(self.ref, self.low, dtype, gradient=self.gradient)
        if rule == INF and self.ref.isfinite().all():
            rule = 0.0  # in half precision the formula overflowed: then only the bound counts
        unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
        luck = unit * float(self.terms.max()) if self.terms.numel() else 0.0
        return max(rule, 2 * luck + 2 * distance(round_twice(self.ref, dtype), self.ref))

    def check(self, x: Tensor, who: str = "") -> None:
        """Raise AssertionError unless x is close enough, with the error and the allowance.

        who: a prefix for the message.
        """
        name = f"{who}{self.name}"
        assert x.shape == self.ref.shape, f"{name}: {x.shape} is not {self.ref.shape}"
        most, error = self.allowance(x.dtype), distance(x, self.ref)
        assert most < INF, f"{name}: the rule does not apply, low is {self.low}"
        message = f"{name}: error {error:.3g}, allowed {most:.3g}\n{x}\nis not\n{self.ref}"
        assert error <= most, message


def low_dtype(graph: Graph) -> torch.dtype:
    """The dtype of `low`: q's, float32 if q's is `ref`'s, or bfloat16 if q is quantised."""
    dtype = stands_in(graph.inputs[0].spec.dtype)
    return torch.float32 if dtype == torch.float64 else dtype


def expect_outputs(
    graph: Graph, tensors: Sequence[Tensor], precision: str = "ieee"
) -> tuple[Expectation, ...]:
    """The right outputs of a graph of one attention, within the accuracy rule.

    precision: as plans have it.
    """
    narrow = weights_dtype(graph, precision)
    refs, lows = evaluate(graph, tensors), evaluate(graph, tensors, low_dtype(graph), narrow)
    c = read_chain(graph, cast(graph, tensors, torch.float64))
    sizes = forward_terms(c, attend(c))
    if narrow is not None:
        sizes["o"] = sizes["o"] + narrow_terms(c, attend(c), narrow)
    if c.o_scale is not None:
        each = expand_blocks(c.o_scale, sizes["o"].shape)
        sizes |= {"o8": sizes["o"] / each, "amax": largest(sizes["o"])}
        # a number of float32, read off o, which is rounded to the dtype of `low`; terms count twice
        rounding = UNIT[low_dtype(graph)] / (2 * UNIT[torch.float32])
        sizes["amax"] = sizes["amax"] + rounding * attend(c).amax
        refs = tuple(
            saturate(ref, t.dtype) for ref, t in zip(refs, graph.output_types, strict=True)
        )
    if low_dtype(graph) in HALF:
        sizes["lse"] = sizes["lse"] + EXP_ERROR / (2 * UNIT[torch.float32])  # terms count twice
    return tuple(
        Expectation(role, ref, low, sizes[role])
        for role, ref, low in zip(output_roles(graph), refs, lows, strict=True)
    )


def expect_gradients(
    graph: Graph, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> dict[str, Expectation]:
    """The right gradient of each floating input, by the input's name.

    A cotangent of None is zero.
    """
    refs = gradients(graph, tensors, cotangents)
    lows = gradients(graph, tensors, cotangents, low_dtype(graph))
    given = dict(zip(output_roles(graph), cotangents, strict=True))
    do, dlse = (
        NOTHING if x is None else x.detach().cpu().double() for x in map(given.get, ("o", "lse"))
    )
    rounding = UNIT[low_dtype(graph)] / UNIT[torch.float32]  # of o, an operand of the gradient
    sizes = Sizes.of(graph, tensors, {})
    seen = largest_scores(sizes.c, sizes.f)
    terms = sizes.pulled(NOTHING, NOTHING, do, dlse, rounding, seen)
    return {
        name: Expectation(f"d{name}", ref, lows[name], terms.get(name, NOTHING), True)
        for name, ref in refs.items()
    }


def score_sizes(c: Chain, f: Evaluation) -> Tensor:
    """sum|terms| of each score: with every minus a plus."""
    size = abs(c.scale) * torch.einsum(
        "bhid,bhjd->bhij", c.q.abs(), per_head(c.k.abs(), c.sizes[1])
    )
    for (op, data), before, after in zip(
        c.modifiers, f.finite_steps, f.finite_steps[1:], strict=False
    ):
        added = after.abs() * (not op.additive)
        added = added + (after - before).abs() * (not isinstance(op, SoftCap))
        size = size * slope(op, data, before, after) + added
    return size


def largest_scores(c: Chain, f: Evaluation) -> Tensor:
    """sum|terms| of the largest score of each row."""
    size = score_sizes(c, f)
    return size.amax(-1) if size.shape[-1] else size.new_zeros(f.lse.shape)


def add_exp_error(c: Chain, f: Evaluation, weights: Tensor) -> Tensor:
    """Weights computed from p, with the error of p = exp(s - lse).

    s is known to u * sum|terms|, lse, a rounded number, to u |lse|, and their difference is rounded
    too: to first order p is off by 2 u (sum|terms| + |lse|) of itself.
    """
    lse = torch.where(f.lse == -INF, 0.0, f.lse.abs())
    return weights * (1 + 2 * (score_sizes(c, f) + lse[..., None]))


def forward_terms(c: Chain, f: Evaluation) -> dict[str, Tensor]:
    """sum|terms| of each output: the formula, with every minus a plus."""
    seen = largest_scores(c, f)
    o = torch.einsum("bhij,bhje->bhie", add_exp_error(c, f, f.pz), per_head(c.v.abs(), c.sizes[1]))
    lse = seen + torch.where(f.lse == -INF, 0.0, f.lse.abs())
    weights = {"p": add_exp_error(c, f, f.p), "pz": add_exp_error(c, f, f.pz)}
    return {**weights, "lse": lse, "max": seen, "o": o}


def narrow_terms(c: Chain, f: Evaluation, dtype: torch.dtype) -> Tensor:
    """The most by which weights rounded to 8 bits change o, in terms, which count twice.

    A weight is off by a roundoff of itself, or by half the distance of the least numbers of
    `dtype`, as a share of 16 times the largest weight.
    """
    if not f.p.shape[-1]:
        return NOTHING
    least = torch.finfo(dtype).smallest_normal * UNIT[dtype]
    off = UNIT[dtype] * f.p + least / 16 * f.p.amax(-1, keepdim=True)
    size = torch.einsum("bhij,bhje->bhie", off, per_head(c.v.abs(), c.sizes[1]))
    return size / (2 * UNIT[torch.float32])


def largest(x: Tensor) -> Tensor:
    """The largest number; 0 of none."""
    return x.amax() if x.numel() else x.new_zeros(())


def slope(op: Modifier, data: Data, before: Tensor, after: Tensor) -> Tensor:
    if isinstance(op, SoftCap):
        return 1 - (after / op.cap) ** 2
    if op.additive:
        return torch.ones(())
    return differentiate(op, before, data, torch.ones_like(before))[0].abs()


def operand_terms(
    c: Chain, op: Modifier, data: Data, before: Tensor, name: str, ds: Tensor
) -> Tensor:
    """sum|terms| of the gradient of a modifier's tensor.

    Terms of the library's own modifiers have one sign, and add up to the size of the gradient.
    """
    x = data[name]
    if type(op) in STEPS:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            changed = apply_modifier(op, before, Places(c.sizes, {**data, name: leaf}))
            return torch.autograd.grad(changed.expand(ds.shape), leaf, ds)[0].abs()
    units = torch.eye(x.numel(), dtype=ds.dtype).reshape(x.numel(), *x.shape)
    slopes = (
        trace_along_data(lambda s, t: op.change(s, Place.whole(s, t)), before, data, {name: unit})
        for unit in units
    )
    return ds.new_tensor([(ds * each.abs()).sum() for each in slopes]).reshape(x.shape)


def sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """[B,H,N,E] -> [B,G,N,E], each group of heads added up."""
    B, G, N, E = like.shape
    return x.reshape(B, G, x.shape[1] // max(1, G), N, E).sum(2)


@frozen
class Sizes:
    """sum|terms| of derivatives: their formulas with every minus a plus.

    names: of the tensors of a chain, by their id. moves: the size of each tangent, by name.
    """

    c: Chain
    f: Evaluation
    names: dict[int, str]
    moves: dict[str, Tensor]

    @classmethod
    def of(cls, graph: Graph, tensors: Sequence[Tensor], tangents: Mapping[str, Tensor]) -> Sizes:
        """The sizes along tangents of inputs, by name; without any, of the gradient alone."""
        exact = cast(graph, tensors, torch.float64)
        c = read_chain(graph, exact)
        names = {id(x): i.name for i, x in zip(graph.inputs, exact, strict=True)}
        return cls(c, attend(c), names, {n: x.double().abs() for n, x in tangents.items()})

    def move(self, x: Tensor) -> Tensor:
        return self.moves.get(self.names.get(id(x), ""), torch.zeros_like(x))

    @property
    def steps(self) -> list[tuple[tuple[Modifier, Data], Tensor, Tensor]]:
        """Each modifier with its tensors, and the scores before and after it."""
        f = self.f
        return [*zip(self.c.modifiers, f.finite_steps, f.finite_steps[1:], strict=False)]

    def scores(self) -> list[Tensor]:
        """The size of the tangent of the products, and after each modifier."""
        c, f, H = self.c, self.f, self.c.sizes[1]
        k, tk = per_head(c.k.abs(), H), per_head(self.move(c.k), H)
        dot = "bhid,bhjd->bhij"
        both = torch.einsum(dot, self.move(c.q), k) + torch.einsum(dot, c.q.abs(), tk)
        ts = [abs(c.scale) * both]
        for (op, data), before, after in self.steps:
            moved = ts[-1] * slope(op, data, before, after)
            for name in op.trains if type(op) in STEPS else ():
                moved = moved + self.moved_by(op, data, before, name)
            ts.append(moved.masked_fill(f.steps[-1] == -INF, 0.0))
        return ts

    def moved_by(self, op: Modifier, data: Data, before: Tensor, name: str) -> Tensor:
        """The size of the tangent that a tensor of one of the library's modifiers adds."""

        def change(x: Tensor) -> Tensor:
            return apply_modifier(op, before, Places(self.c.sizes, {**data, name: x}))

        return jvp(change, (data[name],), (self.move(data[name]),))[1].abs()  # type: ignore[no-any-return]  # of torch

    def sinks_share(self, sinks: Tensor, off: Tensor | float) -> Tensor:
        """The weights of sinks, with an error of `off` and of |lse|, as in `add_exp_error`."""
        lse = torch.where(self.f.lse == -INF, 0.0, self.f.lse.abs())
        share = torch.exp(sinks[:, None] - self.f.lse) * (1 + 2 * (lse + off))
        return torch.where(sinks[:, None] == -INF, 0.0, share)

    def pushed(self) -> tuple[Tensor, Tensor]:
        """Of to and tlse."""
        c, f, H, ts = self.c, self.f, self.c.sizes[1], self.scores()[-1]
        w, z = add_exp_error(c, f, f.p), add_exp_error(c, f, f.pz)
        tlse = (w * ts).sum(-1)
        if c.sinks is not None:
            tlse = tlse + self.sinks_share(c.sinks, 0.0) * self.move(c.sinks)[:, None]
        weigh = "bhij,bhje->bhie"
        to = torch.einsum(weigh, z * ts, per_head(c.v.abs(), H))
        to = to + torch.einsum(weigh, z, per_head(self.move(c.v), H))
        return to + tlse[..., None] * torch.einsum(weigh, z, per_head(c.v.abs(), H)), tlse

    def pulled(
        self,
        do: Tensor,
        dlse: Tensor,
        tdo: Tensor,
        tdlse: Tensor,
        rounding: float,
        seen: Tensor | float = 0.0,
    ) -> dict[str, Tensor]:
        """Of the tangents of gradients, by input; along tdo and tdlse alone, of their gradient.

        delta = sum_e do o uses an o rounded to q's dtype, and its tangent a rounded to, `rounding`
        times as coarse as accumulated sums; that one term counts more by this factor. seen: the
        terms of a row's largest score, of which lse is made, where they count for sinks.
        """
        c, f, H = self.c, self.f, self.c.sizes[1]
        rooms = f.o.shape, f.lse.shape, f.o.shape, f.lse.shape
        given = zip((do, dlse, tdo, tdlse), rooms, strict=True)
        do, dlse, tdo, tdlse = (x.abs().expand(room) for x, room in given)
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
            name = self.names.get(id(x), "")  # "" for a part of an input
            sizes[name] = sizes.get(name, NOTHING) + terms

        back = "bhij,bhie->bhje"
        add(c.v, sum_groups(torch.einsum(back, z * u, do) + torch.einsum(back, z, tdo), c.v))
        if c.sinks is not None:
            tsinks = self.move(c.sinks)[:, None] + tlse
            share = self.sinks_share(c.sinks, c.sinks.abs()[:, None] + seen)
            add(c.sinks, (share * (tsinks * g + tg)).sum((0, 2)))
        for ((op, data), before, after), t in zip(self.steps[::-1], ts[:0:-1], strict=True):
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
