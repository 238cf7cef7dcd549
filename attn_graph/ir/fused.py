"""An attention and its derivatives have one base: operands and results, each by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar, final

from attrs import evolve, frozen

from attn_graph.ir.graph import Op
from attn_graph.masks import Data
from attn_graph.spec import ValueType

T = TypeVar("T")
SIDES: dict[int | None, str] = {None: "rows", 0: "rows", 1: "keys", 2: "keys"}  # of q, k and v
NAME, RANK = attrgetter("name"), attrgetter("rank")
ROWS = ("o", "to")  # results that lie like q
WIDE = {"o": "bhie", "weights": "bhij"}  # axes; statistics have bhi


@final
@frozen
class Role:
    """An operand or a result of a fused op.

    axes: "b" batch, "h" heads, "g" key/value heads, any other letter for an axis that stays. like:
    the number of the attention's operand with its layout; None for the rows of o. trains: True if
    it has a gradient. constant: True if a derivative by it is refused. data: of a tensor read by a
    modifier or the mask.
    """

    name: str
    axes: str
    like: int | None = None
    trains: bool = False
    constant: bool = False
    data: Data | None = None

    @classmethod
    def of_rows(cls, name: str) -> Role:
        """o, lse, ..., or a gradient or tangent of these."""
        axes = WIDE.get(name.removeprefix("t").removeprefix("d"), "bhi")
        return cls(name, axes)

    @property
    def rank(self) -> int | None:
        """How many axes it has; None: any number."""
        return None if self.data else len(self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The full size of each axis. sizes: by letter."""
        return self.data.shape(sizes) if self.data else tuple([sizes[x] for x in self.axes])

    @property
    def side(self) -> str:
        """ "rows" if laid out like q, "keys" if like k, else ""."""
        return SIDES.get(self.like, "")

    @property
    def leader(self) -> int | None:
        """The number of the operand in whose memory order a result lies; None: in C order."""
        return 0 if self.name in ROWS else self.like

    def marked(self, letter: str) -> Role:
        """The role of its gradient, d, or of its tangent, t."""
        return evolve(self, name=letter + self.name)


@frozen(init=False)
class Fused(Op):
    """An attention or a derivative of one. The attention's own operands come first."""

    @property
    def attention(self) -> Any:  # Any: an Attention, whose module imports this one
        """The attention that it differentiates; by default itself."""
        return self

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        """Its operands."""
        raise NotImplementedError

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        """Its results."""
        raise NotImplementedError

    def push_problems(self) -> Iterator[str]:
        yield from self.gradient_problems()

    @property
    def operand_sides(self) -> tuple[str, ...]:
        """For each operand: "rows" if laid out like q, "keys" if like k, else ""."""
        return tuple([role.side for role in self.takes])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(NAME, self.gives))

    @property
    def constants(self) -> tuple[int, ...]:
        return tuple([n for n, role in enumerate(self.takes) if role.constant])

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(map(NAME, self.takes))

    @property
    def ranks(self) -> tuple[int | None, ...]:
        return tuple(map(RANK, self.takes))


def mark_flagged(roles: Sequence[Role], flags: Sequence[bool], letter: str) -> tuple[Role, ...]:
    """The roles of the gradients or tangents of those flagged."""
    return tuple([role.marked(letter) for role in select_flagged(roles, flags)])


def select_flagged(values: Sequence[T], flags: Sequence[bool]) -> tuple[T, ...]:
    return tuple([x for x, flag in zip(values, flags, strict=True) if flag])


def misfits(
    who: str, names: Sequence[str], types: Sequence[ValueType | None], due: Sequence[ValueType]
) -> Iterator[str]:
    """Operands that are not of their due types; None stands for one that is absent."""
    for name, type_, own in zip(names, types, due, strict=True):
        if type_ is not None and type_ != own:
            yield f"{who}: {name} {type_} should be {own}"
