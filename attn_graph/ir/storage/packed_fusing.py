"""A pass: an attention and the unpacking, scaling and packing around it become a Packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import final

from attrs import frozen

from attn_graph.ir.attention import Attention
from attn_graph.ir.builder import Builder, Value
from attn_graph.ir.graph import Eqn, Graph
from attn_graph.ir.rewrite import prune
from attn_graph.ir.storage.packed import LEAVES, LENGTHS, Packed, and_parts, extent_of
from attn_graph.ir.storage.packing import Pack, Unpack, row_count
from attn_graph.ir.storage.paging import Unpage
from attn_graph.ir.storage.scaling import Dequantise

READERS = Unpack, Unpage


@final
@frozen
class Side:
    """The sources of q, or of k and v, by number of the value. op: reads them.

    where: starts and lengths; or the table of pages, and lengths if it has them.
    """

    tensors: tuple[int, ...]
    where: tuple[int, ...]
    op: Unpack | Unpage

    @property
    def most(self) -> int | None:
        """The most rows of a sequence; None for pages."""
        return self.op.length if isinstance(self.op, Unpack) else None


@final
@frozen
class Absorbed:
    """A Packed and its operands. results: from numbers of values to results of the op."""

    op: Packed
    operands: tuple[int, ...]
    results: dict[int, int]


def fuse_packed(graph: Graph) -> Graph:
    """Turn each attention between Unpack or Unpage and Pack, or after Dequantise, into one Packed.

    It stays as is if k and v have different layouts, if a result is also read unpacked or packed
    differently, and if the mask does not end the sequences by the same lengths.
    """
    if not any(isinstance(eqn.op, (*READERS, Dequantise)) for eqn in graph.eqns):
        return graph
    around = Neighbours(graph)
    tries = {outs[0]: around.absorb(eqn, outs) for eqn, outs in graph.numbered}
    absorbed = {n: each for n, each in tries.items() if each is not None}
    return replace_absorbed(graph, absorbed) if absorbed else graph


def replace_absorbed(graph: Graph, absorbed: Mapping[int, Absorbed]) -> Graph:
    """The graph with a Packed for each attention in `absorbed`, by its first result."""
    b = Builder(True, [*graph.inputs], types=[*graph.types[: len(graph.inputs)]])
    values = {n: Value(b, n) for n in range(len(graph.inputs))}
    for eqn, outs in graph.numbered:
        if outs[0] in absorbed:
            each = absorbed[outs[0]]
            made = b.emit(each.op, *(values[i] for i in each.operands))
            values |= {i: made[place] for i, place in each.results.items()}
        elif outs[0] not in values:
            made = b.add(eqn.op, [values[i] for i in eqn.args], eqn.outs)
            values |= dict(zip(outs, made, strict=True))
    return prune(b.graph(*(values[i] for i in graph.outputs), layouts=graph.layouts))


@final
@frozen(eq=False)
class Neighbours:
    """The equations that give and read each value of a graph."""

    graph: Graph

    @cached_property
    def makers(self) -> dict[int, Eqn]:
        return {i: eqn for eqn, outs in self.graph.numbered for i in outs}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The first results of the equations that read a value; -1 for an output."""
        readers: dict[int, list[int]] = defaultdict(list, {i: [-1] for i in self.graph.outputs})
        for eqn, outs in self.graph.numbered:
            for i in eqn.args:
                readers[i].append(outs[0])
        return readers

    def absorb(self, eqn: Eqn, outs: range) -> Absorbed | None:
        """An attention with its surroundings; None if they can't be one op."""
        node: Attention | None = eqn.op.forward
        if node is None or eqn.op.packed or node.keeps:
            return None
        q, k, v, *rest = eqn.args
        rows, keys = self.side(eqn, "rows", q), self.side(eqn, "keys", k, v)
        results = dict(zip(outs, range(len(outs)), strict=True))
        packs = results if rows is None else self.packs(node, results, rows)
        starts = [side.where[0] for side in (rows, keys) if side]
        query, tensors = rows.tensors[0] if rows else q, keys.tensors if keys else (k, v)
        tensors, scales = self.scaled(query, tensors)
        if not (rows or keys or scales) or packs is None:
            return None
        pages = keys.op if keys and isinstance(keys.op, Unpage) else None
        finite = pages is not None and pages.finite
        most = rows and rows.most, keys and keys.most
        op = Packed(node, *most, pages is not None, bool(scales), finite)
        return Absorbed(op, (query, *tensors, *rest, *scales, *starts), packs)

    def scaled(self, q: int, tensors: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """k and v before both are dequantised like q, and their scales; themselves without."""
        made = [self.makers.get(i) for i in tensors]
        args = [x.args for x in made if x is not None and isinstance(x.op, Dequantise)]
        if [x[2] for x in args] != [q, q]:
            return tensors, ()
        return tuple(x[0] for x in args), tuple(x[1] for x in args)

    def side(self, eqn: Eqn, name: str, *operands: int) -> Side | None:
        """One side of an attention; None if it is not unpacked, or its mask goes beyond."""
        made = [self.makers.get(i) for i in operands]
        reads = [x for x in made if x is not None and isinstance(x.op, READERS)]
        alike = {(x.op, *x.args[1:], extent_of(self.graph.types[x.args[0]].shape)) for x in reads}
        if len(reads) < len(made) or len(alike) > 1:
            return None
        op, (_, *where) = reads[0].op, reads[0].args
        assert isinstance(op, READERS)
        if where[1:] and where[1] != self.end(eqn, name):
            return None
        return Side(tuple(x.args[0] for x in reads), tuple(where), op)

    def end(self, eqn: Eqn, name: str) -> int | None:
        """The lengths by which the mask ends a side; None if it does not."""
        node: Attention = eqn.op.attention
        data = node.split(eqn.args).mask
        return data[LENGTHS[name]] if LEAVES[name] in and_parts(node.mask) else None

    def packs(self, op: Attention, results: Mapping[int, int], rows: Side) -> dict[int, int] | None:
        """The packs of an attention's results; None if one has another reader."""
        total, packs = row_count(self.graph.types[rows.tensors[0]].shape), dict[int, int]()
        for i, place in results.items():
            due = Pack(total, op.names[place] in op.statistics)
            for reader in self.readers[i]:
                eqn = self.makers.get(reader)
                if eqn is None or eqn.op != due or eqn.args[1:] != rows.where:
                    return None
                packs[reader] = place
        return packs
