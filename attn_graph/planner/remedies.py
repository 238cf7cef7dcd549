"""Changes to a request after which a backend that refused it may support it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from attrs import evolve, frozen

from attn_graph.errors import GraphError, Reason
from attn_graph.ir import ops
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.packing import Unpack
from attn_graph.ir.paging import Unpage
from attn_graph.ir.passes import simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.scaling import stands_in, weights_dtype
from attn_graph.ir.vjp import training_gradient, wanted_inputs
from attn_graph.lowering.backend import Options
from attn_graph.lowering.reasons import lacks_machine
from attn_graph.machine.cache import remember
from attn_graph.spec import NAMES, TensorSpec, dense_strides, memory_order

STEP = 8  # head sizes that kernels take are multiples of it


@final
@frozen
class Request:
    """A graph with its options, and the inputs `wants` to differentiate by.

    through_lse: True if every possible output has a cotangent, False for `main_outputs` alone.
    """

    graph: Graph
    options: Options
    wants: tuple[str, ...]
    through_lse: bool = False

    @classmethod
    def of(cls, graph: Graph, options: Options, wants: Sequence[str] | None = None) -> Request:
        """A request by every floating input, or those in `wants`. Raises GraphError for others."""
        inputs = wanted_inputs(graph, wants)
        return cls(graph, options, tuple(graph.inputs[n].name for n in inputs))

    def forward(self) -> Graph:
        """The simplified graph."""
        return simplify_once(self.graph)

    def backward(self) -> Graph:
        """The gradient's graph; its cotangents lie as the outputs do."""
        return training_gradient(self.forward(), self.wants, through_lse=self.through_lse)

    @cached_property
    def single_edits(self) -> tuple[tuple[Remedy, Edit, Request], ...]:
        """Every applicable single change, gentlest first, and the request after it."""
        tries = ((remedy, edit, edit(self)) for remedy, edit in edits(self))
        return tuple((remedy, edit, then) for remedy, edit, then in tries if then)


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
    question: Request

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


Edit = Callable[[Request], "Request | None"]  # None: nothing to change, or no graph then
Named = tuple[Remedy, Edit]
Respec = Callable[[TensorSpec], TensorSpec]
Tried = tuple[Remedy, Request, Sequence[Reason]]  # a change, the request after it, the reasons left
Asks = Callable[[Request], Sequence[Reason]]  # every reason against


def find_remedies(
    question: Request, reasons: Sequence[Reason], asks: Asks
) -> tuple[tuple[tuple[Remedy, ...], ...], Change | None]:
    """For each reason the single changes that lift it; and the smallest change that lifts all.

    A reason is lifted if no reason with its key is left. Nothing lifts a lack of the machine.
    """
    if all(map(lacks_machine, reasons)):
        return ((),) * len(reasons), None
    tried = [(remedy, then, asks(then)) for remedy, _, then in question.single_edits]
    lifts = tuple(remedies_of(reason.key, tried, keys(reasons)) for reason in reasons)
    return lifts, smallest_change(question, lifts, tried, asks) if all(lifts) else None


def keys(reasons: Sequence[Reason]) -> frozenset[str]:
    return frozenset(reason.key for reason in reasons)


def remedies_of(key: str, tried: Sequence[Tried], before: frozenset[str]) -> tuple[Remedy, ...]:
    """The changes that lift a reason; only those without new reasons, if there are any."""
    gone = [(remedy, keys(left)) for remedy, _, left in tried if key not in keys(left)]
    return tuple([remedy for remedy, left in gone if left <= before] or [x for x, _ in gone])


def smallest_change(
    question: Request, lifts: Sequence[Sequence[Remedy]], tried: Sequence[Tried], asks: Asks
) -> Change | None:
    """A single change that lifts every reason, or one change for each reason, made together.

    Changes that keep the result come first. None if neither way lifts all reasons.
    """
    changes = [Change((remedy,), then) for remedy, then, left in tried if not left]
    if all(change.changes_result for change in changes):
        changes += change_together(question, lifts, asks)
    return min(changes, key=lambda change: change.changes_result, default=None)


def change_together(
    question: Request, lifts: Sequence[Sequence[Remedy]], asks: Asks
) -> Iterator[Change]:
    """The gentlest change for each reason, made one after another, if together they lift all.

    Reasons with the fewest changes choose first. A change already chosen serves later reasons too.
    """
    chosen: set[Remedy] = set()
    for each in sorted(lifts, key=len):
        if chosen.isdisjoint(each):
            chosen.add(min(each, key=lambda remedy: remedy.changes_result))
    then: Request | None = question
    for remedy, edit, _ in question.single_edits:
        if remedy in chosen:
            then = then and edit(then)
    if then is not None and len(chosen) > 1 and not asks(then):
        yield Change(tuple(x for x, *_ in question.single_edits if x in chosen), then)


