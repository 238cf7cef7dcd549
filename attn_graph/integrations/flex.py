"""FlexAttention's mods in this library's terms: `from_flex` and `from_flex_score`.

PyTorch's own tracer records a mod's computation. Masks and modifiers with a name come first,
`Formula` and `Addend` cover other arithmetic of positions, and captured tensors become data.
Unreadable parts are made dense only with `dense=True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from operator import attrgetter
from typing import Any, final

import torch
from attrs import define, field
from torch import fx
from torch.fx.proxy import TraceError
from torch.nn.attention.flex_attention import BlockMask, create_mask

from attn_graph.errors import GraphError, binds, show
from attn_graph.integrations.captured import Captured, Mod, Tensors, with_tables
from attn_graph.integrations.terms import (
    DTYPES,
    HIDE,
    Element,
    Index,
    Penalty,
    Real,
    Score,
    Term,
    Unread,
    apply_to_masks,
    apply_to_numbers,
    combine_indices,
    combine_reals,
    compare_indices,
    convert,
    describe_term,
    dtype_of,
    extreme_index,
    is_integer,
    is_number,
)
from attn_graph.ir.modifiers import Alibi, Bias, Modifier
from attn_graph.ir.terms.formulas import AXES, simplify_text
from attn_graph.masks import And, Mask, Or
from attn_graph.masks.canonical import MIRRORED, as_mask, join_simply

Sizes = Sequence[int | None]

ALIASES = {  # the names of torch's functions and of tensors' methods, less their underscores
    "absolute": "abs",
    "bitwise_and": "and",
    "bitwise_not": "invert",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "clip": "clamp",
    "div": "truediv",
    "divide": "truediv",
    "floor_divide": "floordiv",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "logical_and": "and",
    "logical_not": "invert",
    "logical_or": "or",
    "logical_xor": "xor",
    "maximum": "max",
    "minimum": "min",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "remainder": "mod",
    "subtract": "sub",
    "true_divide": "truediv",
}
KEYWORDS = {"clamp": ("min", "max"), "to": ("dtype", "device")}  # after the first operand
SUMS = ("add", "sub")
JOINS = ("and", "or", "xor", "invert", "output")
A_FORMULA = 'compare positions instead, as Formula("i - j < 8") does'
A_TABLE = (
    "a table of distances is RelativeBias(2 * R + 1), with table=x [H, 2 R + 1], entry n for "
    "kv_idx - q_idx = n - R"
)
WAY_OUT = "say dense=True and sizes=(B, H, M, N), which makes a tensor of that part"


@binds()
def from_flex(
    mask_mod: Mod, *, sizes: Sizes | None = None, dense: bool = False
) -> tuple[Mask, Tensors]:
    """Translate a FlexAttention `mask_mod(b, h, q_idx, kv_idx)`: a mask, and its tensors by name.

    Comparisons of positions become `Causal`, `Window`, `Prefix` or a `Formula`; equal numbers of
    documents `SameSegment`, captured lengths `KeyLengths` and `QueryLengths`, captured booleans
    `Keep`. Captured tensors are returned under the names of the graph's and the plan's arguments,
    as views where one does; captured numbers and lists are read now, once, and so are tensors of
    integers read at an element of others, at a position less a number, or by blocks.

    sizes: B, H, M, N, for a mask of these sizes only. B or H may be None if the mod does not depend
    on it. Longer captured tensors are cut, and documents without a batch axis are repeated. dense:
    an unreadable mod becomes a boolean tensor [B,H,M,N]. Raises GraphError for it otherwise, naming
    the obstacle.
    """
    reader = Reader(Captured(check_sizes(sizes, dense)), dense)
    require_mod(mask_mod, "mask_mod(b, h, q_idx, kv_idx)")
    mask_mod = with_tables(mask_mod)
    try:
        result = reader.walk(lambda b, h, i, j: mask_mod(b, h, i, j), [*map(Index, AXES)])
    except Unread as error:
        if not dense:
            way_out = f"{A_FORMULA}, or {WAY_OUT}" if error.distance else WAY_OUT
            raise GraphError(f"from_flex: the mod is not read, since {error}; {way_out}") from error
        result = reader.keep(reader.evaluate(mask_mod), error)
    if not isinstance(result, Mask | bool):
        raise GraphError(
            f"from_flex: the mod returns {describe_term(result)}, and has to say true or false"
        )
    mask = as_mask(result)
    return mask, {name: reader.captured.tensors[name] for name in mask.needs}


@binds()
def from_flex_score(
    score_mod: Mod, *, sizes: Sizes | None = None, dense: bool = False
) -> tuple[tuple[Modifier | Mask, ...], Tensors]:
    """Translate a FlexAttention `score_mod(s, b, h, q_idx, kv_idx)`: steps, and their tensors.

    A tanh of scores is a `SoftCap`; an added element of a captured tensor is a `Bias`, with its
    gradient; subtracted slopes times |q_idx - kv_idx| are an `Alibi`; other added arithmetic of
    positions and captured tensors is an `Addend`, and a product a `Factor`. -inf in place of scores
    is a mask as of `from_flex`, among the modifiers: `modifiers=` takes it there. A row that is all
    -inf gives zeros here, and NaN there. The tensors are returned by the names in the steps'
    `needs`.

    sizes: as of `from_flex`. dense: an unreadable added term, or one with trained tensors, becomes
    a `Bias` [B,H,M,N]. Raises GraphError for it otherwise, and for other steps.
    """
    reader = Reader(Captured(check_sizes(sizes, dense)), dense)
    names = [Score(), *map(Index, AXES)]
    require_mod(score_mod, "score_mod(score, b, h, q_idx, kv_idx)")
    score_mod = with_tables(score_mod)
    try:
        result = reader.walk(lambda s, b, h, i, j: score_mod(s, b, h, i, j), names)
        if not isinstance(result, Score):
            raise Unread(f"it returns {describe_term(result)} and no score")
        steps = result.finished().steps
    except Unread as error:
        way_out = f"{WAY_OUT}, if it is added; any other step is a modifier of your own"
        raise GraphError(
            f"from_flex_score: the mod is not read, since {error}; "
            f"{A_TABLE if error.distance else way_out}"
        ) from error
    needs = (name for step in steps for name in step.needs)
    return steps, {name: reader.captured.tensors[name] for name in needs}


def require_mod(mod: object, form: str) -> None:
    """Raise GraphError for a BlockMask, and unless a mod takes the arguments of `form`."""
    if isinstance(mod, BlockMask):
        raise GraphError(
            "from_flex: a BlockMask holds its mod; write from_flex(block_mask.mask_mod)"
        )
    if not callable(mod):
        raise GraphError(f"from_flex: {show(mod)} is not a function; write def {form}")
    try:
        signature(mod).bind(*range(form.count(",") + 1))
    except TypeError as error:
        raise GraphError(
            f"from_flex: the mod takes other arguments, {error}; write {form}"
        ) from error
    except ValueError:  # a function in C, whose signature is not known
        return


def check_sizes(sizes: Sizes | None, dense: bool) -> dict[str, int]:
    """The given sizes by axis. Raises GraphError unless they are four, with M and N."""
    if sizes is None and not dense:
        return {}
    if not isinstance(sizes, Sequence | None):
        raise GraphError(f"from_flex: sizes {show(sizes)} are not four; write sizes=(B, H, M, N)")
    known = {x: n for x, n in zip(AXES, sizes or (), strict=False) if n is not None}
    if len(sizes or ()) != len(AXES) or not {"i", "j"} <= known.keys():
        raise GraphError(
            f"from_flex: sizes {sizes} are not B, H, M, N, of which B and H alone may be None; "
            "say sizes=(B, H, M, N)"
        )
    return known


class Inliner(fx.Tracer):
    """Records a mod's computation, through captured modules and parameters."""

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Raises GraphError: a value that depends on the place is not true or false."""
        raise GraphError(
            "from_flex: the mod branches on a value that depends on the place; use & and | in "
            "place of `and` and `or`, ~ in place of `not`, and torch.where in place of `if`"
        )

    def create_arg(self, a: Any) -> Any:  # Any: as of its base
        """As the base, which accepts no parameter from outside a module."""
        if isinstance(a, torch.nn.Parameter) and not any(a is p for p in self.root.parameters()):
            self.root.register_parameter(self.get_fresh_qualname("_parameter"), a)
        return super().create_arg(a)

    def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:  # Any: as above
        """The module's computation in place of the module."""
        return forward(*args, **kwargs)


