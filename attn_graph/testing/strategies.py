"""Hypothesis strategies: shapes, specs in any strides, masks, modifiers and graphs.

The elements of tensors are not drawn: `tensors_for` takes them from a seeded `torch.Generator`,
which is far faster and finds as many bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_graph import masks as m
from attn_graph.ir import builder, ops
from attn_graph.ir.arguments import ADDENDS, ARGUMENTS
from attn_graph.ir.builder import Value
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.passes import simplify
from attn_graph.ir.terms.relative import RelativeBias
from attn_graph.ir.transforms.vjp import lay_out, output_names
from attn_graph.machine.overlap import overlaps_itself
from attn_graph.masks import needs_of
from attn_graph.spec import FLOATS, TensorSpec

T = TypeVar("T")
DEPTH = 3  # of a mask's expression: joins within joins

seeds: SearchStrategy[int] = st.integers(0, 2**16)
dtypes: SearchStrategy[torch.dtype] = st.sampled_from(FLOATS)


@frozen
class Shape:
    """Sizes of one attention, in the alphabet of docs/semantics.md. H is a multiple of G."""

    B: int
    H: int
    G: int
    M: int
    N: int
    D: int
    E: int

    @property
    def q(self) -> tuple[int, int, int, int]:
        """The shape of q [B,H,M,D]."""
        return self.B, self.H, self.M, self.D

    @property
    def k(self) -> tuple[int, int, int, int]:
        """The shape of k [B,G,N,D]."""
        return self.B, self.G, self.N, self.D

    @property
    def v(self) -> tuple[int, int, int, int]:
        """The shape of v [B,G,N,E]."""
        return self.B, self.G, self.N, self.E

    def full(self, axes: str) -> tuple[int, ...]:
        """The sizes of axes named by letters of "bhij"."""
        return tuple({"b": self.B, "h": self.H, "i": self.M, "j": self.N}[x] for x in axes)


def positions(most: int) -> SearchStrategy[int]:
    """Numbers of queries or keys: mostly few, sometimes more than a block."""
    few = st.integers(1, min(12, most))
    return st.one_of(few, few, few, st.integers(1, most), st.just(1))


widths: SearchStrategy[int] = st.sampled_from([4, 1, 2, 3, 5, 8, 16])


@st.composite
def shapes(draw: DrawFn, most: int = 40, heads: int = 36) -> Shape:
    """Any sizes with M and N up to `most`: 0 and 1, M != N, grouped heads, E != D.

    `heads`: the largest B * H.
    """
    M, D = draw(positions(most)), draw(widths)
    B, G, r = draw(
        st.tuples(*map(st.sampled_from, ([1, 2, 1, 3], [1, 2, 1, 3], [1, 2, 1, 3, 4]))).filter(
            lambda sizes: sizes[0] * sizes[1] * sizes[2] <= heads
        )
    )
    sizes = {
        "B": B,
        "G": G,
        "r": r,
        "M": M,
        "N": draw(st.one_of(st.just(M), positions(most))),
        "D": D,
        "E": draw(st.one_of(st.just(D), widths)),
    }
    if draw(st.integers(0, 9)) == 5:  # not an end of the range, which is drawn more often
        sizes |= dict.fromkeys(draw(st.sets(st.sampled_from("BGrMN"), min_size=1, max_size=2)), 0)
    return Shape(H=sizes["G"] * sizes.pop("r"), **sizes)


# Layouts


@st.composite
def strides_of(draw: DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """Any strides >= 0: every order of the axes, gaps, slices, broadcast and overlapping axes."""
    axes, rank = draw(orders(len(shape))), len(shape)
    kind = draw(st.sampled_from(["dense", "dense", "packed", "gaps", "broadcast", "overlap"]))
    strides, step = [0] * rank, draw(st.sampled_from([1, 1, 1, 2, 3])) if kind == "gaps" else 1
    packed = draw(st.integers(0, max(0, rank - 1))) if kind == "packed" else -1
    for place, axis in enumerate(reversed(axes)):
        step *= 3 if place == packed else 1  # one of q, k, v side by side on this axis
        strides[axis] = step
        step *= max(1, shape[axis])
        step += draw(st.integers(0, 3)) if kind == "gaps" else 0
    if kind == "broadcast":
        flat = draw(st.sets(st.integers(0, rank - 1))) if rank else set()
        strides = [0 if axis in flat else s for axis, s in enumerate(strides)]
    if kind == "overlap":
        strides = [draw(st.integers(0, 5)) for _ in shape]
    return tuple(strides)


@st.composite
def orders(draw: DrawFn, rank: int) -> tuple[int, ...]:
    """Axes from the outermost in memory to the innermost; mostly the last one is innermost."""
    if draw(st.integers(0, 4)) == 4:
        return tuple(draw(st.permutations(range(rank))))
    return (*draw(st.permutations(range(rank - 1))), *range(max(0, rank - 1), rank))


@st.composite
def specs(draw: DrawFn, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    """A spec of this shape and dtype, in any layout."""
    if draw(st.booleans()):
        return TensorSpec(shape, dtype)
    return TensorSpec(shape, dtype, draw(strides_of(shape)))


@st.composite
def broadcast(draw: DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """This shape with any of its axes 1."""
    return tuple(draw(st.sampled_from([n, 1])) for n in shape)


# Masks

Aligned = SearchStrategy[m.Align | None]
near = st.integers(-4, 12)
bounds: SearchStrategy[int | None] = st.one_of(near, near, near, st.none())
aligns: Aligned = st.sampled_from(["top_left", "bottom_right"])


def bands(aligned: Aligned) -> SearchStrategy[m.Mask]:
    lengths = st.sets(st.sampled_from(m.LENGTHS)).map(m.ragged_in)
    return st.builds(m.Band, bounds, bounds, lengths)


@st.composite
def windows(draw: DrawFn, aligned: Aligned) -> m.Mask:
    """Windows that hold a key."""
    left, right = draw(bounds), draw(bounds)
    if left is not None and right is not None:
        right = max(right, -left)
    return m.Window(left, right, draw(aligned))


def keep_blocks(rows: int, keys: int) -> m.Mask:
    """A table, with a name for each pair of sizes: a mask may have several."""
    return m.KeepBlocks(rows, keys, f"blocks_{rows}_{keys}")


block_sizes: SearchStrategy[int] = st.sampled_from([1, 2, 3, 5, 8])

# Every leaf of the library; a test fails if one is missing.
LEAVES: dict[type[m.Mask], Callable[[Aligned], SearchStrategy[m.Mask]]] = {
    m.Causal: lambda aligned: st.builds(m.Causal, aligned),
    m.Window: windows,
    m.Prefix: lambda _: st.builds(m.Prefix, st.integers(0, 12)),
    m.Keep: lambda _: st.builds(m.Keep, st.sampled_from(["keep", "local"])),
    m.KeepBlocks: lambda _: st.builds(keep_blocks, block_sizes, block_sizes),
    m.KeyLengths: lambda _: st.just(m.KeyLengths()),
    m.QueryLengths: lambda _: st.just(m.QueryLengths()),
    m.SameSegment: lambda _: st.just(m.SameSegment()),
    m.Band: bands,
}


def alignments(shape: Shape, align: m.Align | None) -> Aligned:
    """The alignments of a leaf, if `align` applies to the whole graph."""
    return aligns if align is None and shape.M != shape.N else st.one_of(aligns, st.none())


@st.composite
def masks(draw: DrawFn, shape: Shape, align: m.Align | None = None, depth: int = DEPTH) -> m.Mask:
    """An expression of any leaves with `&`, `|` and `~`."""
    kind = draw(st.sampled_from(["leaf", "leaf", "&", "|", "~"])) if depth else "leaf"
    if kind == "leaf":
        leaf = LEAVES[draw(st.sampled_from(tuple(LEAVES)))]
        return draw(leaf(alignments(shape, align)))
    a = draw(masks(shape, align, depth - 1))
    if kind == "~":
        return ~a
    b = draw(masks(shape, align, depth - 1))
    return a & b if kind == "&" else a | b


@st.composite
def data_specs(draw: DrawFn, needs: dict[str, m.Data], shape: Shape) -> dict[str, TensorSpec]:
    given = {}
    for name, data in needs.items():
        full = data.shape({"b": shape.B, "h": shape.H, "i": shape.M, "j": shape.N})
        sizes = draw(broadcast(full)) if data.broadcasts else full
        given[name] = draw(specs(sizes, draw(st.sampled_from(data.dtypes))))
    return given


# Modifiers

caps: SearchStrategy[float] = st.sampled_from([5.0, 30.0, 1.0, 0.25])
scales: SearchStrategy[float | None] = st.sampled_from([None, None, None, 0.5, 3.0, 0.0, -0.7])
rates: SearchStrategy[float] = st.sampled_from([0.1, 0.5, 0.9])


def maybe(strategy: SearchStrategy[T]) -> SearchStrategy[T | None]:
    """None twice as often as a value, so that a graph of many options stays readable."""
    return st.one_of(st.none(), st.none(), strategy)


def addend_specs(name: str, shape: Shape, dtype: torch.dtype) -> SearchStrategy[TensorSpec]:
    """A tensor of ADDENDS, in any of its forms, in q's dtype or float32."""
    data, each = ARGUMENTS[name].data, ARGUMENTS[name].each
    forms = [shape.full(x.axes) for x in (data, each) if x is not None]
    sizes = broadcast(forms[0]) if data.broadcasts else st.one_of(*map(st.just, forms))
    return st.tuples(sizes, st.sampled_from([dtype, torch.float32])).flatmap(
        lambda drawn: specs(*drawn)
    )


