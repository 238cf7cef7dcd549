"""Graphs over one more axis, which becomes a part of the batch or of the heads, by views."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from attrs import evolve, frozen

from attn_graph.errors import GraphError, binds, show
from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.fused import Fused
from attn_graph.ir.graph import Eqn, Graph, Input, check_graph
from attn_graph.ir.modifiers import Alibi
from attn_graph.ir.passes import canonicalise, fuse
from attn_graph.ir.storage.packed import with_operands
from attn_graph.ir.storage.scaling import Dequantise
from attn_graph.ir.storage.views import Fold, Repeat, Unfold, insert_at
from attn_graph.ir.terms.relative import counting_parts
from attn_graph.ir.transforms.binding import require_numbers
from attn_graph.ir.transforms.sums import Add, Zeros
from attn_graph.ir.transforms.vjp import require_no_layouts, value_names
from attn_graph.spec import TensorSpec, as_integer, dense_strides, to_integer
from attn_graph.spec.dims import to_index

Axes = Mapping[str, int | None]


@binds()
def vmap(
    graph: Graph,
    in_axes: int | Axes = 0,
    *,
    size: int,
    specs: Mapping[str, TensorSpec] | None = None,
) -> Graph:
    """The graph mapped over one more axis of `size` entries, each computed as by `graph`.

    in_axes: the place of the axis in each input, by name; all entries share the inputs that are
    None or not named. A number is the place in all inputs except single numbers, such as a seed.
    Outputs have the axis first. specs: of inputs with the axis, by name; by default dense, and for
    an axis at 0 with each entry as the graph declares it.

    The axis becomes a part of the batch, or of the heads, by views alone: backends see one call
    with a larger batch, or with more heads. jvp, vjp and vmap take the result like any other graph.

    Dropout draws for every entry what it draws for it alone: by one seed and offset, at the entry's
    own places.

        >>> vmap(graph, {"q": 0}, size=3)  # three queries [3,B,H,M,D] share k and v

    Raises GraphError for wrong names, places and specs; if no view works, with the fewest copies
    that would help; for named sizes; and for a graph whose result would differ from a loop: dropout
    if the axis is not an outer part of the batch, and your own masks and modifiers, which may count
    batch entries or heads.
    """
    check_graph(graph, "vmap")
    require_numbers(graph, "vmap")
    require_no_layouts(graph, "vmap")
    graph = fuse(canonicalise(graph))  # scales are applied by ops of their own, which are mapped
    count = to_integer(size)
    if count is None or count < 1:
        raise GraphError(f"vmap: size {show(size)} is not a whole number of at least 1")
    axes = read_in_axes(graph, in_axes)
    if not isinstance(specs, Mapping | None):
        raise GraphError(f"vmap: specs {show(specs)} is not a mapping of names to TensorSpecs")
    inputs = map_inputs(graph, axes, count, specs or {})
    if problems := [*dict.fromkeys(general_problems(graph))]:
        raise GraphError(*problems)
    mapping = MappedGraph(graph, axes, count, inputs, letters_of(graph))
    against = {way: [*dict.fromkeys(mapping.problems(way))] for way in WAYS}
    best = min(WAYS, key=lambda way: len(against[way]))
    if against[best]:
        texts = (f"vmap: for the axis to be {best}, {text}" for text in against[best])
        raise GraphError(*texts)
    return mapping.build(best)


@final
@frozen
class Way:
    """The axis as a part of "b", the batch, or of "h", the heads.

    before: True for the outer part: it counts slower than the axis it joins.
    """

    letter: str
    before: bool

    def letter_in(self, letters: str) -> str | None:
        """That axis in an operand's letters, "g" for key/value heads; None if it has none."""
        own = "g" if self.letter == "h" and "g" in letters else self.letter
        return own if own in letters else None

    def __str__(self) -> str:
        return f"the {'outer' if self.before else 'inner'} part of the {NOUNS[self.letter]}"


NOUNS = {"b": "batch", "h": "heads", "g": "key/value heads"}
WAYS = (Way("b", True), Way("b", False), Way("h", True), Way("h", False))


def read_in_axes(graph: Graph, in_axes: object) -> dict[int, int]:
    by_name = {i.name: n for n, i in enumerate(graph.inputs)}
    ranks = {i.name: len(i.spec.shape) for i in graph.inputs}
    if to_index(in_axes) is not None:
        given: dict[str, object] = {name: in_axes for name, rank in ranks.items() if rank}
    elif isinstance(in_axes, Mapping):
        given = {name: place for name, place in in_axes.items() if place is not None}
    else:
        raise GraphError(f"vmap: in_axes {show(in_axes)} is neither a place nor places by name")
    problems = []
    for name, place in given.items():
        if name not in by_name:
            problems.append(f"vmap: no input is named {name}; there are {', '.join(by_name)}")
        elif not ranks[name]:
            problems.append(f"vmap: {name} is one number for all entries; write a loop for several")
        elif not 0 <= (-1 if (n := to_index(place)) is None else n) <= ranks[name]:
            problems.append(f"vmap: in_axes {show(place)} of {name} is not in 0 to {ranks[name]}")
    if not given:
        problems.append("vmap: in_axes names no input; without the axis there is nothing to map")
    if problems:
        raise GraphError(*problems)
    return {by_name[name]: as_integer(place) for name, place in given.items()}


