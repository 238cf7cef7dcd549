"""Writes docs/reports/cudnn.md, what cuDNN takes and how that was checked: `make cudnn-report`.

    python -m docs.generate.cudnn [--share N] [PYTHON ...]

The table of limits is always written. With Pythons, each of which has another version of cuDNN,
their answers to the whole grid are written too. The plans are built for GPUs that the machine need
not have: all, or one in N, which takes as much less time. Run it from the root of the checkout.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median

from attn_graph.lowering.cudnn.offline import Answer
from attn_graph.lowering.cudnn.plan import format_version
from attn_graph.lowering.libraries.cudnn_case import Case
from attn_graph.lowering.libraries.cudnn_limits import LIMITS
from attn_graph.lowering.limits import BOTH, FIRST, LAST, Limit, Pass, Version
from docs.generate.pages import plain, replace, row
from tests.lowering.test_cudnn_limits import ALONE, problem, sentences
from tests.support.cudnn_grid import grid
from tests.support.cudnn_questions import GPUS, Question, Verdict, answers, questions, versions

PAGE = Path(__file__).parents[1] / "reports" / "cudnn.md"
BUILT = 90  # the compute capability for which plans are built; for others `check_support` is enough
PARTS = 8
VERDICTS: tuple[Verdict, ...] = ("yes", "no", "no, by choice", "not asked")
FALSE: tuple[Verdict, ...] = ("false yes", "false no")
GRID = """\
{graphs} graphs, forward and backward: every value at which a limit of the table begins or ends, and
mixtures that hypothesis draws from a fixed seed. For each GPU cuDNN was asked up to its
`check_support`; for {built} {share} that the table says yes to was built as well.

- yes, no: what the table says and cuDNN too.
- no, by choice: the table refuses what cuDNN takes, since the result is wrong or unproven.
- not asked: the table refuses what cuDNN cannot express, or crashes at.
- disagreements: yes where cuDNN says no, and no where it says yes, other than by choice.
- seconds: to build one plan, by the clock, on a busy machine; only the magnitude counts.
- other workspaces: plans whose workspace is not what we say without a plan, as we do for Hopper's
  backwards.

"""
COLUMNS = (
    *("cuDNN", "frontend", "GPU", "pass", *VERDICTS, "disagreements"),
    *("plans built", "seconds, median", "seconds, most", "other workspaces"),
)
LIMITS_HEAD = """\
Every limit, with an example of its sentence; the backend takes a graph that no limit refuses. A
range excludes its last number. "cuDNN says" is cuDNN's own answer to what the limit refuses: yes
is a refusal by choice, unasked is what cuDNN cannot express.

| limit | it ... | pass | sm | cuDNN | cuDNN says | source |
|---|---|---|---|---|---|---|
"""


def limits_table() -> str:
    """The table of limits, with its explanation."""
    return LIMITS_HEAD + "\n".join(map(limit_row, LIMITS.rows))


def limit_row(limit: Limit[Case]) -> str:
    """The row of a limit, with its sentence on a graph that this limit alone refuses."""
    options, where = ALONE[limit.name]
    example = sentences(problem(**options), where)[0]
    passes = "both" if limit.passes == BOTH else ", ".join(limit.passes)
    ranges = (format_range((str(x.start), str(x.stop)), ("0", "1000")) for x in limit.sm)
    widest = format_version(FIRST), format_version(LAST)
    versions = format_range(map(format_version, limit.versions), widest)
    return row(
        limit.name, plain(example), passes, ", ".join(ranges), versions, limit.says, limit.source
    )


def format_range(ends: Iterable[str], widest: tuple[str, str]) -> str:
    """A range as text; "" if it is the widest."""
    (first, end), (least, most) = ends, widest
    if end == most:
        return "" if first == least else f"from {first}"
    return f"below {end}" if first == least else f"{first} to {end}"


Answers = list[tuple[Question, Answer | None]]  # None: not asked


def write_results(pythons: list[str], share: int) -> tuple[str, list[str]]:
    """The table, and every disagreement. share: one plan in so many is built."""
    places = [*product(pythons, GPUS)]
    jobs = [(python, versions(python), sm, n, share) for python, sm in places for n in range(PARTS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = [*pool.map(lambda job: answer_part(*job), jobs)]
    lines, wrong = [row(*COLUMNS), "|---" * len(COLUMNS) + "|"], list[str]()
    for n, (python, sm) in enumerate(places):
        at_place = [each for part in parts[n * PARTS : (n + 1) * PARTS] for each in part]
        lines += [summary(python, sm, pass_, at_place) for pass_ in BOTH]
        wrong += complaints(at_place)
    which = "every plan" if share == 1 else f"one plan in {share}"
    head = GRID.format(graphs=len(grid()), built=GPUS[BUILT], share=which)
    return head + "\n".join(lines), wrong


def answer_part(
    python: str, libraries: tuple[Version, Version], sm: int, part: int, share: int
) -> Answers:
    """A part of the grid for one GPU and cuDNN: what is not built is checked."""
    part_of_grid = questions(sm, libraries)[part::PARTS]
    building = [q for q in part_of_grid if q.ours == "yes" and sm == BUILT][::share]
    checking = [q for q in part_of_grid if q.ours != "not asked" and q not in building]
    return [
        *((q, None) for q in part_of_grid if q.ours == "not asked"),
        *answers(checking, build=False, python=python),
        *answers(building, build=True, python=python),
    ]


def summary(python: str, sm: int, pass_: Pass, answered: Answers) -> str:
    """The row of one pass, GPU and cuDNN."""
    mine = [(q, a) for q, a in answered if q.case.pass_ == pass_]
    counts = Counter(q.verdict(a) if a else q.ours for q, a in mine)
    plans = [(q, a) for q, a in mine if a and a.plan]
    times = [a.report["seconds"] for _, a in plans] or [0.0]
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


def complaints(answered: Answers) -> list[str]:
    """What contradicts the table of limits or the workspace that it promises."""
    texts = [q.disagreement(a) for q, a in answered if a]
    texts += [q.other_workspace(a) for q, a in answered if a and a.plan]
    return [text for text in texts if text]


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("pythons", nargs="*")
    given = parser.parse_args()
    text, wrong = replace(PAGE.read_text(encoding="utf-8"), "limits", limits_table()), list[str]()
    if given.pythons:
        table, wrong = write_results(given.pythons, given.share)
        text = replace(text, "results", table)
    PAGE.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "no disagreements")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
