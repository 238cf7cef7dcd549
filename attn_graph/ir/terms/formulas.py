"""Masks written as text: comparisons of integers.

The text has Python's syntax. Once each part of it is known to be a number, a name, an operator or
one of a few functions, Python computes it for a place, which may be tensors, integers or symbols of
generated code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any, final

import torch
from attrs import field, frozen

from attn_graph.errors import GraphError, show
from attn_graph.machine.cache import remember
from attn_graph.masks.intervals import Range
from attn_graph.masks.joins import Data, Mask
from attn_graph.masks.places import Place, Term, maximum, minimum
from attn_graph.spec import MOST_INT64

AXES = "bhij"
Elements = tuple[tuple[str, str], ...]  # the name of each tensor, and its axes, letters of "bhij"
Apply = Callable[..., Term]

OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
METHODS = ("cos", "exp", "exp2", "log", "log2", "rsqrt", "sigmoid", "sin", "sqrt", "tanh")
FLEX_NAMES = {"q_idx": "i", "kv_idx": "j"}  # FlexAttention's names, and ours
FUNCTIONS: Mapping[str, Apply] = {"abs": abs, "max": maximum, "min": minimum}
PAIRS = ("max", "min")  # functions of two
CALLED = (*FUNCTIONS, "real", *METHODS)
RESERVED = (*AXES, *CALLED)


def as_elements(values: Any) -> Elements:  # Any: pairs
    """Pairs of names and axes as tuples, which compare by value. Raises GraphError for others."""
    try:
        pairs = tuple((name, axes) for name, axes in values)
    except (TypeError, ValueError):
        pairs = ((values, None),)
    if all(isinstance(x, str) for pair in pairs for x in pair):
        return pairs
    raise GraphError(
        f'formula: elements {show(values)} are not pairs of names and axes, as (("page", "j"),)'
    )


def require_text(_: object, __: object, value: str) -> None:
    if not isinstance(value, str):
        raise GraphError(f'formula: {show(value)} is not text; write it as "i // 64 == j // 64"')


def check_elements(elements: Elements) -> None:
    """Raise GraphError for a reserved or repeated name and for axes out of order."""
    for n, (name, axes) in enumerate(elements):
        if not name.isidentifier() or name in RESERVED or name in dict(elements[:n]):
            raise GraphError(f"formula: {name!r} is not a name for a tensor, or is taken")
        if list(axes) != sorted({*axes}, key=AXES.find):
            raise GraphError(
                f"formula: {name} has axes {axes!r}; write them in the order of {AXES!r}"
            )


def read_formula(text: str) -> ast.expr:
    """The syntax tree of a formula. Raises GraphError unless it is a Python expression."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # 1000s of brackets
        why = error or type(error).__name__
        raise GraphError(f"formula: {text[:80]!r} is not an expression: {why}") from error


def simplify_text(text: str) -> str:
    """A formula without redundant parentheses."""
    return ast.unparse(read_formula(text))


@remember
def compile_formula(text: str) -> CodeType:
    return compile(ast.Expression(read_formula(text)), "<formula>", "eval")


def evaluate_formula(text: str, names: Mapping[str, Term]) -> Term:
    """The value of a formula, of which `require_syntax` knows each part, for these names."""
    return eval(compile_formula(text), {}, names)


def require_syntax(node: ast.expr, names: Collection[str]) -> None:
    """Raise GraphError unless a formula has numbers, operators, and these names alone."""
    parts: list[ast.expr] = []
    match node:
        case ast.Name(id=name) if name in names and name not in CALLED:
            pass
        case ast.Constant(value=int() | float()):
            pass
        case ast.BinOp(a, ast.FloorDiv() | ast.Mod(), ast.Constant(value=int() as n)) if n > 0:
            parts = [a]
        case ast.BinOp(_, ast.FloorDiv() | ast.Mod(), _):  # by 0, or rounding another way
            raise GraphError(
                f"formula: {ast.unparse(node)}: the divisor must be a positive integer constant"
            )
        case ast.BinOp(a, op, b) | ast.Compare(a, [op], [b]) if isinstance(op, OPERATORS):
            parts = [a, b]
        case ast.UnaryOp(op, a) if isinstance(op, OPERATORS):
            parts = [a]
        case ast.Call(ast.Name(id=name), [*parts], []) if (
            name in names and name in CALLED and len(parts) == 1 + (name in PAIRS)
        ):
            pass
        case _:
            known, text = ", ".join(sorted(names)), ast.unparse(node)
            hint = f"; write {FLEX_NAMES[text]}" if text in FLEX_NAMES else ""
            raise GraphError(f"formula: {text} is not read{hint}; it may name {known}")
    for part in parts:
        require_syntax(part, names)


def require_known_names(
    text: str, node: ast.expr, elements: Elements, names: Collection[str]
) -> None:
    """Raise GraphError for a name, probably of a tensor, without axes."""
    parts = [*ast.walk(node)]
    called = {id(x.func) for x in parts if isinstance(x, ast.Call)}
    used = [x.id for x in parts if isinstance(x, ast.Name) and id(x) not in called]
    read = {*names, *FLEX_NAMES, *RESERVED}
    if unknown := [x for x in dict.fromkeys(used) if x not in read]:
        pairs = (*elements, *((name, "b") for name in unknown))
        known = ", ".join(sorted(names))
        code = ", ".join(f'("{name}", "{axes}")' for name, axes in pairs)
        raise GraphError(
            f"formula: {unknown[0]} is not read; it may name {known}; of a tensor, add "
            f'its axes: Formula("{text}", ({code},)) if it is [B]'
        )


