"""Vector clocks: the accesses known to each warp.

An agent reads or writes by itself: a warp, the products of a warp group, asynchronous copies. Each
has a time. A warp knows, for every agent, a time up to which it comes after that agent's accesses;
barriers and waits pass this on. Two accesses to a cell, one of them a write, are a race unless one
comes after the other, whatever their order of execution here.

Copies of the copy engine and products read and write by another proxy: a write of threads needs
fence.proxy.async before they may touch its cell. `fenced` holds the times up to which a warp knows
this of every agent, by memory. The ISA leaves open if cp.async needs the fence too; a missing one
is noted.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
from attrs import define, field

from attn_graph.testing.gpu.rules import Array

MOST_MBARRIERS = 64
AGENTS = {  # those of each warp
    "warp": "warp {}",
    "product": "a product of warp {}",  # as part of its warp group
    "copy": "an asynchronous copy of warp {}",
    "load": "tcgen05.ld of warp {}",
    "store": "tcgen05.st of warp {}",
    "bulk": "a bulk store of warp {}",  # which reads shared memory,
    "sent": "a bulk store of warp {}",  # and writes global memory, later
}
MEMORIES = {"shared": (1,), "global": (2,), "": (1, 2)}  # rows of `seen` set by a fence


@final
@define(eq=False)
class Clocks:
    """The times that each warp knows, and those fenced from the other proxy, [warps, agents].

    seen: all of them, [3, warps, agents]: known, fenced in shared memory, and in global memory.
    """

    warps: int
    seen: Array = field(init=False)
    known: Array = field(init=False)
    fenced: Array = field(init=False)
    fenced_global: Array = field(init=False)
    generic: Array = field(init=False)  # agents

    def __attrs_post_init__(self) -> None:
        self.seen = np.zeros((3, self.warps, self.tensor + 1 + MOST_MBARRIERS), np.int32)
        self.known, self.fenced, self.fenced_global = self.seen
        self.known[np.arange(self.warps), np.arange(self.warps)] = 1
        self.generic = np.zeros(self.known.shape[1], bool)
        self.generic[self.agents("warp", "copy")] = True

    @property
    def nothing(self) -> Array:
        """What a warp that knows nothing has seen."""
        return np.zeros_like(self.seen[:, 0])

    # Numbers of agents: those of warps first

    def agent(self, kind: str, warp: Any) -> Any:  # Any: a warp, or an array of some
        """The number of a warp's agent."""
        return [*AGENTS].index(kind) * self.warps + warp

    def agents(self, *kinds: str) -> Array:
        """The numbers of some agents of all warps."""
        return np.concatenate([self.agent(kind, np.arange(self.warps)) for kind in kinds])

    @property
    def tensor(self) -> int:
        """The tensor cores with a memory of their own."""
        return len(AGENTS) * self.warps

    def mbarrier(self, number: int) -> int:
        """Copies that arrive at an mbarrier."""
        return self.tensor + 1 + number

    def name(self, agent: int) -> str:
        if agent >= self.tensor:
            return "a tensor core" if agent == self.tensor else "a copy of the copy engine"
        kind, warp = divmod(agent, self.warps)
        return [*AGENTS.values()][kind].format(warp)

    def is_generic(self, agents: Array) -> Array:
        """True for agents that use the proxy of threads: warps, and their asynchronous copies."""
        return self.generic[agents]

    # What warps learn

    def now(self, warps: Array) -> Array:
        return self.known[warps, warps]

    def tick(self, warps: Array) -> None:
        """Later accesses of these warps come after anything others learn of them now."""
        self.known[warps, warps] += 1

    def tell(self, warp: int, seen: Array) -> None:
        """A warp hands on what it has seen. Its later accesses come after that."""
        np.maximum(seen, self.seen[:, warp], out=seen)
        self.tick(np.array([warp]))

    def learn(self, warp: int, seen: Array) -> None:
        """A warp comes after these times."""
        np.maximum(self.seen[:, warp], seen, out=self.seen[:, warp])

    def fence(self, warps: Array, memory: str = "") -> None:
        """fence.proxy.async: the other proxy may touch anything known to these warps so far."""
        for row in MEMORIES[memory]:
            self.seen[row, warps] = np.maximum(self.seen[row, warps], self.known[warps])
        self.tick(warps)
