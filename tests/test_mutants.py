"""The list of faults keeps up with the code that they change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tests.mutants import ROOT, Fault, read_faults

FAULTS = read_faults()
LEAST = 60


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text("utf-8")


def mistakes_of(fault: Fault) -> Iterator[str]:
    """What is wrong with an entry of the list."""
    if (times := text_of(fault.file).count(fault.old)) != 1:
        yield f"its file has the line {times} times"
    if "\n" in fault.old.strip():
        yield "it changes more than a line"
    if fault.new == fault.old:
        yield "it changes nothing"
    for test in fault.tests:
        file, name = re.split(r"::|\[", test)[:2]
        if not re.search(rf"^(def {name}\(|{name} = )", text_of(file), re.M):
            yield f"there is no test {test}"


def test_there_are_enough_faults() -> None:
    assert len(set(FAULTS)) == len(FAULTS) >= LEAST


def test_each_fault_changes_one_line_of_today() -> None:
    mistakes = {str(fault): [*mistakes_of(fault)] for fault in FAULTS}
    assert not {fault: wrong for fault, wrong in mistakes.items() if wrong}
