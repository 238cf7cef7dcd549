"""Tensors captured by a mod, as the data of masks and modifiers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from types import CellType, FunctionType
from typing import Any, final

import torch
from attrs import define, evolve, field
from torch import fx

from attn_graph.integrations.terms import BLOCKS_OF, Element, Index, Real, Unread
from attn_graph.ir.terms.formulas import AXES, simplify_text
from attn_graph.masks import Keep, KeepBlocks, KeyLengths, Mask, QueryLengths, SameSegment
from attn_graph.masks.canonical import MIRRORED, coefficients
from attn_graph.masks.joins import BLOCKS
from attn_graph.spec import INF, INTEGERS

Tensors = dict[str, torch.Tensor]
Mod = Callable[..., Any]  # Any: tensors, or whatever stands for them
LENGTHS = {"i": ("q_lengths", QueryLengths()), "j": ("kv_lengths", KeyLengths())}


@final
@define(eq=False)
class Captured:
    """The tensors of one mod by the names of our data.

    sizes: the known ones of b, h, i and j. sources: the element behind each name. derived: tensors
    made of captured ones, by what they are made of.
    """

    sizes: Mapping[str, int]
    tensors: Tensors = field(factory=dict)
    sources: dict[str, Element] = field(factory=dict)
    derived: dict[tuple[object, ...], torch.Tensor] = field(factory=dict)

    def at(self, element: Any, indices: Sequence[Any]) -> Element:  # Any: terms
        """A tensor's element at more indices. Raises Unread for others than b, h, i and j."""
        if not isinstance(element, Element):
            raise Unread("it indexes something that is not a captured tensor")
        place: Element = element
        reads = [
            {*re.findall(r"\w+", index.text)} & {"i", "j"}
            for index in indices
            if isinstance(index, Index)
        ]
        distances = [*filter(None, reads)] == [{"i", "j"}]
        for index in indices:
            text = "an element" if isinstance(index, Element) else str(index)
            text = simplify_text(index.text) if isinstance(index, Index) else text
            further = place.at(text) or self.at_other(place, index)
            if further is None:
                raise Unread(
                    f"it reads a tensor at {text}, which is not b, h, q_idx or kv_idx, one of "
                    "these plus a number, an element of integers, or a block of the last two",
                    distance=distances,
                )
            place = further
        return place

    def at_other(self, place: Element, index: object) -> Element | None:
        """An element at a number, a moved position, or an element of integers; None at others."""
        axis, axes, tensor = len(place.axes), place.axes, place.tensor
        if axis >= tensor.dim() or isinstance(index, bool):
            return None
        if isinstance(index, int):
            key: tuple[object, ...] = (tensor, axis, index)
            return self.derive(place, axes, key, lambda: tensor.select(axis, index))
        inner = index.element if isinstance(index, Index) else index
        if isinstance(inner, Element):
            fits = len(inner.axes) == inner.tensor.dim() and inner.tensor.dtype in INTEGERS
            taken = {*inner.axes, *map(BLOCKS_OF.get, inner.axes)} & {*axes}
            if taken or inner.block != (1, 1) or not fits:
                return None
            where: tuple[slice | torch.Tensor, ...] = (*(slice(None),) * axis, inner.tensor)
            key = (tensor, axis, inner.tensor)
            return self.derive(place, axes + inner.axes, key, lambda: tensor[where])
        known = index.position if isinstance(index, Index) else None
        if known is None or known.absolute:
            return None
        first = known.constant
        (letter, times), *more = coefficients({**known.affine, "": 0}).items() or [("", 0)]
        if times != 1 or more or {letter, BLOCKS_OF.get(letter)} & {*axes}:
            return None
        key = (tensor, axis, letter, first)
        return self.derive(place, axes + letter, key, lambda: move(tensor, axis, first))

    def derive(
        self, place: Element, axes: str, key: tuple[object, ...], make: Callable[[], torch.Tensor]
    ) -> Element:
        """The element of a tensor that is made once. Raises Unread beyond its end."""
        known = tuple(id(x) if isinstance(x, torch.Tensor) else x for x in key)
        try:
            made = self.derived.get(known)
            made = self.derived[known] = make() if made is None else made
        except IndexError as error:
            raise Unread(f"it reads a tensor {list(place.tensor.shape)} where it ends") from error
        return evolve(place, tensor=made, axes=axes)

    def resolve(self, element: Element) -> Any:  # Any: an Index, a Real or a Mask
        """An element as an integer, a real number or a boolean. Raises Unread for others."""
        tensor, axes = element.tensor, element.axes
        if not tensor.dim() and tensor.is_floating_point() and tensor == -INF:
            return -INF
        if not axes or len(axes) != tensor.dim():
            raise Unread(
                f"it reads a tensor {list(tensor.shape)} at {len(axes)} indices; "
                "one without axes is to be captured as a number"
            )
        blocks = {"x", "y"} & {*axes}
        if blocks and tensor.dtype != torch.bool:
            return self.resolve(self.repeat(element, *blocks))
        if blocks:
            name = self.name("keep_blocks", element.by_blocks, full="bhxy")
            return KeepBlocks(*element.block, name)
        if tensor.dtype == torch.bool:
            return Keep(self.name("keep", element, full="bhij"))
        if tensor.is_floating_point():
            name = self.name(f"tensor_{axes}", element)
            return Real(f"real({name})", ((name, sort_axes(axes)),), element)
        if tensor.dtype not in INTEGERS:
            raise Unread(f"it reads a tensor of {tensor.dtype}; write .to(torch.int32)")
        name = self.name(f"tensor_{axes}", element)
        return Index(name, ((name, sort_axes(axes)),), element=element)

    def repeat(self, element: Element, axis: str, *more: str) -> Element:
        """An element at blocks of one axis as one at positions. Raises Unread for two axes."""
        if more:
            raise Unread(
                f"it reads a tensor of {element.tensor.dtype} by blocks of queries and of keys; "
                "only booleans may be"
            )
        size, n = element.block["xy".index(axis)], element.axes.index(axis)
        axes = element.axes.replace(axis, BLOCKS[axis])
        key = (element.tensor, "repeat", n, size)
        return self.derive(
            evolve(element, block=(1, 1)), axes, key,
            lambda: element.tensor.repeat_interleave(size, n),
        )  # fmt: skip

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
                if a.affine == {letter: 1} and self.claim(data, b.element):
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


