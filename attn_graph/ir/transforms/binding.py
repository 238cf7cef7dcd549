"""Numbers in place of the named sizes of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from attn_graph.errors import GraphError, show
from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Graph, Op
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage.packed import with_operands
from attn_graph.ir.storage.paging import Unpage
from attn_graph.masks import Mask
from attn_graph.masks.canonical import canonical_mask
from attn_graph.spec.dims import Dim, Sizes, are_numbers, bind


def bind_graph(graph: Graph, sizes: Sizes) -> Graph:
    """The simplified graph for these sizes, equal to one declared with numbers.

    A graph without named sizes is returned as is.
    """
    return simplify(replace_sizes(graph, sizes)) if graph.symbols else graph


def replace_sizes(graph: Graph, sizes: Sizes) -> Graph:
    if not graph.symbols:
        return graph
    b = Builder(True)
    values = [b.input(i.name, i.spec.bind(sizes)) for i in graph.inputs]
    for eqn in graph.eqns:
        op, operands = settle(bind(eqn.op, sizes), [values[i] for i in eqn.args])
        values += b.emit(op, *operands)
    outputs = (values[i] for i in graph.outputs)
    declared = graph.declared_outputs if graph.layouts else ()
    return b.graph(*outputs, layouts=tuple(x and x.bind(sizes).strides for x in declared))


def require_numbers(graph: Graph, who: str) -> None:
    """Raise GraphError for a graph with named sizes. who: the function for the message."""
    if graph.symbols:
        names = ", ".join(symbol.name for symbol in graph.symbols)
        raise GraphError(f"{who}: sizes {names} have names; declare the graph with numbers")


def settle(op: Op, operands: Sequence[Value]) -> tuple[Op, Sequence[Value]]:
    """An op whose sizes are now numbers with a canonical mask and modifiers, and its operands."""
    node = op.attention
    if node is None or (node.mask is None and not node.modifiers):
        return op, operands
    q, k, *_ = op.padded([x.type for x in operands])
    M, N = q.shape[2], k.shape[2]
    settled, kept = settle_attention(op, node, node.mask, M, N, len(operands))
    return settled, operands if kept is None else [operands[i] for i in kept]


def settle_attention(
    op: Any,  # Any: an op of the same class as the first result
    node: Attention,
    bound: Mask | None,
    M: int,
    N: int,
    count: int,
) -> tuple[Any, Sequence[int] | None]:  # Any: as above
    """`settle` for an attention, or an op made of one, for M queries and N keys.

    bound: its mask in numbers. count: its operands. Also gives the numbers of the operands it still
    reads; None for all.
    """
    mask = None if bound is None else canonical_mask(bound, M, N)
    modifiers = tuple([modifier.resolved(M, N) for modifier in node.modifiers])
    if (mask, modifiers) == (node.mask, node.modifiers):
        return op, None
    own = node.slots_under(mask)
    kept = (*own, *range(len(node.takes), count))
    changed = with_operands(op, evolve(node, mask=mask, modifiers=modifiers), own)
    return changed, None if kept == (*range(count),) else kept


def largest(graph: Graph) -> dict[str, int]:
    return {symbol.name: symbol.most for symbol in graph.symbols}


def split_sizes(
    graph: Graph,
    given: Mapping[str, Any],  # Any: sizes and tensors
) -> tuple[dict[str, Any], dict[str, Any]]:  # Any: as above
    """(the sizes of a graph, the rest) of values given by name."""
    names = {symbol.name for symbol in graph.symbols}
    sizes = {name: x for name, x in given.items() if name in names}
    return sizes, {name: x for name, x in given.items() if name not in names}


def complete_sizes(
    graph: Graph,
    who: str,
    given: Mapping[str, Any],  # Any: sizes from a user
) -> dict[str, int]:
    """All sizes of a graph, the largest unless given. Raises GraphError for wrong ones.

    who: the function for the message.
    """
    most = largest(graph)
    if unknown := sorted(given.keys() - most.keys()):
        names = f"its sizes by name are {', '.join(most)}" if most else "no size has a name"
        raise GraphError(f"{who}: {', '.join(unknown)} is not a size of the graph; {names}")
    if wrong := [n for n, size in given.items() if type(size) is not int or size < 0]:
        raise GraphError(
            f"{who}: {wrong[0]} = {show(given[wrong[0]])} is not a whole number of at least 0"
        )
    problems = [x for s in graph.symbols if s.name in given for x in s.problems(given[s.name])]
    if problems:
        raise GraphError(*(f"{who}: {problem}" for problem in problems))
    return most | {**given}


def require_readable(graph: Graph) -> None:
    """Raise GraphError for names that no shape gives, and for sizes that need numbers."""
    problems = []
    dims = [n for i in graph.inputs for n in i.spec.shape if isinstance(n, Dim)]
    readable = {n.line[0].name for n in dims if n.line is not None}  # multiples, plus a number
    for symbol in graph.symbols:
        if symbol.name not in readable:
            problems.append(
                f"{symbol.name} is not the size of any axis of an input, so a call does not define "
                "it; declare an axis by it, or pass a number"
            )
        if symbol.name in {i.name for i in graph.inputs}:
            problems.append(
                f"{symbol.name} names a size and an input; give one of them another name"
            )
    pools = [graph.types[eqn.args[0]] for eqn in graph.eqns if isinstance(eqn.op, Unpage)]
    problems += [
        f"unpage: of pool {pool} only the number of pages may have a name; give numbers"
        for pool in pools
        if not are_numbers(*pool.shape[1:])
    ]
    if problems:
        raise GraphError(*problems)


def many_sizes(graph: Graph) -> bool:
    """True if a plan of the graph meets too many sizes to build each."""
    return any(not symbol.classes for symbol in graph.symbols)
