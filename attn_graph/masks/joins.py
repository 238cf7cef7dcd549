"""The base class of masks, and their joins `&`, `|` and `~`. The module `leaves` has the leaves.

A mask has one definition, `keep`, exact at one place. At the ranges of a block of queries it tells
`span`, all keys that some query of the block may keep (never too few), and `surely`, keys that all
of them keep (never too many). So every backend knows the empty, full and mixed tiles of every
expression. A leaf that is a strip along the diagonal may define `strip`; kernels then need no list
of tiles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NoReturn, final

import torch
from attrs import Factory, field, frozen

from attn_graph.errors import Declared, GraphError, asks_for_attrs, refuse_truth, show
from attn_graph.masks.intervals import bound_keys
from attn_graph.masks.places import Block, Keys, Place, Strip, Term
from attn_graph.printing.misfits import LETTERS, OWNERS, cast_problem, count_axes, rank_problem
from attn_graph.printing.text import show_call
from attn_graph.rings import find
from attn_graph.spec import INTEGERS, ValueType

BLOCKS = {"x": "i", "y": "j"}  # the letters of axes of blocks, and of the positions in them
MOST_LEAVES = 2**12  # of one mask, each as often as it stands there: planning reads them all
DEEPEST = 128  # joins within joins: each takes up to four of the thousand calls that Python nests
Align = Literal["top_left", "bottom_right"]


def to_dtypes(dtypes: torch.dtype | Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    """A converter: one or several dtypes as a tuple. Raises GraphError for anything else."""
    several = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if isinstance(several, Iterable):
        known = tuple(several)
        if all(isinstance(dtype, torch.dtype) for dtype in known):
            return known
    raise GraphError(f"data: {show(dtypes)} is neither a dtype nor a sequence of dtypes")


@final
@frozen
class Data:
    """A tensor read by a mask or a modifier: its axes and allowed dtypes.

    axes: letters of "bhij", for batch entry, head, query and key; "x" and "y" are blocks of queries
    and of keys, "n" is an axis of `entries` elements. dtypes: one or several. broadcasts: an axis
    may be 1 instead of full. block: the queries of an "x" and the keys of a "y"; query i reads
    element (start[0] + i) // block[0]. whole: the queries and keys divided into blocks, if the
    graph has a part of them. Raises GraphError for other axes, dtypes and sizes.
    """

    axes: str
    dtypes: tuple[torch.dtype, ...] = field(default=INTEGERS, converter=to_dtypes)
    broadcasts: bool = False
    block: tuple[int, int] = (1, 1)
    start: tuple[int, int] = (0, 0)
    whole: tuple[int, int] | None = None
    entries: int = 1

    def __attrs_post_init__(self) -> None:
        text = self.axes if isinstance(self.axes, str) else "?"
        if not (set(text) <= {*LETTERS, *BLOCKS, "n"} and len(set(text)) == len(text)):
            raise GraphError(f'data: axes {self.axes!r} are not letters of "bhijxyn", each once')
        if min(self.block) < 1 or min(self.start) < 0:
            raise GraphError(
                f"data: block {self.block} and start {self.start} are not sizes of at least 1 "
                "and positions of at least 0"
            )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The full size of each axis. sizes: of "bhij", by letter."""
        full = {**sizes, "n": self.entries}
        return tuple(
            -(-self.positions(letter, sizes) // self.block["xy".index(letter)])
            if letter in BLOCKS
            else full[letter]
            for letter in self.axes
        )

    def positions(self, letter: str, sizes: Mapping[str, int]) -> int:
        """The queries of "x", or the keys of "y"."""
        return self.whole["xy".index(letter)] if self.whole else sizes[BLOCKS[letter]]

    def cells(self, letter: str, positions: range) -> range:
        """The blocks that positions lie in. letter: "x" of queries, "y" of keys."""
        size, start = (pair["xy".index(letter)] for pair in (self.block, self.start))
        return range((start + positions.start) // size, -(-(start + positions.stop) // size))

    def problems(
        self, who: str, name: str, type_: ValueType, sizes: dict[str, int]
    ) -> Iterator[str]:
        """Why a tensor of this type does not fit. sizes: of the axes, by letter of "bhij"."""
        full = self.shape(sizes)
        if len(type_.shape) != len(full):
            own = name, type_.shape, self.axes
            yield f"{who}: {name} {rank_problem(*own, full, sizes, self.broadcasts)}"
        elif problem := self.size_problem(name, type_.shape, sizes):
            yield f"{who}: {name} {problem}"
        if problem := cast_problem(name, type_.dtype, self.dtypes):
            yield f"{who}: {name} {problem}"

    def size_problem(
        self,
        name: str,
        shape: Sequence[int],
        sizes: Mapping[str, int],
        loose: Collection[str] = (),
    ) -> str:
        """Which axes of a tensor have another size, in words; "" if all fit.

        loose: of "ij", the axes of packed sequences that `max_lengths` may bound.
        """
        parts = [
            f"{count_axes(x, n)} (axis {axis}), and {self.due(x, m, sizes)}"
            for axis, (x, n, m) in enumerate(zip(self.axes, shape, self.shape(sizes), strict=True))
            if n != m and not (self.broadcasts and n == 1)
        ]
        ways = ["as many", "1"] if self.broadcasts else []
        if own := {x: n for x, n in zip(self.axes, shape, strict=True) if x in loose}:
            longest = ", ".join(str(own.get(x)) for x in "ij")
            ways.append(f"max_lengths=({longest}) if no sequence is longer")
        table = len(shape) == 1 and self.axes in ("i", "j") and not self.broadcasts
        if table and not own and shape[0] > (size := self.shape(sizes)[0]):
            ways.append(f"{name}[:{size}]; from_flex cuts its tables with sizes=(B, H, M, N)")
        more = f"; pass {', or '.join(ways)}" if ways else ""
        return f"has {', '.join(parts)}{more}" if parts else ""

    def due(self, letter: str, size: int, sizes: Mapping[str, int]) -> str:
        """The size that an axis needs, in words, and the tensor that it comes from."""
        if letter in BLOCKS:
            positions = count_axes(BLOCKS[letter], self.positions(letter, sizes))
            block = self.block["xy".index(letter)]
            return f"{positions} in blocks of {block} are {size}"
        if letter == "n":
            return f"it needs {size}"
        return f"{OWNERS[letter]} has {size}"


@asks_for_attrs
@frozen(init=False)
class Mask(Declared):
    """A boolean expression of (b, h, i, j). Your own leaf is a `@final @frozen` subclass."""

    @property
    def relative(self) -> bool:
        """True if `keep` depends on j - i alone."""
        return False

    @property
    def needs(self) -> dict[str, Data]:
        """The tensors that `keep` reads, by name."""
        return {}

    def keep(self, at: Place) -> Term:
        """True if query at.i sees key at.j. Use operators only, so that integers work too."""
        raise GraphError(f"{type(self).__name__} defines no keep(self, at)")

    def bound_keys(self, block: Block) -> tuple[Keys, Keys]:
        """`surely` and `span` of a block, from `keep` or `strip`."""
        return bound_keys(self, block)

    def span(self, block: Block) -> Keys:
        """A superset of the keys that any query of the block keeps."""
        return self.bound_keys(block)[1]

    def surely(self, block: Block) -> Keys:
        """A subset of the keys that every query of the block keeps."""
        return self.bound_keys(block)[0]

    def strip(self, at: Place) -> Strip | None:
        """This mask as a strip along the diagonal; None if it is not one."""
        return None

    def aligned(self, align: Align | None) -> Mask:
        """This mask with `align` in every part that compares positions without an alignment."""
        return self

    def resolved(self, M: int, N: int, ragged: tuple[str, ...]) -> Mask:
        """This mask with alignments turned into offsets, for M queries and N keys.

        ragged: the lengths read by the mask, which move bottom-right diagonals. Raises GraphError
        for a missing alignment.
        """
        return self

    def written(self) -> Mask:
        """This mask as users write it: bands as `Causal` and `Window`."""
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, type[Mask]]]:
        """The text of a mask and the classes named in it, for torch.compile."""
        return str(self), {cls.__name__: cls for cls in leaf_classes(self)}

    def picture(self, M: int, N: int, /, **data: torch.Tensor) -> str:
        """The kept places of M x N as text. data: the tensors that the mask reads."""
        drawn: str = find("picture")(self, M, N, data=data)
        return drawn

    def _repr_html_(self) -> str:
        """The mask and a picture of its tiles, for notebooks."""
        from attn_graph.printing import html

        size = find("telling_size")(self)
        return html.page(html.code(self), find("picture_html")(self, size, size))

    def __and__(self, other: Mask) -> Mask:
        return join_masks(And, (self, other))

    def __or__(self, other: Mask) -> Mask:
        return join_masks(Or, (self, other))

    def __invert__(self) -> Mask:
        return self.a if isinstance(self, Not) else Not(self)

    def __bool__(self) -> NoReturn:
        """Raises GraphError: `and`, `or` and `not` would silently drop a mask."""
        refuse_truth("mask", self, "join masks with &, | and ~, not with and, or and not")

    def __str__(self) -> str:
        return show_call(self)


