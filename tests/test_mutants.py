"""The list of faults keeps up with the code that they change."""

from __future__ import annotations

import re

import pytest

from tests.mutants import ROOT, Fault, read_faults

FAULTS = read_faults()
LEAST = 60


def test_there_are_enough_faults() -> None:
    assert len(set(FAULTS)) == len(FAULTS) >= LEAST


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.file}-{f.new.strip()[:24]}")
def test_a_fault_changes_one_line_of_today(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text("utf-8")
    assert text.count(fault.old) == 1
    assert "\n" not in fault.old.strip()
    assert fault.new != fault.old
    for test in fault.tests:
        file, name = re.split("::|\\[", test)[:2]
        assert re.search(rf"^(def {name}\(|{name} = )", (ROOT / file).read_text("utf-8"), re.M)
