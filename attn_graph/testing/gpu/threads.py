"""Threads that execute an instruction together: consecutive warps, or some of their lanes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, final

import numpy as np
from attrs import frozen

from attn_graph.testing.gpu.rules import Array, any_of

WARP = 32  # threads


@final
@frozen(eq=False)
class Threads:
    """Threads span.start to span.stop, whole warps, of which those in `active` take part.

    active: None: all.
    """

    span: slice
    active: Array | None = None

    @property
    def count(self) -> int:
        """The number of threads in the span; values have an element for each."""
        return int(self.span.stop - self.span.start)

    @property
    def flags(self) -> Array:
        """True for those that take part, by thread of the span."""
        return np.ones(self.count, bool) if self.active is None else self.active

    def where(self, condition: Array) -> Threads:
        both = condition if self.active is None else condition & self.active
        return Threads(self.span, both if any_of(~both) else None)

    def take(self, values: Array) -> Array:
        """The values of active threads, in the last axis."""
        taken: Array = values if self.active is None else values[..., self.active]
        return taken

    def each(self, values: Any) -> Array:  # Any: numbers, one for each thread or one for all
        """The values of active threads."""
        return self.take(np.broadcast_to(values, self.count))

    def lanes(self, warp: int) -> slice:
        """The places of a warp in arrays with an element for each thread of the span."""
        return slice(warp * WARP - self.span.start, (warp + 1) * WARP - self.span.start)

    def stack(self, values: Iterable[Any]) -> Array:  # Any: as above
        """Values one below the other, [values, threads of the span]."""
        rows = [*values]
        stacked = np.empty((len(rows), self.count), rows[0].dtype)
        for row, x in zip(stacked, rows, strict=True):
            row[:] = x
        return stacked

    def put(self, target: Array, values: Array) -> None:
        """Set the active elements of an array with one for each thread of the program."""
        if self.active is None:
            target[self.span] = values
        else:
            np.copyto(target[self.span], values, where=self.active)

    def spread(self, values: Array) -> Array:
        """Values of active threads, with zeros for the others."""
        if self.active is None:
            return values
        whole = np.zeros((*values.shape[:-1], self.count), values.dtype)
        whole[..., self.active] = values
        return whole

    @property
    def numbers(self) -> Array:
        """The number of each active thread."""
        return self.take(np.arange(self.span.start, self.span.stop))

    @cached_property
    def owners(self) -> Array:
        """The warp of each active thread."""
        return self.numbers // WARP

    @property
    def is_whole(self) -> bool:
        """True if all or none of the threads of each warp are active."""
        if self.active is None:
            return True
        lanes = self.active.reshape(-1, WARP)
        return bool((lanes.all(1) | ~lanes.any(1)).all())

    @property
    def warps(self) -> Array:
        first = self.span.start // WARP
        if self.active is None:
            return np.arange(first, self.span.stop // WARP)
        some: Array = np.flatnonzero(self.active.reshape(-1, WARP).any(1)) + first
        return some

    @property
    def warp_index(self) -> slice | Array:
        """`warps` as an index of arrays with an element for each warp."""
        if self.active is None:
            return slice(self.span.start // WARP, self.span.stop // WARP)
        return self.warps