def map_inputs(
    graph: Graph, axes: Mapping[int, int], size: int, specs: Mapping[str, TensorSpec]
) -> tuple[Input, ...]:
    """The inputs with the axis. Raises GraphError for wrong specs."""
    known, inputs = {graph.inputs[n].name for n in axes}, []
    strangers = (name for name in specs if name not in known)
    problems = [f"vmap: specs name {name}, which is not mapped" for name in strangers]
    for n, own in enumerate(graph.inputs):
        spec = own.spec if n not in axes else specs.get(own.name, mapped_spec(own, axes[n], size))
        if n in axes:
            due = insert_at(own.spec.shape, axes[n], size)
            if not isinstance(spec, TensorSpec):
                problems.append(f"vmap: {own.name} {show(spec)} is not a TensorSpec")
            elif (spec.shape, spec.dtype) != (due, own.spec.dtype):
                problems.append(f"vmap: {own.name} {spec} should be {own.spec.dtype} of {due}")
        inputs.append(Input(own.name, spec))
    if problems:
        raise GraphError(*problems)
    return tuple(inputs)


def mapped_spec(own: Input, place: int, size: int) -> TensorSpec:
    """The spec of an input with the axis: dense, and at 0 each entry as declared."""
    spec, shape = own.spec, insert_at(own.spec.shape, place, size)
    if place and not spec.is_dense:
        raise GraphError(
            f"vmap: {own.name} {spec} is not dense, and its axis is at {place}: pass its spec in "
            "specs=, or map it at 0"
        )
    if place:
        return TensorSpec(shape, spec.dtype, dense_strides(shape))
    pairs = [*zip(spec.shape, spec.strides, strict=True)]
    reach = 1 + sum(max(0, n - 1) * stride for n, stride in pairs)
    extent = max(reach, *(n * stride for n, stride in pairs))
    return TensorSpec(shape, spec.dtype, (extent, *spec.strides))


def general_problems(graph: Graph) -> Iterator[str]:
    read = {i for eqn in graph.eqns for i in eqn.args}
    for eqn, outs in graph.numbered:
        node = None if eqn.op.packed else eqn.op.attention
        if node is None and not isinstance(eqn.op, Add | Zeros | Dequantise):
            yield (
                f"vmap: {type(eqn.op).__name__} is a step by itself; only whole attentions are "
                "mapped, and each axis at a time: give one axis that holds both"
            )
        elif node is not None:
            if node.origin:
                yield f"vmap: dropout has the origin {node.origin} of a part; map the whole"
            for part in counting_parts(node.mask, node.modifiers):
                yield (
                    f"vmap: {type(part).__name__} is your own, and may count batch entries or "
                    "heads; declare the graph with the larger batch"
                )
        elif isinstance(eqn.op, Zeros) and outs[0] in read:
            yield "vmap: zeros that are read are not mapped"


def letters_of(graph: Graph) -> dict[int, str]:
    """The axes of each value that attentions read or give, and of their sums."""
    letters: dict[int, str] = {}
    for eqn, outs in graph.numbered:
        if isinstance(eqn.op, Fused):
            letters |= {i: role.axes for i, role in zip(eqn.args, eqn.op.takes, strict=True)}
            letters |= {i: role.axes for i, role in zip(outs, eqn.op.gives, strict=True)}
        elif isinstance(eqn.op, Add):
            letters[outs[0]] = letters[eqn.args[0]]
    for eqn, outs in reversed(graph.numbered):
        if isinstance(eqn.op, Dequantise):
            letters |= dict.fromkeys(eqn.args[:2], letters[outs[0]])
    return letters


