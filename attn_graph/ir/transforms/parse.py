"""Reads the text of graphs and masks. The text is Python, so `ast` does the parsing."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from attn_graph import masks
from attn_graph.errors import GraphError
from attn_graph.ir import modifiers, ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph, Op, op_name
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage import packing, paging
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.scaling import Dequantise, Quantise
from attn_graph.ir.storage.views import VIEW_OPS
from attn_graph.ir.terms.addends import Addend, Factor
from attn_graph.ir.terms.formulas import Formula
from attn_graph.ir.terms.relative import MODIFIERS
from attn_graph.ir.transforms import gradient_ops, sums
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.ir.transforms.vjp import lay_out, output_names
from attn_graph.masks import And, Mask, Or, join_masks, require_mask
from attn_graph.spec import DTYPES, TensorSpec
from attn_graph.spec.dims import Dim, floor_divide

ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: floor_divide,
}
LEAVES: tuple[type[Mask], ...] = (*masks.LEAVES, Formula)
OPS: tuple[type[Op], ...] = (
    *(ops.Scores, ops.Mask, *ops.STATISTICS.values(), ops.Softmax, ops.Dropout, ops.Weigh),
    *(gradient_ops.Unmasked, gradient_ops.SoftmaxGrad, gradient_ops.SinkGrad, gradient_ops.WeighT),
    *(gradient_ops.SoftmaxJvp, gradient_ops.SoftmaxGradJvp, gradient_ops.SinkGradJvp),
    *(sums.Add, sums.Zeros, modifiers.Back, modifiers.Collect, modifiers.Bend, modifiers.Spread),
    *(*MODIFIERS, Addend, Factor),
    *(Attention, AttentionGrad, AttentionJvp),
    *(packing.Lengths, packing.Unpack, packing.Pack, Packed, paging.Unpage, paging.SumPages),
    *(Dequantise, Quantise),
    *VIEW_OPS,
)


def parse(text: str, *, known: Iterable[type[Any]] = ()) -> Graph:  # Any: masks, modifiers or ops
    """The graph of a text printed by `str`: `parse(str(g)) == g`.

    known: your own leaves of masks, modifiers and other ops named in the text. The text is never
    executed. Raises GraphError for other text, with the line.
    """
    return graph_parser(text, known).graph(text)


def graph_parser(text: str, known: Iterable[type[Any]]) -> Parser:  # Any: as above
    """A parser of the graph in `text`, with `known` and the library's classes."""
    classes = (*LEAVES, *OPS, *known)
    return Parser({cls.__name__: cls for cls in classes})


def parse_mask(text: str, *, known: Iterable[type[Any]] = ()) -> Mask:  # Any: leaves
    """The mask of a text such as `Causal() & (Window(64) | Prefix(4))`.

    known: your own leaves named in the text. The text is never executed. Raises GraphError for
    anything but a mask.
    """
    classes = (*LEAVES, *known)
    parser = Parser({cls.__name__: cls for cls in classes if issubclass(cls, Mask)})
    try:
        return parser.whole_mask(text)
    except GraphError as error:
        leaves = ", ".join(map(signature, parser.classes.values()))
        joints = "joined with & (not `and`), | (not `or`) and ~ (not `not`)"
        raise GraphError(f"{error}; a mask is made of {leaves}, {joints}") from error


def parse_modifier(text: str, known: Iterable[type[Any]]) -> modifiers.Modifier:  # Any: as above
    """The modifier of a text such as `SoftCap(cap=30.0)`. Raises GraphError for others."""
    with errors_of_nesting():
        step = graph_parser("", known).value(read_syntax(text, "eval").body)
    if not isinstance(step, modifiers.Modifier):
        raise GraphError(f"{text!r} is not a modifier")
    return step


def signature(leaf: type[Any]) -> str:  # Any: an attrs class
    """ "Window(left, right, align)"."""
    return f"{leaf.__name__}({', '.join(f.name for f in attrs.fields(leaf))})"


