"""Changes to a request after which a backend that refused it may support it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import Any, final

import torch
from attrs import evolve, field, frozen

from attn_graph.errors import GraphError, Reason
from attn_graph.ir import ops
from attn_graph.ir.arguments import ADDENDS
from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value, attention
from attn_graph.ir.graph import Graph
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.passes import simplify
from attn_graph.ir.rewrite import prune
from attn_graph.ir.storage.packed import and_parts
from attn_graph.ir.storage.packing import Unpack
from attn_graph.ir.storage.paging import Unpage
from attn_graph.ir.storage.scaling import stands_in, weights_dtype
from attn_graph.ir.transforms.vjp import wanted_inputs
from attn_graph.lowering.backend import Backend
from attn_graph.lowering.problem import Facts, facts_of
from attn_graph.lowering.reasons import lacks_machine
from attn_graph.lowering.request import Request
from attn_graph.machine.ambient import neutral_state
from attn_graph.masks import And, SameSegment, join_masks, needs_of
from attn_graph.planner.choose import known_reasons
from attn_graph.planner.forms.views import core_of
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
    offered: dict[str, tuple[Edit, ...]] = field(factory=dict, init=False, eq=False, repr=False)

    @classmethod
    def of(cls, request: Request, wants: Sequence[str] | None = None) -> Question:
        """Derivatives by all floating inputs, or by `wants`. Raises GraphError for others."""
        inputs = wanted_inputs(request.graph, wants)
        return cls(request, tuple(request.graph.inputs[n].name for n in inputs))

    @property
    def graph(self) -> Graph:
        """The graph as written."""
        return self.request.graph

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """How the inputs lie, by name."""
        return {i.name: i.spec for i in self.graph.inputs}

    def core(self, read: Read) -> Request:
        """The request for the graph of one pass, as backends see it."""
        return self.request.with_graph(core_of(read(self)))

    def forward(self) -> Graph:
        """The simplified graph."""
        return self.request.facts.once(simplify_graph)

    def backward(self) -> Graph:
        """The gradient's graph; its cotangents lie as the outputs do."""
        return facts_of(self.forward()).gradient(self.wants, through_lse=self.through_lse)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """Every single change, gentlest first."""
        return self.offer(EDITS)

    def offer(self, kinds: Container[str]) -> tuple[Edit, ...]:
        """The single changes of some kinds, gentlest first; each is made once."""
        for kind in (x for x in EDITS if x in kinds and x not in self.offered):
            self.offered[kind] = tuple([Edit(kind, *each) for each in EDITS[kind](self)])
        return tuple([edit for kind in EDITS if kind in kinds for edit in self.offered[kind]])

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


def simplify_graph(facts: Facts) -> Graph:
    return simplify(facts.graph)


@final
@frozen
class Remedy:
    """A change that lifts a reason, in words.

    instead: what the run would be, "without the mask", if the changed graph lacks a step or reads
    rounded inputs. All other changes keep the numbers: another layout, head sizes padded with
    zeros, repeated heads, a wider option, or one gradient less.
    """

    text: str
    instead: str = ""

    @property
    def changes_result(self) -> bool:
        """True if the result is another one after the change."""
        return bool(self.instead)

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


@final
@frozen
class Edit:
    """A change to try. kind: one of EDITS. make: the question after it; None: not a graph then."""

    kind: str
    remedy: Remedy
    make: Callable[[], Question | None] = field(eq=False, repr=False)

    @cached_property
    def after(self) -> Question | None:
        """The question after the change, for all backends."""
        return self.make()


Read = Callable[[Question], Graph]  # the graph of one pass
Tried = tuple[Edit, Question, Sequence[Reason]]  # a change, the question then, the reasons left
Made = tuple[Remedy, Callable[[], Question | None]]  # a change, and the question after it
Asks = Callable[[Question], Sequence[Reason]]  # every reason against
Remedies = tuple[tuple[tuple[Remedy, ...], ...], Change | None]  # by reason; and for all of them