def relative_biases(
    aligned: Aligned, lengths: SearchStrategy[tuple[str, ...]]
) -> SearchStrategy[RelativeBias]:
    """Tables by distance, of up to 4 keys, and by numbers of places."""
    odd = st.integers(0, 4).map(lambda reach: 2 * reach + 1)
    by_place = st.builds(RelativeBias, st.integers(1, 9), places=st.just(True))
    return st.one_of(st.builds(RelativeBias, odd, aligned, lengths), by_place)


@st.composite
def modifiers(draw: DrawFn, shape: Shape) -> Modifier:
    """Any one modifier, with an alignment if it needs one."""
    align = draw(alignments(shape, None))
    lengths = st.sets(st.sampled_from(m.LENGTHS)).map(m.ragged_in)
    alibi = st.builds(Alibi, st.booleans(), st.just(align), lengths, st.booleans())
    drawn: dict[type[Modifier], SearchStrategy[Modifier]] = {
        SoftCap: st.builds(SoftCap, caps),
        Bias: st.just(Bias()),
        Alibi: alibi.filter(lambda op: not (op.default and op.per_batch)),
        RelativeBias: relative_biases(st.just(align), lengths),
    }
    return draw(drawn[draw(st.sampled_from(sorted(drawn, key=lambda kind: kind.__name__)))])


