"""The axes of masks and modifiers, and their memory while they are evaluated at places.

Each leaf of a mask gives booleans of its own axes, and these stay alive while the next leaf is
evaluated. Leaves unknown to the library count as `POSITIONS` bytes for each place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import final

import torch
from attrs import frozen

from attn_graph.ir.modifiers import UNPLACED, Alibi, Modifier
from attn_graph.ir.terms.relative import RelativeBias
from attn_graph.lowering.codegen.device_code import Tracer
from attn_graph.lowering.problem import Problem
from attn_graph.masks import (
    Keep,
    KeepBlocks,
    KeyLengths,
    Mask,
    Prefix,
    QueryLengths,
    SameSegment,
)
from attn_graph.masks.canonical import is_ours
from attn_graph.masks.joins import Not, Pair
from attn_graph.masks.leaves import Band
from attn_graph.masks.places import Untraceable
from attn_graph.spec import TensorSpec

WORD = torch.int64.itemsize  # of a position
# Bytes a place held by a user's mask or modifier while it is evaluated: three vectors of words.
POSITIONS = 3 * WORD
LEAVES: dict[type[Mask], str] = {  # axes of the booleans, made of vectors of positions
    KeyLengths: "bj", QueryLengths: "bi", Prefix: "j", SameSegment: "bij",
}  # fmt: skip
Specs = Mapping[str, TensorSpec]
Tensors = Mapping[str, torch.Tensor]


@final
@frozen
class Extent:
    """How many places of a block there are along b, h, i and j."""

    b: int
    h: int
    i: int
    j: int

    def count(self, axes: str) -> int:
        return prod(getattr(self, axis) for axis in axes)


@final
@frozen
class Asked:
    """Memory of an evaluation. axes: of the booleans; made: their bytes, 0 of a view; most: bytes
    alive at one time, these included."""

    axes: str
    made: int
    most: int


def ask_mask(mask: Mask, data: Specs, at: Extent) -> Asked:
    """Memory of a mask at the places of a block. data: its tensors, by name."""
    match mask:
        case Pair(a=a, b=b):
            first, second = ask_mask(a, data, at), ask_mask(b, data, at)
            axes = "".join(x for x in "bhij" if x in first.axes + second.axes)
            made = at.count(axes)
            beside = max(second.most, second.made + made)
            return Asked(axes, made, max(first.most, first.made + beside))
        case Not(a=a):
            asked = ask_mask(a, data, at)
            made = at.count(asked.axes)
            return Asked(asked.axes, made, max(asked.most, asked.made + made))
        case Band(ragged=ragged):
            axes = "bij" if ragged else "ij"
            made = at.count(axes)  # two differences of positions, then the last and three booleans
            words = WORD * (at.count("ij") + made)
            return Asked(axes, made, max(words, (WORD + 3) * made))
        case Keep(name=name):
            return Asked(axes_read("bhij", data[name].shape), 0, 0)
        case KeepBlocks(name=name):  # blocks of positions; selected rows; then selected keys
            axes, table = axes_read("bhij", data[name].shape), data[name].shape
            made = at.count(axes)
            return Asked(axes, made, 2 * (made + prod(table)) + 2 * WORD * (at.i + at.j))
        case _:
            axes = LEAVES.get(type(mask), "bhij")
            made = at.count(axes)
            return Asked(axes, made, made if type(mask) in LEAVES else POSITIONS * made)


def axes_read(axes: str, shape: tuple[int, ...]) -> str:
    """The axes along which a tensor of this shape has more than one number."""
    return "".join(x for x, n in zip(axes, shape, strict=True) if n > 1)


def ask_modifier(modifier: Modifier, data: Specs, at: Extent, wide: int) -> int:
    """Bytes of a step beside the scores. wide: bytes of a score."""
    match modifier:
        case _ if isinstance(modifier, UNPLACED):  # tensors are added as they are, or as scores are
            narrow = {n: x.shape for n, x in data.items() if x.dtype.itemsize < wide}
            needs = modifier.needs
            return wide * sum(at.count(axes_read(needs[n].axes, x)) for n, x in narrow.items())
        case Alibi(ragged=ragged):  # distances before and behind `abs`
            return 2 * WORD * at.count("bij" if ragged else "ij")
        case RelativeBias(places=True):  # columns, then what is read there
            columns, read = WORD * at.count("ij"), wide * at.count("hij")
            return columns + max(columns, read)
        case RelativeBias(ragged=ragged):  # columns of diagonals, their biases, those of a head
            b = "b" if ragged else ""
            line = 3 * WORD * at.count(b) + wide * at.count(b + "h")
            return line * (at.i + at.j) + wide * at.count(b + "ij")
        case _:
            return (POSITIONS + 2 * wide) * at.count("bhij")


def ask_modifiers(
    problem: Problem, at: Extent, first: int = 0, collects: Sequence[Mapping[str, int]] = ()
) -> int:
    """Bytes of the steps from `first` on, one after the other: each its own, and booleans of scores
    hidden earlier. collects: the operands of each step with a gradient to sum."""
    p, wide, most = problem, problem.wide.itemsize, 0
    steps = zip(p.node.modifiers, p.by_role.modifiers, p.node.restores, strict=True)
    for n, (modifier, data, restores) in enumerate(steps):
        if n >= first:
            own = ask_modifier(modifier, data, at, wide)
            products = wide * at.count("bhij") if any(collects[n : n + 1]) else 0
            most = max(most, own + products + at.count("bhij") * restores)
    return most


def ask_bits(problem: Problem, at: Extent) -> tuple[int, int]:
    """Bytes of lasting booleans, and at most, of a mask and of the bits made of it."""
    p = problem
    if p.node.mask is None:
        return 0, 0
    asked = ask_mask(p.node.mask, p.by_role.mask, at)
    bits = 2 * p.wide.itemsize * at.count(asked.axes)
    return asked.made, max(asked.most, asked.made + bits)


def depends(problem: Problem) -> str:
    """The axes of the mask and the modifiers among "b" and "h", found by tracing them; both if they
    compute with nothing but tensors."""
    mask = problem.node.mask
    if not problem.node.modifiers and (mask is None or (mask.relative and is_ours(mask))):
        return ""
    try:
        axes = Tracer.of(problem).axes()
    except Untraceable:
        return "bh"
    return "".join(axis for axis in "bh" if axis in axes)