class Table(list[Any]):  # Any: numbers, or lists of them
    """A captured list, which can be read at a position as a tensor is."""

    @cached_property
    def tensor(self) -> torch.Tensor:
        return torch.tensor([*self])

    def __getitem__(self, index: Any) -> Any:  # Any: a number, or something that stands for one
        if isinstance(index, fx.Proxy | torch.Tensor):
            read: Any = self.tensor  # Any: indexed by either
            return read[index]
        return super().__getitem__(index)


def with_tables(captured: Any) -> Any:  # Any: a mod, or a value that it captures
    """A mod whose lists, and those of the mods that it joins, are `Table`s; others unchanged."""
    if type(captured) is list:
        return Table(captured)
    if type(captured) is tuple:
        return tuple(map(with_tables, captured))
    if not isinstance(captured, FunctionType):
        return captured
    names, known = captured.__code__.co_names, captured.__globals__
    lists = {x: Table(known[x]) for x in names if type(known.get(x)) is list}
    cells = tuple(CellType(with_tables(x.cell_contents)) for x in captured.__closure__ or ())
    own = FunctionType(
        captured.__code__, {**known, **lists}, captured.__name__, captured.__defaults__, cells
    )
    own.__kwdefaults__ = captured.__kwdefaults__
    return own


def move(tensor: torch.Tensor, axis: int, first: int) -> torch.Tensor:
    """The tensor whose element n is element first + n, where indices below 0 count from the end.

    Raises IndexError without such elements.
    """
    if abs(first) > tensor.shape[axis]:
        raise IndexError(first)
    last = tensor.narrow(axis, max(first, 0), tensor.shape[axis] - max(first, 0))
    if first >= 0:
        return last
    return torch.cat((tensor.narrow(axis, tensor.shape[axis] + first, -first), last), axis)


def sort_axes(axes: str) -> str:
    """Letters of "bhij" in this order."""
    return "".join(sorted(axes, key=AXES.index))
