"""Checks for your own masks, modifiers and backends; the library's own pass them.

`check_mask`, `check_modifier` and `check_backend` draw sizes, tensors and graphs by hypothesis and
compare with the formula of docs/semantics.md in float64, by its accuracy rule. They raise
AssertionError with the fault, both values, and the smallest example.
"""

try:
    import hypothesis  # noqa: F401  # for an error that names the package to install
except ModuleNotFoundError as error:
    raise ImportError(
        "attn_graph.testing needs hypothesis, which is not installed; "
        "install it with: pip install 'attn-graph[testing]'"
    ) from error

from attn_graph.testing.backend_check import check_backend
from attn_graph.testing.mask_check import check_mask
from attn_graph.testing.modifier_check import check_modifier
from attn_graph.testing.rule import (
    Expectation,
    allowance,
    distance,
    expect_gradients,
    expect_outputs,
)
from attn_graph.testing.strategies import Shape, graphs, masks, seeds, shapes, simple_graphs, specs
from attn_graph.testing.tensors import cotangents_for, tensors_for

__all__ = [
    "Expectation",
    "Shape",
    "allowance",
    "check_backend",
    "check_mask",
    "check_modifier",
    "cotangents_for",
    "distance",
    "expect_gradients",
    "expect_outputs",
    "graphs",
    "masks",
    "seeds",
    "shapes",
    "simple_graphs",
    "specs",
    "tensors_for",
]
