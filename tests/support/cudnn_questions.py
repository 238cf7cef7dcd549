"""What our table of limits says of the grid beside what cuDNN itself says, asked without a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Literal, final

from attrs import frozen

from attn_graph.errors import Reason
from attn_graph.lowering.backend import RefusedError
from attn_graph.lowering.cudnn.graph import CudnnCall, describe_call, pack_call
from attn_graph.lowering.cudnn.memory import workspace
from attn_graph.lowering.cudnn.offline import Answer, ask_cudnn, describe_target
from attn_graph.lowering.libraries.cudnn_case import Case, needs_padding_mask
from attn_graph.lowering.libraries.cudnn_limits import LIMITS
from attn_graph.lowering.limits import Limit
from attn_graph.lowering.lying import Lying
from attn_graph.machine.target import Target, Version
from tests.support.cudnn_grid import grid

Verdict = Literal["yes", "no", "no, by choice", "not asked", "false yes", "false no"]
GPUS = {  # by compute capability
    80: "a100", 89: "l40s", 90: "h200", 100: "b200", 103: "b300", 120: "rtx5090", 121: "gb10",
}  # fmt: skip


@final
@frozen
class Question:
    """A problem of the grid at one place: `name` tells which."""

    name: str
    case: Case

    @cached_property
    def against(self) -> tuple[tuple[Limit[Case], Reason], ...]:
        """Which rules refuse it, with their reasons."""
        return tuple(
            (rule, why)
            for rule in LIMITS.at(self.case.place)
            for why in rule.reasons(rule.violations(self.case), self.case)
        )

    @property
    def ours(self) -> Verdict:
        """What the table says: a single rule that cuDNN is not asked about makes it unasked."""
        says = {rule.says for rule, _ in self.against}
        if not says:
            return "yes"
        return "not asked" if "unasked" in says else "no" if "no" in says else "no, by choice"

    @property
    def call(self) -> CudnnCall:
        """As it is planned. What is refused gets no padding: cuDNN could take it for that."""
        case = self.case
        pad = needs_padding_mask(case) and (self.ours != "no" or case.is_paged)
        call = describe_call(case.problem, padded=pad, deterministic=case.deterministic)
        return pack_call(call, case.lying)

    def verdict(self, answer: Answer) -> Verdict:
        """Ours and cuDNN's together. Who refuses by choice need not know whether cuDNN does."""
        if answer.refusal is None:
            return "false no" if self.ours == "no" else self.ours
        return "false yes" if self.ours == "yes" else "no"

    def disagreement(self, answer: Answer) -> str | None:
        """What is wrong, with both sides' words."""
        found = self.verdict(answer)
        if not found.startswith("false"):
            return None
        reasons = "; ".join(f"{rule.name}: {why}" for rule, why in self.against)
        return f"{found}: {self.name}\n  ours: {reasons or 'takes it'}\n  cuDNN: {answer.refusal}"

    def other_workspace(self, answer: Answer) -> str | None:
        """Where we tell another workspace than cuDNN, which built the plan."""
        ours, theirs = workspace(self.case), answer.report["workspace"]
        return None if ours in (None, theirs) else f"{self.name}: {ours} bytes, cuDNN has {theirs}"

    def __str__(self) -> str:
        return f"{self.name}\n{self.call}"


@cache
def problems() -> dict[tuple[Lying, bool], str]:
    """Every problem of the grid once, and whether it is deterministic -> the first entry's name."""
    found: dict[tuple[Lying, bool], str] = {}
    for entry in grid():
        for pass_, asked in zip(("forward", "backward"), entry.problems, strict=False):
            found.setdefault((asked, entry.deterministic), f"{pass_}, {entry}")
    return found


@cache
def versions(python: str = sys.executable) -> tuple[Version, Version]:
    """Those of cuDNN and of its frontend that a Python has."""
    return ask_cudnn((), describe_target(Target.of("h200")), 90, python=python)[0]


@cache
def questions(sm: int, libraries: tuple[Version, Version]) -> tuple[Question, ...]:
    """The whole grid, asked at one place."""
    return tuple(
        Question(name, Case(lying, sm, *libraries, deterministic))
        for (lying, deterministic), name in problems().items()
    )


def answers(
    given: Sequence[Question], *, build: bool, python: str = sys.executable
) -> Iterator[tuple[Question, Answer]]:
    """cuDNN's answers to questions of one place, by one process; those of equal calls once."""
    calls = {str(q.call): q for q in given}
    told = answered([*calls.values()], build, python) if given else []
    by_call = dict(zip(calls, told, strict=True))
    yield from ((q, by_call[str(q.call)]) for q in given)


def answered(given: Sequence[Question], build: bool, python: str) -> list[Answer]:
    """cuDNN's answers; where it dies, an error that tells at which question."""
    sm, plain = given[0].case.sm, [q.call.plain for q in given]
    device = describe_target(Target.of(GPUS[sm]))
    try:
        return ask_cudnn(plain, device, sm, build=build, python=python)[1]
    except RefusedError as error:
        raise RuntimeError(f"{error}\n{culprit(str(error), given)}") from error


def culprit(error: str, given: Sequence[Question]) -> str:
    """The question at which cuDNN died, by the number that the error tells."""
    found = re.search(r"at call (\d+) of", error)
    n = int(found[1]) if found else 0
    return f"It was asked: {given[n - 1]}" if 0 < n <= len(given) else "It had been asked all."
