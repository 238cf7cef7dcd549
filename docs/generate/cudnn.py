"""Writes docs/reports/cudnn.md, what cuDNN takes and how that was checked: `make cudnn-report`.

    python -m docs.generate.cudnn [PYTHON ...]

The table of limits is written anew; with Pythons that have cuDNN, each a version of its own, they
are asked about all of the grid and the results are written too. Plans are built for GPUs that need
not be there. Run from the root of the checkout.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

from attn_graph.lowering.cudnn.case import Pass, Version
from attn_graph.lowering.cudnn.limits import RULES
from attn_graph.lowering.cudnn.offline import Answer
from attn_graph.lowering.cudnn.rules import BOTH, FIRST, LAST, Rule
from docs.generate.pages import replace, row
from tests.lowering.test_cudnn_limits import ALONE, problem, sentences
from tests.support.cudnn_grid import grid
from tests.support.cudnn_questions import GPUS, Question, Verdict, answers, questions, versions

PAGE = Path(__file__).parents[1] / "reports" / "cudnn.md"
BUILT = 90  # the compute capability that plans are built for; the others' are checked alone
PARTS = 8
VERDICTS: tuple[Verdict, ...] = ("yes", "no", "no, by choice", "not asked")
FALSE: tuple[Verdict, ...] = ("false yes", "false no")
ASKED = """\
{graphs} graphs, forward and backward: every value at which a limit of the table begins or ends, and
mixtures that hypothesis draws from a fixed seed. For each GPU cuDNN was asked up to its
`check_support`; for {built} every plan that the table says yes to was built as well.

- yes, no: what the table says and cuDNN too.
- no, by choice: the table refuses what cuDNN takes, since it computes wrongly or nobody vouches
  that it doesn't.
- not asked: the table refuses what cuDNN has no words for, or crashes at.
- disagreements: yes where cuDNN says no, and no where it says yes, other than by choice.
- seconds: what building one plan took by the clock, with other work beside it; only their size
  means something.
- other workspaces: plans that need other workspace than we tell without a plan, which we do of
  Hopper's backwards.

"""
COLUMNS = (
    *("cuDNN", "frontend", "GPU", "pass", *VERDICTS, "disagreements"),
    *("plans built", "seconds, median", "seconds, most", "other workspaces"),
)
LIMITS = """\
Every limit with an example of what it says; a graph that none speaks against is taken. A range
holds from its first number to its last, which is not in it. The last column but one is what cuDNN
itself says to what the limit refuses: yes is a refusal by choice, and unasked is what it has no
words for.

| limit | it ... | pass | sm | cuDNN | frontend | cuDNN says | source |
|---|---|---|---|---|---|---|---|
"""


def limits() -> str:
    return LIMITS + "\n".join(map(limit, RULES))


def limit(rule: Rule) -> str:
    """The line of a rule, with the first thing that it says of the graph it alone refuses."""
    given, where = ALONE[rule.name]
    example = sentences(problem(**given), where)[0]
    passes = "both" if rule.passes == BOTH else ", ".join(rule.passes)
    ranges = (
        span(map(str, rule.sm), ("0", "1000")),
        *(
            span(map(format_version, ends), (format_version(FIRST), format_version(LAST)))
            for ends in (rule.backend, rule.frontend)
        ),
    )
    return row(rule.name, example, passes, *ranges, rule.says, rule.source)


def span(ends: Iterable[str], widest: tuple[str, str]) -> str:
    """A range, as short as its open ends let it be."""
    (first, end), (least, most) = ends, widest
    if end == most:
        return "" if first == least else f"from {first}"
    return f"below {end}" if first == least else f"{first} to {end}"


def format_version(version: Version) -> str:
    return ".".join(map(str, version))


Answered = list[tuple[Question, Answer | None]]  # None: not asked


def results(pythons: list[str]) -> tuple[str, list[str]]:
    """The table, and every disagreement."""
    places = [*product(pythons, GPUS)]
    jobs = [(python, versions(python), sm, n) for python, sm in places for n in range(PARTS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [*pool.map(lambda job: answer_part(*job), jobs)]
    lines, wrong = [row(*COLUMNS), "|---" * len(COLUMNS) + "|"], list[str]()
    for n, (python, sm) in enumerate(places):
        at_place = [each for part in found[n * PARTS : (n + 1) * PARTS] for each in part]
        lines += [summary(python, sm, pass_, at_place) for pass_ in BOTH]
        wrong += complaints(at_place)
    return ASKED.format(graphs=len(grid()), built=GPUS[BUILT]) + "\n".join(lines), wrong


def answer_part(python: str, libraries: tuple[Version, Version], sm: int, part: int) -> Answered:
    """A part of the grid at one place: checked all of it, and built what is to be built."""
    given = questions(sm, libraries)[part::PARTS]
    building = [q for q in given if q.ours == "yes" and sm == BUILT]
    checking = [q for q in given if q.ours != "not asked" and q not in building]
    return [
        *((q, None) for q in given if q.ours == "not asked"),
        *answers(checking, build=False, python=python),
        *answers(building, build=True, python=python),
    ]


def summary(python: str, sm: int, pass_: Pass, found: Answered) -> str:
    """The line of one pass at one place."""
    mine = [(q, a) for q, a in found if q.case.pass_ == pass_]
    counts = Counter(q.verdict(a) if a else q.ours for q, a in mine)
    plans = [(q, a) for q, a in mine if a and a.plan]
    times = [a.told["seconds"] for _, a in plans] or [0.0]
    others = sum(bool(q.other_workspace(a)) for q, a in plans)
    built = (len(plans), f"{median(times):.2f}", f"{max(times):.2f}", others)
    return row(
        *map(format_version, versions(python)),
        f"{GPUS[sm]}, sm_{sm}",
        pass_,
        *(counts[x] for x in VERDICTS),
        sum(counts[x] for x in FALSE),
        *(built if plans else [""] * len(built)),
    )


def complaints(found: Answered) -> list[str]:
    told = [q.disagreement(a) for q, a in found if a]
    told += [q.other_workspace(a) for q, a in found if a and a.plan]
    return [text for text in told if text]


def main(*pythons: str) -> None:
    text, wrong = replace(PAGE.read_text(encoding="utf-8"), "limits", limits()), list[str]()
    if pythons:
        made, wrong = results([*pythons])
        text = replace(text, "results", made)
    PAGE.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "no disagreements")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])
