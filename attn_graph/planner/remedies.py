"""Changes to a request after which a backend that refused it may support it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError, Reason
from attn_graph.ir import ops
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.packing import Unpack
from attn_graph.ir.paging import Unpage
from attn_graph.ir.passes import simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.scaling import stands_in, weights_dtype
from attn_graph.ir.vjp import training_gradient, wanted_inputs
from attn_graph.lowering.reasons import lacks_machine
from attn_graph.lowering.request import Request
from attn_graph.machine.cache import remember
from attn_graph.planner.views import core_of
from attn_graph.spec import NAMES, TensorSpec, dense_strides, memory_order

STEP = 8  # head sizes that kernels take are multiples of it


@final
@frozen
class Question:
    """A request for a graph as written, and the inputs `wants` to differentiate by.

    through_lse: True if every possible output has a cotangent, False for `main_outputs` alone.
    """

    request: Request
    wants: tuple[str, ...]
    through_lse: bool = False

    @classmethod
    def of(cls, request: Request, wants: Sequence[str] | None = None) -> Question:
        """Derivatives by all floating inputs, or by `wants`. Raises GraphError for others."""
        inputs = wanted_inputs(request.graph, wants)
        return cls(request, tuple(request.graph.inputs[n].name for n in inputs))

    @property
    def graph(self) -> Graph:
        """The graph as written."""
        return self.request.graph

    def core(self, read: Callable[[Question], Graph]) -> Request:
        """The request for the graph of one pass, as backends see it."""
        return self.request.with_graph(core_of(read(self)))

    def forward(self) -> Graph:
        """The simplified graph."""
        return simplify_once(self.graph)

    def backward(self) -> Graph:
        """The gradient's graph; its cotangents lie as the outputs do."""
        return training_gradient(self.forward(), self.wants, through_lse=self.through_lse)

    @cached_property
    def single_edits(self) -> tuple[tuple[Remedy, Question], ...]:
        """Every applicable single change, gentlest first, and the request after it."""
        tries = ((remedy, edit()) for remedy, edit in edits(self))
        return tuple((remedy, then) for remedy, then in tries if then)

    def with_option(self, **changed: Any) -> Question:  # Any: fields of Options
        return evolve(self, request=self.request.with_options(**changed))

    def rebuilt(self, specs: Mapping[str, TensorSpec], kind: type | None = None) -> Question | None:
        """With other inputs, without the steps of a kind; None if that is not a graph."""
        try:
            graph = rebuild_graph(self.graph, specs, kind)
        except GraphError:
            return None
        left = tuple(x for x in self.wants if x in {i.name for i in graph.inputs})
        return evolve(self, request=self.request.with_graph(graph), wants=left)


@remember
def simplify_once(graph: Graph) -> Graph:
    return simplify(graph)


@final
@frozen
class Remedy:
    """A change that lifts a reason, in words.

    changes_result: True if the changed graph lacks a step or reads rounded inputs. All other
    changes keep the numbers: another layout, head sizes padded with zeros, repeated heads, a wider
    option, or one gradient less.
    """

    text: str
    changes_result: bool = False

    def __str__(self) -> str:
        return self.text


@final
@frozen
class Change:
    """One or more changes of a graph or its options, and the request after them."""

    remedies: tuple[Remedy, ...]
    question: Question

    @property
    def graph(self) -> Graph:
        """The changed graph, to compile in place of the other."""
        return self.question.graph

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(map(str, self.remedies))

    @property
    def changes_result(self) -> bool:
        """True if one of the changes alters the result."""
        return any(each.changes_result for each in self.remedies)

    def __str__(self) -> str:
        return ", ".join(self.texts)


Edit = tuple[Remedy, Callable[[], "Question | None"]]  # None: not a graph then
Tried = tuple[
    Remedy, Question, Sequence[Reason]
]  # a change, the request after it, the reasons left
Asks = Callable[[Question], Sequence[Reason]]  # every reason against


def find_remedies(
    question: Question, reasons: Sequence[Reason], asks: Asks
) -> tuple[tuple[tuple[Remedy, ...], ...], Change | None]:
    """For each reason the single changes that lift it; and the smallest change that lifts all.

    A reason is lifted if no reason with its key is left. Nothing lifts a lack of the machine.
    """
    if all(map(lacks_machine, reasons)):
        return ((),) * len(reasons), None
    tried = [(remedy, then, asks(then)) for remedy, then in question.single_edits]
    lifts = tuple(remedies_of(reason.key, tried, keys(reasons)) for reason in reasons)
    return lifts, smallest_change(question, lifts, tried, asks) if all(lifts) else None


def keys(reasons: Sequence[Reason]) -> frozenset[str]:
    return frozenset(reason.key for reason in reasons)


