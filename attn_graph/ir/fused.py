"""An attention and its derivatives have one base: operands and results, each by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, TypeVar, final

from attrs import evolve, frozen

from attn_graph.ir.graph import Op

T = TypeVar("T")
SIDES: dict[int | None, str] = {None: "rows", 0: "rows", 1: "keys", 2: "keys"}  # of q, k and v
NAME, RANK = attrgetter("name"), attrgetter("rank")
WIDE = {"o": "bhie", "weights": "bhij"}  # axes; statistics have bhi


@final
@frozen
class Role:
    """An operand or a result of a fused op.

    axes: "b" batch, "h" heads, "g" key/value heads, any other letter for an axis that stays. like:
    the number of the attention's operand with its layout; None for the rows of o. trains: True if
    it has a gradient. constant: True if a derivative by it is refused.
    """

    name: str
    axes: str
    rank: int | None
    like: int | None = None
    trains: bool = False
    constant: bool = False

    @classmethod
    @cache
    def of_rows(cls, name: str) -> Role:
        """o, lse, ..., or a gradient or tangent of these."""
        axes = WIDE.get(name.removeprefix("t").removeprefix("d"), "bhi")
        return cls(name, axes, len(axes))

    @property
    def is_data(self) -> bool:
        """True if a modifier or the mask reads it."""
        return self.rank is None

    @property
    def side(self) -> str:
        """ "rows" if laid out like q, "keys" if like k, else ""."""
        return SIDES.get(self.like, "")

    def marked(self, letter: str) -> Role:
        """The role of its gradient, d, or of its tangent, t."""
        return evolve(self, name=letter + self.name)


@frozen(init=False)
class Fused(Op):
    """An attention or a derivative of one. The attention's own operands come first."""

    @property
    def attention(self) -> Any:  # Any: an Attention, whose module imports this one
        """The attention that it is or differentiates."""
        raise NotImplementedError

    @cached_property
    def takes(self) -> tuple[Role, ...]:
        """Its operands."""
        raise NotImplementedError

    @cached_property
    def gives(self) -> tuple[Role, ...]:
        """Its results."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(NAME, self.gives))

    @property
    def reads(self) -> int:
        return len(self.takes)

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


def label_roles(roles: Sequence[Role], own: Sequence[T], row: T) -> tuple[T, ...]:
    """A label for each role. own: labels of the attention's operands. row: of o, lse, ..."""
    return tuple([row if role.like is None else own[role.like] for role in roles])


def select_flagged(values: Sequence[T], flags: Sequence[bool]) -> tuple[T, ...]:
    return tuple([x for x, flag in zip(values, flags, strict=True) if flag])