@final
@frozen
class MappedGraph:
    """A graph and the axis that it is mapped over.

    axes: the place of the axis in each input that has it. inputs: those of the mapped graph.
    letters: the axes of each value, as of `Role`.
    """

    graph: Graph
    axes: Mapping[int, int]
    size: int
    inputs: tuple[Input, ...]
    letters: Mapping[int, str]

    def shares_keys(self, way: Way) -> bool:
        """True if query heads of all entries read equal key/value heads.

        They are rows of one group, which the axis divides further; keys and values stay unchanged.
        """
        grouped = [n for n in self.letters if "g" in self.letters[n]]
        if way.letter != "h" or any(n in self.axes for n in grouped):
            return False
        return not way.before or all(self.width(n, "g") == 1 for n in grouped)

    def width(self, n: int, letter: str) -> int:
        """The size of value n along one of its axes."""
        return self.graph.types[n].shape[self.letters[n].index(letter)]

    def full(self, letter: str) -> int:
        """The size of the axis of a letter, broadcasts aside."""
        widths = {self.width(n, letter) for n, own in self.letters.items() if letter in own}
        return 0 if 0 in widths else max(widths, default=1)

    def stays(self, n: int, way: Way) -> bool:
        """True if an input lacks the axis that grows, or broadcasts there."""
        letter = way.letter_in(self.letters.get(n, ""))
        if n not in self.letters or letter is None:
            return n not in self.axes
        if letter == "g" and self.shares_keys(way):
            return True
        broadcasts = self.width(n, letter) == 1 != self.full(letter)
        return broadcasts and n not in self.axes

    def problems(self, way: Way) -> Iterator[str]:
        """Why the axis can't become a part as in `way`; empty if it can."""
        for n, own in enumerate(self.inputs):
            if n in self.letters and not self.stays(n, way):
                yield from self.input_problems(n, own, way)
        for eqn in self.graph.eqns:
            node = eqn.op.attention
            if node is not None:
                yield from self.equation_problems(eqn, node, way)

    def input_problems(self, n: int, own: Input, way: Way) -> Iterator[str]:
        letter, name = way.letter_in(self.letters[n]), own.name
        if letter is None:
            yield f"{name} {own.spec} is mapped, and has no axis of {NOUNS[way.letter]}"
            return
        count, place = self.width(n, letter), self.letters[n].index(letter)
        if n not in self.axes:
            if count != 1:
                yield (
                    f"all {self.size} entries share {name} {own.spec}, with {count} places in its "
                    f"{NOUNS[letter]}: bring a copy, {name}.expand({self.size}, "
                    f"*{name}.shape).contiguous(), mapped at 0"
                )
            return
        if count == 1 != self.full(letter):
            yield (
                f"{name} {own.spec} is mapped, and broadcasts over the {NOUNS[letter]}, of "
                f"{self.full(letter)}: bring a copy that is expanded there"
            )
        elif count not in (1, full := self.full(letter)) and not way.before:
            yield (
                f"{name} {own.spec} is for blocks of {full // count} {NOUNS[letter]}, which would "
                "not lie side by side: bring a copy with one for each"
            )
        elif self.fold(n, way).view(own.spec) is None:
            target = place if way.before else place + 1
            yield (
                f"{name} {own.spec} has its axis {self.axes[n]} apart from the {NOUNS[letter]}: "
                f"bring a copy, {name}.movedim({self.axes[n]}, {target}).contiguous(), mapped "
                f"at {target}"
            )

    def equation_problems(self, eqn: Eqn, node: Attention, way: Way) -> Iterator[str]:
        if node.dropout and way != WAYS[0]:
            yield "dropout draws by batch entry and head, alike only in outer parts of the batch"
        if way.letter == "h":
            if any(isinstance(m, Alibi) and m.default for m in node.modifiers):
                yield "the slopes of ALiBi depend on how many heads there are"
            r = self.width(eqn.args[0], "h") // max(1, self.width(eqn.args[1], "g"))
            if r > 1 and not way.before and not self.shares_keys(way):
                yield f"{r} query heads share a key/value head, and would not lie side by side"
        grad = eqn.op.grad
        if grad is not None:
            for n, wanted in zip(eqn.args, grad.wants, strict=False):
                if wanted and n < len(self.inputs) and self.stays(n, way):
                    name = self.inputs[n].name
                    yield f"the gradient of {name}, which entries share, would be one for all"

    def fold(self, n: int, way: Way) -> Fold:
        letter = way.letter_in(self.letters[n])
        assert letter is not None
        return Fold(self.axes[n], self.letters[n].index(letter), self.size, way.before)

    def build(self, way: Way) -> Graph:
        graph, b = self.graph, Builder()
        values = [b.input(i.name, i.spec) for i in self.inputs]
        values = [self.enter(x, n, way) for n, x in enumerate(values)]
        for eqn in graph.eqns:
            op, node = eqn.op, eqn.op.attention
            if isinstance(op, Zeros):
                op = Zeros((self.size, *op.shape), op.dtype)
            elif node is not None and node.dropout:  # each entry draws as it would alone
                B, H, *_ = graph.types[eqn.args[0]].shape
                whole = evolve(node, origin=(0, 0, 0, 0, H, max(1, B)))
                op = with_operands(op, whole, range(len(node.takes)))
            values += b.emit(op, *(values[i] for i in eqn.args))
        names = value_names(graph)
        outputs = [self.leave(values[i], i, way, names[i]) for i in graph.outputs]
        return b.build(*outputs)

    def enter(self, x: Value, n: int, way: Way) -> Value:
        if n not in self.letters or self.stays(n, way):
            return x
        if n in self.axes:
            return x.then(self.fold(n, way))
        letter = way.letter_in(self.letters[n])
        assert letter is not None
        return x.then(Repeat(self.letters[n].index(letter), self.size))

    def leave(self, x: Value, i: int, way: Way, name: str) -> Value:
        """An output with the axis first. Zeros have it already."""
        letter = way.letter_in(self.letters.get(i, ""))
        if letter is None:
            return x
        into = self.letters[i].index(letter)
        return x.then(Unfold(0, into, self.size, way.before, name))