# Graphs

MORE = tuple(ops.STATISTICS)
STATISTICS: tuple[bool | tuple[str, ...], ...] = (False, True, True, MORE, (*MORE, "lse"))


@st.composite
def graphs(
    draw: DrawFn,
    shape: SearchStrategy[Shape] | None = None,
    dtype: SearchStrategy[torch.dtype] | None = None,
    stats: bool | tuple[str, ...] | None = None,
) -> Graph:
    """`attention` with any of its options, not simplified, as users write it."""
    size = draw(shapes() if shape is None else shape)
    kind = draw(dtypes if dtype is None else dtype)
    q, k, v = (draw(specs(x, kind)) for x in (size.q, size.k, size.v))
    options = draw(mask_options(size)) | draw(score_options(size, kind))
    stats = draw(st.sampled_from(STATISTICS)) if stats is None else stats
    return builder.attention(q, k, v, **options, stats=stats)


@st.composite
def with_layouts(
    draw: DrawFn,
    graphs: SearchStrategy[Graph],
    layouts: Callable[[Sequence[int], torch.dtype], SearchStrategy[TensorSpec]] = specs,
) -> Graph:
    """A graph with declared layouts of any of its outputs, or of none."""
    graph = draw(graphs)
    pairs = zip(output_names(simplify(graph)), graph.output_types, strict=True)
    chosen = {name: x for name, x in pairs if draw(st.booleans())}
    apart = {n: draw(layouts(x.shape, x.dtype).filter(has_places)) for n, x in chosen.items()}
    return lay_out(graph, apart)


def has_places(spec: TensorSpec) -> bool:
    """True if each element has a place of its own."""
    return not overlaps_itself(torch.empty_strided(spec.shape, spec.strides, device="meta"))