def read_syntax(text: str, mode: str = "exec") -> Any:  # Any: an ast.Module, or another by the mode
    """Python's syntax tree of a text. Raises GraphError for other text."""
    if not isinstance(text, str):
        raise GraphError(f"expected text, got {type(text).__name__}")
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        raise GraphError(f"line {error.lineno or 1}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; 1000s of brackets
        raise GraphError(f"the text can't be read: {error or type(error).__name__}") from error


@attrs.frozen
class Parser:
    """Reads text. classes: those allowed, by name; dims: named sizes."""

    classes: dict[str, type[Any]]
    dims: dict[str, Dim] = attrs.field(factory=dict)

    @property
    def calls(self) -> dict[str, type[Op]]:
        return {op_name(cls): cls for cls in self.classes.values() if issubclass(cls, Op)}

    def whole_mask(self, text: str) -> Mask:
        """The mask of a text. Raises GraphError for anything else."""
        whole = text.strip() if isinstance(text, str) else text
        with errors_of_nesting():
            mask = self.value(read_syntax(whole, "eval").body)
        if not isinstance(mask, Mask):
            raise GraphError(f"{text} is {mask!r}, not a mask such as Causal() & Window(64)")
        return mask

    def graph(self, text: str) -> Graph:
        """The graph of a text. Raises GraphError with the wrong line."""
        body = read_syntax(text).body
        count = next((n for n, line in enumerate(body) if not isinstance(line, ast.Assign)), 0)
        with errors_of_nesting():
            dims = dict(map(read_dim, body[:count]))
            return attrs.evolve(self, dims=dims).function(body[count:])

    def function(self, body: Sequence[ast.stmt]) -> Graph:
        """The graph of a text with one function. Raises GraphError for other statements."""
        match body:
            case [
                ast.FunctionDef(
                    args=ast.arguments(args=params),
                    body=[*eqns, ast.Return(value=out) as last],
                    returns=returns,
                )
            ]:
                pass
            case _:
                raise GraphError("line 1: expected one `def graph(...)` that ends in `return`")
        b, env = Builder(), dict[str, Value]()
        for param in params:
            with errors_at_line(param.lineno):
                env[param.arg] = b.input(param.arg, self.spec(param.annotation))
                b.check()
        for eqn in eqns:
            with errors_at_line(eqn.lineno):
                env |= self.equation(b, env, eqn)
                b.check()
        with errors_at_line(last.lineno):
            graph = b.build(*(look_up(env, n) for n in names_in(out)))
        return graph if returns is None else self.lay_out(graph, returns)

    def lay_out(self, graph: Graph, node: ast.expr) -> Graph:
        """The graph with the layouts of outputs in the text. Raises GraphError for other types."""
        nodes = node.elts if isinstance(node, ast.Tuple) else [node]
        with errors_at_line(node.lineno):
            specs = [None if is_none(part) else self.spec(part) for part in nodes]
            if len(specs) != len(graph.outputs):
                raise GraphError(f"{len(graph.outputs)} outputs, and {len(specs)} layouts")
            names = output_names(simplify(graph))
            return lay_out(graph, {n: x for n, x in zip(names, specs, strict=True) if x})

    def equation(self, b: Builder, env: dict[str, Value], eqn: ast.stmt) -> dict[str, Value]:
        """Add an equation to the builder; return the values it names."""
        match eqn:
            case ast.Assign(
                targets=[target], value=ast.Call(func=ast.Name(id=name), args=args, keywords=kws)
            ) if name in self.calls:
                op = self.make(self.calls[name], kws)
                outs = b.emit(op, *(look_up(env, n) for a in args for n in names_in(a)))
            case ast.Assign(value=ast.Call(func=ast.Name(id=name))):
                raise GraphError(f"{name} is not a known op; parse(text, known=[...]) reads yours")
            case _:
                raise GraphError("expected `x, ... = op(...)` of a known op")
        if len(names := names_in(target)) != len(outs):
            raise GraphError(f"{name} has {len(outs)} results, and {len(names)} are named")
        return dict(zip(names, outs, strict=True))

    def value(self, node: ast.expr) -> Any:  # Any: the value of some field
        """The value of an expression: a mask, a tuple, a call of a known class, or a literal."""
        match node:
            case ast.BinOp(op=ast.BitAnd()):
                return join_masks(And, map(self.mask, flatten_operator(node, ast.BitAnd)))
            case ast.BinOp(op=ast.BitOr()):
                return join_masks(Or, map(self.mask, flatten_operator(node, ast.BitOr)))
            case ast.UnaryOp(ast.Invert(), operand):
                return ~self.mask(operand)
            case ast.BinOp() | ast.Name() | ast.UnaryOp() if self.names_dim(node):
                return self.size(node)
            case ast.Tuple(parts):
                return tuple(map(self.value, parts))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=kws) if name in self.classes:
                return self.make(self.classes[name], kws, args)
            case _:
                return literal_value(node)

    def spec(self, node: ast.expr | None) -> TensorSpec:
        """The spec of `f16[2, 3]`, `f16[T, 3](strides=(1, 2))` or `i64[()]`. Raises GraphError."""
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=sizes) if name in DTYPES:
                return TensorSpec(self.integers(sizes), DTYPES[name])
            case ast.Call(
                func=ast.Subscript() as dense,
                args=[],
                keywords=[ast.keyword(arg="strides", value=strides)],
            ):
                spec = self.spec(dense)
                return TensorSpec(spec.shape, spec.dtype, self.integers(strides))
            case _:
                text = ast.unparse(node) if node else "no type"
                raise GraphError(f"expected a type such as f16[2, 3], got {text}")

    def integers(self, node: ast.expr) -> tuple[int, ...]:
        """The integers of sizes or strides. Raises GraphError for anything else."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        numbers = tuple([n for n in map(self.size, parts) if n is not None])
        if len(numbers) < len(parts):
            raise GraphError(
                f"{ast.unparse(node)} are not integers; write sizes and strides as in "
                "f16[2, 3](strides=(1, 2))"
            )
        return numbers

    def size(self, node: ast.expr) -> int | None:
        """A number, a Dim by its name, or arithmetic of them; None for anything else."""
        match node:
            case ast.Constant(value=value) if type(value) is int:
                return value
            case ast.Name(id=name):
                return self.dims.get(name)
            case ast.UnaryOp(ast.USub(), part):
                return None if (x := self.size(part)) is None else -x
            case ast.BinOp(left, sign, right) if type(sign) in ARITHMETIC:
                a, b = self.size(left), self.size(right)
                return None if a is None or b is None else ARITHMETIC[type(sign)](a, b)
        return None

    def names_dim(self, node: ast.expr) -> bool:
        return any(isinstance(x, ast.Name) and x.id in self.dims for x in ast.walk(node))

    def mask(self, node: ast.expr) -> Mask:
        part: Mask = self.value(node)
        require_mask(None, None, part)
        return part

    def make(
        self,
        cls: type[Any],  # Any: an attrs class
        keywords: list[ast.keyword],
        inorder: Sequence[ast.expr] = (),
    ) -> Any:  # Any: a cls
        """An instance of a class from the arguments of its call. Raises GraphError."""
        fields = {f.name: f.default is attrs.NOTHING for f in attrs.fields(cls)}
        given = {k.arg or "**": self.value(k.value) for k in keywords}
        first = dict(zip(fields, map(self.value, inorder), strict=False))
        if len(inorder) > len(first) or first.keys() & given or len(given) < len(keywords):
            raise GraphError(f"{cls.__name__} takes {', '.join(fields) or 'nothing'}, each once")
        given |= first
        if unknown := given.keys() - fields:
            raise GraphError(f"{cls.__name__} has no field {sorted(unknown)}; has {sorted(fields)}")
        if missing := [name for name, needed in fields.items() if needed and name not in given]:
            raise GraphError(f"{cls.__name__} needs {', '.join(missing)}")
        try:
            return cls(**given)
        except GraphError:
            raise
        except (TypeError, ValueError, OverflowError) as error:  # of converters
            raise GraphError(f"{cls.__name__}: {error}") from error


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def flatten_operator(node: ast.expr, op: type[ast.operator]) -> list[ast.expr]:
    """The operands of a & b & c, which Python nests to the left."""
    operands: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, op):
        operands.append(node.right)
        node = node.left
    return [node, *reversed(operands)]


@contextmanager
def errors_of_nesting() -> Iterator[None]:
    """GraphError in place of RecursionError."""
    try:
        yield
    except RecursionError as error:
        raise GraphError("the text is nested too deeply to be read") from error


@contextmanager
def errors_at_line(number: int) -> Iterator[None]:
    try:
        yield
    except GraphError as error:
        raise GraphError(*(f"line {number}: {text}" for text in error.problems)) from error


def literal_value(node: ast.expr) -> Any:  # Any: whatever Python has literals for
    """The value of a literal. Raises GraphError for any other expression."""
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError) as error:  # {[]: 1}; a call, or a name
        raise GraphError(f"{ast.unparse(node)} is not a known value") from error


def read_dim(line: ast.stmt) -> tuple[str, Dim]:
    """The name and the Dim of a line such as `T = Dim("T", most=64)`. Raises GraphError."""
    with errors_at_line(line.lineno):
        match line:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="Dim"), args=[ast.Constant(str(own))]) as call,
            ) if name == own and {k.arg for k in call.keywords} <= {"most", "classes"}:
                return name, Dim(own, **{str(k.arg): literal_value(k.value) for k in call.keywords})
        text = ast.unparse(line)
        raise GraphError(f'expected a line such as T = Dim("T", most=64), got {text}')


def names_in(node: ast.expr | None) -> list[str]:
    """The names of `x` or of `x, y`. Raises GraphError for anything else."""
    match node:
        case ast.Tuple(parts):
            return [name for part in parts for name in names_in(part)]
        case ast.Name(id=name):
            return [name]
        case _:
            raise GraphError(f"expected names, got {ast.unparse(node) if node else 'nothing'}")


def look_up(env: dict[str, Value], name: str) -> Value:
    """The value of a name. Raises GraphError if no earlier line defines it."""
    if name not in env:
        raise GraphError(f"{name} is used before it is defined; known are {', '.join(env)}")
    return env[name]
