"""Passes from graph to graph: canonical masks and modifiers, then one op for a whole attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import final

from attrs import evolve, frozen

from attn_graph import masks
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.rewrite import prune, replay
from attn_graph.masks.canonical import canonical_mask


def canonicalise(graph: Graph) -> Graph:
    """Turn alignments into offsets, move masks after modifiers, and join masks in a row."""

    def rule(b: Builder, eqn: Eqn, operands: tuple[Value, ...]) -> tuple[Value, ...] | None:
        if isinstance(eqn.op, ops.Mask):
            return (emit_mask(b, eqn.op.mask, operands),)
        if isinstance(eqn.op, Modifier):
            return (emit_modifier(b, eqn.op, operands),)
        return None

    return replay(graph, rule)


def emit_mask(b: Builder, mask: masks.Mask, operands: tuple[Value, ...]) -> Value:
    """Emit a mask in canonical form, joined with the mask that the scores are already under."""
    s, *given = operands
    canonical = canonical_mask(mask, *s.type.shape[2:])
    if canonical is None:
        return s
    data = dict(zip(mask.needs, given, strict=True))
    under = producer_of(b, s)
    if under is not None and isinstance(under.op, ops.Mask):
        first, *others = (Value(b, i) for i in under.args)
        known = dict(zip(under.op.mask.needs, others, strict=True))
        if all(known[name].index == data[name].index for name in known.keys() & data.keys()):
            joined = canonical_mask(canonical & under.op.mask, *s.type.shape[2:])
            assert joined is not None  # neither part keeps everything
            canonical, s, data = joined, first, data | known
    return s.mask(canonical, **{name: data[name] for name in canonical.needs})


def emit_modifier(b: Builder, op: Modifier, operands: tuple[Value, ...]) -> Value:
    """Emit a modifier with its alignment resolved, before the mask that its scores are under."""
    s, *given = operands
    op = op.resolved(*s.type.shape[2:])
    under = producer_of(b, s)
    if under is None or not isinstance(under.op, ops.Mask):
        return s.then(op, *given)
    first, *data = (Value(b, i) for i in under.args)
    return emit_modifier(b, op, (first, *given)).then(under.op, *data)


def producer_of(b: Builder, value: Value) -> Eqn | None:
    """The equation that a value comes from; None for an input."""
    first = len(b.inputs)
    for eqn in b.eqns:
        if first <= value.index < first + len(eqn.outs):
            return eqn
        first += len(eqn.outs)
    return None


def fuse(graph: Graph) -> Graph:
    """Turn each chain scores -> modifiers -> mask -> softmax -> dropout -> weigh into an Attention.

    A chain stays as it is where its scores or weights are used elsewhere too, except by statistics
    of the scores that softmax reads; where one of its statistics is read before its o is computed;
    and where its dtypes differ: an Attention has one dtype.
    """
    makers = {i: (eqn, outs) for eqn, outs in graph.numbered() for i in outs}
    users, types, taken = count_users(graph), graph.types, row_statistics(graph)
    for scores, statistics in taken.items():
        users[scores] -= len(statistics)
    chains = {}
    for eqn, (o,) in ((e, outs) for e, outs in graph.numbered() if isinstance(e.op, ops.Weigh)):
        chain = chain_of(eqn, makers, users, taken)
        if chain is None or read_before(graph, chain.statistics.values(), o):
            continue
        if len({types[i].dtype for i in chain.operands[:3]}) == 1:
            chains[o] = chain
    return emit_chains(graph, chains) if chains else graph


def read_before(graph: Graph, values: Iterable[int], end: int) -> bool:
    """Whether an equation before the one that gives `end` reads one of the values."""
    read = {i for eqn, outs in graph.numbered() if outs[-1] < end for i in eqn.args}
    return not read.isdisjoint(values)


def row_statistics(graph: Graph) -> Statistics:
    """The statistics that are taken of the scores which each softmax reads."""
    taken: Statistics = {e.args[0]: {} for e in graph.eqns if isinstance(e.op, ops.Softmax)}
    for eqn, outs in graph.numbered():
        for name, kind in ops.STATISTICS.items():
            if isinstance(eqn.op, kind) and eqn.args[0] in taken:
                taken[eqn.args[0]][name] = outs[0]
    return taken


def count_users(graph: Graph) -> dict[int, int]:
    """How often each value is read, outputs included."""
    users: dict[int, int] = {}
    for i in [*(i for eqn in graph.eqns for i in eqn.args), *graph.outputs]:
        users[i] = users.get(i, 0) + 1
    return users


Makers = dict[int, tuple[Eqn, range]]
Statistics = dict[int, dict[str, int]]  # values by name, by the number of the scores


@final
@frozen
class Chain:
    """An attention in single steps: its op, its operands, and its statistics by name."""

    op: Attention
    operands: tuple[int, ...]
    statistics: dict[str, int]


def chain_of(weigh: Eqn, makers: Makers, users: dict[int, int], taken: Statistics) -> Chain | None:
    """The chain that ends in an equation; None where it ends in no chain."""
    at, v = weigh.args
    steps: list[Eqn] = []
    while at in makers and users[at] == 1 and not isinstance(makers[at][0].op, ops.Scores):
        eqn, outs = makers[at]
        if at != outs[0]:
            return None
        steps.append(eqn)
        if not eqn.args:
            return None
        at = eqn.args[0]
    if at not in makers or users[at] != 1 or weigh.op != ops.Weigh():
        return None
    return assemble([makers[at][0], *reversed(steps)], v, makers, taken)


def assemble(steps: list[Eqn], v: int, makers: Makers, taken: Statistics) -> Chain | None:
    """One Attention for the equations of a chain; None where their order is not a chain's."""
    kinds = [next((k for k, t in enumerate(ORDER) if isinstance(e.op, t)), None) for e in steps]
    if (
        None in kinds
        or kinds != sorted(kinds, key=lambda k: k or 0)
        or any(kinds.count(k) > 1 for k in (2, 3, 4))
    ):
        return None
    by_kind = dict(zip(kinds, steps, strict=True))
    first, modifiers = steps[0], [e for e in steps if isinstance(e.op, Modifier)]
    if not isinstance(first.op, ops.Scores) or 3 not in by_kind:
        return None
    mask, softmax, dropout = by_kind.get(2), by_kind[3], by_kind.get(4)
    dropout = None if dropout and dropout.op == ops.Dropout(0.0) else dropout
    op = Attention(
        first.op.scale,
        tuple(e.op for e in modifiers if isinstance(e.op, Modifier)),
        mask.op.mask if mask and isinstance(mask.op, ops.Mask) else None,
        len(softmax.args) > 1,
        dropout.op.rate if dropout and isinstance(dropout.op, ops.Dropout) else 0.0,
        ("lse", *taken[softmax.args[0]]),
    )
    tails = [e for e in (*modifiers, mask, softmax, dropout) if e is not None]
    operands = (*first.args, v, *(i for e in tails for i in e.args[1:]))
    lse = next(outs[1] for e, outs in makers.values() if e is softmax)
    return Chain(op, operands, {"lse": lse, **taken[softmax.args[0]]})


