"""Build graphs: by `attention`, by tracing a function with `graph`, or equation by equation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import NoReturn, TypeVar, final

import torch
from attrs import define, field, frozen

from attn_graph import masks
from attn_graph.errors import (
    GraphError,
    binds,
    refuse_truth,
    show,
    user_line,
)
from attn_graph.ir import arguments, ops
from attn_graph.ir.graph import Eqn, Graph, Input, Op
from attn_graph.ir.inputs import count_read, find_needs, input_problems, rank_problems
from attn_graph.ir.modifiers import Alibi, Bias, Modifier, SoftCap
from attn_graph.ir.storage.packed_inputs import (
    Sequences,
    alignment_problems,
    find_packed_sides,
    two_sizes,
)
from attn_graph.ir.storage.paging import Unpage
from attn_graph.ir.storage.scaling import O_SCALE, PAIRS, Dequantise, Quantise
from attn_graph.ir.storage.views import Leading
from attn_graph.machine.imports import require_imports
from attn_graph.masks import Align
from attn_graph.masks.joins import leaves
from attn_graph.printing.words import NO_TENSOR, unknown_argument
from attn_graph.rings import find
from attn_graph.spec import TensorSpec, ValueType
from attn_graph.spec.dims import is_plain_name

T = TypeVar("T")


@final
@frozen(eq=False)
class Value:
    """A value of a graph under construction. Its methods add equations and return results."""

    builder: Builder = field(repr=False)
    index: int

    @property
    def type(self) -> ValueType:
        """Shape and dtype of the value."""
        return self.builder.types[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its type."""
        return self.type.shape

    def __bool__(self) -> NoReturn:
        """Raises GraphError: the data of a value is known only when the graph runs."""
        refuse_truth("value", self.type, "compare with None: a graph has no branches on its data")

    def then(self, op: Op | masks.Mask, *more: Value) -> Value:
        """The single result of `op`, or of masking by it, on this value and `more`. Raises
        GraphError.
        """
        step = ops.Mask(op) if isinstance(op, masks.Mask) else op
        (result,) = self.builder.emit(step, self, *more)
        return result

    def attempt(self, make: Callable[[], Op], *more: Value) -> Value:
        """The result of the op from `make`; this value if `make` raises GraphError."""
        op = self.builder.attempt(make)
        return self if op is None else self.then(op, *more)

    def soft_cap(self, cap: float) -> Value:
        """Scores s -> cap * tanh(s / cap)."""
        return self.attempt(lambda: SoftCap(cap))

    def bias(self, bias: Value) -> Value:
        """Scores s -> s + bias; bias [B,H,M,N], each axis full or 1."""
        return self.then(Bias(), bias)

    def alibi(
        self, slopes: Value | None = None, *, align: Align | None = None, **lengths: Value
    ) -> Value:
        """Scores s -> s - slope * |i' - j|; slopes [H] or [B,H], by default the paper's.

        With align="bottom_right", `kv_lengths` and `q_lengths` move i'.
        """
        ragged = masks.ragged_in(lengths)
        per_batch = slopes is not None and len(slopes.type.shape) == 2
        given = () if slopes is None else (slopes,)
        for name in sorted(lengths.keys() - set(ragged)):
            self.builder.problem(f"alibi: {name!r} is none of {', '.join(masks.LENGTHS)}")
        more = (*given, *(lengths[name] for name in ragged))
        return self.attempt(lambda: Alibi(slopes is None, align, ragged, per_batch), *more)

    def mask(self, mask: masks.Mask, /, **data: Value) -> Value:
        """Scores s -> s where `mask` keeps them, else -inf. data: the mask's tensors."""
        if not isinstance(mask, masks.Mask):
            return self.attempt(lambda: ops.Mask(mask))
        missing, unknown = mask.needs.keys() - data.keys(), data.keys() - mask.needs.keys()
        for name in sorted(missing | unknown):
            fault = "is needed and not given" if name in missing else "is given and not needed"
            self.builder.problem(f"mask: {name} {fault} by {mask}")
        return self if missing else self.then(ops.Mask(mask), *(data[n] for n in mask.needs))

    def max_scores(self) -> Value:
        """Scores s -> max [B,H,M], the largest of each row; -inf if a row sees nothing.

        Taken of the masked scores that softmax reads, it becomes a result of the one attention. It
        has no gradient.
        """
        return self.then(ops.MaxScores())

    def softmax(self, sinks: Value | None = None) -> tuple[Value, Value]:
        """Scores s -> weights p [B,H,M,N] and lse [B,H,M]."""
        given = () if sinks is None else (sinks,)
        p, lse = self.builder.emit(ops.Softmax(sinks is not None), self, *given)
        return p, lse

    def dropout(
        self, rate: float, seed: Value, offset: Value, *, origin: Sequence[int] = ()
    ) -> Value:
        """Weights p -> p * z / (1 - rate)."""
        return self.attempt(lambda: ops.Dropout(rate, origin), seed, offset)

    def unpage(self, table: Value, lengths: Value | None = None, *, finite: bool = False) -> Value:
        """A pool of pages [n,P,G,D], table [B,pages] -> keys or values [B,G,pages * P,D].

        Entry b has the rows of its pages in order: the first lengths[b], then 0; all rows without
        lengths. A page named several times gets the sum of the gradients. finite: no row of the
        pool holds NaN or Inf.
        """
        ends = () if lengths is None else (lengths,)
        return self.then(Unpage(bool(ends), finite), table, *ends)

    def dequantise(self, scale: Value, like: Value) -> Value:
        """A tensor in 8 bits times its scale, in the dtype of `like`; bfloat16 if that has 8."""
        return self.then(Dequantise(), scale, like)

    def quantise(self, scale: Value, like: Value) -> tuple[Value, Value]:
        """o / scale in the dtype of `like`, of 8 bits, and the largest |o|."""
        narrow, amax = self.builder.emit(Quantise(), self, scale, like)
        return narrow, amax

    def weigh(self, v: Value) -> Value:
        """Weights p [B,H,M,N] and v [B,G,N,E] -> o [B,H,M,E]."""
        return self.then(ops.Weigh(), v)


