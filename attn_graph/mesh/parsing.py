"""Reads the text of sharded graphs: a graph, and its call of `shard`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from attn_graph.errors import GraphError
from attn_graph.ir.transforms.parse import (
    Parser,
    errors_at_line,
    graph_parser,
    literal_value,
    read_syntax,
)
from attn_graph.mesh.layout import Mesh
from attn_graph.mesh.sharded import Sharded
from attn_graph.mesh.sharding import shard


def parse_sharded(text: str, known: Iterable[type[Any]]) -> Sharded:  # Any: masks, modifiers, ops
    """The sharded graph of a text. Raises GraphError with the wrong line."""
    parser = graph_parser(text, (Mesh, *known))
    match read_syntax(text).body:
        case [*graph, ast.Expr(ast.Call(ast.Name("shard"), [ast.Name(), *args], keywords) as call)]:
            whole = parser.function(graph)
        case _:
            raise GraphError("expected a graph, and below it `shard(graph, Mesh(...), ...)`")
    with errors_at_line(call.lineno):
        options = {x.arg or "**": read_option(x.value) for x in keywords}
        if len(args) != 2 or "**" in options:
            raise GraphError("expected `shard(graph, mesh, placements, ...)`")
        return shard(whole, *map(parser.value, args), **options)


def read_option(node: ast.expr) -> Any:  # Any: a tensor, or the name of a method
    """The value of a keyword of `shard`. Raises GraphError."""
    return read_tensor(node) if isinstance(node, ast.Call) else literal_value(node)


def read_tensor(node: ast.Call) -> torch.Tensor:
    """The tensor of `i64[2, 3]((7, 4), (8, 2))`: runs of equal elements. Raises GraphError."""
    spec, runs = Parser({}).spec(node.func), [literal_value(x) for x in node.args]
    if not all(map(is_run, runs)) or sum(n for _, n in runs) != prod(spec.shape):
        raise GraphError(f"{ast.unparse(node.func)} is given by runs of (element, how many)")
    values, counts = (torch.tensor([run[i] for run in runs], dtype=torch.int64) for i in (0, 1))
    return values.repeat_interleave(counts).to(spec.dtype).reshape(spec.shape)


def is_run(run: object) -> bool:
    """True for an integer or a boolean with its number of repetitions."""
    match run:
        case (int(value), int(count)):
            return -(2**63) <= value < 2**63 and count > 0
    return False