# The kinds of changes that may lift a reason, by the first word of its key; any for other keys.
LIFTED_BY: dict[str, tuple[str, ...]] = {
    "aligned_rows": ("lies", "head"),
    "architecture": (),
    "architecture_range": (),
    "avoided": ("option",),
    "batch_invariant": ("option",),
    "bias_beside_mask": ("mask", "modifier", "pack"),
    "bias_dtype": ("cast", "modifier"),
    "bias_keys": ("modifier",),
    "causal_alone": ("mask", "pack"),
    "deterministic": ("option",),
    "dropout": ("dropout",),
    "dtype": ("cast",),
    "gradient": ("gradient", "modifier", "sinks"),
    "grouped_heads": ("group",),
    "head_equal": ("head",),
    "head_multiple": ("head", "cast"),
    "head_pair": ("head",),
    "head_widest": (),
    "lse_gradient": ("gradient",),
    "mask": ("mask", "pack", "sinks"),
    "mask_leaves": ("mask", "pack"),
    "misaligned": ("lies", "head", "cast", "modifier"),
    "modifier": ("modifier",),
    "no_dropout": ("dropout",),
    "no_sinks": ("sinks",),
    "one_size": (),
    "packed": (),
    "pages": (),
    "pages_absent": ("finite", "mask"),
    "pages_hidden": ("finite", "mask"),
    "rows": ("lies", "head"),
    "scale": (),
    "sinks": ("sinks",),
    "soft_cap": ("modifier",),
    "statistics": ("statistics",),
    "stride": ("lies", "head", "group", "modifier"),
    "switched_off": (),
    "tf32": ("option", "cast"),
    "unit_last": ("lies", "head", "group", "modifier"),
    "window": ("mask",),
}


def kinds_for(reason: Reason) -> Collection[str]:
    """The kinds of changes that may lift a reason."""
    return LIFTED_BY.get(reason.key.partition(".")[0], EDITS)


@final
@frozen
class Search:
    """The search for changes that lift a backend's reasons, made when it is first read."""

    question: Question
    reasons: tuple[Reason, ...]
    backend: Backend
    read: Read

    def asks(self, question: Question) -> tuple[Reason, ...]:
        """Every reason of the backend after a change."""
        return known_reasons(self.backend, question.core(self.read))

    @cached_property
    def remedies(self) -> Remedies:
        """For each reason the single changes that lift it; and the smallest change for all.

        A reason is lifted if no reason with its key is left. Nothing lifts a lack of the machine,
        nor what shows only when the graph is lowered.
        """
        question, reasons = self.question, self.reasons
        if all(map(lacks_machine, reasons)) or any(reason.late for reason in reasons):
            return ((),) * len(reasons), None
        kinds = {kind for reason in reasons for kind in kinds_for(reason)}
        before = {reason.key for reason in reasons}
        with neutral_state(), question.request.target.current():
            tried = [(x, x.after, self.asks(x.after)) for x in question.offer(kinds) if x.after]
            lifts = tuple([remedies_of(reason, tried, before) for reason in reasons])
            if not all(lifts):
                return lifts, None
            return lifts, smallest_change(question, lifts, tried, self.asks)


def remedies_of(reason: Reason, tried: Sequence[Tried], before: Set[str]) -> tuple[Remedy, ...]:
    """The changes that lift a reason; only those without new reasons, if there are any."""
    kinds = kinds_for(reason)
    able = [(edit.remedy, {x.key for x in left}) for edit, _, left in tried if edit.kind in kinds]
    gone = [(remedy, left) for remedy, left in able if reason.key not in left]
    return tuple([remedy for remedy, left in gone if left <= before] or [x for x, _ in gone])


def smallest_change(
    question: Question, lifts: Sequence[Sequence[Remedy]], tried: Sequence[Tried], asks: Asks
) -> Change | None:
    """A single change that lifts every reason, or one change for each reason, made together.

    Changes that keep the result come first. None if neither way lifts all reasons.
    """
    changes = [Change((edit.remedy,), then) for edit, then, left in tried if not left]
    if all(change.changes_result for change in changes):
        edits = choose_edits(lifts, [edit for edit, *_ in tried])
        then = make_together(question, edits)
        if then is not None and len(edits) > 1 and not asks(then):
            changes.append(Change(tuple([edit.remedy for edit in edits]), then))
    return min(changes, key=lambda change: change.changes_result, default=None)


