"""Terms written as text, which scores are added to or multiplied by: see
`attn_graph.ir.terms.formulas`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import final

import torch
from attrs import field, frozen

from attn_graph.errors import GraphError
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.terms.formulas import (
    AXES,
    FUNCTIONS,
    METHODS,
    Apply,
    Elements,
    as_elements,
    check_constants,
    check_elements,
    evaluate_formula,
    place_names,
    read_formula,
    require_syntax,
    require_text,
    used_names,
)
from attn_graph.masks import Data
from attn_graph.masks.places import Place, Term
from attn_graph.spec import FLOATS

NUMBERS: dict[str, Callable[[float], float]] = {  # METHODS of numbers
    "cos": math.cos,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sigmoid": lambda x: (1 + math.tanh(x / 2)) / 2,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
}


@final
@frozen
class Addend(Modifier):
    """s -> s + a term made of b, h, i, j: `Addend("real(slope) * real(j - i)", (("slope", "h"),))`.

    elements: names and axes as in `Formula`, of tensors in q's dtype or float32. The term must be
    linear in each; they have a gradient. integers: likewise of integer tensors. `real` turns a
    number into the scores' dtype: exp, exp2, log, sqrt, tanh and others take real numbers, and a
    product of a float16 tensor and a position is rounded to float16 without it. Raises GraphError
    for other text.
    """

    additive = True
    text: str = field(validator=require_text)
    elements: Elements = field(default=(), converter=as_elements)
    integers: Elements = field(default=(), converter=as_elements)

    def __attrs_post_init__(self) -> None:
        node = check_term(self)
        if bent := [name for name, _ in self.elements if degree(node, name) > 1]:
            raise GraphError(f"addend: {self.text!r} is not linear in {', '.join(bent)}")

    @property
    def needs(self) -> dict[str, Data]:
        return read_tensors(self)

    @property
    def trains(self) -> tuple[str, ...]:
        return tuple(dict(self.elements))

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        changed: torch.Tensor = s + term_at(self, at, s.dtype)
        return changed

    def collect(self, totals: Mapping[str, torch.Tensor], ds: torch.Tensor, at: Place) -> None:
        """The share of an element, in which the term is linear: term(1) - term(0)."""
        axes = dict(zip(AXES, at.axes, strict=True))
        for name, own in self.elements:
            if name in totals:
                one, zero = (term_at(self, at, ds.dtype, **{name: x}) for x in (1.0, 0.0))
                share = at.reading(totals).load(name, *(axes[x] for x in own))
                share += (ds * (one - zero)).sum_to_size(share.shape)

    def spread(
        self, ts: torch.Tensor, tangents: Mapping[str, torch.Tensor], at: Place
    ) -> torch.Tensor:
        """Each element's tangent times term(1) - term(0)."""
        axes = dict(zip(AXES, at.axes, strict=True))
        for name, own in self.elements:
            if name in tangents:
                moved = at.reading(tangents).load(name, *(axes[x] for x in own)).to(ts.dtype)
                one, zero = (term_at(self, at, ts.dtype, **{name: x}) for x in (1.0, 0.0))
                ts = ts.add_(moved * (one - zero))
        return ts


@final
@frozen
class Factor(Modifier):
    """s -> s times a term as of `Addend`: `Factor("0.5")`, `Factor("real(t)", (("t", "h"),))`.

    Its tensors have no gradient, which the backward says, since a call may need none: multiply q by
    a trained factor instead. Raises GraphError for other text.
    """

    text: str = field(validator=require_text)
    elements: Elements = field(default=(), converter=as_elements)
    integers: Elements = field(default=(), converter=as_elements)

    def __attrs_post_init__(self) -> None:
        check_term(self)

    @property
    def needs(self) -> dict[str, Data]:
        return read_tensors(self)

    @property
    def number(self) -> float | None:
        """Its value, if it is constant."""
        node = read_formula(self.text)
        if used_names(node) & {*AXES, *self.needs}:
            return None
        return float(evaluate_formula(self.text, functions_for(torch.float64)))

    def change(self, s: torch.Tensor, at: Place) -> torch.Tensor:
        changed: torch.Tensor = s * term_at(self, at, s.dtype)
        return changed

    def back(self, ds: torch.Tensor, s: torch.Tensor, at: Place) -> torch.Tensor:
        return self.change(ds, at)

    def bend(self, ds: torch.Tensor, t: torch.Tensor, s: torch.Tensor, at: Place) -> None:
        """None: `back` does not depend on s."""


def check_term(step: Addend | Factor) -> ast.expr:
    """The syntax tree of a step's term. Raises GraphError unless it is one."""
    one, node = torch.ones((), device="cpu"), read_formula(step.text)
    check_elements((*step.elements, *step.integers))
    own = (*AXES, *dict(step.elements), *dict(step.integers))
    names = {**dict.fromkeys(own, one), **functions_for(one.dtype)}
    require_syntax(node, names)
    check_constants(node)
    evaluate_formula(step.text, names)
    return node


def read_tensors(step: Addend | Factor) -> dict[str, Data]:
    """The tensors that a step reads."""
    real = {name: Data(axes, FLOATS) for name, axes in step.elements}
    return real | {name: Data(axes) for name, axes in step.integers}


def term_at(step: Addend | Factor, at: Place, dtype: torch.dtype, **values: float) -> Term:
    """A step's term at a place. values: numbers in place of elements."""
    elements = (*step.elements, *step.integers)
    names = {**place_names(at, elements), **functions_for(dtype), **values}
    return evaluate_formula(step.text, names)


def degree(node: ast.expr, name: str) -> float:
    """The degree of a formula as a polynomial in a name; infinity if it is not one."""
    match node:
        case ast.Name(id=known):
            return float(known == name)
        case ast.BinOp(a, ast.Mult(), b):
            return degree(a, name) + degree(b, name)
        case ast.BinOp(a, ast.Div(), b) if not degree(b, name):
            return degree(a, name)
        case ast.BinOp(a, ast.Add() | ast.Sub(), b):
            return max(degree(a, name), degree(b, name))
        case ast.UnaryOp(_, a) | ast.Call(ast.Name(id="real"), [a]):
            return degree(a, name)
    return float("inf") if name in used_names(node) else 0


def functions_for(dtype: torch.dtype) -> dict[str, Apply]:
    return {
        **FUNCTIONS,
        "real": lambda x: float(x) if isinstance(x, int | float) else x.to(dtype),
        **{name: partial(call_method, name) for name in METHODS},
    }


def call_method(name: str, x: Term) -> Term:
    """A function of METHODS, of a tensor, a symbol of generated code, or a number."""
    if not isinstance(x, int | float):
        return operator.methodcaller(name)(x)
    try:
        return NUMBERS[name](x)
    except (ValueError, ArithmeticError) as error:
        raise GraphError(f"addend: {name}({x}) has no value: {error}") from error