@final
@define(eq=False)
class Builder:
    """The equations of a graph so far, and its problems; the only mutable value here.

    trusts: equations come from a checked graph and are not checked again.
    """

    trusts: bool = False
    inputs: list[Input] = field(factory=list)
    eqns: list[Eqn] = field(factory=list)
    types: list[ValueType] = field(factory=list)
    problems: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        require_imports()

    def problem(self, *texts: str) -> None:
        """Remember problems once, with the line of the user's code that causes them."""
        for text in texts:
            told = f"{text} (at {user_line()})"
            if told not in self.problems:  # q, k and v of one wrong length are one mistake
                self.problems.append(told)

    def attempt(self, make: Callable[[], T]) -> T | None:
        """The result of `make`; None, with the problems remembered, if it raises GraphError."""
        try:
            return make()
        except GraphError as error:
            self.problem(*error.problems)
            return None

    def input(self, name: str, spec: TensorSpec) -> Value:
        """Add an input; remember its problems. Raises GraphError for other than a TensorSpec."""
        if not self.trusts:
            self.examine_input(name, spec)
        self.inputs.append(Input(name, spec))
        self.types.append(spec.type)
        return Value(self, len(self.types) - 1)

    def examine_input(self, name: str, spec: TensorSpec) -> None:
        if not isinstance(spec, TensorSpec):
            way_out = "write TensorSpec.like(tensor)"
            if isinstance(spec, torch.Tensor):
                way_out += ", or nn.functional.attention for tensors instead of specs"
            self.problem(f"input {name!r} is a {type(spec).__name__}, not a TensorSpec; {way_out}")
            self.check()
        if self.eqns:
            self.problem(f"input {name!r} comes after the first equation; declare inputs first")
        if name in [known.name for known in self.inputs]:
            self.problem(f"two inputs are named {name!r}; names are how a plan is called")
        if not is_plain_name(name):
            self.problem(f"input {name!r} is not a Python name; a plan takes it as a keyword")
        if not spec.dims:
            return
        known = dict.fromkeys(x for i in self.inputs for d in i.spec.dims for x in d.symbols)
        for own in dict.fromkeys(x for dim in spec.dims for x in dim.symbols):
            others = [x for x in known if x.name == own.name and x != own]
            if others and own not in known:
                self.problem(f"input {name!r} has {own}, and another input {others[0]}; give one")

    def emit(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        """Add an equation; return its results. Raises GraphError if they can't have types."""
        types = [self.types[self.own(value).index] for value in operands]
        if not self.trusts:
            if not isinstance(op, Op):
                raise GraphError(f"{show(op)} is not an op, such as a modifier or a mask")
            misfits = rank_problems(op, types)
            self.problem(*(misfits or op.problems(*types)))
            if misfits and (
                rank_problems(op, types[: count_read(op)], partial=True)
                or len(types) != len(op.ranks)
            ):
                self.check()
        return self.add(op, operands, op.infer(*types))

    def add(
        self, op: Op, operands: Sequence[Value], outs: tuple[ValueType, ...]
    ) -> tuple[Value, ...]:
        """Add an equation with results of these types; return them."""
        first = len(self.types)
        self.eqns.append(Eqn(op, tuple([value.index for value in operands]), outs))
        self.types.extend(outs)
        return tuple([Value(self, first + i) for i in range(len(outs))])

    def own(self, value: Value) -> Value:
        """The value. Raises GraphError unless it belongs to this builder."""
        if not isinstance(value, Value) or value.builder is not self:
            raise GraphError(f"{show(value)} is not a value of the graph that is being built")
        return value

    def check(self) -> None:
        if self.problems:
            raise GraphError(*self.problems)

    def build(self, *outputs: Value) -> Graph:
        """The finished graph. Raises GraphError with all problems."""
        indices = [self.own(value).index for value in outputs]
        if not outputs:
            self.problem("the graph returns nothing; return at least one value")
        for place, index in enumerate(indices):
            if index < len(self.inputs):
                name = self.inputs[index].name
                self.problem(f"output {place} is the input {name!r} itself and would alias it")
            if index in indices[:place]:
                self.problem(
                    f"outputs {indices.index(index)} and {place} are one value and would alias"
                )
        self.check()
        return self.graph(*outputs)

    def graph(self, *outputs: Value, layouts: tuple[tuple[int, ...] | None, ...] = ()) -> Graph:
        """The graph so far, unchecked: for passes, which keep graphs correct."""
        numbers = tuple(v.index for v in outputs)
        return Graph(tuple(self.inputs), tuple(self.eqns), numbers, layouts)


@binds()
def graph(fn: Callable[..., Value | tuple[Value, ...]], /, **specs: TensorSpec) -> Graph:
    """Trace `fn`, called with one value per input, into a graph.

        >>> def attend(q, k, v):
        ...     p, lse = scores(q, k).soft_cap(30.0).mask(Causal()).softmax()
        ...     return p.weigh(v), lse
        >>> graph(attend, q=spec, k=spec, v=spec)

    Raises GraphError with every problem, each at its line of `fn`.
    """
    if not callable(fn):
        raise GraphError(
            f"graph: {show(fn)} is not a function of values; see attention for one call"
        )
    arguments.require_parameters(fn, specs)
    builder = Builder()
    outputs = fn(**{name: builder.input(name, spec) for name, spec in specs.items()})
    return builder.build(*(outputs if isinstance(outputs, tuple) else (outputs,)))


@binds(lambda *_, **__: "write scores(q, k, scale=0.125).mask(Causal())")
def scores(q: Value, k: Value, *, scale: float | None = None) -> Value:
    """q [B,H,M,D], k [B,G,N,D] -> scale * q k^T [B,H,M,N]; scale is 1/sqrt(D) by default."""
    if not isinstance(q, Value):
        raise GraphError(f"scores: q {show(q)} is not a value of a graph; see graph and attention")
    D = q.shape[-1] if q.shape else 1
    given = 1 / math.sqrt(max(1, D)) if scale is None else scale
    return q.then(q.builder.attempt(lambda: ops.Scores(given)) or ops.Scores(), k)


@binds(arguments.by_name)
def attention(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec | int,
    *,
    scale: float | None = None,
    mask: masks.Mask | None = None,
    align: Align | None = None,
    soft_cap: float | None = None,
    bias: TensorSpec | None = None,
    alibi: TensorSpec | bool | None = None,
    keep: TensorSpec | None = None,
    q_lengths: TensorSpec | None = None,
    kv_lengths: TensorSpec | None = None,
    segments: tuple[TensorSpec, TensorSpec] | None = None,
    sinks: TensorSpec | None = None,
    dropout: float = 0.0,
    stats: bool | Sequence[str] = False,
    q_starts: TensorSpec | None = None,
    kv_starts: TensorSpec | None = None,
    pages: TensorSpec | None = None,
    q_scale: TensorSpec | None = None,
    k_scale: TensorSpec | None = None,
    v_scale: TensorSpec | None = None,
    o_scale: TensorSpec | None = None,
    max_lengths: tuple[int | None, int | None] | None = None,
    finite_pages: bool = False,
    all_rows: bool = False,
    modifiers: Sequence[Modifier | masks.Mask] = (),
    outputs: Mapping[str, TensorSpec | str] | None = None,
    **data: TensorSpec,
) -> Graph:
    """Attention as a graph: q [B,H,M,D], k [B,G,N,D], v [B,G,N,E] -> o [B,H,M,E].

    The order of steps is soft cap, bias, ALiBi, `modifiers`, mask. Each TensorSpec adds an input
    named as its argument, which the plan takes by keyword. `segments` adds `q_segments` [B,M] and
    `kv_segments` [B,N]; `alibi=True` means the paper's slopes; `dropout` adds the numbers `seed`
    and `offset`.

    `keep`, lengths and segments are joined to `mask` with `&` unless `mask` reads them itself.
    `modifiers` are applied in order, as `from_flex_score` gives them, and masks among them joined
    to `mask`; a bias or slopes that one of them reads are not applied again. `data` has the tensors
    of further leaves of `mask` and of `modifiers`. `align` applies to every part of the graph that
    compares positions without an alignment of its own, except modifiers.

    `v` may be a number: the values are the first `v` elements of each key, v = k[..., :512] in
    absorbed latent attention (MLA). The plan takes q and k then, kernels that can read both once,
    and the gradient by k has that by v in it. Quantised keys have `k_scale` for both.

    `stats` names the statistics [B,H,M] returned after o, in order: "lse", the natural logarithm of
    the softmax's denominator, and "max", the largest score of each row, which has no gradient. True
    is ("lse",), False none.

    `q_starts` [B+1]: q is packed, [T,H,D]. Sequence b starts at row q_starts[b] and has
    `q_lengths[b]` rows, by default up to the next sequence. o is packed like q, statistics are
    [H,T]; rows outside sequences are 0, and -inf in statistics. k and v of three axes are packed
    too, by `kv_starts` and `kv_lengths`, by default like q. Positions count within a sequence.
    `max_lengths`: the most queries and keys of a sequence, the M and N of a bias; by default all.
    `all_rows=True` declares that every packed row is in a sequence: starts begin with 0 and end
    with T. Backends of other libraries then read the tensors as they are, without copies.

    `pages` [B,count]: k and v are pools of pages, [n,P,G,D] and [n,P,G,E] in any memory order; pass
    a pool [n,G,P,D] as its transpose(1, 2). The keys of entry b are the rows of the pages pages[b,
    0], pages[b, 1], ... in order: the first `kv_lengths[b]`, by default all, so N is count * P.
    Nothing past them is read, entries of the table included, nor pages of keys that a band hides
    from all queries. cuDNN needs `finite_pages=True`: no row of the pools holds NaN or Inf.

    `k_scale`, `v_scale`: k and v, in float8, int8 or another float than q, of 32 bits or fewer,
    stand for k * k_scale and v * v_scale; of 1.0 they convert k and v as kernels read them. Scales
    are float32, with the axes of k and v, each a divisor: [B,G,N,D/32] for 32 elements of a row,
    [B,G,N/32,D] for an element of 32 rows, and so on. With `q_scale` too, q stands for q * q_scale,
    and o is in bfloat16. None has a gradient. With `o_scale`, with the axes of o, o is in the dtype
    of q and stands for o * o_scale, and the last result is amax, the largest |o| before, one
    float32. Such a graph has no gradient.

    `outputs` declares layouts of o and statistics, as `lay_out` takes them: {"o": "bshd"}, say.

    Raises GraphError with every problem.
    """
    b = Builder()
    given_steps = b.attempt(lambda: arguments.require_modifiers(modifiers)) or ()
    mask, steps = b.attempt(lambda: arguments.take_masks(mask, given_steps)) or (mask, ())
    b.problem(*unknown_arguments(data, mask, steps))
    data = {
        name: spec
        for name, spec in data.items()
        if name in (*arguments.EXTRA, *arguments.read_by(mask, steps))
    }
    slopes = None if isinstance(alibi, bool) else alibi
    each = (None, None) if segments is None else arguments.two_segments(segments, TensorSpec)
    rate = b.attempt(lambda: ops.Dropout(0.0 if dropout is None else dropout).rate) or 0.0
    seed = TensorSpec((), torch.int64) if rate else None
    given = (  # in the order of EXTRA
        bias, slopes, keep, kv_lengths, q_lengths, sinks, *each, seed, seed,
        q_starts, kv_starts, pages, q_scale, k_scale, v_scale, o_scale,
    )  # fmt: skip
    specs = {"q": q, "k": k} | ({} if isinstance(v, int) else {"v": v})
    more = dict(zip(arguments.EXTRA, given, strict=True)) | data
    specs |= {name: spec for name, spec in more.items() if spec is not None}
    x = declare_inputs(b, specs)
    longest = b.attempt(lambda: two_sizes(max_lengths)) or (None, None)
    types = {name: spec.type for name, spec in specs.items()}
    needs = find_needs(mask, steps, 1 if slopes is None else len(slopes.shape))
    b.problem(*arguments.scale_problems(specs), *input_problems(types, needs, longest))
    b.problem(*arguments.option_problems(mask, align, scale, soft_cap))
    names = b.attempt(lambda: arguments.statistic_names(stats)) or ()
    b.check()  # equations are built of inputs and options that make sense
    if isinstance(v, int):
        x["v"] = x["k"].then(Leading(v))
        x |= {"v_scale": x["k_scale"]} if "k_scale" in x else {}
    narrow, x["q"] = x["q"], x["q"].dequantise(x["q_scale"], x["q"]) if "q_scale" in x else x["q"]
    rows, keys = b.attempt(lambda: find_packed_sides(x, *longest, finite_pages, all_rows)) or (
        None,
        None,
    )
    b.check()
    ends = {"q_lengths": rows and rows.lengths, "kv_lengths": keys and keys.lengths}
    x |= {name: lengths for name, lengths in ends.items() if lengths is not None}
    whole = b.attempt(lambda: arguments.whole_mask(mask, x, align, rows, keys))
    slanted = None if alibi is None or alibi is False else align or ""
    steps = tuple(step.aligned(align, masks.ragged_in(x)) for step in steps)
    parts = () if whole is None else leaves(whole)
    b.problem(*(text for part in parts for text in arguments.list_missing(part, x)))
    b.problem(*alignment_problems(whole, slanted, steps, rows, keys))
    b.check()
    own = {n: x[n].dequantise(x[s], x["q"]) if s in x else x[n] for n, s in PAIRS[1:]}
    unpacked = {name: keys.unpack(own[name]) if keys else own[name] for name in own}
    s = scores(rows.unpack(x["q"]) if rows else x["q"], unpacked["k"], scale=scale)
    s = change_scores(s, soft_cap, slanted is not None, align, steps, x)
    if whole is not None:
        s = s.mask(whole, **{name: x[name] for name in whole.needs if name in x})
    unread = data.keys() - masks.needs_of(whole).keys() - arguments.read_by(None, steps)
    b.problem(*(f"attention: {name} is given, but nothing reads it" for name in sorted(unread)))
    p, lse = s.softmax(x.get("sinks"))
    if rate:
        p = p.dropout(rate, x["seed"], x["offset"])
    stats_of = (lse if name == "lse" else s.then(ops.STATISTICS[name]()) for name in names)
    results = p.weigh(unpacked["v"]), *stats_of
    return declare_outputs(b.build(*store_results(results, rows, x, narrow)), outputs)


def declare_inputs(b: Builder, specs: Mapping[str, TensorSpec]) -> dict[str, Value]:
    """The inputs by name. Raises GraphError for those that are none, such as Dims of two sizes."""
    before = len(b.problems)
    x = {name: b.input(name, spec) for name, spec in specs.items()}
    if len(b.problems) > before:
        b.check()
    return x


def store_results(
    results: Sequence[Value], rows: Sequences | None, x: dict[str, Value], narrow: Value
) -> list[Value]:
    """o and statistics, packed as q is, and o in 8 bits with amax, if it has a scale. narrow: q
    before it is dequantised."""
    packed = [rows.pack(r, x["q"], n > 0) if rows else r for n, r in enumerate(results)]
    if O_SCALE not in x:
        return packed
    o, amax = packed[0].quantise(x[O_SCALE], narrow)
    return [o, *packed[1:], amax]


def declare_outputs(graph: Graph, outputs: Mapping[str, TensorSpec | str] | None) -> Graph:
    from attn_graph.ir.transforms.vjp import lay_out  # which imports this module

    return graph if outputs is None else lay_out(graph, outputs)


def change_scores(
    s: Value,
    soft_cap: float | None,
    alibi: bool,
    align: Align | None,
    steps: Sequence[Modifier],
    x: dict[str, Value],
) -> Value:
    """The scores after soft cap, bias, ALiBi and further steps. x: the inputs by name."""
    taken = arguments.read_by(None, steps)
    if soft_cap is not None:
        s = s.soft_cap(soft_cap)
    for name in arguments.ADDENDS:
        if (own := arguments.ARGUMENTS[name].step) is not None and name in x.keys() - taken:
            s = s.then(own, x[name])
    if alibi and "alibi" not in x.keys() & taken:
        moved = {n: x[n] for n in masks.ragged_in(x) if align == "bottom_right"}
        s = s.alibi(x.get("alibi"), align=align, **moved)
    for step in steps:
        missing = arguments.list_missing(step, x)
        s.builder.problem(*missing)
        s = s if missing else s.then(step, *(x[name] for name in step.needs))
    return s


def unknown_arguments(
    names: Iterable[str],
    mask: object,
    modifiers: Iterable[Modifier | masks.Mask] = (),
    options: Iterable[str] = (),
) -> list[str]:
    """Messages for names that neither an attention nor its mask nor its modifiers read.

    options: those of `compile` that the function has too.
    """
    known = {*arguments.EXTRA, *arguments.read_by(mask, modifiers)}
    unknown = sorted({*names} - known)
    own = {*known, *signature(attention).parameters, *options} if unknown else known
    none = NO_TENSOR * bool(mask is not None or modifiers)
    return [unknown_argument(name, sorted(own), find("DEFAULTS"), none) for name in unknown]