def choose_edits(lifts: Sequence[Sequence[Remedy]], tried: Sequence[Edit]) -> list[Edit]:
    """The gentlest change for each reason.

    Reasons with the fewest changes choose first. A change already chosen serves later reasons too.
    """
    chosen: set[Remedy] = set()
    for each in sorted(lifts, key=len):
        if chosen.isdisjoint(each):
            chosen.add(min(each, key=lambda remedy: remedy.changes_result))
    return [edit for edit in tried if edit.remedy in chosen]


def make_together(question: Question, edits: Sequence[Edit]) -> Question | None:
    """The question after changes made one after another; None if one can't be made then."""
    then: Question | None = question
    for edit in edits if len(edits) > 1 else ():
        alike = then.offer((edit.kind,)) if then else ()
        then = next((each.after for each in alike if each.remedy == edit.remedy), None)
    return then


WIDER: dict[
    str, object
] = {  # options that refuse more than necessary, with values that refuse less
    "max_workspace": None,
    "deterministic": False,
    "batch_invariant": False,
}
WORDS: dict[type, str] = {ops.Dropout: "dropout", ops.Mask: "the mask"}


def layout_edits(question: Question) -> Iterator[Made]:
    """Dense inputs."""
    for name, spec in question.specs.items():
        if len(spec.shape) > 1 and (dense := resize(spec, spec.shape)) != spec:
            yield Remedy(f"make {name} dense"), partial(question.rebuilt, {name: dense})


def gradient_edits(question: Question) -> Iterator[Made]:
    """Fewer gradients."""
    if question.through_lse:
        yield Remedy("do not differentiate lse"), partial(evolve, question, through_lse=False)
    for name in question.wants:
        if name not in ("q", "k", "v"):
            left = tuple(x for x in question.wants if x != name)
            yield Remedy(f"do not differentiate {name}"), partial(evolve, question, wants=left)


def finite_edits(question: Question) -> Iterator[Made]:
    """Pools declared finite."""
    if any(isinstance(eqn.op, Unpage) and not eqn.op.finite for eqn in question.graph.eqns):
        remedy = Remedy("pass finite_pages=True if no row of the pools holds NaN or Inf")
        yield remedy, partial(declare_finite, question)


def declare_finite(question: Question) -> Question:
    """The request with pools that are declared finite."""
    graph = question.graph
    eqns = tuple(
        evolve(eqn, op=evolve(eqn.op, finite=True)) if isinstance(eqn.op, Unpage) else eqn
        for eqn in graph.eqns
    )
    changed = question.request.with_graph(evolve(graph, eqns=eqns))
    return evolve(question, request=changed)


def option_edits(question: Question) -> Iterator[Made]:
    """Looser options, and products of 8 bits."""
    options = question.request.options
    loose = [(f"set {n}={wider}", n, wider) for n, wider in WIDER.items()]
    loose += [('set precision="tf32"', "precision", "tf32")] * (options.precision == "ieee")
    loose += [("avoid no backend", "avoid", ())]
    for text, name, wider in loose:
        if getattr(options, name) != wider:
            yield Remedy(text), partial(question.with_option, **{name: wider})
    if options.precision != "fp8" and weights_dtype(question.graph, "fp8"):
        remedy = Remedy('set precision="fp8"', instead='with precision="fp8"')
        yield remedy, partial(question.with_option, precision="fp8")


def resize(spec: TensorSpec, shape: Sequence[int]) -> TensorSpec:
    """A spec of another shape, without gaps: axes in the same order, but the last one innermost."""
    last = len(spec.shape) - 1
    order = (*(axis for axis in memory_order(spec) if axis != last), last)
    return TensorSpec(shape, spec.dtype, dense_strides(shape, order))