def needs_of(mask: Mask | None) -> dict[str, Data]:
    return {} if mask is None else mask.needs


def require_mask(_: object, __: object, value: Mask) -> None:
    """A validator. Raises GraphError for anything but a mask."""
    if not isinstance(value, Mask):
        way_out = "write a mask such as Causal() or Causal() & Window(64)"
        if isinstance(value, type) and issubclass(value, Mask):
            way_out = f"write {value.__name__}(...), an instance"
        elif hasattr(value, "mask_mod"):
            way_out = "write mask, tensors = ag.from_flex(block_mask.mask_mod)"
        elif callable(value):
            way_out = "a function is read by mask, tensors = ag.from_flex(function)"
        elif hasattr(value, "dtype"):
            way_out = "pass booleans [B, H, M, N] as keep=, and numbers to add as bias="
        raise GraphError(f"mask: {show(value)} is not a mask; {way_out}")


def nesting(join: Join) -> int:
    """The depth of a join, counting itself."""
    return 1 + max(part.depth if isinstance(part, Join) else 0 for part in join.parts)


def count_leaves(join: Join) -> int:
    """The leaves of a join, each as often as it stands there."""
    return sum(part.leaves if isinstance(part, Join) else 1 for part in join.parts)


class Join(Mask):
    """Abstract: a mask made of other masks. `join_masks` flattens nested joins of one kind."""

    __slots__ = ()
    depth: int
    leaves: int

    def __attrs_post_init__(self) -> None:
        if self.leaves > MOST_LEAVES:
            raise GraphError(
                f"mask: joins of {self.leaves} leaves, and {MOST_LEAVES} is the most; name part of "
                "them in a leaf of your own, or give a boolean tensor, Keep()"
            )
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

    def written(self) -> Mask:
        return type(self)(*(part.written() for part in self.parts))

    def resolved(self, M: int, N: int, ragged: tuple[str, ...]) -> Mask:
        return type(self)(*(part.resolved(M, N, ragged) for part in self.parts))


