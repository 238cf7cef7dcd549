"""The IR: ops, equations, graphs. Plain immutable values; two equal graphs hash alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from operator import attrgetter
from typing import Any, ClassVar, Never, NoReturn, TypeVar, final

import torch
from attrs import Attribute, frozen

from attn_graph.errors import ArgumentError, Declared, GraphError, asks_for_attrs, show
from attn_graph.printing.text import show_call, show_fields
from attn_graph.rings import find
from attn_graph.spec import FLOATS, INF, NAMES, TensorSpec, ValueType, is_differentiated
from attn_graph.spec.dims import Dim, NamedSize

T = TypeVar("T")
# Values are handles of the graph's builder, which the IR does not know.
Values = Sequence[Any]
Gradients = tuple[Any, ...]  # a value for each operand, or None
# How `pull` adds an equation: from an op and its operands; it returns the results.
Emit = Callable[..., tuple[Any, ...]]


@asks_for_attrs
@frozen(init=False)
class Op(Declared):
    """The function of an equation. Fields are static parameters; operands are tensors.

    A subclass defines its meaning on any machine: `problems`, `infer`, `run`, `pull`. Backends
    decide how to compute it. The decorators `takes` and `gives` name operands and results.
    """

    is_gradient: ClassVar[bool] = False  # part of a derivative
    is_view: ClassVar[bool] = False  # its result is its operand, in another shape
    moves_rows: ClassVar[bool] = False  # its result is its first operand, rows at other places

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results, for printing."""
        return ("x",)

    @property
    def roles(self) -> tuple[str, ...]:
        """A name for each operand, for messages."""
        return ()

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """How many axes each operand has; None: any number."""
        raise NotImplementedError

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the results that describe a row of scores: losses seldom read them."""
        return ()

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the results that its derivatives read instead of recomputing."""
        return ()

    @property
    def carried(self) -> tuple[int, ...]:
        """Places of the operands that are results of the op differentiated by this one.

        They move with the other operands, and have no derivative of their own.
        """
        return ()

    @property
    def constants(self) -> tuple[int, ...]:
        """Places of the operands of floating dtypes without a derivative, as scales have none."""
        return ()

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Names of the results without a gradient, which have no cotangent."""
        return ()

    @property
    def attention(self) -> Any:  # Any: an Attention, whose module imports this one, or None
        """The attention that it is or differentiates."""
        return None

    @property
    def grad(self) -> Any:  # Any: an AttentionGrad, or None
        """The gradient of an attention, if it is one or the tangent of one."""
        return None

    @property
    def jvp(self) -> Any:  # Any: an AttentionJvp, or None
        """The tangent of an attention or of its gradient, if it is one."""
        return None

    @property
    def forward(self) -> Any:  # Any: an Attention, or None
        """The attention, if it is one and no derivative."""
        return None if self.is_gradient else self.attention

    @property
    def packed(self) -> Any:  # Any: a Packed, or None
        """Itself, if its operands are packed, in pages or quantised."""
        return None

    def padded(self, types: Sequence[ValueType]) -> list[ValueType]:
        """The types of its operands, with a batch entry for each sequence."""
        return [*types]

    # Any in these three: subclasses fix the number of operands, which this form alone allows.
    def problems(self, *args: Any, **kwargs: Any) -> Iterator[str]:  # Any: as above
        """Why operands of these types make no sense; empty if they do."""
        yield from ()

    def infer(self, *args: Any, **kwargs: Any) -> tuple[ValueType, ...]:  # Any: as above
        """The types of the results. Called with right ranks, but perhaps wrong sizes.

        It reads the operands that it names, or all if it names none.
        """
        raise NotImplementedError

    def gradient_problems(self) -> Iterator[str]:
        """Why it has no gradient; empty if `pull` emits it."""
        if type(self).pull is Op.pull:
            yield (
                f"{type(self).__name__} has no gradient: derivatives in single steps have no "
                "reverse mode; take jvp of the vjp, which gives every second derivative"
                if self.is_gradient
                else f"{type(self).__name__} has no gradient: it defines no pull"
            )

    def push_problems(self) -> Iterator[str]:
        """Why it has no tangents; empty if `push` emits them."""
        if type(self).push is Op.push:
            yield (
                f"{type(self).__name__} has no tangents: it belongs to a second derivative or a jvp"
                if self.is_gradient
                else f"{type(self).__name__} has no tangents: it defines no push"
            )

    def run(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:  # Any: as above
        """The meaning, in PyTorch: exact and slow."""
        raise NotImplementedError

    def pull(self, emit: Emit, operands: Values, results: Values, grads: Values) -> Gradients:
        """Emit and return each operand's gradient, None for one without. None in grads is 0."""
        raise NotImplementedError

    def push(self, emit: Emit, operands: Values, results: Values, tangents: Values) -> Gradients:
        """Emit and return each result's tangent, None for zero. None in tangents is 0."""
        raise NotImplementedError

    def __fx_repr__(self) -> tuple[str, dict[str, type[Op]]]:
        """The text of the op and its class, for torch.compile."""
        return show_call(self), {type(self).__name__: type(self)}

    def __str__(self) -> str:
        return show_call(self)


