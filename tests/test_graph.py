"""Graphs are values: equal when they say the same, different when any one thing is."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch
from hypothesis import given

import attn_graph as ag
from attn_graph import masks as m
from attn_graph.fused import Attention, AttentionGrad
from attn_graph.ir import Input
from attn_graph.modifiers import MODIFIERS, Alibi
from attn_graph.passes import simplify
from attn_graph.spec import DTYPES, ValueType
from tests.strategies import graphs

Q = ag.TensorSpec((2, 4, 6, 8), torch.float16, layout="bshd")
K = ag.TensorSpec((2, 2, 6, 8), torch.float16)


def key(graph: ag.Graph) -> str:
    """What a graph is called on disk."""
    return hashlib.sha256(str(graph).encode()).hexdigest()


# Every field, found by introspection, so that a new one is tested without an edit here.


def changes(value: object) -> Iterator[object]:
    """Values that differ from this one in a single thing, wherever in it that lies."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield type(value)(value + 1)
        case str():
            yield from other_words(value)
        case torch.dtype():
            yield next(d for d in DTYPES.values() if d != value and d.is_floating_point)
        case None:
            yield from (1, "bottom_right", m.Keep())
        case tuple():
            yield from changed_tuples(value)
        case _ if attrs.has(type(value)):
            yield from changed_fields(value)


def other_words(word: str) -> Iterator[str]:
    """A name may be any other one; a word that has a meaning only another that has."""
    words = {"top_left": "bottom_right", "bottom_right": "top_left", **dict(zip(*2 * [DTYPES])),
             "kv_lengths": "q_lengths", "q_lengths": "kv_lengths"}  # fmt: skip
    yield words.get(word, word + "x") if word not in DTYPES else "f64"


def changed_tuples(value: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    for place, part in enumerate(value):
        yield value[:place] + value[place + 1 :]
        yield from ((*value[:place], other, *value[place + 1 :]) for other in changes(part))


def changed_fields(value: object) -> Iterator[object]:
    """A copy with one field changed, made without the constructor, which might refuse it."""
    for field in attrs.fields(type(value)):  # type: ignore[arg-type]  # asked: attrs.has
        for other in changes(getattr(value, field.name)):
            if type(other) is not type(value) or other != value:
                yield with_field(value, field.name, other)


def with_field(value: object, name: str, other: object) -> object:
    copy = object.__new__(type(value))
    for field in attrs.fields(type(value)):  # type: ignore[arg-type]  # as above
        object.__setattr__(copy, field.name, getattr(value, field.name))
    if isinstance(value, ag.Graph):  # its hash is kept, and is that of the other one
        object.__setattr__(copy, "_attrs_cached_hash", None)
    object.__setattr__(copy, name, other)
    return copy
