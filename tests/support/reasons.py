"""A second opinion on keys: which sentences are of one kind, by their words alone."""

from __future__ import annotations

import re

VARIABLE = re.compile(
    r"\b(f16|bf16|f32|f64|i32|i64|bool)\b(\[.*?\](?=\W|$))?(\(strides=\(.*?\)\))?"
    r"|[-+]?\d[\d.e+-]*"
)


def skeleton(reason: object) -> str:
    """A reason without specs, numbers and masks, which a change of the graph may change."""
    return VARIABLE.sub("#", str(reason).partition(", and the mask is")[0])