def dtype_edits(question: Question) -> Iterator[Made]:
    """q, k, v and tensors like them in another dtype; a bias in q's or float32; float32 sinks."""
    specs = question.specs
    given = specs["q"].dtype if "q" in specs else next(iter(specs.values())).dtype
    main = stands_in(given)
    alike = [name for name, x in specs.items() if x.dtype == main and len(x.shape) == 4]
    wide = (torch.bfloat16, torch.float16, torch.float32) if given == main else ()
    casts = [(alike, dtype) for dtype in wide]
    casts += [([name], dtype) for name in ADDENDS for dtype in (main, torch.float32)]
    for names, dtype in casts:
        own = {name: specs[name] for name in names if name in specs}
        if any(spec.dtype != dtype for spec in own.values()):
            (before,) = {spec.dtype for spec in own.values()}
            loses = torch.promote_types(before, dtype) != dtype  # some of the numbers
            *most, last = own
            every = f"{', '.join(most)} and {last}" if most else last
            instead = f"with {every} in {NAMES[dtype]}" if loses else ""
            cast = {n: TensorSpec(x.shape, dtype, x.strides) for n, x in own.items()}
            remedy = Remedy(f"cast {every} to {NAMES[dtype]}", instead)
            yield remedy, partial(question.rebuilt, cast)


def group_edits(question: Question) -> Iterator[Made]:
    """Heads of k and v repeated; in pools they are the third axis."""
    specs = question.specs
    if not {"q", "k", "v"} <= specs.keys():
        return
    paged = any(isinstance(eqn.op, Unpage) for eqn in question.graph.eqns)
    H, heads = specs["q"].shape[1], 2 if paged else 1
    if specs["k"].shape[heads] != H:
        ends = {name: (specs[name].shape[:heads], specs[name].shape[heads + 1 :]) for name in "kv"}
        wide = {name: resize(specs[name], (*a, H, *b)) for name, (a, b) in ends.items()}
        yield Remedy(f"repeat k and v for all {H} heads"), partial(question.rebuilt, wide)


def head_edits(question: Question) -> Iterator[Made]:
    """Head sizes padded with zeros to multiples of STEP, each or both alike."""
    specs = question.specs
    if not {"q", "k", "v"} <= specs.keys():
        return
    D, E = specs["q"].shape[-1], specs["v"].shape[-1]
    both = round_up(max(D, E))
    for d, e in dict.fromkeys(((round_up(D), round_up(E)), (both, both))):
        if (d, e) != (D, E):
            more = f" (o then has {e - E} more columns)" if e > E else ""
            text = f"pad head sizes with zeros to D = {d}, E = {e}{more}"
            sizes = {"q": d, "k": d, "v": e}.items()
            wide = {n: resize(specs[n], (*specs[n].shape[:-1], x)) for n, x in sizes}
            yield Remedy(text), partial(question.rebuilt, wide)


