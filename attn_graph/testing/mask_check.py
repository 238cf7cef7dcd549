"""check_mask: checks the definitions of a mask against one another, at any sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_graph import masks as m
from attn_graph.errors import GraphError
from attn_graph.ir.builder import Value, graph, scores
from attn_graph.ir.graph import Graph
from attn_graph.lowering.backend import Backend
from attn_graph.machine.target import Target
from attn_graph.masks.places import Block, Place
from attn_graph.spec import TensorSpec
from attn_graph.testing import strategies
from attn_graph.testing.agreement import check_graphs, search
from attn_graph.testing.mask_formula import Places, evaluate_mask, evaluate_place_by_place
from attn_graph.testing.strategies import Shape, data_specs, seeds, shapes
from attn_graph.testing.tensors import filler, lay_out

MOST = 10  # queries and keys, since each place is evaluated alone


@frozen(eq=False)
class MaskCase:
    """A mask, the sizes to evaluate it for, and its tensors."""

    mask: m.Mask
    shape: Shape
    data: dict[str, torch.Tensor]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, M, N."""
        return self.shape.B, self.shape.H, self.shape.M, self.shape.N

    @property
    def resolved(self) -> m.Mask:
        return self.mask.resolved(self.shape.M, self.shape.N, m.ragged_in(self.mask.needs))

    @cached_property
    def kept(self) -> torch.Tensor:
        """The kept places [B,H,M,N] by docs/semantics.md; of your own mask by its `keep`."""
        return evaluate_mask(self.mask, Places(self.sizes, self.data)).expand(self.sizes)

    def block(self, batch: range, heads: range, rows: range, *, data: bool = True) -> Block:
        """Some of the queries; without `data` as before the tensors are known."""
        x = self.shape
        return Block(batch, heads, rows, x.H, x.M, x.N, self.data if data else None)

    def evaluate_singly(self, mask: m.Mask) -> torch.Tensor:
        """The kept places of another mask, by `keep` on integers."""
        return evaluate_place_by_place(mask, self.sizes, self.data)


def check_mask(
    mask: m.Mask,
    *,
    backend: str | Backend = "math",
    target: Target | str = "cpu",
    gpu: Target | str | None = None,
) -> None:
    """Raise AssertionError unless the definitions of a mask agree, at any sizes.

    `keep` gives equal results for tensors and integers; `strip` and `relative` are true; the text
    of a graph is parsed back; and attention under the mask, alone and in joins, agrees with the
    formula in both passes of a backend. The mask's tensors have any non-negative values of their
    dtype, integers up to the number of positions.

        >>> check_mask(Causal() & Window(64))

    gpu: for example "h100": also compile Triton's kernels for that GPU and run them on a virtual
    one, with fewer graphs. Raises Fault if a GPU's result is undefined, RuntimeError as
    `virtual_gpu`.
    """

    search(check_keep, case=mask_cases(lambda _: st.just(mask)))
    check_graphs(graphs_under(mask), type(mask), backend, target, gpu)


Choose = Callable[[Shape], SearchStrategy[m.Mask]]


@st.composite
def mask_cases(draw: DrawFn, choose: Choose = strategies.masks) -> MaskCase:
    """A mask, sizes that it supports, and its tensors; by default any expression."""
    shape = draw(shapes(MOST))
    mask = draw(choose(shape))
    shape = sizes_for(mask, shape)
    random = torch.Generator().manual_seed(draw(seeds))
    full = {"q_lengths": shape.M, "kv_lengths": shape.N}
    most = draw(st.sampled_from([2, max(shape.M, shape.N)]))
    data = {
        name: lay_out(spec, filler(spec.type, random, full.get(name, most), 0.0, 1.0), random)
        for name, spec in draw(data_specs(mask.needs, shape)).items()
    }
    return MaskCase(mask, shape, data)


def sizes_for(mask: m.Mask, shape: Shape) -> Shape:
    """These sizes, with N = M if the mask needs it for lack of an alignment."""
    try:
        mask.resolved(shape.M, shape.N, m.ragged_in(mask.needs))
    except GraphError:
        return evolve(shape, N=shape.M)
    return shape


@st.composite
def ranges(draw: DrawFn, size: int) -> range:
    """Some of the numbers below `size`, or all."""
    if draw(st.booleans()):
        return range(size)
    start = draw(st.integers(0, max(0, size - 1)))
    return range(start, draw(st.integers(min(size, start + 1), size)))


@st.composite
def blocks(draw: DrawFn, cases: SearchStrategy[MaskCase]) -> tuple[MaskCase, Block]:
    """A mask and some queries, empty only if there are none."""
    case = draw(cases)
    B, H, M, _ = case.sizes
    data = draw(st.booleans())
    return case, case.block(draw(ranges(B)), draw(ranges(H)), draw(ranges(M)), data=data)


@st.composite
def graphs_under(draw: DrawFn, mask: m.Mask) -> Graph:
    """Attention under a mask, alone or joined with others."""
    shape = sizes_for(mask, draw(shapes(MOST, heads=4)))
    other = strategies.masks(shape, depth=0)
    whole = draw(
        st.one_of(
            st.sampled_from([mask, ~mask]),
            other.map(lambda each: mask & each),
            other.map(lambda each: mask | each),
        )
    )
    q, k, v = (TensorSpec(x, torch.float32) for x in (shape.q, shape.k, shape.v))

    def attend(q: Value, k: Value, v: Value, **data: Value) -> tuple[Value, Value]:
        p, lse = scores(q, k).mask(whole, **data).softmax()
        return p.weigh(v), lse

    data = draw(data_specs(whole.needs, shape))
    try:
        return graph(attend, q=q, k=k, v=v, **data)
    except GraphError as error:
        raise AssertionError(f"{mask}: {error}") from error


def check_keep(case: MaskCase) -> None:
    """Raise AssertionError unless `keep` gives equal results for tensors and integers."""
    everywhere = case.block(*map(range, case.sizes[:3]))
    together = case.mask.keep(Place.of(everywhere, range(case.shape.N)))
    together = torch.as_tensor(together).expand(case.sizes)
    singly = case.evaluate_singly(case.mask)
    for b, h, i, j in (together != singly).nonzero()[:1].tolist():
        raise AssertionError(
            f"{case.mask}.keep at b={b}, h={h}, i={i}, j={j} of {case.shape} gives "
            f"{bool(together[b, h, i, j])} in a block of tensors and "
            f"{bool(singly[b, h, i, j])} for integers"
        )
