"""A limit of a library, a row of a backend's table: law, words, and where it is written."""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType
from typing import Generic, Literal, TypeVar, final

from attrs import field, frozen

from attn_graph.errors import Reason
from attn_graph.machine.target import Version

C = TypeVar("C")  # a backend's case: a problem, and where it is to run
Pass = Literal["forward", "backward"]
Place = tuple[Pass, int, Version]  # a compute capability, and the library's version
Says = Literal["no", "yes", "unasked"]
Violations = (
    object  # several in a tuple or a generator, a sentence for each; or one; or a false one
)

BOTH: tuple[Pass, ...] = ("forward", "backward")
BACKWARD: tuple[Pass, ...] = ("backward",)
FORWARD: tuple[Pass, ...] = ("forward",)
FIRST, LAST = (0, 0, 0), (999, 0, 0)
AMPERE, HOPPER, BLACKWELL = range(80, 90), range(90, 100), range(100, 110)
MEANING = "what a graph means"
WIDTHS = "q has D = {c.problem.D}, v has E = {c.problem.E}"


@final
@frozen
class Limit(Generic[C]):
    """A limit, with a sentence that follows the backend's name and "can't: ".

    violations: the parts of a case beyond the limit, in a tuple or a generator; or a single part,
    false if there is none. A Reason stands for itself. In a pair of an operand's name and its spec,
    the name distinguishes the keys of the sentences. sentence: a format of `it`, one violation, and
    `c`, the case: the limit, ", and ", and the graph's own value. The limit holds for these passes,
    and these compute capabilities and versions, upper ends excluded. says: the library's own answer
    to a refused case: "no"; "yes", but it computes wrongly or without a guarantee; or "unasked",
    since it has no words for the case, refuses only while it compiles, or crashes.
    """

    name: str
    violations: Callable[[C], Violations]
    sentence: str
    source: str
    passes: tuple[Pass, ...] = BOTH
    sm: tuple[range, ...] = (range(1000),)
    versions: tuple[Version, Version] = (FIRST, LAST)
    says: Says = "no"

    def holds(self, place: Place) -> bool:
        """True if the limit is one of a pass, compute capability and version."""
        pass_, sm, version = place
        return (
            pass_ in self.passes
            and any(sm in each for each in self.sm)
            and self.versions[0] <= version < self.versions[1]
        )

    def reasons(self, beyond: Violations, case: C) -> list[Reason]:
        """The reasons against a case, for what `violations` gave."""
        several = beyond if isinstance(beyond, (tuple, GeneratorType)) else (beyond,) * bool(beyond)
        return [it if isinstance(it, Reason) else self.reason(it, case) for it in several]

    def reason(self, it: object, case: C) -> Reason:
        limit, _, actual = self.sentence.rpartition(", and ")
        key = f"{self.name}.{it[0]}" if isinstance(it, tuple) else self.name
        return Reason(key, *[part.format(it=it, c=case) for part in (limit, actual)])


@final
@frozen(eq=False)
class Limits(Generic[C]):
    """A backend's table of limits."""

    rows: tuple[Limit[C], ...]
    known: dict[Place, tuple[Limit[C], ...]] = field(factory=dict, init=False)

    def at(self, place: Place) -> tuple[Limit[C], ...]:
        """The limits of a pass, on a GPU, with a version. Of each there are many cases."""
        if place not in self.known:
            self.known[place] = tuple([limit for limit in self.rows if limit.holds(place)])
        return self.known[place]

    def reasons(self, case: C, place: Place) -> tuple[Reason, ...]:
        """Every reason against a case at a place."""
        against: list[Reason] = []
        for limit in self.at(place):
            if beyond := limit.violations(case):
                against += limit.reasons(beyond, case)
        return tuple(against)