def round_up(size: int) -> int:
    return -(-size // STEP) * STEP


def pack_edits(question: Question) -> Iterator[Made]:
    """Segments of a dense batch as packed sequences: each has to lie in one run of rows."""
    found = [eqn.op.mask for eqn in question.graph.eqns if isinstance(eqn.op, ops.Mask)]
    if len(found) == 1 and SameSegment() in and_parts(found[0]):
        text = "pack the segments with q_starts=, if each lies in one run of rows"
        yield Remedy(text), partial(pack_segments, question)


def pack_segments(question: Question) -> Question | None:
    """The question for packed sequences, as many as batch entries; None if others than they decide,
    or if queries and keys differ."""
    simple = question.forward()
    node, specs = simple.eqns[0].op, {i.name: i.spec for i in simple.inputs}
    if len(simple.eqns) > 1 or not isinstance(node, Attention) or not {*"qkv"} <= specs.keys():
        return None
    (B, _H, M, _D), N = specs["q"].shape, specs["k"].shape[2]
    given: dict[str, Any] = {
        r.name: specs[r.name] for r in node.takes if r.name in specs and r.axes == "h"
    }
    read = {*needs_of(node.mask)} | {n for m in node.modifiers for n in m.needs}
    if M != N or not B or read - given.keys() != {*SameSegment().needs} or node.origin:
        return None
    left = [x for x in and_parts(node.mask) if x != SameSegment()]
    names = [name for n, name in enumerate(node.names) if len(simple.inputs) + n in simple.outputs]
    packed: dict[str, Any] = {  # Any: as declared by `attention`
        name: TensorSpec((B * M, x.shape[1], x.shape[3]), x.dtype)
        for name, x in ((name, specs[name]) for name in "qkv")
    }
    starts = TensorSpec((B + 1,), torch.int32)
    try:
        graph = attention(
            **packed, **given, mask=join_masks(And, left) if left else None, scale=node.scale,
            modifiers=node.modifiers, dropout=node.dropout, q_starts=starts,
            stats=[name for name in names if name != "o"], max_lengths=(M, N),
        )  # fmt: skip
    except GraphError:
        return None
    wants = tuple(x for x in question.wants if x in {i.name for i in graph.inputs})
    return evolve(question, request=question.request.with_graph(graph), wants=wants)


def step_edits(family: type, question: Question) -> Iterator[Made]:
    """Steps of a family of ops dropped, by class."""
    kinds = dict.fromkeys(type(eqn.op) for eqn in question.graph.eqns)
    if family is ops.Mask and {Unpack, Unpage} & kinds.keys():
        return  # it sets the ends of sequences
    for kind in (x for x in kinds if issubclass(x, family)):
        step = drop_step(WORDS.get(kind, kind.__name__))
        yield step, partial(question.rebuilt, {}, kind)


def sink_edits(question: Question) -> Iterator[Made]:
    """Sinks dropped."""
    if any(isinstance(eqn.op, ops.Softmax) and eqn.op.sinks for eqn in question.graph.eqns):
        yield drop_step("the sinks"), partial(question.rebuilt, {}, ops.Softmax)


def statistic_edits(question: Question) -> Iterator[Made]:
    """Statistics dropped."""
    kinds = {type(eqn.op) for eqn in question.graph.eqns}
    for name, kind in ops.STATISTICS.items():
        if kind in kinds:
            remedy = Remedy(f"drop {name} from stats", f"without {name} in stats")
            yield remedy, partial(without_outputs, question, kind)


def drop_step(step: str) -> Remedy:
    return Remedy(f"drop {step}", f"without {step}")


def without_outputs(question: Question, kind: type) -> Question | None:
    """The request without the outputs from steps of a kind."""
    graph = question.graph
    gone = graph.named_results(lambda op: op.names if isinstance(op, kind) else ())
    kept = [n for n, i in enumerate(graph.outputs) if i not in gone]
    if not 0 < len(kept) < len(graph.outputs):
        return None
    lies = tuple(graph.layouts[n] for n in kept) if graph.layouts else ()
    layouts = lies if any(lies) else ()
    left = evolve(graph, outputs=tuple(graph.outputs[n] for n in kept), layouts=layouts)
    return evolve(question, request=question.request.with_graph(prune(left)))


def rebuild_graph(graph: Graph, specs: Mapping[str, TensorSpec], kind: type | None) -> Graph:
    """The graph with other inputs and without the steps of a kind. Raises GraphError.

    A dropped step passes its first operand through; inputs that only it read are gone. Outputs that
    keep their shape keep their declared layout.
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
    pairs = zip(graph.outputs, graph.layouts, strict=False)
    layouts = tuple(x if values[i].type.shape == graph.types[i].shape else None for i, x in pairs)
    return b.graph(*(values[i] for i in graph.outputs), layouts=layouts if any(layouts) else ())


# The changes by kind, gentlest first: those of steps change the result.
EDITS: dict[str, Callable[[Question], Iterator[Made]]] = {
    "lies": layout_edits,
    "gradient": gradient_edits,
    "option": option_edits,
    "cast": dtype_edits,
    "group": group_edits,
    "head": head_edits,
    "finite": finite_edits,
    "pack": pack_edits,
    "modifier": partial(step_edits, Modifier),
    "mask": partial(step_edits, ops.Mask),
    "dropout": partial(step_edits, ops.Dropout),
    "sinks": sink_edits,
    "statistics": statistic_edits,
}