# The changes, gentlest first: layouts, gradients, options, dtypes, sizes, and last the graph's
# steps.


def edits(question: Request) -> Iterator[Named]:
    """Every change worth trying, with its words."""
    specs = {i.name: i.spec for i in question.graph.inputs}
    for name, spec in specs.items():
        if len(spec.shape) > 1 and make_dense(spec) != spec:
            yield Remedy(f"make {name} dense"), respec({name: make_dense})
    if question.through_lse:
        yield Remedy("do not differentiate lse"), lambda q: evolve(q, through_lse=False)
    for name in question.wants:
        if name not in ("q", "k", "v"):
            yield Remedy(f"do not differentiate {name}"), without_gradient_of(name)
    yield from option_edits(question.options)
    if question.options.precision != "fp8" and weights_dtype(question.graph, "fp8"):
        yield Remedy('set precision="fp8"', changes_result=True), with_option(precision="fp8")
    yield from dtype_edits(specs)
    yield from size_edits(specs)
    yield from op_edits(question.graph)


def respec(changed: Mapping[str, Respec]) -> Edit:
    """An edit of these inputs' specs, applied to the specs left by earlier edits."""

    def edit(question: Request) -> Request | None:
        now = {i.name: i.spec for i in question.graph.inputs}
        specs = {name: change(now[name]) for name, change in changed.items() if name in now}
        return (
            rebuild_request(question, specs) if any(now[n] != x for n, x in specs.items()) else None
        )

    return edit


def make_dense(spec: TensorSpec) -> TensorSpec:
    """The spec without gaps: axes in the same order, except that the last one is innermost."""
    return TensorSpec(spec.shape, spec.dtype, dense_strides(spec.shape, order_of(spec)))


def order_of(spec: TensorSpec) -> tuple[int, ...]:
    """The axes in memory order, the last one innermost."""
    last = len(spec.shape) - 1
    return (*(axis for axis in memory_order(spec) if axis != last), last)


def with_last_size(size: int) -> Respec:
    """A change of the last size, without gaps."""

    def change(spec: TensorSpec) -> TensorSpec:
        shape = (*spec.shape[:-1], size)
        return TensorSpec(shape, spec.dtype, dense_strides(shape, order_of(spec)))

    return change


def with_heads(heads: int) -> Respec:
    """A change of the number of heads, without gaps."""

    def change(spec: TensorSpec) -> TensorSpec:
        shape = (spec.shape[0], heads, *spec.shape[2:])
        return TensorSpec(shape, spec.dtype, dense_strides(shape, order_of(spec)))

    return change


def with_dtype(dtype: torch.dtype) -> Respec:
    return lambda spec: TensorSpec(spec.shape, dtype, spec.strides)


def without_gradient_of(name: str) -> Edit:
    return lambda q: evolve(q, wants=tuple(x for x in q.wants if x != name))


def option_edits(options: Options) -> Iterator[Named]:
    """Edits of options that refuse more than necessary."""
    if options.max_workspace is not None:
        yield Remedy("set max_workspace=None"), with_option(max_workspace=None)
    if options.deterministic:
        yield Remedy("set deterministic=False"), with_option(deterministic=False)
    if options.batch_invariant:
        yield Remedy("set batch_invariant=False"), with_option(batch_invariant=False)
    if options.precision == "ieee":
        yield Remedy('set precision="tf32"'), with_option(precision="tf32")
    if options.avoid:
        yield Remedy("avoid no backend"), with_option(avoid=())


def with_option(**changed: Any) -> Edit:  # Any: fields of Options
    return lambda q: evolve(q, options=evolve(q.options, **changed))


def dtype_edits(specs: Mapping[str, TensorSpec]) -> Iterator[Named]:
    """q, k, v and tensors like them in another dtype; a bias in q's or float32; float32 sinks."""
    given = specs["q"].dtype if "q" in specs else next(iter(specs.values())).dtype
    main = stands_in(given)
    alike = [name for name, x in specs.items() if x.dtype == main and len(x.shape) == 4]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype != main and given == main:
            text = f"cast {join_words(alike)} to {NAMES[dtype]}"
            edit = respec(dict.fromkeys(alike, with_dtype(dtype)))
            yield Remedy(text, rounds(main, dtype)), edit
    for name, wanted in (("bias", main), ("bias", torch.float32), ("sinks", torch.float32)):
        if name in specs and specs[name].dtype != wanted:
            remedy = Remedy(f"cast {name} to {NAMES[wanted]}", rounds(specs[name].dtype, wanted))
            yield remedy, respec({name: with_dtype(wanted)})


def rounds(given: torch.dtype, wanted: torch.dtype) -> bool:
    """True if the wanted dtype lacks some numbers of the given one."""
    return torch.promote_types(given, wanted) != wanted


