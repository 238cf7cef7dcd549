"""Validators of numbers in the fields of ops."""

from __future__ import annotations

import math

import torch
from attrs import Attribute

from attn_graph.errors import GraphError, show
from attn_graph.spec import INF, NAMES, is_differentiated

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
    require_constant(attribute.name, value)
    if not (isinstance(value, float) and 0 < value < INF):
        name = ARGUMENTS.get(attribute.name, attribute.name)
        off = f"; write {name}=None for none" if isinstance(value, float) and value == 0 else ""
        raise GraphError(f"{name} {show(value)} must be a positive, finite number{off}")


def require_finite(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError unless it is a finite number."""
    require_constant(attribute.name, value)
    if not (isinstance(value, float) and math.isfinite(value)):
        raise GraphError(f"{attribute.name} {show(value)} must be a finite number")


def range_problem(value: float, dtype: torch.dtype) -> str:
    """Why a number is too large for scores of a dtype; "" if it is not.

    Kernels also use its inverse and log2(e) times it; these must be normal numbers too.
    """
    most = 2.0**1022 if dtype == torch.float64 else 2.0**126
    if abs(value) <= most:
        return ""
    return f"{value:g} is beyond {most:.3g}, the limit for scores of {NAMES[dtype]}"