@final
@define(eq=False)
class Reader:
    """Reads one mod, step by step. The value of an unreadable step is its `Unread`."""

    captured: Captured
    dense: bool
    tracer: Inliner = field(factory=Inliner)
    values: dict[fx.Node, Term] = field(factory=dict)

    def walk(self, mod: Mod, arguments: Sequence[Term]) -> Term:
        """A mod's result for these arguments. Raises Unread if it is unreadable."""
        try:
            graph = self.tracer.trace(mod)
        except (TraceError, TypeError, RuntimeError) as error:  # `if`; range(), len() of a position
            way_out = f"; {HIDE}" if "finfo" in str(error) else ""  # finfo(score.dtype).min
            raise Unread(f"it cannot be traced: {error}{way_out}") from error
        inputs = graph.find_nodes(op="placeholder")
        given = dict(zip(inputs, arguments, strict=True))
        for node in graph.nodes:
            try:
                value = given[node] if node in given else self.value(node)
            except Unread as error:
                value = error
            self.values[node] = value
        result = self.values[graph.output_node()]
        if isinstance(result, Unread):
            raise result
        return result

    def value(self, node: fx.Node) -> Term:
        name = operation_name(node)
        if node.op == "get_attr":
            return Element(attrgetter(str(node.target))(self.tracer.root))
        if name in ("new_ones", "new_zeros") and node.kwargs.get("dtype") is torch.bool:
            return name == "new_ones"
        names = KEYWORDS.get(name, ())
        if unknown := [x for x in node.kwargs if x not in names]:
            raise Unread(f"it calls {name}() with {', '.join(unknown)}")
        if name == "getitem":
            (element,), indices = self.terms(node.args[0]), self.terms(node.args[1])
            return self.captured.at(element, [*indices])
        args = node.args
        if node.kwargs:
            args = (*args, *(node.kwargs.get(x) for x in names[len(args) - 1 :]))
        try:
            return self.apply(name, [self.operand(x) for x in args])
        except Unread as error:
            return self.apply(name, [*self.dense_operands(name, args, error)])

    def terms(self, argument: object) -> Iterator[Term]:
        """The values of one argument, possibly several. Raises Unread for one without a value."""
        for x in argument if isinstance(argument, tuple | list) else (argument,):
            value = self.values[x] if isinstance(x, fx.Node) else x
            if isinstance(value, Unread):
                raise value
            yield value

    def operand(self, x: object) -> Term:
        """The value of an operand. Raises Unread without one."""
        if isinstance(x, tuple | list):
            raise Unread("it joins several terms into one")
        (value,) = self.terms(x)
        return self.captured.resolve(value) if isinstance(value, Element) else value

    def dense_operands(
        self, name: str, arguments: Sequence[object], error: Unread
    ) -> Iterator[Term]:
        """The operands of a join, or of a sum with scores, as tensors if they have no value.

        Raises the error if dense tensors are not allowed, and for operands depending on the scores.
        """
        values = [self.values.get(x) for x in arguments if isinstance(x, fx.Node)]
        adds = name in SUMS and any(isinstance(value, Score) for value in values)
        if not self.dense or not (adds or name in JOINS):
            raise error
        for x in arguments:
            value = self.values[x] if isinstance(x, fx.Node) else x
            if isinstance(value, Score) or not (adds or isinstance(value, Unread)):
                yield self.operand(x)
            elif not isinstance(x, fx.Node) or self.reads_scores(x):
                raise error
            elif adds:
                tensor = self.evaluate(self.submodule(x))
                if name == "add":
                    yield self.captured.resolve(Element(tensor, AXES))
                else:  # a bias too: the negative of what is subtracted
                    yield self.captured.resolve(Element(-tensor, AXES)).negative()
            else:
                yield self.keep(self.evaluate(self.submodule(x)), error)

    def reads_scores(self, node: fx.Node) -> bool:
        inputs = node.all_input_nodes
        return (
            any(map(self.reads_scores, inputs)) if inputs else isinstance(self.values[node], Score)
        )

    def submodule(self, node: fx.Node) -> Mod:
        """The mod returning a step's value, of b, h, q_idx and kv_idx."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for each in node.graph.nodes:
            copies[each] = graph.node_copy(each, copies.__getitem__)
            if each is node:
                break
        graph.output(copies[node])
        module = fx.GraphModule(self.tracer.root, graph)
        scores = [
            torch.zeros((), device=self.device)
            for each in self.values.values()
            if isinstance(each, Score) and not each.steps
        ][:1]
        return lambda b, h, i, j: module(*scores, b, h, i, j)

    @property
    def device(self) -> torch.device:
        """The captured tensors' device; PyTorch's default without any."""
        captured = iter(self.tracer.tensor_attrs)
        return next(
            (x.device for x in captured if isinstance(x, torch.Tensor)), torch.get_default_device()
        )

    def evaluate(self, mod: Mod) -> torch.Tensor:
        """A mod's values at every place, [B,H,M,N], by PyTorch's own evaluation."""
        B, H, M, N = (self.captured.sizes.get(x, 1) for x in AXES)
        return create_mask(lambda b, h, i, j: mod(b, h, i, j), B, H, M, N, device=self.device)

    def keep(self, tensor: torch.Tensor, error: Unread) -> Mask:
        """A dense mask. Raises an error for others than booleans."""
        if tensor.dtype != torch.bool:
            raise error
        return as_mask(self.captured.resolve(Element(tensor, AXES)))

    def apply(self, name: str, operands: list[Term]) -> Term:
        """The result of an operation. Raises Unread for an unknown one."""
        match name, operands:
            case "output", [x]:
                return x
            case "getattr", [x, *names]:
                return dtype_of(x) if names == ["dtype"] else None
            case "to", [x, *formats]:
                dtypes = [dtype for dtype in formats if isinstance(dtype, torch.dtype)]
                return convert(x, dtypes[0]) if dtypes else x
            case _, [x] if name in DTYPES:
                return convert(x, DTYPES[name])
            case _, [a, b] if is_integer(a) and is_integer(b):
                return self.apply_to_integers(name, Index.of(a), Index.of(b))
        if any(isinstance(x, Mask | bool) for x in operands):
            return apply_to_masks(name, operands)
        if any(isinstance(x, Score) for x in operands):
            return self.apply_to_scores(name, operands)
        return apply_to_numbers(name, operands)

    def apply_to_integers(self, name: str, a: Index, b: Index) -> Mask | Index | Real:
        """A comparison of integers, or their sum, product and the like."""
        if name in ("lt", "le", "gt", "ge") and (a.ends or b.ends):
            return self.compare_ends(name, a, b)
        if name in MIRRORED:
            known = self.captured.compare(name, a, b)
            return compare_indices(name, a, b) if known is None else known
        if name in ("max", "min"):
            return extreme_index(name, a, b)
        if name in ("add", "sub", "mul", "floordiv", "mod"):
            return combine_indices(name, a, b)
        return apply_to_numbers(name, [a, b])

    def compare_ends(self, name: str, a: Index, b: Index) -> Mask:
        """A comparison of a maximum or minimum, as those of the two it is of."""
        if a.ends is None:
            return self.compare_ends(MIRRORED[name], b, a)
        which, *two = a.ends
        kind = And if (which == "max") == (name in ("lt", "le")) else Or
        first, second = (self.apply(name, [each, b]) for each in two)
        return join_simply(kind, first, second)

    def apply_to_scores(self, name: str, operands: list[Term]) -> Score:
        """Scores after a sum, a product, or tanh. Raises Unread for other steps."""
        match name, operands:
            case "tanh", [Score() as s]:
                return s.tanh()
            case "neg", [Score() as s]:
                return s.scaled(-1)
            case (("add" | "mul"), [x, Score() as s]) if not isinstance(x, Score):
                return self.apply_to_scores(name, [s, x])
            case "mul", [Score() as s, x] if is_number(x):
                return self.multiply(s, x)
            case "truediv", [Score() as s, int() | float() as x] if x:
                return s.scaled(1 / x)
            case "truediv", [Score() as s, Index() | Real() as x]:
                return self.multiply(s, combine_reals("truediv", 1, x))
            case "add", [Score() as s, Penalty(mask, x)]:
                return (s if x == 0 else self.add(s, Real.of(x))).then(mask)
            case "add", [Score() as s, x] if is_number(x):
                return self.add(s, Real.of(x))
            case "sub", [Score() as s, x] if is_number(x):
                return self.add(s, Real.of(x).negative())
        soft = "; cap * torch.tanh(score / cap) is a soft cap" if name == "clamp" else ""
        raise Unread(
            f"no modifier computes {name}() of {', '.join(map(describe_term, operands))}{soft}"
        )

    def multiply(self, score: Score, x: Term) -> Score:
        """Scores times a number or a term. Raises Unread for one that is trained."""
        if isinstance(x, int | float):
            return score.scaled(x)
        term = Real.of(x)
        if any(self.captured.tensors[name].requires_grad for name, _ in term.elements):
            raise Unread(
                f"it multiplies the scores by {simplify_text(term.text)}, of a tensor with a "
                "gradient, which no modifier gives; multiply q by it instead"
            )
        return score.times(term)

    def add(self, score: Score, term: Real) -> Score:
        """Scores plus a term: as a bias or as ALiBi if it is one."""
        element = term.element
        if element is None:
            return score.plus(term)
        if not term.distance and term.sign > 0 and self.captured.claim("bias", element, AXES):
            return score.then(Bias())
        per_batch, is_slope = "b" in element.axes, {*element.axes} in ({"h"}, {"b", "h"})
        if term.distance and term.sign < 0 and is_slope and self.captured.claim("alibi", element):
            return score.then(Alibi(align="top_left", per_batch=per_batch))
        return score.plus(term)


def operation_name(node: fx.Node) -> str:
    """The name of a step, one for equivalent functions, methods and operators."""
    target = node.op if node.op == "output" else node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if node.op == "call_method" and name.endswith("_") and not name.startswith("__"):
        return name  # it writes into its tensor
    return ALIASES.get(name.strip("_"), name.strip("_"))
