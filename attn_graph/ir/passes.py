"""Passes from graph to graph: canonical masks and modifiers, then one op for a whole attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, TypeVar, final

from attrs import define, evolve, frozen

from attn_graph import masks
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph, Op
from attn_graph.ir.modifiers import Modifier
from attn_graph.ir.rewrite import Copy, replay
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.packed_fusing import fuse_packed
from attn_graph.ir.terms.addends import Factor
from attn_graph.ir.transforms.tangents import AttentionJvp
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
    """Emit a mask in canonical form, joined with an earlier mask of the scores."""
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
    return s.then(ops.Mask(canonical), *(data[name] for name in canonical.needs))


def emit_modifier(b: Builder, op: Modifier, operands: tuple[Value, ...]) -> Value:
    """Emit a modifier with its alignment resolved, before an earlier mask of its scores; a number
    that multiplies q k^T joins its scale."""
    s, *given = operands
    op = op.resolved(*s.type.shape[2:])
    under = producer_of(b, s)
    if under is not None and isinstance(under.op, ops.Scores) and isinstance(op, Factor):
        scale = under.op.scale * (math.nan if op.number is None else op.number)
        if math.isfinite(scale):
            q, k = (Value(b, i) for i in under.args)
            return q.then(ops.Scores(scale), k)
    if under is None or not isinstance(under.op, ops.Mask):
        return s.then(op, *given)
    first, *data = (Value(b, i) for i in under.args)
    return emit_modifier(b, op, (first, *given)).then(under.op, *data)


def producer_of(b: Builder, value: Value) -> Eqn | None:
    first = len(b.inputs)
    for eqn in b.eqns:
        if first <= value.index < first + len(eqn.outs):
            return eqn
        first += len(eqn.outs)
    return None


def fuse(graph: Graph) -> Graph:
    """Turn each chain scores -> modifiers -> mask -> softmax -> dropout -> weigh into an Attention.

    A chain stays as is if its scores or weights have other users, except statistics of the scores
    that softmax reads; if one of its statistics is read before its o is computed; and if its dtypes
    differ, since an Attention has one dtype.
    """
    makers = {outs[0]: eqn for eqn, outs in graph.numbered}
    users, taken = count_users(graph), row_statistics(graph)
    for scores, statistics in taken.items():
        users[scores] -= len(statistics)
    chains = {}
    for eqn, (o,) in ((e, outs) for e, outs in graph.numbered if isinstance(e.op, ops.Weigh)):
        chain = chain_of(eqn, Climb(makers, users, eqn.args[0]), taken)
        if chain is None or read_before(graph, chain.statistics.values(), o):
            continue
        if len({graph.types[i].dtype for i in chain.operands[:3]}) == 1:
            chains[o] = chain
    return replace_chains(graph, chains) if chains else graph


def read_before(graph: Graph, values: Iterable[int], end: int) -> bool:
    """True if an equation before the one that gives `end` reads one of the values."""
    read = {i for eqn, outs in graph.numbered if outs[-1] < end for i in eqn.args}
    return not read.isdisjoint(values)


def row_statistics(graph: Graph) -> Statistics:
    taken: Statistics = {e.args[0]: {} for e in graph.eqns if isinstance(e.op, ops.Softmax)}
    for eqn, outs in graph.numbered:
        for name, kind in ops.STATISTICS.items():
            if isinstance(eqn.op, kind) and eqn.args[0] in taken:
                taken[eqn.args[0]][name] = outs[0]
    return taken


def count_users(graph: Graph) -> Counter[int]:
    return Counter([*(i for eqn in graph.eqns for i in eqn.args), *graph.outputs])


Statistics = dict[int, dict[str, int]]  # values by name, by the number of the scores
Kind = TypeVar("Kind", bound=Op)


@final
@frozen
class Link(Generic[Kind]):
    op: Kind
    args: tuple[int, ...]


@final
@define(eq=False)
class Climb:
    """Climbs a chain from the value `at`, through equations whose first result is read once."""

    makers: Mapping[int, Eqn]  # by the first result
    users: Mapping[int, int]
    at: int

    def step(self, kind: type[Kind]) -> Link[Kind] | None:
        """The equation of `at` if its op is of this kind; `at` becomes its first operand."""
        eqn = self.makers.get(self.at)
        if eqn is None or not isinstance(eqn.op, kind) or self.users[self.at] != 1:
            return None
        self.at = eqn.args[0]
        return Link(eqn.op, eqn.args)

    def steps(self, kind: type[Kind]) -> list[Link[Kind]]:
        links: list[Link[Kind]] = []
        while link := self.step(kind):
            links.insert(0, link)
        return links


@final
@frozen
class Chain:
    op: Attention
    operands: tuple[int, ...]
    statistics: dict[str, int]


def chain_of(weigh: Eqn, climb: Climb, taken: Statistics) -> Chain | None:
    dropout = climb.step(ops.Dropout)
    p, softmax = climb.at, climb.step(ops.Softmax)
    s, mask = climb.at, climb.step(ops.Mask)
    modifiers = climb.steps(Modifier)
    scores = climb.step(ops.Scores)
    if softmax is None or scores is None or weigh.op != ops.Weigh():
        return None
    drops = dropout is not None and dropout.op.rate > 0
    op = Attention(
        scores.op.scale,
        tuple(link.op for link in modifiers),
        mask.op.mask if mask else None,
        softmax.op.sinks,
        dropout.op.rate if dropout and drops else 0.0,
        ("lse", *taken[s]),
        dropout.op.origin if dropout and drops else (),
    )
    tails = [link for link in (*modifiers, mask, softmax, dropout if drops else None) if link]
    operands = (*scores.args, weigh.args[1], *(i for link in tails for i in link.args[1:]))
    return Chain(op, operands, {"lse": p + 1, **taken[s]})


def replace_chains(graph: Graph, chains: Mapping[int, Chain]) -> Graph:
    copy, live = Copy(graph), values_read(graph, chains)
    for eqn, outs in graph.numbered:
        if outs[0] in chains:
            chain = chains[outs[0]]
            results = {"o": outs[0], **chain.statistics}
            copy.add(chain.op, chain.operands, [results[name] for name in chain.op.names])
        elif not live.isdisjoint(outs):
            copy.add(eqn.op, eqn.args, outs)
    return copy.finish()


def values_read(graph: Graph, chains: Mapping[int, Chain]) -> set[int]:
    """The values read once each chain is one equation, in the place of its last one."""
    live = set(graph.outputs)
    stats = {i for chain in chains.values() for i in chain.statistics.values()}
    for eqn, outs in reversed(graph.numbered):
        if outs[0] in chains:
            live |= set(chains[outs[0]].operands)
        elif live & set(outs) - stats:
            live |= set(eqn.args)
    return live - stats


def narrow(graph: Graph) -> Graph:
    """Let gradients of attention compute only the results that are read."""
    users, copy = count_users(graph), Copy(graph)
    for eqn, outs in graph.numbered:
        if eqn.op.grad is not None:
            op = select_results(eqn.op, [i in users for i in outs])
            copy.add(op, eqn.args, [i for i in outs if i in users])
        else:
            copy.add(eqn.op, eqn.args, outs)
    return copy.finish()


def select_results(op: Op, read: Sequence[bool]) -> Any:  # Any: an op of the same class
    """A gradient, or the tangent of one, with only the results that are read."""
    match op:
        case Packed(op=inner):
            return evolve(op, op=select_results(inner, read))
        case AttentionJvp(of=AttentionGrad() as grad):
            return evolve(op, of=select_results(grad, read))
        case AttentionGrad():
            live = iter(read)
            return evolve(op, wants=tuple(wanted and next(live) for wanted in op.wants))
    return op


def keep_weights(graph: Graph) -> Graph | None:
    """A graph of one attention with kept weights, if o is its only output; else None."""
    if len(graph.eqns) != 1 or graph.outputs != (len(graph.inputs),):
        return None
    (eqn,) = graph.eqns
    node: Attention | None = eqn.op.forward
    if node is None or eqn.op.packed or not node.is_keepable:
        return None
    op = evolve(node, keeps=True)
    outs = op.infer(*(graph.types[i] for i in eqn.args))
    return evolve(graph, eqns=(Eqn(op, eqn.args, outs),))


def keeps_weights(graph: Graph) -> bool:
    """True if an attention keeps its weights, or a gradient reads kept ones."""
    return any(eqn.op.attention is not None and eqn.op.attention.keeps for eqn in graph.eqns)


PASSES: tuple[Callable[[Graph], Graph], ...] = (canonicalise, fuse, fuse_packed)


def simplify(graph: Graph) -> Graph:
    return reduce(lambda g, run: run(g), PASSES, graph)
