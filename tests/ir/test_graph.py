"""Graphs are values: equal when they say the same, different when any one thing is."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from itertools import chain
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.ir import ops
from attn_graph.ir.attention import Attention, AttentionGrad
from attn_graph.ir.graph import Input, Op
from attn_graph.ir.modifiers import Alibi, Back, Bend, Bias, Collect, SoftCap, Spread
from attn_graph.ir.passes import simplify
from attn_graph.ir.storage import views
from attn_graph.ir.storage.packed import Packed
from attn_graph.ir.storage.packing import Lengths, Pack, Unpack
from attn_graph.ir.storage.paging import SumPages, Unpage
from attn_graph.ir.storage.scaling import Dequantise, Quantise
from attn_graph.ir.transforms import parse
from attn_graph.ir.transforms.gradient_ops import (
    SinkGrad,
    SinkGradJvp,
    SoftmaxGrad,
    SoftmaxGradJvp,
    SoftmaxJvp,
    Unmasked,
    WeighT,
)
from attn_graph.ir.transforms.sums import Add, Zeros
from attn_graph.ir.transforms.tangents import AttentionJvp
from attn_graph.printing.text import show_value
from attn_graph.spec import DTYPES
from attn_graph.testing.strategies import graphs

SPEC = ag.TensorSpec((2, 4, 6, 8), torch.float16, layout="bshd")
GRAPH = ag.attention(
    SPEC,
    ag.TensorSpec((2, 2, 6, 8), torch.float16),
    ag.TensorSpec((2, 2, 6, 8), torch.float16),
    mask=m.Causal("bottom_right") & m.Window(4)
    | ~m.Keep("local")
    | m.Prefix(3)
    | m.KeepBlocks(2, 3),
    soft_cap=30.0,
    bias=ag.TensorSpec((1, 4, 6, 6), torch.float16),
    alibi=ag.TensorSpec((2, 4), torch.float32),
    align="bottom_right",
    kv_lengths=ag.TensorSpec((2,), torch.int32),
    segments=(ag.TensorSpec((2, 6), torch.int64), ag.TensorSpec((2, 6), torch.int64)),
    sinks=ag.TensorSpec((4,), torch.float32),
    dropout=0.1,
    stats=True,
    local=ag.TensorSpec((2, 1, 6, 6), torch.bool),
    keep_blocks=ag.TensorSpec((1, 4, 3, 2), torch.bool),
)


def key(graph: ag.Graph) -> str:
    """What a graph is called on disk."""
    return hashlib.sha256(str(graph).encode()).hexdigest()


# Changes of one thing, found by introspection: a new field is tested without an edit here.


def changes(value: object) -> Iterator[object]:
    """Values that differ from this one in a single thing, wherever in it that lies."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value - 1 if value > 0 else value + 1
        case str():
            yield other_word(value)
        case torch.dtype():
            yield next(d for d in DTYPES.values() if d != value)
        case None:
            yield from (1, "bottom_right", m.Keep("other"))
        case tuple():
            yield from changed_parts(value)
        case _:
            yield from changed_fields(value)


def other_word(word: str) -> str:
    """Another word that may stand where this one does."""
    for words in (("top_left", "bottom_right"), m.LENGTHS, tuple(DTYPES)):
        if word in words:
            return next(other for other in words if other != word)
    return f"{word}x"


