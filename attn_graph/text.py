"""Graphs as text and back. The text is Python, so `ast` is the whole parser."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch

from attn_graph import masks, modifiers, ops
from attn_graph.builder import Builder, Value
from attn_graph.errors import GraphError
from attn_graph.fused import Attention, AttentionGrad
from attn_graph.ir import Graph, Op
from attn_graph.masks import And, Not, Or
from attn_graph.spec import DTYPES, TensorSpec

OPS: tuple[type[Op], ...] = (
    *(ops.Scores, ops.Mask, ops.Softmax, ops.Dropout, ops.Weigh),
    *(ops.Unmasked, ops.SoftmaxGrad, ops.SinkGrad, ops.WeighT, ops.Add, ops.Zeros),
    *(modifiers.Back, modifiers.Collect, *modifiers.MODIFIERS),
    *(Attention, AttentionGrad),
)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


CALLS = {snake(op.__name__): op for op in OPS}


def show(graph: Graph) -> str:
    """Valid Python, one line an equation, that `parse` turns back into an equal graph."""
    names = [i.name for i in graph.inputs]
    inputs = ",\n".join(f"    {i.name}: {i.spec}" for i in graph.inputs)
    lines = [f"def graph(\n{inputs},\n):" if names else "def graph():"]
    for eqn in graph.eqns:
        outs = list(fresh(eqn.op.names, names))
        args = ", ".join([names[i] for i in eqn.args] + shown_fields(eqn.op))
        types = ", ".join(map(str, eqn.outs))
        names += outs
        lines.append(f"    {', '.join(outs)} = {snake(type(eqn.op).__name__)}({args})  # {types}")
    return "\n".join([*lines, f"    return {', '.join(names[i] for i in graph.outputs)}"])


def fresh(wanted: Iterable[str], taken: list[str]) -> Iterator[str]:
    """Names for results: as wanted, or with the first free number."""
    used = set(taken)
    for name in wanted:
        tries = (name if n == 1 else f"{name}{n}" for n in range(1, len(used) + 2))
        free = next(t for t in tries if t not in used)
        used.add(free)
        yield free


def shown_fields(value: Any) -> list[str]:
    """`name=value` for every field that differs from its default."""
    return [
        f"{f.name}={show_value(getattr(value, f.name))}"
        for f in attrs.fields(type(value))
        if f.default is attrs.NOTHING or getattr(value, f.name) != f.default
    ]


def show_value(value: Any) -> str:
    """A field's value as Python."""
    match value:
        case And(a, b):
            return f"({show_value(a)} & {show_value(b)})"
        case Or(a, b):
            return f"({show_value(a)} | {show_value(b)})"
        case Not(a):
            return f"~{show_value(a)}"
        case tuple():
            inner = ", ".join(map(show_value, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case _ if attrs.has(type(value)):
            return f"{type(value).__name__}({', '.join(shown_fields(value))})"
        case _:
            return repr(value)


def parse(text: str, *, known: Iterable[type[Any]] = ()) -> Graph:  # Any: masks, modifiers or ops
    """The graph that `str` printed: `parse(str(g)) == g`. Nothing of the text is executed.

    `known` holds your own mask leaves, where the text names any. Raises GraphError for what is
    not such a text, with the line.
    """
    return Parser({cls.__name__: cls for cls in (*masks.LEAVES, *OPS, *known)}).graph(text)


@attrs.frozen
class Parser:
    """Reads text with the classes it knows."""

    classes: dict[str, type[Any]]

    def graph(self, text: str) -> Graph:
        try:
            body = ast.parse(text).body
        except SyntaxError as error:
            raise GraphError(f"line {error.lineno}: {error.msg}") from error
        match body:
            case [
                ast.FunctionDef(
                    args=ast.arguments(args=params), body=[*eqns, ast.Return(value=out)]
                )
            ]:
                pass
            case _:
                raise GraphError("expected one `def graph(...)` that ends in `return`")
        b = Builder()
        env = {p.arg: b.input(p.arg, spec_of(p.annotation)) for p in params}
        for eqn in eqns:
            self.equation(b, env, eqn)
        return b.build(*(looked_up(env, n) for n in names_of(out)))

    def equation(self, b: Builder, env: dict[str, Value], eqn: ast.stmt) -> None:
        match eqn:
            case ast.Assign(
                targets=[target], value=ast.Call(func=ast.Name(id=name), args=args, keywords=kws)
            ) if name in CALLS:
                op = self.made(CALLS[name], eqn.lineno, {k.arg: self.value(k.value) for k in kws})
                outs = b.emit(op, *(looked_up(env, n) for a in args for n in names_of(a)))
                env.update(zip(names_of(target), outs, strict=True))
            case _:
                raise GraphError(f"line {eqn.lineno}: expected `x, ... = op(...)` of a known op")

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return And(self.value(left), self.value(right))
            case ast.BinOp(left, ast.BitOr(), right):
                return Or(self.value(left), self.value(right))
            case ast.UnaryOp(ast.Invert(), operand):
                return Not(self.value(operand))
            case ast.Tuple(parts):
                return tuple(map(self.value, parts))
            case ast.Call(func=ast.Name(id=name), args=[], keywords=kws) if name in self.classes:
                fields = {k.arg: self.value(k.value) for k in kws}
                return self.made(self.classes[name], node.lineno, fields)
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case _:
                return literal(node)

    def made(self, cls: type[Any], line: int, fields: dict[str | None, Any]) -> Any:
        names = {f.name for f in attrs.fields(cls)}
        if unknown := fields.keys() - names:
            raise GraphError(
                f"line {line}: {cls.__name__} has no field {sorted(map(str, unknown))}; it has {sorted(names)}"
            )
        return cls(**{str(name): value for name, value in fields.items()})


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise GraphError(f"line {node.lineno}: {ast.unparse(node)} is no known value") from error


def spec_of(node: ast.expr | None) -> TensorSpec:
    """`f16[2, 3]`, `f16[(2, 3), (1, 2)]` (with strides) or `i64[()]`."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in DTYPES:
            return spec_from(DTYPES[name], literal(inner))
        case _:
            told = ast.unparse(node) if node else "no type"
            raise GraphError(f"expected a type such as f16[2, 3], got {told}")


def spec_from(dtype: torch.dtype, inner: Any) -> TensorSpec:
    sizes = inner if isinstance(inner, tuple) else (inner,)
    if sizes and isinstance(sizes[0], tuple):
        return TensorSpec(sizes[0], dtype, *sizes[1:])
    return TensorSpec(sizes, dtype)


def names_of(node: ast.expr | None) -> list[str]:
    match node:
        case ast.Tuple(parts):
            return [name for part in parts for name in names_of(part)]
        case ast.Name(id=name):
            return [name]
        case _:
            raise GraphError(f"expected names, got {ast.unparse(node) if node else 'nothing'}")


def looked_up(env: dict[str, Value], name: str) -> Value:
    if name not in env:
        raise GraphError(f"{name} is used before it is defined; known are {', '.join(env)}")
    return env[name]
