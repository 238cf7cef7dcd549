"""check_modifier: checks the derivatives and promises of a step on the scores."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from attn_graph.errors import GraphError
from attn_graph.ir.builder import Value, graph, scores
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.terms.promises import CLOSE, derivative_problems
from attn_graph.lowering.backend import Backend
from attn_graph.machine.target import Target
from attn_graph.masks import needs_of
from attn_graph.masks.places import Block, Place
from attn_graph.spec import INF, TensorSpec
from attn_graph.testing.agreement import check_graphs, search
from attn_graph.testing.formula import differentiate
from attn_graph.testing.mask_check import ranges
from attn_graph.testing.strategies import Shape, data_specs, maybe, seeds, shapes
from attn_graph.testing.strategies import masks as any_mask
from attn_graph.testing.tensors import filler, lay_out

MOST, HEADS = 6, 6  # queries and keys, heads of all batch entries: derivatives are by element


@frozen(eq=False)
class ModifierCase:
    """A modifier, scores [B,H,M,N] in float64, a gradient of the result, and its tensors."""

    op: Modifier
    s: torch.Tensor
    ds: torch.Tensor
    data: dict[str, torch.Tensor]

    def at(self, batch: range, heads: range, rows: range, keys: range) -> Place:
        _, H, M, N = self.s.shape
        return Place.of(Block(batch, heads, rows, H, M, N, self.data), keys)

    @property
    def everywhere(self) -> Place:
        B, H, M, N = map(range, self.s.shape)
        return self.at(B, H, M, N)

    def change(self) -> torch.Tensor:
        return self.op.change(self.s.clone(), self.everywhere)


def check_modifier(
    op: Modifier,
    *,
    backend: str | Backend = "math",
    target: Target | str = "cpu",
    gpu: Target | str | None = None,
) -> None:
    """Raise AssertionError unless the definitions of a modifier agree, at any sizes.

    `change` and `back` give equal results in blocks and on the whole; `back` is the derivative of
    `change`, and `collect` adds that by each tensor of `trains`; only a step with `hides` gives
    -inf; the text of a graph is parsed back; and attention with the step agrees with the formula in
    both passes of a backend. Without `back` only the forward pass is checked. `spread` and `bend`,
    if defined, must agree with `collect` and `back`. gpu: as of `check_mask`.

        >>> check_modifier(SoftCap(30.0))
    """
    trained = not [*op.gradient_problems()]

    def check_definition(case: ModifierCase, parts: tuple[range, ...]) -> None:
        check_change(case, parts)
        if trained:
            check_back(case, parts)
            check_collect(case)
            check_tangents(case)

    search(lambda pair: check_definition(*pair), pair=modifier_cases(op))
    check_graphs(graphs_with(op), type(op), backend, target, gpu, trained)


def sizes_for(op: Modifier, shape: Shape) -> Shape:
    """These sizes, with N = M if the step needs it for lack of an alignment."""
    try:
        op.resolved(shape.M, shape.N)
    except GraphError:
        return evolve(shape, N=shape.M)
    return shape


@st.composite
def modifier_cases(draw: DrawFn, op: Modifier) -> tuple[ModifierCase, tuple[range, ...]]:
    """Scores, a gradient and tensors for a step, and some of its places."""
    shape = sizes_for(op, draw(shapes(MOST, HEADS)))
    random = torch.Generator().manual_seed(draw(seeds))
    sizes = shape.full("bhij")
    s, ds = torch.randn(2, *sizes, generator=random, dtype=torch.float64)
    full = {"q_lengths": shape.M, "kv_lengths": shape.N}
    data = {
        name: lay_out(spec, filler(spec.type, random, full.get(name, 2), 0.0, 1.0), random)
        for name, spec in draw(data_specs(op.needs, shape)).items()
    }
    exact = {n: t.double() if t.is_floating_point() else t for n, t in data.items()}
    case = ModifierCase(op, s * draw(st.sampled_from([1.0, 8.0])), ds, exact)
    return case, tuple(draw(ranges(size)) for size in sizes)


@st.composite
def graphs_with(draw: DrawFn, op: Modifier) -> Graph:
    shape = sizes_for(op, draw(shapes(MOST, HEADS)))
    mask = draw(maybe(any_mask(shape, depth=1)))
    read = draw(data_specs(op.needs | needs_of(mask), shape))
    wide = any(spec.dtype == torch.float64 for spec in read.values())  # as exact as its tensors
    dtype = torch.float64 if wide else torch.float32
    specs = {name: TensorSpec(getattr(shape, name), dtype) for name in "qkv"}

    def attend(**x: Value) -> tuple[Value, Value]:
        s = scores(x["q"], x["k"]).then(op, *(x[name] for name in op.needs))
        if mask is not None:
            s = s.mask(mask, **{name: x[name] for name in mask.needs})
        p, lse = s.softmax()
        return p.weigh(x["v"]), lse

    try:
        return graph(attend, **specs, **read)
    except GraphError as error:
        raise AssertionError(f"{op}: {error}") from error


def part_of(x: torch.Tensor, parts: tuple[range, ...]) -> torch.Tensor:
    return x[tuple(slice(part.start, part.stop) for part in parts)]


def compare(what: str, x: torch.Tensor, due_name: str, due: torch.Tensor) -> None:
    """Raise AssertionError, with both values, unless two tensors are equal up to rounding."""
    assert x.shape == due.shape, f"{what} is {list(x.shape)}, and {due_name} {list(due.shape)}"
    near = torch.isclose(x, due, rtol=CLOSE, atol=CLOSE, equal_nan=True)
    for place in (~near).nonzero()[:1].tolist():
        at = tuple(place)
        raise AssertionError(
            f"{what} is {float(x[at]):.9g} at {list(at)}, but {due_name} is {float(due[at]):.9g}"
        )


def check_change(case: ModifierCase, parts: tuple[range, ...]) -> None:
    """Raise AssertionError unless a block's step is a part of the whole's; `hides` is true."""
    whole, read = case.change(), {n: t.clone() for n, t in case.data.items()}
    block = case.op.change(part_of(case.s, parts).clone(), case.at(*parts))
    compare(f"{case.op}.change of {parts}", block, "that part of the whole", part_of(whole, parts))
    for name, old in read.items():
        assert torch.equal(case.data[name], old), f"{case.op}.change writes to {name}"
    hidden = bool((whole == -INF).any())
    assert case.op.hides or not hidden, f"{case.op} declares hides = False, but change gives -inf"


def check_back(case: ModifierCase, parts: tuple[range, ...]) -> None:
    """Raise AssertionError unless `back` is the derivative of `change`, in blocks too.

    Places with s' = -inf do not count: their gradient is 0 for any `back`.
    """
    after = case.change()
    hidden, who = after == -INF, f"{case.op}.back"
    whole = case.op.back(case.ds.clone(), after.clone(), case.everywhere).masked_fill(hidden, 0.0)
    due = differentiate(case.op, case.s, case.data, case.ds)[0].masked_fill(hidden, 0.0)
    compare(f"{who} of {describe(case)}", whole, "ds times the derivative of change", due)
    ds, s = (part_of(x, parts).clone() for x in (case.ds, after))
    block = case.op.back(ds, s, case.at(*parts)).masked_fill(part_of(hidden, parts), 0.0)
    compare(f"{who} of {parts}", block, "that part of the whole", part_of(whole, parts))


def describe(case: ModifierCase) -> str:
    B, H, M, N = case.s.shape
    return f"{B} x {H} heads, {M} queries, {N} keys"


def check_tangents(case: ModifierCase) -> None:
    """Raise AssertionError unless the class's own forward mode fits its reverse mode."""
    kind, (B, H, M, N) = type(case.op), case.s.shape
    own = kind.spread is not Modifier.spread or kind.bend is not Modifier.bend
    if own and (problems := [*derivative_problems(case.op, (B, H, M, N))]):
        raise AssertionError("; ".join(problems))


def check_collect(case: ModifierCase) -> None:
    """Raise AssertionError unless `collect` adds the gradient of each trained tensor, in blocks."""
    B, H, M, N = map(range, case.s.shape)
    totals = {n: torch.ones(case.data[n].shape, dtype=torch.float64) for n in case.op.trains}
    for rows in (M[: len(M) // 2], M[len(M) // 2 :]):
        ds = part_of(case.ds, (B, H, rows, N)).clone()
        if totals and len(rows):
            case.op.collect(totals, ds, case.at(B, H, rows, N))
    _, sums = differentiate(case.op, case.s, case.data, case.ds)
    for name, total in totals.items():
        what = f"{case.op}.collect of {describe(case)}, added to totals of 1: {name}"
        compare(what, total, "1 and the sum of ds times the derivative of change", 1 + sums[name])