def join_words(names: Sequence[str]) -> str:
    """ "q, k and v"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def size_edits(specs: Mapping[str, TensorSpec]) -> Iterator[Named]:
    """Heads repeated; head sizes padded with zeros to multiples of STEP, each or both alike."""
    if not {"q", "k", "v"} <= specs.keys():
        return
    H = specs["q"].shape[1]
    if specs["k"].shape[1] != H:
        remedy = Remedy(f"repeat k and v for all {H} heads")
        yield remedy, respec({"k": with_heads(H), "v": with_heads(H)})
    D, E = specs["q"].shape[-1], specs["v"].shape[-1]
    for d, e in dict.fromkeys(
        ((round_up(D), round_up(E)), (round_up(max(D, E)), round_up(max(D, E))))
    ):
        if (d, e) != (D, E):
            more = f" (o then has {e - E} more columns)" if e > E else ""
            remedy = Remedy(f"pad head sizes with zeros to D = {d}, E = {e}{more}")
            sizes = {"q": with_last_size(d), "k": with_last_size(d), "v": with_last_size(e)}
            yield remedy, respec(sizes)


def round_up(size: int) -> int:
    return -(-size // STEP) * STEP


def op_edits(graph: Graph) -> Iterator[Named]:
    kinds = dict.fromkeys(type(eqn.op) for eqn in graph.eqns)
    for kind in kinds:
        if kind is ops.Mask and {Unpack, Unpage} & kinds.keys():
            continue  # it sets the ends of sequences
        if kind in (ops.Dropout, ops.Mask) or issubclass(kind, Modifier):
            yield Remedy(f"drop {WORDS.get(kind, kind.__name__)}", True), without_steps(kind)
    if any(isinstance(eqn.op, ops.Softmax) and eqn.op.sinks for eqn in graph.eqns):
        yield Remedy("drop the sinks", True), without_steps(ops.Softmax)
    for name, kind in ops.STATISTICS.items():
        if kind in kinds:
            yield Remedy(f"drop {name} from stats", True), without_outputs(kind)


WORDS: dict[type, str] = {ops.Dropout: "dropout", ops.Mask: "the mask"}


def without_steps(kind: type) -> Edit:
    """An edit that drops the steps of a kind; None if the rest is not a graph."""

    def edit(question: Request) -> Request | None:
        return rebuild_request(question, {}, kind)

    return edit


def without_outputs(kind: type) -> Edit:
    """An edit that drops the outputs from steps of a kind."""

    def edit(question: Request) -> Request | None:
        graph = question.graph
        gone = graph.named_results(lambda op: op.names if isinstance(op, kind) else ())
        left = tuple(i for i in graph.outputs if i not in gone)
        if not left or left == graph.outputs:
            return None
        return evolve(question, graph=prune(evolve(graph, outputs=left)))

    return edit


def rebuild_request(
    question: Request, specs: Mapping[str, TensorSpec], kind: type | None = None
) -> Request | None:
    """The request with other inputs, without the steps of a kind; None if that is not a graph."""
    try:
        graph = rebuild_graph(question.graph, specs, kind)
    except GraphError:
        return None
    left = tuple(x for x in question.wants if x in {i.name for i in graph.inputs})
    return evolve(question, graph=graph, wants=left)


def rebuild_graph(graph: Graph, specs: Mapping[str, TensorSpec], kind: type | None) -> Graph:
    """The graph with other inputs and without the steps of a kind. Raises GraphError."""
    b = Builder()
    values: dict[int, Value] = {
        n: b.input(i.name, specs.get(i.name, i.spec)) for n, i in enumerate(graph.inputs)
    }
    for eqn, outs in graph.numbered:
        values.update(
            zip(outs, emit_changed(b, eqn, [values[i] for i in eqn.args], kind), strict=True)
        )
    b.check()
    return without_idle(b.graph(*(values[i] for i in graph.outputs)))


def emit_changed(b: Builder, eqn: Eqn, operands: list[Value], kind: type | None) -> Sequence[Value]:
    """Emit the equation again; a dropped one passes its operand through."""
    if kind is None or not isinstance(eqn.op, kind):
        return b.emit(eqn.op, *operands)
    if isinstance(eqn.op, ops.Softmax):
        return b.emit(ops.Softmax(), operands[0])
    return operands[:1]


def without_idle(graph: Graph) -> Graph:
    """The graph without unread inputs."""
    read = {i for eqn in graph.eqns for i in eqn.args} | {*graph.outputs}
    b = Builder(trusts=True)
    values = {n: b.input(i.name, i.spec) for n, i in enumerate(graph.inputs) if n in read}
    for eqn, outs in graph.numbered:
        values.update(zip(outs, b.emit(eqn.op, *(values[i] for i in eqn.args)), strict=True))
    return b.graph(*(values[i] for i in graph.outputs))
