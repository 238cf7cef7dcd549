"""The memory of `compile`: plans by its arguments, by what is built, and by tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from attrs import define, field

from attn_graph.machine.cache import CAPACITY, Cache, CacheInfo
from attn_graph.machine.likeness import look_at
from attn_graph.plan import Plan
from attn_graph.planner.forms.builds import BuildLog, skeleton_of

Key = tuple[object, ...]  # everything a plan depends on, with or without tensors' looks


@final
@define(eq=False)
class PlanCache:
    """All plans of this process.

    calls: by the arguments of `compile`, as given, the graph first. plans: by the request for a
    simplified graph. looks: plans of calls, by options and tensors' looks. recent: the last plan
    used, by options alone.
    """

    calls: Cache[Plan] = field(
        factory=lambda: Cache(CAPACITY, kind=lambda key: skeleton_of(key[0]))
    )
    plans: Cache[Plan] = field(
        factory=lambda: Cache(CAPACITY, kind=lambda request: skeleton_of(request.graph))
    )
    looks: dict[Key, Plan] = field(factory=dict)
    recent: dict[Key, Plan] = field(factory=dict)
    builds: BuildLog = field(factory=BuildLog)

    def lookup(self, request: Key) -> Plan | None:
        """The plan of an earlier `compile`; None without one, and for invalid arguments."""
        try:
            return self.calls.get(request)
        except TypeError:  # not an option without a hash: refused when read
            return None

    def recall(self, key: Key, tensors: Sequence[torch.Tensor]) -> Plan | None:
        """The plan of an earlier call with this key and similar tensors, now the most recent."""
        try:
            plan = self.looks.get(with_looks(key, tensors))
        except TypeError:  # symbolic sizes have no hash
            return None
        if plan is not None:
            self.recent[key] = plan
        return plan

    def remember(self, key: Key, tensors: Sequence[torch.Tensor], plan: Plan) -> None:
        """Keep the plan of a call. A full memory is emptied: many calls share a plan."""
        if len(self.looks) >= CAPACITY:
            self.looks.clear()
            self.recent.clear()
        self.looks[with_looks(key, tensors)] = self.recent[key] = plan

    def info(self) -> CacheInfo:
        """Counts since it was cleared."""
        with self.plans.lock:
            held = list(self.plans.entries.values())
        return CacheInfo(
            self.calls.hits,
            self.calls.misses,
            self.plans.builds,
            self.plans.evictions,
            self.plans.seconds,
            len(held),
            self.plans.capacity,
            max((plan.executable.workspace for plan in held), default=0),
        )

    def clear(self) -> None:
        """Forget every plan and every count."""
        for part in (self.calls, self.plans, self.looks, self.recent, self.builds):
            part.clear()


def with_looks(key: Key, tensors: Sequence[torch.Tensor]) -> Key:
    """The key of a call, and its tensors' looks and classes."""
    return (*key, *map(look_at, tensors), *map(type, tensors))


cache = PlanCache()