def leaf_classes(mask: Mask) -> Iterator[type[Mask]]:
    if isinstance(mask, Join):
        for part in mask.parts:
            yield from leaf_classes(part)
    else:
        yield type(mask)


def join_masks(kind: type[And] | type[Or], masks: Iterable[Mask]) -> Mask:
    """One join of all these masks, as a balanced tree: 1000 masks nest ten deep."""
    parts = [part for mask in masks for part in flatten_join(kind, mask)]
    while len(parts) > 1:
        pairs = [kind(*parts[n : n + 2]) for n in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def flatten_join(kind: type[And] | type[Or], mask: Mask) -> list[Mask]:
    """The parts of nested joins of one kind, in order."""
    if isinstance(mask, kind):
        return [part for inner in mask.parts for part in flatten_join(kind, inner)]
    return [mask]


@frozen
class Pair(Join):
    a: Mask = field(validator=require_mask)
    b: Mask = field(validator=require_mask)
    depth: int = field(init=False, eq=False, repr=False, default=Factory(nesting, takes_self=True))
    leaves: int = field(
        init=False, eq=False, repr=False, default=Factory(count_leaves, takes_self=True)
    )

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.a, self.b


@final
@frozen
class And(Pair):
    """True where both masks are."""

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) & self.b.keep(at)

    def strip(self, at: Place) -> Strip | None:
        a, b = self.a.strip(at), self.b.strip(at)
        return None if a is None or b is None else a & b

    def bound_keys(self, block: Block) -> tuple[Keys, Keys]:
        (surely, span), (surely_b, span_b) = self.a.bound_keys(block), self.b.bound_keys(block)
        return surely & surely_b, span & span_b

    def __str__(self) -> str:
        return f"({' & '.join(map(str, flatten_join(And, self)))})"


@final
@frozen
class Or(Pair):
    """True where at least one of the masks is."""

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) | self.b.keep(at)

    def bound_keys(self, block: Block) -> tuple[Keys, Keys]:
        (surely, span), (surely_b, span_b) = self.a.bound_keys(block), self.b.bound_keys(block)
        return surely | surely_b, span | span_b

    def __str__(self) -> str:
        return f"({' | '.join(map(str, flatten_join(Or, self)))})"


@final
@frozen
class Not(Join):
    """True where the mask is false."""

    a: Mask = field(validator=require_mask)
    depth: int = field(init=False, eq=False, repr=False, default=Factory(nesting, takes_self=True))
    leaves: int = field(
        init=False, eq=False, repr=False, default=Factory(count_leaves, takes_self=True)
    )

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.a,)

    def keep(self, at: Place) -> Term:
        return self.a.keep(at) ^ True  # not `~`, which turns the integer 1 into -2

    def bound_keys(self, block: Block) -> tuple[Keys, Keys]:
        surely, span = self.a.bound_keys(block)
        return span.outside(block.N), surely.outside(block.N)

    def __str__(self) -> str:
        return f"~{self.a}"


def leaves(mask: Mask) -> tuple[Mask, ...]:
    """The leaves of a mask, each once."""
    if not isinstance(mask, Join):
        return (mask,)
    return tuple(dict.fromkeys(leaf for part in mask.parts for leaf in leaves(part)))


def reading_problems(mask: Mask) -> Iterator[str]:
    """Tensors read by two parts of a mask in two ways. `needs` has one of the ways alone."""
    needs = mask.needs
    for name, data in ((n, x) for leaf in leaves(mask) for n, x in leaf.needs.items()):
        if data != needs[name]:
            yield (
                f"mask: two of its parts read {name} in two ways, {data} and {needs[name]}; "
                "give each tensor a name of its own"
            )