def remedies_of(key: str, tried: Sequence[Tried], before: frozenset[str]) -> tuple[Remedy, ...]:
    """The changes that lift a reason; only those without new reasons, if there are any."""
    gone = [(remedy, keys(left)) for remedy, _, left in tried if key not in keys(left)]
    return tuple([remedy for remedy, left in gone if left <= before] or [x for x, _ in gone])


def smallest_change(
    question: Question, lifts: Sequence[Sequence[Remedy]], tried: Sequence[Tried], asks: Asks
) -> Change | None:
    """A single change that lifts every reason, or one change for each reason, made together.

    Changes that keep the result come first. None if neither way lifts all reasons.
    """
    changes = [Change((remedy,), then) for remedy, then, left in tried if not left]
    if all(change.changes_result for change in changes):
        changes += change_together(question, lifts, asks)
    return min(changes, key=lambda change: change.changes_result, default=None)


def change_together(
    question: Question, lifts: Sequence[Sequence[Remedy]], asks: Asks
) -> Iterator[Change]:
    """The gentlest change for each reason, made one after another, if together they lift all.

    Reasons with the fewest changes choose first. A change already chosen serves later reasons too.
    """
    chosen: set[Remedy] = set()
    for each in sorted(lifts, key=len):
        if chosen.isdisjoint(each):
            chosen.add(min(each, key=lambda remedy: remedy.changes_result))
    ordered = tuple(remedy for remedy, _ in question.single_edits if remedy in chosen)
    then: Question | None = question
    for remedy in ordered:
        then = then and next((edit() for each, edit in edits(then) if each == remedy), None)
    if then is not None and len(chosen) > 1 and not asks(then):
        yield Change(ordered, then)


# The changes, gentlest first: layouts, gradients, options, dtypes, sizes, and last the graph's
# steps.

WIDER: dict[
    str, object
] = {  # options that refuse more than necessary, with values that refuse less
    "max_workspace": None,
    "deterministic": False,
    "batch_invariant": False,
}
WORDS: dict[type, str] = {ops.Dropout: "dropout", ops.Mask: "the mask"}


def edits(question: Question) -> Iterator[Edit]:
    """Every change worth trying, in words, and a function that makes it."""
    specs = {i.name: i.spec for i in question.graph.inputs}
    for name, spec in specs.items():
        if len(spec.shape) > 1 and (dense := resize(spec, spec.shape)) != spec:
            yield Remedy(f"make {name} dense"), partial(question.rebuilt, {name: dense})
    if question.through_lse:
        yield Remedy("do not differentiate lse"), partial(evolve, question, through_lse=False)
    for name in question.wants:
        if name not in ("q", "k", "v"):
            left = tuple(x for x in question.wants if x != name)
            yield Remedy(f"do not differentiate {name}"), partial(evolve, question, wants=left)
    yield from option_edits(question)
    for remedy, changed in (*dtype_edits(specs), *size_edits(specs)):
        yield remedy, partial(question.rebuilt, changed)
    if any(isinstance(eqn.op, Unpage) and not eqn.op.finite for eqn in question.graph.eqns):
        remedy = Remedy("pass finite_pages=True if no row of the pools holds NaN or Inf")
        yield remedy, partial(declare_finite, question)
    yield from step_edits(question)


def declare_finite(question: Question) -> Question:
    """The request with pools that are declared finite."""
    graph = question.graph
    eqns = tuple(
        evolve(eqn, op=evolve(eqn.op, finite=True)) if isinstance(eqn.op, Unpage) else eqn
        for eqn in graph.eqns
    )
    changed = question.request.with_graph(evolve(graph, eqns=eqns))
    return evolve(question, request=changed)


def option_edits(question: Question) -> Iterator[Edit]:
    """Looser options, and products of 8 bits."""
    options = question.request.options
    for name, wider in WIDER.items():
        if getattr(options, name) != wider:
            yield Remedy(f"set {name}={wider}"), partial(question.with_option, **{name: wider})
    if options.precision == "ieee":
        yield Remedy('set precision="tf32"'), partial(question.with_option, precision="tf32")
    if options.avoid:
        yield Remedy("avoid no backend"), partial(question.with_option, avoid=())
    if options.precision != "fp8" and weights_dtype(question.graph, "fp8"):
        remedy = Remedy('set precision="fp8"', changes_result=True)
        yield remedy, partial(question.with_option, precision="fp8")


