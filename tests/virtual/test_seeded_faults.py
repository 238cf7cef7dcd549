"""Faults in programs written by hand: each is reported, in words that name it."""

from __future__ import annotations

import pytest
import torch

from attn_graph.testing.gpu import Fault
from tests.support.ptx_bodies import BODIES, HERE
from tests.support.ptx_faults import FAULTS, SURVIVORS
from tests.support.ptx_programs import run_ptx

ROWS = [(name, *row) for name, rows in FAULTS.items() for row in rows]
ROOM = 2**20
KEPT = [(name, *row) for name, rows in SURVIVORS.items() for row in rows]


def run(name: str, old: str = "", new: str = "", seed: int | None = None) -> set[str]:
    """The notes of a program, with a statement in another's place."""
    body = BODIES[name]
    assert old in body.text, old
    text = body.text.replace(old, f"{old} {new[1:]}" if new[:1] == "+" else new, 1)
    x, out = torch.zeros(2, ROOM)  # far apart, so that a wrong address is in a gap
    tensors = {"x": x.clone()[:256].view(16, 16), "out": out.clone()[:512]}
    given = {"threads": body.threads, "programs": body.programs, "shared": 16384, "seed": seed}
    return run_ptx(HERE + text, tensors, boxes={"x": (2, 16)}, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BODIES)
def test_a_program_without_a_fault_is_clean_in_any_order(name: str) -> None:
    for seed in (None, 1, 2, 3):
        assert not run(name, seed=seed)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row)[:150])
def test_a_seeded_fault_is_reported(row: tuple[str, str, str, str]) -> None:
    name, old, new, words = row
    form = words.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(Fault, match=form):  # unnamed: its traceback would keep the memory
        run(name, old, new)


@pytest.mark.parametrize("row", KEPT, ids=lambda row: "-".join(row)[:150])
def test_an_edit_without_a_fault_is_clean(row: tuple[str, str, str, str]) -> None:
    name, old, new, _ = row
    assert not run(name, old, new)


def test_there_are_200_seeded_faults() -> None:
    assert len(ROWS) >= 200
    assert len({*ROWS}) == len(ROWS)