def changed_parts(value: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    """Each part changed; and, where nothing counts the parts, each left out."""
    for place, part in enumerate(value):
        before, after = value[:place], value[place + 1 :]
        yield from ((*before, other, *after) for other in changes(part))
        if isinstance(part, str | Op):
            yield before + after


def changed_fields(value: Any) -> Iterator[object]:  # Any: of an attrs class
    assert attrs.has(type(value)), f"a field holds {value!r}: say here how to change it"
    for field in said_fields(type(value)):
        for other in changes(getattr(value, field.name)):
            if field.name == "stats" and other == ():
                continue  # an op has as many results as names
            yield with_field(value, field.name, other)


def said_fields(kind: type[Any]) -> list[attrs.Attribute[Any]]:  # Any: of an attrs class
    """The fields that one says; others follow from them."""
    return [field for field in attrs.fields(kind) if field.init]


def with_field(value: Any, name: str, other: object) -> object:  # Any: of an attrs class
    """A copy with another field, not asked whether it means something."""
    copy = object.__new__(type(value))
    fields = {f.name: getattr(value, f.name) for f in attrs.fields(type(value))} | {name: other}
    for field, holds in fields.items():
        object.__setattr__(copy, field, holds)
    if isinstance(value, ag.Graph):
        object.__setattr__(copy, "_attrs_cached_hash", None)
    return copy


def sites(value: object) -> Iterator[tuple[type, str]]:
    """Every (class, field) that lies in a value."""
    if isinstance(value, tuple):
        yield from chain.from_iterable(map(sites, value))
    elif attrs.has(type(value)):
        for field in said_fields(type(value)):
            yield type(value), field.name
            yield from sites(getattr(value, field.name))


@pytest.mark.parametrize("graph", [GRAPH, simplify(GRAPH)], ids=["steps", "fused"])
def test_changing_any_one_thing_of_a_graph_makes_it_another_graph(graph: ag.Graph) -> None:
    changed = [other for other in changes(graph) if isinstance(other, ag.Graph)]
    assert len(changed) > 100
    for other in changed:
        assert other != graph, f"equal, and one is\n{other}"
        assert hash(other) != hash(graph)
        assert key(other) != key(graph), f"printed alike: {other.inputs}"


def test_the_graphs_whose_parts_are_changed_have_every_part() -> None:
    here = {*sites(GRAPH), *sites(simplify(GRAPH))}
    kinds: tuple[type, ...] = (
        *(ag.Graph, Input, ag.TensorSpec, Attention, *m.LEAVES, m.And, m.Or, m.Not),
        *(ops.Scores, ops.Mask, ops.Softmax, ops.Dropout, ops.Weigh, SoftCap, Bias, Alibi),
    )
    assert not {(kind, field.name) for kind in kinds for field in said_fields(kind)} - here


ATTENTION = Attention(0.5, (SoftCap(3.0),), m.Causal(), True, 0.5)
EXAMPLES = (
    *(m.Causal(), m.Window(4, 1), m.Prefix(3), m.Keep(), m.KeyLengths(), m.QueryLengths()),
    *(m.KeepBlocks(2, 3), m.SameSegment(), m.Band(1, 2, ("kv_lengths",)), m.Causal() & m.Keep()),
    *(m.Causal() | m.Keep(), ~m.Causal("top_left")),
    *(SoftCap(3.0), Bias(), Alibi(False, "top_left", ("q_lengths",), True)),
    ag.RelativeBias(5, "top_left", ("q_lengths",)),
    ag.Addend("real(slope) * real(j - i)", (("slope", "h"),)),
    ag.Factor("real(slope) + real(j)", (("slope", "h"),)),
    *(Back(SoftCap(3.0)), Collect(Alibi()), ops.Scores(), ops.Mask(m.Causal()), ops.Softmax()),
    *(
        ops.MaxScores(),
        ops.Dropout(0.5),
        ops.Dropout(0.5, (0, 1, 2, 4, 8)),
        ops.Weigh(),
        WeighT(),
        Unmasked(),
        SoftmaxGrad(),
    ),
    *(SinkGrad(), Add(), Zeros((2, 3), "f32"), ATTENTION),
    *(SoftmaxJvp(), SoftmaxGradJvp(), SinkGradJvp(), Bend(SoftCap(3.0)), Spread(Bias(), ("bias",))),
    AttentionGrad(ATTENTION, (True,) * 6),
    AttentionJvp(ATTENTION, (True,) * 4 + (False,) * 2),
    AttentionJvp(AttentionGrad(ATTENTION, (True,) * 6), (True,) * 4 + (False,) * 2),
    Attention(0.5, mask=m.Causal(), keeps=True),
    AttentionGrad(Attention(0.5, mask=m.Causal(), keeps=True), (True,) * 3),
    *(Lengths(), Unpack(5), Pack(7), Packed(Attention(mask=m.KeyLengths()), keys=4)),
    *(Unpage(), SumPages(5, 4), Packed(Attention(), paged=True)),
    *(Dequantise(), Quantise(), Packed(Attention(), scaled=True)),
    *(views.Fold(1, 0, 3, True), views.Unfold(1, 0, 3, True), views.Repeat(0, 3)),
    *(views.SumRepeats(0, 3), views.Leading(4), views.Widen(8)),
)


def test_there_is_an_example_of_every_op_and_leaf() -> None:
    assert {*map(type, EXAMPLES)} == {*parse.OPS, *m.LEAVES, m.And, m.Or, m.Not}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda x: type(x).__name__)
def test_changing_any_one_field_makes_another_value(example: object) -> None:
    told = show_value(example)
    for other in changes(example):
        assert other != example
        assert hash(other) != hash(example)
        assert show_value(other) != told


def test_the_kinds_of_ops_and_leaves_are_no_two_alike() -> None:
    assert len(set(EXAMPLES)) == len({*map(show_value, EXAMPLES)}) == len(EXAMPLES)


@given(graphs())
def test_a_graph_survives_pickling(graph: ag.Graph) -> None:
    hash(graph)
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    assert hash(copy) == hash(graph)
    assert key(copy) == key(graph)