@frozen(init=False)
class Alike(Op):
    """An op whose one result has the type of its first operand."""

    def infer(self, x: ValueType, *_: ValueType) -> tuple[ValueType, ...]:
        return (x,)


def with_values(**values: object) -> Callable[[type[T]], type[T]]:
    """A decorator of ops: these properties have these values."""

    def put(kind: type[T]) -> type[T]:
        for name, value in values.items():
            setattr(kind, name, value)
        return kind

    return put


def takes(**ranks: int | None) -> Callable[[type[T]], type[T]]:
    """A decorator of ops: the operands by name, each with its number of axes; None: any number."""
    return with_values(roles=tuple(ranks), ranks=tuple(ranks.values()))


def gives(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator of ops: the names of the results."""
    return with_values(names=names)


def check_graph(graph: object, name: str) -> None:
    """Raise GraphError for anything but a Graph. name: the function for the message."""
    if not isinstance(graph, Graph):
        way_out = "write attn_graph.attention(q, k, v), of specs"
        if isinstance(graph, torch.Tensor):
            way_out += ", or attn_graph.nn.functional.attention(q, k, v), of tensors"
        raise GraphError(f"{name}: expected a Graph, got {show(graph)}; {way_out}")


def op_name(op: type[Op]) -> str:
    """The name of an op in text and messages: SoftCap is soft_cap."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op.__name__).lower()


@final
@frozen
class Eqn:
    """`outs = op(*args)`; args are positions of earlier values, outs the types of its results."""

    op: Op
    args: tuple[int, ...]
    outs: tuple[ValueType, ...]


@final
@frozen
class Input:
    name: str
    spec: TensorSpec


@final
@frozen(cache_hash=True, repr=False)
class Graph:
    """An immutable graph: named inputs, equations in order, outputs.

    Values are numbered in order: first the inputs, then each equation's results. Graphs compare by
    content: equal graphs are one cache entry. `print(graph)` shows Python text for `parse`. Build
    one with `attention` or `graph`. layouts: the declared strides of each output, None without;
    empty if none has any. See `lay_out`.
    """

    inputs: tuple[Input, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[int, ...]
    layouts: tuple[tuple[int, ...] | None, ...] = ()

    def __attrs_post_init__(self) -> None:
        count = len(self.inputs)
        for n, eqn in enumerate(self.eqns):
            if eqn.args and not 0 <= min(eqn.args) <= max(eqn.args) < count:
                raise GraphError(f"graph: equation {n} reads {eqn.args} of {count} values so far")
            count += len(eqn.outs)
        if any(not 0 <= i < count for i in self.outputs):
            raise GraphError(f"graph: outputs {self.outputs} of {count} values")
        if self.layouts and len(self.layouts) != len(self.outputs):
            raise GraphError(
                f"graph: {len(self.layouts)} layouts of {len(self.outputs)} outputs; see lay_out"
            )

    def __call__(self, *_: Never, **__: Never) -> NoReturn:
        """Raises ArgumentError: a graph runs nothing."""
        raise ArgumentError("a graph describes attention; write compile(graph)(q, k, v) to run it")

    @cached_property
    def types(self) -> tuple[ValueType, ...]:
        """The type of every value, by its number."""
        return tuple([i.spec.type for i in self.inputs] + [t for e in self.eqns for t in e.outs])

    @cached_property
    def symbols(self) -> tuple[NamedSize, ...]:
        """Its named sizes, in the order of the values; empty if all sizes are numbers."""
        dims = [dim for i in self.inputs for dim in i.spec.dims]
        dims += [n for eqn in self.eqns for t in eqn.outs for n in t.shape if isinstance(n, Dim)]
        return tuple(dict.fromkeys(symbol for dim in dims for symbol in dim.symbols))

    @property
    def declared_outputs(self) -> tuple[TensorSpec | None, ...]:
        """The spec of each output, None for one without a declared layout."""
        types, layouts = self.output_types, self.layouts or (None,) * len(self.outputs)
        return tuple(
            None if strides is None else TensorSpec(t.shape, t.dtype, strides)
            for t, strides in zip(types, layouts, strict=True)
        )

    @property
    def output_types(self) -> tuple[ValueType, ...]:
        """The type of each output."""
        types = self.types
        return tuple(types[i] for i in self.outputs)

    @cached_property
    def result_names(self) -> tuple[str, ...]:
        """The names of the outputs, if equations give all of them."""
        pairs = (zip(outs, eqn.op.names, strict=True) for eqn, outs in self.numbered)
        names = {i: name for pair in pairs for i, name in pair}
        return tuple(names[i] for i in self.outputs)

    @property
    def is_gradient(self) -> bool:
        """True if an equation is part of a derivative."""
        return any(eqn.op.is_gradient for eqn in self.eqns)

    @cached_property
    def gradient_problems(self) -> tuple[str, ...]:
        """Why this graph has no gradient; empty if it has one."""
        if self.outputs and not self.differentiable_outputs:
            return ("it returns nothing that has a gradient",)
        problems = (text for eqn in self.eqns for text in eqn.op.gradient_problems())
        return tuple(dict.fromkeys(problems))

    @property
    def has_gradient(self) -> bool:
        """True if a training step can differentiate it.

        It has a floating input, a derivative of every step, and is not a derivative itself.
        """
        fixed = self.constants
        floating = any(i.spec.dtype in FLOATS and n not in fixed for n, i in enumerate(self.inputs))
        return floating and not self.is_gradient and not self.gradient_problems

    @property
    def carried(self) -> frozenset[int]:
        """The inputs that are results of the differentiated graph; see `Op.carried`."""
        read = {eqn.args[n] for eqn in self.eqns for n in eqn.op.carried}
        for eqn, outs in reversed(self.numbered):
            if eqn.op.is_view and outs[0] in read:
                read.add(eqn.args[0])
        return frozenset(i for i in read if i < len(self.inputs))

    @property
    def constants(self) -> frozenset[int]:
        """The inputs without a derivative: quantised tensors, their scales, a Factor's tensors."""
        read = {eqn.args[n] for eqn in self.eqns for n in eqn.op.constants}
        return frozenset(i for i in read if i < len(self.inputs))

    @cached_property
    def differentiable_outputs(self) -> tuple[int, ...]:
        """The outputs that have a gradient, and so may have a cotangent."""
        constant = self.named_results(attrgetter("without_gradient"))
        return tuple(i for i in self.outputs if i not in constant)

    @property
    def constant_places(self) -> tuple[int, ...]:
        """The places of the outputs without a gradient."""
        known = self.differentiable_outputs
        return tuple(place for place, i in enumerate(self.outputs) if i not in known)

    def named_results(self, names: Callable[[Op], Sequence[str]]) -> frozenset[int]:
        """The results selected by `names` for each op, by number.

        Views and packed rows of them are selected too.
        """
        selected: set[int] = set()
        for eqn, outs in self.numbered:
            if (eqn.op.is_view or eqn.op.moves_rows) and eqn.args[0] in selected:
                selected |= {*outs}
            elif chosen := names(eqn.op):
                pairs = zip(eqn.op.names, outs, strict=True)
                selected |= {i for name, i in pairs if name in chosen}
        return frozenset(selected)

    @cached_property
    def numbered(self) -> tuple[tuple[Eqn, range], ...]:
        """Each equation with the numbers of its results."""
        ends = [*accumulate([len(eqn.outs) for eqn in self.eqns], initial=len(self.inputs))]
        return tuple(zip(self.eqns, starmap(range, pairwise(ends)), strict=True))

    def __str__(self) -> str:
        return show_graph(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks: the text, and the tiles of each mask before any data."""
        from attn_graph.ir.transforms.binding import largest, replace_sizes
        from attn_graph.printing import html

        pictures = find("picture_masks")(replace_sizes(self, largest(self)))
        return html.page(html.code(self), *pictures)


def show_graph(graph: Graph) -> str:
    """A graph as Python, one line an equation: the inverse of `parse`."""
    names = [i.name for i in graph.inputs]
    inputs = ",\n".join(f"    {i.name}: {i.spec}" for i in graph.inputs)
    end = f"){show_layouts(graph)}:"
    head = f"def graph(\n{inputs},\n{end}" if names else f"def graph({end}"
    lines = [*map(str, graph.symbols), head]
    for eqn in graph.eqns:
        results = list(unused_names(eqn.op.names, names))
        args = ", ".join([names[i] for i in eqn.args] + show_fields(eqn.op))
        types = ", ".join(map(str, eqn.outs))
        names += results
        lines.append(f"    {', '.join(results)} = {op_name(type(eqn.op))}({args})  # {types}")
    return "\n".join([*lines, f"    return {', '.join(names[i] for i in graph.outputs)}"])


def show_layouts(graph: Graph) -> str:
    """The declared layouts as the type of a function's results; "" without any."""
    specs = [*map(str, graph.declared_outputs)]
    if not graph.layouts:
        return ""
    return f" -> ({', '.join(specs)})" if len(specs) > 1 else f" -> {specs[0]}"


def unused_names(wanted: Iterable[str], taken: Iterable[str]) -> Iterator[str]:
    """A free name for each wanted one: itself, or with the lowest free number appended."""
    used = set(taken)
    for name in wanted:
        tries = (name if n == 1 else f"{name}{n}" for n in range(1, len(used) + 2))
        free = next(t for t in tries if t not in used)
        used.add(free)
        yield free


WAYS_OUT = {  # by field or option: for a tensor under differentiation
    "scale": "multiply q by it, and pass scale=1.0",
    "cap": "let a modifier of your own read it",
    "rate": "drop elements of p in a step of your own",
}


ARGUMENTS = {"cap": "soft_cap", "rate": "dropout"}  # of attention, by field


def require_constant(name: str, value: object) -> None:
    """Raise GraphError for a tensor under differentiation: its gradient would be lost."""
    if is_differentiated(value):
        own = ARGUMENTS.get(name, name)
        raise GraphError(
            f"{own} is a tensor under differentiation, but numbers of a graph have no gradient; "
            f"{WAYS_OUT[name]}, or pass float({own}) if none is wanted"
        )


def require_positive(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError unless it is a positive, finite number."""
    if not (isinstance(value, float) and 0 < value < INF):
        require_constant(attribute.name, value)
        name = ARGUMENTS.get(attribute.name, attribute.name)
        off = f"; write {name}=None for none" if isinstance(value, float) and value == 0 else ""
        raise GraphError(f"{name} {show(value)} must be a positive, finite number{off}")


def require_finite(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError unless it is a finite number."""
    if not (isinstance(value, float) and math.isfinite(value)):
        require_constant(attribute.name, value)
        raise GraphError(f"{attribute.name} {show(value)} must be a finite number")


def range_problem(value: float, dtype: torch.dtype) -> str:
    """Why a number is too large for scores of a dtype; "" if it is not.

    Kernels also use its inverse and log2(e) times it; these must be normal numbers too.
    """
    most = 2.0**1022 if dtype == torch.float64 else 2.0**126
    if abs(value) <= most:
        return ""
    return f"{value:g} is beyond {most:.3g}, the limit for scores of {NAMES[dtype]}"