@st.composite
def simple_graphs(
    draw: DrawFn,
    shape: SearchStrategy[Shape] | None = None,
    dtype: SearchStrategy[torch.dtype] | None = None,
) -> Graph:
    """Close to a fused kernel: one head size, no mask or a causal one, perhaps a bias."""
    x = draw((shapes() if shape is None else shape).filter(lambda x: 0 not in (x.B, x.H, x.M, x.N)))
    size = evolve(x, E=x.D)
    kind = draw(dtypes if dtype is None else dtype)
    unit_last = [specs(n, kind).filter(lambda s: s.unit_last) for n in (size.q, size.k, size.v)]
    q, k, v = map(draw, unit_last)
    biased = draw(st.booleans())
    return builder.attention(
        q, k, v,
        scale=draw(st.sampled_from((None, 0.3, 2.0))),
        mask=None if biased else draw(st.sampled_from((None, m.Causal("top_left")))),
        bias=draw(addend_specs("bias", size, kind)) if biased else None,
        stats=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def mask_options(draw: DrawFn, shape: Shape) -> dict[str, Any]:  # Any: options of `attention`
    """mask=, align= and the mask's tensors; lengths, segments, keep= with it or alone."""
    align = draw(st.one_of(aligns, st.none()))
    mask = draw(maybe(masks(shape, align)) if draw(st.booleans()) else masks(shape, align))
    beside = draw(maybe(st.sampled_from([m.Keep(), m.KeyLengths(), m.SameSegment()])))
    needs = needs_of(mask) | needs_of(beside)
    given: dict[str, Any] = draw(data_specs(needs, shape))
    if "q_segments" in given:
        given["segments"] = (given.pop("q_segments"), given.pop("kv_segments"))
    return given | {"mask": mask, "align": align}


@st.composite
def score_options(
    draw: DrawFn, shape: Shape, dtype: torch.dtype
) -> dict[str, Any]:  # Any: options of `attention`
    """scale=, soft_cap=, bias=, alibi=, sinks=, dropout=, modifiers=; align= if needed."""
    alibi = draw(maybe(st.one_of(st.just(True), addend_specs("alibi", shape, dtype))))
    align = draw(aligns) if alibi is not None and shape.M != shape.N else None
    options: dict[str, Any] = {} if align is None else {"align": align}
    return options | {
        "scale": draw(scales),
        "soft_cap": draw(maybe(caps)),
        "alibi": alibi,
        **{n: draw(maybe(addend_specs(n, shape, dtype))) for n in ADDENDS if n != "alibi"},
        "dropout": draw(maybe(rates)) or 0.0,
        **draw(st.one_of(st.just({}), st.just({}), relative_options(shape, dtype))),
    }


@st.composite
def relative_options(
    draw: DrawFn, shape: Shape, dtype: torch.dtype
) -> dict[str, Any]:  # Any: options of `attention`
    """modifiers= with a RelativeBias, and its tensors."""
    op = draw(relative_biases(alignments(shape, None), st.just(())))
    needs = draw(data_specs(op.needs, shape))
    kind = draw(st.sampled_from([dtype, torch.float32]))
    table = draw(specs(needs.pop("table").shape, kind))
    return {"modifiers": (op,), "table": table} | needs


@st.composite
def shuffled_graphs(draw: DrawFn, dtype: torch.dtype = torch.float32) -> Graph:
    """Modifiers and masks in any order and number, possible only in single steps."""
    size = draw(shapes(12))
    inputs = {"q": size.q, "k": size.k, "v": size.v}
    given = {name: TensorSpec(shape, dtype) for name, shape in inputs.items()}
    steps: list[tuple[Op, list[str]]] = []
    for n in range(draw(st.integers(1, 5))):
        step: m.Mask | Modifier = draw(st.one_of(masks(size, depth=1), modifiers(size)))
        needs = draw(data_specs(step.needs, size))
        shared = {name for name in needs if given.get(name) == needs[name] and draw(st.booleans())}
        taken = given.keys() - shared
        names = {name: f"{name}{n}" if name in taken else name for name in needs}
        given |= {names[name]: spec for name, spec in needs.items()}
        op = ops.Mask(step) if isinstance(step, m.Mask) else step
        steps.append((op, [*names.values()]))

    def attend(**x: Value) -> tuple[Value, Value]:
        s = builder.scores(x["q"], x["k"])
        for op, names in steps:
            s = s.then(op, *(x[name] for name in names))
        p, lse = s.softmax()
        return p.weigh(x["v"]), lse

    return builder.graph(attend, **given)