def join_formulas(node: ast.expr) -> str:
    """The code that joins formulas for a text that joins comparisons; "" for others."""
    match node:
        case ast.BoolOp(op, parts):
            sign, inner = " & " if isinstance(op, ast.And) else " | ", parts
        case ast.BinOp(a, (ast.BitAnd() | ast.BitOr()) as bits, b):
            sign, inner = " & " if isinstance(bits, ast.BitAnd) else " | ", [a, b]
        case ast.UnaryOp(ast.Not() | ast.Invert(), a):
            return f"~{in_brackets(a)}"
        case ast.Compare(a, ops, [*rest]) if len(ops) > 1:
            ends = zip([a, *rest[:-1]], ops, rest, strict=True)
            sign, inner = " & ", [ast.Compare(x, [op], [y]) for x, op, y in ends]
        case _:
            return ""
    return sign.join(map(in_brackets, inner))


def in_brackets(node: ast.expr) -> str:
    """A part of a join as code: a Formula, or a join of some, in brackets."""
    within = join_formulas(node)
    return f"({within})" if within else f'Formula("{ast.unparse(node)}")'


def check_constants(node: ast.expr) -> None:
    """Raise GraphError for a constant expression outside 64 bits."""
    for part in ast.walk(node):
        named = any(isinstance(x, ast.Name | ast.Compare) for x in ast.walk(part))
        if isinstance(part, ast.expr) and not named:
            value = evaluate_formula(ast.unparse(part), {})
            if isinstance(value, int) and not -MOST_INT64 <= value <= MOST_INT64:
                raise GraphError(
                    f"formula: {ast.unparse(part)} is {value}, beyond {MOST_INT64}, the largest "
                    "64-bit integer"
                )


def used_names(node: ast.expr) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def has_floats(node: ast.expr) -> bool:
    return any(
        isinstance(x, ast.Div) or (isinstance(x, ast.Constant) and isinstance(x.value, float))
        for x in ast.walk(node)
    )


def range_problems(text: str, elements: Elements, sizes: tuple[int, int, int, int]) -> list[str]:
    """The integer part of a formula that may leave 64 bits at sizes B, H, M, N, with elements of
    32 bits; none without such a part."""
    known = {
        name: Range(*(torch.tensor(float(end), device="cpu") for end in ends))
        for name, ends in (
            *((x, (0, n - 1)) for x, n in zip(AXES, map(int, sizes), strict=True)),
            *((name, (-(2**31), 2**31)) for name, _ in elements),
        )
    }
    names = {**known, **FUNCTIONS}
    for part in ast.walk(read_formula(text)):
        if isinstance(part, ast.BinOp) and not has_floats(part) and used_names(part) <= {*names}:
            made = evaluate_formula(ast.unparse(part), names)
            ends = (made.least, made.most) if isinstance(made, Range) else (made,)
            if max(abs(float(x)) for x in ends) > MOST_INT64:
                return [f"formula: {ast.unparse(part)} may be beyond 64 bits for sizes {sizes}"]
    return []


def place_names(at: Place, elements: Elements) -> dict[str, Term]:
    """The names of a formula: b, h, i, j, functions, and the elements of its tensors."""
    axes = dict(zip(AXES, at.axes, strict=True))
    loads = {name: whole(at.load(name, *(axes[x] for x in own))) for name, own in elements}
    return {**axes, **FUNCTIONS, **loads}


def whole(x: Term) -> Term:
    """Integers as int64, in which formulas are computed; anything else unchanged."""
    return x.long() if isinstance(x, torch.Tensor) and not x.is_floating_point() else x


@final
@frozen
class Formula(Mask):
    """A comparison of integers made of b, h, i, j: `Formula("i // 64 == j // 64")`.

    The text has + - * // %, abs(), max() and min() of two, and one comparison. elements: the name
    and axes of each integer tensor in the text; it means the tensor's element at the place. For
    documents: `Formula("page_i <= page_j", (("page_i", "i"), ("page_j", "j")))`. Raises GraphError
    for other text.
    """

    text: str = field(validator=require_text)
    elements: Elements = field(default=(), converter=as_elements)

    def __attrs_post_init__(self) -> None:
        node = read_formula(self.text)
        check_elements(self.elements)
        if way_out := join_formulas(node):
            raise GraphError(f"formula: {self.text!r} is not one comparison; write {way_out}")
        if not isinstance(node, ast.Compare) or has_floats(node):
            raise GraphError(f"formula: {self.text!r} is not a comparison of integers")
        names = {**dict.fromkeys((*AXES, *dict(self.elements)), 1), **FUNCTIONS}
        require_known_names(self.text, node, self.elements, names)
        require_syntax(node, names)
        check_constants(node)

    @property
    def needs(self) -> dict[str, Data]:
        return {name: Data(axes) for name, axes in self.elements}

    def keep(self, at: Place) -> Term:
        return evaluate_formula(self.text, place_names(at, self.elements))
