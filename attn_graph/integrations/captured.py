"""Tensors captured by a mod, as the data of masks and modifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, final

import torch
from attrs import define, field

from attn_graph.integrations.affine import MIRRORED
from attn_graph.integrations.terms import Element, Index, Real, Unread
from attn_graph.masks import Keep, KeepBlocks, KeyLengths, Mask, QueryLengths, SameSegment
from attn_graph.masks.formulas import AXES, simplify_text
from attn_graph.masks.joins import BLOCKS
from attn_graph.spec import INTEGERS

Tensors = dict[str, torch.Tensor]
LENGTHS = {"i": ("q_lengths", QueryLengths()), "j": ("kv_lengths", KeyLengths())}


@final
@define(eq=False)
class Captured:
    """The tensors of one mod by the names of our data.

    sizes: the known ones of b, h, i and j. sources: the element behind each name.
    """

    sizes: Mapping[str, int]
    tensors: Tensors = field(factory=dict)
    sources: dict[str, Element] = field(factory=dict)

    def at(self, element: Any, indices: Sequence[Any]) -> Element:  # Any: terms
        """A tensor's element at more indices. Raises Unread for others than b, h, i and j."""
        if not isinstance(element, Element):
            raise Unread("it indexes something that is not a captured tensor")
        place: Element = element
        for index in indices:
            text = simplify_text(index.text) if isinstance(index, Index) else str(index)
            further = place.at(text)
            if further is None:
                raise Unread(
                    f"it reads a tensor at {text}, which is not b, h, q_idx or kv_idx, nor a "
                    "block of the last two"
                )
            place = further
        return place

    def resolve(self, element: Element) -> Any:  # Any: an Index, a Real or a Mask
        """An element as an integer, a real number or a boolean. Raises Unread for others."""
        tensor, axes = element.tensor, element.axes
        if not axes or len(axes) != tensor.dim():
            raise Unread(
                f"it reads a tensor {list(tensor.shape)} at {len(axes)} indices; "
                "one without axes is to be captured as a number"
            )
        if {"x", "y"} & {*axes}:
            if tensor.dtype != torch.bool:
                raise Unread(f"it reads a tensor of {tensor.dtype} by blocks; only booleans may be")
            name = self.name("keep_blocks", element.by_blocks, full="bhxy")
            return KeepBlocks(*element.block, name)
        if tensor.dtype == torch.bool:
            return Keep(self.name("keep", element, full="bhij"))
        if tensor.is_floating_point():
            name = self.name(f"tensor_{axes}", element)
            return Real(f"real({name})", ((name, sort_axes(axes)),), element)
        if tensor.dtype not in INTEGERS:
            raise Unread(f"it reads a tensor of {tensor.dtype}; say .to(torch.int32)")
        name = self.name(f"tensor_{axes}", element)
        return Index(name, ((name, sort_axes(axes)),), element=element)

    def name(self, name: str, element: Element, full: str = "") -> str:
        """A name for an element's tensor: `name`, or with a number if it is taken."""
        names = (name if n == 1 else f"{name}_{n}" for n in count(1))
        return next(free for free in names if self.claim(free, element, full))

    def claim(self, name: str, element: Element, full: str = "") -> bool:
        """Reserve a name for an element's tensor; False if it is taken."""
        known = self.sources.setdefault(name, element)
        if known.tensor is not element.tensor or known.places != element.places:
            return False
        self.tensors[name] = self.arrange(element, full or sort_axes(element.axes))
        return True

    def arrange(self, element: Element, axes: str) -> torch.Tensor:
        """The tensor with these axes in this order, 1 for a missing one, cut to the known sizes."""
        own = element.axes
        tensor = element.tensor.permute([own.index(x) for x in axes if x in own])
        cuts = (slice(self.count(x, element)) if x in own else None for x in axes)
        return tensor[tuple(cuts)]

    def count(self, axis: str, element: Element) -> int | None:
        """The known size of an axis, or its number of blocks."""
        if axis not in BLOCKS:
            return self.sizes.get(axis)
        known = self.sizes.get(BLOCKS[axis])
        return None if known is None else -(-known // element.block["xy".index(axis)])

    def compare(self, name: str, a: Index, b: Index) -> Mask | None:
        """The leaf for a comparison of elements; None without such a leaf."""
        if name in ("eq", "ne") and a.element and b.element:
            same = self.segments(*sorted((a.element, b.element), key=lambda x: "j" in x.axes))
            return same if same is None or name == "eq" else ~same
        if a.element:
            a, b, name = b, a, MIRRORED[name]
        if name in ("lt", "ge") and b.element and b.element.axes == "b":
            for letter, (data, leaf) in LENGTHS.items():
                if a.is_axis(letter) and self.claim(data, b.element):
                    return leaf if name == "lt" else ~leaf
        return None

    def segments(self, q: Element, kv: Element) -> Mask | None:
        """`SameSegment` of the numbers of queries and of keys; None for other operands."""
        if not (self.is_segments(q, "i") and self.is_segments(kv, "j")):
            return None
        pairs = {"q_segments": (q, "bi"), "kv_segments": (kv, "bj")}
        if not all(self.claim(name, element, axes) for name, (element, axes) in pairs.items()):
            return None
        for name in pairs:
            self.tensors[name] = self.tensors[name].expand(self.sizes.get("b", -1), -1)
        return SameSegment()

    def is_segments(self, element: Element, letter: str) -> bool:
        """True for one number a batch entry and position, or a tensor repeatable to that."""
        return {*element.axes} == {"b", letter} or (element.axes == letter and "b" in self.sizes)


def sort_axes(axes: str) -> str:
    """Letters of "bhij" in this order."""
    return "".join(sorted(axes, key=AXES.index))