ORDER = (ops.Scores, Modifier, ops.Mask, ops.Softmax, ops.Dropout)


def emit_chains(graph: Graph, chains: dict[int, Chain]) -> Graph:
    """The graph with each chain's results computed by its Attention."""
    b = Builder(trusts=True)
    values = {n: b.input(i.name, i.spec) for n, i in enumerate(graph.inputs)}
    live = values_read(graph, chains)
    for eqn, outs in graph.numbered():
        if outs[0] in chains:
            chain = chains[outs[0]]
            results = b.emit(chain.op, *(values[i] for i in chain.operands))
            named = {"o": outs[0], **chain.statistics}
            values |= {named[n]: x for n, x in zip(chain.op.names, results, strict=True)}
        elif live & set(outs):
            values.update(zip(outs, b.emit(eqn.op, *(values[i] for i in eqn.args)), strict=True))
    return b.graph(*(values[i] for i in graph.outputs))


def values_read(graph: Graph, chains: dict[int, Chain]) -> set[int]:
    """The values that are read once each chain is one equation, in the place of its last one."""
    live = set(graph.outputs)
    stats = {i for chain in chains.values() for i in chain.statistics.values()}
    for eqn, outs in reversed([*graph.numbered()]):
        if outs[0] in chains:
            live |= set(chains[outs[0]].operands)
        elif live & set(outs) - stats:
            live |= set(eqn.args)
    return live - stats


def narrow(graph: Graph) -> Graph:
    """Let gradients of attention compute only the results that are read."""
    users = count_users(graph)
    b = Builder(trusts=True)
    values = {n: b.input(i.name, i.spec) for n, i in enumerate(graph.inputs)}
    for eqn, outs in graph.numbered():
        op = eqn.op
        if isinstance(op, AttentionGrad):
            live = iter([i in users for i in outs])
            op = evolve(op, wants=tuple(wanted and next(live) for wanted in op.wants))
        results = iter(b.emit(op, *(values[i] for i in eqn.args)))
        values |= {i: next(results) for i in outs if op is eqn.op or i in users}
    return b.graph(*(values[i] for i in graph.outputs))


PASSES: tuple[Callable[[Graph], Graph], ...] = (prune, canonicalise, fuse)


def simplify(graph: Graph) -> Graph:
    """Run all passes in their order."""
    return reduce(lambda g, run: run(g), PASSES, graph)
