"""Validators of the numbers that ops have as fields."""

from __future__ import annotations

import math

import torch
from attrs import Attribute

from attn_graph.errors import GraphError
from attn_graph.spec import INF, NAMES


def require_positive(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError for what is no positive, finite number."""
    if not (isinstance(value, float) and 0 < value < INF):
        raise GraphError(f"{attribute.name} {value!r} must be a number, positive and finite")


def require_finite(_: object, attribute: Attribute[float], value: float) -> None:
    """A validator. Raises GraphError for what is no finite number."""
    if not (isinstance(value, float) and math.isfinite(value)):
        raise GraphError(f"{attribute.name} {value!r} must be a finite number")


def range_problem(value: float, dtype: torch.dtype) -> str:
    """Why scores of a dtype cannot be computed with a number; "" where they can.

    Kernels also use its inverse and log2(e) times it, and these have to be normal numbers too.
    """
    most = 2.0**1022 if dtype == torch.float64 else 2.0**126
    if abs(value) <= most:
        return ""
    return (
        f"{value:g} is beyond {most:.3g}, the most that scores of {NAMES[dtype]} are computed with"
    )