def resize(spec: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    """A spec of another shape, without gaps: axes in the same order, but the last one innermost."""
    last = len(spec.shape) - 1
    order = (*(axis for axis in memory_order(spec) if axis != last), last)
    return TensorSpec(shape, spec.dtype, dense_strides(shape, order))


Respec = tuple[Remedy, dict[str, TensorSpec]]  # a change of inputs, and their specs after it


def dtype_edits(specs: Mapping[str, TensorSpec]) -> Iterator[Respec]:
    """q, k, v and tensors like them in another dtype; a bias in q's or float32; float32 sinks."""
    given = specs["q"].dtype if "q" in specs else next(iter(specs.values())).dtype
    main = stands_in(given)
    alike = [name for name, x in specs.items() if x.dtype == main and len(x.shape) == 4]
    wide = (torch.bfloat16, torch.float16, torch.float32) if given == main else ()
    casts = [(alike, dtype) for dtype in wide]
    casts += [(["bias"], main), (["bias"], torch.float32), (["sinks"], torch.float32)]
    for names, dtype in casts:
        own = {name: specs[name] for name in names if name in specs}
        if any(spec.dtype != dtype for spec in own.values()):
            (before,) = {spec.dtype for spec in own.values()}
            loses = torch.promote_types(before, dtype) != dtype  # some of the numbers
            yield (
                Remedy(f"cast {join_words([*own])} to {NAMES[dtype]}", loses),
                {name: TensorSpec(spec.shape, dtype, spec.strides) for name, spec in own.items()},
            )


def join_words(names: Sequence[str]) -> str:
    """ "q, k and v"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def size_edits(specs: Mapping[str, TensorSpec]) -> Iterator[Respec]:
    """Heads repeated; head sizes padded with zeros to multiples of STEP, each or both alike."""
    if not {"q", "k", "v"} <= specs.keys():
        return
    H, D, E = specs["q"].shape[1], specs["q"].shape[-1], specs["v"].shape[-1]
    heads = 2 if "pages" in specs else 1  # the axis: a pool is [n,P,G,D]
    if specs["k"].shape[heads] != H:
        text = f"repeat k and v for all {H} heads"
        shapes = {name: [*specs[name].shape] for name in "kv"}
        for shape in shapes.values():
            shape[heads] = H
        yield Remedy(text), {name: resize(specs[name], shape) for name, shape in shapes.items()}
    both = round_up(max(D, E))
    for d, e in dict.fromkeys(((round_up(D), round_up(E)), (both, both))):
        if (d, e) != (D, E):
            more = f" (o then has {e - E} more columns)" if e > E else ""
            text = f"pad head sizes with zeros to D = {d}, E = {e}{more}"
            sizes = {"q": d, "k": d, "v": e}.items()
            yield Remedy(text), {n: resize(specs[n], (*specs[n].shape[:-1], x)) for n, x in sizes}


def round_up(size: int) -> int:
    return -(-size // STEP) * STEP


def step_edits(question: Question) -> Iterator[Edit]:
    """Modifiers, masks, dropout, sinks and statistics dropped."""
    graph = question.graph
    kinds = dict.fromkeys(type(eqn.op) for eqn in graph.eqns)
    for kind in kinds:
        if kind is ops.Mask and {Unpack, Unpage} & kinds.keys():
            continue  # it sets the ends of sequences
        if kind in (ops.Dropout, ops.Mask) or issubclass(kind, Modifier):
            text = f"drop {WORDS.get(kind, kind.__name__)}"
            yield Remedy(text, True), partial(question.rebuilt, {}, kind)
    if any(isinstance(eqn.op, ops.Softmax) and eqn.op.sinks for eqn in graph.eqns):
        yield Remedy("drop the sinks", True), partial(question.rebuilt, {}, ops.Softmax)
    for name, kind in ops.STATISTICS.items():
        if kind in kinds:
            yield Remedy(f"drop {name} from stats", True), partial(without_outputs, question, kind)


def without_outputs(question: Question, kind: type) -> Question | None:
    """The request without the outputs from steps of a kind."""
    graph = question.graph
    gone = graph.named_results(lambda op: op.names if isinstance(op, kind) else ())
    left = tuple(i for i in graph.outputs if i not in gone)
    if not left or left == graph.outputs:
        return None
    return evolve(question, request=question.request.with_graph(prune(evolve(graph, outputs=left))))


def rebuild_graph(graph: Graph, specs: Mapping[str, TensorSpec], kind: type | None) -> Graph:
    """The graph with other inputs and without the steps of a kind. Raises GraphError.

    A dropped step passes its first operand through; inputs that only it read are gone.
    """
    steps = [
        (eqn.op, outs, eqn.args[:1] if kind and isinstance(eqn.op, kind) else eqn.args)
        for eqn, outs in graph.numbered
    ]
    read = {i for *_, args in steps for i in args} | {*graph.outputs}
    b, named = Builder(), [(n, i) for n, i in enumerate(graph.inputs) if n in read]
    values: dict[int, Value] = {n: b.input(i.name, specs.get(i.name, i.spec)) for n, i in named}
    for op, outs, args in steps:
        results: Sequence[Value] = [values[i] for i in args]
        if kind is None or not isinstance(op, kind):
            results = b.emit(op, *results)
        elif isinstance(op, ops.Softmax):
            results = b.emit(ops.Softmax(), *results)
        values.update(zip(outs, results, strict=True))
    b.check()
    return b.graph(*(values[i] for i in graph.outputs))
