"""What a mask is, and the joins `&`, `|` and `~` of masks. The leaves are in `masks`.

A mask says three things. `keep` is its meaning, exact, at one place. For a block of queries,
`span` is every key that some query of the block may keep (never too small) and `surely` is keys
that all of them keep (never too large). For the joins all three follow, so whether a tile is
empty, full or mixed is known for every expression, on every backend. A leaf that is a strip along
the diagonal may say so by `strip`, and spares kernels a list of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, final

import torch
from attrs import Factory, field, frozen

from attn_graph.errors import GraphError
from attn_graph.masks.places import Block, Keys, Place, Strip, Term
from attn_graph.spec import INTEGERS, ValueType

DEEPEST = 128  # joins within joins: each takes up to four of the thousand calls that Python nests
Align = Literal["top_left", "bottom_right"]


@final
@frozen
class Data:
    """A tensor that a mask reads: its axes, letters of "bhij", and the dtypes it may have."""

    axes: str
    dtypes: tuple[torch.dtype, ...] = INTEGERS
    broadcasts: bool = False  # whether an axis may be 1 instead of full

    def __attrs_post_init__(self) -> None:
        if not (set(self.axes) <= set("bhij") and len(set(self.axes)) == len(self.axes)):
            raise GraphError(f'data: axes {self.axes!r} are not letters of "bhij", each once')

    def problems(
        self, who: str, name: str, type_: ValueType, sizes: dict[str, int]
    ) -> Iterator[str]:
        """Everything that keeps a tensor of this type from being what is read."""
        full = tuple(sizes[x] for x in self.axes)
        rank, needed = len(type_.shape), len(full)
        if rank != needed:
            short = self.broadcasts and rank < needed
            way_out = f"; say {name}[{', '.join(['None'] * (needed - rank))}]" if short else ""
            yield f"{who}: {name} {type_} has {rank} axes and needs {needed}{way_out}"
        elif not all(
            n == m or (self.broadcasts and n == 1) for n, m in zip(type_.shape, full, strict=True)
        ):
            yield f"{who}: {name} {type_} does not fit {self.axes} = {list(full)}"
        if type_.dtype not in self.dtypes:
            yield f"{who}: {name} {type_} must be of {' or '.join(map(str, self.dtypes))}"


@frozen
class Mask:
    """A boolean expression of (b, h, i, j). A leaf of your own is a `@final @frozen` subclass."""

    @property
    def relative(self) -> bool:
        """Whether `keep` depends on j - i alone."""
        return False

    @property
    def needs(self) -> dict[str, Data]:
        """The tensors that `keep` reads, by name."""
        return {}

    def keep(self, at: Place) -> Term:
        """Whether query at.i sees key at.j. Written with operators only, so it takes ints too."""
        raise NotImplementedError

    def span(self, block: Block) -> Keys:
        """Keys that hold all that any query of the block keeps; all keys if unsure."""
        return block.all

    def surely(self, block: Block) -> Keys:
        """Keys that every query of the block keeps; none if unsure."""
        return block.none

    def strip(self, at: Place) -> Strip | None:
        """This mask as a strip along the diagonal, if it is one: kernels need no list then."""
        return None

    def aligned(self, align: Align | None) -> Mask:
        """This mask with `align` where it compares positions and says nothing itself."""
        return self

    def resolved(self, M: int, N: int, ragged: tuple[str, ...]) -> Mask:
        """This mask with alignments turned into offsets. Raises GraphError where none was said."""
        return self

    def picture(self, M: int, N: int, /, **data: torch.Tensor) -> str:
        """Which of M x N places are kept, as text; data: what the mask reads. See `pictures`."""
        from attn_graph.masks.pictures import picture  # above this floor, as for printing

        return picture(self, M, N, data=data)

    def __and__(self, other: Mask) -> Mask:
        return join_masks(And, (self, other))

    def __or__(self, other: Mask) -> Mask:
        return join_masks(Or, (self, other))

    def __invert__(self) -> Mask:
        return self.a if isinstance(self, Not) else Not(self)

    def __str__(self) -> str:
        from attn_graph.ir.parse import show_value  # above this floor; printing looks up

        return show_value(self)


def is_mask(_: object, __: object, value: Mask) -> None:
    if not isinstance(value, Mask):
        raise GraphError(
            f"mask: {value!r} is no mask; write Causal(), say, or Causal() & Window(64)"
        )


def nesting(join: Join) -> int:
    """How many joins lie within one another."""
    return 1 + max(part.depth if isinstance(part, Join) else 0 for part in join.parts)


class Join(Mask):
    """Abstract: a mask made of masks. Joins of one kind are kept flat, see `join_masks`."""

    __slots__ = ()
    depth: int

    def __attrs_post_init__(self) -> None:
        if self.depth > DEEPEST:
            raise GraphError(
                f"mask: joins within joins are more than {DEEPEST} deep; name part of them in a "
                "leaf of your own, or give a boolean tensor, Keep()"
            )

    @property
    def parts(self) -> tuple[Mask, ...]:
        raise NotImplementedError

    @property
    def relative(self) -> bool:
        return all(part.relative for part in self.parts)

    @property
    def needs(self) -> dict[str, Data]:
        return {name: data for part in self.parts for name, data in part.needs.items()}

    def aligned(self, align: Align | None) -> Mask:
        return type(self)(*(part.aligned(align) for part in self.parts))

    def resolved(self, M: int, N: int, ragged: tuple[str, ...]) -> Mask:
        return type(self)(*(part.resolved(M, N, ragged) for part in self.parts))


def join_masks(kind: type[And] | type[Or], masks: Iterable[Mask]) -> Mask:
    """One join of all these masks, as a balanced tree: 1000 of them nest ten deep."""
    parts = [part for mask in masks for part in flatten_join(kind, mask)]
    while len(parts) > 1:
        pairs = [kind(*parts[n : n + 2]) for n in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def flatten_join(kind: type[And] | type[Or], mask: Mask) -> list[Mask]:
    """The parts of nested joins of one kind, in their order."""
    if isinstance(mask, kind):
        return [part for inner in mask.parts for part in flatten_join(kind, inner)]
    return [mask]


@final
@frozen
class And(Join):
    """Both masks keep it."""

    a: Mask = field(validator=is_mask)
    b: Mask = field(validator=is_mask)
    depth: int = field(init=False, eq=False, repr=False, default=Factory(nesting, takes_self=True))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.a, self.b

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) & self.b.keep(at)

    def strip(self, at: Place) -> Strip | None:
        a, b = self.a.strip(at), self.b.strip(at)
        return None if a is None or b is None else a & b

    def span(self, block: Block) -> Keys:
        return self.a.span(block) & self.b.span(block)

    def surely(self, block: Block) -> Keys:
        return self.a.surely(block) & self.b.surely(block)


@final
@frozen
class Or(Join):
    """One of the masks keeps it, or both."""

    a: Mask = field(validator=is_mask)
    b: Mask = field(validator=is_mask)
    depth: int = field(init=False, eq=False, repr=False, default=Factory(nesting, takes_self=True))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.a, self.b

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) | self.b.keep(at)

    def span(self, block: Block) -> Keys:
        return self.a.span(block) | self.b.span(block)

    def surely(self, block: Block) -> Keys:
        return self.a.surely(block) | self.b.surely(block)


@final
@frozen
class Not(Join):
    """The mask does not keep it."""

    a: Mask = field(validator=is_mask)
    depth: int = field(init=False, eq=False, repr=False, default=Factory(nesting, takes_self=True))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.a,)

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) ^ True  # not `~`, which turns the integer 1 into -2

    def span(self, block: Block) -> Keys:
        return self.a.surely(block).outside(block.N)

    def surely(self, block: Block) -> Keys:
        return self.a.span(block).outside(block.N)