# The same attention, said in another way


def said_step_by_step(graph: ag.Graph, *, masked_first: bool) -> ag.Graph:
    """The steps of a graph, said with the methods of values; masks before or after modifiers."""

    def attend(**x: ag.Value) -> tuple[ag.Value, ...]:
        names = [i.name for i in graph.inputs]
        values: dict[int, ag.Value] = {n: x[name] for n, name in enumerate(names)}
        steps = {type(e.op): [values[i] for i in e.args if i in values] for e in graph.eqns}
        found: dict[type, Any] = {type(e.op): e.op for e in graph.eqns}  # Any: ops, by their class
        s = ag.scores(x["q"], x["k"], scale=found[ops.Scores].scale)
        s = under_masks(s, found.get(ops.Mask), x) if masked_first else s
        for kind in (SoftCap, Bias, Alibi, ag.RelativeBias):
            if kind in found:
                s = changed(s, found[kind], steps[kind], x)
        s = s if masked_first else under_masks(s, found.get(ops.Mask), x)
        p, lse = s.softmax(*steps[ops.Softmax])
        largest = (s.max_scores(),) if ops.MaxScores in found else ()
        if ops.Dropout in found:
            p = p.dropout(found[ops.Dropout].rate, x["seed"], x["offset"])
        o, stats = p.weigh(x["v"]), (*largest, lse)
        return (o, *stats[: len(graph.outputs) - 1])

    return ag.graph(attend, **{i.name: i.spec for i in graph.inputs})


def under_masks(s: ag.Value, op: Op | None, x: dict[str, ag.Value]) -> ag.Value:
    """Parts of a conjunction one by one, unless lengths in one part move diagonals in another."""
    if not isinstance(op, ops.Mask):
        return s
    apart = isinstance(op.mask, m.And) and not m.ragged_in(op.mask.needs)
    for part in op.mask.parts if isinstance(op.mask, m.And) and apart else (op.mask,):
        s = s.mask(part, **{name: x[name] for name in part.needs})
    return s


def changed(s: ag.Value, op: Op, given: list[ag.Value], x: dict[str, ag.Value]) -> ag.Value:
    match op:
        case SoftCap(cap):
            return s.soft_cap(cap)
        case Alibi():
            lengths = {name: x[name] for name in op.ragged}
            return s.alibi(None if op.default else x["alibi"], align=op.align, **lengths)
        case ag.RelativeBias():
            return s.then(op, *(x[name] for name in op.needs))
        case _:
            return s.bias(x["bias"])


@given(graphs())
def test_one_call_and_single_steps_make_one_graph(graph: ag.Graph) -> None:
    for masked_first in (False, True):
        assert simplify(said_step_by_step(graph, masked_first=masked_first)) == simplify(graph)


def test_lengths_segments_and_flags_narrow_the_mask() -> None:
    x, lengths, numbers, flags = (
        ag.TensorSpec((1, 2, 4, 4), torch.float32),
        ag.TensorSpec((1,), torch.int64),
        ag.TensorSpec((1, 4), torch.int64),
        ag.TensorSpec((1, 1, 4, 4), torch.bool),
    )
    for leaf, more in (
        (m.KeyLengths(), {"kv_lengths": lengths}),
        (m.QueryLengths(), {"q_lengths": lengths}),
        (m.SameSegment(), {"segments": (numbers, numbers)}),
        (m.Keep(), {"keep": flags}),
    ):
        options: dict[str, Any] = more
        whole = ag.attention(x, x, x, mask=m.Causal() & leaf, **options)
        parts = ag.attention(x, x, x, mask=m.Causal(), **options)
        assert whole == parts


@given(graphs())
def test_simplifying_again_changes_nothing(graph: ag.Graph) -> None:
    assert simplify(simplify(graph)) == simplify(graph)


def test_alignments_that_mean_the_same_make_one_graph() -> None:
    x = ag.TensorSpec((1, 2, 4, 4), torch.float32)
    said = [
        ag.attention(x, x, x, mask=m.Causal(align), align=above, alibi=True)
        for align in ("top_left", "bottom_right", None)
        for above in ("top_left", "bottom_right", None)
    ]
    assert len({*map(simplify, said)}) == 1


def test_a_graph_knows_the_types_of_its_values() -> None:
    types = GRAPH.types
    assert [*map(str, GRAPH.output_types)] == ["f16[2, 4, 6, 8]", "f32[2, 4, 6]"]
    for eqn, outs in GRAPH.numbered:
        assert eqn.outs == tuple(types[i] for i in outs)
        assert eqn.op.infer(*(types[i] for i in eqn.args)) == eqn.outs
